"""EAGLE-3 gives the numbers of the published implementation: features, stable pass, trees, greedy steps, training."""

import json
from functools import cache

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from hf_drafthead.bases.reader import BaseReader
from hf_drafthead.generation.step import Stages
from hf_drafthead.generation.tree import DynamicTree
from hf_drafthead.modeling import Eagle3ForCausalLM
from tests.dynamic_trees import Drafted, dynamic_tree
from tests.modeling.golden import FOLDER

pytestmark = pytest.mark.usefixtures("without_gradients")
TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}
DATA = FOLDER / "eagle3"


@cache
def tensors(name: str) -> dict[str, Tensor]:
    return load_file(DATA / f"{name}.safetensors")


@cache
def facts(name: str) -> dict:
    return json.loads((DATA / f"{name}.json").read_text())


def golden_model(**fields) -> Eagle3ForCausalLM:
    """The published heads on their base, all of their tensors used."""
    base = LlamaForCausalLM(LlamaConfig(**facts("base_tiny_l8"))).eval()
    base.load_state_dict(tensors("base_tiny_l8"))
    model = Eagle3ForCausalLM.from_base(base, draft_vocab_size=48, **fields)
    heads = {name.removeprefix("heads."): value for name, value in tensors("eagle3").items() if "heads." in name}
    offsets, drafted = heads.pop("d2t"), heads.pop("t2d")
    weights = {name.replace("midlayer.", "body.layer."): value for name, value in heads.items()}
    weights["draft_tokens"] = torch.arange(48) + offsets
    assert torch.equal(weights["draft_tokens"], drafted.nonzero().flatten())
    model.drafter.load_state_dict(weights)
    return model


@pytest.fixture(scope="module")
def model():
    return golden_model()


def observed(drafter, pieces: list[int]):
    """The state after the prompt was verified, piece by piece."""
    given, at, state = tensors("eagle3"), 0, drafter.start(1, 64)
    for length in pieces:
        piece = slice(at, at + length)
        follow = given["in.shifted_input_ids"][:, piece]
        state = drafter.observe(state, given["in.features"][:, piece], follow, torch.tensor([length]))
        at += length
    return state


def test_the_published_layers_are_read_by_default(model):
    given = tensors("eagle3")
    assert list(model.drafter.reads) == facts("eagle3")["feature_hidden_state_indices"]
    ids = given["in.input_ids"]
    features = BaseReader.of_texts(model.base, model.drafter.reads).read_texts(ids).features
    torch.testing.assert_close(features, given["in.features"], **TOLERANCE)
    torch.testing.assert_close(model.base(ids).logits, given["out.base_logits"], **TOLERANCE)


def test_the_pass_over_verified_pairs(model):
    given = tensors("eagle3")
    ids = given["in.shifted_input_ids"].roll(1, dims=1)
    hidden = model.drafter.head_states(given["in.features"], ids)[0]
    torch.testing.assert_close(hidden, given["out.stable.hidden"], **TOLERANCE)
    logits = model.drafter.head_logits(0, hidden)
    torch.testing.assert_close(logits, given["out.stable.logits"], **TOLERANCE)


@pytest.mark.parametrize("pieces", [[12], [5, 1, 6]], ids=["prompt", "steps"])
def test_the_state_after_verified_pairs(model, pieces):
    given = tensors("eagle3")
    state = observed(model.drafter, pieces)
    torch.testing.assert_close(state.last, given["out.stable.hidden"][:, -1], **TOLERANCE)


@pytest.mark.parametrize("pieces", [[12], [5, 1, 6]], ids=["prompt", "steps"])
def test_the_static_tree(model, pieces):
    given, tree = tensors("eagle3"), facts("eagle3")["static_small8"]
    paths = [tuple(path) for path in tree["paths"]]
    state, level, expected = observed(model.drafter, pieces), [()], dict(zip(paths, tree["tokens"], strict=True))
    tokens, previous, at = {(): int(given["in.root"])}, [()], 0
    for depth in range(1, 5):  # every node is expanded, the deepest too
        here = torch.tensor([[tokens[path] for path in level]])
        parents = torch.tensor([[previous.index(path[:-1]) if path else 0 for path in level]])
        state, guesses = model.drafter.expand(state, here, parents)
        if depth > 1:
            rows = slice(at, at + len(level))
            torch.testing.assert_close(guesses.logits[0], given["out.static_small8.logits"][rows], **TOLERANCE)
            torch.testing.assert_close(state.level[0], given["out.static_small8.hidden"][rows], **TOLERANCE)
            at += len(level)
        for path in (path for path in paths if len(path) == depth):
            tokens[path] = int(guesses.top(path[-1] + 1)[0][0, level.index(path[:-1]), -1])
        previous, level = level, [path for path in paths if len(path) == depth]
    assert at == len(paths)
    assert {path: token for path, token in tokens.items() if path} == expected


