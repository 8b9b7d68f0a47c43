"""benchmarks/gpu.py, dry: a GPU is lent for minutes, which an error of the script would waste."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu.py"


def run(folder, *options):
    environment = {**os.environ, "OUT": str(folder)}
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--shape", "tiny", *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()], done.stdout


@pytest.mark.slow
def test_every_figure_of_a_dry_run_is_there(tmp_path):
    rows, printed = run(tmp_path, "--phases", "machine", "step", "growth-cudnn")
    phases = [row["phase"] for row in rows if "phase" in row]
    assert phases == ["machine", "step", "growth-cudnn"]
    failed = [
        row for row in rows if "error" in row and row.get("kernel") not in ("CUDNN_ATTENTION", "EFFICIENT_ATTENTION")
    ]
    assert failed == [], (tmp_path / "log.txt").read_text()[-3000:]
    speeds = {row["what"].split(": ")[-1]: row for row in rows if "step_ms" in row and "what" in row}
    assert set(speeds) >= {"base", "recorded", "uncaptured"}
    assert all(speeds[name]["same_text"] for name in ("base", "recorded", "uncaptured"))
    assert speeds["uncaptured"]["tokens_per_step"] > 3
    assert printed.count("tokens_per_step") >= 2  # in the table as well


def test_a_phase_without_time_is_named(tmp_path):
    rows, _ = run(tmp_path, "--phases", "sample", "--seconds", "5")
    assert rows == [{"phase": "sample", "error": "no time was left"}]
