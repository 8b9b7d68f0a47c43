"""One table of all fields of the layouts' config.json: what is read, and which values of others change nothing.

Every field of a file is looked up in it. What is in no row, and has a value that is not the same as none, is refused by
name: it may change what heads compute. Also here: what the layouts read alike, of decoder layers.
"""

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import fields as fields_of
from typing import Any

from transformers import LlamaConfig, Qwen2Config, Qwen3Config
from transformers.activations import ACT2FN
from transformers.configuration_utils import PreTrainedConfig

from hf_drafthead.formats.disk import Joined, Source
from hf_drafthead.formats.layout import Reader
from hf_drafthead.modeling.files import shortened

NONE: tuple[Any, ...] = (None, False, "", [], {})  # values of a field that says nothing; 0 is one of them
SCALES = ("multiplier", "scale", "scaling", "factor")  # what the names of fields end in that are nothing at 1
NESTED = ("dflash_config", "eagle_config", "eagle_architecture_config")  # objects whose fields are the head's as well
MASK = ("mask_token_id", "pard_token", "ptd_token_id", "dspark_noise_token_id")  # names of one field

Row = dict[str, tuple[Any, ...] | None]  # by name: the values that change nothing; None for what is read, or is of none


def _row(names: str, **values: tuple[Any, ...]) -> Row:
    return {**dict.fromkeys(names.split()), **values}


# Of every config: whose file it is, how it was trained, and what engines do with it.
COMMON = dict.fromkeys(field.name for field in fields_of(PreTrainedConfig)) | _row(
    """_attn_implementation _name_or_path attn_implementation auto_map base_model_name_or_path bos_token_id
    classifier_dropout decoder_start_token_id dropout eos_token_id finetuning_task hf_drafthead_export initializer_range
    is_decoder keys_to_ignore_at_inference max_position_embeddings model_type original_max_position_embeddings
    output_attentions pad_token_id pretraining_tp return_dict sep_token_id tie_word_embeddings tokenizer_class
    torch_dtype torchscript transformers_version unk_token_id use_bfloat16 use_cache version vocab_size
    attention_dropout mlp_dropout hidden_dropout draft_model_type target_model_type target_model_name_or_path"""
)
LAYER_MODELS = (None, "llama", "mistral", "mixtral", "qwen2", "qwen3", "phi3", "eagle", "speculator_model")
ROTARY = _row(
    """rope_theta rope_type type factor original_max_position_embeddings attention_factor beta_fast beta_slow
    short_factor long_factor low_freq_factor high_freq_factor mscale mscale_all_dim truncate finetuned mrope_section
    mrope_interleaved""",
    partial_rotary_factor=(None, 1, 1.0),
)
# Names of the order in which rotary positions pair the numbers of a head, and the value that means halves.
HALVES = {"rope_is_neox_style": True, "is_neox_style": True}
HALVES |= dict.fromkeys(("rope_interleaved", "rope_interleave", "rotary_interleaved"), False)
LAYER = _row(
    """attention_bias head_dim hidden_act hidden_size intermediate_size layer_types max_window_layers mlp_bias
    num_attention_heads num_hidden_layers num_key_value_heads qkv_bias rms_norm_eps rope_parameters rope_scaling
    rope_theta sliding_window swa_window_size use_qk_norm use_sliding_window use_swa""",
    model_type=LAYER_MODELS,
    partial_rotary_factor=(None, 1, 1.0),
    position_embedding_type=("rope",),
) | dict.fromkeys(HALVES)
OF_EAGLE3 = _row(
    """draft_vocab_size eagle_aux_hidden_state_layer_ids fc_norm has_embed_tokens has_lm_head has_own_embed_tokens
    norm_before_fc norm_before_residual norm_output num_aux_hidden_states parallel_draft_heads_num_layers
    reuse_target_lm_head target_hidden_size use_aux_hidden_state""",
    next_layer_regular=(True,),
    parallel_draft_step=(1,),
    use_input_layernorm_in_first_layer=(True,),
    use_last_layernorm=(True,),
)
OF_BLOCKS = _row(
    """block_size causal causal_head confidence_head_alpha confidence_head_with_markov draft_vocab_size
    dflash_initial_block_size eagle_aux_hidden_state_layer_ids enable_confidence_head has_embed_tokens has_lm_head
    is_causal loss_decay_gamma markov_head_type markov_rank num_anchors num_target_layers prefer_requested_block_size
    runtime_block_size sample_from_anchor shift_label target_hidden_size target_layer_ids""",
    use_aux_hidden_state=(True,),
    attention_mode=("gqa", "mha"),
    draft_ffn_type=("dense", "mlp"),
    projector_type=("dflash", "dspark"),
) | dict.fromkeys((*MASK, "dspark_bonus_anchor"))
OF_SCALES = _row("attention_value_scale final_logit_softcapping input_embedding_scale output_multiplier")
OF_SELECTOR = _row(
    "conv_kernel_size conv_group_size selector_rank selector_top_k selector_vocab_size",
    markov_rank=(0,),
    enable_confidence_head=(False,),
)
OF_THEIR_BLOCKS = _row("aux_hidden_state_layer_ids sliding_window_non_causal")
OF_SPECULATORS = _row("speculators_model_type speculators_version speculators_config transformer_layer_config")
OF_SPECULATORS |= _row("embed_requires_grad draft_vocab_size target_hidden_size")
OF_SPECULATORS |= {key: (halves,) for key, halves in HALVES.items()}  # which a layer's config says there
# A folder may hold heads of both kinds.
OF_HEADS = "medusa_num_heads medusa_num_layers hydra_num_heads hydra_num_layers hydra_head_arch hidden_size"
OF_VLLM_HEADS = """hidden_size num_heads num_hidden_layers medusa_fc_bias original_lm_head max_paths topk
truncated_vocab_size max_seq_len medusa_num_heads medusa_num_layers"""
OF_ASSISTANT = "backbone_hidden_size centroid_intermediate_top_k num_centroids text_config use_ordered_embeddings"
TABLE: dict[str, Row] = {
    "FasterDecoding Medusa": _row(OF_HEADS + " grounded_heads hidden_state_offset"),
    "vLLM Medusa": _row(OF_VLLM_HEADS),
    "Hydra": _row(OF_HEADS, hidden_state_offset=(0,), grounded_heads=(True,)),
    "EAGLE": LAYER | _row("bias"),
    "EAGLE-3": LAYER | OF_EAGLE3,
    "DFlash": LAYER | OF_BLOCKS | OF_SCALES,
    "DFlash 2": LAYER | OF_BLOCKS | OF_SCALES | OF_SELECTOR,
    "P-EAGLE": LAYER | OF_EAGLE3 | dict.fromkeys(MASK),
    "speculators": OF_SPECULATORS | OF_EAGLE3,
    "speculators (peagle)": OF_SPECULATORS | OF_EAGLE3 | dict.fromkeys(MASK),
    "speculators (mtp)": OF_SPECULATORS | _row("num_nextn_predict_layers num_speculative_steps mtp_num_hidden_layers"),
    "Gemma 4 assistant": _row(OF_ASSISTANT),
    "speculators (dflash, dspark)": OF_SPECULATORS | OF_BLOCKS | OF_THEIR_BLOCKS,
    "speculators (dflash2)": OF_SPECULATORS | OF_BLOCKS | OF_THEIR_BLOCKS | OF_SELECTOR,
}
IN_ITS_OWN = tuple(name for name in TABLE if name.startswith("speculators") and "mtp" not in name)  # config of a layer
WITH_LAYERS = (*IN_ITS_OWN, *(name for name in TABLE if "num_attention_heads" in TABLE[name]))


