"""Prompts with inputs that a step does not make by itself, such as images: read by the base, and tried with a tree.

Shapes: B rows, P prompt tokens, T positions, H hidden, F feature layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from hf_drafthead.bases.errors import Unsupported
from hf_drafthead.bases.generators import refusing_draws
from hf_drafthead.bases.hooks import is_hooked, of_a_hook
from hf_drafthead.bases.output_layer import probe_tokens
from hf_drafthead.bases.probe import off_by, refusal
from hf_drafthead.bases.reader import BaseReader
from hf_drafthead.bases.releases import CACHE, INPUTS_OF_A_STEP, PromptInputs, next_inputs, untested
from hf_drafthead.bases.slots import SlotCache
from hf_drafthead.bases.topology import Topology


@torch.no_grad()
def read_and_try(
    reader: BaseReader, prompt: PromptInputs, cache: SlotCache
) -> tuple[torch.Tensor, torch.Tensor, BaseReader]:
    """Read a prompt with unusual inputs by a forward of the base's own, and try whether a tree can stand behind it.

    Returns logits at the last position, features at all of them (B, T, F*H), and how the steps read the base. Raises
    Unsupported where the base crashes, or answers differently.
    """
    said = f"with the model input {', '.join(prompt.unusual)} the base"
    if prompt.unusual in reader.refused:
        raise Unsupported(reader.refused[prompt.unusual])
    if prompt.ends_on_several_places:  # as other prompts with these inputs do not
        raise Unsupported("a row of the prompt ends where its positions have several axes that differ", lasting=False)
    with refusing_draws(reader.base.device):
        try:
            outputs = reader.base(**prompt.arguments, output_hidden_states=True, return_dict=True)
            features = reader.features(outputs.hidden_states, outputs.hidden_states[-1])
            features = reader.with_keys(features, {reader.cache_name: cache}) if reader.keys else features
        except Exception as error:  # the base's own decoding works, or says what is wrong with the prompt
            if of_a_hook(error, reader.base, lambda: reader.base(**prompt.arguments)):
                raise
            raise Unsupported(str(refusal(f"{said} cannot read the prompt", error)), lasting=False) from error
        cache.count(features.shape[1])
        try:
            steps, off = _try_steps(reader, prompt, cache, outputs)
            if off is not None:
                raise Unsupported(f"{said} does not honour tree masks ({off}){untested()}")
        except Exception as error:
            if of_a_hook(error, reader.base, _try_steps, reader, prompt, cache, outputs):
                raise
            why = error if isinstance(error, Unsupported) else refusal(f"{said} cannot verify a tree", error)
            if why.lasting and not is_hooked(reader.base):
                reader.refused[prompt.unusual] = str(why)
            raise why from error.__cause__
    return outputs.logits[:, -1:], features, steps


def _try_steps(
    reader: BaseReader, prompt: PromptInputs, cache: SlotCache, outputs: Any
) -> tuple[BaseReader, str | None]:
    """Compare two sibling nodes with the base's own steps: how the steps read the base, and by how much they are off.

    The nodes are given what the base itself would hand to a later step, behind the past of the cache, which stays.
    """
    base, extent, lengths, inputs = reader.base, cache.extent, cache.lengths, {**prompt.call, CACHE: cache}
    tokens = probe_tokens(base)[-3:].to(prompt.input_ids.device).expand(len(lengths), -1)  # (B, 3) root, left, right
    text = torch.cat([prompt.input_ids, tokens], dim=1)
    first, behind_root = next_inputs(base, text[:, :-2], outputs, inputs, 1)
    before = cache.states()
    cache.placed = None
    root = base(**first, return_dict=True)
    cache.count(1)
    behind = cache.states()
    plain = [root.logits[:, -1]]
    for node in tokens[:, 1:].split(1, dim=1):  # the right one takes the place of the left one in the cache
        second, _ = next_inputs(base, torch.cat([text[:, :-2], node], dim=1), root, behind_root, 1)
        plain.append(base(**second, return_dict=True).logits[:, -1])
        cache.put_back(behind)
    cache.put_back(before)
    cache.extent, cache.lengths = extent, lengths
    third, _ = next_inputs(base, text, outputs, inputs, 3)
    more = {name: (first[name], _token_axis(name, *values)) for name, *values in _others(first, second, third)}
    steps = replace(reader, split=reader.split and not more, more=more, stages={})
    topology = Topology.of_numbers((0, 0, 0), lengths.device)
    positions = lengths[:, None] + topology.depths + prompt.position_shift
    logits, _ = steps.nodes(tokens, topology, cache, positions, prompt.visible)
    cache.placed = None
    return steps, off_by(base, logits, torch.stack(plain, dim=1))


def _others(*arguments: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    """What forwards are given beyond that which a step makes by itself: the name, and the value of each."""
    names = {name for inputs in arguments for name, value in inputs.items() if value is not None} - INPUTS_OF_A_STEP
    return ((name, *(inputs.get(name) for inputs in arguments)) for name in sorted(names))


def _token_axis(name: str, first: Any, second: Any, three: Any) -> int | None:
    """On which axis an input has an entry per token, of two steps of one token and one of three; None: on none.

    Unsupported if what it holds depends on the step.
    """
    if not all(isinstance(value, torch.Tensor) for value in (first, second, three)):
        if first is second is three or (type(first) in (bool, int, float, str) and first == second == three):
            return None
    elif first.dim() == three.dim() and torch.equal(first, second):
        axes = [axis for axis, (one, several) in enumerate(zip(first.shape, three.shape)) if one != several]
        if not axes and torch.equal(first, three):
            return None
        if len(axes) == 1 and first.shape[axes[0]] == 1:  # what three tokens have is that of one, or of the last three
            return axes[0]
    raise Unsupported(f"the model input {name} depends on the step, and the nodes of a tree are of several")
