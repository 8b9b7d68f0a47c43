"""Every law of this folder fails when it is broken: each test here plants one bug, and shows that a law finds it."""

import pytest
import torch
from transformers import CompileConfig, RepetitionPenaltyLogitsProcessor

from hf_drafthead.bases import probe, reader
from hf_drafthead.bases.errors import Unsupported
from hf_drafthead.bases.reader import BaseReader
from hf_drafthead.bases.releases import CACHE
from hf_drafthead.bases.slots import SlotCache
from hf_drafthead.generation import DraftTree, entry, noise, rules, step
from tests.bases import VOCABULARY
from tests.drafters import half_right, right, wrong
from tests.families import FAMILIES
from tests.generation.agreement import TREE, agree, prompt, shared_base
from tests.generation.test_caches import same_cache
from tests.generation.test_interleaved import ONE, CallsAnother
from tests.generation.test_outputs import everything
from tests.planted import overshoot_past_the_end, phantom_token

TRACED = CompileConfig(backend="eager", mode="default")
LONG = {"max_new_tokens": 20, "eos_token_id": None}


def breaks(guess=half_right, rows: int = 1, match: str | None = None, **arguments) -> None:
    """Under the planted bug, `agree` fails; without it all these calls pass elsewhere."""
    with pytest.raises(AssertionError, match=match):
        agree(inputs=prompt(rows), guess=guess, **{"call": LONG, **arguments})


def opened(plain):
    """All but the root and the first guess see the first guess."""

    def mask(self, ancestors, *arguments, **named):
        seen = plain(self, ancestors, *arguments, **named)
        if ancestors.shape[1] > 3:
            seen[..., 2:, 1] = 0
        return seen

    return mask


def of_another_node(commit):
    """The text is right all the same: only the drafter's own look finds it."""
    return lambda self, rows, state, features, *rest: commit(self, rows, state, features.roll(1, dims=1), *rest)


def refuse(*arguments):
    raise Unsupported("no reason")


ONCE, SAMPLED = {"call": {**LONG, "no_repeat_ngram_size": 1}}, {"call": {**LONG, "do_sample": True}}
STATES = {"match": "(no hidden state of|does not follow) position"}
FAULTS = {  # what is replaced, by what it is made; the numbers of rows and the calls that find it
    "a wrong node is kept": (
        SlotCache, "keep", lambda keep: lambda self, nodes, *of: keep(self, nodes - (nodes > 1).long(), *of), (1, 3), {}
    ),
    "rows of the cache are mixed up": (
        SlotCache, "keep", lambda keep: lambda self, nodes, *of: keep(self, nodes.flip(0), *of), (3,), {}
    ),
    "positions are off by one": (
        BaseReader, "nodes", lambda nodes: lambda self, tokens, shape, cache, positions, *of:
        nodes(self, tokens, shape, cache, positions + (shape.depths > 1), *of), (1, 3), {"guess": right}
    ),
    "siblings see each other": (SlotCache, "mask", opened, (1, 3), {}),
    "padding is seen": (BaseReader, "nodes", lambda nodes: lambda *given: nodes(*given[:-1], None), (4,), {}),
    "processors are skipped": (rules.Rules, "_process", lambda _: lambda self, rows, logits, *of: logits, (1, 3), ONCE),
    "processors see another prefix": (
        rules.Rules, "_process", lambda process: lambda *given:
        process(*given[:-1], [length - 1 for length in given[-1]]), (1, 3), ONCE
    ),
    "rows that lag draw other noise": (
        noise.NoiseTape, "noise", lambda drawn: lambda *given:
        (drawn(*given), torch.rand(3, VOCABULARY) + 0.1)[1], (3,), SAMPLED
    ),
    "the generator is left where the fastest row was": (
        noise.RandomNumbers, "chosen", lambda _: lambda self, positions: None, (3,), SAMPLED
    ),
    "hidden states are another node's": (step.Stages, "commit", of_another_node, (1, 3), STATES),
    "hidden states of a memory are another node's": (
        step.Stages, "commit", of_another_node, (1, 3), {**STATES, "draft": {"keeps_history": True}}
    ),
    "the base decodes unasked": (
        entry, "check_call", lambda _: refuse, (1,), {"match": "the base decoded by itself"}
    ),
    "a second forward": (
        BaseReader, "nodes", lambda nodes: lambda *given: nodes(*given) and nodes(*given), (1,),
        {"match": "forwards of the base"}
    ),
}  # fmt: skip


