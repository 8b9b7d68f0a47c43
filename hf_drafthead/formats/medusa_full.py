"""Medusa 1.0 models: an ordinary sharded model whose file holds the heads as well.

    the base's own names, and medusa_head.{k}.{l}.linear.{weight,bias}, medusa_head.{k}.{L}.weight

config.json is the base's, with `medusa_num_heads` and `medusa_num_layers`. The base was often trained together with its
heads, so they belong to the weights in these files and to no other base of that name.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from hf_drafthead.formats.heads import Heads, Reader, told
from hf_drafthead.formats.layout import Files, Layout, Own, refuse
from hf_drafthead.formats.medusa import PREFIX, head_tensors, read_heads, refuse_untied
from hf_drafthead.formats.source import Source
from hf_drafthead.modeling import MedusaForCausalLM

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
        told(heads.notes, source.config, "medusa_num_heads", heads.fields["num_draft_heads"])
        told(heads.notes, source.config, "medusa_num_layers", heads.fields["num_layers"])
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
