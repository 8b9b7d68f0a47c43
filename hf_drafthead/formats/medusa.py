"""Medusa heads as FasterDecoding saves them, and as text-generation-inference reads them.

    {k}.{l}.linear.weight [H, H], {k}.{l}.linear.bias [H]     block l of head k
    {k}.{L}.weight [V, H]                                     projection of head k; absent if all use the base's lm_head

in `medusa_lm_head.pt` or `.safetensors`; the names may have `medusa_head.` in front. NVIDIA's variant nests them as
`medusa_heads.{k}.medusa_layers.{l}.linear.*` and `medusa_heads.{k}.lm_head.weight`. config.json has `medusa_num_heads`
and `medusa_num_layers`, which published files have wrong, and `base_model_name_or_path`.

A Medusa 1.0 model is an ordinary sharded model whose files hold the heads as well: the base's own names, and
`medusa_head.{k}.{l}.linear.{weight,bias}`, `medusa_head.{k}.{L}.weight`. config.json is the base's, with the two
numbers. The base was often trained together with its heads: they belong to the weights in these files and to no other.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from hf_drafthead.formats.disk import Source
from hf_drafthead.formats.heads import Heads, Reader, equal, note_difference
from hf_drafthead.formats.layout import Files, Layout, Own, refuse, refuse_own_base, some
from hf_drafthead.modeling import MedusaForCausalLM

PREFIX = "medusa_head."
BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")
PROJECTION = re.compile(r"(\d+)\.(\d+)\.weight")
NVIDIA_BLOCK = re.compile(r"(?:medusa_heads\.)?(\d+)\.medusa_layers\.(\d+)\.linear\.(weight|bias)")
NVIDIA_PROJECTION = re.compile(r"(?:medusa_heads\.)?(\d+)\.lm_head\.weight")


class Medusa(Layout):
    """Heads alone."""

    name = "FasterDecoding Medusa"
    family = MedusaForCausalLM
    targets = ("medusa", "tgi")

    def detect(self, keys: Iterable[str], config: Mapping[str, Any]) -> bool:
        names = {plain(key) for key in keys}
        return all(BLOCK.fullmatch(name) or PROJECTION.fullmatch(name) for name in names) and some(BLOCK.pattern, names)

    def read(self, source: Source, given: Mapping[str, Any]) -> Heads:
        names = {plain(key): key for key in source.tensors}
        reader = Reader(source.name, source.tensors)
        heads = read_heads(reader, names)
        heads.base = source.config.get("base_model_name_or_path")
        note_difference(heads.notes, source.config, "medusa_num_heads", heads.fields["num_draft_heads"])
        note_difference(heads.notes, source.config, "medusa_num_layers", heads.fields["num_layers"])
        reader.finish(self.name)
        return heads

    def write(self, own: Own, target: str, fold_bias: bool = False) -> Files:
        config = own.config
        refuse_own_base(own, target)
        if target == "medusa":
            refuse_untied(own, target)
        if target == "tgi" and config.share_lm_head and config.num_layers != 1:
            refuse(
                own,
                target,
                f"its heads have {config.num_layers} blocks and share the base's lm_head, and the server builds heads "
                "with a shared lm_head of one block only",
                "train heads with num_layers=1 or with share_lm_head=False",
            )
        about = {
            "medusa_num_heads": config.num_draft_heads,
            "medusa_num_layers": config.num_layers,
            "base_model_name_or_path": own.base,
        }
        if own.base is None:
            refuse(
                own, target, "its config names no base, which the target loads by name", "set base_model_name_or_path"
            )
        if target == "tgi":
            # The server takes a folder whose config has no `architectures` for Medusa heads.
            launch = "text-generation-launcher --model-id FOLDER; it runs the best guess of every head, without a tree"
            return Files("medusa_lm_head.safetensors", head_tensors(own), about, [launch])
        if config.share_lm_head:
            about["version"] = "2"
        return Files("medusa_lm_head.pt", head_tensors(own), about)


def plain(key: str) -> str:
    """The key as the first form has it: `{k}.{l}.linear.weight`, and `{k}.lm_head` for NVIDIA's projection."""
    if found := NVIDIA_BLOCK.fullmatch(key):
        return f"{found[1]}.{found[2]}.linear.{found[3]}"
    if found := NVIDIA_PROJECTION.fullmatch(key):
        return f"{found[1]}.999.weight"  # behind all blocks, whatever their number
    return key.removeprefix(PREFIX)


