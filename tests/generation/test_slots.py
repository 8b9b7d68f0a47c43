"""The cache and its masks against lists: what every layer is given, after any steps and growth."""

import random

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, StaticCache
from transformers.cache_utils import DynamicLayer

from hf_drafthead.bases import slots
from hf_drafthead.bases.releases import can_load
from hf_drafthead.bases.slots import SlotCache
from hf_drafthead.generation import DraftTree

SHAPES = [(2, 3, 3), (2, 3, 3), (1, 4, 2)]  # of each layer: heads, sizes of keys and of values


class Mirror:
    """A `SlotCache` beside lists that hold what it must give back, one entry for every position of every row."""

    def __init__(self, rows: int, capacity: int, nodes: int, seed: int = 0):
        self.cache = SlotCache(rows, len(SHAPES), capacity, nodes)
        self.past: list[list[float]] = [[] for _ in range(rows)]
        self.placed: list[list[float]] = [[] for _ in range(rows)]  # in the order of their slots
        self.dice, self.next = random.Random(seed), 0.0

    def names(self, length: int) -> list[list[float]]:
        """A number for every position of a forward, from which keys and values are made."""
        count = len(self.past) * length
        self.next += count
        flat = [self.next - count + place + 1 for place in range(count)]
        return [flat[row * length : (row + 1) * length] for row in range(len(self.past))]

    def forward(self, names: list[list[float]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What the layers attend to, by number (B, S)."""
        seen = []
        numbers = torch.tensor(names, dtype=torch.float64)
        for index, (heads, of_keys, of_values) in enumerate(SHAPES):
            made = [
                numbers[:, None, :, None] * 100 + 10 * index + torch.arange(heads)[:, None, None] + torch.zeros(size)
                for size in (of_keys, of_values)
            ]
            keys, values = self.cache.update(made[0], -made[1], index)
            assert keys.shape[1:] == (heads, keys.shape[2], of_keys) and values.shape[3] == of_values
            for found in (keys, -values):
                own = (found - 10 * index - torch.arange(heads)[:, None, None]) / 100
                known = found != 0
                assert torch.equal(own[known], own[:, :1, :, :1].expand_as(own)[known])
            seen.append(torch.where(keys != 0, (keys - 10 * index) / 100, 0.0)[:, 0, :, 0])
            assert torch.equal(seen[-1], seen[0])
        return seen[0]

    def append(self, length: int, own: list[int] | None = None) -> None:
        self.cache.placed = None
        names, extent = self.names(length), self.cache.extent
        seen = self.forward(names)
        assert seen.shape[1] == extent + length and seen[:, extent:].tolist() == names
        self.same_past(seen[:, :extent])
        if own is None:
            self.cache.count(length)
        else:
            self.cache.keep(torch.zeros(len(own), length, dtype=torch.long), torch.tensor(own))
        for row, new in enumerate(names):
            self.past[row] += new[: None if own is None else own[row]]

    def place(self, count: int, again: bool = False) -> None:
        names = self.names(count)
        self.placed = [new + (old if again else []) for new, old in zip(names, self.placed)]
        assert not self.cache.place(count, again) and self.cache.placed == len(self.placed[0])
        seen = self.forward(names)
        nodes = len(self.placed[0])
        assert seen[:, :nodes].tolist() == self.placed
        assert seen.shape[1] == nodes + self.cache.capacity
        self.same_past(seen[:, nodes:])

    def keep(self, nodes: list[list[int]], counts: list[int]) -> None:
        self.cache.keep(torch.tensor(nodes), torch.tensor(counts))
        for row, count in enumerate(counts):
            self.past[row] += [self.placed[row][node] for node in nodes[row][:count]]

    def same_past(self, seen: torch.Tensor) -> None:
        for row, past in zip(seen.tolist(), self.past):
            assert row[: len(past)] == past

    def check(self) -> None:
        cache, lengths = self.cache, [len(past) for past in self.past]
        assert cache.lengths.tolist() == lengths
        assert max(lengths) <= cache.capacity and cache.slots == cache.nodes + cache.capacity
        if not cache.fixed:  # else it is counted once the shapes are free again
            assert cache.extent == max(lengths) == cache.get_seq_length()


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("capacity, nodes, room", [(3, 0, 1), (100, 9, 1024), (5, 2, 4)])
def test_layers_are_given_the_nodes_of_the_step_and_every_row_s_past(capacity, nodes, room, ragged, monkeypatch):
    monkeypatch.setattr(slots, "ROOM", room)
    for seed in range(6):
        dice = random.Random(seed)
        rows = dice.randint(1, 3)
        mirror = Mirror(rows, capacity, nodes, seed)
        mirror.append(4, [dice.randint(1, 4) for _ in range(rows)] if ragged else None)
        for step in range(7):
            mirror.check()
            fixed = mirror.cache.fixed
            mirror.place(dice.randint(1, 4))
            for _ in range(dice.randint(0, 2)):
                if len(mirror.placed[0]) <= 5:
                    mirror.place(dice.randint(1, 4), again=True)
            if len(mirror.placed[0]) > 4 and not fixed:
                mirror.place(2)  # a step of its own: those before it are forgotten
            count = len(mirror.placed[0])
            m = dice.randint(1, count)
            kept = [dice.sample(range(count), m) for _ in range(rows)]
            mirror.keep(kept, [dice.randint(0, m) for _ in range(rows)])
            if step == 2:
                if seed % 2:
                    mirror.cache.split()
                mirror.cache.resize(mirror.cache.extent + 40, 9)
                mirror.cache.fixed = True
                assert (mirror.cache.capacity, mirror.cache.nodes) == (mirror.cache.slots - 9, 9)
            if step == 4:
                mirror.cache.resize(mirror.cache.capacity + 3, 9)  # the text goes on in a longer one
            if step == 5:
                mirror.cache.fixed, mirror.cache.extent = False, int(mirror.cache.lengths.max())


def test_more_and_fewer_nodes_can_be_fixed():
    for capacity, nodes in ((12, 1), (12, 2), (12, 5), (6, 5)):
        mirror = Mirror(2, 8, 2)
        mirror.append(5, [5, 3])
        mirror.cache.split()
        mirror.cache.resize(capacity, nodes)
        mirror.cache.fixed = True
        memories = {block.untyped_storage().data_ptr() for block in mirror.cache.blocks}
        assert len(memories) == 2 * len(SHAPES)  # each layer's own
        mirror.place(nodes)
        mirror.keep([[0], [0]], [1, 1])
        mirror.place(1)
        mirror.check()


def test_memory_grows_by_half_at_first_then_by_a_room_or_by_what_is_needed(monkeypatch):
    monkeypatch.setattr(slots, "ROOM", 8)
    mirror = Mirror(1, 4, 1)
    mirror.append(4)
    mirror.append(1)
    assert (mirror.cache.capacity, mirror.cache.slots) == (8, 9)
    mirror.append(4)
    assert mirror.cache.capacity == 16
    mirror.append(8)
    assert mirror.cache.capacity == 24
    mirror.append(20)
    assert mirror.cache.capacity == 37
    before = mirror.cache.blocks[0]
    mirror.cache.reserve(37, 1)
    assert mirror.cache.blocks[0] is before
    mirror.cache.reserve(37, 4)
    assert (mirror.cache.capacity, mirror.cache.nodes, mirror.cache.slots) == (37, 4, 41)
    mirror.check()


def test_layers_of_one_shape_share_a_tensor():
    mirror = Mirror(2, 4, 1)
    mirror.append(3)
    assert [tuple(block.shape) for block in mirror.cache.blocks] == [
        (12, 2, 5, 3),
        (2, 2, 5, 4),
        (2, 2, 5, 2),
    ]
    per_slot = 8 * 2 * (12 * 3 + 2 * 4 + 2 * 2)
    assert mirror.cache.bytes_of(7) == 7 * per_slot and mirror.cache.bytes_of(0) == 0
    assert mirror.cache.taken == [8, 1, 1]
    assert SlotCache(2, 3, 4).bytes_of(7) == 0
    smallest = SlotCache(1, 1, 1)
    smallest.update(torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1, 2), 0)
    assert (smallest.slots, smallest.bytes_of(5)) == (1, 5 * 2 * 2 * 4)


def test_no_more_layers_share_a_tensor_than_the_bound(monkeypatch):
    monkeypatch.setattr(slots, "MOST_TENSORS", 3)
    mirror = Mirror(1, 4, 1)
    mirror.append(3)
    assert [len(block) for block in mirror.cache.blocks] == [6, 6, 2, 2]


def test_an_ordinary_cache_is_loaded_and_unloaded():
    mirror = Mirror(2, 3, 2)
    mirror.append(5)
    mirror.place(2)
    mirror.keep([[1, 0], [0, 1]], [2, 2])
    ordinary = DynamicCache()
    mirror.cache.unload(ordinary, 0, 7)
    assert ordinary.get_seq_length() == 7
    other = Mirror(2, 1, 0)
    other.cache.load(ordinary)
    assert (other.cache.extent, other.cache.lengths.tolist(), other.cache.nodes) == (7, [7, 7], 0)
    assert other.cache.capacity == 8
    other.past, other.next = mirror.past, mirror.next
    other.append(1)
    other.cache.unload(ordinary, 7, 8)
    assert torch.equal(ordinary.layers[0].keys[:, 0, :, 0], torch.tensor(other.past, dtype=torch.float64) * 100)
    assert torch.equal(ordinary.layers[2].values[:, 0, :, 0], torch.tensor(other.past, dtype=torch.float64) * -100 - 20)
    other.cache.unload(ordinary, 8, 8)
    assert ordinary.get_seq_length() == 8


def test_the_end_of_a_sliding_past_is_loaded_to_its_place():
    window = DynamicCache()
    keys = torch.arange(1.0, 5).reshape(1, 1, 4, 1)
    window.update(keys, keys, 0)
    past = DynamicCache()
    past.update(torch.ones(1, 1, 6, 1), torch.ones(1, 1, 6, 1), 0)
    past.layers.append(window.layers[0])
    cache = SlotCache(1, 2, 1, 3)
    cache.load(past)
    assert cache.layers[1].keys[0, 0, :, 0].tolist()[3:9] == [0, 0, 1, 2, 3, 4]


def test_a_cache_is_loaded_where_every_layer_is_known():
    ordinary = DynamicCache()
    assert can_load(ordinary)
    ordinary.update(torch.zeros(1, 1, 2, 1), torch.zeros(1, 1, 2, 1), 0)
    assert can_load(ordinary)
    ordinary.layers.append(object())
    assert not can_load(ordinary)
    offloaded = DynamicCache()
    offloaded.offloading = True
    assert can_load(offloaded) is False
    assert not can_load(StaticCache(LlamaConfig(), max_cache_len=8))


def test_layers_without_a_past_are_neither_loaded_nor_unloaded():
    past = DynamicCache()
    past.update(torch.ones(1, 1, 2, 1), torch.ones(1, 1, 2, 1), 0)
    past.layers += [DynamicLayer(), DynamicLayer()]
    past.layers[2].lazy_initialization(torch.zeros(1, 1, 2, 1), torch.zeros(1, 1, 2, 1))
    cache = SlotCache(1, 3, 4)
    cache.load(past)
    assert [layer.is_initialized for layer in cache.layers] == [True, False, False]
    target = DynamicCache()
    cache.unload(target, 2, 2)
    assert not target.layers
    cache.unload(target, 0, 2)
    assert len(target.layers) == 1 and target.get_seq_length() == 2


def test_what_transformers_asks_a_layer_is_answered_as_a_dynamic_layer_does():
    ours, theirs = SlotCache(1, 1, 4, 2), DynamicLayer()
    numbers = torch.zeros(1, 1, 3, 2)
    ours.update(numbers, numbers, 0), theirs.update(numbers, numbers)
    ours.count(3)
    layer = ours.layers[0]
    for question in ("get_seq_length", "get_max_length"):
        assert getattr(layer, question)() == getattr(theirs, question)()
    assert layer.get_mask_sizes(2) == theirs.get_mask_sizes(2) == (5, 0)
    assert layer.is_sliding is theirs.is_sliding is False
    assert layer.is_croppable is False  # the rows are of different lengths


def test_lengths_live_where_the_first_layer_computes_and_are_not_read_back_from_there():
    """On the meta device nothing can be read; the longest row is then known by a bound."""
    cache, here = SlotCache(2, 2, 9, 1), torch.zeros(2, 1, 4, 2)
    cache.update(here.to("meta"), here.to("meta"), 0)
    cache.update(here, here, 1)
    assert cache.lengths.device.type == "meta"
    assert cache.place(4, past=True)
    cache.keep(torch.zeros(2, 4, dtype=torch.long), torch.tensor([4, 2]))
    assert cache.extent == 4
    cache.place(1)
    cache.blocks = cache.blocks[:1]
    cache.keep(torch.zeros(2, 3, dtype=torch.long, device="meta"), torch.ones(2, dtype=torch.long, device="meta"))
    assert cache.extent == 7


def test_layers_of_a_fixed_cache_on_several_devices_move_their_own_nodes():
    """The meta device stands for another one: what is copied to it cannot be copied back."""
    cache, numbers = SlotCache(1, 3, 4, 2), torch.arange(2.0).reshape(1, 1, 2, 1)
    for index, device in enumerate(["cpu", "meta", "cpu"]):
        cache.update(numbers.to(device), numbers.to(device), index)
    cache.count(2)
    cache.split()
    cache.resize(4, 2)
    cache.fixed = True
    cache.place(2)
    for index in (0, 2):
        cache.update(numbers + 7 + index, numbers - 7 - index, index)
    cache.keep(torch.tensor([[1]]), torch.tensor([1]))
    for index in (0, 2):
        layer = cache.layers[index]
        assert layer.keys[0, 0, 2:5, 0].tolist() == [0, 1, 8 + index]
        assert layer.values[0, 0, 2:5, 0].tolist() == [0, 1, -6 - index]
    assert [block.device.type for block in cache.blocks] == ["cpu", "cpu", "meta", "meta", "cpu", "cpu"]


def test_a_cache_that_is_fixed_no_longer_grows_with_what_every_layer_holds():
    cache, numbers = SlotCache(2, 3, 4, 2), torch.arange(8.0).reshape(2, 2, 2, 1)
    for index in (0, 1):
        cache.update(numbers + 10 * index, -numbers - 10 * index, index)
    cache.count(2)
    cache.resize(4, 2)
    cache.reserve(9, 3)
    assert cache.slots == 12 and not cache.layers[2].is_initialized
    cache.place(1)
    cache.update(numbers[:, :, :1] + 20, -numbers[:, :, :1] - 20, 2)
    for index in (0, 1):
        layer = cache.layers[index]
        assert torch.equal(layer.keys[:, :, 3:5], numbers + 10 * index)
        assert torch.equal(layer.values[:, :, 3:5], -numbers - 10 * index)
    assert torch.equal(cache.layers[2].keys[:, :, 2:3], numbers[:, :, :1] + 20)


def test_whether_rows_are_known_to_be_of_one_length():
    numbers = torch.zeros(2, 1, 3, 2)
    cache = SlotCache(2, 1, 9, 1)
    cache.update(numbers, numbers, 0)
    cache.count(3)
    assert cache.even
    cache.place(1)
    cache.keep(torch.zeros(2, 1, dtype=torch.long), torch.tensor([1, 0]))
    assert not cache.even
    cache.keep(torch.zeros(2, 1, dtype=torch.long), torch.tensor([0, 1]))
    assert cache.even
    cache.fixed = True
    assert not cache.even
    alone = SlotCache(1, 1, 9, 1)
    assert alone.even
    alone.extent = 1  # a bound
    assert not alone.even
    alone.update(numbers[:1].to("meta"), numbers[:1].to("meta"), 0)
    assert not alone.even  # on another device nothing is asked


def plain_mask(tree: DraftTree, nodes: list[int], columns: list[int], past: int, extent: int, visible, window):
    """Row by row and column by column: what each node sees, as True and False."""
    rows = []
    for node in nodes:
        line, above = [], node
        while above:
            line.append(above)
            above = tree.parents[above]
        line.append(0)
        depth = tree.depths[node]
        seen = [column in line and (window is None or depth - tree.depths[column] < window) for column in columns]
        for slot in range(extent):
            hidden = visible is not None and slot < len(visible) and not visible[slot]
            near = window is None or past + depth - slot < window
            seen.append(slot < past and not hidden and near)
        rows.append(seen)
    return rows


def of_lengths(past: torch.Tensor, extent: int) -> SlotCache:
    """A cache whose rows have such a past."""
    cache = SlotCache(len(past), 1, capacity=extent)
    cache.lengths, cache.extent = past, extent
    return cache


@pytest.mark.parametrize("window", [None, 1, 2, 4])
@pytest.mark.parametrize("padding", [None, 3, 12])
def test_a_node_sees_its_ancestors_and_its_row_s_past(window, padding):
    tree = DraftTree([(0,), (1,), (0, 0), (0, 1), (0, 1, 0)])
    topology, past, extent = tree.topology(), torch.tensor([3, 7, 0]), 9
    cache, visible = of_lengths(past, extent), None
    if padding is not None:
        visible = torch.ones(3, padding, dtype=torch.bool)
        visible[0, :2] = visible[1, 1] = False
    mask = cache.mask(topology.ancestors, topology.depths, torch.float64, window, visible)
    nodes = list(range(tree.num_nodes))
    hidden = [None] * 3 if visible is None else visible.tolist()
    expected = [plain_mask(tree, nodes, nodes, n, extent, v, window) for n, v in zip(past.tolist(), hidden)]
    assert mask.shape == (3, 1, len(nodes), len(nodes) + extent) and mask.dtype == torch.float64
    assert torch.equal(mask[:, 0] == 0, torch.tensor(expected))
    assert (mask[mask != 0] == torch.finfo(torch.float64).min).all()


def test_a_level_of_a_tree_sees_its_ancestors_among_all_nodes_so_far():
    tree = DraftTree([(0,), (1,), (0, 0), (0, 1)])
    topology, past = tree.topology(), torch.tensor([2, 5])
    level = [3, 4]
    for window in (None, 3):
        nodes = topology.ancestors[:, level], topology.depths[:, level]
        mask = of_lengths(past, 6).mask(*nodes, torch.float32, window)
        expected = [plain_mask(tree, level, list(range(5)), n, 6, None, window) for n in past.tolist()]
        assert torch.equal(mask[:, 0] == 0, torch.tensor(expected))
