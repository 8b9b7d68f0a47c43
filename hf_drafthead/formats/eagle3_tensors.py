"""The tensors of EAGLE-3 heads, which all layouts name alike but for the first layer."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from hf_drafthead.formats.disk import Source
from hf_drafthead.formats.heads import Heads, Joined, Reader, note_difference
from hf_drafthead.formats.layer_config import read_layer_config
from hf_drafthead.formats.layout import Own, refuse
from hf_drafthead.modeling.eagle3 import Eagle3ForCausalLM

FIRST = ("midlayer.", "layers.0.")
LATER = re.compile(r"layers\.(\d+)\.")
LATER_OWN = re.compile(r"body\.more\.(\d+)\.")
LEGACY_NORMS = ("aux_norm_low.weight", "aux_norm_mid.weight", "aux_norm_high.weight")
COPIES_OF_THE_BASE = ("verifier_norm.weight", "verifier_lm_head.weight")


def layer_prefix(keys: Iterable[str]) -> str | None:
    """What the names of the first layer begin with; None if there is no such layer."""
    names = set(keys)
    return next((prefix for prefix in FIRST if f"{prefix}hidden_norm.weight" in names), None)


def read_pair_head(source: Source, layer: Mapping[str, Any], flags: dict[str, Any], layout: str) -> Heads:
    """An EAGLE-3 head; its sizes, number of layers and norms are those of the tensors.

    Args:
        source: of the file.
        layer: config of the decoder layer, with a Llama's fields, among which are those of the head too.
        flags: config fields that no tensor tells: `feature_layers`, `norm_before_residual`, `norm_output`.
        layout: its name.

    Raises:
        ValueError: a tensor is missing or of another shape, or the draft vocabulary is lost.
    """
    reader, config = Reader(source.name, source.tensors), source.config
    notes: list[str] = []
    prefix = layer_prefix(source.tensors)
    assert prefix is not None
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
    tensors = {"fc.weight": reader.one("fc.weight"), "norm.weight": reader.one("norm.weight", (width,))}
    vocab_size = _vocabulary(reader, layer, notes)
    if "lm_head.weight" in reader:
        draft_size = reader.take("lm_head.weight").shape[0]
        tensors["lm_head.weight"] = reader.one("lm_head.weight", (draft_size, width))
    else:
        draft_size = len(reader.tensors["d2t"]) if "d2t" in reader else config.get("draft_vocab_size") or vocab_size
        notes.append("the file has no lm_head: the base's is used.")
    if draft_size < vocab_size:
        tensors["draft_tokens"] = _draft_tokens(reader, draft_size, vocab_size, notes)
    else:
        _drop_identity(reader)
    for name, shape in {
        "fc.bias": (width,),
        "input_norm.weight": (wide,),
        "embed_tokens.weight": (vocab_size, width),
    }.items():
        if name in reader:
            tensors[name] = reader.one(name, shape)
    norms = [f"fc_norm.{i}.weight" for i in range(count)]
    norms = list(LEGACY_NORMS) if LEGACY_NORMS[0] in reader else norms
    if norms[0] in reader:
        tensors |= {f"fc_norm.{i}.weight": reader.one(key, (target_width,)) for i, key in enumerate(norms)}
    layers = 1 + max((int(found[1]) for key in source.tensors if (found := LATER.match(key))), default=0)
    layer_config = read_layer_config(reader, prefix, layer, width, vocab_size, notes)
    for number in range(layers):
        start = prefix if number == 0 else f"layers.{number}."
        ours = "body.layer." if number == 0 else f"body.more.{number - 1}."
        for key in source.tensors:
            if key.startswith(start):
                if key.endswith("inv_freq"):
                    reader.drop(key, "computed from the config")
                else:
                    tensors[ours + key.removeprefix(start)] = reader.one(key)
    for key in COPIES_OF_THE_BASE:
        if key in reader:
            reader.drop(key, "the base's own, which only training needs")
    fields = flags | {
        "draft_vocab_size": draft_size,
        "layer_config": layer_config,
        "num_layers": layers,
        "norm_before_fc": "input_norm.weight" in tensors,
        "fc_norm": "fc_norm.0.weight" in tensors,
        "fc_bias": "fc.bias" in tensors,
        "own_embeddings": "embed_tokens.weight" in tensors,
        "share_lm_head": "lm_head.weight" not in tensors,
    }
    for name in ("norm_before_fc", "fc_norm"):
        if config.get(name) and not fields[name]:
            key = "input_norm.weight" if name == "norm_before_fc" else norms[0]
            reader.take(key)  # a lost norm: say so
        if config.get(name) is not None:
            note_difference(notes, config, name, fields[name])
    if config.get("draft_vocab_size") is not None:
        note_difference(notes, config, "draft_vocab_size", draft_size)
    if layer.get("num_hidden_layers") is not None:
        note_difference(notes, layer, "num_hidden_layers", layers)
    reader.finish(layout)
    heads = Heads(Eagle3ForCausalLM, fields, tensors, target_width, vocab_size, dropped=reader.dropped, notes=notes)
    return heads


def own_tensors(own: Own, first: str, target: str) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors of a head of this library under the common names, and notes on them.

    Args:
        own: the head.
        first: what the names of the first layer begin with.
        target: that they are written for.

    Raises:
        ValueError: the target would lose something.
    """
    if own.config.share_lm_head:
        refuse(
            own, target, "it has no lm_head of its own, which the target looks for", "train with share_lm_head=False"
        )
    tensors: dict[str, Tensor] = {}
    notes: list[str] = []
    order = None
    if (tokens := own.tensors.get("draft_tokens")) is not None:
        if not torch.equal(tokens, tokens.sort().values):
            tokens, order = tokens.sort()
            notes.append("the draft vocabulary is written in ascending order, which all readers of t2d expect.")
        marked = torch.zeros(own.config.get_text_config().vocab_size, dtype=torch.bool)
        marked[tokens] = True
        tensors |= {"d2t": tokens - torch.arange(len(tokens)), "t2d": marked}
    for key, tensor in own.tensors.items():
        if key == "draft_tokens":
            continue
        if key.startswith("body.layer."):
            tensors[first + key.removeprefix("body.layer.")] = tensor
        elif found := LATER_OWN.match(key):
            tensors[f"layers.{int(found[1]) + 1}." + key.removeprefix(found[0])] = tensor
        else:
            tensors[key] = tensor[order] if order is not None and key == "lm_head.weight" else tensor
    return tensors, notes


