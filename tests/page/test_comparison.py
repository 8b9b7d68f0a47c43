"""A comparison: both sides write what `generate` writes, and the steps tell how."""

import time
from types import SimpleNamespace

import pytest
import torch

from hf_drafthead.evaluation.calls import encode
from hf_drafthead.evaluation.measurement import COPIED, guess_depths
from hf_drafthead.evaluation.rounding import FirstDifference
from hf_drafthead.generation.settings import DraftSettings
from hf_drafthead.generation.tree import DraftTree
from hf_drafthead.page.comparison import BASE, HEADS, SideBySide

PROMPT = "def read_json(path):\n"
TREE = DraftTree([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (0, 0, 0, 0)])
GREEDY = {"do_sample": False, "max_new_tokens": 48}
LONG = {"do_sample": False, "max_new_tokens": 480, "min_new_tokens": 480}
SAMPLED = {"do_sample": True, "temperature": 1.0, "max_new_tokens": 48}


@pytest.fixture(scope="module")
def given(hydra):
    return encode(*hydra, [PROMPT])


def compared(hydra, given, settings, *, acceptance="exact", **options) -> SideBySide:
    drafting = DraftSettings(draft_tree=TREE, acceptance=acceptance)
    comparison = SideBySide(hydra[0], given, settings, drafting, **options)
    for _ in comparison.run():
        pass
    return comparison


@pytest.mark.few(1)
@pytest.mark.parametrize("settings", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_both_sides_write_what_the_base_writes(hydra, given, settings):
    model, _ = hydra
    torch.manual_seed(3)
    expected = model.base.generate(**given, **settings)[0, given["input_ids"].shape[1] :].tolist()
    found = compared(hydra, given, settings, seed=3)
    assert found.sides[BASE].tokens == found.sides[HEADS].tokens == expected
    assert found.same is True
    assert found.speedup > 0
    assert all(side.finished and side.seconds > 0 for side in found.sides.values())


def test_the_steps_are_those_of_generate(hydra, given):
    model, _ = hydra
    output = model.generate(**given, **GREEDY, draft_tree=TREE, return_dict_in_generate=True)
    heads = compared(hydra, given, GREEDY).sides[HEADS]
    assert heads.drafted is True
    assert [len(step.emitted) for step in heads.steps] == output.accepted_lengths[0].tolist()
    assert heads.depths == guess_depths(output.accepted_lengths[0])
    assert heads.tokens_per_step == pytest.approx(output.accepted_lengths.float().mean().item())


def test_a_walk_leads_down_the_tree_by_the_tokens_that_were_written(hydra, given):
    heads = compared(hydra, given, GREEDY).sides[HEADS]
    written = [heads.tokens[0]]
    for step in heads.steps:
        assert step.walked[0] == 0
        assert all(TREE.parents[below] == above for above, below in zip(step.walked, step.walked[1:]))
        assert list(step.tokens.values()) == [written[-1], *step.emitted[:-1]]
        written += step.emitted
    assert written == heads.tokens
    assert any(len(step.walked) > 2 for step in heads.steps)


def test_copies_from_the_text_are_told_from_guesses(hydra, given):
    found = compared(hydra, given, GREEDY, copies=4)
    steps = found.sides[HEADS].steps
    assert found.same and found.tree is None  # whose shape is another one in each step
    assert any(step.copied for step in steps) and all(step.copied < len(step.emitted) for step in steps)
    assert found.sides[HEADS].depths.count(COPIED) == sum(step.copied for step in steps)


def test_where_the_texts_part_is_told_with_its_margin(hydra, given):
    found = compared(hydra, given, GREEDY)
    assert found.difference is None
    found.sides[HEADS].tokens[7] += 1
    parted = found.difference
    assert (parted.position, parted.heads) == (7, parted.base + 1)
    assert parted.margin > 0 and not parted.near_tie


@pytest.mark.parametrize(
    "near_tie, words",
    [
        (True, "different texts after token 7, by rounding: there the two best tokens are 0.125 apart in the logits."),
        (False, "**different texts**."),
    ],
)
def test_the_page_distinguishes_rounding_from_a_fault(near_tie, words):
    pytest.importorskip("gradio", reason="gradio is not installed: pip install 'hf-drafthead[page]'")
    from hf_drafthead.page.app import verdict

    difference = FirstDifference(7, 1, 2, 0.125, 0.01, near_tie)
    sides = {HEADS: SimpleNamespace(drafted=True)}
    running = SimpleNamespace(sides=sides, same=False, speedup=2.0, difference=difference)
    assert verdict(running) == f"Speedup **2.00**. Heads and base wrote {words}"


@pytest.mark.parametrize("path, name", [("org/heads", "org/heads"), ("a/b/heads/", "heads"), (".", None)])
def test_the_page_is_named_for_its_model(monkeypatch, tmp_path, path, name):
    pytest.importorskip("gradio", reason="gradio is not installed: pip install 'hf-drafthead[page]'")
    from hf_drafthead.page.app import name_of

    monkeypatch.chdir(tmp_path)
    assert name_of(SimpleNamespace(name_or_path=path)) == (name or tmp_path.name).rsplit("/")[-1]


def test_typical_acceptance_is_the_heads_alone(hydra, given):
    found = compared(hydra, given, SAMPLED, acceptance="typical")
    assert found.same is False and found.difference is None
    assert found.sides[HEADS].tokens_per_step > compared(hydra, given, SAMPLED).sides[HEADS].tokens_per_step


def test_where_the_base_decodes_by_itself_it_is_told(hydra, given):
    found = compared(hydra, given, {**GREEDY, "num_beams": 1, "use_cache": False, "max_new_tokens": 6})
    assert found.sides[HEADS].drafted is False
    assert found.sides[HEADS].depths == [0] * 6
    assert found.same is True


def test_a_stop_ends_both_sides_before_their_end(hydra, given):
    comparison = SideBySide(hydra[0], given, LONG, DraftSettings(draft_tree=TREE))
    for _ in comparison.run():
        if comparison.sides[HEADS].tokens:
            comparison.stop()
    assert 0 < len(comparison.sides[HEADS].tokens) < 480
    assert not any(side.finished for side in comparison.sides.values())
    assert comparison.same is None


def test_leaving_early_ends_all_also_without_the_base(hydra, given):
    comparison = SideBySide(hydra[0], given, LONG, DraftSettings(draft_tree=TREE), with_base=False)
    assert list(comparison.sides) == [HEADS]
    running = comparison.run()
    next(running)
    running.close()
    written = [len(side.tokens) for side in comparison.sides.values()]
    time.sleep(0.3)
    assert [len(side.tokens) for side in comparison.sides.values()] == written


def test_what_generate_refuses_is_raised_where_it_is_read(hydra, given):
    with pytest.raises(ValueError, match="temperature"):
        compared(hydra, given, {"do_sample": True, "temperature": -1.0, "max_new_tokens": 4})
