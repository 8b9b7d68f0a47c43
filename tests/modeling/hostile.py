"""Checkpoints that nobody should be able to harm a user with: each changes a good one, and is refused in one line."""

import contextlib
import io
import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from hf_drafthead.cli import main
from hf_drafthead.modeling import MedusaForCausalLM
from tests.bases import tiny_base

Change = Callable[[Path], Any]
GOOD = ("heads", "shards", "whole", "adapter")


def good_checkpoints(folder: Path) -> None:
    """Under `folder`: the base, and its heads in one file, in several, with their base, and with an adapter."""
    tiny_base().save_pretrained(folder / "base")
    model = MedusaForCausalLM.from_base(folder / "base", num_draft_heads=2)
    model.save_pretrained(folder / "heads")
    model.save_pretrained(folder / "shards", max_shard_size="20KB")
    model.save_pretrained(folder / "whole", include_base=True)
    shutil.copytree(folder / "heads", folder / "adapter")
    tiny_adapter(folder / "adapter")


def tiny_adapter(folder: Path) -> None:
    model = get_peft_model(MedusaForCausalLM.from_pretrained(folder), LoraConfig(r=2, target_modules=["q_proj"]))
    model.save_pretrained(folder)


def config(**changes: Any) -> Change:
    """Fields of config.json; `base_config__hidden_size` for those of the base."""

    def change(folder: Path) -> None:
        file = folder / "config.json"
        fields = json.loads(file.read_text())
        for name, value in changes.items():
            place, inner = (fields["base_config"], name[13:]) if name.startswith("base_config__") else (fields, name)
            place[inner] = value
        file.write_text(json.dumps(fields))

    return change


def settings(**fields: Any) -> Change:
    """Fields of generation_config.json; a function is called for its value where the file is written."""

    def change(folder: Path) -> None:
        written = json.dumps(fields, default=lambda make: make())
        (folder / "generation_config.json").write_text(written)

    return change


def text(name: str, content: str) -> Change:
    return lambda folder: (folder / name).write_text(content)


def weights(header: Any, data: bytes = b"", length: int | None = None) -> Change:
    """A safetensors file of this header: as JSON, as bytes, or a function that makes one where the file is written."""

    def change(folder: Path) -> None:
        head = header() if callable(header) else header
        head = head if isinstance(head, bytes) else json.dumps(head).encode()
        (folder / "model.safetensors").write_bytes(
            struct.pack("<Q", len(head) if length is None else length) + head + data
        )

    return change


