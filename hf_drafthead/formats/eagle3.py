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

import re
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_drafthead.formats.base_tensors import INPUT, base_tensor, same_values
from hf_drafthead.formats.disk import Joined, Source
from hf_drafthead.formats.fields import MASK, llama_fields, read_layer_config, said
from hf_drafthead.formats.layout import SGLANG, VLLM, Files, Heads, Layout, Loss, Prefixes, Reader, SavedHeads, renamed
from hf_drafthead.modeling.base import DraftHeadPreTrainedModel
from hf_drafthead.modeling.eagle3 import Eagle3ForCausalLM
from hf_drafthead.modeling.files import shortened
from hf_drafthead.modeling.peagle import PEagleForCausalLM

IDS = "eagle_aux_hidden_state_layer_ids"
AUXILIARY = ("use_aux_hidden_state", "num_aux_hidden_states")  # fields that say whether hidden states are joined
WRITTEN_FOR = "hf_drafthead_export"  # the target, in what is written here: it settles what the layout leaves open
LLAMA_LAYERS = ("llama", "mistral")
NORM_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")  # config fields
FIRST = ("midlayer.", "layers.0.")
LATER = re.compile(r"layers\.(\d+)\.")
MASK_STATES = "mask_hidden"  # of P-EAGLE
LEGACY_NORMS = ["aux_norm_low.weight", "aux_norm_mid.weight", "aux_norm_high.weight"]


class Eagle3(Layout):
    """A head beside a Llama's config."""

    name = "EAGLE-3"
    family: ClassVar[type[DraftHeadPreTrainedModel]] = Eagle3ForCausalLM
    targets: ClassVar[tuple[str, ...]] = ("eagle3", "sglang", "vllm")
    holds_vocabulary = True

    def detect(self, keys: Iterable[str], config: Mapping[str, Any]) -> bool:
        names = set(keys)
        parallel = (MASK_STATES in names) == (self.family is PEagleForCausalLM)
        return layer_prefix(names) is not None and "speculators_model_type" not in config and parallel

    def read(self, source: Source, fields: Mapping[str, Any]) -> Heads:
        config = source.config
        flags = {
            "feature_layers": _features(source, fields),
            "norm_before_residual": bool(config.get("norm_before_residual", False)),
            "norm_output": _norm_output(source, fields),
        }
        return read_pair_head(self, source, config, flags, config.get("base_model_name_or_path"))

    def write(self, saved: SavedHeads, target: str) -> Files:
        config, layer, text = saved.config, saved.config.own_layer, saved.config.get_text_config()
        _refuse_what_is_lost(saved, target)
        tensors, notes = split_tensors(saved, "midlayer." if config.num_layers == 1 else "layers.0.")
        about = llama_fields(layer, text.vocab_size) | {
            "architectures": ["LlamaForCausalLM" if target == "eagle3" else "LlamaForCausalLMEagle3"],
            "num_hidden_layers": config.num_layers,
            "draft_vocab_size": config.draft_vocab_size,
            **{name: getattr(config, name) for name in NORM_FLAGS},
            "base_model_name_or_path": saved.base,
            WRITTEN_FOR: target,
        }
        if layer.hidden_size != text.hidden_size or (target == "eagle3" and config.own_embeddings):
            about["target_hidden_size"] = text.hidden_size  # the original code reads the head's own embeddings then
        if target == "sglang" and config.own_embeddings and layer.hidden_size == text.hidden_size:
            _drop_equal_embeddings(saved, tensors, notes)
        features = features_to_write(saved)
        if features is not None:
            if target == "sglang":
                about["eagle_config"] = {"use_aux_hidden_state": True, IDS: [layer - 1 for layer in features]}
            else:
                about |= {IDS: features, "num_aux_hidden_states": len(features)}
        launch = {
            "eagle3": "EaModel.from_pretrained(base_model_path=BASE, ea_model_path=FOLDER, use_eagle3=True)",
            "sglang": SGLANG.format("EAGLE3"),
            "vllm": VLLM.format("eagle3", min(config.num_draft_heads, 5)),
        }
        return Files("model.safetensors", tensors, about, [*notes, launch[target]])


class PEagle(Eagle3):
    """A P-EAGLE head beside a Llama's config, as Amazon and SpecForge save it."""

    name = "P-EAGLE"
    family = PEagleForCausalLM
    targets = ()


