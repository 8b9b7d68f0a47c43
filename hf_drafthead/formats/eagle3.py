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
from hf_drafthead.formats.fields import MASK, flag, llama_fields, read_layer_config, said
from hf_drafthead.formats.layout import KIND, SET, SGLANG, VLLM, Files, Heads, Layout, Loss, Reader, SavedHeads
from hf_drafthead.formats.tables import NO, YES, Limits, Prefixes, renamed
from hf_drafthead.modeling.base import DraftHeadPreTrainedModel
from hf_drafthead.modeling.eagle3 import Eagle3ForCausalLM
from hf_drafthead.modeling.files import shortened
from hf_drafthead.modeling.peagle import PEagleForCausalLM

IDS = "eagle_aux_hidden_state_layer_ids"
AUXILIARY = ("use_aux_hidden_state", "num_aux_hidden_states")  # fields that say whether hidden states are joined
WRITTEN_FOR = "hf_drafthead_export"  # the target, in what is written here: it settles what the layout leaves open
NORM_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")  # config fields
FIRST = ("midlayer.", "layers.0.")
LATER = re.compile(r"layers\.(\d+)\.")
MASK_STATES = "mask_hidden"  # of P-EAGLE
OPTIONAL = ("lm_head.weight", "fc.bias", "input_norm.weight", "embed_tokens.weight")
LEGACY_NORMS = ["aux_norm_low.weight", "aux_norm_mid.weight", "aux_norm_high.weight"]
OF_ALL = {"share_lm_head": NO, "fc_bias": NO, "reads_in_order": YES}  # engines sort the layers that are read
OF_LLAMA = {"layer_model_type": ("llama", "mistral"), "biases_in_layers": NO, "window": (None,)}
ONE_LAYER: dict[str, tuple[Any, ...]] = {"num_layers": (1,), "norm_before_residual": NO, "feature_count": (3,)}
# The original code reads the published layers, and divides the width by the number of attention heads.
ORIGINAL_CODE: dict[str, tuple[Any, ...]] = dict.fromkeys(("norm_before_fc", "fc_norm", "norm_output"), NO)
ORIGINAL_CODE |= {"reads_as_published": YES, "heads_fill_width": YES, "rotary_type": ("default", "linear", "dynamic")}


class Eagle3(Layout):
    """A head beside a Llama's config."""

    name = "EAGLE-3"
    family: ClassVar[type[DraftHeadPreTrainedModel]] = Eagle3ForCausalLM
    targets: ClassVar[tuple[str, ...]] = ("eagle3", "sglang", "vllm")
    limits: ClassVar[Limits] = {
        "": OF_ALL | OF_LLAMA,
        "eagle3": ONE_LAYER | ORIGINAL_CODE,
        "sglang": ONE_LAYER | {"reads_embeddings": NO},  # which numbers the outputs of layers
    }
    holds_vocabulary = True

    def detect(self, keys: Iterable[str], config: Mapping[str, Any]) -> bool:
        names = set(keys)
        parallel = (MASK_STATES in names) == (self.family is PEagleForCausalLM)
        return layer_prefix(names) is not None and KIND not in config and parallel

    def read(self, source: Source, fields: Mapping[str, Any]) -> Heads:
        config = source.config
        if fields.get("norm_output") is None and config.get("norm_output") and WRITTEN_FOR not in config:
            what = "says norm_output: SGLang and vLLM feed the normed output back then, and SpecForge does not"
            raise ValueError(f"{source.name!r} {what}: say which by norm_output=True or norm_output=False ({SET}).")
        features = _features(source, fields)
        return read_pair_head(self, source, config, features, config.get("base_model_name_or_path"))

    def write(self, saved: SavedHeads, target: str) -> Files:
        config = saved.config
        tensors, notes = split_tensors(saved, "midlayer." if config.num_layers == 1 else "layers.0.")
        about = pair_fields(saved) | llama_fields(config.own_layer, saved.text.vocab_size)
        about["architectures"] = ["LlamaForCausalLM" if target == "eagle3" else "LlamaForCausalLMEagle3"]
        about |= {"num_hidden_layers": config.num_layers, "base_model_name_or_path": saved.base, WRITTEN_FOR: target}
        features = about.pop(IDS)
        if not saved.as_wide_as_base or (target == "eagle3" and config.own_embeddings):
            about["target_hidden_size"] = saved.text.hidden_size  # the original code reads the head's embeddings then
        if target == "sglang" and config.own_embeddings and saved.as_wide_as_base:
            theirs = base_tensor(saved.base_model or saved.base or {}, INPUT)
            if theirs is None or not same_values(tensors.pop("embed_tokens.weight"), theirs):
                what = "it has embeddings of its own, in the place of which SGLang puts the base's"
                raise Loss(what, "use --to vllm or --to speculators")
            notes.append(f"the {INPUT} are the base's and are left out: SGLang takes the base's.")
        if features is not None and target == "sglang":
            about["eagle_config"] = {"use_aux_hidden_state": True, IDS: [layer - 1 for layer in features]}
        elif features is not None:
            about |= {IDS: features, "num_aux_hidden_states": len(features)}
        launch = {
            "eagle3": "EaModel.from_pretrained(base_model_path=BASE, ea_model_path=FOLDER, use_eagle3=True)",
            "sglang": SGLANG.format("EAGLE3"),
            "vllm": VLLM.format("eagle3", min(config.num_draft_heads, 5)),
        }
        return Files(tensors, about, [*notes, launch[target]])


