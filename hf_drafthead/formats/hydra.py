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
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from hf_drafthead.formats.disk import Source
from hf_drafthead.formats.heads import INPUT, Heads, Joined, Reader, equal, note_difference
from hf_drafthead.formats.layout import Files, Layout, Own, refuse, refuse_own_base, some
from hf_drafthead.modeling import HydraForCausalLM

MLP, PROJECTION, PREFIX_LAYER = "hydra_mlp.", "hydra_lm_head.", "prefix_embeding_layer."
EMBEDDINGS = "input_embed_fn.weight"
HYDRA_BLOCK = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.(linear|res_connection)\.(weight|bias)")
KINDS = ("weight", "bias")
UNUSED = {
    "embed_tokens.weight": "the prefix layer reads hidden states: the original never uses it",
    "inv_freq": "computed from the config",
}


class Hydra(Layout):
    """Heads alone; Hydra++ if there is a prefix layer."""

    name = "Hydra"
    family = HydraForCausalLM
    targets = ("hydra",)

    def detect(self, keys: Iterable[str], config: Mapping[str, Any]) -> bool:
        names = list(keys)
        return some(HYDRA_BLOCK.pattern, names) and any(key.startswith(PROJECTION) for key in names)

    def read(self, source: Source, given: Mapping[str, Any]) -> Heads:
        reader, config = Reader(source.name, source.tensors), source.config
        offset = config.get("hidden_state_offset", 0)
        if offset:
            raise ValueError(
                f"{source.name!r} reads the hidden state {offset} layers before the last one (hidden_state_offset): "
                "Hydra heads here read the last one, so these cannot be converted."
            )
        blocks = [found for key in source.tensors if (found := HYDRA_BLOCK.fullmatch(key))]
        number = 1 + max(int(found[1]) for found in blocks)
        places = sorted({int(found[2]) for found in blocks})
        prefix = any(key.startswith(PREFIX_LAYER) for key in source.tensors)
        hidden_size = reader.take(f"{MLP}0.{places[0]}.linear.weight").shape[0]
        if f"{MLP}0.{places[0]}.res_connection.weight" not in reader:
            raise ValueError(
                f"{source.name!r} holds Hydra heads that do not read the tokens of their path (grounded_heads false): "
                "there is no such family here, train grounded ones."
            )
        tensors = {}
        for head in range(number):
            first = f"{MLP}{head}.{places[0]}"
            wide = (hidden_size, (head + 2) * hidden_size)
            for kind, shape in (("weight", wide), ("bias", (hidden_size,))):
                keys = [f"{first}.{name}.{kind}" for name in ("res_connection", "linear")]
                tensors[f"heads.{head}.path.{kind}"] = reader.concatenated(keys, shape)
        tied = len(places) > 2 and all(_one_block(reader, head, places[1:]) for head in range(number))
        for head in range(number):
            for layer, place in enumerate(places[1:]):
                for kind, shape in (("weight", (hidden_size, hidden_size)), ("bias", (hidden_size,))):
                    key = f"{MLP}{head}.{place}.linear.{kind}"
                    if tied and layer:
                        reader.drop(key, "the same block as the one before, applied again (tie_blocks)")
                    else:
                        tensors[f"heads.{head}.blocks.{layer}.linear.{kind}"] = reader.one(key, shape)
        between = ".1" if f"{PROJECTION}0.1.weight" in reader else ""
        vocab_size = reader.take(f"{PROJECTION}0{between}.weight").shape[0]
        for head in range(number):
            for kind, shape in (("weight", (vocab_size, hidden_size)), ("bias", (vocab_size,))):
                tensors[f"projections.up.{head}.{kind}"] = reader.one(f"{PROJECTION}{head}{between}.{kind}", shape)
        if prefix:
            tensors |= _prefix_layer(reader)
        copies = {}
        if EMBEDDINGS in reader:
            copies[INPUT] = reader.drop(EMBEDDINGS, f"a copy of the base's {INPUT}")
        fields = {"num_draft_heads": number, "num_layers": len(places), "tie_blocks": tied, "prefix_layer": prefix}
        base = config.get("base_model_name_or_path")
        heads = Heads(HydraForCausalLM, fields, tensors, hidden_size, vocab_size, base, copies=copies)
        heads.dropped = reader.dropped
        note_difference(heads.notes, config, "hydra_num_heads", number)
        note_difference(heads.notes, config, "hydra_num_layers", len(places))
        note_difference(heads.notes, config, "hydra_head_arch", "prefix-mlp" if prefix else "mlp")
        note_difference(heads.notes, config, "grounded_heads", True)
        reader.finish(self.name)
        return heads

    def write(self, own: Own, target: str, fold_bias: bool = False) -> Files:
        config = own.config
        refuse_own_base(own, target)
        if config.share_lm_head:
            refuse(
                own,
                target,
                "its heads share the base's lm_head, and the layout has a projection per head",
                "train heads with share_lm_head=False",
            )
        if config.layer_config is not None:
            refuse(
                own,
                target,
                "its prefix layer is of another kind than the base's (layer_config), and the original builds it from "
                "the base's config",
                "train heads without layer_config",
            )
        behind = config.num_layers - 1
        if behind > 1 and not config.tie_blocks and not _tied(own):
            refuse(
                own,
                target,
                f"its heads have {behind} different blocks behind the first, and the original code applies one block "
                "as many times, so that only the last one would count",
                "train heads with tie_blocks=True",
            )
        hidden_size = config.get_text_config().hidden_size
        places = [2 * layer + 1 if config.prefix_layer else layer for layer in range(config.num_layers)]
        between = ".1" if config.prefix_layer else ""
        tensors: dict[str, Tensor] = {}
        for head in range(config.num_draft_heads):
            for kind in KINDS:
                path = own.tensors[f"heads.{head}.path.{kind}"]
                tensors[f"{MLP}{head}.{places[0]}.res_connection.{kind}"] = path[:hidden_size]
                tensors[f"{MLP}{head}.{places[0]}.linear.{kind}"] = path[hidden_size:]
                for layer, place in enumerate(places[1:]):
                    block = 0 if config.tie_blocks else layer
                    tensors[f"{MLP}{head}.{place}.linear.{kind}"] = own.tensors[
                        f"heads.{head}.blocks.{block}.linear.{kind}"
                    ]
                tensors[f"{PROJECTION}{head}{between}.{kind}"] = own.tensors[f"projections.up.{head}.{kind}"]
        for key, tensor in own.tensors.items():
            if key.startswith("prefix."):
                name = key.removeprefix("prefix.").replace("layer.", "layers.0.", 1)
                tensors[PREFIX_LAYER + name] = tensor
        about = {
            "hydra_num_heads": config.num_draft_heads,
            "hydra_num_layers": config.num_layers,
            "hydra_head_arch": "prefix-mlp" if config.prefix_layer else "mlp",
            "grounded_heads": True,
            "hidden_state_offset": 0,
            "base_model_name_or_path": own.base,
        }
        return Files("hydra_lm_head.pt", tensors, about)


def _one_block(reader: Reader, head: int, places: list[int]) -> bool:
    return all(equal(reader.take(f"{MLP}{head}.{place}.linear.{kind}") for place in places) for kind in KINDS)


def _tied(own: Own) -> bool:
    layers = range(own.config.num_layers - 1)
    return all(
        equal(own.tensors[f"heads.{head}.blocks.{layer}.linear.{kind}"] for layer in layers)
        for head in range(own.config.num_draft_heads)
        for kind in KINDS
    )


def _prefix_layer(reader: Reader) -> dict[str, Joined]:
    """The Llama of one layer, without what is never used."""
    tensors = {}
    for key in [key for key in reader.tensors if key.startswith(PREFIX_LAYER)]:
        name = key.removeprefix(PREFIX_LAYER)
        reason = next((reason for end, reason in UNUSED.items() if name.endswith(end)), None)
        if reason:
            reader.drop(key, reason)
        else:
            tensors["prefix." + name.replace("layers.0.", "layer.", 1)] = reader.one(key)
    return tensors
