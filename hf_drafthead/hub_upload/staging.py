"""Collect in a temporary folder what a push sends: the checkpoint, its tokenizer, figures and card."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard, hf_hub_download, snapshot_download
from huggingface_hub.errors import HFValidationError, RemoteEntryNotFoundError, RepositoryNotFoundError

from hf_drafthead.hub_upload.preflight import family_of, files_to_send, find_base, left_behind, stored_tensors
from hf_drafthead.modeling import DraftHeadConfig, DraftHeadPreTrainedModel
from hf_drafthead.modeling.base_model import check_base, fetch_config, is_local, locate_base, refuse_unfit
from hf_drafthead.modeling.checkpoint import HTTP_ERROR, INDEX, why_refused
from hf_drafthead.modeling.families import FAMILIES
from hf_drafthead.modeling.gguf_files import load_tokenizer

CARD = "README.md"
SHARD = "50GB"  # as in transformers
# Files that a training and its measurements write; all other pictures are drawn again with the card.
FACTS = ["training_summary.json", "training.png", "evaluation*.json", "LICENSE*", "NOTICE*"]
TOKENIZER = ["tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "spiece.model"]
TOKENIZER += ["chat_template*", "additional_chat_templates/*"]
# Fields of a tokenizer config that describe this machine.
OF_THIS_PLACE = ("is_local", "local_files_only", "name_or_path", "cache_dir", "token", "_commit_hash")


def stage_model(
    model: DraftHeadPreTrainedModel,
    target: Path,
    *,
    include_base: bool = False,
    max_shard_size: int | str = SHARD,
    token: str | bool | None = None,
) -> list[str]:
    """Save a model, with the files that belong to these heads in the checkpoint that they were loaded from.

    Args:
        model: heads and base.
        target: an empty folder.
        include_base: save the base too.
        max_shard_size: as in `save_pretrained`.
        token: as in huggingface_hub.

    Returns:
        Notes on what was left out, with the reason.
    """
    model.save_pretrained(target, include_base=include_base, include_tokenizer=False, max_shard_size=max_shard_size)
    notes = []
    source = _loaded_from(model, token)
    if source is not None:
        if _same_heads(source, target):
            _copy(source, target, [*FACTS, CARD])
        else:
            _copy(source, target, ["LICENSE*", "NOTICE*"])
            notes.append(f"figures in {str(source)!r} are of other heads than these and were left out")
        _copy(source, target, TOKENIZER)
    base = str(model.base.name_or_path)
    revision = model.config.base_model_revision if base == model.config.base_model_name_or_path else None
    return notes + add_tokenizer(target, base, revision, token, model.config.base_gguf_file)


def stage_folder(
    folder: Path,
    target: Path,
    *,
    base: str | None = None,
    include_base: bool = False,
    max_shard_size: int | str = SHARD,
    token: str | bool | None = None,
) -> list[str]:
    """Copy the files of a checkpoint's folder, which is not changed.

    Args:
        folder: of the checkpoint.
        target: an empty folder.
        base: Hub id of the base, which is written into the config if these heads fit it.
        include_base: load the base, and save it with the heads.
        max_shard_size: as in `save_pretrained`, with `include_base`.
        token: as in huggingface_hub.

    Returns:
        Notes on what was left out or is missing, with the reason.

    Raises:
        OSError: the named base does not exist, or the Hub refuses access to it.
        ValueError: it is no draft-head checkpoint, or its heads do not fit the named base.
    """
    family = family_of(folder)
    config = family.config_class.from_pretrained(folder)
    files = files_to_send(folder)
    if include_base and not config.base_included:
        model: Any = family.from_pretrained(folder, dtype="auto", token=token)
        model.save_pretrained(target, include_base=True, include_tokenizer=False, max_shard_size=max_shard_size)
        files = {name: path for name, path in files.items() if not _is_weights(name)}
    for name, path in files.items():
        copy = target / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if _is_weights(name) and path.suffix == ".safetensors":
            copy.symlink_to(path.resolve())  # gigabytes: read from where they are
        elif not copy.exists():
            shutil.copyfile(path, copy)
    behind = left_behind(folder)
    notes = [f"not uploaded, because it is the state of a training: {', '.join(behind)}"] if behind else []
    if base is not None:
        revision, unchecked = _named_base(config, base, token)
        edit_json(target / "config.json", base_model_name_or_path=base, base_model_revision=revision)
        if base != config.base_model_name_or_path:  # a repository of safetensors, in the place of a file here
            edit_json(target / "config.json", base_gguf_file=None)
        return notes + unchecked + add_tokenizer(target, base, revision, token)
    if config.base_included or _has_tokenizer(target):
        return notes + add_tokenizer(target, None, None, token)
    place = locate_base(config, str(folder))
    return notes + add_tokenizer(target, place, config.base_model_revision, token, config.base_gguf_file)


def _named_base(config: DraftHeadConfig, base: str, token: str | bool | None) -> tuple[str | None, list[str]]:
    """The commit of the base that a user names: the recorded one, or the newest commit of another base.

    Returns:
        The commit; and, if the base is gated for this user, a note that the fit of the heads was not checked.

    Raises:
        OSError: there is no such base, or its config cannot be fetched.
        ValueError: these heads were not made for it.
    """
    recorded = base == config.base_model_name_or_path
    if recorded and config.base_model_revision:
        return config.base_model_revision, []
    found, _ = find_base(base, None, token)
    commit = None if found is None else found.sha
    if recorded:
        return commit, []
    # the base of the training may have been a local copy; from now on the heads are loaded with this one
    try:
        fields = fetch_config(base, commit, token)
    except OSError as error:
        if found is None or not found.gated:
            raise
        return commit, [f"whether the heads fit the base was not checked: {error}".rstrip(".")]
    refuse_unfit(fields, base, loaded=False)
    check_base(config, fields, base)
    return commit, []


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))


def add_tokenizer(
    target: Path, base: str | None, revision: str | None, token: str | bool | None, gguf_file: str | None = None
) -> list[str]:
    """Add the base's tokenizer, if the folder has none.

    Returns:
        A note if there is none, or if it cannot be loaded.

    Raises:
        OSError: the Hub refuses access, so that it is unknown whether there is one.
    """
    if not _has_tokenizer(target):
        on_hub = bool(base) and not os.path.isdir(str(base))
        if base and on_hub and gguf_file is None and not _fetch_tokenizer(base, revision, token):
            return ["there is no tokenizer: neither the heads nor their base bring one"]
        where = {"revision": revision, "token": token} if on_hub else {}
        try:
            load_tokenizer(base or target, gguf_file, **where).save_pretrained(target)
        except (HTTP_ERROR, OSError, ValueError, TypeError, KeyError) as error:
            if not on_hub:
                return ["there is no tokenizer: neither the heads nor their base bring one"]
            said = str(error).strip().partition("\n")[0].rstrip(".")
            return [f"there is no tokenizer: that of the base {base!r} cannot be loaded ({said})"]
    if (target / "tokenizer_config.json").is_file():
        edit_json(target / "tokenizer_config.json", **dict.fromkeys(OF_THIS_PLACE))
    return []


def _fetch_tokenizer(base: str, revision: str | None, token: str | bool | None) -> bool:
    """Fetch a base's tokenizer; returns whether there is one. transformers treats a refused one as missing.

    Raises:
        OSError: the Hub refuses access.
    """
    there = False
    for name in ("tokenizer_config.json", "tokenizer.json"):
        try:
            hf_hub_download(base, name, revision=revision, token=token)
            there = True
        except (RemoteEntryNotFoundError, HFValidationError):  # a path that was one when the base was loaded
            continue
        except (HTTP_ERROR, OSError) as error:
            at = f" at {revision!r}" if revision else ""
            refused = why_refused(error) or str(error).strip().partition("\n")[0].rstrip(".")
            raise OSError(f"the tokenizer of the base {base!r} cannot be fetched{at}: {refused}.") from error
    return there


def published_card(target: Path, published: Path | None) -> list[str]:
    """Merge the repository's card into the folder's, so that text that people wrote in either is kept.

    Args:
        target: a folder, with or without a card.
        published: the repository's card, here; None if it has none.

    Returns:
        Notes on sections that differ: those of the folder are kept.

    Raises:
        ValueError: the metadata of a card cannot be read.
    """
    from hf_drafthead.cards.card import read_card
    from hf_drafthead.cards.sections import merge, sections_of

    path = target / CARD
    if published is None:
        return []
    there = read_card(published)
    data: Any = there.data
    data.tags = [tag for tag in data.tags or [] if tag not in FAMILIES] or None  # of the heads before
    if not path.is_file():
        there.save(path)
        return []
    here = read_card(path)
    own = {section.heading: section.text for section in sections_of(here.text) if not section.ours}
    sections = sections_of(there.text)
    kept = [section.text for section in sections if section.ours or section.heading not in own]
    differ = [
        section.heading or "the text before the first section"
        for section in sections
        if not section.ours and own.get(section.heading, section.text) != section.text
    ]
    here.text = "\n" + merge("\n\n".join(kept), here.text)
    for name, value in there.data.__dict__.items():
        if value is not None and getattr(here.data, name, None) is None:
            setattr(here.data, name, value)
    here.save(path)
    return [f"{heading!r} in the published card differs from the folder's, which is sent" for heading in differ]


def name_for_others(target: Path, repo_id: str, base: str | None) -> None:
    """Replace local paths in measurements by names that others know: of heads, base and files.

    Args:
        target: folder with `evaluation*.json` in it, or none of them.
        repo_id: new name of the heads.
        base: id of their base; None if it is included and has none.
    """
    from hf_drafthead.cards.card import without_folders

    for path in sorted(target.glob("evaluation*.json")):
        try:
            figures = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:  # the card refuses it with a message
            continue
        changed = False
        for name, value, holder in _strings(figures):
            if name in ("model", "base") and is_local(value, target):
                holder[name] = repo_id if name == "model" else base or "its base"
            elif name == "command":
                holder[name] = without_folders(value)
            changed = changed or holder[name] != value
        if changed:
            path.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _strings(value: Any) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Every string in nested dicts and lists, with its key and the dict that holds it."""
    if isinstance(value, dict):
        for name, one in value.items():
            if isinstance(one, str):
                yield name, one, value
    for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _strings(one)


