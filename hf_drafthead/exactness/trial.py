"""Does a base give a token the same bits, whatever is beside it? Found out by running it.

One text is read in several ways: a prompt and then one token at a time, with which all others are compared; in one
forward; in parts; in a batch, padded on the left; and as a path in trees, where its keys lie in other slots than a
text's, among wrong guesses. Of every module all bits of the output are compared at every position: the first module
that differs, in the order in which they finish, is the one to blame.

Shapes: B rows, n tokens of a forward.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from hf_drafthead.bases.errors import Unsupported, out_of_memory
from hf_drafthead.bases.output_layer import input_device
from hf_drafthead.bases.probe import probe
from hf_drafthead.bases.releases import CACHE, cache_argument
from hf_drafthead.bases.topology import Topology
from hf_drafthead.exactness import attention
from hf_drafthead.exactness.modules import Inexact, named

PROMPT, STEPS = 21, 7  # tokens of the text that are read at once, and one by one
PADDING = 5  # in front of the text in a batch
BLOCK = 8, 16  # keys of a block of attention, and of texts that have some
TREES = ((0, 0, 0, 1, 2, 2, 4), (0, 0, 1, 0, 3, 3, 0, 4, 5, 4, 7, 9, 9, 2))  # parents of the nodes
PATHS = ((0, 2, 4, 6), (0, 3, 5))  # the nodes that are the text
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Comparison:
    """Of every module and position a sum of all bits of the output, as it was first; and the first that differs."""

    def __init__(self, base: PreTrainedModel):
        self.first: dict[Any, int] = {}
        self.calls: dict[str, int] = {}
        self.differs: str | None = None
        self.base, self.generator = base, torch.Generator().manual_seed(0)
        self.weights: dict[int, torch.Tensor] = {}

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        hooks = []
        for name, module in self.base.named_modules():
            if not any("expert" in part for part in name.split(".")[:-1]):  # which read what a router gives them
                hooks.append(module.register_forward_hook(functools.partial(self.look, name)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def look(self, name: str, _: Any, __: Any, given: Any) -> None:
        """Compare what a module gives at the positions of the text with what it gave there first."""
        while isinstance(given, (tuple, dict)) and given:
            given = next(iter(given.values() if isinstance(given, dict) else given))
        if self.differs is not None or not (isinstance(given, torch.Tensor) and given.is_floating_point()):
            return
        if given.shape[:1] == (self.shape[0] * self.shape[1],):
            given = given.unflatten(0, self.shape)
        if given.shape[:2] != self.shape or given.dim() != 3:
            return
        call = self.calls[name] = self.calls.get(name, 0) + 1
        bits = (
            given[self.row]
            .index_select(0, self.tokens.to(given.device))
            .contiguous()
            .view(BITS[given.element_size()])
            .long()
        )
        if (width := bits.shape[1]) not in self.weights:
            self.weights[width] = torch.randint(1 << 40, (width,), generator=self.generator).to(bits.device)
        for position, found in enumerate((bits * self.weights[width]).sum(-1).tolist(), self.start):
            if self.first.setdefault((name, call, position), found) != found:
                self.differs = name

    def run(self, row: int, tokens: Any, start: int, shape: tuple[int, int], forward: Any, *args: Any, **inputs: Any):
        """A forward of n tokens in B rows, of which some in a row are those of the text from `start` on."""
        self.row, self.tokens, self.start, self.shape, self.calls = row, torch.tensor([*tokens]), start, shape, {}
        return forward(*args, **inputs)


@torch.no_grad()
def first_difference(base: PreTrainedModel) -> tuple[str, str] | None:
    """The first module whose bits differ, and the way to read in which they do; None where none do.

    Raises:
        Inexact: attention is computed past transformers' interface, or the base cannot be read in one of these ways.
    """
    device, vocabulary = input_device(base), base.config.get_text_config(decoder=True).vocab_size
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, vocabulary, (3, PROMPT + STEPS + PADDING), generator=generator).to(device)
    comparison = Comparison(base)
    ways: dict[str, Callable[[], None]] = {
        "token by token": lambda: _in_parts(base, comparison, tokens[0], (PROMPT, *[1] * STEPS)),
        "in one forward": lambda: _in_parts(base, comparison, tokens[0], (PROMPT + STEPS,)),
        "in parts": lambda: _in_parts(base, comparison, tokens[0], (9, PROMPT - 9, STEPS)),
        "in a batch": lambda: _in_a_batch(base, comparison, tokens),
    }
    with contextlib.suppress(Unsupported):  # a base that decodes by itself does so alone and in batches
        reader = probe(base, (-1,))
        ways["in trees"] = lambda: _in_trees(reader, comparison, tokens)
    block = attention.BLOCK.set(BLOCK)
    try:
        with comparison.looking():
            for way, run in ways.items():
                try:
                    run()
                except Exception as error:
                    if isinstance(error, Inexact) or out_of_memory(error):
                        raise
                    why = f"{type(error).__name__}: {error}".splitlines()[0]
                    raise Inexact(f"it cannot be read {way} ({why})") from error
                if comparison.differs is not None:
                    return comparison.differs, way
    finally:
        attention.BLOCK.reset(block)
    return None


def _arguments(base: PreTrainedModel, cache: Any, positions: torch.Tensor, mask: torch.Tensor | None) -> dict[str, Any]:
    name = cache_argument(base.forward) or CACHE
    return {name: cache, "position_ids": positions, "attention_mask": mask, "use_cache": True}


def _in_parts(base: PreTrainedModel, comparison: Comparison, tokens: torch.Tensor, parts: tuple[int, ...]) -> None:
    """Read the text in forwards of so many tokens."""
    cache, start = DynamicCache(config=base.config), 0
    for count in parts:
        positions = torch.arange(start, start + count, device=tokens.device)[None]
        attention.attended.clear()
        inputs = _arguments(base, cache, positions, None)
        comparison.run(0, range(count), start, (1, count), base, tokens[None, start : start + count], **inputs)
        start += count
    _check_attended(base, cache)


def _check_attended(base: PreTrainedModel, cache: DynamicCache) -> None:
    """Refuse a base of which a layer keeps keys and attends past transformers' interface."""
    keys = [layer for layer in cache.layers if isinstance(getattr(layer, "keys", None), torch.Tensor)]
    attended = {id(module) for module in attention.attended}
    if sum(layer.keys.numel() > 0 for layer in keys) > len(attention.attended):
        past = (
            name
            for name, part in base.named_modules()
            if "ttention" in type(part).__name__ and id(part) not in attended
        )
        raise Inexact(f"{named(base, next(past, ''))} attends past transformers' AttentionInterface")


