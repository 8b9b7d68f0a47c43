"""Acceptance by rejection: every text comes with the probability that the base gives it, whatever was guessed."""

import pytest
import torch
from transformers import CompileConfig, TopKLogitsWarper, TopPLogitsWarper

from hf_drafthead.generation import DraftTree, Guesses, acceptance
from hf_drafthead.generation.acceptance import rejection_choices
from hf_drafthead.generation.step import Stages
from tests.families import FAMILIES
from tests.generation.agreement import TREE, agree, prompt, shared_base

TRACED = CompileConfig(backend="eager", mode="default")
TOKENS, DRAWS = 5, 200_000
TREES = {
    "chain": [[0], [0, 0]],
    "siblings": [[0], [1], [2]],
    "tree": [[0], [1], [2], [0, 0], [0, 1], [1, 0], [2, 0], [2, 1], [2, 2]],
    "every token": [[rank] for rank in range(TOKENS)] + [[0, rank] for rank in range(TOKENS)],
    "gaps": [[1], [3], [3, 2], [3, 4]],
}
WARPERS = {
    "plain": lambda logits: logits,
    "top-k": lambda logits: TopKLogitsWarper(2)(None, logits),
    "top-p": lambda logits: TopPLogitsWarper(0.7)(None, logits),
}


class Table:
    """A drafter whose guesses depend on the last token alone: logits (V, V)."""

    def __init__(self, logits):
        self.logits = logits

    def expand(self, state, tokens, parents):
        return state, Guesses(self.logits[tokens])


def z_score(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """How many standard deviations chi-square lies above what it is expected to be; what cannot be must not be."""
    assert not counts[expected == 0].any()
    counts, expected = counts[expected > 0], expected[expected > 0]
    cells = len(counts) - 1
    return (float(((counts - expected) ** 2 / expected).sum()) - cells) / (2 * cells) ** 0.5


def continuations(paths, temperature, warp, choices=rejection_choices) -> tuple[torch.Tensor, torch.Tensor]:
    """(V, V) how often each two tokens follow the root in one step, the base adding what is missing; and how often
    they should."""
    torch.manual_seed(0)
    draft, base = 1.5 * torch.randn(TOKENS, TOKENS), 1.5 * torch.randn(TOKENS, TOKENS)
    tree = DraftTree(paths).without_gaps()
    tilt = -temperature * torch.empty(DRAWS, tree.max_depth, TOKENS).exponential_(1).log()
    root = torch.zeros(DRAWS, 1, dtype=torch.long)
    _, candidates = Stages.of(None, Table(draft), tree, True, "cpu").fill_static(None, root, tilt)
    law = warp(base / temperature).softmax(-1)  # of the token after each token
    p = law[candidates.tokens]
    q = torch.zeros_like(p)
    for level, guesses in zip(tree.levels(), candidates.guesses):
        q[:, level.expanded] = guesses.chances(temperature, TOKENS)
    chosen = choices(p, q, candidates, torch.rand(p.shape[:2]), torch.empty(DRAWS, TOKENS).exponential_(1))
    first = chosen[:, 0]
    children = candidates.topology.parents[0] == 0
    children[0] = False
    at_child = (candidates.tokens == first[:, None]) & children & (chosen >= 0)
    second = torch.where(at_child, chosen, -1).amax(1)
    missing = second < 0
    second[missing] = torch.multinomial(law[first[missing]], 1)[:, 0]
    counts = torch.bincount(first * TOKENS + second, minlength=TOKENS**2).view(TOKENS, TOKENS)
    return counts, DRAWS * law[0][:, None].double() * law.double()


CASES = [(tree, "plain") for tree in TREES] + [
    (tree, warp) for tree in ("chain", "tree") for warp in ("top-k", "top-p")
]


@pytest.mark.few(6)
@pytest.mark.parametrize("temperature", [0.4, 1.0])
@pytest.mark.parametrize("tree, warp", CASES)
def test_every_two_tokens_follow_as_often_as_the_base_says(tree, warp, temperature):
    assert abs(z_score(*continuations(TREES[tree], temperature, WARPERS[warp]))) < 4.5


def test_a_rule_that_forgets_what_was_refused_is_found():
    def forgetful(p, q, candidates, chance, noise):
        choices = rejection_choices(p, q, candidates, chance, noise)
        first = (p[:, 0] / noise).argmax(-1)  # in the place of what is left of p
        ended = (candidates.tokens[:, 1:4] != choices[:, :1]).all(1)
        choices[:, 0] = torch.where(ended, first, choices[:, 0])
        return choices

    assert z_score(*continuations(TREES["siblings"], 1.0, WARPERS["plain"], forgetful)) > 20


def test_a_drafter_that_says_what_the_base_says_is_never_refused():
    tree = DraftTree(TREES["tree"])
    p = torch.rand(50, tree.num_nodes, TOKENS).softmax(-1)
    p = p[:, :1].expand_as(p)
    tokens = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4]]).expand(50, -1)
    chosen = rejection_choices(
        p, p, acceptance.Candidates(tokens, tree.topology()), torch.rand(tokens.shape), torch.ones(50, TOKENS)
    )
    assert (chosen[:, 0] == 1).all() and (chosen[:, 1] == 4).all()


