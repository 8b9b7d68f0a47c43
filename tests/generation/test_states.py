"""Trees on bases with layers that keep a state in the place of keys.

States are computed in float32, whatever the dtype of the base: numbers agree to about 1e-5, and texts are equal.
"""

import copy
import inspect
import pickle
import re
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import DynamicCache

from hf_drafthead import MedusaForCausalLM
from hf_drafthead.bases.errors import Unsupported
from hf_drafthead.bases.hooks import names_in_forward
from hf_drafthead.bases.mixers import UnknownMixer, mixers_of
from hf_drafthead.bases.probe import probe
from hf_drafthead.bases.releases import CACHE, COMPUTES_WITHOUT_KEYS
from hf_drafthead.generation.tree import DraftTree
from tests.bases import HYBRID, tiny_base
from tests.drafters import half_right
from tests.families import FAMILIES
from tests.generation.agreement import TREE, agree, prompt, shared_base

TOLERANCE = 3e-4  # of hidden states up to 8, through four layers, in some of which experts are weighted
every_kind = pytest.mark.parametrize("kind", HYBRID)
# one base of every way to fold tokens into a state
each_mixer = pytest.mark.parametrize("kind", ["qwen3.5", "kimi-linear", "lfm2", "falcon-h1"])


def base_of(kind: str):
    return shared_base(kind, dtype=torch.float32, attn_implementation=None)


def close(expected: torch.Tensor) -> float:
    """By how much numbers may differ that are computed in another order."""
    return 2e-5 * max(float(expected.abs().max()), 1.0)


def agree_on(kind: str, *args, **more):
    return agree(base_of(kind), *args, tolerance=TOLERANCE, **more)


@every_kind
@pytest.mark.parametrize("rows, choice", [(1, {}), (3, {}), (3, {"do_sample": True, "temperature": 0.8})], ids=str)
def test_the_text_is_the_base_s_and_so_is_the_generator_s_state(rows, choice, kind):
    agree_on(kind, prompt(rows), half_right, call={"max_new_tokens": 20, **choice})


@every_kind
def test_logits_at_every_node_are_those_of_a_forward_per_path(kind):
    base, tree = base_of(kind), DraftTree(TREE)
    reader = probe(base, (-1,))
    past, nodes = torch.arange(3, 14).expand(2, -1), torch.randint(3, 67, (2, tree.num_nodes))
    topology, cache = tree.topology(past.device), reader.cache(2, 32, tree.num_nodes)
    with torch.no_grad():
        reader(True, **{"input_ids": past, CACHE: cache, "use_cache": True})
        cache.count(past.shape[1])
        logits, _ = reader.nodes(nodes, topology, cache, cache.lengths[:, None] + topology.depths, None)
        for node in range(tree.num_nodes):
            path = torch.cat([past, nodes[:, topology.paths[0, node, : topology.depths[0, node] + 1]]], dim=1)
            expected = base(path).logits[:, -1]
            torch.testing.assert_close(logits[:, node], expected, rtol=0, atol=close(expected))


@each_mixer
def test_a_commit_of_other_paths_in_every_row_leaves_the_states_of_these_paths(kind):
    base, tree = base_of(kind), DraftTree(TREE)
    reader = probe(base, (-1,))
    past, nodes = torch.randint(3, 67, (4, 11)), torch.randint(3, 67, (4, tree.num_nodes))
    ends, counts = torch.tensor([tree.num_nodes - 1, 5, 0, 9]), torch.tensor([4, 2, 0, 3])
    topology, cache = tree.topology(past.device), reader.cache(4, 32, tree.num_nodes)
    paths = topology.paths[0, ends]
    with torch.no_grad():
        reader(True, **{"input_ids": past, CACHE: cache, "use_cache": True})
        cache.count(past.shape[1])
        reader.nodes(nodes, topology, cache, cache.lengths[:, None] + topology.depths, None)
        cache.keep(paths, counts)
        for row, count in enumerate(counts.tolist()):
            alone = DynamicCache(config=base.config)
            text = torch.cat([past[row], nodes[row, paths[row, :count]]])[None]
            base(text, **{CACHE: alone}, use_cache=True, position_ids=torch.arange(text.shape[1])[None])
            for layer, expected in zip(cache.layers, alone.layers):
                if hasattr(expected, "conv_states"):
                    mine = {**layer.conv_states, 1: layer.recurrent_states[0]}
                    for state, other in zip(mine.values(), (expected.conv_states[0], expected.recurrent_states[0])):
                        assert (state is None) == (other is None)
                        if state is not None:
                            torch.testing.assert_close(state[row, None], other, rtol=0, atol=close(other))


