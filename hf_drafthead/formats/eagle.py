"""EAGLE heads, of version 1 or 2 (the weights are alike), as SafeAILab saves them, and as vLLM and SGLang read them.

    fc.weight [H, 2H], fc.bias [H]                       embedding first; some have no bias, whatever their config says
    layers.0.self_attn.{q,k,v,o}_proj.weight, layers.0.mlp.{gate,up,down}_proj.weight
    layers.0.post_attention_layernorm.weight [H]         no input_layernorm, no norm behind the layer
    embed_tokens.weight [V, H]                           a copy of the base's; not in every file

config.json is a Llama's with one layer, and `bias` for that of fc (True where it is missing). It names no base.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from hf_drafthead.formats.base_tensors import INPUT, OUTPUT, ROWS_AT_ONCE, read_base_tensor
from hf_drafthead.formats.disk import Source
from hf_drafthead.formats.fields import llama_fields, read_layer_config
from hf_drafthead.formats.layout import SGLANG, VLLM, Files, Heads, Layout, Loss, Reader, SavedHeads, renamed
from hf_drafthead.modeling import EagleForCausalLM

LAYER = "layers.0."
EAGLE_NAMES = (("body.layer.", LAYER), ("fc.", "fc."))
COPIES_OF_BASE = {"embed_tokens.weight": INPUT, "lm_head.weight": OUTPUT}
LAYER_KINDS = ("llama", "mistral", "qwen2")  # layers of one form; Qwen2's has biases on queries, keys and values
ARCHITECTURES = {"vllm": "LlamaForCausalLM", "sglang": "LlamaForCausalLMEagle", "eagle": "LlamaForCausalLM"}


class Eagle(Layout):
    """One layer and fc."""

    name = "EAGLE"
    family = EagleForCausalLM
    targets = ("eagle", "vllm", "sglang")

    def detect(self, keys: Iterable[str], config: Mapping[str, Any]) -> bool:
        names = set(keys)
        needed = {"fc.weight", f"{LAYER}self_attn.q_proj.weight"}
        return needed <= names and not {f"{LAYER}hidden_norm.weight", "hidden_norm.weight"} & names

    def read(self, source: Source, fields: Mapping[str, Any]) -> Heads:
        reader, config = Reader(source.name, source.tensors), source.config
        hidden_size = len(reader.take("fc.weight"))
        reader.take("fc.weight", (hidden_size, 2 * hidden_size))
        has_bias = "fc.bias" in reader
        biased = has_bias and bool(reader.take("fc.bias", (hidden_size,)).any())
        if config and config.get("bias", True) != has_bias:
            in_config = f"bias {config['bias']!r}" if "bias" in config else "nothing of fc's bias, which means True"
            reader.notes.append(
                f"config.json says {in_config}, the file has {'one' if has_bias else 'none'}: the tensors are right."
            )
        if f"{LAYER}input_layernorm.weight" in reader:
            raise ValueError(
                f"{source.name!r} has {LAYER + 'input_layernorm.weight'!r}: the first layer of EAGLE heads has no norm "
                "before attention, these are of another kind and cannot be converted."
            )
        copies = reader.copies(COPIES_OF_BASE)
        vocab_size = next(map(len, copies.values()), None)
        layer_config = read_layer_config(reader, LAYER, config, hidden_size, vocab_size or config.get("vocab_size", 0))
        tensors = reader.renamed(EAGLE_NAMES)
        if has_bias and not biased:
            reader.drop("fc.bias", "zeros, which SGLang needs and which are the same as no bias")
            del tensors["fc.bias"]
        form = {"fc_bias": biased, "layer_config": layer_config}
        return reader.heads(
            self,
            form,
            tensors,
            hidden_size=hidden_size,
            vocab_size=vocab_size,
            copies=copies,
            tree="eagle_mc_sim_7b_63",
        )

    def write(self, saved: SavedHeads, target: str) -> Files:
        config, layer = saved.config, saved.config.own_layer
        if list(config.feature_layers) != [-1]:
            raise Loss(
                f"it reads the hidden states {list(config.feature_layers)} of the base, and the target the last one",
                "train it with feature_layers=[-1]",
            )
        if layer.model_type not in LAYER_KINDS:
            raise Loss(
                f"its layer is that of a {layer.model_type!r} model, and the target builds a Llama's",
                "train it with layer_config= of a Llama",
            )
        tensors = {name: tensor for key, tensor in saved.tensors.items() if (name := renamed(key, EAGLE_NAMES))}
        about = llama_fields(layer, config.get_text_config().vocab_size) | {"architectures": [ARCHITECTURES[target]]}
        biases = {f"{LAYER}{name}.bias" for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj")}
        if biases := biases & set(tensors):
            if target == "sglang" or biases != {f"{LAYER}self_attn.q_proj.bias"}:
                raise Loss(
                    "its layer has biases on projections where the target has none, and would drop them",
                    "train it with layer_config= of a Llama without biases",
                )
            about["qkv_bias"] = True
        notes = []
        if target == "eagle":
            about["bias"] = config.fc_bias
        elif target == "sglang":
            # The engine builds fc with a bias and leaves it random where the file has none.
            tensors.setdefault("fc.bias", torch.zeros_like(tensors["fc.weight"][:, 0]))
            notes.append(SGLANG.format("EAGLE"))
        elif config.fc_bias:
            if not saved.fold_bias:
                raise Loss(
                    "fc has a bias, which vLLM drops without a word",
                    "let --fold-bias (fold_bias=True) move it into embeddings of its own, which adds a tensor of the "
                    "vocabulary's size, or train a head with fc_bias=False",
                )
            tensors["embed_tokens.weight"], note = folded_embeddings(saved)
            del tensors["fc.bias"]
            notes.append(note)
        if target == "vllm":
            notes.append(VLLM.format("eagle", 4))
        return Files("model.safetensors", tensors, about, notes)


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
    pieces, residual = [], 0.0
    for rows in embeddings.split(ROWS_AT_ONCE):
        stored = (rows.double() + shift).to(weight.dtype)
        # what fc makes of the stored row, against what it makes of the row and the bias
        off = (stored.double() - rows.double()) @ reads_embedding.T - bias
        residual = max(residual, off.abs().max().item())
        pieces.append(stored)
    largest = bias.abs().max().item()
    exactness = (
        f"the bias of fc is off by up to {residual:.1e} in {str(weight.dtype).removeprefix('torch.')}, its largest "
        f"entry being {largest:.1e} (condition of fc's left half {torch.linalg.cond(reads_embedding, p=1).item():.1e})"
    )
    if residual > TOLERANCE * largest:
        raise Loss(f"folded into embeddings, {exactness}", "train a head with fc_bias=False")
    return torch.cat(pieces), f"folded into {INPUT} of its own, {exactness}."
