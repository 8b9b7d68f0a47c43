"""Dynamic trees: the nodes of EAGLE-2, for every family, and the base's own text, captured or not."""

import pytest
import torch
from transformers import CompileConfig

from hf_drafthead.generation.state import Guesses
from hf_drafthead.generation.step import Stages
from hf_drafthead.generation.tree import DynamicTree, resolve
from tests.bases import VOCABULARY, tiny_base
from tests.drafters import half_right, right, wrong
from tests.dynamic_trees import dynamic_tree
from tests.families import FAMILIES, features_of
from tests.generation.agreement import agree, prompt

TRACED = CompileConfig(backend="eager", mode="default")
every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
LONG = {"max_new_tokens": 20, "eos_token_id": None}


def observed(model, tokens):
    """The drafter's state after a text, and the root below it."""
    drafter = model.drafter
    state = drafter.start(len(tokens), 64)
    length = tokens.shape[1] - 1
    features, follow = features_of(model, tokens[:, :-1]), tokens[:, 1:]
    if not drafter.reads:
        features, follow, length = features.new_zeros(*tokens.shape, 0), tokens, length + 1
    with torch.no_grad():
        return drafter.observe(state, features, follow, torch.full((len(tokens),), length)), tokens[:, -1:]


@every_family
def test_the_nodes_are_those_of_the_plain_reference_in_every_row(family):
    model = family.build(tiny_base("llama-gqa"))
    tokens = torch.randint(3, VOCABULARY, (3, 8), generator=torch.Generator().manual_seed(1))
    tree = DynamicTree(14, 3, 4)
    state, root = observed(model, tokens)
    with torch.no_grad():
        _, (found, topology) = Stages.of(None, model.drafter, tree, "cpu").fill_dynamic(state, root)
        for row in range(3):
            state, root = observed(model, tokens[row : row + 1])
            alone = dynamic_tree(model.drafter, state, int(root), 2, 4, 14)
            assert found[row].tolist() == alone.tokens
            assert topology.parents[row, 1:].tolist() == alone.parents[1:]
            assert topology.depths[row].tolist() == alone.depths


class Sure:
    """A drafter whose every guess has probability 1 in its own rounding, or that says nothing that is a number."""

    def __init__(self, logit):
        self.logit = logit

    def expand(self, state, tokens, parents):
        logits = torch.zeros(*tokens.shape, 9)
        logits[..., 0] = self.logit
        return state, Guesses(logits)


@pytest.mark.parametrize("logit", [1e9, torch.nan, torch.inf, -torch.inf])
def test_ties_go_to_the_node_made_first_and_no_node_is_an_orphan(logit):
    stages = Stages.of(None, Sure(logit), DynamicTree(9, 4, 3), "cpu")
    _, (tokens, topology) = stages.fill_dynamic(None, torch.zeros(2, 1, dtype=torch.long))
    parents, depths = topology.parents[0].tolist(), topology.depths[0].tolist()
    assert tokens.shape == (2, 9)
    assert all(parent < node for node, parent in enumerate(parents[1:], start=1))
    assert all(depths[node] == depths[parent] + 1 for node, parent in enumerate(parents[1:], start=1))
    if logit == 1e9:  # the sure path is there to the end
        assert depths[-1] == 4


@pytest.mark.parametrize("guess", [right, wrong, half_right])
@pytest.mark.parametrize("kind", ["llama-gqa", "mistral-sliding", "gpt2"])
def test_exact(guess, kind):
    found = agree(
        tiny_base(kind), prompt(3), guess, call=LONG, tree={"dynamic": {"nodes": 9, "depth": 3, "width": 3}},
        draft={"per_node": True},
    )  # fmt: skip
    if guess is right:
        assert found.steps == 5  # 4 tokens in each step, after the first one


@pytest.mark.parametrize("call", [{"do_sample": True, "temperature": 0.8}, {"repetition_penalty": 1.4}], ids=str)
def test_exact_whatever_the_call_decides_by(call):
    agree(inputs=prompt(3), call={**LONG, **call}, tree="dynamic", draft={"per_node": True, "max_depth": 3})


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["medusa", "hydra", "eagle3", "draft-model"])
def test_exact_captured_or_not(name, fallbacks):
    family = next(one for one in FAMILIES if one.name == name)
    model = family.build(tiny_base("llama-gqa"))
    tree = {"dynamic": {"nodes": 6, "depth": 2, "width": 3}}
    call = {**prompt(2), **LONG, "max_new_tokens": 8, "draft_tree": tree, "return_dict_in_generate": True}
    plain = model.generate(**call)
    captured = model.generate(**call, compile_config=TRACED)
    assert torch.equal(plain.sequences, model.base.generate(**prompt(2), max_new_tokens=8, eos_token_id=None))
    assert torch.equal(captured.sequences, plain.sequences)
    assert torch.equal(captured.accepted_lengths, plain.accepted_lengths)
    assert fallbacks == []


def test_the_name_is_cut_to_the_heads_and_tokens_there_are():
    assert resolve("dynamic", None, 100) == DynamicTree(32, 6, 8)
    assert resolve("dynamic", 4, 100) == DynamicTree(32, 4, 8)
    assert resolve("dynamic", 1, 100) == DynamicTree(9, 1, 8)
    assert resolve("dynamic", None, 2) == DynamicTree(23, 6, 2)
    assert resolve({"dynamic": {"nodes": 12}}, 3, 100) == DynamicTree(12, 3, 8)
    assert resolve(DynamicTree(12, 3, 8), 3, 100) == DynamicTree(12, 3, 8)


@pytest.mark.parametrize(
    "tree, line",
    [
        ({"dynamic": {"nodes": 10**6}}, "nodes of a dynamic tree is 1000000: expected 2 to 4,096."),
        ({"dynamic": {"depth": 10**5}}, "depth of a dynamic tree is 100000: expected 1 to 256."),
        (
            {"dynamic": {"depth": 200, "width": 4000}},
            "guesses 3,184,004,000 nodes in each step: expected at",
        ),
        (
            {"dynamic": {"nodes": 200, "depth": 2, "width": 3}},
            "200 nodes cannot be filled: 2 levels of width 3 make 13",
        ),
        ({"dynamic": {"depth": 9}}, "but these heads fill 32 nodes, depth 4, width 8: ask for that."),
        ({"dynamic": {"size": 9}}, "draft_tree is {'dynamic': {'size': 9}}: expected {'dynamic': {'nodes': 32"),
        ({"dynamic": 9}, "draft_tree is {'dynamic': 9}: expected"),
        ({"static": {}}, "draft_tree is {'static': {}}: expected"),
    ],
)
def test_bad_input_is_refused_in_one_line(tree, line):
    with pytest.raises(ValueError) as refused:
        resolve(tree, 4, 100)
    assert line in str(refused.value) and "\n" not in str(refused.value)
    with pytest.raises(ValueError, match="width of a dynamic tree is 'wide'"):
        DynamicTree(width="wide")
