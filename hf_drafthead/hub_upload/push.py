"""Publish draft heads: collect their files, check them, and send them in one commit."""

import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils.sha import git_hash, sha_fileobj
from rich.filesize import decimal
from transformers.utils import logging

from hf_drafthead.cards import write_card
from hf_drafthead.cards.facts import check_folder
from hf_drafthead.hub_upload import preflight, staging
from hf_drafthead.hub_upload.destination import Destination, Target, check_destination, look, told
from hf_drafthead.modeling import DraftHeadPreTrainedModel
from hf_drafthead.modeling.base_model import is_local, locate_base
from hf_drafthead.modeling.checkpoint import HTTP_ERROR, read_heads_config
from hf_drafthead.modeling.config import portable
from hf_drafthead.modeling.files import edit_json, first_line
from hf_drafthead.modeling.remote_code import CODE_FILE, code_of, code_references

logger = logging.get_logger(__name__)

# Files that hold the weights, and figures that were measured with them; all others belong to the repository's owner.
WEIGHT_FILES = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")
FIGURES = re.compile(r"training_summary\.json|evaluation[^/]*\.json|training\.png|head_accuracies\.png|tree\.png")


@dataclass
class Push:
    """What is to be sent, after every check has passed.

    Attributes:
        repo_id, folder: destination, and where the files are until the push is made.
        sizes: bytes of every file by its path.
        states: new, changed or unchanged against what the repository holds, by path; removed for weights and
            figures that this push replaces; empty where that could not be asked.
        notes: for the user.
        refused: why the Hub would not get these files; None if it would, and of a push that was made.
        commit, committed: answer of the Hub, None before it is sent; False if nothing had changed.
    """

    repo_id: str
    folder: Path
    sizes: dict[str, int]
    states: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    refused: str | None = None
    commit: CommitInfo | None = None
    committed: bool = False

    @property
    def total(self) -> int:
        """Bytes of all files."""
        return sum(self.sizes.values())

    @property
    def names(self) -> list[str]:
        """The paths of all files, those that are removed last."""
        return list(self.sizes | self.states)

    def lines(self) -> list[str]:
        """What was sent, or would be sent: a line per file, notes, and the address."""
        wide, sizes = max(map(len, self.names)), {name: decimal(size) for name, size in self.sizes.items()}
        lines = [f"{name:<{wide}} {sizes.get(name, '-'):>10}  {self.states.get(name, '')}" for name in self.names]
        lines.append(f"{'':<{wide}} {decimal(self.total):>10}  in {len(self.sizes)} files for {self.repo_id}")
        lines += [f"note: {note}" for note in self.notes]
        if self.refused is not None:
            lines.append(f"a push would be refused: {self.refused}")
        if self.commit is None:
            lines.append("dry run: nothing was sent")
        elif not self.committed:
            lines.append("nothing has changed: no commit was made")
        else:
            lines.append(self.commit.pr_url or self.commit.commit_url)
        return [line.rstrip() for line in lines]

    def to_json(self) -> dict[str, Any]:
        """Repository, files with size and state, notes and the commit's address."""
        return {
            "repo_id": self.repo_id,
            "files": [
                {"path": name, "bytes": self.sizes.get(name), "state": self.states.get(name)} for name in self.names
            ],
            "bytes": self.total,
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
        ValueError: a check failed, so that others could not use it.
    """
    with _staged(target, target.repo_id) as folder, told(target):
        notes = staging.stage_model(model, folder, target)
        push = _push(folder, target, notes, shown=target.repo_id, model=model)
    for note in push.notes:  # who calls push_to_hub gets the commit only
        logger.warning(note)
    return push


def push_folder(
    folder: str | os.PathLike,
    target: Target,
    *,
    base: str | None = None,
    dry_run: bool = False,
    to_folder: str | os.PathLike | None = None,
) -> Push:
    """Push the folder of a checkpoint, which is not changed.

    Args:
        folder: as `save_pretrained` wrote it.
        target: destination.
        base: Hub id of the base, if the folder names a local one.
        dry_run: check and compare only; nothing is sent.
        to_folder: write the files into this new folder, and send nothing.

    Raises:
        OSError: there is no such folder, the Hub refuses it, or cannot be reached.
        ValueError: a check failed, so that others could not use it.
    """
    source = Path(folder)
    check_folder(source)
    if to_folder is not None and os.path.exists(to_folder):
        raise OSError(f"{os.fspath(to_folder)!r} is there already: name a folder that is not.")
    preflight.check_files(source)
    with _staged(target, str(source)) as staged, told(target):
        notes = staging.stage_folder(source, staged, target, base)
        done = _push(staged, target, notes, shown=str(source), dry_run=dry_run or to_folder is not None)
        if to_folder is not None:
            _write_files(staged, source, Path(to_folder))
        return done


def _push(
    folder: Path,
    target: Target,
    notes: list[str],
    *,
    shown: str,
    model: DraftHeadPreTrainedModel | None = None,
    dry_run: bool = False,
) -> Push:
    config = read_heads_config(str(folder))
    base = config.base_model_name_or_path
    if config.base_included and base and is_local(base, folder):
        config.base_model_name_or_path = None
        edit_json(folder / "config.json", base_model_name_or_path=None, base_model_revision=None)
    there, unseen = _look(target, dry_run)
    check_destination(there, target, config.base_model_name_or_path)
    preflight.check_modules(config)
    refused = None
    try:
        notes = notes + unseen + preflight.check_public_base(config, folder, target.token)
    except ValueError as error:  # others could not load it; it can be looked at all the same
        if not dry_run:
            raise
        refused = str(error)
    preflight.check_weights(folder, None if model is None else model.state_dict())
    # a converted checkpoint may be without it, and older ones have more
    (folder / CODE_FILE).write_text(code_of(type(config)), encoding="utf-8")
    edit_json(folder / "config.json", auto_map=code_references(type(config)))
    notes += staging.published_card(folder, there.fetch(staging.CARD))
    staging.name_for_others(folder, there.repo_id, config.base_model_name_or_path)
    write_card(folder, model, repo_id=there.repo_id, license=target.license)
    staging.add_tags(folder, target.tags)
    try:
        preflight.check_card(folder, shown)
    except ValueError as error:
        if not dry_run:
            raise
        refused = refused or str(error)
    preflight.check_files(folder)
    files, _ = preflight.sort_files(folder)
    if stale := sorted(name for name in _replaced(there.files, files) if FIGURES.fullmatch(name)):
        notes.append(f"removed from the repository, because they belong to earlier heads: {', '.join(stale)}")
    push = Push(there.repo_id, folder, {name: path.stat().st_size for name, path in files.items()}, {}, notes, refused)
    if dry_run:
        push.states = {} if unseen else _compare(files, there)
        return push
    with told(target, sending=True):
        push.commit, push.committed = _send(files, target, there)
    return push


def _write_files(staged: Path, source: Path, folder: Path) -> None:
    """Copy the files of a push to a folder; the path of a local base is written anew, as seen from there."""
    config = read_heads_config(str(staged))
    base = config.base_model_name_or_path
    shutil.copytree(staged, folder)
    if base and not config.base_included and is_local(base, source):
        place = portable(locate_base(config, str(source)), folder)
        edit_json(folder / "config.json", base_model_name_or_path=place)


def _look(target: Target, dry_run: bool) -> tuple[Destination, list[str]]:
    """The repository as it is; a dry run shows the folder even if the Hub cannot be reached, and notes that."""
    try:
        return look(target), []
    except (HTTP_ERROR, OSError) as error:
        if not dry_run or (isinstance(error, HfHubHTTPError) and error.response.status_code < 500):
            raise
        return Destination(target.repo_id), [f"{target.repo_id!r} could not be read: {first_line(error)}"]


def _send(files: dict[str, Path], target: Target, there: Destination) -> tuple[CommitInfo, bool]:
    """One commit with these files, without weights or figures of earlier heads; also returns whether it was made."""
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
    before = api.model_info(repo_id, revision=target.revision)
    on_hub = [file.rfilename for file in before.siblings or []]
    operations: list[Any] = [CommitOperationAdd(name, str(path)) for name, path in files.items()]
    operations += [CommitOperationDelete(name) for name in _replaced(on_hub, files)]
    logger.info(f"pushing {len(files)} files to {repo_id}: {', '.join(files)}")
    commit = api.create_commit(
        repo_id,
        operations,
        commit_message=target.commit_message or "Upload draft heads",
        commit_description=target.commit_description,
        revision=target.revision,
        create_pr=target.create_pr,
    )
    return commit, commit.oid != before.sha


def _replaced(on_hub: Iterable[str], files: dict[str, Path]) -> list[str]:
    """Weights and figures on the Hub that are not sent again: they would be mistaken for those of the new heads."""
    return [name for name in on_hub if name not in files and (WEIGHT_FILES.fullmatch(name) or FIGURES.fullmatch(name))]


def _compare(files: dict[str, Path], destination: Destination) -> dict[str, str]:
    """How each file differs from the repository's."""
    info, listed = destination.info, []
    if info is not None:
        listed = list(HfApi(token=destination.token).list_repo_tree(info.id, recursive=True, revision=info.sha))
    there = {entry.path: entry for entry in listed if isinstance(entry, RepoFile)}
    states = {}
    for name, path in files.items():
        if name not in there:
            states[name] = "new"
            continue
        large = there[name].lfs
        if large is not None:
            with path.open("rb") as content:
                same = sha_fileobj(content).hex() == large.sha256
        else:
            same = git_hash(path.read_bytes()) == there[name].blob_id
        states[name] = "unchanged" if same else "changed"
    return states | dict.fromkeys(_replaced(there, files), "removed")


@contextmanager
def _staged(target: Target, shown: str) -> Iterator[Path]:
    """An empty temporary folder with the repository's name; error messages name what the user gave in its place."""
    with tempfile.TemporaryDirectory(prefix="hf-drafthead-") as place:
        folder = Path(place) / target.repo_id.rpartition("/")[2]
        folder.mkdir()
        try:
            yield folder
        except (OSError, ValueError) as error:
            if type(error) not in (OSError, ValueError) or str(folder) not in str(error):
                raise
            raise type(error)(str(error).replace(str(folder), shown)) from error
