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
    recounted,
    tilt_of_seed,
)
from hf_drafthead.generation.drafting import draft_vocabulary
from hf_drafthead.generation.ladder import ALONE, Size
from hf_drafthead.generation.tree import MAX_NODES, DraftTree, RankPath

METHODS = {"paths": grow_tree, "product": grow_tree_by_product}
# nodes that are tried
SIZES = (2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 100, 128, 192, 256)
MOST_RANK = 64  # ranks from here on are never grown: finding them costs more than they are worth
PRECISION = 0.05  # standard error of the tokens per step, as a share
TEXTS_AT_ONCE = 32


@dataclass(frozen=True)
class Worth:
    """What the base's own text says of trees.

    paths: the rank paths of the best tree of each size, the most valuable first, so that every beginning is a tree;
    steps: by the size of a tree, tokens emitted by each step of generating each text, foretold with a tree that was not
    grown on that text; positions: that were counted.
    """

    paths: dict[Size, list[RankPath]]
    steps: dict[Size, list[list[int]]]
    positions: int

    def tree(self, size: Size) -> DraftTree:
        """The best tree of so many nodes that is no deeper."""
        return DraftTree(self.paths[size]) if size.nodes > 1 else DraftTree.root_alone()

    def depths(self, nodes: int) -> list[Size]:
        """The sizes of so many nodes, the least deep first."""
        return sorted(size for size in self.steps if size.nodes == nodes)

    def tokens_per_step(self, size: Size) -> float:
        """Tokens that a step gives to a row."""
        return statistics.mean(count for text in self.steps[size] for count in text)

    def calls(self, size: Size, rows: int, new_tokens: int) -> list[Call]:
        """What a generation of B neighbouring texts takes, for every place to begin with; few texts are taken again.

        Args:
            size: of the tree; `ALONE` for the base's own decoding.
            rows: B.
            new_tokens: of each row, at most.
        """
        # the first token of a text needs no step
        tokens = [min(sum(text), new_tokens - 1) for text in self.steps[ALONE]]
        steps = [_steps_to(text, new_tokens - 1) for text in self.steps[size]]
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
        ValueError: the texts are too few to say it to within 5 %.
    """
    ranks = []
    for first in range(0, len(prompts), TEXTS_AT_ONCE):
        ranks += _ranks_by_text(model, prompts[first : first + TEXTS_AT_ONCE], new_tokens, temperature, first, settings)
    ranks_below = min(MOST_RANK, draft_vocabulary(model.base, model.drafter))
    every_text, *halves = (BestTrees(method, part, ranks_below) for part in (ranks, ranks[1::2], ranks[0::2]))
    if not (halves[0].paths and halves[1].paths):
        raise ValueError(_too_few(len(prompts), 0, 1.0, 2 * len(prompts)))
    paths: dict[Size, list[RankPath]] = {ALONE: []}
    steps = {ALONE: [[1] * sum(foretold_steps(DraftTree([(0,)]), one[None])[0]) for one in ranks]}
    for limit in _limits(every_text.paths, max_nodes):
        grown = every_text.tree(limit)
        size = Size(limit.nodes, max(map(len, grown)))
        if size not in paths:
            paths[size] = grown
            trees = [DraftTree(half.tree(limit)) for half in halves]  # of even and odd texts
            steps[size] = [foretold_steps(trees[number % 2], one[None])[0] for number, one in enumerate(ranks)]
    _check_precision(steps[max(steps)], len(prompts))
    return Worth(paths, dict(sorted(steps.items())), sum(len(one) for one in ranks))


class BestTrees:
    """The best trees on some texts by a method.

    Args:
        method: one of METHODS.
        ranks: (S, K) of each text.
        ranks_below: no path has a rank that is not below this.
    """

    def __init__(self, method: str, ranks: Sequence[torch.Tensor], ranks_below: int):
        self.method, self.ranks_below = method, ranks_below
        self.rows = [text.tolist() for text in ranks]
        grown = METHODS[method](torch.cat([*ranks]), MAX_NODES) if ranks else []
        self.paths = [path for path in grown if max(path) < ranks_below]

    def tree(self, limit: Size) -> list[RankPath]:
        """The paths of the best tree of so many nodes that is no deeper, the most valuable first."""
        paths = [path for path in self.paths if len(path) <= limit.depth][: limit.nodes - 1]
        return recounted(paths, self.rows, *limit, self.ranks_below) if self.method == "paths" else paths


def _limits(paths: list[RankPath], max_nodes: int) -> list[Size]:
    """The sizes that are tried, in ascending order: so many nodes, no deeper than each depth."""
    most = min(len(paths) + 1, max_nodes)
    found = set()
    for depth in range(1, max(map(len, paths)) + 1):
        held = sum(len(path) <= depth for path in paths) + 1
        found |= {Size(nodes, depth) for nodes in (*SIZES, most) if nodes <= min(most, held)}
    return sorted(found)


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


def sampled_prompts(model: Any, count: int = 48, length: int = 32, new_tokens: int = 128) -> list[torch.Tensor]:
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


def _check_precision(texts: Sequence[Sequence[int]], prompts: int) -> None:
    """Refuse texts whose tokens per step are not known to within PRECISION.

    The steps of one text resemble each other, so the texts are what varies: the error is that of a ratio of two sums
    over texts, their tokens and their steps, linearised (Cochran, Sampling Techniques, section 6.4). Few texts may be
    alike by chance, so it counts for no less than if all steps were independent.

    Args:
        texts: tokens emitted by each step of each text.
        prompts: of these texts.
    """
    steps = sum(map(len, texts))
    if len(texts) < 2 or steps < 2:
        raise ValueError(_too_few(prompts, steps, 1.0, 2 * prompts))
    tau = sum(map(sum, texts)) / steps
    squares = sum((sum(text) - tau * len(text)) ** 2 for text in texts)
    over_texts = (squares * len(texts) / (len(texts) - 1)) ** 0.5 / (tau * steps)
    error = max(over_texts, statistics.stdev(count for text in texts for count in text) / tau / steps**0.5)
    if error > PRECISION:
        raise ValueError(_too_few(prompts, steps, error, -(-prompts * error**2 // PRECISION**2)))


def _too_few(prompts: int, steps: int, error: float, needed: float) -> str:
    return (
        f"{prompts} prompts are too few: their {steps} steps tell the tokens per step to within {error:.0%}, and "
        f"{PRECISION:.0%} needs about {needed:.0f} prompts; give so many, or let the answers be longer."
    )