def head_fields(source: Source, layout: str) -> dict[str, Any]:
    """What a config.json says, nested objects of the head's fields laid flat; a field that may change it is refused.

    A layout that is in no row of the table has a base's config, which is what the file says.
    """
    name, config = source.name, source.config
    if layout not in TABLE:
        return dict(config)
    beside = os.path.join(os.path.dirname(source.files[0]), "mask_embedding.pt")
    if "mask_token_id" in TABLE[layout] and os.path.exists(beside):
        what = "replaces the embedding of the mask token, for which there is no place here"
        raise ValueError(f"{beside!r} {what}: get a drafter of another kind.")
    flat = {key: value for key, value in config.items() if key not in NESTED or not isinstance(value, Mapping | None)}
    for holder in NESTED:
        for key, value in (config.get(holder) or {}).items() if isinstance(config.get(holder), Mapping) else ():
            if None not in (value, flat.get(key)) and flat[key] != value:
                raise ValueError(f"{name!r} says {key} twice, {flat[key]} and {value}: correct its config.json.")
            flat[key] = flat.get(key) if value is None else value
    names = (*source.tensors, *(config.get("architectures") or ()), *(key for key in flat if flat[key] not in NONE))
    for part, other in OTHERS.items() if layout in WITH_LAYERS else ():
        if any(part in key for key in names):
            raise ValueError(f"{name!r} is {other}, which has no family here: get a drafter of another kind.")
    row, layer = TABLE[layout], flat
    if layout in IN_ITS_OWN and isinstance(said_of_layer := flat.get("transformer_layer_config"), Mapping):
        layer = dict(said_of_layer)
        refuse_unknown(name, layer, LAYER | _row("draft_vocab_size"))
        flat = {key: value for key, value in flat.items() if key in row or key not in layer or layer[key] != value}
    refuse_unknown(name, flat, row)
    for key in ("rope_scaling", "rope_parameters"):
        for rotary in _by_type(layer.get(key)).values():
            refuse_unknown(name, rotary, ROTARY, f" of its {key}")
    return flat


