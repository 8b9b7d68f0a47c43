"""A training fits the time that there is: recipes, remarks before it begins, the clock, and what a log shows."""

import math
import types

import pytest
import torch

from hf_drafthead.modeling.families import TRAINED, fresh_heads
from hf_drafthead.training import callbacks, run
from hf_drafthead.training.arguments import QUICK, DraftHeadTrainingArguments
from hf_drafthead.training.callbacks import Clock, TrainingLog
from hf_drafthead.training.forecast import Forecast
from hf_drafthead.training.run import choose_tokens, remarks
from hf_drafthead.training.trainer import DraftHeadTrainer
from tests.bases import tiny_base
from tests.families import feature_size

ROWS = [
    {"input_ids": torch.arange(12) % 7 + 3 + row % 5, "labels": torch.arange(12) % 7 + 3 + row % 5} for row in range(8)
]
ALONE = types.SimpleNamespace(world_size=1, eval_strategy="steps", load_best_model_at_end=False)


def arguments(tmp_path, **given):
    return DraftHeadTrainingArguments.for_family("eagle", str(tmp_path), use_cpu=True, report_to="none", **given)


def test_the_quick_recipe_keeps_the_objective_of_the_family(tmp_path):
    paper, quick, hours = (arguments(tmp_path, **given) for given in ({}, {"recipe": "quick"}, {"hours": 2.0}))
    assert (paper.warmup_steps, paper.num_train_epochs, paper.recipe) == (2000, 20, None)
    for settings in (quick, hours):
        assert settings.recipe == "quick"
        assert {name: getattr(settings, name) for name in QUICK} == QUICK
        assert (settings.feature_weight, settings.teacher_weight) == (1.0, 0.1)
    assert arguments(tmp_path, recipe="paper", hours=2.0).warmup_steps == 2000
    assert arguments(tmp_path, hours=2.0, learning_rate=0.5).learning_rate == 0.5
    with pytest.raises(ValueError, match="recipe is 'fast': expected one of 'paper', 'quick'"):
        arguments(tmp_path, recipe="fast")


def foretold(**given):
    known = {"parameters": 5, "trained": 5, "rows": 9, "evaluations": 1}
    return Forecast(**{**known, "steps": 5000, "batch": 4, **given})


def test_remarks_say_what_to_set(tmp_path):
    settings = arguments(tmp_path)
    assert remarks(foretold(), settings) == []
    (rising,) = remarks(foretold(steps=300), settings)
    assert rising.startswith("the learning rate rises for 2000 steps, but the training has 300: it will not reach 3e")
    assert "--recipe quick" in rising
    (few,) = remarks(foretold(steps=14, parameters=122_000_000), arguments(tmp_path, recipe="quick"))
    assert few.startswith("too few rows: 14 steps teach 122,000,000 parameters little; give at least 400 rows")
    short = arguments(tmp_path, hours=1.0, num_train_epochs=0.25)
    (part,) = remarks(foretold(epoch=4 * 3600), short)
    assert part.startswith("one pass over the data takes about 4.0 h, the training has 1 h: about 25% of the rows")


def labelled(*tokens):
    return [{"input_ids": [1, *tokens], "labels": [-100, *tokens]}]


@pytest.mark.parametrize("family", [family for family in TRAINED if family != "draft-model"])
def test_in_the_quick_recipe_heads_on_many_tokens_choose_among_those_that_cover_the_text(family, monkeypatch):
    fields, said = {"feature_layers": [0, 1]} if family.startswith(("eagle3", "peagle")) else {}, []
    rows = labelled(*(token for token in range(400) for _ in range(2)), *range(400, 404))
    choose_tokens(fresh_heads(family, tiny_base(vocab_size=2000), **fields), rows, True, said.append)
    assert not said  # 2,000 are not many
    monkeypatch.setattr(run, "MOST_CHOICES", 700)
    monkeypatch.setattr(run, "LEAST_CHOICES", 100)
    model = fresh_heads(family, tiny_base(vocab_size=2000), **fields)
    choose_tokens(model, rows, True, said.append)
    assert said == [
        "the heads choose among the 398 tokens that the text holds most, of the base's 2,000 "
        "(draft_vocab_size=2000 for all of them)."
    ]
    assert model.config.draft_vocab_size == len(model.drafter.draft_tokens) == 398
    ids = torch.arange(3, 15)[None]
    hidden = torch.zeros(1, 12, feature_size(model.drafter, model.base.config.hidden_size), dtype=model.base.dtype)
    assert model.drafter.head_logits(0, model.drafter.head_states(hidden, ids)[0]).shape[-1] == 398
    choose_tokens(model, rows, True, said.append)
    assert len(said) == 1
    for least, most, chosen in ((500, 700, 500), (100, 300, 300)):  # of a short text, and of one with many tokens
        monkeypatch.setattr(run, "LEAST_CHOICES", least)
        monkeypatch.setattr(run, "MOST_CHOICES", most)
        model = fresh_heads(family, tiny_base(vocab_size=2000), **fields)
        choose_tokens(model, rows, True, said.append)
        assert model.config.draft_vocab_size == chosen


