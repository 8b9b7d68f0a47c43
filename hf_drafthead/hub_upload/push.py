"""Publish draft heads: collect their files, look at them, and send them in one commit."""

import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import validate_repo_id
from rich.filesize import decimal
from transformers.utils import logging

from hf_drafthead.cards import missing, write_card
from hf_drafthead.cards.facts import check_folder
from hf_drafthead.hub_upload import contents, staging
from hf_drafthead.hub_upload.destination import Destination, Target, check_destination, look, told
from hf_drafthead.modeling import DraftHeadPreTrainedModel
from hf_drafthead.modeling.base_model import outdated
from hf_drafthead.modeling.config import BASE_FOLDER
from hf_drafthead.modeling.files import edit_json, is_local
from hf_drafthead.modeling.loading import read_heads_config
from hf_drafthead.modeling.remote_code import CODE_FILE, code_of, code_references

logger = logging.get_logger(__name__)

# Measured with earlier weights, which go with them. All other files belong to the repository's owner.
FIGURES = re.compile(r"training_summary\.json|evaluation[^/]*\.json|training\.png|head_accuracies\.png|tree\.png")


@dataclass
class Push:
    """What is to be sent, after every check has passed.

    Attributes:
        repo_id: destination.
        sizes: bytes of every file by its path.
        removed: weights and figures in the repository that this push replaces.
        notes: for the user.
        refused: why the Hub would not get these files; None if it would, and of a push that was made.
        commit, committed: answer of the Hub, None before it is sent; False if nothing had changed.
    """

    repo_id: str
    sizes: dict[str, int]
    removed: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    refused: str | None = None
    commit: CommitInfo | None = None
    committed: bool = False

    def lines(self) -> list[str]:
        """What was sent, or would be sent: a line per file, notes, and the address."""
        shown = {name: decimal(size) for name, size in self.sizes.items()} | dict.fromkeys(self.removed, "removed")
        total = decimal(sum(self.sizes.values()))
        wide = max(map(len, shown))
        lines = [f"{name:<{wide}} {size:>10}" for name, size in shown.items()]
        lines.append(f"{'':<{wide}} {total:>10}  in {len(self.sizes)} files for {self.repo_id}")
        lines += [f"note: {note}" for note in self.notes]
        if self.refused is not None:
            lines.append(f"a push would be refused: {self.refused}")
        if self.commit is None:
            lines.append("dry run: nothing was sent")
        elif not self.committed:
            lines.append("nothing has changed: no commit was made")
        else:
            lines.append(self.commit.pr_url or self.commit.commit_url)
        return lines

    def to_json(self) -> dict[str, Any]:
        """Repository, files with their sizes, notes and the commit's address."""
        return {
            "repo_id": self.repo_id,
            "files": [{"path": name, "bytes": size} for name, size in self.sizes.items()],
            "removed": self.removed,
            "notes": self.notes,
            "refused": self.refused,
            "committed": self.committed,
            "commit": self.commit and self.commit.commit_url,
            "pull_request": self.commit and self.commit.pr_url,
        }


def push_model(model: DraftHeadPreTrainedModel, target: Target) -> Push:
    """Push a loaded model; the tokenizer and the figures come from the checkpoint that its heads were loaded from.

    Raises:
        OSError: the Hub refuses it, or cannot be reached.
        ValueError: others could not use it.
    """
    with _staged(target, target.repo_id) as folder, told(target):
        notes = staging.stage_model(model, folder, target)
        push = _push(folder, target, notes, shown=target.repo_id)
    for note in push.notes:  # who calls push_to_hub gets the commit only
        logger.warning(note)
    return push


def push_folder(folder: str | os.PathLike, target: Target, *, base: str | None = None, dry_run: bool = False) -> Push:
    """Push the folder of a checkpoint, which is not changed.

    Args:
        folder: as `save_pretrained` wrote it.
        target: destination.
        base: Hub id of the base, if the folder names a local one.
        dry_run: check only; nothing is sent.

    Raises:
        OSError: there is no such folder, the Hub refuses it, or cannot be reached.
        ValueError: others could not use it.
    """
    source = Path(folder)
    check_folder(source)
    contents.check_files(source)
    with _staged(target, str(source)) as staged, told(target):
        notes = staging.stage_folder(source, staged, target, base)
        return _push(staged, target, notes, shown=str(source), dry_run=dry_run)