# Of drafters that no family here has: what stands in the name of a tensor, or their architecture.
OTHERS = {
    **dict.fromkeys(("prefix_gru.", "embed_proj.", "DominoDraftModel"), "Domino"),
    "sink": "a block drafter with attention sinks",
}


def refuse_unknown(name: str, config: Mapping[str, Any], row: Row, where: str = "") -> None:
    """Refuse what is in no row and may change what heads compute, by a ValueError that names it."""
    for key, value in config.items():
        known = row[key] if key in row else COMMON.get(key, ())
        if key.startswith("_") or known is None or value in (*known, *(NONE[:1] if known else NONE)):
            continue
        if type(value) in (int, float) and value == 1 and key.endswith(SCALES):
            continue
        expected = f"expected {' or '.join(map(repr, known))}" if known else "it is not known"
        what = f"says {key} {shortened.repr(value)}{where} in its config.json, for which there is no place here"
        advice = "get a drafter without it, or remove it there if it changes nothing of what is computed"
        raise ValueError(f"{name!r} {what} ({expected}): {advice}.")


def said(name: str, config: Mapping[str, Any], *keys: str) -> Any:
    """What a config says of one field under some names, by default all; None if nothing. What differs is refused."""
    values = {key: config[key] for key in keys or config if config.get(key) is not None}
    if any(value != next(iter(values.values())) for value in values.values()):
        both = " and ".join(f"{key} {value}" for key, value in values.items())
        raise ValueError(f"{name!r} says {both}, of which one can be true: correct its config.json.")
    return next(iter(values.values()), None)


def flag(name: str, config: Mapping[str, Any], *keys: str) -> bool | None:
    """As `said`, of what is true or false."""
    for key in keys:
        if config.get(key) is not None and not isinstance(config[key], bool):
            value = shortened.repr(config[key])
            raise ValueError(f"{name!r} says {key} {value}, expected true or false: correct its config.json.")
    return said(name, config, *keys)


def halves(source: Source, layout: str, tensors: Mapping[str, Joined]) -> dict[str, Joined]:
    """A head's tensors with rotary positions that pair each number with that half a head further.

    Where they pair neighbours (0, 1), (2, 3), ..., the rows of queries and keys, and their norms, are put in the order
    0, 2, ..., 1, 3, ... once: the scores stay what they are.
    """
    if layout not in WITH_LAYERS:
        return dict(tensors)
    name, config = source.name, source.config
    layer = config.get("transformer_layer_config") or config
    says = [flag(name, layer, key) is HALVES[key] for key in HALVES if flag(name, layer, key) is not None]
    of_liquid = any("lfm" in str(kind).lower() for kind in config.get("architectures") or ())
    if all(says) and (says or not of_liquid):
        return dict(tensors)
    if any(says):
        raise ValueError(f"{name!r} says in two ways how rotary positions pair numbers: correct its config.json.")
    heads = layer["num_attention_heads"]
    head_dim = next(tensor.shape[0] for key, tensor in tensors.items() if key.endswith("q_proj.weight")) // heads
    ends = tuple(f"{part}_{kind}" for part in "qk" for kind in ("proj.weight", "proj.bias", "norm.weight"))
    return {key: half_split(tensor, head_dim) if key.endswith(ends) else tensor for key, tensor in tensors.items()}


def half_split(tensor: Joined, head_dim: int) -> Joined:
    """Rows of heads, in which rotary positions pair neighbours, in the order in which they pair halves."""
    rows = tensor.tensor().unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)
    return Joined((rows.contiguous(),), tensor.shape, tensor.sources)


