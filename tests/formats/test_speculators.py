"""The speculators library itself loads what is exported, computes the same, and saves what is converted back.

It needs older transformers than this library is tested with, and so an environment of its own: `make test-formats`.
"""

import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_drafthead import convert_checkpoint, export_checkpoint
from hf_drafthead.modeling import Eagle3ForCausalLM
from tests.bases import tiny_base
from tests.families import Family

PYTHON = os.environ.get("SPECULATORS_PYTHON")
pytestmark = pytest.mark.skipif(not PYTHON, reason="SPECULATORS_PYTHON names no interpreter: make test-formats")
VARIANTS = {
    "plain": {"draft_vocab_size": 50},
    "all tokens": {},
    "normed residual": {"draft_vocab_size": 50, "norm_before_residual": True},
    "normed features": {"draft_vocab_size": 50, "norm_before_fc": True},
    "norms apart": {"draft_vocab_size": 50, "fc_norm": True, "norm_output": True},
    "own embeddings": {"draft_vocab_size": 50, "own_embeddings": True},
    "five layers": {"draft_vocab_size": 50, "feature_layers": [1, 2, 3, 4, 5]},
    "two deep": {"draft_vocab_size": 50, "num_layers": 2},
    "qwen3 layer": {"draft_vocab_size": 50, "layer_config": tiny_base("qwen3").config},
}


@pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS)
@torch.no_grad()
def test_the_library_loads_an_export_and_computes_the_same(fields, tmp_path):
    base = tiny_base("llama-gqa", dtype=torch.float32, num_hidden_layers=8)
    base.save_pretrained(tmp_path / "base")
    base.name_or_path = base.config._name_or_path = str(tmp_path / "base")
    model = Family("eagle3", Eagle3ForCausalLM, fields).build(base)
    if (tokens := model.drafter.draft_tokens) is not None:
        tokens.copy_(tokens.sort().values)
    model.save_pretrained(tmp_path / "ours")
    export_checkpoint(tmp_path / "ours", tmp_path / "theirs", "speculators")
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 60, (1, 12), generator=generator)
    features = torch.randn(1, 12, 32 * len(model.config.feature_layers), generator=generator)
    save_file({"features": features, "tokens": ids.roll(-1, dims=1).contiguous()}, tmp_path / "input.safetensors")
    script = Path(__file__).parent / "in_speculators.py"
    words = [PYTHON, script, *(tmp_path / name for name in ("theirs", "input.safetensors", "out.safetensors", "saved"))]
    ended = subprocess.run(
        list(map(str, words)), capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": ""}
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    out = load_file(tmp_path / "out.safetensors")
    (hidden, *_) = model.drafter.head_states(features, ids)
    expected = model.drafter.head_logits(0, hidden)
    torch.testing.assert_close(out["logits"][:, :-1], expected[:, :-1], atol=1e-4, rtol=1e-4)
    if tokens is not None:
        assert torch.equal(out["tokens"], tokens)
    # and what that library writes comes back as it went out
    report = convert_checkpoint(tmp_path / "saved", tmp_path / "again")
    assert report.layout == "speculators"
    again = Eagle3ForCausalLM.from_pretrained(tmp_path / "again")
    assert again.config.own_embeddings  # it always saves them
    for name, tensor in model.drafter.state_dict().items():
        assert torch.equal(again.drafter.state_dict()[name], tensor), name
