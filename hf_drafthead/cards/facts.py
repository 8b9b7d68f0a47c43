"""The facts of a card, read from a checkpoint's own files; what they do not say is None or empty, never guessed."""

import functools
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import get_safetensors_metadata
from huggingface_hub.errors import NotASafetensorsRepoError, SafetensorsParsingError

from hf_drafthead.generation.settings import AUTO, DraftSettings
from hf_drafthead.generation.tree import LOOKUP, DraftTree, resolve
from hf_drafthead.modeling.files import (
    HTTP_ERROR,
    checkpoint_files,
    in_one_line,
    is_local,
    open_tensors,
    read_json,
    read_tensors,
)
from hf_drafthead.modeling.loading import read_heads_config
from hf_drafthead.trees.entries import CalibrationKey, heads_hash

FULL_PRECISION = ("float32", "float64")  # the types in which the text has to be the base's own
BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
SHOWN_APART = ("draft_tree", "calibration")


@dataclass(frozen=True)
class Facts:
    """What the files of one checkpoint say."""

    folder: Path
    family: str  # as the papers name it, `hydra++` and `amphista-alpha` included
    config: dict[str, Any]
    base: str | None  # its Hub id, None where the config gives a path
    fields: dict[str, Any]  # what the family's own config says
    parameters: int
    memory: int
    dtype: str
    chat_template: bool  # whether the tokenizer in the folder has one
    tree: DraftTree | None
    draft_tree: Any  # as the generation config names it, also where steps have trees of their own
    settings: dict[str, Any]
    calibration: list[dict[str, Any]]
    training: dict[str, Any]
    runs: list[dict[str, Any]]  # what `hf-drafthead bench --json` wrote
    verifications: list[dict[str, Any]]  # what `hf-drafthead verify --json` did


def read_facts(folder: Path) -> Facts:
    """Read a checkpoint's config, generation config, summaries and the headers of its weights.

    Raises:
        OSError: there is no checkpoint, or a file of it cannot be read.
        ValueError: it is no draft-head checkpoint, or a file holds something else than it should.
    """
    check_folder(folder)
    heads_config = read_heads_config(str(folder))
    config = read_json(folder / "config.json")
    settings, training = (
        read_json(folder / name) if (folder / name).is_file() else {}
        for name in ("generation_config.json", "training_summary.json")
    )
    family, depth = heads_config.family, heads_config.max_depth
    evaluations = _evaluations(folder, family)
    runs = [evaluation for evaluation in evaluations if "checks" not in evaluation]
    named = config.get("base_origin") or config.get("base_model_name_or_path")
    chosen = settings.get("draft_tree")
    shown_fields = heads_config.heads_fields() - {"num_draft_heads", "layer_config"}
    vocabulary = (config.get("base_config") or {}).get("vocab_size") or 2**31  # every rank, where none is known
    tree = static_tree(chosen, depth, vocabulary)
    calibration = settings.get("calibration") or []
    return Facts(
        folder=folder,
        family=family,
        config=config,
        base=named if is_hub_id(named, folder) else None,
        fields={name: value for name, value in config.items() if name in shown_fields},
        **size_of_heads(str(folder)),
        chat_template=_has_chat_template(folder),
        tree=tree,
        draft_tree=chosen,
        settings={name: value for name, value in DraftSettings.stored_in(settings).items() if name not in SHOWN_APART},
        calibration=[{**entry, **CalibrationKey.of_entry(entry)._asdict()} for entry in calibration],
        training=training,
        runs=runs,
        verifications=[evaluation for evaluation in evaluations if "checks" in evaluation],
    )


def static_tree(chosen: Any, depth: int | None, vocabulary: int) -> DraftTree | None:
    """The tree that a generation config names; None where steps have trees of their own, or it names none."""
    tree = None if chosen in (None, AUTO, LOOKUP) else resolve(chosen, depth, vocabulary)
    return tree if isinstance(tree, DraftTree) else None


def check_folder(folder: Path) -> None:
    """Raise an OSError for what is no folder: an id on the Hub is none."""
    if not folder.is_dir():
        raise OSError(
            f"there is no folder {str(folder)!r}: give the folder of a draft-head checkpoint; a repository of the Hub "
            "is downloaded first (`hf download org/name --local-dir name`)."
        )


def _has_chat_template(folder: Path) -> bool:
    """Whether the tokenizer in a folder has a chat template, in its config or in a file of its own."""
    config = folder / "tokenizer_config.json"
    beside = (folder / "chat_template.jinja", folder / "chat_template.json")
    inside = config.is_file() and '"chat_template"' in config.read_text(encoding="utf-8")
    return inside or any(file.is_file() for file in beside)


