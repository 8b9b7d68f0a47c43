"""Exact under anything: random trees, prompts, batches, drafters, settings and ends."""

import functools
import os
import random

import hypothesis
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import CompileConfig, StoppingCriteria, StoppingCriteriaList

from hf_drafthead.generation import entry
from hf_drafthead.generation.tree import DynamicTree
from tests.bases import VOCABULARY
from tests.families import FAMILIES
from tests.generation.agreement import agree, prompt, same_numbers, shared_base

RANKS = 4
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "12"))  # `make test-fuzz` asks for 3,000
SEED = os.environ.get("FUZZ_SEED")  # other examples than the usual ones
examples = settings(max_examples=EXAMPLES, derandomize=SEED is None, deadline=None, database=None)


def fuzz(test, **strategies):
    """A test over examples of these strategies."""
    test = examples(given(**strategies)(test))
    return test if SEED is None else hypothesis.seed(int(SEED))(test)


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


def guesser(seed: int, skill: float, tree: list[list[int]]):
    """Right with a chance of `skill`, mostly at a rank that the tree has below its root."""
    ranks = [*(path[0] for path in tree if len(path) == 1), 0, 1, 2, 3]

    def guess(row: int, position: int) -> int | None:
        dice = random.Random(seed * 1_000_003 + row * 1009 + position)
        return dice.choice(ranks) if dice.random() < skill else None

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
    "temperature": st.floats(0.2, 2.0),
    "top_k": st.integers(0, 20),
    "top_p": st.floats(0.3, 1.0),
    "min_p": st.floats(0.0, 0.3),
}
tokens = st.lists(st.integers(2, VOCABULARY - 1), min_size=1, max_size=4, unique=True)


@st.composite
def calls(draw) -> dict:
    """Arguments of generate, as often plain as not."""
    call = {
        "max_new_tokens": draw(st.sampled_from([*range(30, 8, -1), 1, 2, 3])),
        "eos_token_id": draw(st.none() | tokens),
    }
    if draw(st.booleans()):
        names = draw(st.lists(st.sampled_from(sorted(optional)), unique=True, max_size=3))
        call |= {name: draw(optional[name]) for name in names}
    if draw(st.booleans()):
        call |= {name: draw(values) for name, values in sampling.items()}
    return call


KEYS = ["llama-gqa", "mistral-sliding", "gpt2", "qwen3", "gpt-neox"]
STATES = ["qwen3.5", "granite-hybrid", "lfm2"]  # a gated delta rule, a state space, short convolutions alone


def base_of(kind: str):
    """A base that keeps keys; or states, which are float32 whatever the dtype."""
    return shared_base(kind, **({"dtype": torch.float32, "attn_implementation": None} if kind in STATES else {}))


def fuzzed(kinds: list[str]):
    """`drafted`, over calls on these bases."""
    return fuzz(
        drafted,
        kind=st.sampled_from(kinds),
        tree=trees(),
        rows=st.integers(1, 4),
        longest=st.integers(1, 10),
        seed=st.integers(0, 1000),
        skill=st.sampled_from([0.8, 1.0, 0.5, 0.8, 1.0, 0.5, 0.8, 0.0]),
        call=calls(),
        stops=st.none() | tokens,
        keeps_history=st.booleans(),
        per_node=st.booleans(),
        fixed=st.booleans(),
        first_room=st.sampled_from([1, 7, 512]),
    )