KEPT = ["max_position_embeddings", "rms_norm_eps", "hidden_act", "initializer_range"]
KEPT += ["bos_token_id", "eos_token_id", "pad_token_id"]
ORIGINAL = "original_max_position_embeddings"
POSITIVE = ("rope_theta", "rms_norm_eps", "max_position_embeddings", "factor", ORIGINAL)
ATTENTION = "self_attn."
# Fields that say that a layer has some tensors.
PROMISED = dict.fromkeys(("attention_bias", "qkv_bias"), f"{ATTENTION}q_proj.bias")
PROMISED |= {"mlp_bias": "mlp.gate_proj.bias", "use_qk_norm": f"{ATTENTION}q_norm.weight"}
FULL, SLIDING = "full_attention", "sliding_attention"
THETA = 10000.0  # where a config says none


def read_layer_config(
    reader: Reader,
    prefix: str,
    config: Mapping[str, Any],
    hidden_size: int,
    vocab_size: int,
    layers: int = 1,
    theta: float | None = THETA,
) -> PreTrainedConfig:
    """The config of layers whose tensors stand under a prefix; sizes are those of the tensors, and noted if others.

    theta: the rotary base where none is said; None if that is refused.
    """
    if not config.get("num_attention_heads"):
        what = "has no config.json that says num_attention_heads, which tensors do not tell"
        raise ValueError(f"{reader.name!r} {what}: give the folder that has it.")
    rows = {name: len(reader.take(f"{prefix}{ATTENTION}{name}_proj.weight")) for name in ("q", "k")}
    heads = config["num_attention_heads"]
    head_dim = rows["q"] // heads
    if config.get("head_dim") not in (None, head_dim):
        what = f"says num_attention_heads {heads} and head_dim {config['head_dim']}, its queries have {rows['q']} rows"
        raise ValueError(f"{reader.name!r} {what}: correct its config.json.")
    for field, tensor in PROMISED.items():
        if flag(reader.name, config, field):
            reader.take(prefix + tensor)  # lost, or not: say so
    sizes = {
        "hidden_size": hidden_size,
        "intermediate_size": len(reader.take(f"{prefix}mlp.gate_proj.weight")),
        "num_key_value_heads": rows["k"] // head_dim,
        "head_dim": head_dim,
        "vocab_size": vocab_size,
    }
    if (told := config.get("num_hidden_layers") or layers) > layers:
        raise ValueError(f"{reader.name!r} has {layers} of the {told} layers of its config.json: get the file again.")
    reader.note_differences(config, **sizes, num_hidden_layers=layers)
    kinds, window = layer_types(reader.name, config, layers)
    fields = {name: config[name] for name in KEPT if config.get(name) is not None}
    fields |= {"rope_parameters": rotary_of(reader.name, config, kinds, theta)} | sizes
    if fields.get("hidden_act", "silu") not in ACT2FN:
        raise ValueError(f"{reader.name!r} says hidden_act {fields['hidden_act']!r}, which is not known here.")
    for name, value in (*fields.items(), *fields["rope_parameters"].items()):
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf
        if name in POSITIVE and not number:
            problem = f"{name} {str(value)[:40]!r}, expected a number above 0"
            raise ValueError(f"{reader.name!r} says {problem}: correct its config.json.")
    fields |= {"num_attention_heads": heads, "num_hidden_layers": layers, "tie_word_embeddings": False}
    slides = SLIDING in kinds
    fields |= {"sliding_window": window, "layer_types": kinds} if slides else {}
    attention, mlp = f"{prefix}{ATTENTION}o_proj.bias" in reader, f"{prefix}mlp.gate_proj.bias" in reader
    if f"{prefix}{ATTENTION}q_norm.weight" in reader:
        return Qwen3Config(**fields, use_sliding_window=slides, attention_bias=attention)
    if f"{prefix}{ATTENTION}q_proj.bias" in reader and not (attention or mlp):  # as Qwen2 has it
        return Qwen2Config(**fields, use_sliding_window=slides)
    return LlamaConfig(**fields, attention_bias=attention, mlp_bias=mlp)


