"""Measurements agree with what `generate` itself says, and notice a difference."""

import copy
import dataclasses

import pytest
import torch

from hf_drafthead.evaluation import compare_with_base, look, speed
from hf_drafthead.evaluation.bench import measure
from hf_drafthead.evaluation.loading import load
from hf_drafthead.evaluation.measurement import Measurement
from hf_drafthead.evaluation.questions import Question
from hf_drafthead.generation.entries import CalibrationKey
from hf_drafthead.generation.mixin import DraftHeadGenerationMixin
from hf_drafthead.generation.tree import DraftTree
from tests.checkpoints import TREE, save_base, save_heads

PROMPTS = [Question((text,), kind) for text, kind in [("def t", "x"), ("a much longer w", "y"), ("q", "x"), ("A", "x")]]
TREE = DraftTree(TREE)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return load(str(save_heads(folder, save_base(folder), "medusa")))


def test_tokens_per_step_and_forwards_are_those_of_generate(loaded):
    model, tokenizer = loaded
    emitted = steps = 0
    for prompt in PROMPTS:
        given = speed.encode(model, tokenizer, [prompt.text])
        out = model.generate(**given, max_new_tokens=24, draft_tree=TREE, return_dict_in_generate=True)
        emitted += int(out.accepted_lengths.sum())
        steps += out.accepted_lengths.shape[1]
    found = measure(model, tokenizer, PROMPTS, tree=TREE, max_new_tokens=24, repeats=2)
    assert found.tokens_per_step == emitted / steps > 1
    assert found.base_forwards == steps + len(PROMPTS)
    assert found.new_tokens == 24 * len(PROMPTS) == emitted + len(PROMPTS)
    assert sum(length * count for length, count in found.accepted_lengths.items()) == emitted
    assert found.identical
    assert found.efficiency == pytest.approx(found.speedup / found.tokens_per_step)
    assert {name: figures["prompts"] for name, figures in found.per_category.items()} == {"x": 3, "y": 1}


def test_a_batch_counts_each_row_by_itself(loaded):
    model, tokenizer = loaded
    alone = measure(model, tokenizer, PROMPTS, tree=TREE, max_new_tokens=16, repeats=1)
    batch = measure(model, tokenizer, PROMPTS, tree=TREE, max_new_tokens=16, repeats=1, batch_size=3)
    assert batch.identical
    assert (batch.prompts, batch.new_tokens) == (alone.prompts, alone.new_tokens)
    assert batch.tokens_per_step == alone.tokens_per_step
    assert batch.base_forwards < alone.base_forwards


def test_one_wrong_token_is_noticed(loaded, monkeypatch):
    model, tokenizer = loaded
    right = DraftHeadGenerationMixin.generate

    def wrong(self, *arguments, **kwargs):
        out = right(self, *arguments, **kwargs)
        if int(out.sequences[0, 0]) == int(tokenizer("q")["input_ids"][0]):
            out.sequences[0, -1] += 1
        return out

    monkeypatch.setattr(DraftHeadGenerationMixin, "generate", wrong)
    found = measure(model, tokenizer, PROMPTS, tree=TREE, max_new_tokens=8, repeats=1)
    assert not found.identical
    assert {name: figures["identical"] for name, figures in found.per_category.items()} == {"x": False, "y": True}


def test_a_row_counts_up_to_its_own_end_of_sequence(loaded):
    model, tokenizer = loaded
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    given = {"input_ids": torch.tensor([[9, 9], [9, end]])}
    sequences = torch.tensor([[9, 9, 7, end, pad, pad], [9, end, 7, 7, 7, 7]])
    assert speed.new_tokens(model, given, sequences) == 2 + 4


def test_where_the_base_decodes_by_itself_there_are_no_steps(loaded, monkeypatch):
    model, tokenizer = loaded
    monkeypatch.setattr(
        DraftHeadGenerationMixin, "generate", lambda self, **kwargs: self.base.generate(**without(kwargs))
    )

    def without(kwargs):
        return {name: value for name, value in kwargs.items() if name != "draft_tree"}

    found = measure(model, tokenizer, PROMPTS, tree=TREE, max_new_tokens=4, repeats=1)
    assert found.identical and found.tokens_per_step is None and found.efficiency is None


