"""The facts of a card, read from a checkpoint's own files; what they do not say is None or empty, never guessed."""

import json
import os
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import get_local_safetensors_metadata
from huggingface_hub.errors import HFValidationError, NotASafetensorsRepoError, SafetensorsParsingError
from huggingface_hub.utils import validate_repo_id
from safetensors import safe_open
from transformers.configuration_utils import PreTrainedConfig

from hf_drafthead.cards.exactness import FULL_PRECISION
from hf_drafthead.generation.entries import CalibrationKey, heads_hash, tree_of
from hf_drafthead.generation.settings import AUTO, DraftSettings
from hf_drafthead.generation.tree import DraftTree
from hf_drafthead.modeling.config import ABOUT_THE_BASE, MODEL_TYPE_PREFIX, DraftHeadConfig
from hf_drafthead.modeling.families import BY_MODEL_TYPE

SHARED = ABOUT_THE_BASE | {
    "num_draft_heads",
    "architectures",
    "auto_map",
    "model_type",
    "layer_config",
    "transformers_version",
    "use_cache",
}
BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
SHOWN_APART = ("draft_tree", "calibration")
ACCURACY = re.compile(r"head(\d+)_top(\d+)")


@dataclass(frozen=True)
class Facts:
    """One checkpoint.

    family: as the papers name it, `hydra++` and `amphista-alpha` included; base: its Hub id, None where the config
    gives a path; base_named: what the config gives; chat_template: whether the tokenizer in the folder has one; fields:
    what the family's own config says; tree_cut: whether the named tree is deeper than there are heads; accuracies: by
    k, the share of positions where head i has the true token among its best k; accuracy_run: the run they are of, None
    if the training reported them; runs: what `hf-drafthead bench --json` wrote; verifications: what `hf-drafthead
    verify --json` did.
    """

    folder: Path
    family: str
    model_class: str
    base: str | None
    base_named: str | None
    base_revision: str | None
    base_gguf_file: str | None
    base_type: str | None
    base_included: bool
    base_parameters: int | None
    heads: int | None
    fields: dict[str, Any]
    parameters: int
    stored_bytes: int
    stored_dtype: str
    remote_code: bool
    chat_template: bool
    tree: DraftTree | None
    tree_name: str | None
    tree_cut: bool
    dynamic_tree: str | None  # dynamic or auto, where steps have trees of their own
    settings: dict[str, Any]
    calibration: list[dict[str, Any]]
    calibrated: dict[str, DraftTree]  # the different trees of the calibration, by where they are for
    training: dict[str, Any]
    accuracies: dict[int, list[float]]
    accuracy_run: dict[str, Any] | None
    runs: list[dict[str, Any]]
    verifications: list[dict[str, Any]]