def read_heads(reader: Reader, names: Mapping[str, str]) -> Heads:
    """Medusa heads from tensors.

    Args:
        reader: of the file.
        names: the plain name of each head tensor, and what it is called in the file.

    Raises:
        ValueError: a tensor is missing, or the heads differ in form.
    """
    blocks = [found for name in names if (found := BLOCK.fullmatch(name))]
    projections = {int(found[1]): name for name in names if (found := PROJECTION.fullmatch(name))}
    number = 1 + max(int(found[1]) for found in blocks)
    layers = 1 + max(int(found[2]) for found in blocks)
    hidden_size = reader.tensors[names[blocks[0][0]]].shape[0]
    tensors = {}
    for layer in range(layers):
        for kind, shape in (("weight", (hidden_size, hidden_size)), ("bias", (hidden_size,))):
            keys = [_name_in_file(names, f"{head}.{layer}.linear.{kind}") for head in range(number)]
            tensors[f"blocks.{layer}.{kind}"] = reader.stacked(keys, shape)
    own = bool(projections)
    vocab_size = None
    if own:
        vocab_size = reader.tensors[names[next(iter(projections.values()))]].shape[0]
        for head in range(number):
            key = names[projections[head]] if head in projections else f"{head}.{layers}.weight"
            tensors[f"projections.up.{head}.weight"] = reader.one(key, (vocab_size, hidden_size))
    fields = {"num_draft_heads": number, "num_layers": layers, "share_lm_head": not own}
    heads = Heads(MedusaForCausalLM, fields, tensors, hidden_size, vocab_size, dropped=reader.dropped)
    if layers > 1 and all(
        equal(tensors[f"blocks.{layer}.weight"].parts[head] for layer in range(layers)) for head in range(number)
    ):
        heads.notes.append(
            f"the {layers} blocks of each head are one block applied {layers} times: every place gets a copy of it."
        )
    return heads


def head_tensors(own: Own) -> dict[str, Tensor]:
    """The heads under the plain names."""
    config, tensors = own.config, {}
    for head in range(config.num_draft_heads):
        for layer in range(config.num_layers):
            for kind in ("weight", "bias"):
                tensors[f"{head}.{layer}.linear.{kind}"] = own.part(f"blocks.{layer}.{kind}", head)
        if not config.share_lm_head:
            tensors[f"{head}.{config.num_layers}.weight"] = own.tensors[f"projections.up.{head}.weight"]
    return tensors


def refuse_untied(own: Own, target: str) -> None:
    """Refuse different blocks for code that builds a head of one block, applied again and again.

    Raises:
        ValueError: the blocks of a head differ.
    """
    config = own.config
    for head in range(config.num_draft_heads):
        for kind in ("weight", "bias"):
            if not equal(own.part(f"blocks.{layer}.{kind}", head) for layer in range(config.num_layers)):
                refuse(
                    own,
                    target,
                    f"its heads have {config.num_layers} different blocks, and the original code applies one block as "
                    "many times, so that only the last one would count",
                    "use --to tgi or --to vllm, or train heads with num_layers=1",
                )


def _name_in_file(names: Mapping[str, str], name: str) -> str:
    return names.get(name, name)


# The draft trees of the original command line, chosen there by words in the model's name.
TREES = {
    ("vicuna", "7b"): "medusa_vicuna_7b_stage2",
    ("vicuna", "13b"): "medusa_vicuna_13b_stage2",
    ("vicuna", "33b"): "medusa_vicuna_33b_stage2",
    ("zephyr",): "medusa_zephyr_stage2",
}


class MedusaFull(Layout):
    """Base and heads in one checkpoint."""

    name = "Medusa 1.0 model"
    family = MedusaForCausalLM
    targets = ("medusa",)
    holds_base = True

    def detect(self, keys: Iterable[str], config: Mapping[str, Any]) -> bool:
        inside = [key.startswith(PREFIX) for key in keys]
        return any(inside) and not all(inside)

    def read(self, source: Source, given: Mapping[str, Any]) -> Heads:
        inside = {key: tensor for key, tensor in source.tensors.items() if key.startswith(PREFIX)}
        reader = Reader(source.name, inside)
        heads = read_heads(reader, {key.removeprefix(PREFIX): key for key in inside})
        reader.finish(self.name)
        note_difference(heads.notes, source.config, "medusa_num_heads", heads.fields["num_draft_heads"])
        note_difference(heads.notes, source.config, "medusa_num_layers", heads.fields["num_layers"])
        heads.base_inside = True
        name = source.name.lower()
        heads.tree = next((tree for words, tree in TREES.items() if all(word in name for word in words)), heads.tree)
        return heads

    def write(self, own: Own, target: str, fold_bias: bool = False) -> Files:
        config = own.config
        refuse_untied(own, target)
        if config.share_lm_head:
            refuse(
                own,
                target,
                "its heads share the base's lm_head, and Medusa 1.0 models have a projection per head",
                "train heads with share_lm_head=False, or save the base on its own and name it",
            )
        base = config.base_config.to_dict()
        base |= {"medusa_num_heads": config.num_draft_heads, "medusa_num_layers": config.num_layers}
        tensors = dict(own.base_tensors) | {PREFIX + key: tensor for key, tensor in head_tensors(own).items()}
        return Files("model.safetensors", tensors, base)