def test_the_fastest_tree_is_the_one_that_took_least_time(loaded, monkeypatch):
    model, tokenizer = loaded
    trees = [DraftTree([[0]]), DraftTree([[0], [1]]), DraftTree([[0], [0, 0]])]
    seconds = dict(zip(trees, (3.0, 1.0, 2.0), strict=True))
    monkeypatch.setattr(
        speed, "time_interleaved", lambda runs, repeats, device: ({}, {tree: [seconds[tree]] for tree in runs})
    )
    assert speed.fastest_tree(model, tokenizer, PROMPTS[:2], trees, max_new_tokens=4) == trees[1]


def test_candidate_trees_grow_along_the_models_own(loaded):
    model, _ = loaded
    grown = compare_with_base.candidate_trees(model)
    assert [tree.num_nodes for tree in grown] == [8]
    assert set(grown[0].paths) <= set(TREE.paths)


def test_a_calibrated_tree_is_taken_without_trying_others(loaded, monkeypatch):
    model, tokenizer = loaded
    assert compare_with_base.calibrated_tree(model) is None
    key = CalibrationKey.of(model.base, model.drafter, 1, "eager")
    entries = [{**key._asdict(), "tree": [[0], [1]]}]
    monkeypatch.setattr(model.generation_config, "calibration", entries, raising=False)
    monkeypatch.setattr(compare_with_base, "fastest_tree", None)
    found = compare_with_base.compare_with_base(model, tokenizer, PROMPTS, max_new_tokens=4, batch_size=2)
    assert found.tree == DraftTree([(0,), (1,)]) and found.fastest.tree_nodes == 3
    shown = look.Look(model.base, tokenizer, PROMPTS, 4)
    assert shown._tree(model) == found.tree
    entries.append({**key._replace(execution="compiled")._asdict(), "tree": [[0]]})
    assert compare_with_base.calibrated_tree(model, captured=True) == DraftTree([(0,)])


def test_the_report_names_every_field_of_the_fastest_run(loaded):
    model, tokenizer = loaded
    found = compare_with_base.compare_with_base(model, tokenizer, PROMPTS, max_new_tokens=6, repeats=1, batch_size=2)
    report = found.to_json()
    assert {field.name for field in dataclasses.fields(Measurement)} - {"head_accuracy"} <= set(report)
    assert report["tokens_per_step_published_tree"] == found.published.tokens_per_step
    assert report["batch_size"] == 1 and report["batch_size_published_tree"] == 2
    assert found.published.tree_nodes > found.fastest.tree_nodes == report["tree_nodes"] == len(report["tree"]) + 1
    assert (
        dataclasses.replace(found, published=dataclasses.replace(found.published, identical=False)).identical is False
    )


@pytest.mark.parametrize(
    "prompts, options, text",
    [
        ([], {}, "there is no prompt to measure on: give at least one."),
        ([Question(("",))], {}, "the prompt is empty: give the text to continue."),
        (PROMPTS, {"batch_size": 0}, "batch_size is 0: expected at least 1."),
        (PROMPTS, {"max_new_tokens": 120}, "a prompt of 15 tokens and 120 new ones exceed the base's 128 positions: "),
    ],
)
def test_what_cannot_be_measured_is_refused(loaded, prompts, options, text):
    with pytest.raises(ValueError) as refused:
        measure(*loaded, prompts, tree=TREE, **{"max_new_tokens": 4, **options})
    assert text in str(refused.value)


def test_a_batch_without_a_pad_token_is_refused(loaded):
    model, tokenizer = loaded[0], copy.deepcopy(loaded[1])
    tokenizer.pad_token = None
    with pytest.raises(
        ValueError, match="the tokenizer has no pad token, which a batch needs: set tokenizer.pad_token"
    ):
        speed.encode(model, tokenizer, ["a", "bc"])
