"""Does a base give a token the same bits, whatever is beside it? Found out by running it.

One text is read in several ways: a prompt and then one token at a time, with which all others are compared; in parts;
in a batch, padded on the left; and as a path in trees, where its keys lie in other slots than a text's, among wrong
guesses. Of every module all bits of the output are compared at every position: the first module that differs, in the
order in which they finish, is the one to blame.

Shapes: B rows, n tokens of a forward.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import Counter
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_drafthead.bases.errors import Unsupported, out_of_memory
from hf_drafthead.bases.output_layer import input_device
from hf_drafthead.bases.probe import probe
from hf_drafthead.bases.releases import CACHE, DynamicCache, cache_argument, keep_picklable
from hf_drafthead.bases.topology import Topology
from hf_drafthead.exactness import attention
from hf_drafthead.exactness.modules import ACTIVATIONS, named
from hf_drafthead.exactness.products import Inexact

PROMPT, LENGTH = 12, 17  # tokens of the text that are read at once, and all
PADDING = 3  # in front of the text in a batch
BLOCK = 16  # keys of a block of attention
WAYS = {  # tokens in front of the text, and how many each forward reads; None: as paths in trees
    "token by token": (0, (PROMPT, *[1] * (LENGTH - PROMPT))),
    "in parts": (0, (LENGTH - PROMPT, PROMPT)),
    "in a batch": (PADDING, (LENGTH + PADDING - 1, 1)),
    "in trees": None,
}
TREES = ((0, 0, 0, 1, 2, 2, 4), (0, 0, 1, 0, 3, 3))  # parents of the nodes
PATHS = ((0, 2, 4), (0, 3))  # the nodes that are the text


@torch.no_grad()
def try_ways(base: PreTrainedModel) -> None:
    """Read a text in all ways.

    Raises:
        Inexact: a module's bits differ, attention is computed past transformers' interface, or the base cannot be read
            in one of these ways; a base that decodes by itself does so alone and in batches.
    """
    comparison = Comparison(base)
    block, attended = attention.BLOCK.set(BLOCK), attention.ATTENDED.set(comparison.attended)
    try:
        for way, reading in WAYS.items():
            try:
                comparison.read(*reading) if reading else comparison.read_in_trees()
            except Exception as error:
                if isinstance(error, Inexact) or out_of_memory(error):
                    raise
                why = f"it cannot be read {way} ({type(error).__name__}: {error})".splitlines()[0]
            else:
                if (name := comparison.differs) is None:
                    continue
                while isinstance(base.get_submodule(name), (torch.nn.Linear, *ACTIVATIONS)):  # it was given other bits
                    name = name.rpartition(".")[0]
                why = f"{named(base, name)} gives other bits where a text is read {way} than token by token"
            if reading or _drafts(base):
                raise Inexact(why)
    finally:
        attention.BLOCK.reset(block)
        attention.ATTENDED.reset(attended)
        keep_picklable(base)


def _drafts(base: PreTrainedModel) -> bool:
    with contextlib.suppress(Unsupported):
        return bool(probe(base, (-1,)))
    return False


class Comparison:
    """Of every module and position a hash of the output, as it was first; and the first module that differs."""

    def __init__(self, base: PreTrainedModel):
        self.base = base
        self.first: dict[Any, int] = {}
        self.differs: str | None = None
        self.attended: list[Any] = []  # modules, in the last forward
        vocabulary = base.config.get_text_config(decoder=True).vocab_size
        tokens = torch.randint(3, vocabulary, (2, LENGTH + PADDING), generator=torch.Generator().manual_seed(1))
        self.text, self.other = tokens.to(input_device(base))  # (LENGTH + PADDING,) each

    def run(self, tokens: Any, start: int, shape: tuple[int, int], forward: Any, *args: Any, **inputs: Any) -> None:
        """A forward of n tokens in B rows, of which some in the last row are those of the text from `start` on."""
        self.tokens, self.start, self.shape, self.calls = [*tokens], start, shape, Counter[str]()
        with contextlib.ExitStack() as hooks:
            for name, module in self.base.named_modules():
                if not any("expert" in part for part in name.split(".")[:-1]):  # which read what a router gives them
                    hooks.enter_context(module.register_forward_hook(functools.partial(self.look, name)))
            forward(*args, **inputs)

    def look(self, name: str, _: Any, __: Any, output: Any) -> None:
        """Compare what a module gives at the positions of the text with what it gave there first."""
        while isinstance(output, (tuple, dict)) and output:
            output = next(iter(output.values() if isinstance(output, dict) else output))
        if self.differs is not None or not (isinstance(output, torch.Tensor) and output.is_floating_point()):
            return
        if output.dim() == 2 and len(output) == self.shape[0] * self.shape[1]:
            output = output.unflatten(0, self.shape)
        if output.shape[:2] != self.shape or output.dim() != 3:
            return
        self.calls[name] += 1
        hashes = torch.hash_tensor(output[-1, self.tokens].contiguous(), dim=(1,)).tolist()
        for position, found in enumerate(hashes, self.start):
            if self.first.setdefault((name, self.calls[name], position), found) != found:
                self.differs = name

    def read(self, padding: int, parts: tuple[int, ...]) -> None:
        """Read the text in forwards of so many tokens; behind padding it is the second of two rows."""
        base, start, order = self.base, 0, torch.arange(LENGTH + PADDING, device=self.text.device)
        starts = torch.tensor([[0], [padding]] if padding else [[0]], device=self.text.device)
        rows, mask = torch.stack([self.other, self.text.roll(padding)])[-len(starts) :], order >= starts
        cache, name = DynamicCache(config=base.config), cache_argument(base.forward) or CACHE
        for stop in itertools.accumulate(parts):
            now, count = slice(start, stop), stop - start
            self.attended.clear()
            inputs = {name: cache, "position_ids": (order - starts).clamp(min=0)[:, now], "use_cache": True}
            inputs["attention_mask"] = mask[:, :stop].long() if padding else None
            text = range(max(padding - start, 0), count), max(start - padding, 0)
            self.run(*text, (len(rows), count), base, rows.where(mask, 0)[:, now], **inputs)
            start = stop
        if not padding:
            _check_attended(base, self.attended, cache)

    def read_in_trees(self) -> None:
        """Read a prompt, and behind it the text as a path in trees."""
        reader = probe(self.base, (-1,), tries=False)
        cache, start, device = reader.cache(1, capacity=16, nodes=3), PROMPT, self.text.device
        inputs = {"input_ids": self.text[None, :PROMPT], CACHE: cache, "use_cache": True}
        self.run(range(PROMPT), 0, (1, PROMPT), reader, False, **inputs)
        cache.count(PROMPT)
        for parents, path in zip(TREES, PATHS):
            topology, nodes = Topology.of_numbers(parents, device), self.other[None, : len(parents)].clone()
            nodes[0, list(path)] = self.text[start : start + len(path)]
            positions = cache.lengths[:, None].to(device) + topology.depths
            self.run(path, start, (1, len(parents)), reader.nodes, nodes, topology, cache, positions, None)
            cache.keep(torch.tensor([path], device=device), torch.tensor([len(path)], device=device))
            start += len(path)


def _check_attended(base: PreTrainedModel, attended: list[Any], cache: DynamicCache) -> None:
    """Refuse a base of which a layer keeps keys and attends past transformers' interface."""
    keys = [getattr(layer, "keys", None) for layer in cache.layers]
    if sum(isinstance(each, torch.Tensor) and each.numel() > 0 for each in keys) > len(attended):
        kinds = {name: part for name, part in base.named_modules() if "ttention" in type(part).__name__}
        past = (name for name, part in kinds.items() if part not in attended)
        raise Inexact(f"{named(base, next(past, ''))} attends past transformers' AttentionInterface")
