"""`benchmarks/step.py` and `gpu.py` on a tiny random shape: what they measure is drafted, and kept."""

import json
import sys
from pathlib import Path

import pytest
import torch

from hf_drafthead import DraftTree
from hf_drafthead.evaluation.stages import STAGES

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu
    import step

    monkeypatch.setitem(step.SHAPES, "68m", TINY)
    monkeypatch.setattr(step, "measured_machine", lambda device, dtype: step.Machine(1e10, {"float32": 1e11}))
    yield step, gpu
    for name in ("step", "gpu", "planted"):
        del sys.modules[name]


@pytest.mark.parametrize("family", ["medusa", "eagle"])
def test_a_random_shape_drafts_as_many_right_guesses_as_are_planted(scripts, family):
    step, _ = scripts
    model = step.random_model("68m", family, torch.float32, "cpu")
    prompt = torch.randint(0, 32000, (1, 8))
    figures = step.measure(model, DraftTree([(0,), (0, 0), (1,)]), prompt, new_tokens=13, repeats=1, accept=2)
    assert figures["tokens_per_step"] == 3.0
    parts = sum(figures[stage] for stage in STAGES)
    assert 0 < parts <= figures["step"] * 1.01 and figures["paper_step_ms"] > 0


def test_what_is_measured_on_a_gpu_is_kept_with_what_was_left_out(scripts, monkeypatch, tmp_path):
    step, gpu = scripts
    asked = []

    def measured(model, tree, prompt, **how):
        asked.append((type(model).__name__, tree.num_nodes, tuple(prompt.shape), how["accept"], how["captured"]))
        if len(asked) == 2:
            raise RuntimeError("out of memory")
        return dict.fromkeys((*STAGES, "step", "on_paper", "bookkeeping", "base_forward", "base_step_ms"), 1.0) | {
            "tokens_per_step": 4.0
        }

    monkeypatch.setattr(gpu, "measure", measured)
    monkeypatch.setattr(
        gpu, "CASES", [("68m", "medusa", 16, 12, 1), ("68m", "hydra", 4, 8, 2), ("7b", "medusa", 4, 8, 1)]
    )
    file = tmp_path / "gpu.json"
    command = ["gpu.py", "--device", "cpu", "--dtype", "float32", "--shape", "68m", "--output", str(file)]
    monkeypatch.setattr(sys, "argv", command)
    gpu.main()
    kept = json.loads(file.read_text())
    assert asked == [("MedusaForCausalLM", 16, (1, 12), 3, True), ("HydraForCausalLM", 4, (2, 8), 3, True)]
    assert [row["model"] for row in kept["rows"]] == ["68m medusa"]
    assert kept["left_out"] == ["68m hydra, 4 nodes, context 8, batch 2: out of memory"]
