"""Medusa heads as vLLM read them, from 0.4 to 0.32: a folder of their own, without a tree.

    blocks.{k}.layers.{l}.weight [H, H], .bias [H]     block l of head k; without biases if config lacks medusa_fc_bias
    lm_heads.{k}.weight [V, H]                         projection of head k
    lm_head.weight [V, H]                              instead, with original_lm_head: the base's, for all heads

Names may have `medusa_heads.` in front. The reader renames every config key with "num" and "heads" or "layers" in it to
its own count, so none of the base's counts may be in that file; hidden_size is 4096 where it is missing; biases are
dropped without medusa_fc_bias.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from transformers.configuration_utils import PreTrainedConfig

from hf_drafthead.formats.disk import Source
from hf_drafthead.formats.heads import OUTPUT, Heads, Joined, Reader, note_difference
from hf_drafthead.formats.layout import Files, Layout, Own, read_base_tensor, refuse_own_base, some
from hf_drafthead.modeling import MedusaForCausalLM
from hf_drafthead.modeling.foreign import how_to_convert

VLLM_PREFIX = "medusa_heads."
VLLM_BLOCK = re.compile(r"(?:medusa_heads\.)?blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")


class MedusaVllm(Layout):
    """Heads alone."""

    name = "vLLM Medusa"
    family = MedusaForCausalLM
    targets = ("vllm",)

    def detect(self, keys: Iterable[str], config: Mapping[str, Any]) -> bool:
        return some(VLLM_BLOCK.pattern, keys)

    def read(self, source: Source, given: Mapping[str, Any]) -> Heads:
        reader, config = Reader(source.name, source.tensors), source.config
        names = {key.removeprefix(VLLM_PREFIX): key for key in source.tensors}
        blocks = [found for key in source.tensors if (found := VLLM_BLOCK.fullmatch(key))]
        number, layers = (1 + max(int(block[group]) for block in blocks) for group in (1, 2))
        notes: list[str] = []
        if "token_map" in names:
            raise ValueError(
                f"{source.name!r} guesses over a part of the vocabulary (token_map): Medusa heads here guess over all "
                "of it, so these cannot be converted."
            )

        def known(name: str) -> str:
            return names.get(name, name)

        first = reader.take(known("blocks.0.layers.0.weight"))
        hidden_size = first.shape[0]
        biased = any(block[3] == "bias" for block in blocks)
        tensors: dict[str, Joined] = {}
        for layer in range(layers):
            keys = [known(f"blocks.{head}.layers.{layer}.weight") for head in range(number)]
            tensors[f"blocks.{layer}.weight"] = reader.stacked(keys, (hidden_size, hidden_size))
            keys = [known(f"blocks.{head}.layers.{layer}.bias") for head in range(number)]
            if biased:
                tensors[f"blocks.{layer}.bias"] = reader.stacked(keys, (hidden_size,))
            else:
                zeros = torch.zeros(number, hidden_size, dtype=first.dtype, device=first.device)
                tensors[f"blocks.{layer}.bias"] = Joined((zeros,), (number, hidden_size), ())
        if not biased:
            notes.append("the blocks have no bias: they get one of zeros, which is the same.")
        elif config and not config.get("medusa_fc_bias"):
            notes.append("config.json lacks medusa_fc_bias, the file has biases: vLLM drops them, here they count.")
        shared = "lm_head.weight" in names or (number > 1 and bool(config.get("original_lm_head")))
        copies = {}
        if shared:
            key = known("lm_head.weight" if "lm_head.weight" in names else "lm_heads.0.weight")
            copies[OUTPUT] = reader.drop(key, f"a copy of the base's {OUTPUT}, which all heads share")
            vocab_size = copies[OUTPUT].shape[0]
        else:
            vocab_size = reader.take(known("lm_heads.0.weight")).shape[0]
            for head in range(number):
                key = known(f"lm_heads.{head}.weight")
                tensors[f"projections.up.{head}.weight"] = reader.one(key, (vocab_size, hidden_size))
        fields = {"num_draft_heads": number, "num_layers": layers, "share_lm_head": shared}
        base = config.get("base_model_name_or_path")
        heads = Heads(MedusaForCausalLM, fields, tensors, hidden_size, vocab_size, base, copies=copies, notes=notes)
        heads.dropped = reader.dropped
        for name, value in {"num_heads": number, "num_hidden_layers": layers, "hidden_size": hidden_size}.items():
            note_difference(notes, config, name, value)
        reader.finish(self.name)
        return heads

    def write(self, own: Own, target: str, fold_bias: bool = False) -> Files:
        config, text = own.config, own.config.get_text_config()
        refuse_own_base(own, target)
        tensors = {}
        for head in range(config.num_draft_heads):
            for layer in range(config.num_layers):
                for kind in ("weight", "bias"):
                    tensors[f"blocks.{head}.layers.{layer}.{kind}"] = own.part(f"blocks.{layer}.{kind}", head)
            if not config.share_lm_head:
                tensors[f"lm_heads.{head}.weight"] = own.tensors[f"projections.up.{head}.weight"]
        about: dict[str, Any] = {
            "model_type": "medusa",
            "architectures": ["MedusaModel"],
            "hidden_size": text.hidden_size,
            "vocab_size": text.vocab_size,
            "num_heads": config.num_draft_heads,
            "num_hidden_layers": config.num_layers,
            "medusa_fc_bias": True,
        }
        if config.share_lm_head:
            about["original_lm_head"] = True
            tensors["lm_head.weight"] = read_base_tensor(own, OUTPUT, target)
        launch = (
            'vllm serve BASE --speculative-config \'{"method": "medusa", "model": FOLDER, '
            f'"num_speculative_tokens": {config.num_draft_heads}}}\' with vLLM up to 0.32 (0.33 has no Medusa); it '
            "runs the best guess of every head, without a tree"
        )
        return Files("model.safetensors", tensors, about, [launch])


class MedusaVllmConfig(PreTrainedConfig):
    """Stands for the `model_type` of these folders, so that the Auto classes say how the heads are loaded."""

    model_type = "medusa"

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Refused.

        Raises:
            ValueError: always.
        """
        path = str(kwargs.get("name_or_path") or "FOLDER")
        raise ValueError(f"{path!r} holds no model of transformers: {how_to_convert(path, config_dict)}.")
