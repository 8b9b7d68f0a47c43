"""`benchmarks/step.py` on a tiny random shape: what it measures is drafted."""

import sys
from pathlib import Path

import pytest
import torch

from hf_drafthead import DraftTree
from hf_drafthead.evaluation.measurement import STAGES

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.fixture
def step_script(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import step

    monkeypatch.setitem(step.SHAPES, "68m", TINY)
    yield step
    for name in ("step", "planted"):
        del sys.modules[name]


@pytest.mark.parametrize("family", ["medusa", "eagle"])
def test_a_random_shape_drafts_as_many_right_guesses_as_are_planted(step_script, family):
    step = step_script
    model = step.random_model("68m", family, torch.float32, "cpu")
    prompt = torch.randint(0, 32000, (1, 8))
    figures = step.measure(model, DraftTree([(0,), (0, 0), (1,)]), prompt, new_tokens=13, repeats=1, accept=2)
    assert figures["tokens_per_step"] == 3.0
    parts = sum(figures[stage] for stage in STAGES)
    assert 0 < parts <= figures["step"] * 1.01
