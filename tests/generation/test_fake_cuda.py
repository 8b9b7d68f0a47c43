"""Whole steps on tensors of a GPU that is not there: nothing waits for the device, and nothing is copied to or from it.

A call is made on the CPU up to its first step. Its tensors and those of the model are then replaced by fake ones on
`cuda:0`, which have shapes and no values, and the step is taken with them. What a step must not do raises: to read a
value, to copy between devices, to index by a mask or by a Python list.
"""

import copy
import dataclasses
import types

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from hf_drafthead.bases.slots import SlotCache
from hf_drafthead.generation import DraftTree, batch, noise
from tests.bases import tiny_base
from tests.families import FAMILIES
from tests.generation.agreement import TREE, prompt

pytestmark = pytest.mark.skipif(
    not torch.backends.cuda.is_built(),
    reason="a torch for CPUs alone has no indexing for tensors of a GPU, fake ones too",
)
CUDA = torch.device("cuda:0")
MODE = FakeTensorMode()
TREES = {"static": TREE, "dynamic": {"dynamic": {"nodes": 8, "depth": 3, "width": 3}}, "root": DraftTree([])}
CALLS = {
    "greedy": {},
    "lookup": {"prompt_lookup_num_tokens": 4},
    "sampled": {"do_sample": True, "top_k": 20, "top_p": 0.9, "temperature": 0.7},
    "typical": {"do_sample": True, "acceptance": "typical"},
}
READS_VALUES = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique_dim", "_unique2"}
INDEXES = {"index", "index_put", "index_put_"}


