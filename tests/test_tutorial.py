"""The commands of the training page run as they stand, with fewer steps and texts than they say."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModel

from hf_drafthead import HydraForCausalLM

PAGE = Path(__file__).parents[1] / "docs" / "training.md"
FEWER = {
    'glob("*.py")': 'glob("a*.py")',
    "--max-new-tokens 128": "--max-new-tokens 24",
    "--answer-tokens 64": "--answer-tokens 8 --held-out-rows 4",
    "max_steps=240": "max_steps=3",
    "--limit 8 --max-new-tokens 64": "--limit 1 --max-new-tokens 8 --repeats 1",
    "--limit 4 --max-new-tokens 32": "--limit 1 --max-new-tokens 8",
}


@pytest.mark.slow
def test_the_tutorial_runs(tmp_path):
    script = "set -e\n" + "\n".join(re.findall(r"^```bash\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE))
    for long, short in FEWER.items():
        assert script.count(long) == 1, long
        script = script.replace(long, short)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    run = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert "expected tokens per step of a 64-node tree" in run.stdout
    assert {"training_summary.json"} <= {file.name for file in (tmp_path / "my-heads").iterdir()}
    assert isinstance(AutoModel.from_pretrained(tmp_path / "my-heads"), HydraForCausalLM)
    assert (tmp_path / "bench.json").is_file()
