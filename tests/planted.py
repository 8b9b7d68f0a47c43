"""Faults of the walks, planted in both of them: on the device, and on the host as steps that are not captured walk."""

import copy

import torch

from hf_drafthead.generation import acceptance, batch, step
from hf_drafthead.generation.state import Walk


def phantom_token(patch) -> None:
    """In greedy calls the first guess is always taken for right."""
    on_device, on_host = acceptance.walk_on_device, acceptance.walk_greedily

    def guessed_right(candidates, first):
        tokens = candidates.tokens.clone()
        tokens[:, 1:2] = first[:, None]  # the root may be alone
        return candidates._replace(tokens=tokens)

    def device(choice, valid, candidates, *rest):
        return on_device(choice, valid, guessed_right(candidates, choice[:, 0]), *rest)

    def host(logits, candidates, *rest):
        return on_host(logits, guessed_right(candidates, logits[:, 0].argmax(-1)), *rest)

    _plant(patch, device, host)


def overshoot_past_the_end(patch) -> None:
    """In greedy calls a step that has reached an end of text goes on down the tree."""
    on_device, on_host = acceptance.walk_on_device, acceptance.walk_greedily

    def ended_later(found, longer, lengths):
        ends = torch.where(found.ends > 0, lengths + longer.counts, 0)
        return Walk.of(longer.counts, longer.observed, ends, longer.valid, longer.tokens, longer.nodes)

    def device(choice, valid, candidates, rows, limits, reach):
        found = on_device(choice, valid, candidates, rows, limits, reach)
        endless = limits._replace(eos=torch.full_like(limits.eos, -1))
        longer = on_device(choice, valid, candidates, rows, endless, reach)
        return ended_later(found, longer, rows.lengths)

    def host(logits, candidates, state, rules):
        endless = copy.copy(rules)
        endless.eos_tokens = []
        found, longer = (on_host(logits, candidates, state, each) for each in (rules, endless))
        return [
            (more[0], more[1], (length + more[0]) if walk[2] else None, *more[3:])
            for walk, more, length in zip(found, longer, state.lengths)
        ]

    _plant(patch, device, host)


def _plant(patch, device, host) -> None:
    for module in (step, batch):
        patch.setattr(module, "walk_on_device", device)
    patch.setattr(batch, "walk_greedily", host)
