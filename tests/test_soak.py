"""The short form of `make soak`: generations of mixed settings, one by one like the base's."""

import importlib.util
import sys
from pathlib import Path

import pytest

from hf_drafthead.generation import programs
from hf_drafthead.modeling import MedusaForCausalLM

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "soak.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("soak", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["soak"] = module  # where its dataclass looks for its types
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_a_short_soak_finds_no_difference_and_most_of_it_is_drafted(script, monkeypatch):
    monkeypatch.setattr(programs, "compiled", lambda function, config: function)  # tracing is slow
    monkeypatch.setattr(script, "CAPTURED", 0.3)
    report = script.soak(9, seed=3, families=["medusa", "hydra", "eagle"])
    assert report.differences == []
    assert report.drafted == report.generations == 9 and report.captured >= 2
    assert report.with_accepted >= 4 and len(report.families) == 3


def test_a_soak_sees_a_difference_and_growth(script, monkeypatch):
    generate = MedusaForCausalLM.generate

    def spoilt(self, *args, **kwargs):
        output = generate(self, *args, **kwargs)
        output.sequences[0, -1] += 1
        return output

    monkeypatch.setattr(MedusaForCausalLM, "generate", spoilt)
    monkeypatch.setattr(script, "CAPTURED", 0.0)
    report = script.soak(2, families=["medusa"])
    assert len(report.differences) == 2 and all("other tokens" in difference for difference in report.differences)
    flat, growing = [100.0] * 50, [100.0] * 10 + [111.0 + n for n in range(90)]
    assert not script.Report(resident=flat, programs=[0] * 50).grew
    assert script.Report(resident=growing, programs=[0] * 100).grew
    assert not script.Report(resident=growing, programs=[0] * 10 + [7] * 90).grew  # 200 MB, of which they took 105
    assert script.Report(resident=growing, programs=[7] * 100).grew
