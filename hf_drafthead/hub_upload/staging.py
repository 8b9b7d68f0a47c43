"""Collect in a temporary folder what a push sends: the checkpoint, its tokenizer, figures and card."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, snapshot_download
from huggingface_hub.errors import RepositoryNotFoundError

from hf_drafthead.cards.card import read_card, without_folders
from hf_drafthead.cards.sections import merge, sections_of
from hf_drafthead.hub_upload.destination import Target, download
from hf_drafthead.hub_upload.preflight import find_base, same_tensor, sort_files
from hf_drafthead.modeling import DraftHeadConfig, DraftHeadPreTrainedModel, base_model
from hf_drafthead.modeling.checkpoint import HTTP_ERROR, INDEX, read_heads_config, read_tensors, why_refused
from hf_drafthead.modeling.families import BY_MODEL_TYPE, FAMILIES
from hf_drafthead.modeling.files import edit_json

CARD = "README.md"
# Files that a training and its measurements write; all other pictures are drawn again with the card.
FACTS = ["training_summary.json", "training.png", "evaluation*.json", "LICENSE*", "NOTICE*"]
TOKENIZER = ["tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "spiece.model"]
TOKENIZER += ["chat_template*", "additional_chat_templates/*"]
# Fields of a tokenizer config that describe this machine.
OF_THIS_PLACE = ("is_local", "local_files_only", "name_or_path", "cache_dir", "token", "_commit_hash")


def stage_model(model: DraftHeadPreTrainedModel, folder: Path, target: Target) -> list[str]:
    """Save a model in an empty folder, with the files that belong to these heads in the checkpoint that they came from.

    Returns:
        Notes on what was left out, with the reason.
    """
    how: dict[str, Any] = {"include_base": target.include_base, "max_shard_size": target.max_shard_size}
    model.save_pretrained(folder, include_tokenizer=False, **how)
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
    """Copy the files of a checkpoint's folder, which is not changed, into an empty one.

    Args:
        source, folder: from where, and where to.
        target: of the push; the base is loaded, and saved with the heads, if it says so.
        base: Hub id of the base, which is written into the config if these heads fit it.

    Returns:
        Notes on what was left out or is missing, with the reason.
    """
    config, token = read_heads_config(str(source)), target.token
    files, behind = sort_files(source)
    if target.include_base and not config.base_included:
        model: Any = BY_MODEL_TYPE[config.model_type].from_pretrained(source, dtype="auto", token=token)
        model.save_pretrained(folder, include_base=True, include_tokenizer=False, max_shard_size=target.max_shard_size)
        files = {name: path for name, path in files.items() if not _is_weights(name)}
    for name, path in files.items():
        copy = folder / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if _is_weights(name) and path.suffix == ".safetensors":
            copy.symlink_to(path.resolve())  # gigabytes: read from where they are
        elif not copy.exists():
            shutil.copyfile(path, copy)
    notes = [f"not uploaded, because it is the state of a training: {', '.join(behind)}"] if behind else []
    place, revision, gguf_file = None, config.base_model_revision, config.base_gguf_file
    if base is not None:
        place, (revision, unchecked) = base, _named_base(config, base, token)
        notes += unchecked
        edit_json(folder / "config.json", base_model_name_or_path=base, base_model_revision=revision)
        if base != config.base_model_name_or_path:  # a repository of safetensors, in the place of a file here
            edit_json(folder / "config.json", base_gguf_file=None)
        gguf_file = None
    elif not (config.base_included or base_model.has_tokenizer(folder)):
        place = base_model.locate_base(config, str(source))
    return notes + add_tokenizer(folder, place, revision, token, gguf_file)


def _named_base(config: DraftHeadConfig, base: str, token: str | bool | None) -> tuple[str | None, list[str]]:
    """The commit of the base that a user names: the recorded one, or the newest of another base that the heads fit.

    If the base is gated for this user, a note says that the fit was not checked.
    """
    recorded = base == config.base_model_name_or_path
    if recorded and config.base_model_revision:
        return config.base_model_revision, []
    info, _ = find_base(base, None, token)
    commit = None if info is None else info.sha
    if recorded:
        return commit, []
    # the base of the training may have been a local copy; from now on the heads are loaded with this one
    try:
        fields = base_model.fetch_config(base, commit, token)
    except OSError as error:
        if info is None or not info.gated:
            raise
        return commit, [f"whether the heads fit the base was not checked: {error}".rstrip(".")]
    base_model.refuse_unfit(fields, base, loaded=False)
    base_model.check_base(config, fields, base)
    return commit, []


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


def published_card(target: Path, published: Path | None) -> list[str]:
    """Merge the repository's card (None: it has none) into the folder's: text that people wrote in either is kept.

    Returns:
        Notes on sections that differ: those of the folder are kept.
    """
    path = target / CARD
    if published is None:
        return []
    hub_card = read_card(published)
    data: Any = hub_card.data
    data.tags = [tag for tag in data.tags or [] if tag not in FAMILIES] or None  # of the heads before
    if not path.is_file():
        hub_card.save(path)
        return []
    folder_card = read_card(path)
    written_sections = {section.heading: section.text for section in sections_of(folder_card.text) if not section.ours}
    sections = sections_of(hub_card.text)
    hub_texts = [section.text for section in sections if section.ours or section.heading not in written_sections]
    differ = [
        section.heading or "the text before the first section"
        for section in sections
        if not section.ours and written_sections.get(section.heading, section.text) != section.text
    ]
    folder_card.text = "\n" + merge("\n\n".join(hub_texts), folder_card.text)
    for name, value in hub_card.data.__dict__.items():
        if value is not None and getattr(folder_card.data, name, None) is None:
            setattr(folder_card.data, name, value)
    folder_card.save(path)
    return [f"{heading!r} in the published card differs from the folder's, which is sent" for heading in differ]


def name_for_others(target: Path, repo_id: str, base: str | None) -> None:
    """Replace local paths in `evaluation*.json` by names that others know: of heads, base and files."""

    def renamed(fields: dict[str, Any]) -> dict[str, Any]:
        for name, public in (("model", repo_id), ("base", base or "its base")):
            if isinstance(fields.get(name), str) and base_model.is_local(fields[name], target):
                fields[name] = public
        if isinstance(fields.get("command"), str):
            fields["command"] = without_folders(fields["command"])
        return fields

    for path in sorted(target.glob("evaluation*.json")):
        text = path.read_text(encoding="utf-8-sig")
        try:
            figures, before = json.loads(text, object_hook=renamed), json.loads(text)
        except (ValueError, RecursionError):  # the card refuses it with a message
            continue
        if figures != before:
            path.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def add_tags(target: Path, tags: list[str] | None) -> None:
    """Add tags to the card, after those that it has."""
    if not tags:
        return
    card = ModelCard.load(target / CARD)
    card.data.tags = [*(card.data.tags or []), *(tag for tag in tags if tag not in (card.data.tags or []))]
    card.save(target / CARD)


def _loaded_from(model: DraftHeadPreTrainedModel, token: str | bool | None) -> Path | None:
    """The checkpoint that the heads were loaded from: a folder, or their files from the Hub; None if unknown."""
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
        before = read_tensors(str(source))
    except OSError:
        return False
    heads = {name: tensor for name, tensor in read_tensors(str(target)).items() if name.startswith("drafter.")}
    return all(same_tensor(before.get(name), tensor) for name, tensor in heads.items())


def _copy(source: Path, target: Path, patterns: list[str]) -> None:
    for pattern in patterns:
        for path in sorted(source.glob(pattern)):
            copy = target / path.relative_to(source)
            if path.is_file() and not copy.exists():
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)


def _is_weights(name: str) -> bool:
    return name.endswith((".safetensors", ".safetensors.index.json"))
