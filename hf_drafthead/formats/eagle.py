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
from torch import Tensor

from hf_drafthead.formats.base_tensors import INPUT, OUTPUT, ROWS_AT_ONCE, read_base_tensor
from hf_drafthead.formats.disk import Source
from hf_drafthead.formats.fields import llama_fields, read_layer_config
from hf_drafthead.formats.layout import SGLANG, VLLM, Files, Heads, Layout, Loss, Reader, SavedHeads
from hf_drafthead.formats.tables import NO, Limits, renamed
from hf_drafthead.modeling import EagleForCausalLM

LAYER = "layers.0."
EAGLE_NAMES = (("body.layer.", LAYER), ("fc.", "fc."))
COPIES_OF_BASE = {"embed_tokens.weight": INPUT, "lm_head.weight": OUTPUT}
# Layers of one form; Qwen2's has biases on queries, keys and values.
LIMITS = {"feature_layers": ([-1],), "layer_model_type": ("llama", "mistral", "qwen2"), "biases_beside_qkv": NO}
ARCHITECTURES = {"vllm": "LlamaForCausalLM", "sglang": "LlamaForCausalLMEagle", "eagle": "LlamaForCausalLM"}


class Eagle(Layout):
    """One layer and fc."""

    name = "EAGLE"
    family = EagleForCausalLM
    targets = ("eagle", "vllm", "sglang")
    limits: ClassVar[Limits] = {"": LIMITS, "sglang": {"biases_in_layers": NO}}

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
        notes = [VLLM.format("eagle", 4)]
        if config.fc_bias:
            if not saved.fold_bias:
                advice = "let --fold-bias (fold_bias=True) move it into embeddings of its own, a tensor of the "
                advice += "vocabulary's size, or train a head with fc_bias=False"
                raise Loss("fc has a bias, which vLLM drops without a word", advice)
            tensors["embed_tokens.weight"], note = folded_embeddings(saved)
            del tensors["fc.bias"]
            notes.insert(0, note)
        return Files(tensors, about, notes)


TOLERANCE = 0.01  # of the bias's largest entry


def folded_embeddings(saved: SavedHeads) -> tuple[Tensor, str]:
    """Embeddings (V, H) to store with the head, in the type of its weights, and a note that says how exact they are.

    EAGLE's bias of fc is moved into them, for engines that drop it: fc reads [e; h], so W_e e + W_h h + b =
    W_e (e + d) + W_h h with W_e d = b: the same d is added to every embedding.
    """
    embeddings = read_base_tensor(saved, INPUT)
    weight, bias = saved.tensors["fc.weight"], saved.tensors["fc.bias"].double()
    reads_embedding = weight[:, : weight.shape[0]].double()
    try:
        shift = torch.linalg.solve(reads_embedding, bias)
    except torch.linalg.LinAlgError:
        raise Loss("the half of fc that reads embeddings is singular", "train a head with fc_bias=False") from None
    rows = embeddings.split(ROWS_AT_ONCE)
    pieces = [(part.double() + shift).to(weight.dtype) for part in rows]
    # what fc makes of the stored rows, against what it makes of the rows and the bias
    sums = (((new.double() - old.double()) @ reads_embedding.T - bias).abs().max() for new, old in zip(pieces, rows))
    residual, largest = max(off.item() for off in sums), bias.abs().max().item()
    exactness = f"the bias of fc is off by up to {residual:.1e} in {saved.dtype}, its largest entry being {largest:.1e}"
    exactness += f" (condition of fc's left half {torch.linalg.cond(reads_embedding, p=1).item():.1e})"
    if residual > TOLERANCE * largest:
        raise Loss(f"folded into embeddings, {exactness}", "train a head with fc_bias=False")
    return torch.cat(pieces), f"folded into {INPUT} of its own, {exactness}."