@each_mixer
def test_in_half_precision_trees_and_commits_round_as_much_as_the_base_s_own_steps(kind):
    """Against the same weights in float32; and a tree is as near to the steps as one forward over the text is."""
    base = tiny_base(kind, dtype=torch.bfloat16, attn_implementation=None)
    reader, chain = probe(base, (-1,)), DraftTree([[0] * depth for depth in range(1, 4)])
    text, places = torch.randint(3, 67, (4, 49)), torch.arange(49).expand(4, -1)
    alone, topology, order = (
        DynamicCache(config=base.config),
        chain.topology(text.device),
        torch.arange(4).expand(4, -1),
    )
    cache = reader.cache(4, 64, chain.num_nodes)
    with torch.no_grad():
        parts = zip(text.split([9, *[1] * 40], dim=1), places.split([9, *[1] * 40], dim=1))
        steps = [base(part, **{CACHE: alone}, position_ids=at, use_cache=True).logits[:, -1:] for part, at in parts]
        reader(True, **{"input_ids": text[:, :9], CACHE: cache, "use_cache": True})
        cache.count(9)
        verified = []
        for nodes in text[:, 9:].split(4, dim=1):
            positions = cache.lengths[:, None] + topology.depths
            verified.append(reader.nodes(nodes, topology, cache, positions, None)[0])
            cache.keep(order, torch.full((4,), 4))
        stepwise, trees = torch.cat(steps[1:], dim=1).float(), torch.cat(verified, dim=1).float()
        whole = base(text).logits[:, 9:].float()
        exact = base.float()(text).logits[:, 9:]
    pairs = ((trees, exact), (stepwise, exact), (trees, stepwise), (whole, stepwise))
    of_trees, of_steps, between, of_base = (float((one - other).square().mean().sqrt()) for one, other in pairs)
    assert 0 < of_trees < 1.1 * of_steps and between < 1.3 * of_base


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("kind", ["qwen3.5", "granite-hybrid"])
def test_every_family(kind, family):
    base, inputs = base_of(kind), prompt(3)
    model = family.build(base)
    found = model.generate(**inputs, max_new_tokens=12, return_dict_in_generate=True)
    assert found.accepted_lengths is not None, model.why_no_drafts()
    assert torch.equal(found.sequences, base.generate(**inputs, max_new_tokens=12))


@each_mixer
@pytest.mark.parametrize("eos", [None, [2, 51]], ids=["all to the end", "some end before"])
@pytest.mark.parametrize("rows", [1, 4])
def test_the_cache_that_is_returned_is_the_base_s(rows, eos, kind):
    inputs = prompt(rows)
    found = agree_on(kind, inputs, call={"max_new_tokens": 25, "eos_token_id": eos})
    for mine, theirs in zip(found.got[CACHE].layers, found.expected[CACHE].layers):
        assert type(mine) is type(theirs)
        if hasattr(theirs, "conv_states"):
            pairs = ((mine.conv_states, theirs.conv_states), (mine.recurrent_states, theirs.recurrent_states))
            for state, other in ((ours[0], others[0]) for ours, others in pairs):
                assert (state is None) == (other is None)
                if other is not None:
                    torch.testing.assert_close(state, other, rtol=0, atol=close(other))
            assert mine.has_previous_state == theirs.has_previous_state


@each_mixer
def test_nothing_of_the_base_changes_and_it_can_be_copied_and_pickled(kind):
    base = tiny_base(kind, dtype=torch.float32, attn_implementation=None)
    before = [{name: id(value) for name, value in vars(module).items()} for module in base.modules()]
    model = MedusaForCausalLM.from_base(base, num_draft_heads=2)
    inputs = prompt(2)
    text = model.generate(**inputs, max_new_tokens=8)
    after = [{name: id(value) for name, value in vars(module).items()} for module in base.modules()]
    assert before == after
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other.generate(**inputs, max_new_tokens=8), text)
        assert other.why_no_drafts() is None


def test_calls_in_several_threads_do_not_disturb_each_other_nor_the_base():
    base = base_of("qwen3.5")
    model = MedusaForCausalLM.from_base(base, num_draft_heads=2)
    inputs = [prompt(rows, seed=rows) for rows in (1, 2, 3)]
    expected = [base.generate(**each, max_new_tokens=24, eos_token_id=None) for each in inputs]

    def run(number: int) -> torch.Tensor:
        decodes = model if number < 3 else base
        return decodes.generate(**inputs[number % 3], max_new_tokens=24, eos_token_id=None)

    with ThreadPoolExecutor(6) as pool:
        assert all(map(torch.equal, pool.map(run, range(6)), expected * 2))


def of_states(output, change):
    """What a mixer gives, changed; some give more than hidden states."""
    return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)