def _push(folder: Path, target: Target, notes: list[str], *, shown: str, dry_run: bool = False) -> Push:
    config, refused = read_heads_config(str(folder)), list[ValueError]()
    base = config.base_model_name_or_path
    if config.base_included and base and base != BASE_FOLDER and is_local(base, folder):  # as earlier releases wrote
        config.base_model_name_or_path = base = None
        edit_json(folder / "config.json", base_model_name_or_path=None, base_model_revision=None)
    there = look(target)
    check_destination(there, target, config.base_origin or base)
    contents.check_weights(folder, config)
    try:
        private = target.private if there.info is None else there.info.private
        notes = notes + contents.check_base(config, folder, target.token, bool(private))
    except ValueError as error:  # others could not load it; it can be looked at all the same
        refused.append(error)
    # a converted checkpoint may be without it, and older ones have more
    (folder / CODE_FILE).write_text(code_of(type(config)), encoding="utf-8")
    edit_json(folder / "config.json", auto_map=code_references(type(config)))
    staging.published_card(folder, there.fetch(staging.CARD))
    staging.without_local_paths(folder)
    write_card(folder, repo_id=there.repo_id, license=target.license)
    staging.add_tags(folder, target.tags)
    if lacking := "; ".join(missing(folder)).replace(str(folder), shown):
        advice = "license= and --license of a push write the license"
        refused.append(ValueError(f"the card of {shown!r} is not complete: {lacking} ({advice})."))
    if refused and not dry_run:
        raise refused[0]
    contents.check_files(folder)
    files, _ = contents.sort_files(folder)
    sizes, removed = {name: path.stat().st_size for name, path in files.items()}, _replaced(there.files, files)
    push = Push(there.repo_id, sizes, removed, notes, str(refused[0]) if refused else None)
    if not dry_run:
        push.commit = _send(files, removed, target, there)
        push.committed = there.info is None or push.commit.oid != there.info.sha
    return push


def _send(files: dict[str, Path], removed: list[str], target: Target, there: Destination) -> CommitInfo:
    """One commit; `upload_folder` makes several of a large folder, between which others would find half a model."""
    api = HfApi(token=target.token)
    repo_id = there.repo_id
    if there.info is None:
        repo_id = api.create_repo(repo_id, private=target.private, exist_ok=True).repo_id
    if target.revision is not None and not target.revision.startswith("refs/pr"):
        try:
            api.create_branch(repo_id, branch=target.revision, exist_ok=True)
        except HfHubHTTPError as error:
            # a user who may only open pull requests cannot create a branch; the commit shows whether it exists
            if not (error.response.status_code == 403 and target.create_pr):
                raise
    operations: list[Any] = [CommitOperationAdd(name, str(path)) for name, path in files.items()]
    operations += map(CommitOperationDelete, removed)
    try:
        return api.create_commit(
            repo_id,
            operations,
            commit_message=target.commit_message or "Upload draft heads",
            commit_description=target.commit_description,
            revision=target.revision,
            create_pr=target.create_pr,
            parent_commit=there.info.sha if there.info else None,  # a push since then may have left other weights
        )
    except RuntimeError as error:  # huggingface_hub's word for a file that did not get through
        raise ConnectionError(str(error)) from error


def _replaced(on_hub: Iterable[str], files: dict[str, Path]) -> list[str]:
    """Weights, adapters and figures on the Hub that are not sent again: they would be taken for the new heads'."""
    others = [name for name in on_hub if FIGURES.fullmatch(name) or Path(name).match(contents.ADAPTERS)]
    return outdated(on_hub, files) + [name for name in others if name not in files]


@contextmanager
def _staged(target: Target, shown: str) -> Iterator[Path]:
    """An empty temporary folder with the repository's name; error messages name what the user gave in its place."""
    validate_repo_id(target.repo_id)
    with tempfile.TemporaryDirectory(prefix="hf-drafthead-") as place:
        folder = Path(place) / target.repo_id.rpartition("/")[2]
        folder.mkdir()
        try:
            yield folder
        except (OSError, ValueError) as error:
            if type(error) not in (OSError, ValueError) or str(folder) not in str(error):
                raise
            raise type(error)(str(error).replace(str(folder), shown)) from error
