"""A base that is divided among processes (`tp_plan`): every process drafts, and all say what the base says."""

import subprocess
import sys
from pathlib import Path

import pytest

from hf_drafthead import EagleForCausalLM
from tests.bases import tiny_base

PROGRAM = """
import sys
import torch
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import hf_drafthead

model = AutoModelForCausalLM.from_pretrained(
    sys.argv[1], distributed_config=DistributedConfig(tp_plan="auto"), dtype=torch.float64
)
weight = model.base.model.layers[0].self_attn.q_proj.weight
assert weight.to_local().shape[0] * 2 == weight.shape[0], "the base is not divided"
call = {"input_ids": torch.arange(3, 13).view(2, 5), "max_new_tokens": 24, "eos_token_id": None, "do_sample": False}
expected = model.base.generate(**call)
assert torch.equal(model.generate(**call), expected), "of a call that is not calibrated"
got = model.generate(**call, draft_tree="mc_sim_7b_63", return_dict_in_generate=True)
assert torch.equal(got.sequences, expected), (got.sequences, expected)
assert (got.accepted_lengths > 1).any(), "nothing was accepted"
arguments = {"distributed_config": DistributedConfig(tp_plan="auto"), "dtype": torch.float64}
fresh = hf_drafthead.EagleForCausalLM.from_base(sys.argv[1] + "/../base", **arguments)
rank = torch.distributed.get_rank()
for tensor in fresh.drafter.state_dict().values():
    torch.distributed.broadcast(first := tensor.clone(), 0)
    assert torch.equal(first, tensor), "each process has other heads"
fresh.save_pretrained(sys.argv[1] + "-fresh", is_main_process=rank == 0, include_base=True)
torch.distributed.barrier()
again = AutoModelForCausalLM.from_pretrained(sys.argv[1] + "-fresh", **arguments)
assert torch.equal(again.generate(**call, draft_tree="mc_sim_7b_63"), expected), "the saved base says something else"
print("the same")
"""


@pytest.mark.slow
def test_two_processes_say_what_the_divided_base_says(tmp_path):
    base = tiny_base("llama-gqa")
    base.save_pretrained(tmp_path / "base")
    EagleForCausalLM.from_base(type(base).from_pretrained(tmp_path / "base")).save_pretrained(tmp_path / "heads")
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [*command, tmp_path / "program.py", tmp_path / "heads"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("the same") == 2