def add_tags(target: Path, tags: list[str] | None) -> None:
    """Add tags to the card, after those that it has."""
    if not tags:
        return
    card = ModelCard.load(target / CARD)
    card.data.tags = [*(card.data.tags or []), *(tag for tag in tags if tag not in (card.data.tags or []))]
    card.save(target / CARD)


def _loaded_from(model: DraftHeadPreTrainedModel, token: str | bool | None) -> Path | None:
    """The checkpoint that the heads were loaded from: a folder, or their files from the Hub; None if unknown.

    Raises:
        OSError: the Hub refuses access to the files.
    """
    name = str(model.name_or_path or "")
    if not name:
        return None
    if os.path.isdir(name):
        return Path(name) if (Path(name) / "config.json").is_file() else None
    wanted = ["config.json", "model*.safetensors", INDEX, CARD, *FACTS, *TOKENIZER]
    try:
        return Path(snapshot_download(name, revision=model.checkpoint_revision, token=token, allow_patterns=wanted))
    except (HTTP_ERROR, OSError, ValueError) as error:
        refused = why_refused(error)
        if refused is None or isinstance(error, RepositoryNotFoundError):
            return None
        raise OSError(f"what belongs to the heads {name!r} cannot be fetched: {refused}.") from error


def _same_heads(source: Path, target: Path) -> bool:
    """Whether the saved heads equal those of the checkpoint that they were loaded from, apart from the dtype."""
    try:
        before = dict(stored_tensors(source))
    except OSError:
        return False
    return all(
        name in before and before[name].shape == tensor.shape and torch.equal(before[name].to(tensor.dtype), tensor)
        for name, tensor in stored_tensors(target)
        if name.startswith("drafter.")
    )


def _copy(source: Path, target: Path, patterns: list[str]) -> None:
    for pattern in patterns:
        for path in sorted(source.glob(pattern)):
            copy = target / path.relative_to(source)
            if path.is_file() and not copy.exists():
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)


def _is_weights(name: str) -> bool:
    return name.endswith((".safetensors", ".safetensors.index.json"))


def edit_json(path: Path, **fields: Any) -> None:
    """Set fields; None removes one."""
    before = json.loads(path.read_text(encoding="utf-8"))
    after = {name: value for name, value in (before | fields).items() if name not in fields or value is not None}
    if after != before:
        path.write_text(json.dumps(after, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