class PEagle(Eagle3):
    """A P-EAGLE head beside a Llama's config, as Amazon and SpecForge save it."""

    name = "P-EAGLE"
    family = PEagleForCausalLM
    targets = ()


def said_features(source: Source, fields: Mapping[str, Any]) -> list[int] | None:
    """The numbers of layers that the user or the file says, None for the published ones.

    Refused is a head that reads the base's last hidden state alone, as ModelOpt trains it without auxiliary states. It
    has no layer that joins features; where its file has one all the same, what it reads is not said.
    """
    if fields.get("feature_layers") is not None:
        return list(fields["feature_layers"])
    for name in AUXILIARY:
        if source.config.get(name) is not None and not source.config[name]:
            what = f"says {name} {source.config[name]!r}, a head that reads the base's last hidden state alone"
            advice = f"EAGLE-3 heads here read inputs of layers; if this one does, say which by feature_layers= ({SET})"
            raise ValueError(f"{source.name!r} {what}: {advice}.")
    return source.config.get(IDS) or None  # an empty list is what engines take for none


def _features(source: Source, fields: Mapping[str, Any]) -> list[int] | None:
    """The inputs of which layers are read; None for the published ones. Numbers that mean two things are refused."""
    ids, target = said_features(source, fields), source.config.get(WRITTEN_FOR)
    if ids is None or fields.get("feature_layers") is not None:
        return ids
    if not isinstance(ids, list) or not all(type(layer) is int for layer in ids):
        what = f"has {IDS} {shortened.repr(ids)}: expected a list of layer numbers"
        raise ValueError(f"{source.name!r} {what}; correct config.json, or give feature_layers= ({SET}).")
    shifted = [layer + 1 for layer in ids]
    if target == "vllm":
        return ids
    if target == "sglang" or ids[0] == 1:
        return shifted
    what = f"the layers {ids} ({IDS}), the inputs of these for vLLM, of {shifted} for SGLang and SpecForge"
    advice = f"say which by feature_layers={ids} or feature_layers={shifted} ({SET})"
    raise ValueError(f"{source.name!r} reads {what}: {advice}.")


def pair_fields(saved: SavedHeads) -> dict[str, Any]:
    """What config.json of all targets says of a head; of the layers that are read None if they are the published."""
    flags = {name: getattr(saved.config, name) for name in NORM_FLAGS}
    features = None if saved.reads_as_published else list(saved.config.feature_layers)
    return {"draft_vocab_size": saved.config.draft_vocab_size, **flags, IDS: features}


def layer_prefix(keys: Iterable[str]) -> str | None:
    """What the names of the first layer begin with; None if there is no such layer."""
    names = set(keys)
    return next((prefix for prefix in FIRST if f"{prefix}hidden_norm.weight" in names), None)


def _prefixes(first: str, layers: int) -> Prefixes:
    """How the layers are called here and there, where the first is called `first`."""
    return [("body.layer.", first), *((f"body.more.{n - 1}.", f"layers.{n}.") for n in range(1, layers))]