def _features(source: Source, fields: Mapping[str, Any]) -> list[int] | None:
    """The inputs of which layers are read; None for the published ones. Numbers that mean two things are refused."""
    if fields.get("feature_layers") is not None:
        return list(fields["feature_layers"])
    refuse_without_auxiliary(source)
    config = source.config
    ids = config.get(IDS)
    if not ids:  # an empty list is what engines take for none
        return None
    if not isinstance(ids, list) or not all(type(layer) is int for layer in ids):
        raise ValueError(
            f"{source.name!r} has {IDS} {shortened.repr(ids)}: expected a list of layer numbers; correct config.json, "
            "or give feature_layers= (on the command line --set)."
        )
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


def refuse_without_auxiliary(source: Source) -> None:
    """Refuse a head that reads the base's last hidden state alone, as ModelOpt trains it without auxiliary states.

    Such a head has no layer that joins features; where its file has one all the same, what it reads is not said.
    """
    for name in AUXILIARY:
        if source.config.get(name) is not None and not source.config[name]:
            raise ValueError(
                f"{source.name!r} says {name} {source.config[name]!r}, a head that reads the base's last hidden state "
                "and no auxiliary ones: EAGLE-3 heads here read the inputs of layers; convert heads that were trained "
                "with auxiliary states, or, if these were, say which by feature_layers= (on the command line --set)."
            )


def _norm_output(source: Source, fields: Mapping[str, Any]) -> bool:
    """Whether the normed output is fed back; refused if the config says so, but not in whose sense."""
    if fields.get("norm_output") is not None:
        return bool(fields["norm_output"])
    if source.config.get("norm_output") and WRITTEN_FOR not in source.config:
        raise ValueError(
            f"{source.name!r} has norm_output in its config.json, which has SGLang and vLLM feed the normed output "
            "back, while heads trained with SpecForge are fed the output before the norm: say which by "
            "norm_output=True or norm_output=False (on the command line --set)."
        )
    return bool(source.config.get("norm_output"))