def is_hub_id(name: str | None, folder: Path) -> bool:
    """Whether the name of a base, as the config in `folder` gives it, can be found by others."""
    return not is_local(name, folder) if name else False


def size_of_heads(name: str) -> dict[str, Any]:
    """`parameters` of the heads, their `memory` in bytes, and `dtype`: the type or types that they are stored in."""
    headers = {key: value for key, value in tensor_headers(name).items() if not key.startswith("base.")}
    sizes = {key: math.prod(shape) for key, (shape, _) in headers.items()}
    weights = {key: dtype for key, (_, dtype) in headers.items() if dtype.startswith(("F", "BF"))}  # no list of tokens
    return {
        "parameters": sum(sizes[key] for key in weights),
        "memory": sum(size * BYTES.get(headers[key][1], 1) for key, size in sizes.items()),
        "dtype": ", ".join(sorted(set(weights.values()))),
    }


def tensor_headers(name: str) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and type of every tensor of a checkpoint, in a folder or on the Hub; OSError: they cannot be read."""
    if not os.path.isdir(name):
        try:
            files = get_safetensors_metadata(name).files_metadata.values()
        except NotASafetensorsRepoError:
            raise OSError(
                f"{name!r} holds no weights as safetensors: a pickle is never opened, for it can run code; ask its "
                "author to save the heads as safetensors."
            ) from None
        except (HTTP_ERROR, SafetensorsParsingError, KeyError, TypeError, AttributeError, ValueError) as error:
            raise OSError(f"the weights of {name!r} cannot be read ({in_one_line(error)}): try again.") from error
        return {key: (tuple(info.shape), str(info.dtype)) for file in files for key, info in file.tensors.items()}
    headers: dict[str, tuple[tuple[int, ...], str]] = {}
    for file in checkpoint_files(name, {}):
        with open_tensors(file) as tensors:
            slices = {key: tensors.get_slice(key) for key in tensors.keys()}
            headers |= {key: (tuple(piece.get_shape()), str(piece.get_dtype())) for key, piece in slices.items()}
    return headers


def _evaluations(folder: Path, family: str) -> list[dict[str, Any]]:
    """What the `evaluation*.json` of the folder hold, by name; a ValueError for anything but runs of these heads."""
    evaluations = []

    @functools.cache
    def hash_in(dtype: torch.dtype | None) -> str:
        tensors = read_tensors(str(folder)).items()
        return heads_hash([pair for pair in tensors if not pair[0].startswith("base.")], dtype)

    for path in sorted(folder.glob("evaluation*.json")):
        content = read_json(path)
        for row in content.get("rows", [content]):
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
            dtype = getattr(torch, str(row.get("dtype")), None)  # the heads as they are stored, or rounded to it
            dtypes = [None, dtype] if isinstance(dtype, torch.dtype) else [None]
            if row.get("heads_hash") and row["heads_hash"] not in map(hash_in, dtypes):
                raise ValueError(
                    f"{str(path)!r} was measured with other heads (heads_hash {row['heads_hash']}) than "
                    f"{str(folder)!r} holds ({hash_in(None)}): measure these, or remove the file."
                )
            evaluations.append(row)
    return evaluations


def counts_in_words(counts: Mapping[str, Any]) -> str:
    """Counts of texts as a sentence without its full stop.

    >>> counts_in_words({"texts": 3, "rounding": 0, "faults": 0})
    'all 3 texts are the same'
    >>> counts_in_words({"texts": 3, "rounding": 1, "faults": 0, "largest_margin": 0.125})
    '2 of 3 texts are the same, 1 differs from a near tie on (largest margin 0.125 in the logits)'
    """
    texts, rounding, faults = counts["texts"], counts["rounding"], counts["faults"]
    same = texts - rounding - faults
    if same == texts:
        return f"all {texts} texts are the same" if texts != 1 else "the text is the same"
    parts = [f"{same} of {texts} texts {'is' if same == 1 else 'are'} the same"]
    if rounding:
        margin = counts.get("largest_margin")
        largest = "not recorded" if margin is None else f"{margin:.3g} in the logits"
        parts.append(f"{_differ(rounding)} from a near tie on (largest margin {largest})")
    if faults:
        parts.append(f"{_differ(faults)} by more than rounding explains")
    return ", ".join(parts)


def _differ(count: int) -> str:
    return f"{count} {'differs' if count == 1 else 'differ'}"
