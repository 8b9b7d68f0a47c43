"""Requests for a manager, and what the base alone says to each of them."""

import random
from typing import Any

import torch

from hf_drafthead.batching import Manager
from tests.bases import VOCABULARY

TREE = [[0], [1], [0, 0], [0, 1], [0, 0, 0]]
Asked = tuple[list[int], dict[str, Any]]  # a prompt, and the arguments of `generate`, with a `seed`


def prompt(dice: random.Random, longest: int = 20) -> list[int]:
    """Random tokens, at least one."""
    return [dice.randrange(3, VOCABULARY) for _ in range(dice.randint(1, longest))]


def asked(dice: random.Random, most: int = 40) -> Asked:
    """A random prompt with random settings."""
    ends = dice.choice([[], [], [5, 9], [2]])
    settings: dict[str, Any] = {"max_new_tokens": dice.choice([1, 2, *[dice.randint(3, most)] * 6])}
    settings["eos_token_id"] = ends or None
    if dice.random() < 0.5:
        settings |= {"do_sample": True, "temperature": dice.uniform(0.3, 1.5), "top_k": dice.choice([0, 5, 20])}
        settings |= {"top_p": dice.choice([1.0, 0.9]), "seed": dice.randrange(1 << 40)}
    optional = {
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 2,
        "min_new_tokens": 4,
        "suppress_tokens": [7, 8, 9],
        "sequence_bias": {(11,): 2.0, (12, 13): -1.0},
        "bad_words_ids": [[14], [15, 16]],
    }
    for name in dice.sample(sorted(optional), dice.choice([0, 0, 1, 2])):
        settings[name] = optional[name]
    return prompt(dice), settings


def alone(base: Any, request: Asked) -> list[int]:
    """New tokens of the base's own `generate` for this prompt alone."""
    tokens, settings = request[0], dict(request[1])
    if (seed := settings.pop("seed", None)) is not None:
        torch.manual_seed(seed)
    sequences = base.generate(torch.tensor([tokens]), **settings)
    new: list[int] = sequences[0, len(tokens) :].tolist()
    return new


def add(manager: Manager, request: Asked, **more: Any) -> str:
    """Put a request; no end-of-text token is -1 for a manager."""
    settings = dict(request[1])
    if "eos_token_id" in settings:
        settings["eos_token_id"] = settings["eos_token_id"] or -1
    return manager.add_request(request[0], **settings, **more)


def final(manager: Manager, name: str) -> Any:
    """The last result of a request."""
    return [*manager.request_id_iter(name)][-1]
