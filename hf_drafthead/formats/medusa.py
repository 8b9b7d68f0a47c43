"""Medusa heads as FasterDecoding saves them, and as text-generation-inference and vLLM read them.

FasterDecoding and text-generation-inference, in `medusa_lm_head.pt` or `.safetensors`:

    {k}.{l}.linear.weight [H, H], {k}.{l}.linear.bias [H]     block l of head k
    {k}.{L}.weight [V, H]                                     projection of head k; absent if all use the base's lm_head

The names may have `medusa_head.` in front. NVIDIA's variant nests them as `medusa_heads.{k}.medusa_layers.{l}.linear.*`
and `medusa_heads.{k}.lm_head.weight`. config.json has `medusa_num_heads` and `medusa_num_layers`, which published files
have wrong, and `base_model_name_or_path`.

A Medusa 1.0 model is an ordinary sharded model whose files hold the heads as well: the base's own names, and
`medusa_head.{k}.{l}.linear.{weight,bias}`, `medusa_head.{k}.{L}.weight`. config.json is the base's, with the two
numbers. The base was often trained together with its heads: they belong to the weights in these files and to no other.

vLLM, from 0.4 to 0.32, in a folder of their own, without a tree:

    blocks.{k}.layers.{l}.weight [H, H], .bias [H]     block l of head k; without biases if config lacks medusa_fc_bias
    lm_heads.{k}.weight [V, H]                         projection of head k
    lm_head.weight [V, H]                              instead, with original_lm_head: the base's, for all heads

Names may have `medusa_heads.` in front. The reader renames every config key with "num" and "heads" or "layers" in it to
its own count, so none of the base's counts may be in that file; hidden_size is 4096 where it is missing; biases are
dropped without medusa_fc_bias.
"""

import re
from collections.abc import Iterable, Mapping
from itertools import product
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_drafthead.formats.base_tensors import OUTPUT, read_base_tensor
from hf_drafthead.formats.disk import Joined, Source
from hf_drafthead.formats.layout import VLLM, Files, Heads, Layout, Loss, Reader, SavedHeads
from hf_drafthead.formats.tables import NO, YES, Limits, Row, equal, parts_of, some
from hf_drafthead.modeling import MedusaForCausalLM

WHOLE = {"reduced_projections": NO}
# The draft trees of the original command line, chosen there by words in the model's name.
TREES = ("vicuna_7b", "vicuna_13b", "vicuna_33b", "zephyr")


class Medusa(Layout):
    """Heads alone.

    Attributes:
        block, projection: names of a block's tensors and of a projection.
        patterns: of both in all their variants, with head, layer and kind as groups.
        sizes: config fields for the number of heads, of blocks in each, and the hidden size.
        biased: whether blocks without biases are damaged ones.
        prefix: of the heads' names, where the file holds others.
    """

    name = "FasterDecoding Medusa"
    family = MedusaForCausalLM
    targets: ClassVar[tuple[str, ...]] = ("medusa", "tgi")
    limits: ClassVar[Limits] = {"": WHOLE, "medusa": {"one_block": YES}, "tgi": {"shared_blocks": (0, 1)}}
    block: ClassVar[str] = "{head}.{layer}.linear.{kind}"
    projection: ClassVar[str] = "{head}.{layers}.weight"
    patterns: ClassVar[tuple[str, str]] = (
        r"(?:medusa_heads?\.)?(\d+)\.(?:medusa_layers\.)?(\d+)\.linear\.(weight|bias)",
        r"(?:medusa_heads?\.)?(\d+)\.(?:\d+|lm_head)\.weight",
    )
    sizes: ClassVar[tuple[str, ...]] = ("medusa_num_heads", "medusa_num_layers")
    biased: ClassVar[bool] = True
    prefix: ClassVar[str] = ""

    def detect(self, keys: Iterable[str], config: Mapping[str, Any]) -> bool:
        names = list(keys)
        return some(self.patterns[0], names) and all(some("|".join(self.patterns), [name]) for name in names)

    def read(self, source: Source, fields: Mapping[str, Any]) -> Heads:
        config = source.config
        tensors = {key: tensor for key, tensor in source.tensors.items() if key.startswith(self.prefix)}
        blocks = [match for key in tensors if (match := re.fullmatch(self.patterns[0], key))]
        heads, layers = (1 + max(int(block[group]) for block in blocks) for group in (1, 2))
        names = {self.block.format(head=block[1], layer=block[2], kind=block[3]): block[0] for block in blocks}
        for key in tensors:
            if match := re.fullmatch(self.patterns[1], key):
                names[self.projection.format(head=match[1], layers=layers)] = key
        reader = Reader(source.name, tensors, names)
        first = reader.take(self.block.format(head=0, layer=0, kind="weight"))
        copies = self.copies(reader, config, heads)
        projections = [self.projection.format(head=head, layers=layers) for head in range(heads)]
        lm_heads = [*copies.values(), *(reader.take(name) for name in projections if name in reader and not copies)]
        vocab_size = len(lm_heads[0]) if lm_heads else None
        shared = bool(copies) or not lm_heads
        biased = self.biased or bool(config.get("medusa_fc_bias")) or any(block[3] == "bias" for block in blocks)
        table = self.table(heads, layers, shared)
        joined = reader.rows(row for row in table if biased or not row.ours.endswith("bias"))
        if not biased:
            zeros = torch.zeros(heads, len(first), dtype=first.dtype, device=first.device)
            joined |= {f"blocks.{layer}.bias": Joined((zeros,), (heads, len(first))) for layer in range(layers)}
            reader.notes.append("the blocks have no bias: they get one of zeros, which is the same.")
        elif config and not (self.biased or config.get("medusa_fc_bias")):
            reader.notes.append("config.json lacks medusa_fc_bias, the file has biases: vLLM drops them, not we.")
        reader.note_differences(config, **dict(zip(self.sizes, (heads, layers, len(first)), strict=False)))
        tied = (equal(joined[f"blocks.{n}.weight"].parts[head] for n in range(layers)) for head in range(heads))
        if layers > 1 and all(tied):
            reader.notes.append(f"the {layers} blocks of each head are one, applied {layers} times: each gets a copy.")
        base = config.get("base_model_name_or_path")
        form = {"num_draft_heads": heads, "num_layers": layers, "share_lm_head": shared}
        return reader.heads(self, form, joined, hidden_size=len(first), vocab_size=vocab_size, base=base, copies=copies)

    def copies(self, reader: Reader, config: Mapping[str, Any], heads: int) -> dict[str, Tensor]:
        """A projection that all heads share, and which the file has in the base's place."""
        return {}

    def table(self, heads: int, layers: int, shared: bool) -> list[Row]:
        """The tensors of heads, without projections of their own if they share one."""
        rows = []
        for layer, kind in product(range(layers), ("weight", "bias")):
            parts = [self.block.format(head=head, layer=layer, kind=kind) for head in range(heads)]
            rows.append(Row(f"blocks.{layer}.{kind}", parts, stacked=True))
        for head in range(0 if shared else heads):
            rows.append(Row(f"projections.up.{head}.weight", [self.projection.format(head=head, layers=layers)]))
        return rows

    def head_tensors(self, saved: SavedHeads) -> dict[str, Tensor]:
        """Heads of this library under the layout's names."""
        config = saved.config
        return parts_of(saved.tensors, self.table(config.num_draft_heads, config.num_layers, config.share_lm_head))

    def write(self, saved: SavedHeads, target: str) -> Files:
        config = saved.config
        if saved.base is None:
            raise Loss("its config names no base, which the target loads by name", "set base_model_name_or_path")
        about = dict(zip(self.sizes, (config.num_draft_heads, config.num_layers)))
        about |= {"base_model_name_or_path": saved.base}
        tensors = self.head_tensors(saved)
        if target == "tgi":
            # The server takes a folder whose config has no `architectures` for Medusa heads.
            launch = "text-generation-launcher --model-id FOLDER; it runs the best guess of every head, without a tree"
            return Files(tensors, about, [launch], "medusa_lm_head.safetensors")
        about |= {"version": "2"} if config.share_lm_head else {}
        return Files(tensors, about, weights="medusa_lm_head.pt")