def _vocabulary(reader: Reader, layer: Mapping[str, Any], notes: list[str]) -> int:
    """V, by the tensors that have it; by the config where none does."""
    said = layer.get("vocab_size")
    sizes = [reader.tensors[name].shape[0] for name in ("t2d", "embed_tokens.weight") if name in reader]
    if not sizes:
        if not said:
            raise ValueError(
                f"{reader.name!r} has no tensor and no config.json that tells the vocabulary of its base: give the "
                "folder that has it."
            )
        return said
    if said is not None:
        note_difference(notes, layer, "vocab_size", sizes[0])
    return sizes[0]


def _draft_tokens(reader: Reader, draft_size: int, vocab_size: int, notes: list[str]) -> Joined:
    """The base's id of each token of the draft vocabulary (D,).

    Raises:
        ValueError: neither d2t nor t2d is there, or they disagree: with a wrong map every guess is a wrong token.
    """
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
        return Joined((tokens,), (draft_size,), ("d2t",))
    if marked is None or int(marked.sum()) != draft_size:
        raise ValueError(
            f"{reader.name!r} has lost its d2t: nothing says which {draft_size} of {vocab_size} tokens it guesses "
            "among, get a file that has it."
        )
    notes.append("the file has no d2t: the draft vocabulary is what t2d marks, in ascending order.")
    return Joined((marked.nonzero()[:, 0],), (draft_size,), ("t2d",))


def _drop_identity(reader: Reader) -> None:
    """Leave out a map of all tokens to themselves.

    Raises:
        ValueError: it is another map.
    """
    if "d2t" in reader and reader.take("d2t").any():
        raise ValueError(
            f"{reader.name!r} has a d2t that exchanges tokens, though it guesses among all of them: it is damaged, get "
            "the file again."
        )
    for name in ("d2t", "t2d"):
        if name in reader:
            reader.drop(name, "it guesses among all tokens of the base")
