"""EAGLE-3 heads as SafeAILab and SpecForge save them, and as SGLang and vLLM read them beside a Llama's config.

    fc.weight [H, F Ht]                                  F hidden states of the base, of width Ht
    midlayer.*  or  layers.0.*                           a Llama layer with hidden_norm; queries, keys, values read 2H
    layers.{n}.*                                         further layers, ordinary ones
    norm.weight [H], lm_head.weight [D, H]
    d2t [D]                                              base id minus draft id; t2d [V] marks the base's ids; if D < V
    embed_tokens.weight [V, H]                           if the head has embeddings of its own
    input_norm.weight [F Ht], fc_norm.{i}.weight [Ht]    by variant

What the layout leaves open is read as the project that wrote it means it, or refused. The numbers of
`eagle_aux_hidden_state_layer_ids` are those of outputs of layers for SGLang and SpecForge (one less than here), of
inputs for vLLM; without them, all read the inputs of layers 2, L // 2 and L - 3. `norm_output` feeds the
normed state back for the engines, and not for SpecForge.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from hf_drafthead.formats.disk import Source
from hf_drafthead.formats.eagle3_tensors import layer_prefix, own_tensors, read_pair_head
from hf_drafthead.formats.heads import INPUT, Heads
from hf_drafthead.formats.layer_config import llama_fields
from hf_drafthead.formats.layout import Files, Layout, Own, base_tensor, refuse, refuse_own_base, same_values
from hf_drafthead.modeling.eagle3 import Eagle3ForCausalLM

IDS = "eagle_aux_hidden_state_layer_ids"
WRITTEN_FOR = "hf_drafthead_export"  # the target, in what is written here: it settles what the layout leaves open
LLAMA_LAYERS = ("llama", "mistral")


class Eagle3(Layout):
    """A head beside a Llama's config."""

    name = "EAGLE-3"
    family = Eagle3ForCausalLM
    targets = ("eagle3", "sglang", "vllm")

    def detect(self, keys: Iterable[str], config: Mapping[str, Any]) -> bool:
        return layer_prefix(keys) is not None and "speculators_model_type" not in config

    def read(self, source: Source, given: Mapping[str, Any]) -> Heads:
        config = source.config
        flags = {
            "feature_layers": _features(source, given),
            "norm_before_residual": bool(config.get("norm_before_residual", False)),
            "norm_output": _norm_output(source, given),
        }
        heads = read_pair_head(source, config, flags, self.name)
        heads.base = config.get("base_model_name_or_path")
        return heads

    def write(self, own: Own, target: str, fold_bias: bool = False) -> Files:
        config, layer, text = own.config, own.config.own_layer, own.config.get_text_config()
        refuse_own_base(own, target)
        _refuse_what_is_lost(own, target)
        tensors, notes = own_tensors(own, "midlayer." if config.num_layers == 1 else "layers.0.", target)
        about = llama_fields(layer, text.vocab_size) | {
            "architectures": ["LlamaForCausalLM" if target == "eagle3" else "LlamaForCausalLMEagle3"],
            "num_hidden_layers": config.num_layers,
            "draft_vocab_size": config.draft_vocab_size,
            "norm_before_residual": config.norm_before_residual,
            "norm_before_fc": config.norm_before_fc,
            "fc_norm": config.fc_norm,
            "norm_output": config.norm_output,
            "base_model_name_or_path": own.base,
            WRITTEN_FOR: target,
        }
        if layer.hidden_size != text.hidden_size or (target == "eagle3" and config.own_embeddings):
            about["target_hidden_size"] = text.hidden_size  # the original code reads the head's own embeddings then
        if target == "sglang" and config.own_embeddings and layer.hidden_size == text.hidden_size:
            _drop_equal_embeddings(own, target, tensors, notes)
        features = list(config.feature_layers)
        if features != published_features(text.num_hidden_layers):
            if target == "sglang":
                about["eagle_config"] = {"use_aux_hidden_state": True, IDS: [layer - 1 for layer in features]}
            else:
                about |= {IDS: features, "num_aux_hidden_states": len(features)}
        return Files("model.safetensors", tensors, about, [*notes, _launch(own, target)])