@pytest.mark.parametrize("nothing", [float("nan"), float("-inf")], ids=str)
def test_a_drafter_that_says_nothing_is_not_listened_to(nothing):
    def silent(p, q, *rest):
        return rejection_choices(p, Guesses(torch.full_like(p, nothing)).chances(1.0, TOKENS), *rest)

    assert abs(z_score(*continuations(TREES["tree"], 1.0, WARPERS["plain"], silent))) < 4.5


CHAIN = [[0], [0, 0], [0, 0, 0]]  # with a draft model: speculative sampling as it was published


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name, tree, captured",
    [("draft-model", CHAIN, False), ("hydra", TREE, False), ("eagle3", TREE, False), ("medusa", TREE, True)],
    ids=["draft model, chain", "hydra", "eagle3", "medusa, captured"],
)
def test_generated_texts_come_as_often_as_the_base_says(name, tree, captured):
    """Three tokens after one prompt, in a batch of thousands, over all texts that top-k allows."""
    base = shared_base("llama-gqa")
    model = next(family for family in FAMILIES if family.name == name).build(base)
    rows, kept, sampling = 2000, 3, {"do_sample": True, "temperature": 1.5, "top_k": 3}
    call = {"max_new_tokens": 3, "eos_token_id": None, **({"compile_config": TRACED} if captured else {})}
    given = prompt(attention_mask=False)["input_ids"]
    torch.manual_seed(2)
    ours = {"acceptance": "rejection", "draft_tree": tree, "return_dict_in_generate": True}
    found = model.generate(given.expand(rows, -1), **call, **sampling, **ours)
    assert (found.accepted_lengths[:, 0] > 1).any()
    counts: dict[tuple, float] = {}
    for text in found.sequences[:, given.shape[1] :].tolist():
        counts[tuple(text)] = counts.get(tuple(text), 0) + 1
    texts, chances = given, torch.ones(1, dtype=torch.float64)
    for _ in range(3):  # every text that can be, and its probability
        with torch.no_grad():
            law = base(texts, use_cache=False).logits[:, -1].float() / 1.5
        best = law.softmax(-1).topk(kept)
        shares = best.values.double() / best.values.double().sum(-1, keepdim=True)
        texts = torch.cat([texts.repeat_interleave(kept, 0), best.indices.reshape(-1, 1)], dim=1)
        chances = (chances[:, None] * shares).flatten()
    expected = rows * chances
    seen = torch.tensor([counts.pop(tuple(text), 0.0) for text in texts[:, given.shape[1] :].tolist()])
    assert not counts
    assert abs(z_score(seen, expected)) < 4.5


@pytest.mark.parametrize("rows", [1, 3])
def test_greedy_decoding_is_exact_with_it(rows):
    agree(inputs=prompt(rows), call={"max_new_tokens": 20}, settings={"acceptance": "rejection"})


@pytest.mark.parametrize("rows", [1, 3])
def test_processors_and_ends_are_the_call_s(rows):
    model = FAMILIES[0].build(shared_base("llama"))
    call = {"do_sample": True, "acceptance": "rejection", "draft_tree": TREE, "max_new_tokens": 20, "temperature": 0.7}
    for more in ({}, {"output_scores": True, "return_dict_in_generate": True}):
        out = model.generate(**prompt(rows), **call, **more, no_repeat_ngram_size=1, eos_token_id=None)
        texts = (out.sequences if more else out)[:, 9:].tolist()
        assert all(len(set(text)) == len(text) == 20 for text in texts)
    ends = list(range(3, 40))
    out = model.generate(**prompt(rows), **call, min_new_tokens=9, eos_token_id=ends, return_dict_in_generate=True)
    assert not torch.isin(out.sequences[:, 9:17], torch.tensor(ends)).any()
    for text, steps in zip(out.sequences[:, 9:].tolist(), out.accepted_lengths):
        own = next((at + 1 for at, token in enumerate(text) if token in ends), len(text))
        assert int(steps.sum()) + 1 == own


def test_processors_that_cannot_see_all_nodes_at_once(fallbacks):
    model = FAMILIES[0].build(shared_base("llama"))
    model.generate(**prompt(), max_new_tokens=4, do_sample=True, guidance_scale=1.5, acceptance="rejection")
    assert fallbacks == [
        "rejection acceptance cannot show UnbatchedClassifierFreeGuidanceLogitsProcessor all nodes at once."
    ]