class MedusaFull(Medusa):
    """Base and heads in one checkpoint."""

    name = "Medusa 1.0 model"
    targets = ("medusa",)
    limits: ClassVar[Limits] = {"": WHOLE | {"one_block": YES, "share_lm_head": NO}}
    prefix = "medusa_head."
    holds_base = True

    def detect(self, keys: Iterable[str], config: Mapping[str, Any]) -> bool:
        inside = [key.startswith(self.prefix) for key in keys]
        return any(inside) and not all(inside)

    def read(self, source: Source, fields: Mapping[str, Any]) -> Heads:
        heads, name = super().read(source, fields), source.name.lower()
        heads.base, heads.base_inside = None, True
        known = [tree for tree in TREES if all(word in name for word in tree.split("_"))]
        heads.tree = f"medusa_{known[0]}_stage2" if known else heads.tree
        return heads

    def write(self, saved: SavedHeads, target: str) -> Files:
        config = saved.config
        base = config.base_config.to_dict()
        base |= dict(zip(self.sizes, (config.num_draft_heads, config.num_layers)))
        heads = {self.prefix + key: tensor for key, tensor in self.head_tensors(saved).items()}
        return Files({**saved.base_tensors, **heads}, base)


class MedusaVllm(Medusa):
    """Heads alone, for vLLM."""

    name = "vLLM Medusa"
    targets = ("vllm",)
    limits: ClassVar[Limits] = {"": WHOLE}
    block = "blocks.{head}.layers.{layer}.{kind}"
    projection = "lm_heads.{head}.weight"
    patterns = (
        r"(?:medusa_heads\.)?blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)",
        r"(?:medusa_heads\.)?lm_heads\.(\d+)\.weight",
    )
    sizes = ("num_heads", "num_hidden_layers", "hidden_size")
    biased = False

    def detect(self, keys: Iterable[str], config: Mapping[str, Any]) -> bool:
        return some(self.patterns[0], keys)

    def copies(self, reader: Reader, config: Mapping[str, Any], heads: int) -> dict[str, Tensor]:
        key = next((key for key in ("lm_head.weight", "medusa_heads.lm_head.weight") if key in reader), None)
        if key is None and heads > 1 and config.get("original_lm_head"):
            key = self.projection.format(head=0)
        if key is None:
            return {}
        return {OUTPUT: reader.drop(key, f"a copy of the base's {OUTPUT}, which all heads share")}

    def write(self, saved: SavedHeads, target: str) -> Files:
        config, text = saved.config, saved.text
        about: dict[str, Any] = {"model_type": "medusa", "architectures": ["MedusaModel"], "medusa_fc_bias": True}
        about |= dict(zip(self.sizes, (config.num_draft_heads, config.num_layers, text.hidden_size)))
        about |= {"vocab_size": text.vocab_size}
        tensors = self.head_tensors(saved)
        if config.share_lm_head:
            about["original_lm_head"] = True
            tensors["lm_head.weight"] = read_base_tensor(saved, OUTPUT)
        launch = VLLM.format("medusa", config.num_draft_heads)
        return Files(tensors, about, [f"{launch}; with vLLM up to 0.32 (0.33 has no Medusa)"])
