"""Put together, in a folder of its own, what a push sends: the checkpoint and all that goes along with it."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard, hf_hub_download, snapshot_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError
from transformers import AutoTokenizer

from hf_drafthead.hub_upload.preflight import family_of, files_of, find_base, tensors_of
from hf_drafthead.modeling import DraftHeadPreTrainedModel
from hf_drafthead.modeling.base_model import locate_base
from hf_drafthead.modeling.checkpoint import INDEX

CARD = "README.md"
SHARD = "50GB"  # as in transformers
# What a training and its measurements leave beside the weights; the pictures are drawn again with the card.
FACTS = ["training_summary.json", "evaluation*.json", "LICENSE*", "NOTICE*"]
TOKENIZER = ["tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "spiece.model"]
TOKENIZER += ["chat_template*", "additional_chat_templates/*"]
# What a tokenizer config says about where it was loaded from here.
OF_THIS_PLACE = ("is_local", "local_files_only", "name_or_path", "cache_dir", "token", "_commit_hash")


def stage_model(
    model: DraftHeadPreTrainedModel,
    target: Path,
    *,
    include_base: bool = False,
    max_shard_size: int | str = SHARD,
    token: str | bool | None = None,
) -> list[str]:
    """Save a model, and beside it what belongs to these very heads in the place where they were loaded from.

    Args:
        model: heads and base.
        target: an empty folder.
        include_base: save the base too.
        max_shard_size: as in `save_pretrained`.
        token: as in huggingface_hub.

    Returns:
        What was left out, and why.
    """
    model.save_pretrained(target, include_base=include_base, max_shard_size=max_shard_size)
    notes = []
    source = _source(model, token)
    if source is not None:
        if _same_heads(source, target):
            _copy(source, target, [*FACTS, CARD])
        else:
            _copy(source, target, ["LICENSE*", "NOTICE*"])
            notes.append(f"figures in {str(source)!r} are of other heads than these, and stay there")
        _copy(source, target, TOKENIZER)
    return notes + add_tokenizer(target, str(model.base.name_or_path), model.config.base_model_revision, token)


def stage_folder(
    folder: Path,
    target: Path,
    *,
    base: str | None = None,
    include_base: bool = False,
    max_shard_size: int | str = SHARD,
    token: str | bool | None = None,
) -> list[str]:
    """The files of a checkpoint's folder, which itself stays as it is.

    Args:
        folder: of the checkpoint.
        target: an empty folder.
        base: Hub id of the base, to be written into the config.
        include_base: load the base, and save it with the heads.
        max_shard_size: as in `save_pretrained`, with `include_base`.
        token: as in huggingface_hub.

    Returns:
        What is not there, and why.
    """
    family = family_of(folder)
    config = family.config_class.from_pretrained(folder)
    files = files_of(folder)
    if include_base and not config.base_included:
        model: Any = family.from_pretrained(folder, dtype="auto", token=token)
        model.save_pretrained(target, include_base=True, max_shard_size=max_shard_size)
        files = {name: path for name, path in files.items() if not _is_weights(name)}
    for name, path in files.items():
        copy = target / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if _is_weights(name) and path.suffix == ".safetensors":
            copy.symlink_to(path.resolve())  # gigabytes: read from where they are
        elif not copy.exists():
            shutil.copyfile(path, copy)
    if base is not None:
        # What the heads were trained on may have lain elsewhere; from now on it is this commit that they are loaded on.
        found, _ = find_base(base, None, token)
        commit = None if found is None else found.sha
        _edit_json(target / "config.json", base_model_name_or_path=base, base_model_revision=commit)
        return add_tokenizer(target, base, commit, token)
    if config.base_included:
        return add_tokenizer(target, None, None, token)
    if any((target / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        return add_tokenizer(target, None, None, token)
    return add_tokenizer(target, locate_base(config, str(folder)), config.base_model_revision, token)


def add_tokenizer(target: Path, base: str | None, revision: str | None, token: str | bool | None) -> list[str]:
    """The base's tokenizer, if the folder has none.

    Returns:
        That there is none, if so.
    """
    if not any((target / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        try:
            where = {} if base is None or os.path.isdir(base) else {"revision": revision, "token": token}
            AutoTokenizer.from_pretrained(base or target, **where).save_pretrained(target)
        except (OSError, ValueError, TypeError, KeyError):
            return ["there is no tokenizer: neither the heads nor their base bring one"]
    if (target / "tokenizer_config.json").is_file():
        _edit_json(target / "tokenizer_config.json", **dict.fromkeys(OF_THIS_PLACE))
    return []


def published_card(target: Path, repo_id: str, revision: str | None, token: str | bool | None) -> None:
    """The card that the repository has already, so that what people wrote there survives; unless one is here."""
    if (target / CARD).is_file():
        return
    try:
        found = hf_hub_download(repo_id, CARD, revision=revision, token=token)
    except (EntryNotFoundError, HfHubHTTPError):
        return
    shutil.copyfile(found, target / CARD)


def add_tags(target: Path, tags: list[str] | None) -> None:
    """Add tags to the card, after those that it has."""
    if not tags:
        return
    card = ModelCard.load(target / CARD)
    card.data.tags = [*(card.data.tags or []), *(tag for tag in tags if tag not in (card.data.tags or []))]
    card.save(target / CARD)


def _source(model: DraftHeadPreTrainedModel, token: str | bool | None) -> Path | None:
    """Where the heads were loaded from: a folder, or their files from the Hub."""
    name = str(model.name_or_path or "")
    if not name:
        return None
    if os.path.isdir(name):
        return Path(name) if (Path(name) / "config.json").is_file() else None
    wanted = ["config.json", "model*.safetensors", INDEX, CARD, *FACTS, *TOKENIZER]
    try:
        return Path(snapshot_download(name, token=token, allow_patterns=wanted))
    except (OSError, ValueError):
        return None


def _same_heads(source: Path, target: Path) -> bool:
    """Whether the heads that were saved are those that lie where they were loaded from, up to their type."""
    try:
        before = dict(tensors_of(source))
    except OSError:
        return False
    return all(
        name in before and before[name].shape == tensor.shape and torch.equal(before[name].to(tensor.dtype), tensor)
        for name, tensor in tensors_of(target)
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


def _edit_json(path: Path, **fields: Any) -> None:
    """Set fields; None removes one."""
    before = json.loads(path.read_text(encoding="utf-8"))
    after = {name: value for name, value in (before | fields).items() if name not in fields or value is not None}
    if after != before:
        path.write_text(json.dumps(after, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
