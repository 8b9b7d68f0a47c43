"""Block drafters: DFlash as z-lab and SpecForge save it, DFlash and DSpark as DeepSpec and as speculators do.

    fc.weight [H, F Ht]                                  F hidden states of the base, of width Ht
    hidden_norm.weight, norm.weight [H], layers.{i}.*    Qwen3's layers
    markov_head.markov_w1 [V, R], .markov_w2 [D, R]      DSpark's bias; by type .gate_proj or .joint_proj
    confidence_head.proj.*                               how likely a slot's guess is accepted
    embed_tokens.weight [V, H], lm_head.weight [D, H]    copies of the base's, or own ones
    d2t [D], t2d [V]                                     the draft vocabulary, in speculators' files alone

The tensors are the same, what is meant by them is not: z-lab and DeepSpec number the outputs of layers, speculators the
inputs; DeepSpec reads the anchor's slot, z-lab does not; z-lab's own code ignores the window of sliding layers, vLLM
has the block causal in them. All that is read from config.json, and refused where that does not tell.
"""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch

from hf_drafthead.formats.base_tensors import INPUT, OUTPUT, read_base_tensor
from hf_drafthead.formats.disk import Joined, Source
from hf_drafthead.formats.eagle3 import IDS as OF_EAGLE
from hf_drafthead.formats.eagle3 import draft_map, read_draft_tokens, read_vocabulary
from hf_drafthead.formats.fields import FULL, MASK, SLIDING, flag, layer_types, llama_fields, read_layer_config, said
from hf_drafthead.formats.layout import KIND, SET, SGLANG, Files, Heads, Layout, Loss, Reader, SavedHeads
from hf_drafthead.formats.speculators import START, speculator, verifier_of
from hf_drafthead.formats.tables import NO, YES, Limits, Prefixes, renamed
from hf_drafthead.modeling.base import DraftHeadPreTrainedModel
from hf_drafthead.modeling.dflash import DFlashForCausalLM
from hf_drafthead.modeling.dflash2 import DFlash2ForCausalLM

