"""Collect in a temporary folder what a push sends: the checkpoint, its tokenizer, figures and card."""

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, snapshot_download
from huggingface_hub.errors import RepositoryNotFoundError

from hf_drafthead.cards.card import read_card, without_folders
from hf_drafthead.cards.sections import merge, sections_of
from hf_drafthead.hub_upload.contents import ADAPTERS, find_base, sort_files
from hf_drafthead.hub_upload.destination import Target, download
from hf_drafthead.modeling import DraftHeadConfig, DraftHeadPreTrainedModel, base_model
from hf_drafthead.modeling.config import BASE_FOLDER
from hf_drafthead.modeling.families import BY_MODEL_TYPE, FAMILIES
from hf_drafthead.modeling.files import HTTP_ERROR, INDEX, edit_json, full_name, read_tensors, refusing
from hf_drafthead.modeling.loading import read_heads_config

CARD = "README.md"
# Files that a training and its measurements write; all other pictures are drawn again with the card.
FACTS = ["training_summary.json", "evaluation*.json", "LICENSE*", "NOTICE*"]
TOKENIZER = ["tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "spiece.model"]
TOKENIZER += ["chat_template*", "additional_chat_templates/*"]
# Fields of a tokenizer config that describe this machine.
OF_THIS_PLACE = ("is_local", "local_files_only", "name_or_path", "cache_dir", "token", "_commit_hash")


def stage_model(model: DraftHeadPreTrainedModel, folder: Path, target: Target) -> list[str]:
    """Save a model in an empty folder, with files of the checkpoint that its heads came from; notes on the others."""
    how: dict[str, Any] = {"include_base": target.include_base, "max_shard_size": target.max_shard_size}
    model.save_pretrained(folder, **how)
    notes = []
    source = _loaded_from(model, target.token)
    if source is not None:
        if _same_heads(source, folder):
            _copy(source, folder, [*FACTS, CARD])
        else:
            _copy(source, folder, ["LICENSE*", "NOTICE*"])
            notes.append(f"figures in {str(source)!r} are of other heads than these and were left out")
        _copy(source, folder, TOKENIZER)
    base = str(model.base.name_or_path)
    revision = model.config.base_model_revision if base == model.config.base_model_name_or_path else None
    return notes + add_tokenizer(folder, base, revision, target.token, model.config.base_gguf_file)


def stage_folder(source: Path, folder: Path, target: Target, base: str | None = None) -> list[str]:
    """Copy the files of a checkpoint's folder into an empty one, for a base that may be named anew; notes as above."""
    config, token = read_heads_config(str(source)), target.token
    files, behind = sort_files(source)
    former = {path.parent for name, path in files.items() if Path(name).match(ADAPTERS)}  # which the base has no more
    former -= {source / BASE_FOLDER / name for name in config.base_adapters or ()}
    behind += sorted(path.relative_to(source).as_posix() for path in former)
    files = {name: path for name, path in files.items() if path.parent not in former}
    if target.include_base and not config.base_included:
        model: Any = BY_MODEL_TYPE[config.model_type].from_pretrained(source, dtype="auto", token=token)
        model.save_pretrained(folder, include_base=True, max_shard_size=target.max_shard_size)
        files = {name: path for name, path in files.items() if not _is_weights(name)}
    for name, path in files.items():
        copy = folder / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if _is_weights(name) and path.suffix == ".safetensors":
            copy.symlink_to(path.resolve())  # gigabytes: read from where they are
        elif not copy.exists():
            shutil.copyfile(path, copy)
    notes = [f"not uploaded, because others need none of it: {', '.join(behind)}"] if behind else []
    place, revision, gguf_file = None, config.base_model_revision, config.base_gguf_file
    if base is not None:
        if read_heads_config(str(folder)).base_included:
            raise ValueError(
                f"the base lies beside the heads ({BASE_FOLDER}/) and is pushed with them: leave --base out."
            )
        place, revision = base, _named_base(config, base, token)
        edit_json(folder / "config.json", base_model_name_or_path=base, base_model_revision=revision)
        if base != config.base_model_name_or_path:  # a repository of safetensors, in the place of a file here
            edit_json(folder / "config.json", base_gguf_file=None)
        gguf_file = None
    elif not (config.base_included or base_model.has_tokenizer(folder)):
        place = full_name(config.base_model_name_or_path or "", source)
    return notes + add_tokenizer(folder, place, revision, token, gguf_file)


def _named_base(config: DraftHeadConfig, base: str, token: str | bool | None) -> str | None:
    """The commit of the base that a user names: the recorded one, or the newest of another base that the heads fit."""
    recorded = base == config.base_model_name_or_path
    if recorded and config.base_model_revision:
        return config.base_model_revision
    info, _ = find_base(base, None, token)
    commit = None if info is None else info.sha
    if not recorded:  # that of the training may have been a local copy; from now on the heads are loaded with this one
        base_model.refuse_unfit(base_model.fetch_config(base, commit, token), base, config)
    return commit


def add_tokenizer(
    target: Path, base: str | None, revision: str | None, token: str | bool | None, gguf_file: str | None = None
) -> list[str]:
    """Add the base's tokenizer, if the folder has none; a note if there is none, or if it cannot be loaded."""
    hub, notes = {}, []
    if base is not None and not base_model.has_tokenizer(target) and not os.path.isdir(base):
        hub = {"revision": revision or "main", "token": token}
        in_repository = ("tokenizer.json", "tokenizer_config.json")
        if gguf_file is None and not any(download(base, name, revision, token) for name in in_repository):
            base = None
    try:
        if not base_model.copy_tokenizer(base, target, gguf_file, hub):
            notes.append("there is no tokenizer: neither the heads nor their base bring one")
    except ValueError as error:
        notes.append(f"there is no tokenizer: {error}")
    if (target / "tokenizer_config.json").is_file():
        edit_json(target / "tokenizer_config.json", **dict.fromkeys(OF_THIS_PLACE))
    return notes


def published_card(target: Path, published: Path | None) -> None:
    """Merge the repository's card (None: it has none) into the folder's: what people wrote in either is kept.

    Of a section that both have, and of a field of the metadata, the folder's is taken.
    """
    path = target / CARD
    if published is None:
        return
    hub_card = read_card(published)
    data: Any = hub_card.data
    data.tags = [tag for tag in data.tags or [] if tag not in FAMILIES] or None  # of the heads before
    if path.is_file():
        folder_card = read_card(path)
        here = {section.heading for section in sections_of(folder_card.text) if not section.ours}
        there = [part.text for part in sections_of(hub_card.text) if part.ours or part.heading not in here]
        hub_card.text = "\n" + merge("\n\n".join(there), folder_card.text)
        data.__dict__.update({name: value for name, value in vars(folder_card.data).items() if value is not None})
    hub_card.save(path)


def without_local_paths(target: Path) -> None:
    """Take folders of this machine out of the texts in `evaluation*.json`."""

    def named(fields: dict[str, Any]) -> dict[str, Any]:
        return {key: without_folders(value) if isinstance(value, str) else value for key, value in fields.items()}

    for path in target.glob("evaluation*.json"):
        with suppress(ValueError, RecursionError):  # the card refuses it with a message
            figures = json.loads(path.read_text(encoding="utf-8-sig"), object_hook=named)
            path.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def add_tags(target: Path, tags: str | list[str] | None) -> None:
    """Add tags to the card, after those that it has."""
    if tags:
        tags = [tags] if isinstance(tags, str) else tags
        card = ModelCard.load(target / CARD)
        card.data.tags = list(dict.fromkeys([*(card.data.tags or []), *tags]))
        card.save(target / CARD)


def _loaded_from(model: DraftHeadPreTrainedModel, token: str | bool | None) -> Path | None:
    """The checkpoint that the heads were loaded from: a folder, or their files from the Hub; None if unknown."""
    name = str(model.name_or_path or "")
    if not name or os.path.isdir(name):
        return Path(name) if name and (Path(name) / "config.json").is_file() else None
    wanted = ["config.json", "model*.safetensors", INDEX, CARD, *FACTS, *TOKENIZER]
    none = suppress(RepositoryNotFoundError, ValueError)
    with refusing(OSError, f"what belongs to the heads {name!r} cannot be fetched", of=(HTTP_ERROR, OSError)), none:
        return Path(snapshot_download(name, revision=model.checkpoint_revision, token=token, allow_patterns=wanted))
    return None


def _same_heads(source: Path, target: Path) -> bool:
    """Whether the saved heads equal those of the checkpoint that they were loaded from, apart from the dtype."""
    try:
        before = read_tensors(str(source))
    except OSError:
        return False
    heads = {name: tensor for name, tensor in read_tensors(str(target)).items() if name.startswith("drafter.")}
    return all(
        name in before and before[name].shape == tensor.shape and before[name].to(tensor.dtype).equal(tensor)
        for name, tensor in heads.items()
    )


def _copy(source: Path, target: Path, patterns: list[str]) -> None:
    for path in sorted(path for pattern in patterns for path in source.glob(pattern)):
        copy = target / path.relative_to(source)
        if path.is_file() and not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)


def _is_weights(name: str) -> bool:
    return name.endswith((".safetensors", ".safetensors.index.json"))
