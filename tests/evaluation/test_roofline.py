"""The roofline model: the paper's own figures, the weights that a base has, and trees that fit a machine."""

import pytest
import torch
from transformers import AutoConfig, LlamaConfig

from hf_drafthead.evaluation import roofline
from hf_drafthead.evaluation.roofline import MACHINES, Machine, Operator, base_work, plan_trees, seconds_of
from hf_drafthead.generation.tree import DraftTree
from hf_drafthead.trees.grow import ALONE, Size, TreeStatistics
from tests.bases import VOCABULARY, tiny_base
from tests.families import FAMILIES

PROMPTS = list(torch.randint(3, VOCABULARY, (6, 7), generator=torch.Generator().manual_seed(3)))
LLAMA_33B = {"hidden": 6656, "inner": 17920, "heads": 52, "size": 128}


def intensity(work: Operator) -> float:
    return work.flop / work.bytes


@pytest.mark.parametrize(
    "rows, nodes, expected", [(1, 1, 1.0), (1, 16, 15.95), (1, 112, 109.47), (16, 64, 845.59), (64, 112, 2893.91)]
)
def test_linear_layers_have_the_operational_intensity_of_medusa_s_table_8(rows, nodes, expected):
    work = roofline.linear(rows * nodes, LLAMA_33B["hidden"], LLAMA_33B["inner"], width=2, count=3)
    assert intensity(work) == pytest.approx(expected, abs=0.006)


@pytest.mark.parametrize(
    "past, nodes, expected",
    [(128, 1, 0.98), (128, 112, 40.73), (1024, 16, 14.03), (1024, 64, 40.96), (8192, 112, 59.3)],
)
def test_attention_has_the_operational_intensity_of_medusa_s_table_6(past, nodes, expected):
    heads, size = LLAMA_33B["heads"], LLAMA_33B["size"]
    assert intensity(roofline.attention(16, nodes, past, heads, heads, size, width=2)) == pytest.approx(
        expected, abs=0.006
    )


def test_an_operator_takes_the_longer_of_arithmetic_and_memory():
    machine = Machine(10.0, {"float32": 100.0})
    assert Operator(1000.0, 10.0).seconds(machine, "float32") == 10.0
    assert Operator(100.0, 200.0).seconds(machine, "float32") == 20.0
    assert seconds_of([Operator(1000.0, 10.0), Operator(100.0, 200.0)], machine, "float32") == 30.0


@pytest.mark.parametrize("name", ["llama-gqa", "qwen2"])
def test_a_base_reads_the_weights_that_it_has(name):
    base = tiny_base(name)
    linears = [module for module in base.modules() if isinstance(module, torch.nn.Linear)]
    weights = sum(module.weight.nbytes for module in linears)
    assert sum(one.bytes for one in base_work(base.config, 0, 1, 1, 8)) == weights
    flop = sum(one.flop for one in base_work(base.config, 3, 5, 0, 8))
    assert flop == 2 * 15 * sum(module.weight.numel() for module in linears)


def test_a_layer_that_guesses_every_level_is_read_at_every_level():
    tree = DraftTree([(0,), (1,), (0, 0), (0, 0, 0)])
    base = tiny_base("llama-gqa")
    work = {}
    for family in FAMILIES:
        model = family.build(base)
        weights = sum(weight.nbytes for weight in model.drafter.parameters())
        work[family.name] = sum(one.bytes for one in roofline.draft_work(model, 1, tree)) / weights
    assert work["eagle"] > 3 and work["medusa"] <= 1  # the lm_head of the base is read besides


def test_the_tree_fits_the_machine_and_the_batch(monkeypatch):
    paths = [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 2), (0, 0, 0), (2,), (0, 0, 1), (3,), (1, 1)]
    steps = {
        ALONE: [[1] * 16],
        Size(2, 1): [[1, 1, 2, 2, 2]],
        Size(4, 2): [[2] * 4],
        Size(12, 3): [[3, 3, 3, 3, 4]],
    }  # 1.6, 2.0 and 3.2 tokens per step
    counted = TreeStatistics({size: paths[: size.nodes - 1] for size in steps}, steps, 100)
    monkeypatch.setattr(roofline, "count_trees", lambda *args: counted)
    model = next(one for one in FAMILIES if one.name == "medusa").build(tiny_base("llama-gqa", dtype=torch.float32))
    few, many = (Machine(1e9, {"float32": peak}) for peak in (1e9, 1e15))
    monkeypatch.setattr(roofline, "MACHINES", {"few": few, "many": many})
    slow, fast = (plan_trees(model, PROMPTS, name, (1, 64), context=16) for name in ("few", "many"))
    assert [one.batch_size for one in fast] == [1, 64]
    # arithmetic that is slow makes every node dear, and so does attention to the nodes of many rows
    assert [one.tree.num_nodes for one in slow] == [2, 1] and fast[0].tree.num_nodes == 12
    assert slow[1].speedup == 1 < slow[0].speedup < fast[0].speedup  # no tree pays, which leaves the root alone
    for one in (*slow, *fast):
        assert one.speedup == pytest.approx(one.tokens_per_step * one.base_seconds / one.seconds)
    monkeypatch.setitem(roofline.MACHINES, "any", Machine(1e15, {"float32": 1e18}))
    (launched,) = plan_trees(model, PROMPTS, "any", (1,), context=16)
    assert [len(one.in_words()) for one in (*slow, launched)] == [2, 1, 2]
    assert fast[0].to_json()["tree"] == [list(path) for path in fast[0].tree.paths]


def test_every_machine_knows_the_usual_types_and_is_bound_by_memory_at_one_token():
    config = LlamaConfig()
    for name, machine in MACHINES.items():
        assert set(machine.flops) == {"bfloat16", "float16", "float32"}, name
        read = 2 * 6.6e9 / machine.bandwidth  # LLaMA-7B without its embeddings, and a short context
        assert seconds_of(base_work(config, 1, 1, 1, 2), machine, "bfloat16") == pytest.approx(read, rel=0.02), name


def test_bad_input_is_refused_in_one_line():
    model = FAMILIES[0].build(tiny_base("llama-gqa"))
    with pytest.raises(ValueError, match="^no machine 'abacus' is known: expected one of a40, a6000, "):
        plan_trees(model, PROMPTS, "abacus")
    with pytest.raises(ValueError, match="^the base is in float64, expected one of bfloat16, float16, float32"):
        plan_trees(model, PROMPTS, "a40")
    with pytest.raises(ValueError, match="^a base of type 'mixtral' has 8 experts"):
        base_work(AutoConfig.for_model("mixtral"), 1, 1, 1, 2)
    with pytest.raises(ValueError, match="^a base of type 'gpt2' does not tell hidden_size"):
        base_work(AutoConfig.for_model("gpt2"), 1, 1, 1, 2)
    with pytest.raises(ValueError, match="^there is no prompt to calibrate on"):
        plan_trees(FAMILIES[0].build(tiny_base("llama-gqa", dtype=torch.float32)), [], "a40")
