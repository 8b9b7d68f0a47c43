"""The first law as a function: the same call on the base and on a model with draft heads, compared in all they return.

A fallback to the base would pass any comparison, so `agree` also counts: every step is one forward of the base, and the
steps' tokens add up to each row's text.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_drafthead.generation import DraftHeadGenerateOutput
from tests.bases import SPECIAL, VOCABULARY, tiny_base
from tests.drafters import Drafted, Guess, Oracle, half_right

PAD, EOS = SPECIAL["pad_token_id"], SPECIAL["eos_token_id"]
# Three ranks wide at the root, three levels deep, and a branch on which only lower ranks lead on.
TREE = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [2, 1], [0, 0, 0], [0, 1, 0], [1, 0, 0], [1, 0, 1], [2, 1, 0]]
TREE.insert(7, [2, 0])
DEPTH = 3

shared_base = cache(tiny_base)


def prompt(rows: int = 1, *, longest: int = 9, seed: int = 0, attention_mask: bool = True) -> dict[str, torch.Tensor]:
    """Random prompts of different lengths, padded on the left; the first is the longest."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [longest, *torch.randint(1, longest + 1, (rows - 1,), generator=generator).tolist()]
    tokens = torch.randint(3, VOCABULARY, (rows, longest), generator=generator)
    for row, length in zip(tokens, lengths):  # a token that begins by repeating itself has the same hidden state twice
        if length > 1 and row[-length] == row[1 - length]:
            row[1 - length] = 3 + (int(row[-length]) - 2) % (VOCABULARY - 3)
    mask = torch.tensor([[0] * (longest - length) + [1] * length for length in lengths])
    inputs = {"input_ids": tokens.where(mask.bool(), PAD)}
    return inputs | {"attention_mask": mask} if attention_mask else inputs


@contextlib.contextmanager
def count_forwards(base: PreTrainedModel) -> Iterator[list[int]]:
    """The number of positions of every forward of the base's decoder; not by a hook, for which a base is tried."""
    lengths: list[int] = []
    decoder = base.get_decoder()
    kind, call = type(decoder), type(decoder).__call__

    def noted(self, *args, **kwargs):
        if self is decoder:
            tokens = next(x for x in (*args, kwargs.get("input_ids"), kwargs.get("inputs_embeds")) if x is not None)
            lengths.append(tokens.shape[1])
        return call(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "__call__", noted)
        yield lengths


@dataclass
class Agreement:
    """What `agree` compared, for a closer look: the outputs of both, the drafter, and each row's own new tokens."""

    expected: Any
    got: DraftHeadGenerateOutput
    oracle: Oracle
    new_tokens: list[int]
    forwards: list[int]

    @property
    def steps(self) -> int:
        return self.got.accepted_lengths.shape[1]


def own_lengths(sequences: torch.Tensor, prompt_length: int, eos: Sequence[int]) -> list[int]:
    """New tokens of each row up to its first end-of-text token, that one included."""
    rows = sequences[:, prompt_length:].tolist()
    return [next((i + 1 for i, token in enumerate(row) if token in eos), len(row)) for row in rows]


def as_the_base(model, call: dict[str, Any], seed: int = 3, **ours: Any) -> Any:
    """The output of a call that drafts: the text of the base, and the generator left where that leaves it."""
    torch.manual_seed(seed)
    expected = model.base.generate(**call)
    left_at = torch.get_rng_state()
    torch.manual_seed(seed)
    got = model.generate(**call, **ours, return_dict_in_generate=True)
    assert torch.equal(got.sequences, expected) and torch.equal(torch.get_rng_state(), left_at)
    assert got.accepted_lengths is not None, "the base decoded by itself"
    return got


