"""What the base's own text says of draft trees, on any machine: how many tokens a step gives with each size.

Shapes: P prompt tokens, B rows, N nodes (root included), S positions, K levels.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from hf_drafthead.generation.calibration import (
    foretold_steps,
    grow_tree,
    grow_tree_by_product,
    own_seed,
    own_texts,
    rank_paths,
    tilt_of_seed,
)
from hf_drafthead.generation.drafting import draft_vocabulary
from hf_drafthead.generation.tree import MAX_NODES, DraftTree, RankPath

METHODS = {"paths": grow_tree, "product": grow_tree_by_product}
# nodes that are tried
SIZES = (2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 100, 128, 192, 256)
MOST_RANK = 64  # ranks from here on are never grown: finding them costs more than they are worth
PRECISION = 0.05  # standard error of the tokens per step, as a share
TEXTS_AT_ONCE = 16


@dataclass(frozen=True)
class Worth:
    """What the base's own text says of trees.

    paths: rank paths, the most valuable first, so that every beginning is a tree; steps: by the nodes of a tree, tokens
    emitted by each step of generating each text, foretold with a tree that was not grown on that text; positions: that
    were counted.
    """

    paths: list[RankPath]
    steps: dict[int, list[list[int]]]
    positions: int

    def tree(self, nodes: int) -> DraftTree:
        """The best tree of so many nodes, root included."""
        return DraftTree(self.paths[: nodes - 1]) if nodes > 1 else DraftTree.root_alone()

    def tokens_per_step(self, nodes: int) -> float:
        """Tokens that a step gives to a row."""
        return statistics.mean(count for text in self.steps[nodes] for count in text)

    def calls(self, nodes: int, rows: int, new_tokens: int) -> list[Call]:
        """What a generation of B neighbouring texts takes, for every place to begin with; few texts are taken again.

        Args:
            nodes: N, of the tree; 1 for the base's own decoding.
            rows: B.
            new_tokens: of each row, at most.
        """
        # the first token of a text needs no step
        tokens = [min(sum(text), new_tokens - 1) for text in self.steps[1]]
        steps = [_steps_to(text, new_tokens - 1) for text in self.steps[nodes]]
        found = []
        for first in range(len(tokens)):
            batch = [(first + row) % len(tokens) for row in range(rows)]
            longest = max(tokens[text] for text in batch)
            found.append(Call(sum(tokens[text] + 1 for text in batch), longest, max(steps[text] for text in batch)))
        return found


class Call(NamedTuple):
    """A generation of some texts in one batch.

    tokens: of all rows; base_steps: of the base, as many as its longest row has tokens after the first; steps: with a
    tree, as many as the row takes that takes most.
    """

    tokens: int
    base_steps: int
    steps: int


def _steps_to(counts: Sequence[int], tokens: int) -> int:
    """How many steps give so many tokens, or all."""
    total = 0
    for step, count in enumerate(counts):
        if total >= tokens:
            return step
        total += count
    return len(counts)


def worth_of_trees(
    model: Any,
    prompts: Sequence[torch.Tensor],
    new_tokens: int,
    max_nodes: int,
    temperature: float = 0.0,
    method: str = "paths",
    **settings: Any,
) -> Worth:
    """Let the base continue the prompts, and count what trees are worth on that text.

    At a temperature the guesses know the noise of the text, as those of `generate` do.

    The steps of each size are foretold on every second text by the tree of the others, and the other way round: a large
    tree knows the text that it was grown on better than any other.

    Raises:
        ValueError: the text is too short to say it to within 5 %.
    """
    ranks = []
    for first in range(0, len(prompts), TEXTS_AT_ONCE):
        ranks += _ranks_by_text(model, prompts[first : first + TEXTS_AT_ONCE], new_tokens, temperature, first, settings)
    grow = METHODS[method]
    ranks_below = min(MOST_RANK, draft_vocabulary(model.base, model.drafter))

    def grown(parts: list[torch.Tensor]) -> list[RankPath]:
        paths = grow(torch.cat(parts), MAX_NODES) if parts else []
        return [path for path in paths if max(path) < ranks_below][: max_nodes - 1]

    halves = (grown(ranks[1::2]), grown(ranks[0::2]))  # of even and odd texts
    paths = grown(ranks)
    if not all(halves):
        raise ValueError(_too_few(len(prompts), 0, 1.0, 2 * len(prompts)))
    steps = {1: [[1] * sum(foretold_steps(DraftTree([(0,)]), one[None])[0]) for one in ranks]}
    for nodes in sorted({*(size for size in SIZES if size <= len(paths)), len(paths) + 1}):
        trees = [DraftTree(grown_on[: nodes - 1]) for grown_on in halves]
        steps[nodes] = [foretold_steps(trees[number % 2], one[None])[0] for number, one in enumerate(ranks)]
    _check_precision([count for text in steps[max(steps)] for count in text], len(prompts))
    return Worth(paths, steps, sum(len(one) for one in ranks))


def check_prompts(model: Any, prompts: Sequence[torch.Tensor], new_tokens: int) -> None:
    """Refuse prompts that nothing can be measured on.

    Raises:
        ValueError: there is none; one is empty, or leaves the base no room for the new tokens.
    """
    if not prompts:
        raise ValueError("there is no prompt to calibrate on: give some, or none at all for the base's own.")
    positions = getattr(model.base.config.get_text_config(decoder=True), "max_position_embeddings", None)
    for number, prompt in enumerate(prompts, start=1):
        if not len(prompt):
            raise ValueError(f"prompt {number} is empty: give at least one token.")
        if positions is not None and len(prompt) + new_tokens > positions:
            raise ValueError(
                f"prompt {number} has {len(prompt)} tokens, which with {new_tokens} new ones exceed the base's "
                f"{positions} positions: shorten it, or ask for fewer tokens."
            )


def sampled_prompts(model: Any, count: int = 32, length: int = 32, new_tokens: int = 128) -> list[torch.Tensor]:
    """Beginnings of texts (P,) that the base writes by itself, where nobody gives any: sampled at temperature 1."""
    base = model.base
    positions = getattr(base.config.get_text_config(decoder=True), "max_position_embeddings", None)
    length = length if positions is None else max(min(length, positions - new_tokens), 2)
    config = base.generation_config
    first = next((one for one in (config.bos_token_id, config.eos_token_id) if one is not None), 0)
    start = torch.as_tensor(first, device=base.get_input_embeddings().weight.device).view(-1)[:1]
    with own_seed(model):
        texts = base.generate(
            start.expand(count, 1),
            attention_mask=torch.ones(count, 1, dtype=torch.long, device=start.device),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=length - 1,
            eos_token_id=None,
        )
    return list(texts)


def _ranks_by_text(
    model: Any,
    prompts: Sequence[torch.Tensor],
    new_tokens: int,
    temperature: float,
    seed: int,
    settings: dict[str, Any],
) -> list[torch.Tensor]:
    """(S, K) of the answer to each prompt, on the host; none where every answer is one token long."""
    texts = own_texts(model, prompts, new_tokens, temperature, seed, draft_tree=[[0]], **settings)
    if int((texts.lengths - texts.prompt_lengths).max()) < 2:
        return []
    tilt = tilt_of_seed(model, len(prompts), new_tokens, temperature, seed)
    return list(rank_paths(model, *texts, tilt=tilt).cpu())


def _check_precision(steps: Sequence[int], prompts: int) -> None:
    """Refuse steps whose mean is not known to within PRECISION."""
    if len(steps) < 2:
        raise ValueError(_too_few(prompts, len(steps), 1.0, 2 * prompts))
    spread = statistics.stdev(steps) / statistics.mean(steps)
    error = spread / len(steps) ** 0.5
    if error > PRECISION:
        raise ValueError(_too_few(prompts, len(steps), error, -(-prompts * error**2 // PRECISION**2)))


def _too_few(prompts: int, steps: int, error: float, needed: float) -> str:
    return (
        f"{prompts} prompts are too few: their {steps} steps tell the tokens per step to within {error:.0%}, and "
        f"{PRECISION:.0%} needs about {needed:.0f} prompts; give so many, or let the answers be longer."
    )