def _in_a_batch(base: PreTrainedModel, comparison: Comparison, tokens: torch.Tensor) -> None:
    """Read the text in the second of three rows of different lengths."""
    length = PROMPT + PADDING
    starts = torch.tensor([0, PADDING, PADDING + 9], device=tokens.device)[:, None]
    order = torch.arange(length + 1, device=tokens.device)
    rows, mask = torch.stack([row.roll(int(start)) for row, start in zip(tokens[[1, 0, 2]], starts)]), order >= starts
    rows, positions = rows[:, : len(order)].where(mask, 0), (order - starts).clamp(min=0)
    cache, start = DynamicCache(config=base.config), 0
    for stop in (length, length + 1):
        of_text = range(max(PADDING - start, 0), stop - start)
        inputs = _arguments(base, cache, positions[:, start:stop], mask[:, :stop].long())
        text = 1, of_text, start + of_text[0] - PADDING
        comparison.run(*text, (3, stop - start), base, rows[:, start:stop], **inputs)
        start = stop


def _in_trees(reader: Any, comparison: Comparison, tokens: torch.Tensor) -> None:
    """Read a prompt of two rows, and behind it in the first the text as a path in trees."""
    cache = reader.cache(2, capacity=16, nodes=3)
    inputs = {"input_ids": tokens[:2, :PROMPT], CACHE: cache, "use_cache": True}
    comparison.run(0, range(PROMPT), 0, (2, PROMPT), reader, False, **inputs)
    cache.count(PROMPT)
    start = PROMPT
    for parents, path in zip(TREES, PATHS):
        topology, nodes = Topology.of_numbers(parents, tokens.device), tokens[1:, : len(parents)].clone()
        nodes[0, list(path)] = tokens[0, start : start + len(path)]
        positions = cache.lengths[:, None].to(tokens.device) + topology.depths
        comparison.run(0, path, start, (2, len(parents)), reader.nodes, nodes, topology, cache, positions, None)
        kept = torch.tensor([path, path], device=tokens.device)
        cache.keep(kept, torch.tensor([len(path), 1], device=tokens.device))
        start += len(path)