def published_features(layers: int) -> list[int]:
    """The inputs that are read where nothing else is said, of a base of so many layers."""
    return [2, layers // 2, layers - 3]


def _features(source: Source, given: Mapping[str, Any]) -> list[int] | None:
    """The inputs of which layers of the base are read; None for the published ones.

    Raises:
        ValueError: the config has numbers that mean different layers to different engines.
    """
    if given.get("feature_layers") is not None:
        return list(given["feature_layers"])
    config = source.config
    nested = config.get("eagle_config") or {}
    ids = config.get(IDS) or nested.get(IDS)
    if ids is None:
        return None
    if config.get(WRITTEN_FOR) == "vllm":
        return list(ids)
    if config.get(WRITTEN_FOR) == "sglang" or ids[0] == 1:
        return [layer + 1 for layer in ids]
    shifted = [layer + 1 for layer in ids]
    raise ValueError(
        f"{source.name!r} reads the layers {list(ids)} ({IDS}), which are the inputs of these for vLLM, and of "
        f"{shifted} for SGLang and SpecForge: say which by feature_layers={list(ids)} or feature_layers={shifted} (on "
        "the command line --set)."
    )


def _norm_output(source: Source, given: Mapping[str, Any]) -> bool:
    """Whether the normed output is fed back.

    Raises:
        ValueError: the config says so, but not in whose sense.
    """
    if given.get("norm_output") is not None:
        return bool(given["norm_output"])
    if source.config.get("norm_output") and WRITTEN_FOR not in source.config:
        raise ValueError(
            f"{source.name!r} has norm_output in its config.json, which has SGLang and vLLM feed the normed output "
            "back, while heads trained with SpecForge are fed the output before the norm: say which by "
            "norm_output=True or norm_output=False (on the command line --set)."
        )
    return bool(source.config.get("norm_output"))


def _refuse_what_is_lost(own: Own, target: str) -> None:
    """Refuse what the target has no field for, and would run wrongly without a word.

    Raises:
        ValueError: there is something.
    """
    config, layer, text = own.config, own.config.own_layer, own.config.get_text_config()
    elsewhere = "use --to vllm or --to speculators"
    if config.fc_bias:
        refuse(own, target, "fc has a bias, which the target drops or gives to attention too", "train without fc_bias")
    if layer.model_type not in LLAMA_LAYERS:
        what = f"its layer is that of a {layer.model_type!r} model, and the target builds a Llama's"
        refuse(own, target, what, "use --to speculators, or train it with layer_config= of a Llama")
    if any(key.startswith("body.") and key.endswith(".bias") for key in own.tensors):
        refuse(
            own, target, "its layer has biases, which the target drops", "use --to speculators, or train without them"
        )
    if config.window is not None:
        what = f"its layer sees {config.window} positions, and the target's all of them"
        refuse(own, target, what, "use --to speculators")
    if list(config.feature_layers) != sorted(config.feature_layers):
        what = f"it reads the layers {list(config.feature_layers)}, and engines sort them"
        refuse(own, target, what, "train it with ascending feature_layers")
    if target == "vllm":
        return
    if config.num_layers > 1:
        refuse(own, target, f"it has {config.num_layers} layers, and the target runs one", elsewhere)
    if config.norm_before_residual:
        refuse(own, target, "the target has no norm_before_residual and adds the state before the norm", elsewhere)
    if len(config.feature_layers) != 3:
        refuse(own, target, f"it reads {len(config.feature_layers)} hidden states, and the target three", elsewhere)
    if target == "sglang":
        if 0 in config.feature_layers:
            what = "it reads the embeddings (feature layer 0), and the target numbers the outputs of layers"
            refuse(own, target, what, elsewhere)
        return
    for name in ("norm_before_fc", "fc_norm", "norm_output"):
        if getattr(config, name):
            refuse(own, target, f"the original code has no {name} and leaves it out", "use --to sglang or --to vllm")
    if list(config.feature_layers) != published_features(text.num_hidden_layers):
        what = (
            f"it reads the layers {list(config.feature_layers)} of the base, and the original code always "
            f"{published_features(text.num_hidden_layers)}"
        )
        refuse(own, target, what, elsewhere)
    if layer.head_dim * layer.num_attention_heads != layer.hidden_size:
        what = (
            f"its {layer.num_attention_heads} attention heads are {layer.head_dim} wide, and the original code divides "
            f"the hidden size {layer.hidden_size} by their number"
        )
        refuse(own, target, what, elsewhere)
    kind = (layer.rope_parameters or {}).get("rope_type", "default")
    if kind not in ("default", "linear", "dynamic"):
        refuse(own, target, f"its rotary positions are scaled in the way {kind!r}, which it does not know", elsewhere)


def _drop_equal_embeddings(own: Own, target: str, tensors: dict[str, Tensor], notes: list[str]) -> None:
    """Leave out embeddings for an engine that puts the base's in their place, if they are the base's.

    Raises:
        ValueError: they are not, or the base's are not on this machine.
    """
    theirs = base_tensor(own.base_model or own.base or {}, INPUT)
    if theirs is None or not same_values(tensors["embed_tokens.weight"], theirs):
        what = "it has embeddings of its own, in the place of which SGLang puts the base's, where both are as wide"
        why = "" if theirs is not None else " (whether they differ cannot be told: the base is not on this machine)"
        refuse(own, target, what + why, "use --to vllm or --to speculators")
    del tensors["embed_tokens.weight"]
    notes.append(f"the {INPUT} are the base's and are left out: SGLang takes the base's.")


def _launch(own: Own, target: str) -> str:
    depth = own.config.num_draft_heads
    if target == "sglang":
        return (
            "python -m sglang.launch_server --model-path BASE --speculative-algorithm EAGLE3 "
            "--speculative-draft-model-path FOLDER"
        )
    if target == "vllm":
        return (
            'vllm serve BASE --speculative-config \'{"method": "eagle3", "model": FOLDER, '
            f'"num_speculative_tokens": {min(depth, 5)}}}\'; it drafts a chain, without a tree'
        )
    return "EaModel.from_pretrained(base_model_path=BASE, ea_model_path=FOLDER, use_eagle3=True)"
