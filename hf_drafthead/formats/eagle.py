"""EAGLE heads, of version 1 or 2 (the weights are alike), as SafeAILab saves them, and as vLLM and SGLang read them.

    fc.weight [H, 2H], fc.bias [H]                       embedding first; some have no bias, whatever their config says
    layers.0.self_attn.{q,k,v,o}_proj.weight, layers.0.mlp.{gate,up,down}_proj.weight
    layers.0.post_attention_layernorm.weight [H]         no input_layernorm, no norm behind the layer
    embed_tokens.weight [V, H]                           a copy of the base's; not in every file

config.json is a Llama's with one layer, and `bias` for that of fc (True where it is missing). It names no base.
"""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch

from hf_drafthead.formats.base_tensors import INPUT, OUTPUT
from hf_drafthead.formats.disk import Source
from hf_drafthead.formats.fields import llama_fields, read_layer_config
from hf_drafthead.formats.layout import SGLANG, VLLM, Files, Heads, Layout, Reader, SavedHeads
from hf_drafthead.formats.tables import NO, Limits, renamed
from hf_drafthead.modeling import EagleForCausalLM
from hf_drafthead.modeling.decoder_layer import windows_of

LAYER = "layers.0."
EAGLE_NAMES = (("body.layer.", LAYER), ("fc.", "fc."))
COPIES_OF_BASE = {"embed_tokens.weight": INPUT, "lm_head.weight": OUTPUT}
# Layers of one form; Qwen2's has biases on queries, keys and values.
LIMITS = {"layer_model_type": ("llama", "mistral", "qwen2"), "biases_beside_qkv": NO}
ARCHITECTURES = {"vllm": "LlamaForCausalLM", "sglang": "LlamaForCausalLMEagle", "eagle": "LlamaForCausalLM"}


class Eagle(Layout):
    """One layer and fc."""

    name = "EAGLE"
    family = EagleForCausalLM
    targets = ("eagle", "vllm", "sglang")
    # vLLM drops the bias of fc without a word
    limits: ClassVar[Limits] = {"": LIMITS, "sglang": {"biases_in_layers": NO}, "vllm": {"fc_bias": NO}}

    def detect(self, keys: Iterable[str], config: Mapping[str, Any]) -> bool:
        names = set(keys)
        needed = {"fc.weight", f"{LAYER}self_attn.q_proj.weight"}
        return needed <= names and not {f"{LAYER}hidden_norm.weight", "hidden_norm.weight"} & names

    def read(self, source: Source, fields: Mapping[str, Any]) -> Heads:
        reader, config = Reader(source.name, source.tensors), source.config
        hidden_size = len(reader.take("fc.weight"))
        reader.take("fc.weight", (hidden_size, 2 * hidden_size))
        if config:  # which means a bias where it says nothing of it
            reader.note_differences({"bias": True, **config}, bias="fc.bias" in reader)
        copies = reader.copies(COPIES_OF_BASE)
        vocab_size = next(map(len, copies.values()), None)
        layer_config = read_layer_config(reader, LAYER, config, hidden_size, vocab_size or config.get("vocab_size", 0))
        if (window := windows_of(layer_config, 1)[0]) is not None:
            what = f"says sliding_window {window} of its layer, and the layer of an EAGLE head sees every position here"
            raise ValueError(f"{source.name!r} {what}: get a head without one.")
        tensors = reader.renamed(EAGLE_NAMES)
        if "fc.bias" in tensors and not reader.take("fc.bias", (hidden_size,)).any():
            reader.drop("fc.bias", "zeros, which SGLang needs and which are the same as no bias")
            del tensors["fc.bias"]
        form = {"fc_bias": "fc.bias" in tensors, "layer_config": layer_config}
        more = {"hidden_size": hidden_size, "vocab_size": vocab_size, "copies": copies, "tree": "eagle_mc_sim_7b_63"}
        return reader.heads(self, form, tensors, **more)

    def write(self, saved: SavedHeads, target: str) -> Files:
        config = saved.config
        tensors = {name: tensor for key, tensor in saved.tensors.items() if (name := renamed(key, EAGLE_NAMES))}
        about = llama_fields(config.own_layer, saved.text.vocab_size) | {"architectures": [ARCHITECTURES[target]]}
        if saved.biases_in_layers:
            about["qkv_bias"] = True
        if target == "eagle":
            return Files(tensors, about | {"bias": config.fc_bias})
        if target == "sglang":
            # The engine builds fc with a bias and leaves it random where the file has none.
            tensors.setdefault("fc.bias", torch.zeros_like(tensors["fc.weight"][:, 0]))
            return Files(tensors, about, [SGLANG.format("EAGLE")])
        return Files(tensors, about, [VLLM.format("eagle", 4)])
