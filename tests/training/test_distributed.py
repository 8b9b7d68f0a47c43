"""Several processes train as one does with the same global batch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.training import distributed_run

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "training" / "distributed_run.py"


def in_two_processes(kind, folder):
    """What the script says and the tensors that it saved."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [*command, str(SCRIPT), kind, str(folder)], env=environment, capture_output=True, text=True, timeout=500
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads((folder / "found.json").read_text()), load_file(folder / "found.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["replicated", "sharded"])
def test_two_processes_do_what_one_does(kind, tmp_path):
    (tmp_path / "two").mkdir()
    (tmp_path / "one").mkdir()
    two, shared = in_two_processes(kind, tmp_path / "two")
    getattr(distributed_run, kind)(tmp_path / "one")
    one = json.loads((tmp_path / "one" / "found.json").read_text())
    alone = load_file(tmp_path / "one" / "found.safetensors")
    assert (one.pop("processes"), two.pop("processes")) == (1, 2)
    for name in one:
        assert two[name] == pytest.approx(one[name], rel=1e-4), name
    assert alone.keys() == shared.keys()
    for name, tensor in alone.items():
        torch.testing.assert_close(shared[name], tensor, atol=2e-5, rtol=1e-3)