@pytest.fixture
def now(monkeypatch):
    now = types.SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(callbacks, "time", types.SimpleNamespace(monotonic=lambda: now.seconds))
    return now


def test_a_training_stops_with_its_time_and_evaluates_once_more(now, tmp_path):
    clock = Clock(tmp_path / "clock.json", limit=1.0)
    state = types.SimpleNamespace(global_step=5, max_steps=100)
    clock.on_train_begin(ALONE, types.SimpleNamespace(global_step=0), None)
    for seconds, stops in ((3599.0, False), (3600.0, True)):
        now.seconds = seconds
        wish = types.SimpleNamespace(should_training_stop=False, should_evaluate=False)
        clock.on_step_end(ALONE, state, wish)
        assert (wish.should_training_stop, wish.should_evaluate) == (stops, stops)


def test_the_learning_rate_reaches_its_end_with_the_time(now, tmp_path):
    model = fresh_heads("medusa", tiny_base(dtype=torch.float32), num_draft_heads=1)
    clock = Clock(tmp_path / "clock.json", limit=1.0)
    settings = arguments(tmp_path, hours=1.0, warmup_steps=0)
    (tmp_path / "clock.json").write_text('{"before": 3000}')  # of an earlier training in this folder
    assert DraftHeadTrainer(model, settings, train_dataset=ROWS).clock.limit == 1.0
    trainer = DraftHeadTrainer(model, settings, train_dataset=ROWS, clock=clock)
    clock.on_train_begin(settings, types.SimpleNamespace(global_step=0), None)
    scheduler = trainer.create_scheduler(100, torch.optim.SGD(model.drafter.parameters(), lr=1.0))
    rates = []
    for seconds in (0.0, 1800.0, 3599.9):
        now.seconds = seconds
        scheduler.step()
        rates.append(scheduler.get_last_lr()[0])
    assert rates[0] == pytest.approx(1.0, abs=1e-3)
    assert rates[1] == pytest.approx(0.5 * (1 + math.cos(math.pi * 0.5)), abs=0.02)
    assert rates[2] == pytest.approx(0.0, abs=1e-3)


def test_a_log_has_a_line_for_each_tenth(capsys, monkeypatch):
    seconds = iter(range(1000))
    monkeypatch.setattr(callbacks, "time", types.SimpleNamespace(monotonic=lambda: float(next(seconds))))
    log = TrainingLog()
    state = types.SimpleNamespace(global_step=0, max_steps=200, is_world_process_zero=True)
    log.on_train_begin(None, state, None)
    for step in range(1, 201):
        state.global_step = step
        if step == 10:
            log.on_log(None, state, None, logs={"loss": 2.345})
        log.on_step_end(None, state, None)
    log.on_evaluate(None, state, None, metrics={"eval_loss": 2.0, "eval_head0_top1": 0.5})
    lines = capsys.readouterr().err
    assert "\r" not in lines
    lines = lines.splitlines()
    assert len(lines) == 11
    assert lines[0].startswith("step 20 of 200, loss of all heads 2.35, about ") and lines[9].endswith("about 0 s left")
    assert lines[10] == "step 200 of 200: held-out loss of all heads 2.000; first guess right: head 1 50.0 %"
