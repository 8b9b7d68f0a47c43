"""How many requests run at once where nobody says."""

from types import SimpleNamespace

import pytest
import torch

from tests.bases import tiny_base
from tests.batching.requests import add, alone, final
from tests.batching.test_exact import MEDUSA


@pytest.mark.parametrize("device, slots, wanted, count", [
    ("cpu", None, None, 8), ("cpu", None, 3, 3), ("cpu", None, 99, 8), ("cpu", 20, 3, 20), ("cuda", None, None, 32),
])  # fmt: skip
def test_a_cpu_runs_fewer_at_once_than_a_gpu_and_nobody_more_than_come(
    device, slots, wanted, count, managed, monkeypatch
):
    model = MEDUSA.build(tiny_base("llama-gqa"))
    monkeypatch.setattr(type(model.base), "device", torch.device(device))
    hints = SimpleNamespace(num_requests=wanted)
    assert managed(model, start=False, slots=slots, draft_tree=[[0]], workload_hints=hints).slots == count


def test_a_manager_takes_that_many(managed):
    model = MEDUSA.build(tiny_base("llama-gqa", dtype=torch.float32))
    hints = SimpleNamespace(num_requests=2)
    manager = managed(model, start=False, slots=None, draft_tree=[[0]], workload_hints=hints)
    assert manager.slots == 2
    manager.start()
    asked = [([5 + number], {"max_new_tokens": 9, "eos_token_id": None}) for number in range(5)]
    names = [add(manager, each) for each in asked]
    assert [final(manager, name).generated_tokens for name in names] == [alone(model.base, each) for each in asked]
    assert manager.slots == 2
