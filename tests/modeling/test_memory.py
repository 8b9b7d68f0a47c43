"""While a model generates, its drafter's memory stays what a run over each row's whole verified text would give."""

import copy
from typing import Any, NamedTuple

import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from hf_drafthead.bases.releases import CACHE
from tests.bases import VOCABULARY, tiny_base
from tests.families import FAMILIES

TREE = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]]


class Told(NamedTuple):
    """A drafter's own state, and the features and tokens of each row that it was told."""

    own: Any
    told: list


class Watched:
    """Checks a drafter after every `observe` against a run from scratch over what it was told of each row."""

    def __init__(self, drafter, monkeypatch):
        self.drafter = drafter
        self.plain = {name: getattr(drafter, name) for name in ("start", "observe", "expand")}
        self.checks, self.calls = 0, 0
        for name in self.plain:
            monkeypatch.setattr(drafter, name, getattr(self, name))

    def start(self, batch_size, capacity):
        self.calls += 1
        return Told(self.plain["start"](batch_size, capacity), [([], []) for _ in range(batch_size)])

    def observe(self, state, features, tokens, lengths):
        told = [(list(hidden), list(follow)) for hidden, follow in state.told]
        features_read = features if self.drafter.reads else features[..., :0]
        for row, length in enumerate(lengths.tolist()):
            if not self.drafter.keeps_history and length:
                told[row] = [], []
            told[row][0].extend(features_read[row, :length].unbind())
            told[row][1].extend(tokens[row, :length].tolist())
        state = Told(self.plain["observe"](state.own, features, tokens, lengths), told)
        self.check(state)
        return state

    def expand(self, state, tokens, parents):
        own, guesses = self.plain["expand"](state.own, tokens, parents)
        return Told(own, state.told), guesses

    def check(self, state):
        roots = torch.tensor([[follow[-1]] for _, follow in state.told])
        _, guesses = self.plain["expand"](copy.deepcopy(state.own), roots, torch.zeros_like(roots))
        for row, (hidden, follow) in enumerate(state.told):
            features = torch.stack([*hidden, torch.zeros_like(hidden[0])]).unsqueeze(0)  # and the root's own, unknown
            # a model that reads nothing of the base was told the first token too
            ids = torch.tensor([[0, *follow] if self.drafter.reads else [*follow, 0]])
            at = len(follow) - (1 if self.drafter.reads else 2)
            from_scratch = self.drafter.head_states(features, ids)[0][:, at]
            expected = self.drafter.head_logits(0, from_scratch)
            torch.testing.assert_close(guesses.logits[row], expected, atol=1e-9, rtol=1e-9)
            self.checks += 1


@pytest.fixture
def model(family):
    return family.build(tiny_base("llama-gqa"))


def prompts(rows: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """(B, 9) left-padded prompts of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (rows, 9), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, : 2 * row] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


@pytest.mark.few(8)
@pytest.mark.parametrize("call", [{}, {"do_sample": True}], ids=["greedy", "sampled"])
def test_ragged_rows_behind_left_padding(model, monkeypatch, call):
    watched = Watched(model.drafter, monkeypatch)
    inputs = prompts(4)
    torch.manual_seed(1)
    found = model.generate(**inputs, max_new_tokens=20, draft_tree=TREE, **call)
    torch.manual_seed(1)
    assert torch.equal(found, model.base.generate(**inputs, max_new_tokens=20, **call))
    assert watched.checks > 20


class GeneratesMeanwhile(StoppingCriteria):
    """At every look, another generation on the same model goes from beginning to end."""

    def __init__(self, model):
        self.model, self.looks = model, 0

    def __call__(self, input_ids, scores, **kwargs):
        self.looks += 1
        self.model.generate(**prompts(2, seed=self.looks), max_new_tokens=4, draft_tree=TREE)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


@pytest.mark.few(4)
def test_interleaved_generations(model, monkeypatch):
    inputs = prompts(2)
    expected = model.base.generate(**inputs, max_new_tokens=8)
    watched, meanwhile = Watched(model.drafter, monkeypatch), GeneratesMeanwhile(model)
    found = model.generate(
        **inputs, max_new_tokens=8, draft_tree=TREE, stopping_criteria=StoppingCriteriaList([meanwhile])
    )
    assert torch.equal(found, expected)
    assert meanwhile.looks > 2 and watched.calls == meanwhile.looks + 1


def test_a_generation_that_continues_from_a_cache(model, monkeypatch):
    inputs = prompts(1)
    first = model.generate(**inputs, max_new_tokens=6, eos_token_id=None, return_dict_in_generate=True)
    longer = torch.cat([first.sequences, torch.tensor([[17, 23]])], dim=1)
    watched = Watched(model.drafter, monkeypatch)
    found = model.generate(longer, **{CACHE: first[CACHE]}, max_new_tokens=10, eos_token_id=None, draft_tree=TREE)
    assert torch.equal(found, model.base.generate(longer, max_new_tokens=10, eos_token_id=None))
    assert watched.calls == 1 and watched.checks > 2


def test_the_watch_can_fail(monkeypatch):
    """A memory that counts what was not verified is found out."""
    model = next(family for family in FAMILIES if family.name == "eagle").build(tiny_base("llama-gqa"))
    over_verified = model.drafter.body.over_verified

    def forgets_that_rows_differ(cache, x, lengths):
        return over_verified(cache, x, torch.full_like(lengths, x.shape[1]))

    monkeypatch.setattr(model.drafter.body, "over_verified", forgets_that_rows_differ)
    Watched(model.drafter, monkeypatch)
    with pytest.raises(AssertionError, match="not close"):
        model.generate(**prompts(4), max_new_tokens=20, draft_tree=TREE)
