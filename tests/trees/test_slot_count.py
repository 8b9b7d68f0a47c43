"""How many requests run at once where nobody says."""

from types import SimpleNamespace

import pytest
import torch

from hf_drafthead.trees import cost_file, costs
from hf_drafthead.trees import rows as slot_count
from hf_drafthead.trees.rows import bytes_of_slot, free_memory, slots_that_pay
from tests.bases import tiny_base
from tests.batching.requests import add, alone, final
from tests.batching.test_exact import MEDUSA


@pytest.fixture
def model():
    return MEDUSA.build(tiny_base("llama-gqa", dtype=torch.float32))


def count(model, monkeypatch, free, cost_of, most=None):
    """The slots where so many slots are free in memory, and rows cost so much."""
    reader = model._base_reader()
    free = None if free is None else int(free * bytes_of_slot(reader) / slot_count.SHARE) + 1
    monkeypatch.setattr(slot_count, "free_memory", lambda device: free)
    monkeypatch.setattr(costs.StepCosts, "of_rows", lambda self, rows: cost_of(rows))
    return slots_that_pay(model, reader, "eager", most)


@pytest.mark.parametrize(
    "free, cost_of, most, slots",
    [
        (None, lambda rows: 1.0, None, 32),
        (1000, lambda rows: 1.0, None, 32),
        (1000, lambda rows: 1.0, 3, 3),
        (20, lambda rows: 1.0, None, 20),
        (3, lambda rows: 1.0, None, 3),
        (0, lambda rows: 1.0, None, 1),
        (1000, lambda rows: rows, None, 4),
        (1000, lambda rows: max(rows, 8), None, 8),
        (1000, lambda rows: 1.6 ** rows.bit_length(), None, 32),
        (1000, lambda rows: float("inf") if rows > 8 else 1.0, None, 8),
    ],
)
def test_memory_and_the_time_of_a_step_say_how_many(free, cost_of, most, slots, model, monkeypatch):
    assert count(model, monkeypatch, free, cost_of, most) == slots


def test_a_slot_is_as_large_as_the_base_s_keys_and_values(model):
    config = model.base.config
    heads = config.num_key_value_heads * config.head_dim
    expected = 2 * config.num_hidden_layers * heads * 4 * min(config.max_position_embeddings, slot_count.POSITIONS)
    assert bytes_of_slot(model._base_reader()) == expected
    hybrid = MEDUSA.build(tiny_base("qwen3.5", dtype=torch.float32, attn_implementation=None))
    states = hybrid._base_reader().cache(1, 16, 1)
    assert states.recurrent and bytes_of_slot(hybrid._base_reader()) > 0


def test_what_rows_cost_is_measured_once_and_kept(model, monkeypatch, tmp_path):
    monkeypatch.setattr(cost_file, "FILE", tmp_path / "costs.json")
    monkeypatch.setattr(cost_file, "_UNWRITTEN", {})
    monkeypatch.setattr(costs.StepCosts, "_check", lambda *given: None)  # nothing is too much
    first = slots_that_pay(model, model._base_reader(), "eager")
    (kept,) = cost_file.stored().values()
    assert {"4 rows of 4 nodes", "8 rows of 4 nodes", "1 nodes in 0 levels"} <= {*kept}
    monkeypatch.setattr(costs.StepCosts, "_measured", None)  # nothing is measured again
    assert slots_that_pay(model, model._base_reader(), "eager") == first


def test_rows_that_cannot_be_measured_are_not_taken(model, monkeypatch, tmp_path):
    monkeypatch.setattr(cost_file, "FILE", tmp_path / "costs.json")
    monkeypatch.setattr(cost_file, "_UNWRITTEN", {})
    monkeypatch.setattr(costs.StepCosts, "_begun", None)
    assert slots_that_pay(model, model._base_reader(), "eager") == 4


def test_free_memory_is_read(monkeypatch, tmp_path):
    cpu = torch.device("cpu")
    assert (free_memory(cpu) or 1) > 0
    monkeypatch.setattr(slot_count, "MEMORY", tmp_path / "meminfo")
    assert (free_memory(cpu) or 1) > 0  # where there is no such file
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   3 kB\n")
    assert free_memory(cpu) == 3072
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 5000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 50)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 20)
    assert free_memory(torch.device("cuda")) == 1030
    assert free_memory(torch.device("mps")) is None


@pytest.mark.parametrize("most, slots", [(None, 5), (2, 2)])
def test_a_manager_takes_that_many(most, slots, model, managed, monkeypatch):
    monkeypatch.setattr(slot_count, "MOST", 5)
    monkeypatch.setattr(costs.StepCosts, "of_rows", lambda self, rows: 1.0)
    hints = None if most is None else SimpleNamespace(num_requests=most)
    manager = managed(model, start=False, slots=None, draft_tree=[[0]], workload_hints=hints)
    assert manager.slots is None
    manager.start()
    asked = [([5 + number], {"max_new_tokens": 9, "eos_token_id": None}) for number in range(7)]
    names = [add(manager, each) for each in asked]
    assert [final(manager, name).generated_tokens for name in names] == [alone(model.base, each) for each in asked]
    assert manager.slots == slots