@pytest.mark.parametrize("where, name, fault, rows, how", FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_found(where, name, fault, rows, how, monkeypatch):
    monkeypatch.setattr(where, name, fault(getattr(where, name)))
    for count in rows:
        breaks(rows=count, **how)


# Walks are done on the host where steps are not captured, on a CPU; else on the device.
both_walks = pytest.mark.parametrize("settings", [{}, {"compile_config": TRACED}], ids=["host", "device"])


@both_walks
@pytest.mark.parametrize("rows", [1, 3])
def test_a_phantom_token_that_is_accepted(rows, settings, monkeypatch):
    phantom_token(monkeypatch)
    agree(inputs=prompt(rows), guess=right, call=LONG, settings=settings)  # one that is always right does not see it
    breaks(half_right, rows, settings=settings)
    breaks(wrong, rows, settings=settings)


@both_walks
@pytest.mark.parametrize("rows", [1, 3])
def test_a_step_that_goes_on_behind_the_end_of_text(rows, settings, monkeypatch):
    text = shared_base("llama-gqa").generate(**prompt(rows), **LONG)
    call = {"max_new_tokens": 20, "eos_token_id": int(text[0, 9 + 6])}
    overshoot_past_the_end(monkeypatch)
    agree(inputs=prompt(rows), guess=wrong, call=call, settings=settings)  # a drafter that is never right hides it
    breaks(right, rows, call=call, settings=settings)


def test_the_probe_finds_siblings_that_see_each_other(monkeypatch):
    plain = SlotCache.mask

    def open_mask(*arguments, **named):
        return torch.zeros_like(plain(*arguments, **named))

    monkeypatch.setattr(SlotCache, "mask", open_mask)
    with pytest.raises(Unsupported, match="does not honour tree masks"):
        probe.probe(shared_base("llama"), (-1,))


def test_a_window_that_is_forgotten(monkeypatch):
    monkeypatch.setattr(probe, "attention_windows", lambda config, **_: {"full_attention": None})
    with pytest.raises((AssertionError, Unsupported)):
        agree(shared_base("mistral-sliding"), call=LONG)


def test_a_penalty_that_is_shown_another_row_s_padding(monkeypatch):
    try:
        RepetitionPenaltyLogitsProcessor(2.0, prompt_ignore_length=torch.tensor([1]))
    except ValueError:
        pytest.skip("in this version of transformers the penalty knows nothing of padding")
    monkeypatch.setattr(rules, "_seen_by", lambda processors, rows: processors)
    with pytest.raises((AssertionError, ValueError)):
        agree(inputs=prompt(4), call={**LONG, "repetition_penalty": 2.0})


def test_guesses_that_hang_on_the_wrong_node(monkeypatch):
    levels = DraftTree.levels

    def tangled(self, *arguments):
        found = levels(self, *arguments)
        for level in found:
            level.hang_on.zero_()
        return found

    def guess(row, position):
        return 0 if position % 2 else 2

    tree = [[0], [2], [0, 0], [2, 0], [0, 0, 0], [2, 0, 2]]
    draft = {"per_node": True}
    before = agree(guess=guess, call=LONG, tree=tree, draft=draft).steps
    monkeypatch.setattr(DraftTree, "levels", tangled)
    assert agree(guess=guess, call=LONG, tree=tree, draft=draft).steps > before  # exact, but not paid off


def test_a_cache_that_lacks_its_last_position(monkeypatch):
    unload = SlotCache.unload
    monkeypatch.setattr(SlotCache, "unload", lambda self, target, start, stop: unload(self, target, start, stop - 1))
    found = agree(call=LONG)
    with pytest.raises(AssertionError):
        same_cache(found.got[CACHE], found.expected[CACHE])


def test_a_cache_that_two_calls_share(monkeypatch):
    base = shared_base("llama")
    model = FAMILIES[0].build(base)
    model._base_reader()
    shared = []

    def one_for_all(*arguments, **named):
        shared.append(SlotCache(*arguments, **named))
        return shared[0]

    monkeypatch.setattr(reader, "SlotCache", one_for_all)
    inner = CallsAnother(lambda: model.generate(**ONE | {"max_new_tokens": 7}, draft_tree=TREE))
    call = {**ONE, "stopping_criteria": [inner], "draft_tree": TREE}
    try:
        same = torch.equal(model.generate(**call), base.generate(**ONE))
    except RuntimeError:  # shapes that no longer fit are found as well
        same = False
    assert not same


def test_a_state_that_is_left_on_the_drafter(monkeypatch):
    model = FAMILIES[0].build(shared_base("llama"))
    model.generate(**prompt(), max_new_tokens=2, draft_tree=TREE)
    before = everything(model)
    start = model.drafter.start

    def careless(batch_size, capacity):
        model.drafter.remembered = start(batch_size, capacity)
        return model.drafter.remembered

    with monkeypatch.context() as patch:
        patch.setattr(type(model.drafter), "start", lambda self, *arguments: careless(*arguments))
        model.generate(**prompt(), max_new_tokens=2, draft_tree=TREE)
    assert everything(model) != before