def published_features(saved: SavedHeads) -> list[int]:
    """The inputs that are read where nothing else is said."""
    layers = saved.config.get_text_config().num_hidden_layers
    return [2, layers // 2, layers - 3]


def features_to_write(saved: SavedHeads, engine: str = "engines sort them") -> list[int] | None:
    """The inputs of which layers are read; None for the published ones. Another order than engines read is refused."""
    features = list(saved.config.feature_layers)
    if features != sorted(features):
        raise Loss(f"it reads the layers {features}, and {engine}", "train it with ascending feature_layers")
    return None if features == published_features(saved) else features


def _refuse_what_is_lost(saved: SavedHeads, target: str) -> None:
    """Refuse what the target has no field for, and would run wrongly without a word."""
    config, layer = saved.config, saved.config.own_layer
    elsewhere = "use --to vllm or --to speculators"
    if config.fc_bias:
        raise Loss("fc has a bias, which the target drops or gives to attention too", "train without fc_bias")
    if layer.model_type not in LLAMA_LAYERS:
        what = f"its layer is that of a {layer.model_type!r} model, and the target builds a Llama's"
        raise Loss(what, "use --to speculators, or train it with layer_config= of a Llama")
    if any(key.startswith("body.") and key.endswith(".bias") for key in saved.tensors):
        raise Loss("its layer has biases, which the target drops", "use --to speculators, or train without them")
    if config.window is not None:
        what = f"its layer sees {config.window} positions, and the target's all of them"
        raise Loss(what, "use --to speculators")
    features = features_to_write(saved)
    if target == "vllm":
        return
    if config.num_layers > 1:
        raise Loss(f"it has {config.num_layers} layers, and the target runs one", elsewhere)
    if config.norm_before_residual:
        raise Loss("the target has no norm_before_residual and adds the state before the norm", elsewhere)
    if len(config.feature_layers) != 3:
        raise Loss(f"it reads {len(config.feature_layers)} hidden states, and the target three", elsewhere)
    if target == "sglang":
        if 0 in config.feature_layers:
            what = "it reads the embeddings (feature layer 0), and the target numbers the outputs of layers"
            raise Loss(what, elsewhere)
        return
    for name in NORM_FLAGS[1:]:
        if getattr(config, name):
            raise Loss(f"the original code has no {name} and leaves it out", "use --to sglang or --to vllm")
    if features is not None:
        what = f"it reads the layers {features} of the base, and the original code always {published_features(saved)}"
        raise Loss(what, elsewhere)
    if layer.head_dim * layer.num_attention_heads != layer.hidden_size:
        what = (
            f"its {layer.num_attention_heads} attention heads are {layer.head_dim} wide, and the original code divides "
            f"the hidden size {layer.hidden_size} by their number"
        )
        raise Loss(what, elsewhere)
    kind = (layer.rope_parameters or {}).get("rope_type", "default")
    if kind not in ("default", "linear", "dynamic"):
        raise Loss(f"its rotary positions are scaled in the way {kind!r}, which it does not know", elsewhere)


def _drop_equal_embeddings(saved: SavedHeads, tensors: dict[str, Tensor], notes: list[str]) -> None:
    """Leave out embeddings for an engine that puts the base's in their place; refused unless they are the base's."""
    theirs = base_tensor(saved.base_model or saved.base or {}, INPUT)
    if theirs is None or not same_values(tensors["embed_tokens.weight"], theirs):
        what = "it has embeddings of its own, in the place of which SGLang puts the base's, where both are as wide"
        why = "" if theirs is not None else " (whether they differ cannot be told: the base is not on this machine)"
        raise Loss(what + why, "use --to vllm or --to speculators")
    del tensors["embed_tokens.weight"]
    notes.append(f"the {INPUT} are the base's and are left out: SGLang takes the base's.")


def layer_prefix(keys: Iterable[str]) -> str | None:
    """What the names of the first layer begin with; None if there is no such layer."""
    names = set(keys)
    return next((prefix for prefix in FIRST if f"{prefix}hidden_norm.weight" in names), None)


def _prefixes(first: str, layers: int) -> Prefixes:
    """How the layers are called here and there, where the first is called `first`."""
    return [("body.layer.", first), *((f"body.more.{n - 1}.", f"layers.{n}.") for n in range(1, layers))]


def read_pair_head(
    layout: Layout, source: Source, layer: Mapping[str, Any], flags: dict[str, Any], base: str | None
) -> Heads:
    """An EAGLE-3 head; its sizes, number of layers and norms are those of the tensors."""
    reader, config = Reader(source.name, source.tensors), source.config
    first = layer_prefix(source.tensors)
    assert first is not None
    width, wide = reader.take("fc.weight").shape
    target_width = config.get("target_hidden_size") or width
    count, rest = divmod(wide, target_width)
    wanted = flags["feature_layers"]
    if rest or count != (3 if wanted is None else len(wanted)):
        raise ValueError(
            f"{source.name!r} has 'fc.weight' {[width, wide]}, which joins {wide / target_width:g} hidden states of "
            f"width {target_width}, but {'three are published' if wanted is None else f'feature_layers is {wanted}'}: "
            "give feature_layers= (on the command line --set) or correct target_hidden_size."
        )
    vocab_size = read_vocabulary(reader, layer)
    if "lm_head.weight" in reader:
        draft_size = len(reader.take("lm_head.weight"))
    else:
        draft_size = len(reader.tensors["d2t"]) if "d2t" in reader else config.get("draft_vocab_size") or vocab_size
        reader.notes.append("the file has no lm_head: the base's is used.")
    tensors = {"fc.weight": reader.one("fc.weight"), "norm.weight": reader.one("norm.weight", (width,))}
    tensors |= read_draft_tokens(reader, draft_size, vocab_size)
    norms = LEGACY_NORMS if LEGACY_NORMS[0] in reader else [f"fc_norm.{i}.weight" for i in range(count)]
    optional = {
        "lm_head.weight": (draft_size, width),
        "fc.bias": (width,),
        "input_norm.weight": (wide,),
        "embed_tokens.weight": (vocab_size, width),
    }
    tensors |= {name: reader.one(name, shape) for name, shape in optional.items() if name in reader}
    if norms[0] in reader:
        tensors |= {f"fc_norm.{i}.weight": reader.one(key, (target_width,)) for i, key in enumerate(norms)}
    layers = 1 + max((int(match[1]) for key in source.tensors if (match := LATER.match(key))), default=0)
    layer_config = read_layer_config(reader, first, layer, width, vocab_size, layers)
    layer_config.num_hidden_layers = 1
    tensors |= reader.renamed(_prefixes(first, layers))
    form = flags | {
        "draft_vocab_size": draft_size,
        "layer_config": layer_config,
        "num_layers": layers,
        "norm_before_fc": "input_norm.weight" in tensors,
        "fc_norm": "fc_norm.0.weight" in tensors,
        "fc_bias": "fc.bias" in tensors,
        "own_embeddings": "embed_tokens.weight" in tensors,
        "share_lm_head": "lm_head.weight" not in tensors,
    }
    if layout.family is PEagleForCausalLM:
        if config.get("embed_requires_grad"):  # trained embeddings, which are the head's own
            reader.take("embed_tokens.weight")
        tensors[MASK_STATES] = Joined((reader.take(MASK_STATES),), (wide,), (MASK_STATES,))
        form["mask_token_id"] = said(source.name, config, *MASK)
        if form["mask_token_id"] is None:
            raise ValueError(f"{source.name!r} does not say mask_token_id: give mask_token_id= (--set).")
    for name, key in (("norm_before_fc", "input_norm.weight"), ("fc_norm", norms[0])):
        if config.get(name):
            reader.take(key)  # a lost norm: say so
    for name in ("norm_before_fc", "fc_norm", "draft_vocab_size"):
        reader.note_difference(config, name, form[name])
    return reader.heads(layout, form, tensors, hidden_size=target_width, vocab_size=vocab_size, base=base)


def split_tensors(saved: SavedHeads, first: str) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors of a head under the common names, the first layer's beginning with `first`, and notes on them."""
    if saved.config.share_lm_head:
        raise Loss("it has no lm_head of its own, which the target looks for", "train with share_lm_head=False")
    tensors = dict(saved.tensors)
    notes: list[str] = []
    if (tokens := tensors.pop("draft_tokens", None)) is not None:
        if not torch.equal(tokens, tokens.sort().values):
            tokens, order = tokens.sort()
            tensors["lm_head.weight"] = tensors["lm_head.weight"][order]
            notes.append("the draft vocabulary is written in ascending order, which all readers of t2d expect.")
        tensors |= draft_map(tokens, saved.config.get_text_config().vocab_size)
    prefixes = _prefixes(first, saved.config.num_layers)
    return {renamed(key, prefixes) or key: tensor for key, tensor in tensors.items()}, notes


def draft_map(tokens: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """What files say of a draft vocabulary (D,) in ascending order."""
    marked = torch.zeros(vocab_size, dtype=torch.bool)
    marked[tokens] = True
    return {"d2t": tokens - torch.arange(len(tokens)), "t2d": marked}


def read_vocabulary(reader: Reader, layer: Mapping[str, Any]) -> int:
    """V, by the tensors that have it; by the config where none does."""
    config_size = layer.get("vocab_size")
    sizes = [reader.tensors[name].shape[0] for name in ("t2d", "embed_tokens.weight") if name in reader]
    if not sizes:
        if not config_size:
            raise ValueError(
                f"{reader.name!r} has no tensor and no config.json that tells the vocabulary of its base: give the "
                "folder that has it."
            )
        return config_size
    reader.note_difference(layer, "vocab_size", sizes[0])
    return sizes[0]


def read_draft_tokens(reader: Reader, draft_size: int, vocab_size: int) -> dict[str, Joined]:
    """The base's id of each token of the draft vocabulary (D,), by its name here; nothing where that is the base's."""
    if draft_size == vocab_size:
        if "d2t" in reader and reader.take("d2t").any():
            raise ValueError(
                f"{reader.name!r} has a d2t that exchanges tokens, though it guesses among all of them: it is damaged, "
                "get the file again."
            )
        for name in {"d2t", "t2d"} & set(reader.tensors):
            reader.drop(name, "it guesses among all tokens of the base")
        return {}
    marked = reader.take("t2d", (vocab_size,)).bool() if "t2d" in reader else None
    if "d2t" in reader:
        tokens = reader.take("d2t", (draft_size,)).long() + torch.arange(draft_size)
        if marked is not None:
            reader.dropped["t2d"] = "says again what d2t says"
        elif draft_size > 1 and not reader.tensors["d2t"].any():
            raise ValueError(
                f"{reader.name!r} has a d2t of zeros for a draft vocabulary of {draft_size} among {vocab_size} tokens, "
                "as a lost one is filled: get the file again, or one that holds t2d."
            )
        good = bool(((tokens >= 0) & (tokens < vocab_size)).all()) and len(tokens.unique()) == draft_size
        if good and marked is not None:
            good = bool(marked[tokens].all()) and int(marked.sum()) == draft_size
        if not good:
            raise ValueError(
                f"{reader.name!r} has a d2t that does not name {draft_size} different tokens of {vocab_size}"
                f"{' that t2d marks' if marked is not None else ''}: it is damaged, get the file again."
            )
        return {"draft_tokens": Joined((tokens,), (draft_size,), ("d2t",))}
    if marked is None or int(marked.sum()) != draft_size:
        raise ValueError(
            f"{reader.name!r} has lost its d2t: nothing says which {draft_size} of {vocab_size} tokens it guesses "
            "among, get a file that has it."
        )
    reader.notes.append("the file has no d2t: the draft vocabulary is what t2d marks, in ascending order.")
    return {"draft_tokens": Joined((marked.nonzero()[:, 0],), (draft_size,), ("t2d",))}
