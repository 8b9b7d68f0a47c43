"""A conversion needs the memory of the file, and hardly more."""

import json
import subprocess
import sys

import pytest

from tests.formats.published import Published, published

PEAK = """
import json, os, sys
from hf_drafthead import convert_checkpoint
from hf_drafthead.formats.disk import find_sources

def memory(name):  # ru_maxrss would count what the process was that started this one
    with open("/proc/self/status") as status:
        return 1024 * next(int(line.split()[1]) for line in status if line.startswith(name))

source, folder, base = sys.argv[1:]
import torch, transformers.models.llama  # what is imported later anyway
before = memory("VmRSS:")
convert_checkpoint(source, folder, base_model=base)
peak = memory("VmHWM:")
(found,) = find_sources(source, {})
print(json.dumps([peak - before, sum(os.path.getsize(file) for file in found.files)]))
"""


def small(one: Published, hidden_size: int) -> Published:
    """The checkpoint with its proportions kept, at another hidden size."""
    real = one.entry["sizes"]
    scale = {name: real[name] * hidden_size // real["H"] for name in ("H", "I", "V", "Q", "KV")}
    heads = {"heads": real["heads"] // 4, "groups": real["groups"] // 4}
    head_dim = hidden_size // heads["heads"]
    return Published(one.entry | {"sizes": real | scale | heads | {"R": head_dim // 2}})


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_converting_hydra_plus_plus_takes_at_most_1_2_times_its_file(tmp_path):
    one = small(published("hydra")[0], 1024)
    one.base_config(tiny=False).save_pretrained(tmp_path / "base")
    one.sparse(tmp_path / "heads", tmp_path / "base")
    words = [sys.executable, "-c", PEAK, tmp_path / "heads", tmp_path / "converted", tmp_path / "base"]
    ended = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    taken, size = json.loads(ended.stdout.splitlines()[-1])
    assert size > 200e6, "the file is so small that the interpreter's own memory would count"
    assert taken <= 1.2 * size