def drafted(drafter, state, root: int, depth: int, top_k: int, total_token: int) -> Drafted:
    """The tree of the package; its scores are those of the plain reference, which names the same nodes."""
    plain = dynamic_tree(drafter, state, root, depth, top_k, total_token)
    stages = Stages.of(None, drafter, DynamicTree(total_token, depth + 1, top_k), "cpu")
    _, (tokens, topology) = stages.fill_dynamic(state, torch.tensor([[root]]))
    parents = [-1, *topology.parents[0, 1:].tolist()]
    return Drafted(tokens[0].tolist(), parents, topology.depths[0].tolist(), plain.scores)


def same_tree(found: Drafted, name: str) -> None:
    given = tensors("eagle3")
    assert found.tokens == given[f"out.{name}.tokens"].tolist()
    assert found.parents == given[f"out.{name}.parents"].tolist()
    assert found.depths == given[f"out.{name}.depths"].tolist()
    torch.testing.assert_close(torch.tensor(found.scores), given[f"out.{name}.scores"], **TOLERANCE)


@pytest.mark.parametrize("name", ["small", "medium", "published"])
def test_the_dynamic_tree(model, name):
    sizes = facts("eagle3")["dynamic"][name]
    root = int(tensors("eagle3")["in.root"])
    state = observed(model.drafter, [12])
    found = drafted(model.drafter, state, root, sizes["depth"], sizes["top_k"], sizes["total_token"])
    same_tree(found, f"dynamic_{name}")


def test_the_second_tree_hangs_on_three_more_verified_pairs(model):
    given, sizes = tensors("eagle3"), facts("eagle3")["second"]
    drafter, state = model.drafter, observed(model.drafter, [12])
    small = facts("eagle3")["dynamic"]["small"]
    drafted(drafter, state, int(given["in.root"]), small["depth"], small["top_k"], small["total_token"])
    ids = given["in.second.input_ids"]
    state = drafter.observe(state, given["in.second.features"], ids[:, -3:], torch.tensor([3]))
    found = drafted(drafter, state, int(ids[0, -1]), sizes["depth"], sizes["top_k"], sizes["total_token"])
    same_tree(found, "second")


def test_greedy_steps(model):
    """24 steps of the published loop: what is drafted in each, how much of it the base takes, and the text."""
    run, given = facts("eagle3")["greedy"], tensors("eagle3")
    sizes, drafter, base = run["tree"], model.drafter, model.base
    text = given["in.input_ids"][0].tolist()
    state, known = drafter.start(1, 128), 0
    text.append(int(base(torch.tensor([text])).logits[0, -1].argmax()))
    for step in run["steps"]:
        ids = torch.tensor([text])
        features = BaseReader.of_texts(base, drafter.reads).read_texts(ids[:, :-1]).features[:, known:]
        state = drafter.observe(state, features, ids[:, known + 1 :], torch.tensor([features.shape[1]]))
        known = len(text) - 1
        tree = drafted(drafter, state, text[-1], sizes["depth"], sizes["top_k"], sizes["total_token"])
        assert tree.tokens == step["draft_tokens"]
        node, accepted = 0, 0
        while True:
            text.append(int(base(torch.tensor([text])).logits[0, -1].argmax()))
            below = [i for i, parent in enumerate(tree.parents) if parent == node and tree.tokens[i] == text[-1]]
            if not below:
                break
            node, accepted = below[0], accepted + 1
        assert (accepted, text[-1]) == (step["accept_length"], step["next_root"])
    assert text[:-1] == run["sequence"]