def read_facts(folder: Path, model: Any = None) -> Facts:
    """Read a checkpoint's config, generation config, summaries and the headers of its weights.

    Args:
        folder: of the checkpoint.
        model: the same, loaded: it knows the size of its base.

    Raises:
        OSError: there is no checkpoint, or a file of it cannot be read.
        ValueError: it is no draft-head checkpoint, or a file holds something else than it should.
    """
    check_folder(folder)
    if not (folder / "config.json").is_file():
        raise OSError(f"{str(folder)!r} holds no config.json: give the folder of a draft-head checkpoint.")
    config = read_checkpoint_json(folder / "config.json")
    model_type = str(config.get("model_type"))
    if not model_type.startswith(MODEL_TYPE_PREFIX):
        raise ValueError(
            f"{str(folder)!r} holds a {model_type!r} model without draft heads: give a draft-head checkpoint."
        )
    settings = (
        read_checkpoint_json(folder / "generation_config.json") if (folder / "generation_config.json").is_file() else {}
    )
    training = (
        read_checkpoint_json(folder / "training_summary.json") if (folder / "training_summary.json").is_file() else {}
    )
    heads_config = _heads_config(model_type, config)
    family = heads_config.family if heads_config else model_type.removeprefix(MODEL_TYPE_PREFIX)
    sizes, dtypes = _drafter_tensors(folder)
    evaluations = _evaluations(folder, family)
    runs = [each for each in evaluations if "checks" not in each]
    base_config = config.get("base_config") or {}
    named = config.get("base_model_name_or_path")
    heads = config.get("num_draft_heads")
    chosen = settings.get("draft_tree")
    dynamic = AUTO if chosen == AUTO else "dynamic" if chosen == "dynamic" or isinstance(chosen, dict) else None
    usual = SHARED | {field.name for field in fields(PreTrainedConfig)}
    depth = heads_config.max_depth if heads_config else heads
    vocabulary = base_config.get("vocab_size") or 2**31  # without a known one every rank is allowed
    tree = None
    if chosen is not None and not dynamic:
        tree = DraftTree.resolve(chosen, depth, vocabulary)
    tree_name = chosen if isinstance(chosen, str) and not dynamic else None
    measured = min((run for run in runs if _accuracies(run)), key=_plainness, default=None)
    return Facts(
        folder=folder,
        family=family,
        model_class=(config.get("architectures") or [""])[0],
        base=named if is_hub_id(named, folder) else None,
        base_named=named,
        base_revision=config.get("base_model_revision"),
        base_gguf_file=config.get("base_gguf_file"),
        base_type=base_config.get("model_type"),
        base_included=bool(config.get("base_included")),
        base_parameters=_base_parameters(folder, named, model),
        heads=heads,
        fields={name: value for name, value in config.items() if name not in usual},
        parameters=sum(sizes.values()),
        stored_bytes=sum(size * BYTES.get(dtypes[name], 1) for name, size in sizes.items()),
        stored_dtype=", ".join(sorted(set(dtypes.values()))),
        chat_template=_has_chat_template(folder),
        remote_code="AutoModelForCausalLM" in (config.get("auto_map") or {}),
        tree=tree,
        tree_name=tree_name,
        tree_cut=bool(tree and tree_name and DraftTree.from_name(tree_name).max_depth > tree.max_depth),
        dynamic_tree=dynamic,
        settings={name: value for name, value in DraftSettings.stored_in(settings).items() if name not in SHOWN_APART},
        calibration=[
            {**entry, **CalibrationKey.of_entry(entry)._asdict()} for entry in settings.get("calibration") or []
        ],
        calibrated=_calibrated(settings.get("calibration") or [], depth, vocabulary),
        training=training,
        accuracies=_accuracies(measured or {**training, **(training.get("held_out") or {})}),
        accuracy_run=measured,
        runs=runs,
        verifications=[each for each in evaluations if "checks" in each],
    )


def _calibrated(entries: list[dict[str, Any]], depth: int | None, vocabulary: int) -> dict[str, DraftTree]:
    """The different trees of calibration entries; a title names everything that a tree is for.

    Raises:
        ValueError: an entry is damaged.
    """
    titles: dict[DraftTree, list[str]] = {}
    for entry in entries:
        tree = tree_of(entry, depth, vocabulary)
        titles.setdefault(tree, []).append(str(CalibrationKey.of_entry(entry)))
    return {"; ".join(keys): tree for tree, keys in titles.items()}


def check_folder(folder: Path) -> None:
    """Refuse what is no folder: an id on the Hub is none.

    Raises:
        OSError: there is no such folder.
    """
    if not folder.is_dir():
        raise OSError(
            f"there is no folder {str(folder)!r}: give the folder of a draft-head checkpoint; a repository of the Hub "
            "is downloaded first (`hf download org/name --local-dir name`)."
        )


def _has_chat_template(folder: Path) -> bool:
    """Whether the tokenizer in a folder has a chat template, in its config or in a file of its own."""
    config = folder / "tokenizer_config.json"
    beside = (folder / "chat_template.jinja", folder / "chat_template.json")
    return any(file.is_file() for file in beside) or (
        config.is_file() and bool(read_checkpoint_json(config).get("chat_template"))
    )


