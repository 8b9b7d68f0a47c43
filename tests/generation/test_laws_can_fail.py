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


@pytest.mark.parametrize("rows", [1, 3])
def test_the_wrong_node_that_is_kept_in_the_cache(rows, monkeypatch):
    keep = SlotCache.keep
    monkeypatch.setattr(SlotCache, "keep", lambda self, nodes, counts: keep(self, nodes - (nodes > 1).long(), counts))
    breaks(half_right, rows)


def test_rows_of_the_cache_that_are_mixed_up(monkeypatch):
    keep = SlotCache.keep
    monkeypatch.setattr(SlotCache, "keep", lambda self, nodes, counts: keep(self, nodes.flip(0), counts))
    breaks(half_right, 3)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_position_that_is_off_by_one(rows, monkeypatch):
    nodes = BaseReader.nodes

    def shifted(self, tokens, topology, cache, positions, visible):
        return nodes(self, tokens, topology, cache, positions + (topology.depths > 1), visible)

    monkeypatch.setattr(BaseReader, "nodes", shifted)
    breaks(right, rows)


def test_siblings_that_see_each_other(monkeypatch):
    plain = SlotCache.mask

    def open_mask(self, ancestors, *arguments, **named):
        mask = plain(self, ancestors, *arguments, **named)
        if ancestors.shape[1] > 3:
            mask[..., 2:, 1] = 0  # all but the root and the first guess see the first guess
        return mask

    monkeypatch.setattr(SlotCache, "mask", open_mask)
    breaks(half_right)
    breaks(half_right, 3)


def test_the_probe_finds_siblings_that_see_each_other(monkeypatch):
    plain = SlotCache.mask

    def open_mask(*arguments, **named):
        return torch.zeros_like(plain(*arguments, **named))

    monkeypatch.setattr(SlotCache, "mask", open_mask)
    with pytest.raises(Unsupported, match="does not honour tree masks"):
        probe.probe(shared_base("llama"), (-1,))


def test_padding_that_is_seen(monkeypatch):
    nodes = BaseReader.nodes
    monkeypatch.setattr(BaseReader, "nodes", lambda self, *arguments: nodes(self, *arguments[:-1], None))
    breaks(half_right, 4)


def test_a_window_that_is_forgotten(monkeypatch):
    monkeypatch.setattr(probe, "attention_windows", lambda config, **_: {"full_attention": None})
    with pytest.raises((AssertionError, Unsupported)):
        agree(shared_base("mistral-sliding"), call=LONG)


@pytest.mark.parametrize("rows", [1, 3])
def test_processors_that_are_skipped(rows, monkeypatch):
    monkeypatch.setattr(rules.Rules, "_process", lambda self, rows, logits, sequences, lengths: logits)
    breaks(half_right, rows, call={**LONG, "no_repeat_ngram_size": 1})


def test_processors_that_are_shown_another_prefix(monkeypatch):
    process = rules.Rules._process

    def shorter(self, rows, logits, sequences, lengths):
        return process(self, rows, logits, sequences, [length - 1 for length in lengths])

    monkeypatch.setattr(rules.Rules, "_process", shorter)
    breaks(half_right, 1, call={**LONG, "no_repeat_ngram_size": 1})
    breaks(half_right, 3, call={**LONG, "no_repeat_ngram_size": 1})


def test_a_penalty_that_is_shown_another_row_s_padding(monkeypatch):
    try:
        RepetitionPenaltyLogitsProcessor(2.0, prompt_ignore_length=torch.tensor([1]))
    except ValueError:
        pytest.skip("in this version of transformers the penalty knows nothing of padding")
    monkeypatch.setattr(rules, "_seen_by", lambda processors, rows: processors)
    with pytest.raises((AssertionError, ValueError)):
        agree(inputs=prompt(4), call={**LONG, "repetition_penalty": 2.0})


def test_rows_that_lag_and_draw_other_noise(monkeypatch):
    drawn = noise.NoiseTape.noise
    monkeypatch.setattr(noise.NoiseTape, "noise", lambda *given: (drawn(*given), torch.rand(3, VOCABULARY) + 0.1)[1])
    breaks(half_right, 3, call={**LONG, "do_sample": True})


def test_a_generator_that_is_left_where_the_fastest_row_was(monkeypatch):
    monkeypatch.setattr(noise.RandomNumbers, "chosen", lambda self, positions: None)
    breaks(half_right, 3, call={**LONG, "do_sample": True})


@pytest.mark.parametrize("keeps_history", [False, True], ids=["last position", "all positions"])
@pytest.mark.parametrize("rows", [1, 3])
def test_the_drafter_is_given_another_node_s_hidden_state(rows, keeps_history, monkeypatch):
    commit = step.Stages.commit

    def off_by_one(self, rows, draft_state, features, *rest):
        return commit(self, rows, draft_state, features.roll(1, dims=1), *rest)

    monkeypatch.setattr(step.Stages, "commit", off_by_one)
    # the text is right all the same: only the drafter's own look finds it
    breaks(
        half_right, rows, match="(no hidden state of|does not follow) position", draft={"keeps_history": keeps_history}
    )


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


def test_a_fallback_that_nobody_asked_for(monkeypatch):
    def refuse(*arguments):
        raise Unsupported("no reason")

    monkeypatch.setattr(entry, "check_call", refuse)
    breaks(match="the base decoded by itself")


def test_a_second_forward_in_a_step(monkeypatch):
    nodes = BaseReader.nodes

    def twice(self, *arguments):
        nodes(self, *arguments)
        return nodes(self, *arguments)

    monkeypatch.setattr(BaseReader, "nodes", twice)
    breaks(match="forwards of the base")


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
