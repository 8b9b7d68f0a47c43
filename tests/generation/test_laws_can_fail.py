"""Every law of this folder fails when it is broken: each test here plants one bug, and shows that a law finds it."""

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from hf_drafthead.generation import DraftTree, TreeCache, acceptance, decoding, forward, mixin, rules
from hf_drafthead.generation.forward import BaseReader, Unsupported
from tests.drafters import half_right, right, wrong
from tests.families import FAMILIES
from tests.generation.agreement import TREE, agree, prompt, shared_base
from tests.generation.test_caches import same_cache
from tests.generation.test_interleaved import ONE, CallsAnother
from tests.generation.test_outputs import everything

LONG = {"max_new_tokens": 20, "eos_token_id": None}


def breaks(guess=half_right, rows: int = 1, match: str | None = None, **arguments) -> None:
    """Under the planted bug, `agree` fails; without it all these calls pass elsewhere."""
    with pytest.raises(AssertionError, match=match):
        agree(inputs=prompt(rows), guess=guess, **{"call": LONG, **arguments})


@pytest.mark.parametrize("rows", [1, 3])
def test_a_phantom_token_that_is_accepted(rows, monkeypatch):
    greedy_walk = acceptance.greedy_walk

    def lenient(logits, tokens, topology, state, rules):
        tokens = tokens.clone()
        tokens[:, 1] = logits[:, 0].argmax(-1)  # the first guess is always taken for right
        return greedy_walk(logits, tokens, topology, state, rules)

    monkeypatch.setattr(decoding, "greedy_walk", lenient)
    agree(inputs=prompt(rows), guess=right, call=LONG)  # a drafter that is always right does not see it
    breaks(half_right, rows)
    breaks(wrong, rows)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_step_that_goes_on_behind_the_end_of_text(rows, monkeypatch):
    greedy_walk = acceptance.greedy_walk

    def overshooting(logits, tokens, topology, state, rules):
        ends, rules.eos_tokens = rules.eos_tokens, set()
        accepted = greedy_walk(logits, tokens, topology, state, rules)
        rules.eos_tokens = ends
        for row, emitted in enumerate(accepted.tokens):
            if ends.intersection(emitted):
                state.ends[row] = state.lengths[row]
        return accepted

    base = shared_base("llama-gqa")
    text = base.generate(**prompt(rows), **LONG)
    call = {"max_new_tokens": 20, "eos_token_id": int(text[0, 9 + 6])}
    monkeypatch.setattr(decoding, "greedy_walk", overshooting)
    agree(inputs=prompt(rows), guess=wrong, call=call)  # a drafter that is never right hides it
    breaks(right, rows, call=call)


@pytest.mark.parametrize("rows", [1, 3])
def test_the_wrong_node_that_is_kept_in_the_cache(rows, monkeypatch):
    commit = TreeCache.commit

    def off_by_one(self, nodes, *arguments):
        commit(self, [[node - (node > 1) for node in row] for row in nodes], *arguments)

    monkeypatch.setattr(TreeCache, "commit", off_by_one)
    breaks(half_right, rows)


def test_rows_of_the_cache_that_are_mixed_up(monkeypatch):
    commit = TreeCache.commit
    monkeypatch.setattr(
        TreeCache, "commit", lambda self, nodes, starts, *rest: commit(self, nodes, starts[::-1], *rest)
    )
    breaks(half_right, 3)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_position_that_is_off_by_one(rows, monkeypatch):
    nodes = BaseReader.nodes

    def shifted(self, tokens, topology, cache, past, positions, visible):
        return nodes(self, tokens, topology, cache, past, positions + (topology.depths > 1), visible)

    monkeypatch.setattr(BaseReader, "nodes", shifted)
    breaks(right, rows)


def test_siblings_that_see_each_other(monkeypatch):
    tree_mask = forward.tree_mask

    def open_mask(topology, past, extent, visible, window, dtype):
        mask = tree_mask(topology, past, extent, visible, window, dtype)
        nodes = topology.depths.shape[1]
        mask[..., 2:, 1] = 0  # all but the root and the first guess see the first guess
        return mask if nodes > 3 else tree_mask(topology, past, extent, visible, window, dtype)

    monkeypatch.setattr(forward, "tree_mask", open_mask)
    breaks(half_right)
    breaks(half_right, 3)


def test_the_probe_finds_siblings_that_see_each_other(monkeypatch):
    tree_mask = forward.tree_mask

    def open_mask(*arguments):
        return torch.zeros_like(tree_mask(*arguments))

    monkeypatch.setattr(forward, "tree_mask", open_mask)
    with pytest.raises(Unsupported, match="does not honour tree masks"):
        forward.probe(shared_base("llama"), (-1,))


def test_padding_that_is_seen(monkeypatch):
    nodes = BaseReader.nodes
    monkeypatch.setattr(BaseReader, "nodes", lambda self, *arguments: nodes(self, *arguments[:-1], None))
    breaks(half_right, 4)


def test_a_window_that_is_forgotten(monkeypatch):
    monkeypatch.setattr(forward, "attention_windows", lambda config: {"full_attention": None})
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
    monkeypatch.setattr(rules.NoiseTape, "noise", lambda self, position, like: self._draw(like))
    breaks(half_right, 3, call={**LONG, "do_sample": True})


def test_a_generator_that_is_left_where_the_fastest_row_was(monkeypatch):
    monkeypatch.setattr(rules.NoiseTape, "rewind", lambda self, positions: torch.rand(1))
    breaks(half_right, 3, call={**LONG, "do_sample": True})


@pytest.mark.parametrize("keeps_history", [False, True], ids=["last position", "all positions"])
@pytest.mark.parametrize("rows", [1, 3])
def test_the_drafter_is_given_another_node_s_hidden_state(rows, keeps_history, monkeypatch):
    commit = decoding.commit

    def off_by_one(drafter, state, verified, accepted):
        commit(drafter, state, verified, accepted)
        features, tokens, counts = state.unseen
        state.unseen = (features.roll(1, dims=-1), tokens, counts)

    monkeypatch.setattr(decoding, "commit", off_by_one)
    # the text is right all the same: only the drafter's own look finds it
    breaks(half_right, rows, match="no hidden state of position", draft={"keeps_history": keeps_history})


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

    monkeypatch.setattr(mixin, "_check_call", refuse)
    breaks(match="the base decoded by itself")


def test_a_second_forward_in_a_step(monkeypatch):
    nodes = BaseReader.nodes

    def twice(self, *arguments):
        nodes(self, *arguments)
        return nodes(self, *arguments)

    monkeypatch.setattr(BaseReader, "nodes", twice)
    breaks(match="forwards of the base")


def test_a_cache_that_lacks_its_last_position(monkeypatch):
    unload = TreeCache.unload
    monkeypatch.setattr(TreeCache, "unload", lambda self, target, start, stop: unload(self, target, start, stop - 1))
    found = agree(call=LONG)
    with pytest.raises(AssertionError):
        same_cache(found.got.past_key_values, found.expected.past_key_values)


def test_a_cache_that_two_calls_share(monkeypatch):
    base = shared_base("llama")
    model = FAMILIES[0].build(base)
    model._base_reader()
    shared = []

    def one_for_all(*arguments, **named):
        shared.append(TreeCache(*arguments, **named))
        return shared[0]

    monkeypatch.setattr(decoding, "TreeCache", one_for_all)
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