class NothingWaits(TorchDispatchMode):
    """Refuses what makes a GPU wait for the host, or the host for the GPU; notes the operations of the others."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        name = function._schema.name.partition("::")[2]
        assert name not in READS_VALUES, f"{name} reads a value"
        result = function(*arguments, **(named or {}))
        tensors = [leaf for leaf in tree_leaves((arguments, named, result)) if isinstance(leaf, torch.Tensor)]
        # a number that is written to all of a tensor is an argument of the kernel
        assert all(tensor.is_cuda for tensor in tensors if tensor.dim()), f"{name} touches memory of the host"
        if name in INDEXES:
            assert not any(index is not None and index.dtype == torch.bool for index in arguments[1]), "index by a mask"
        self.names.append(name)
        return result


class Reached(Exception):
    """What would take the first step of a call: the batch, the state before it, the stages."""


@pytest.fixture
def first_step(monkeypatch):
    """Runs a call of a model up to its first step."""

    def stop(self, state, stages, runs):
        raise Reached(copy.copy(self), state, stages)

    right = batch.Batch.take
    monkeypatch.setattr(batch.Batch, "take", stop)
    # the stream and the generator of a GPU that is not there
    stream = types.SimpleNamespace(record_event=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)

    def draw(tape, like):
        return like.new_empty(tape.batch_size, like.shape[-1], device=tape.generator.device).exponential_()

    monkeypatch.setattr(noise.NoiseTape, "_draw", draw)

    def run(model, **call):
        with pytest.raises(Reached) as reached:
            model.generate(**call, max_new_tokens=30)
        taker, *rest = reached.value.args
        taker.take = types.MethodType(right, taker)
        return taker, *rest

    return run


def faked(value):
    """Fake tensors of a GPU in the place of tensors, which keep their shapes and strides."""

    def fake(leaf):
        if not isinstance(leaf, torch.Tensor) or isinstance(leaf, FakeTensor):
            return leaf
        with MODE:
            return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=CUDA)

    return tree_map(fake, value)


def on_fake_gpu(model):
    """A copy of a model, with fake weights."""
    twin = copy.deepcopy(model)
    for part in (twin.base, twin.drafter):
        for module in part.modules():
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        fake = faked(tensor.detach())
                        tensors[name] = (
                            torch.nn.Parameter(fake, requires_grad=False) if tensors is module._parameters else fake
                        )
    twin.drafter.attach(twin.base)
    return twin


def moved(taker, state, stages, twin):
    """Let a batch and its state lie on the fake GPU: the stages there."""
    reader = dataclasses.replace(taker.reader, base=twin.base, output=copy.copy(taker.reader.output))
    head = twin.base.get_output_embeddings()
    vars(reader.output).update(base=twin.base, head=head, logits=head, decoder=twin.base.get_decoder())
    rules = taker.only.rules
    with MODE:
        there = type(stages).of(reader, twin.drafter, stages.tree, CUDA)
    taker.device = CUDA
    for cache in state.rows.caches:
        cache.blocks = faked(cache.blocks)
        for layer in cache.layers:
            layer.bind()
        cache.lengths = faked(cache.lengths)
    state.rows, state.limits = faked(state.rows), faked(state.limits)
    state.pays = None  # nodes are weighed on a CPU alone
    rules.device = CUDA
    if rules.random.tape is not None:
        states = {"get_state": lambda: None, "set_state": lambda state: None}
        rules.random.tape.generator = types.SimpleNamespace(device=CUDA, **states)
        rules.random.tape.drawn = faked(rules.random.tape.drawn)
    for part in (*rules.processors, *rules.criteria):
        vars(part).update(faked(dict(vars(part))))
    return there


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda family: family.name)
def models(request):
    """A family on the CPU, and on the fake GPU."""
    model = request.param.build(tiny_base("llama-gqa", dtype=torch.float32))
    return model, on_fake_gpu(model)


def cases():
    for rows in (1, 3):
        for name in CALLS:
            for kind in TREES:
                if rows == 3 or name == "greedy" or kind == "static":
                    yield pytest.param(name, kind, rows, id=f"{name}, {kind}, {rows}")


@pytest.mark.parametrize("name, kind, rows", list(cases()))
@torch.no_grad()
def test_a_step_waits_for_nothing(models, first_step, name, kind, rows):
    model, twin = models
    taker, state, stages = first_step(model, **prompt(rows), **CALLS[name], draft_tree=TREES[kind])
    stages = moved(taker, state, stages, twin)
    with MODE, NothingWaits() as watch:
        outcome = taker.take(state, stages, stages)
    assert taker.only.error is None
    assert outcome.args[0].is_cuda and len(watch.names) > 30


@pytest.mark.parametrize("kind", TREES)
@torch.no_grad()
def test_a_recorded_step_waits_for_nothing(models, first_step, kind):
    model, twin = models
    taker, state, stages = first_step(model, **prompt(3), draft_tree=TREES[kind])
    stages = moved(taker, state, stages, twin)
    with MODE:
        for cache in state.rows.caches:
            cache.resize(64, 64)
            cache.fixed = True
        state.rows = state.rows._replace(sequences=torch.zeros(3, 128, dtype=torch.long, device=CUDA), visible=None)
        taker.ahead = True
        with NothingWaits() as watch:
            outcome = taker.take(state, stages, stages)
    assert taker.only.error is None
    assert outcome.args[0].is_cuda and len(watch.names) > 30


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: x[[0, 1]],
        lambda x: x[x > 0],
        lambda x: x.sum().item(),
        lambda x: x.cpu(),
        lambda x: x + torch.tensor([1.0, 2.0]).to(x.device),
        lambda x: bool((x > 0).all()),
    ],
    ids=["list", "mask", "item", "copy", "copy to", "truth"],
)
def test_the_watch_can_fail(wrong):
    with MODE, pytest.raises(Exception), NothingWaits():  # noqa: B017
        wrong(torch.zeros(2, 2, device=CUDA))


def test_masks_on_a_gpu_are_aligned():
    with MODE:
        cache = SlotCache(1, 1, capacity=64)
        keys = torch.zeros(1, 1, 9, 4, device=CUDA)
        cache.update(keys, keys, 0)
        cache.count(9)
        cache.place(13)
        seen, _ = cache.update(torch.zeros(1, 1, 13, 4, device=CUDA), torch.zeros(1, 1, 13, 4, device=CUDA), 0)
        assert seen.shape[2] == 13 + 64
        ancestors = torch.ones(1, 13, 13, dtype=torch.bool, device=CUDA)
        mask = cache.mask(ancestors, torch.zeros(1, 13, device=CUDA), torch.float32)
        assert mask.shape == (1, 1, 13, 77) and mask.stride(2) == 80