def tensor(start: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def index(**fields: Any) -> Change:
    """Fields of model.safetensors.index.json; None drops one."""

    def change(folder: Path) -> None:
        file = folder / "model.safetensors.index.json"
        changed = json.loads(file.read_text()) | fields
        file.write_text(json.dumps({name: value for name, value in changed.items() if value is not None}))

    return change


def all_in(shard: Any) -> Change:
    """Every tensor in one shard of this name."""

    def change(folder: Path) -> None:
        names = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
        index(weight_map=dict.fromkeys(names, shard))(folder)

    return change


def tensors(**changes: torch.Tensor | None) -> Change:
    """Tensors of the file of weights, `bias` one of the heads'; None drops one."""

    def change(folder: Path) -> None:
        file = folder / "model.safetensors"
        stored = load_file(file) | {BIAS if name == "bias" else name: value for name, value in changes.items()}
        save_file({name: value for name, value in stored.items() if value is not None}, file)

    return change


def without(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def first_shard_gone(folder: Path) -> None:
    next(folder.glob("*-00001-of-*")).unlink()


def pickled_adapter(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


def cut_off(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


BIAS = "drafter.blocks.0.bias"
UNREADABLE = "is not a readable safetensors file (SafetensorError: "
NO_JSON = "is not readable JSON ("

# of each good checkpoint what is done to it, and what the message says
HEADS: dict[str, tuple[Change, str]] = {
    "a tensor too few": (tensors(bias=None), f"lacks the tensor '{BIAS}', but its config asks for floating-point num"),
    "a tensor too many": (tensors(x=torch.zeros(1)), "numbers [1], but its config asks for none: "),
    "another shape": (tensors(bias=torch.zeros(2, 31)), "numbers [2, 31], but its config asks for floating-point num"),
    "whole numbers": (tensors(bias=torch.zeros(2, 32).int()), f"has '{BIAS}' as int32 [2, 32], but its config asks"),
    "more heads": (config(num_draft_heads=3), "[2, 32, 32], but its config asks for floating-point numbers [3, 32, "),
    "no weights": (without("model.safetensors"), "holds no model.safetensors ("),
    "no such base": (
        config(base_model_name_or_path="../gone"),
        "/gone' of '{}' was not found (there is no such folder): pass base_model= (",
    ),
    "a base not in the cache": (
        config(base_model_name_or_path="org/none"),
        "the base 'org/none' of '{}' cannot be read (",
    ),
    "no name of a base": (config(base_model_name_or_path=None), "' does not say which base it was trained for: "),
    "a million heads": (config(num_draft_heads=10**6), "num_draft_heads is 1000000: expected a whole number from 1"),
    "heads as text": (config(num_draft_heads="x" * 10**5), "num_draft_heads is 'xxx"),
    "a billion layers": (config(base_config__num_hidden_layers=10**9), "has num_hidden_layers 1000000000: expected"),
    "a billion labels": (config(num_labels=10**9), "has num_labels 1000000000: expected at most 65536."),
    "no attention heads": (config(base_config__num_attention_heads=0), "base_config is no config of a 'llama' model"),
    "no hidden size": (config(base_config__hidden_size=0), "base_config has hidden_size 0: expected a whole number"),
    "no vocabulary": (config(base_config__vocab_size=-1), "base_config has vocab_size -1: expected a whole number"),
    "a width without end": (config(base_config__hidden_size=10**10), "(RuntimeError: Storage size calculation"),
    "a number as base": (config(base_config=7), "base_config is int: expected the config of a model, or its dict."),
    "no base": (config(base_config=None), "base"),
    "heads on heads": (config(base_config={"model_type": "drafthead_medusa"}), "base_config is of a model with draft"),
    "itself as base": (config(base_model_name_or_path="."), "has draft heads already: give their base"),
    "an unknown type": (config(base_config__dtype="evil"), "module 'torch' has no attribute 'evil'"),
    "labels by name": (config(id2label={"x": 1}), "the config has a field that cannot be used ("),
    "a field for a method": (config(get_text_config=7), "the config has the field 'get_text_config', a name that"),
    "a field for a class": (config(__class__="os"), "the config has the field '__class__', a name that its own"),
    "a method of the base": (config(base_config__to_dict=7), "base_config has the field 'to_dict', a name that"),
    "a number as path": (config(base_model_name_or_path=7), "base_model_name_or_path is 7: expected text, or None."),
    "a list as revision": (config(base_model_revision=[[]]), "base_model_revision is [[]]: expected text, or None."),
    "perhaps a base": (config(base_included="yes"), "base_included is 'yes': expected True or False."),
    "deep fields": (config(extra=json.loads("[" * 60 + "]" * 60)), "nested more than 32 levels deep"),
    "settings as a list": (text("generation_config.json", "[]"), NO_JSON + "it holds [], expected an object"),
    "settings too deep": (text("generation_config.json", "[" * 10**5), NO_JSON + "RecursionError: "),
    "settings too large": (settings(x="x" * 2**21), "bytes, expected at most 2,097,152"),
    "a tree of 10^4 nodes": (settings(draft_tree=lambda: [[n] for n in range(10**4)]), "a tree has more than 4,096 no"),
    "a tree of text": (settings(draft_tree=["00"]), "a tree has the path '00' (str)"),
    "no header": (text("model.safetensors", ""), UNREADABLE),
    "a header cut off": (text("model.safetensors", "abcdefgh{"), UNREADABLE + "its header has"),
    "tensors cut off": (cut_off, UNREADABLE + "Error while deserializing header: incomplete metadata"),
    "a header without end": (weights(b"x", length=2**63), UNREADABLE + "its header has 9,223,372,036,854,775,808"),
    "tensors that overlap": (weights({"a": tensor(0, 4, [1]), "b": tensor(2, 6, [1])}, bytes(6)), UNREADABLE),
    "an empty shape": (weights({BIAS: tensor(0, 0, [0, 2**62])}), "lacks the tensor 'drafter.blocks.0.weight'"),
    "30,000 tensors": (weights(lambda: {f"a{n}": tensor(0, 0, [0]) for n in range(30_000)}), "lacks the tensor 'draft"),
    "10^6 tensors": (
        weights(lambda: {f"a{n}": tensor(0, 0, [0]) for n in range(10**6)}),
        UNREADABLE + "its header has 66,888,890 bytes",
    ),
}
WHOLE: dict[str, tuple[Change, str]] = {
    "a dtype that is none": (config(dtype=False), "dtype is False: expected the name of one, such as bfloat16"),
    "an unknown base inside": (config(base_config__model_type="evil"), "(model type evil); the base at "),
    "a tree of depth 10^5": (settings(draft_tree=[[0] * 10**5]), "or a path of more than 256 ranks: keep the most"),
}
SHARDS: dict[str, tuple[Change, str]] = {
    "a missing shard": (first_shard_gone, "lacks model-00001-of-"),
    "tensors without a map": (index(weight_map=None), "is no index of weights: expected the object 'weight_map'"),
    "a number as shard": (all_in(7), "names the file '7': expected the name of a safetensors file in the same fold"),
    "a shard of another folder": (all_in("../heads/model.safetensors"), "names the file '../heads/model.safet"),
    "a shard of Windows": (all_in("..\\heads\\model.safetensors"), "names the file '..\\\\heads\\\\model.safet"),
    "a shard by its path": (all_in("/etc/model.safetensors"), "names the file '/etc/model.safetensors': exp"),
    "30,000 shards": (index(weight_map={f"a{n}": f"{n}.safetensors" for n in range(30_000)}), "lacks 0.safeten"),
}
ADAPTER: dict[str, tuple[Change, str]] = {
    "an adapter as pickle": (pickled_adapter, "holds an adapter without adapter_model.safetensors; a pickle"),
    "an adapter that is a list": (text("adapter_config.json", "[]"), NO_JSON + "it holds [], expected an obj"),
}
CASES = {
    name: (source, *case)
    for source, cases in zip(("heads", "whole", "shards", "adapter"), (HEADS, WHOLE, SHARDS, ADAPTER))
    for name, case in cases.items()
}
# What transformers reads before it asks this library: AutoModel says it in transformers' words.
CONFIG_FILES: dict[str, tuple[str, str]] = {
    "nothing": ("", NO_JSON),
    "no object": ("[]", NO_JSON + "it holds [], expected an object of fields)"),
    "no model": ("{}", "draft"),
    "a list as model": ('{"model_type": ["drafthead_medusa"]}', "['drafthead_medusa']"),
    "an unknown family": ('{"model_type": "drafthead_evil"}', "evil'"),
    "too deep": ('{"a":' * 10**5, NO_JSON + "RecursionError: "),
    "too large": (
        json.dumps({"model_type": "drafthead_medusa", "x": "x" * 2**21}),
        "bytes, expected at most 2,097,152",
    ),
    "a number too long": (
        '{"model_type":"drafthead_medusa","num_draft_heads":' + "9" * 5000 + "}",
        "Exceeds the limit",
    ),
    "no number": (
        '{"model_type":"drafthead_medusa","num_draft_heads":NaN}',
        "num_draft_heads is nan: expected a whole",
    ),
}


def changed(good: Path, folder: Path, source: str, change: Change = lambda path: None) -> Path:
    """A changed copy of a good checkpoint, as `folder`/copy beside its base."""
    if not (folder / "base").exists():
        (folder / "base").symlink_to(good / "base")
    shutil.copytree(good / source, folder / "copy")
    change(folder / "copy")
    return folder / "copy"


def info(path: Path) -> tuple[int, str]:
    """Exit code of `hf-drafthead info`, and what it wrote to stderr."""
    errors = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
        try:
            main(["info", str(path)])
        except SystemExit as end:
            return int(end.code or 0), errors.getvalue()
    raise AssertionError("main has not ended")