def drafted(accepted, kind, tree, rows, longest, seed, skill, call, stops, keeps_history, per_node, fixed, first_room):
    """One call, the base's own; notes in `accepted` whether a guess was right."""

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

    room, entry.FIRST_ROOM = entry.FIRST_ROOM, first_room
    try:
        found = agree(
            base_of(kind),
            prompt(rows, longest=longest, seed=seed),
            guesser(seed, skill, tree),
            call=made,
            new_tokens=new_tokens,
            tree=tree,
            draft={"keeps_history": keeps_history, "per_node": per_node},
            seed=seed,
            tolerance=3e-4 if kind in STATES else None,
            other_forwards=other_forwards,
            settings={"compile_config": CompileConfig()} if fixed else {},
        )
    finally:
        entry.FIRST_ROOM = room
    accepted.append(bool((found.got.accepted_lengths > 1).any()))


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore:Unfeasible length constraints")
@pytest.mark.parametrize("kinds", [KEYS, STATES], ids=["keys", "states"])
def test_the_model_says_what_the_base_says(kinds, untraced):
    accepted = []
    fuzzed(kinds)(accepted)
    print(f"{len(accepted)} examples, {sum(accepted)} with an accepted guess")
    share = 0.7 if EXAMPLES >= 1000 else 0.5  # few examples vary with the constants that hypothesis finds in modules
    assert len(accepted) >= EXAMPLES and sum(accepted) >= share * len(accepted)


model_of = functools.cache(lambda place, kind: FAMILIES[place].build(base_of(kind)))
# Those whose state is of a kind of its own: levels of modules, blocks, paths with a memory, the base's keys.
OF_ITS_OWN = ("peagle", "mtp", "mtp-modules", "dflash", "dflash2", "dflash2-variants", "dspark", "dspark-variants")
OF_ITS_OWN += ("gemma4-assistant",)
CASES = {one.name: ([place], [*KEYS, "gemma4-sharing"]) for place, one in enumerate(FAMILIES) if one.name in OF_ITS_OWN}
CASES |= {"all": ([*range(len(FAMILIES))], KEYS), "all on states": ([*range(len(FAMILIES))], STATES)}
shapes = trees() | st.sampled_from(["dynamic", DynamicTree(8, 2, 3), "lookup"])


def drafted_by_heads(accepted, place, kind, tree, copies, rows, longest, seed, call, stops, fixed):
    """One call of a family's heads: the text, the numbers and the generator are the base's."""
    model, inputs = model_of(place, kind), prompt(rows, longest=longest, seed=seed)
    if isinstance(tree, list):
        first = [[rank] for rank in range(6)]  # heads of random weights are seldom right
        tree = first + [path for path in tree if path not in first and len(path) <= (model.drafter.max_depth or 5)]
    copies = copies or (3 if tree == "lookup" else None)

    def said(generate, **more):
        ends = {} if stops is None else {"stopping_criteria": StoppingCriteriaList([Ends(stops)])}
        torch.manual_seed(seed)
        return generate(**inputs, **call, **ends, **more, return_dict_in_generate=True), torch.get_rng_state()

    expected, left_at = said(model.base.generate)
    how = {"compile_config": CompileConfig()} if fixed else {}
    how |= {} if copies is None else {"prompt_lookup_num_tokens": copies}
    found, left_at_by_ours = said(model.generate, draft_tree=tree, **how)
    assert torch.equal(found.sequences, expected.sequences) and torch.equal(left_at_by_ours, left_at)
    same_numbers(expected, found, 3e-4)
    # rows that end without padding leave a base with states to itself
    assert found.accepted_lengths is not None or (kind in STATES and stops is not None)
    accepted.append(found.accepted_lengths is not None and bool((found.accepted_lengths > 1).any()))


@pytest.mark.few(2)
@pytest.mark.filterwarnings("ignore:Unfeasible length constraints")
@pytest.mark.parametrize("places, kinds", CASES.values(), ids=CASES)
def test_heads_say_what_the_base_says_whatever_is_asked(places, kinds, untraced):
    accepted, heads = [], {"place": st.sampled_from(places), "kind": st.sampled_from(kinds), "tree": shapes}
    heads |= {"copies": st.none() | st.integers(1, 6), "rows": st.integers(1, 4), "longest": st.integers(1, 10)}
    heads |= {"seed": st.integers(0, 1000), "stops": st.none() | tokens, "call": calls(), "fixed": st.booleans()}
    fuzz(drafted_by_heads, **heads)(accepted)
    print(f"{len(accepted)} examples, {sum(accepted)} with an accepted guess")
    assert len(accepted) >= EXAMPLES and any(accepted)