def layer_types(name: str, config: Mapping[str, Any], layers: int) -> tuple[list[str], int | None]:
    """Which of so many layers see a window, as projects say it, and how wide it is."""
    slides, uses = flag(name, config, "use_swa"), flag(name, config, "use_sliding_window")
    of_swa = config.get("swa_window_size")
    window = (slides and of_swa) or config.get("sliding_window")
    kinds = list(config.get("layer_types") or [])
    if not {FULL, SLIDING}.issuperset(kinds) or (kinds and len(kinds) < layers):
        what = f"has the layer_types {shortened.repr(config['layer_types'])}: expected {FULL!r} or {SLIDING!r}"
        raise ValueError(f"{name!r} {what} for each of its {layers} layers, others have no family here.")
    if SLIDING in kinds[:layers] and not slides and False in (slides, uses):
        what = f"says use_swa {slides} and use_sliding_window {uses}, and the layer_types {shortened.repr(kinds)}"
        raise ValueError(f"{name!r} {what}: correct its config.json.")
    field, size = ("swa_window_size", of_swa) if of_swa else ("sliding_window", window)
    says = slides if of_swa else uses
    if not kinds and not slides and size and says is None and size < config.get("max_position_embeddings", math.inf):
        what = f"says {field} {size}, and not which of its layers see so many positions only"
        advice = "add use_swa or use_sliding_window (false for none) or layer_types to its config.json"
        raise ValueError(f"{name!r} {what}: {advice}.")
    if slides:
        kinds = [SLIDING] * layers
    elif not kinds:
        first = config.get("max_window_layers", 28) if uses else layers
        kinds = [FULL if index < first or not window else SLIDING for index in range(layers)]
    if SLIDING in kinds[:layers] and not window:
        raise ValueError(f"{name!r} says that its layers see a window, and no sliding_window: correct its config.json.")
    return kinds[:layers], window


def _by_type(said_of_rotary: Any) -> dict[str, Mapping[str, Any]]:
    """Rotary parameters by type of layer; under "" where they are of all."""
    if not isinstance(said_of_rotary, Mapping):
        return {}
    of_types = {key: value for key, value in said_of_rotary.items() if isinstance(value, Mapping)}
    return of_types or {"": said_of_rotary}


def rotary_of(
    name: str, config: Mapping[str, Any], kinds: Iterable[str], theta: float | None = THETA
) -> dict[str, Any]:
    """The rotary parameters of layers of these types; what is said of one in several ways is refused."""
    parameters: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        value = config.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise TypeError(f"{key} is {value!r}")
        of_types = _by_type(value)
        wanted = [dict(of_types.get(kind, of_types.get("", {}))) for kind in dict.fromkeys(kinds)]
        if any(one != wanted[0] for one in wanted) or (of_types and not wanted[0]):
            what = f"says rope_parameters for {', '.join(sorted(of_types))}, and its layers are "
            what += " and ".join(dict.fromkeys(kinds))
            raise ValueError(f"{name!r} {what}, which have one for all here: correct its config.json.")
        spelt = {f"{field} of its {key}": wanted[0].pop(field, None) for field in ("rope_type", "type")}
        wanted[0]["rope_type"] = said(name, {at: "default" if kind == "mrope" else kind for at, kind in spelt.items()})
        for field, value in wanted[0].items():
            at_both = {f"{field} of its rope_scaling": parameters.get(field), f"{field} of its {key}": value}
            parameters[field] = said(name, at_both)
    thetas = {"rope_theta": config.get("rope_theta"), "rope_theta of its rope_parameters": parameters.get("rope_theta")}
    given = said(name, thetas)
    if (theta := theta if given is None else given) is None:
        what = "does not say rope_theta or rope_parameters of its layers, which need not be the base's"
        raise ValueError(f"{name!r} {what}: give a folder whose config.json does.")
    kind = parameters.get("rope_type") or "default"
    for key in ("mrope_section", "mrope_interleaved", "partial_rotary_factor"):  # nothing in a text, or 1
        parameters.pop(key, None)
    if kind != "default" and config.get(ORIGINAL):  # beside them, as Phi-3 has it
        parameters.setdefault(ORIGINAL, config[ORIGINAL])
    elif kind == "default" and parameters.get("factor") not in (None, 1):
        raise ValueError(f"{name!r} says factor {parameters['factor']} and no rope_type: correct its config.json.")
    return {**parameters, "rope_type": kind, "rope_theta": theta}


def llama_fields(layer: PreTrainedConfig, vocab_size: int) -> dict[str, Any]:
    """A Llama config for one layer, as projects of before transformers 5 read it: rotary fields on the top level."""
    rope = dict(getattr(layer, "rope_parameters", None) or {})
    theta = rope.pop("rope_theta", 10000.0)
    rope.pop("type", None)
    heads = layer.num_attention_heads
    alike = ("hidden_size", "intermediate_size", "num_attention_heads", *KEPT[:3])
    return {
        **{name: getattr(layer, name) for name in alike},
        "model_type": "llama",
        "num_key_value_heads": getattr(layer, "num_key_value_heads", None) or heads,
        "head_dim": getattr(layer, "head_dim", None) or layer.hidden_size // heads,
        "num_hidden_layers": 1,
        "rope_theta": theta,
        "rope_scaling": rope if rope.get("rope_type", "default") != "default" else None,
        "vocab_size": vocab_size,
        "tie_word_embeddings": False,
    }
