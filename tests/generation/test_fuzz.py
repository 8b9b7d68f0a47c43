"""Exact under anything: random trees, prompts, batches, drafters, settings and ends."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import StoppingCriteria, StoppingCriteriaList

from hf_drafthead.generation import decoding
from tests.bases import VOCABULARY
from tests.generation.agreement import agree, prompt, shared_base

RANKS = 4


@st.composite
def trees(draw) -> list[list[int]]:
    """Rank paths in any order, grown node by node."""
    paths = [[draw(st.integers(0, RANKS - 1))]]
    for _ in range(draw(st.integers(0, 14))):
        parent = draw(st.sampled_from([[], *paths]))
        child = [*parent, draw(st.integers(0, RANKS - 1))]
        if child not in paths and len(child) <= 5:
            paths.append(child)
    return draw(st.permutations(paths))


def guesser(seed: int, skill: float):
    """Right with a chance of `skill`, at some rank that a tree may have or not."""

    def guess(row: int, position: int) -> int | None:
        dice = random.Random(seed * 1_000_003 + row * 1009 + position)
        return dice.choice([0, 0, 0, 1, 2, 3]) if dice.random() < skill else None

    return guess


class Ends(StoppingCriteria):
    """A criterion that the library does not know: fires on some tokens."""

    def __init__(self, tokens: list[int]):
        self.tokens = torch.tensor(tokens)

    def __call__(self, input_ids, scores, **kwargs):
        return torch.isin(input_ids[:, -1], self.tokens)


optional = {
    "repetition_penalty": st.floats(1.05, 2.0),
    "no_repeat_ngram_size": st.integers(1, 3),
    "min_new_tokens": st.integers(1, 12),
    "suppress_tokens": st.lists(st.integers(3, VOCABULARY - 1), min_size=1, max_size=8),
    "guidance_scale": st.just(1.5),
    "prefill_chunk_size": st.integers(1, 6),
    "output_scores": st.just(True),
    "output_logits": st.just(True),
}
sampling = {
    "do_sample": st.just(True),
    "temperature": st.floats(0.3, 2.0),
    "top_k": st.integers(0, 20),
    "top_p": st.floats(0.3, 1.0),
}
tokens = st.lists(st.integers(2, VOCABULARY - 1), min_size=1, max_size=4, unique=True)


@st.composite
def calls(draw) -> dict:
    """Arguments of generate, as often plain as not."""
    call = {"max_new_tokens": draw(st.integers(1, 30)), "eos_token_id": draw(st.none() | tokens)}
    if draw(st.booleans()):
        names = draw(st.lists(st.sampled_from(sorted(optional)), unique=True, max_size=3))
        call |= {name: draw(optional[name]) for name in names}
    if draw(st.booleans()):
        call |= {name: draw(values) for name, values in sampling.items()}
    return call


@pytest.mark.filterwarnings("ignore:Unfeasible length constraints")
@settings(max_examples=60, derandomize=True, deadline=None, database=None)
@given(
    kind=st.sampled_from(["llama-gqa", "llama-gqa", "mistral-sliding", "gpt2"]),
    tree=trees(),
    rows=st.integers(1, 4),
    longest=st.integers(1, 10),
    seed=st.integers(0, 1000),
    skill=st.sampled_from([0.0, 0.5, 0.8, 1.0]),
    call=calls(),
    stops=st.none() | tokens,
    keeps_history=st.booleans(),
    per_node=st.booleans(),
    first_room=st.sampled_from([1, 7, 512]),
)
def test_the_model_says_what_the_base_says(
    kind, tree, rows, longest, seed, skill, call, stops, keeps_history, per_node, first_room
):
    def made():
        return call | ({} if stops is None else {"stopping_criteria": StoppingCriteriaList([Ends(stops)])})

    ends = {*(call["eos_token_id"] or ()), *(stops or ())}

    def new_tokens(sequences):
        rows = sequences[:, longest:].tolist()
        return [next((i + 1 for i, token in enumerate(row) if token in ends), len(row)) for row in rows]

    def other_forwards(own):
        chunks = -(-longest // call.get("prefill_chunk_size", longest))
        # a second text is run for every token; without padding the last row decides how many there are
        return chunks + (max(own) if "guidance_scale" in call else 0)

    room, decoding.FIRST_ROOM = decoding.FIRST_ROOM, first_room
    try:
        agree(
            shared_base(kind),
            prompt(rows, longest=longest, seed=seed),
            guesser(seed, skill),
            call=made,
            new_tokens=new_tokens,
            tree=tree,
            draft={"keeps_history": keeps_history, "per_node": per_node},
            seed=seed,
            other_forwards=other_forwards,
        )
    finally:
        decoding.FIRST_ROOM = room