CODEBOOKS = ("predecessor", "successor")  # in whose names some files have .weight
PREFIXES: Prefixes = [
    ("body.layers.", "layers."),
    ("markov.w1.", "markov_head.markov_w1."),
    ("markov.w2.", "markov_head.markov_w2."),
    ("markov.gate.", "markov_head.gate_proj."),
    ("markov.joint.", "markov_head.joint_proj."),
    ("confidence.", "confidence_head.proj."),
    *((f"selector.{part}_codebook.weight", f"candidate_selector.{part}_codebook") for part in CODEBOOKS),
    ("selector.", "candidate_selector."),
    *((name, name) for name in ("fc.", "hidden_norm.", "norm.")),
]
ANCHOR = "dspark_bonus_anchor"  # the contrary of sample_from_anchor
IDS = "aux_hidden_state_layer_ids"  # of speculators
Z_LAB, DEEPSPEC = "DFlashDraftModel", "Qwen3DSparkModel"
# Whether the slot of the anchor is read, by architecture; a flag in the file wins.
ANCHORS = {Z_LAB: False, "DFlash2DraftModel": False}
ANCHORS |= dict.fromkeys((DEEPSPEC, "DSparkDraftModel", "Lfm2DSparkDraftModel"), True)
SCALES = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")
SELECTOR = {name: name for name in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")}
MARKOV = {"enable_confidence_head": "confidence_head", "confidence_head_with_markov": "confidence_with_markov"}
MARKOV |= {name: name for name in ("markov_rank", "markov_head_type")}
OPEN = {  # config field here: what the file does not say
    "feature_layers": "which layers of the base it reads",
    "num_draft_heads": "block_size",
    "mask_token_id": "mask_token_id",
    "sample_from_anchor": "whether the anchor's slot is read (sample_from_anchor)",
    "causal_layers": "whether the slots of its sliding layers see only those before them",
}
# Tensors that make keys and values of a context, as no other family's do.
NEEDED = {"fc.weight", "hidden_norm.weight", "norm.weight", "layers.0.self_attn.k_proj.weight"}
QWEN3 = {"layer_model_type": ("qwen3",)}
COPIES = {"embed_tokens.weight": INPUT, "lm_head.weight": OUTPUT}


class BlockDrafter(Layout):
    """A block drafter of z-lab, SpecForge, JetSpec or DeepSpec."""

    name = "DFlash"
    family: ClassVar[type[DraftHeadPreTrainedModel]] = DFlashForCausalLM
    targets = ("sglang",)
    limits: ClassVar[Limits] = {
        "": QWEN3 | {"own_embeddings": NO, "share_lm_head": YES, "causal_layers": ([],), "windows_from_anchor": NO}
    }
    architecture: ClassVar[str] = Z_LAB

    def detect(self, keys: Iterable[str], config: Mapping[str, Any]) -> bool:
        second = any(key.startswith("candidate_selector.") for key in keys)
        return NEEDED <= set(keys) and KIND not in config and second == (self.family is DFlash2ForCausalLM)

    def read(self, source: Source, fields: Mapping[str, Any]) -> Heads:
        config, name = source.config, source.name
        ids, inputs, last = config.get("target_layer_ids"), config.get(OF_EAGLE), config.get("num_target_layers")
        if fields.get("feature_layers") is None and ids and last and max(ids) >= last - 1:
            what = f"reads the output of the base's last layer ({max(ids)} of target_layer_ids)"
            why = "which engines take before the final norm and the code that trained it behind it: it cannot be loaded"
            raise ValueError(f"{name!r} {what}, {why}.")
        features = said(name, {"target_layer_ids": ids and [layer + 1 for layer in ids], OF_EAGLE: inputs})
        reads_anchor = ANCHORS.get((config.get("architectures") or ["none"])[0])
        flags = {key: flag(name, config, key) for key in ("shift_label", "sample_from_anchor", ANCHOR)}
        if flags[ANCHOR] is not None:
            flags[ANCHOR] = not flags[ANCHOR]
        says_anchor, cap = said(name, flags), config.get(SCALES[2]) or 0
        form = {
            "feature_layers": features,
            "block_size": config.get("block_size") or (16 if self.family is DFlash2ForCausalLM else None),
            "mask_token_id": said(name, config, *MASK),
            "sample_from_anchor": reads_anchor if says_anchor is None else says_anchor,
            "causal": flag(name, config, "is_causal", "causal", "causal_head"),
            "window_per_slot": True,
            **{key: config.get(key) or 1.0 for key in SCALES[:2]},  # of what the base's table and lm_head hold
            SCALES[2]: cap if cap > 0 else None,
        }
        return _read(self, source, config, form, fields, config.get("base_model_name_or_path"))

    def write(self, saved: SavedHeads, target: str) -> Files:
        config = saved.config
        ids = [layer - 1 for layer in config.feature_layers]
        scales = {key: value for key in SCALES if (value := getattr(config, key)) not in (None, 1.0)}
        anchored = config.sample_from_anchor
        elsewhere = "use --to speculators"
        if saved.reduced_vocabulary and config.markov_rank:
            raise Loss("its Markov head is for a draft vocabulary", elsewhere)
        if config.input_embedding_scale is None and saved.text.model_type.startswith("gemma"):
            raise Loss("its base multiplies embeddings, and the target takes the rows of their table", elsewhere)
        if anchored and (scales or self.family is DFlash2ForCausalLM):
            raise Loss("its anchor's slot is read, and the target has no scales or selector then", elsewhere)
        if not anchored and (config.markov_rank or config.confidence_head or -1 in ids):
            raise Loss("its anchor's slot is not read, and the target has no Markov head or embeddings then", elsewhere)
        about = layer_fields(config) | {"num_target_layers": saved.text.num_hidden_layers, "dtype": saved.dtype}
        about |= {"block_size": config.block_size, "base_model_name_or_path": saved.base, "is_causal": False}
        read = {"mask_token_id": config.mask_token_id, "target_layer_ids": ids}
        if anchored:
            about |= {"architectures": [DEEPSPEC], **read, **_named(config, MARKOV)}
        else:
            read |= scales | _named(config, SELECTOR)
            about |= {"architectures": [self.architecture], "dflash_config": read}
        written = {key: tensor for key, tensor in saved.tensors.items() if key != "draft_tokens"}
        tensors = {renamed(key, PREFIXES) or key: tensor for key, tensor in written.items()}
        launch = SGLANG.format("DSPARK" if config.markov_rank else "DFLASH")
        return Files(tensors, about, [launch])


class BlockDrafter2(BlockDrafter):
    """DFlash 2 of z-lab, incoai or SpecForge."""

    name = "DFlash 2"
    family = DFlash2ForCausalLM
    architecture = "DFlash2DraftModel"


class SpeculatorsBlock(Layout):
    """A block drafter of the speculators library, with the name of its base."""

    name = "speculators (dflash, dspark)"
    family: ClassVar[type[DraftHeadPreTrainedModel]] = DFlashForCausalLM
    targets = ("speculators",)
    limits: ClassVar[Limits] = {
        "": QWEN3 | {"windows_from_slots": NO} | dict.fromkeys(SCALES[:2], (None, 1.0)) | {SCALES[2]: (None,)}
    }
    holds_vocabulary = True
    kinds: ClassVar[Mapping[str, str]] = {"dflash": "DFlashSpeculator", "dspark": "DSparkSpeculator"}

    def read(self, source: Source, fields: Mapping[str, Any]) -> Heads:
        config, name = source.config, source.name
        non_causal = flag(name, config, "sliding_window_non_causal")
        form = {
            "feature_layers": config.get(IDS),
            "block_size": config.get("block_size"),
            "mask_token_id": said(name, config, *MASK),
            "sample_from_anchor": flag(name, config, "sample_from_anchor"),
            "causal": None if non_causal is None else "sliding" if not non_causal else False,
        }
        return _read(self, source, config.get("transformer_layer_config") or {}, form, fields, verifier_of(config))

    def write(self, saved: SavedHeads, target: str) -> Files:
        config, text = saved.config, saved.text
        if config.confidence_head and not config.markov_rank:
            raise Loss("its confidence head stands without a Markov head, as no speculator's does", "use --to sglang")
        sliding = [layer for layer, window in enumerate(config.windows) if window is not None]
        if config.causal_layers not in ([], sliding):
            what = f"the slots of the layers {config.causal_layers} see those before them"
            raise Loss(f"{what}, and the target has this for all sliding layers or none", "train it otherwise")
        tensors = {renamed(key, PREFIXES) or key: tensor for key, tensor in saved.tensors.items()}
        tokens = tensors.pop("draft_tokens", None)
        if tokens is not None:
            if not torch.equal(tokens, tokens.sort().values):
                raise Loss("its draft vocabulary is not in ascending order", "train it with a sorted one")
            tensors |= draft_map(tokens, text.vocab_size)
        notes = []
        if config.share_lm_head and tokens is not None:
            tensors["lm_head.weight"] = read_base_tensor(saved, OUTPUT)[tokens].clone()
        elif config.share_lm_head:
            notes.append(f"the {INPUT} and {OUTPUT} are not in the file: vLLM takes the base's.")
        about = speculator(saved, config.family, self.kinds[config.family], layer_fields(config))
        about |= {
            "draft_vocab_size": config.draft_vocab_size or text.vocab_size,
            "block_size": config.block_size,
            IDS: list(config.feature_layers),
            "mask_token_id": config.mask_token_id,
            "sample_from_anchor": config.sample_from_anchor,
            "sliding_window_non_causal": not config.causal_layers,
            "target_hidden_size": None if saved.as_wide_as_base else text.hidden_size,
        }
        about |= _named(config, SELECTOR) | (_named(config, MARKOV) if config.markov_rank else {})
        return Files(tensors, about, [*notes, START])


class SpeculatorsBlock2(SpeculatorsBlock):
    """DFlash 2 of the speculators library."""

    name = "speculators (dflash2)"
    family = DFlash2ForCausalLM
    kinds: ClassVar[Mapping[str, str]] = {"dflash2": "DFlash2DraftModel"}


def _read(
    layout: Layout,
    source: Source,
    layer: Mapping[str, Any],
    form: dict[str, Any],
    fields: Mapping[str, Any],
    base: str | None,
) -> Heads:
    """A block drafter, by what the layout says of it (`form`); where that is None, the fields that the user sets count.

    `causal` there is True, False, or "sliding" for those layers.
    """
    named = {key.replace("_codebook.weight", "_codebook"): tensor for key, tensor in source.tensors.items()}
    reader, config = Reader(source.name, named), source.config
    layers = 1 + max(int(key.split(".")[1]) for key in source.tensors if key.startswith("layers."))
    kinds, _ = layer_types(source.name, layer, layers)
    sliding = [number for number, kind in enumerate(kinds) if kind == SLIDING]
    causal = form.pop("causal")
    if not sliding or causal is not None:
        form["causal_layers"] = sliding if causal == "sliding" else [*range(layers)] if causal else []
    form |= {name: fields[name] for name in OPEN if fields.get(name) is not None}
    if (block := form.pop("block_size")) is not None:
        form.setdefault("num_draft_heads", block - (form["sample_from_anchor"] is False))
    for name, missing in OPEN.items():
        if form.get(name) is None:
            what = f"does not say {missing}, and projects differ in it"
            raise ValueError(f"{source.name!r} {what}: give {name}= ({SET}), as the drafter was trained.")
    width = len(reader.take("fc.weight"))
    target_width = config.get("target_hidden_size") or width
    vocab_size = read_vocabulary(reader, layer)
    every = config.get("draft_vocab_size") or layer.get("vocab_size", 0)  # tokens, without a draft vocabulary
    shared = "lm_head.weight" not in reader or (len(reader.tensors["lm_head.weight"]) == vocab_size == every)
    draft_size = vocab_size if shared else len(reader.take("lm_head.weight"))
    own_embeddings = width != target_width or bool(fields.get("own_embeddings"))
    shared = shared and width == target_width and fields.get("share_lm_head") is not False
    tensors = reader.renamed(PREFIXES)
    if own_embeddings:
        tensors["embed_tokens.weight"] = reader.one("embed_tokens.weight")
    if not shared:
        tensors["lm_head.weight"] = reader.one("lm_head.weight")
    tensors |= read_draft_tokens(reader, draft_size, vocab_size)
    has_own = {"embed_tokens.weight": own_embeddings, "lm_head.weight": not shared}
    copies = reader.copies({key: which for key, which in COPIES.items() if not has_own[key]})
    if (scale := config.get("attention_value_scale") or 1.0) != 1.0:  # of values, and so of what attention gives out
        for key in [key for key in tensors if key.endswith("o_proj.weight")]:
            tensors[key] = Joined((tensors[key].tensor() * scale,), tensors[key].shape, tensors[key].sources)
    layer_config = read_layer_config(reader, "layers.0.", layer, width, vocab_size, layers, theta=None)
    layer_config.layer_types = kinds
    form |= {
        "draft_vocab_size": draft_size if draft_size < vocab_size else None,
        "layer_config": layer_config,
        "num_layers": layers,
        "own_embeddings": own_embeddings,
        "share_lm_head": shared,
        **(_read_selector if layout.family is DFlash2ForCausalLM else _read_heads)(reader, config),
    }
    more = {"hidden_size": target_width, "vocab_size": vocab_size, "base": base, "copies": copies}
    more["num_hidden_layers"] = config.get("num_target_layers")
    return reader.heads(layout, form, tensors, **more)


def _read_heads(reader: Reader, config: Mapping[str, Any]) -> dict[str, Any]:
    """Config fields of the Markov and the confidence head."""
    rank = config.get("markov_rank") or 0
    fields: dict[str, Any] = {"markov_rank": rank, "confidence_head": bool(config.get("enable_confidence_head"))}
    fields |= {"markov_head_type": config.get("markov_head_type")} if rank else {}
    if fields["confidence_head"]:
        wide = reader.take("confidence_head.proj.weight").shape[1] - reader.take("norm.weight").shape[0]
        fields["confidence_with_markov"] = wide > 0
    return fields


def _read_selector(reader: Reader, config: Mapping[str, Any]) -> dict[str, Any]:
    """Config fields of DFlash 2's convolutions and selector, by their tensors."""
    _, taps, width = reader.take("layers.0.attention_conv.base_kernel").shape
    rows = len(reader.take("layers.0.attention_conv.kernel_projection.weight"))
    tokens, rank = reader.take("candidate_selector.predecessor_codebook").shape
    if config.get("selector_vocab_size") not in (None, tokens):
        raise ValueError(f"{reader.name!r} has selector_vocab_size {config['selector_vocab_size']} of {tokens} tokens.")
    sizes = {"conv_kernel_size": taps, "conv_group_size": 2 * taps * width // rows, "selector_rank": rank}
    reader.note_differences(config, **sizes)
    return {**sizes, "selector_top_k": config.get("selector_top_k") or 16}


def _named(config: Any, fields: Mapping[str, str]) -> dict[str, Any]:
    return {theirs: getattr(config, ours) for theirs, ours in fields.items() if hasattr(config, ours)}


def layer_fields(config: Any) -> dict[str, Any]:
    """Of the decoder layers, for a config.json."""
    windows = config.windows
    return llama_fields(config.own_layer, config.get_text_config().vocab_size) | {
        "model_type": "qwen3",
        "num_hidden_layers": config.num_layers,
        "layer_types": [FULL if window is None else SLIDING for window in windows],
        "use_sliding_window": any(windows),
        "sliding_window": next(filter(None, windows), None),
        "attention_bias": bool(config.own_layer.attention_bias),
    }
