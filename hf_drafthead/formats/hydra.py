"""Hydra and Hydra++ heads as zankner/Hydra saves them, in `hydra_lm_head.pt`.

    hydra_mlp.{i}.{j}.linear.{weight,bias}             first block [H, (i + 2) H], further ones [H, H]
    hydra_mlp.{i}.{j}.res_connection.{weight,bias}     of the first block
    hydra_lm_head.{i}.{weight,bias}                    [V, H] and [V]
    prefix_embeding_layer.*                            Hydra++: a Llama of one layer
    input_embed_fn.weight                              the base's input embeddings

j counts 0, 1, ... in Hydra and 1, 3, ... in Hydra++, whose projections are `hydra_lm_head.{i}.1.*`: dropout layers lie
between. The published repositories named "hydra" hold Hydra++ heads. All blocks behind the first one are one block.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any, ClassVar

from hf_drafthead.formats.base_tensors import INPUT
from hf_drafthead.formats.disk import Source
from hf_drafthead.formats.layout import Files, Heads, Layout, Reader, SavedHeads
from hf_drafthead.formats.tables import NO, YES, Limits, Row, equal, parts_of, renamed, some
from hf_drafthead.modeling import HydraForCausalLM

MLP, PROJECTION, PREFIX_LAYER = "hydra_mlp.", "hydra_lm_head.", "prefix_embeding_layer."
PREFIX_LAYER_NAMES = (("prefix.layer.", f"{PREFIX_LAYER}layers.0."), ("prefix.norm.", f"{PREFIX_LAYER}norm."))
EMBEDDINGS, UNUSED = "input_embed_fn.weight", f"{PREFIX_LAYER}embed_tokens.weight"
HYDRA_BLOCK = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.(linear|res_connection)\.(weight|bias)")
KINDS = ("weight", "bias")
LIMITS = {"share_lm_head": NO, "reduced_projections": NO}


class Hydra(Layout):
    """Heads alone; Hydra++ if there is a prefix layer."""

    name = "Hydra"
    family = HydraForCausalLM
    targets = ("hydra",)
    limits: ClassVar[Limits] = {"": LIMITS | {"layer_config": (None,), "one_block": YES}}

    def detect(self, keys: Iterable[str], config: Mapping[str, Any]) -> bool:
        names = list(keys)
        return some(HYDRA_BLOCK.pattern, names) and any(key.startswith(PROJECTION) for key in names)

    def read(self, source: Source, fields: Mapping[str, Any]) -> Heads:
        reader, config = Reader(source.name, source.tensors), source.config
        blocks = [match for key in source.tensors if (match := HYDRA_BLOCK.fullmatch(key))]
        heads = 1 + max(int(match[1]) for match in blocks)
        places = sorted({int(match[2]) for match in blocks})
        hidden_size = len(reader.take(f"{MLP}0.{places[0]}.linear.weight"))
        tied = len(places) > 2 and all(
            equal(reader.take(f"{MLP}{head}.{place}.linear.{kind}") for place in places[1:])
            for head in range(heads)
            for kind in KINDS
        )
        between = ".1" if f"{PROJECTION}0.1.weight" in reader else ""
        vocab_size = len(reader.take(f"{PROJECTION}0{between}.weight"))
        tensors = reader.rows(table(heads, places, tied, between))
        prefix = any(key.startswith(PREFIX_LAYER) for key in source.tensors)
        if UNUSED in reader:
            reader.drop(UNUSED, "the prefix layer reads hidden states: the original never uses it")
        tensors |= reader.renamed(PREFIX_LAYER_NAMES)
        form = {"num_draft_heads": heads, "num_layers": len(places), "tie_blocks": tied, "prefix_layer": prefix}
        reader.note_differences(config, **_about(form))
        more = {"base": config.get("base_model_name_or_path"), "copies": reader.copies({EMBEDDINGS: INPUT})}
        return reader.heads(self, form, tensors, hidden_size=hidden_size, vocab_size=vocab_size, **more)

    def write(self, saved: SavedHeads, target: str) -> Files:
        config = saved.config
        places = [2 * layer + 1 if config.prefix_layer else layer for layer in range(config.num_layers)]
        between = ".1" if config.prefix_layer else ""
        rows = table(config.num_draft_heads, places, config.tie_blocks, between)
        tensors = parts_of(saved.tensors, rows)
        tensors |= {name: tensor for key, tensor in saved.tensors.items() if (name := renamed(key, PREFIX_LAYER_NAMES))}
        about = {"hidden_state_offset": 0, "base_model_name_or_path": saved.base}
        return Files(tensors, about | _about(vars(config)), weights="hydra_lm_head.pt")


def _about(form: Mapping[str, Any]) -> dict[str, Any]:
    """What config.json says of heads of this form."""
    return {
        "hydra_num_heads": form["num_draft_heads"],
        "hydra_num_layers": form["num_layers"],
        "hydra_head_arch": "prefix-mlp" if form["prefix_layer"] else "mlp",
        "grounded_heads": True,
    }


def table(heads: int, places: Sequence[int], tied: bool, between: str) -> Iterable[Row]:
    """The tensors of heads whose blocks stand at the places j, tied to one block behind the first or not.

    `between` stands between i and the kind in a projection's name.
    """
    first, *others = places
    for head, kind in product(range(heads), KINDS):
        parts = [f"{MLP}{head}.{first}.{part}.{kind}" for part in ("res_connection", "linear")]
        yield Row(f"heads.{head}.path.{kind}", parts)
        for layer, place in enumerate(others):
            name = f"heads.{head}.blocks.{0 if tied else layer}.linear.{kind}"
            yield Row(name, [f"{MLP}{head}.{place}.linear.{kind}"])
        yield Row(f"projections.up.{head}.{kind}", [f"{PROJECTION}{head}{between}.{kind}"])