def is_hub_id(name: str | None, folder: Path) -> bool:
    """Whether the name of a base, as the config in `folder` gives it, can be found by others."""
    if not name or os.path.isdir(folder / name):
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def read_checkpoint_json(path: Path) -> Any:
    """What a JSON file holds: an object, or for an evaluation also a list.

    Raises:
        ValueError: it holds no JSON.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is not JSON ({error}): write it again, or remove it.") from None
    if not isinstance(content, dict) and not path.name.startswith("evaluation"):
        raise ValueError(f"{str(path)!r} holds a {type(content).__name__}, expected an object: write it again.")
    return content


def _heads_config(model_type: str, config: dict[str, Any]) -> DraftHeadConfig | None:
    """The config of the heads, without their base and layers; None for a family that is not known here.

    Raises:
        ValueError: a field is out of range.
    """
    if model_type not in BY_MODEL_TYPE:
        return None
    config_class = BY_MODEL_TYPE[model_type].config_class
    wanted = config_class.heads_fields() - {"layer_config"}
    return config_class(**{name: value for name, value in config.items() if name in wanted})


def _drafter_tensors(folder: Path) -> tuple[dict[str, int], dict[str, str]]:
    """Number of elements and type of every tensor of the heads, by its name."""
    try:
        files = get_local_safetensors_metadata(folder).files_metadata.values()
    except (NotASafetensorsRepoError, SafetensorsParsingError, FileNotFoundError) as error:
        reason = " ".join(str(error).split())
        raise OSError(
            f"the weights in {str(folder)!r} cannot be read ({reason}): save the heads there again."
        ) from None
    tensors = {name: info for file in files for name, info in file.tensors.items() if not name.startswith("base.")}
    return (
        {name: info.parameter_count for name, info in tensors.items()},
        {name: str(info.dtype) for name, info in tensors.items()},
    )


def _base_parameters(folder: Path, named: str | None, model: Any) -> int | None:
    """Parameters of the base, where it is at hand."""
    if model is not None:
        return int(model.base.num_parameters())
    if named is None or not (folder / named).is_dir():
        return None
    try:
        return sum(get_local_safetensors_metadata(folder / named).parameter_count.values())
    except (NotASafetensorsRepoError, SafetensorsParsingError, FileNotFoundError):
        return None


def _plainness(run: dict[str, Any]) -> tuple[bool, bool]:
    """The order in which runs are asked for accuracies: greedy ones first, of these the ones that round least."""
    greedy = (run.get("settings") or {}).get("do_sample") is False
    return not greedy, greedy and run.get("dtype") not in FULL_PRECISION


def _accuracies(figures: dict[str, Any]) -> dict[int, list[float]]:
    """`head0_top1`, `head0_top5`, `head1_top1`, ... as one list of heads for each k."""
    shares = {(int(match[2]), int(match[1])): figures[name] for name in figures if (match := ACCURACY.fullmatch(name))}
    ks = sorted({k for k, _ in shares})
    heads = max((head for _, head in shares), default=-1) + 1
    return {
        k: [shares[k, head] for head in range(heads)] for k in ks if all((k, head) in shares for head in range(heads))
    }


def _evaluations(folder: Path, family: str) -> list[dict[str, Any]]:
    """What the `evaluation*.json` of the folder hold, in the order of the files' names.

    Raises:
        ValueError: a file holds something else, or a run of other heads.
    """
    evaluations = []
    hashes: dict[str | None, str] = {}  # by the type that the weights were loaded in
    for path in sorted(folder.glob("evaluation*.json")):
        content = read_checkpoint_json(path)
        rows = content.get("rows", [content]) if isinstance(content, dict) else content
        for row in rows:
            if not isinstance(row, dict) or not {"tokens_per_step", "speedup", "identical"} & set(row):
                raise ValueError(
                    f"{str(path)!r} holds no figures: expected what `hf-drafthead bench --json` writes; measure again, "
                    "or remove the file."
                )
            if row.get("family", family) != family:
                raise ValueError(
                    f"{str(path)!r} was measured with {row['family']!r} heads, but {str(folder)!r} holds {family!r} "
                    "heads: measure these, or remove the file."
                )
            if row.get("heads_hash") and not _is_of_these(folder, row, hashes):
                raise ValueError(
                    f"{str(path)!r} was measured with other heads (heads_hash {row['heads_hash']}) than "
                    f"{str(folder)!r} holds ({hashes[None]}): measure these, or remove the file."
                )
            evaluations.append(row)
    return evaluations


def _is_of_these(folder: Path, row: dict[str, Any], hashes: dict[str | None, str]) -> bool:
    """Whether a row's heads are the folder's: as they are stored, or rounded to the type that the row names."""
    for name in (None, str(row.get("dtype"))):
        dtype = getattr(torch, name, None) if name else None
        if name and not isinstance(dtype, torch.dtype):
            continue
        if name not in hashes:
            hashes[name] = heads_hash(_drafter_weights(folder), dtype)
        if hashes[name] == row["heads_hash"]:
            return True
    return False


def _drafter_weights(folder: Path) -> list[tuple[str, torch.Tensor]]:
    """Name and tensor of the heads' weights."""
    weights = []
    for file in get_local_safetensors_metadata(folder).files_metadata:
        with safe_open(folder / file, framework="pt") as tensors:
            names = [name for name in tensors.keys() if not name.startswith("base.")]
            weights += [(name, tensors.get_tensor(name)) for name in names]
    return weights