@pytest.mark.few(1)
@each_mixer
@pytest.mark.parametrize("how", [{}, {"cache_implementation": "static"}], ids=["eager", "fixed"])
def test_what_is_done_to_a_mixer_between_two_calls_counts_from_then_on(how, kind, untraced):
    base = tiny_base(kind, dtype=torch.float32, attn_implementation=None)
    model, call, texts = MedusaForCausalLM.from_base(base, num_draft_heads=3), {**prompt(3), "max_new_tokens": 14}, []
    kinds = re.compile("Mixer|DeltaNet|DeltaAttention|ShortConv")
    mixer = next(module for module in base.modules() if kinds.search(type(module).__name__))

    def drafts() -> bool:
        expected = base.generate(**call, eos_token_id=None)
        found = model.generate(**call, **how, eos_token_id=None, draft_tree=TREE, return_dict_in_generate=True)
        assert torch.equal(found.sequences, expected)
        texts.append(str(expected.tolist()))
        return found.get("accepted_lengths") is not None

    assert drafts()
    hook = mixer.register_forward_hook(lambda module, inputs, output: of_states(output, lambda states: states * 0.3))
    assert drafts()
    hook.remove()
    across = mixer.register_forward_hook(
        lambda module, inputs, output: of_states(output, lambda states: states + 0.3 * states.cumsum(1))
    )
    assert not drafts()  # what a token gives depends on those beside it
    across.remove()
    assert drafts() and texts[0] == texts[-1] and len(set(texts)) == 3
    for parameter in mixer.parameters():
        parameter.data.mul_(0.7)
    assert drafts() and len(set(texts)) == 4


@pytest.mark.few(1)
@each_mixer
def test_a_function_that_is_replaced_in_a_mixer_s_module_is_heard_from_the_next_call_on(kind, monkeypatch, fallbacks):
    model, call = MedusaForCausalLM.from_base(base_of(kind), num_draft_heads=3), {**prompt(3), "max_new_tokens": 14}
    text = model.generate(**call, draft_tree=TREE)
    mixer = next(
        module
        for module in model.base.modules()
        if hasattr(module, "layer_idx") and names_in_forward(module)[1] & COMPUTES_WITHOUT_KEYS
    )
    place = vars(sys.modules[type(mixer).__module__])
    for strength, drafts in ((1.0, True), (0.7, False)):
        for name in set(place) & {"causal_conv1d_fn", "causal_conv1d_update"}:
            plain = inspect.unwrap(place[name])
            monkeypatch.setitem(
                place, name, lambda *given, of=plain, times=strength, **named: times * of(*given, **named)
            )
        found = model.generate(**call, draft_tree=TREE, return_dict_in_generate=True)
        assert torch.equal(found.sequences, model.base.generate(**call))
        assert torch.equal(found.sequences, text) == drafts
        assert (found.get("accepted_lengths") is not None) == drafts and bool(fallbacks) != drafts


def test_of_each_node_what_a_commit_needs_is_recorded_and_no_state():
    """Of Qwen3.5-4B's shape, 24 such layers and a tree of 16 nodes take less than 16 MiB a row."""
    base = tiny_base(
        "qwen3.5",
        dtype=torch.bfloat16,
        attn_implementation=None,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
    )
    reader = probe(base, (-1,))
    cache, tree = reader.cache(1, 32, 16), DraftTree([[0] * depth for depth in range(1, 16)])
    with torch.no_grad():
        reader(True, **{"input_ids": torch.arange(3, 14)[None], CACHE: cache, "use_cache": True})
        cache.count(11)
        topology = tree.topology(cache.lengths.device)
        reader.nodes(torch.arange(3, 19)[None], topology, cache, cache.lengths[:, None] + topology.depths, None)
    assert 24 * sum(values.nbytes for values in cache.recurrent[0].record.values()) <= 16 << 20


@pytest.mark.parametrize("kind, name", [("mamba", "MambaMixer"), ("unknown", "Folds")])
def test_a_mixer_without_a_tree_form_is_refused_by_the_name_of_its_class(kind, name):
    base = tiny_base("mamba") if kind == "mamba" else torch.nn.Sequential(Folds())
    with pytest.raises(UnknownMixer, match=name):
        mixers_of(base)


class Folds(torch.nn.Module):
    """A mixer of nobody's."""

    layer_idx = 0

    def forward(self, states: torch.Tensor, cache=None) -> torch.Tensor:
        return cache.update_recurrent_state(states, self.layer_idx)


def test_a_base_whose_commit_is_wrong_is_refused(monkeypatch):
    monkeypatch.setattr("hf_drafthead.bases.mixers.layer.RecurrentLayer.fold", lambda self, path: None)
    with pytest.raises(Unsupported, match="does not honour tree masks"):
        probe(tiny_base("qwen3.5", dtype=torch.float32, attn_implementation=None), (-1,))