def read_pair_head(
    layout: Layout, source: Source, layer: Mapping[str, Any], features: list[int] | None, base: str | None
) -> Heads:
    """An EAGLE-3 head; its sizes, number of layers and norms are those of the tensors."""
    reader, config = Reader(source.name, source.tensors), source.config
    first = layer_prefix(source.tensors) or ""
    width, wide = reader.take("fc.weight").shape
    target_width = config.get("target_hidden_size") or width
    vocab_size = read_vocabulary(reader, layer)
    if "lm_head.weight" in reader:
        draft_size = len(reader.take("lm_head.weight"))
    else:
        draft_size = len(reader.tensors["d2t"]) if "d2t" in reader else config.get("draft_vocab_size") or vocab_size
        reader.notes.append("the file has no lm_head: the base's is used.")
    tensors = {name: reader.one(name) for name in ("fc.weight", "norm.weight")}
    tensors |= {name: reader.one(name) for name in OPTIONAL if name in reader}
    tensors |= read_draft_tokens(reader, draft_size, vocab_size)
    norms = LEGACY_NORMS if LEGACY_NORMS[0] in reader else [f"fc_norm.{i}.weight" for i in range(wide // target_width)]
    if norms[0] in reader:
        tensors |= {f"fc_norm.{i}.weight": reader.one(key) for i, key in enumerate(norms)}
    layers = 1 + max((int(match[1]) for key in source.tensors if (match := LATER.match(key))), default=0)
    layer_config = read_layer_config(reader, first, layer, width, vocab_size, layers)
    layer_config.num_hidden_layers = 1
    tensors |= reader.renamed(_prefixes(first, layers))
    flags = ("norm_before_residual", "norm_output")  # which no tensor tells
    form = {name: bool(flag(source.name, config, name)) for name in flags} | {
        "feature_layers": features,
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
        states = reader.take(MASK_STATES).flatten()
        tensors[MASK_STATES] = Joined((states,), tuple(states.shape), (MASK_STATES,))
        form["mask_token_id"] = said(source.name, config, *MASK)
        if form["mask_token_id"] is None:
            raise ValueError(f"{source.name!r} does not say mask_token_id: give mask_token_id= (--set).")
    for name, key in (("norm_before_fc", "input_norm.weight"), ("fc_norm", norms[0])):
        if config.get(name):
            reader.take(key)  # a lost norm: say so
    reader.note_differences(config, **{key: form[key] for key in ("norm_before_fc", "fc_norm", "draft_vocab_size")})
    return reader.heads(layout, form, tensors, hidden_size=target_width, vocab_size=vocab_size, base=base)


def split_tensors(saved: SavedHeads, first: str) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors of a head under the common names, the first layer's beginning with `first`, and notes on them."""
    tensors = dict(saved.tensors)
    notes: list[str] = []
    if (tokens := tensors.pop("draft_tokens", None)) is not None:
        if not torch.equal(tokens, tokens.sort().values):
            tokens, order = tokens.sort()
            tensors["lm_head.weight"] = tensors["lm_head.weight"][order]
            notes.append("the draft vocabulary is written in ascending order, which all readers of t2d expect.")
        tensors |= draft_map(tokens, saved.text.vocab_size)
    prefixes = _prefixes(first, saved.config.num_layers)
    return {renamed(key, prefixes) or key: tensor for key, tensor in tensors.items()}, notes


def draft_map(tokens: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """What files say of a draft vocabulary (D,) in ascending order."""
    marked = torch.zeros(vocab_size, dtype=torch.bool)
    marked[tokens] = True
    return {"d2t": tokens - torch.arange(len(tokens)), "t2d": marked}


def read_vocabulary(reader: Reader, layer: Mapping[str, Any]) -> int:
    """V, by the tensors that have it; by the config where none does."""
    for name in ("t2d", "embed_tokens.weight"):
        if name in reader:
            reader.note_differences(layer, vocab_size=len(reader.tensors[name]))
            return len(reader.tensors[name])
    if not layer.get("vocab_size"):
        raise ValueError(f"{reader.name!r} has nothing that tells its base's vocabulary: give its config.json too.")
    return layer["vocab_size"]


def read_draft_tokens(reader: Reader, draft_size: int, vocab_size: int) -> dict[str, Joined]:
    """The base's id of each token of the draft vocabulary (D,), by its name here; nothing where that is the base's."""
    marked = reader.take("t2d", (vocab_size,)).bool() if "t2d" in reader else None
    source, tokens, everything = "d2t", torch.arange(draft_size), draft_size == vocab_size
    lost = marked is None and not everything  # nothing says which: no d2t, or one of zeros, as lost ones are filled
    if "d2t" in reader:
        offsets = reader.take("d2t", (draft_size,)).long()
        tokens, lost = tokens + offsets, lost and draft_size > 1 and not offsets.any()
    elif marked is not None:
        source, tokens = "t2d", marked.nonzero()[:, 0]
        reader.notes.append("the file has no d2t: the draft vocabulary is what t2d marks, in ascending order.")
    good = not lost and len(tokens.unique()) == draft_size and bool(((tokens >= 0) & (tokens < vocab_size)).all())
    if not good or (marked is not None and not (marked[tokens].all() and int(marked.sum()) == draft_size)):
        what = f"no d2t (and t2d) that names {draft_size} of {vocab_size} tokens: it is damaged or lost"
        raise ValueError(f"{reader.name!r} has {what}, get the file again.")
    if not everything:
        reader.dropped |= {"t2d": "says again what d2t says"} if marked is not None and source == "d2t" else {}
        return {"draft_tokens": Joined((tokens,), (draft_size,), (source,))}
    if not torch.equal(tokens, torch.arange(draft_size)):
        raise ValueError(f"{reader.name!r} has a d2t that exchanges tokens among all of them: get the file again.")
    for name in {"d2t", "t2d"} & set(reader.tensors):
        reader.drop(name, "it guesses among all tokens of the base")
    return {}