def agree(
    base: PreTrainedModel | None = None,
    inputs: dict[str, torch.Tensor] | None = None,
    guess: Guess = half_right,
    *,
    call: dict[str, Any] | Callable[[], dict[str, Any]] | None = None,
    new_tokens: Callable[[torch.Tensor], list[int]] | None = None,
    texts: Callable[[torch.Tensor], list[list[int]]] | None = None,
    tree: Any = TREE,
    draft: dict[str, Any] | None = None,
    seed: int = 5,
    tolerance: float | None = None,
    other_forwards: Callable[[list[int]], int] = lambda own: 1,
    settings: dict[str, Any] | None = None,
    generation_config: Any = None,
) -> Agreement:
    """Generate with the base and with a drafter that knows the base's text, and assert that both agree.

    Args:
        base: default: a LLaMA with grouped queries.
        inputs: arguments that both get as they are; default: one prompt.
        guess: how good the drafter is.
        call: arguments, or what makes them afresh for each of the two calls (where they keep a state or are consumed).
        new_tokens: from the sequences, each row's own number; default: up to the end-of-text token of `call`.
        texts: from the sequences, the text of each row where it is not all in `sequences`.
        tree: the draft tree.
        draft: further arguments of the drafter.
        seed: of both calls; the generators must also agree afterwards.
        tolerance: of hidden states and scores; default: what rounding does in float64.
        other_forwards: how many, besides the steps, for rows of so many new tokens; default: one for the prompt.
        settings: further arguments of the model's call alone.
        generation_config: for the model, in the place of the base's.
    """
    base = base or shared_base("llama-gqa")
    inputs = prompt() if inputs is None else inputs
    tolerance = rounding(base) if tolerance is None else tolerance
    make = call if callable(call) else lambda: dict(call or {})
    once = make()
    eos = once.get("eos_token_id", EOS)
    eos = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)

    torch.manual_seed(seed)
    expected = base.generate(**inputs, **once, return_dict_in_generate=True)
    left_at = torch.get_rng_state()
    sequences = expected.sequences
    prompt_length = inputs["input_ids"].shape[1] if inputs.get("input_ids") is not None else 0
    own = new_tokens(sequences) if new_tokens else own_lengths(sequences, prompt_length, eos)
    if texts is None:
        mask = inputs.get("attention_mask")
        starts = [0] * len(own) if mask is None else (prompt_length - mask.sum(1)).tolist()
        rows = [row[start : prompt_length + n].tolist() for row, start, n in zip(sequences, starts, own)]
        # without an end-of-text token a row that has ended goes on for as long as the others do
        rows = rows if eos else [row[start:].tolist() for row, start in zip(sequences, starts)]
    else:
        rows = texts(sequences)

    oracle = Oracle(base, rows, guess, tolerance=tolerance, **(draft or {}))
    model = Drafted(base, oracle)
    if generation_config is not None:
        model.generation_config = generation_config
    model._base_reader()  # probes now, so that what is counted is the call's own
    torch.manual_seed(seed)
    with count_forwards(base) as forwards:
        got = model.generate(**inputs, **make(), draft_tree=tree, return_dict_in_generate=True, **(settings or {}))

    assert torch.equal(got.sequences, sequences)
    assert torch.equal(torch.get_rng_state(), left_at)
    assert got.accepted_lengths is not None, "the base decoded by itself"
    assert got.accepted_lengths.dtype == torch.long
    assert (got.accepted_lengths.sum(1) + 1).tolist() == own
    needed = got.accepted_lengths.shape[1] + other_forwards(own)
    # the padding behind a row's end is read at the end of the call, for the cache, where others go on
    padded = bool(eos) and min(own) < max(own)
    assert 0 <= len(forwards) - needed <= padded, f"{len(forwards)} forwards of the base, where {needed} do"
    assert len(oracle.states) == 1
    same_numbers(expected, got, tolerance)
    return Agreement(expected, got, oracle, own, forwards)


def rounding(base: PreTrainedModel) -> float:
    """How far two ways to compute the same in float64 may differ: eager attention takes its softmax in float32."""
    return 1e-5 if base.config._attn_implementation == "eager" else 1e-9


def same_numbers(expected, got, tolerance: float) -> None:
    """Scores and logits agree, behind each row's own end as well, as far as they are asked for."""
    for name in ("scores", "logits"):
        theirs, ours = getattr(expected, name), getattr(got, name)
        assert (theirs is None) == (ours is None)
        if theirs is None:
            continue
        assert len(theirs) == len(ours)
        for one, other in zip(theirs, ours):
            assert one.shape == other.shape and one.dtype == other.dtype
            torch.testing.assert_close(other, one, rtol=1e-5, atol=max(1e-5, 10 * tolerance))
