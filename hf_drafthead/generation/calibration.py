"""Which tree for these heads: measured on text that the base itself writes.

A node is on the accepted path exactly when the next tokens of the text have the ranks that the node is named by. So
one pass of the heads over a text gives the worth of every node of every tree at once, that of (0, 2) being the share
of positions where head 1 had the next token first and head 2 the one after third. (Medusa, arXiv 2401.10774, section
2.3.3, multiplies accuracies per head; guesses depend on each other, which counting the paths themselves takes in.)

Shapes: B rows, T tokens, S positions, K levels, V vocabulary, N nodes (root included).
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from hf_drafthead.generation.reader import BaseReader
from hf_drafthead.generation.tree import DraftTree, RankPath

UNLIMITED_DEPTH = 5  # levels that are looked at where the drafter could go on for ever
UNKNOWN = -1  # rank of a token behind the end of its row


class Texts(NamedTuple):
    """What a base wrote: input_ids (B, T) padded on the right, lengths of the prompts (B,) and of all of it (B,)."""

    input_ids: torch.Tensor
    prompt_lengths: torch.Tensor
    lengths: torch.Tensor


def check_temperature(temperature: float) -> None:
    """Refuse a temperature at which nothing can be sampled.

    Raises:
        ValueError: it is below 0, infinite or no number.
    """
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature is {temperature}: expected a number above 0, or 0 for greedy decoding.")


@contextmanager
def own_seed(model: Any, seed: int = 0) -> Iterator[None]:
    """Draw from a generator with a fixed seed, and leave the caller's as it was."""
    device = model.base.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def own_texts(
    model: Any,
    prompts: Sequence[torch.Tensor],
    new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    **settings: Any,
) -> Texts:
    """Let a model continue some prompts, all at once; the caller's random generator stays as it is.

    Args:
        model: with draft heads, in eval mode; its text is the base's own.
        prompts: (P,) token ids each.
        new_tokens: of each answer, at most.
        temperature: at which the answers are sampled; 0 is greedy.
        seed: from which they are sampled.
        settings: others of `generate`.
    """
    settings |= {"do_sample": True, "temperature": float(temperature)} if temperature else {"do_sample": False}
    device = model.base.get_input_embeddings().weight.device
    starts = torch.tensor([len(prompt) for prompt in prompts], device=device)
    width = int(starts.max())
    rows = torch.zeros(len(prompts), width, dtype=torch.long, device=device)
    for row, prompt in zip(rows, prompts, strict=True):
        row[width - len(prompt) :] = prompt.to(device)
    mask = (torch.arange(width, device=device) >= width - starts[:, None]).long()
    config = model.generation_config
    end = config.eos_token_id
    ends = torch.as_tensor([] if end is None else end, device=device).view(-1)
    pad = config.pad_token_id if config.pad_token_id is not None else 0
    with own_seed(model, seed):
        texts = model.generate(rows, attention_mask=mask, max_new_tokens=new_tokens, pad_token_id=pad, **settings)
    ended = torch.isin(texts[:, width:], ends)
    first_end = torch.where(ended.any(1), ended.int().argmax(1) + 1, texts.shape[1] - width)
    texts = torch.stack(
        [text.roll(-int(width - start)) for text, start in zip(texts, starts, strict=True)]
    )  # prompts begin in the first column
    return Texts(texts, starts, starts + first_end)


@torch.no_grad()
def rank_paths(
    model,
    input_ids: torch.Tensor,
    prompt_lengths: int | torch.Tensor,
    lengths: torch.Tensor | None = None,
    depth: int | None = None,
    tilt: torch.Tensor | None = None,
) -> torch.Tensor:
    """At which rank each level of guesses has the token that really follows.

    The drafter is asked as in a generation: it observes the text position by position, and guesses along the tokens
    that follow.

    Args:
        model: with draft heads, in eval mode.
        input_ids: (B, T) texts, padded on the right; what follows the prompts should be the base's own answers.
        prompt_lengths: (B,), or one number for all; positions before a prompt's last are not counted.
        lengths: (B,) tokens of each text, prompt included; default: T.
        depth: K, levels to look at; default: the number of heads, or 5 where there is no such limit.
        tilt: (B, M, V) for each of M new tokens, where the texts were sampled (`tilt_of_seed`): the ranks are then
            those of guesses that know the noise.

    Returns:
        (B, S, K) ranks from 0, S as many as new tokens in the longest answer less one; -1 behind a row's end.

    Raises:
        ValueError: the text is too short to count a position.
    """
    drafter = model.drafter
    depth = depth or drafter.max_depth or UNLIMITED_DEPTH
    rows, width = input_ids.shape
    device = input_ids.device
    prompts = torch.as_tensor(prompt_lengths, device=device).expand(rows)
    ends = torch.full((rows,), width, device=device) if lengths is None else lengths
    positions = int((ends - prompts).max()) - 1
    if positions < 1:
        raise ValueError(
            f"texts of up to {int(ends.max())} tokens after prompts of {int(prompts.min())} or more leave no position "
            "to check a guess on: give at least two tokens after a prompt."
        )
    attention_mask = (torch.arange(width, device=device) < ends[:, None]).long()
    features = BaseReader.of_texts(model.base, drafter.reads).texts(input_ids, attention_mask).features
    vocabulary = model.base.config.get_text_config(decoder=True).vocab_size
    every_row = torch.arange(rows, device=device)
    on_path = torch.zeros(rows, 1, dtype=torch.long, device=device)

    def token(at: torch.Tensor) -> torch.Tensor:
        return input_ids[every_row, at.clamp(max=width - 1)].unsqueeze(1)  # (B, 1)

    longest = int(prompts.max())
    state = drafter.start(rows, width)
    if drafter.reads:
        state = drafter.observe(state, features[:, :longest], input_ids.roll(-1, dims=1)[:, :longest], prompts)
    else:  # a model of its own reads every token, the first one too
        state = drafter.observe(state, features[:, : longest + 1], input_ids[:, : longest + 1], prompts + 1)
    ranks = torch.full((rows, positions, depth), UNKNOWN, device=device)
    for position in range(positions):
        at = prompts + position - 1
        if position:
            new = features[every_row, at.clamp(max=width - 1)].unsqueeze(1)
            state = drafter.observe(state, new, token(at + 1), (at + 1 < ends).long())
        for level in range(depth):
            state, guesses = drafter.expand(state, token(at + 1 + level), on_path)
            scores = guesses.over_base(vocabulary)[:, 0]  # (B, V)
            if tilt is not None:
                scores = scores + tilt[:, min(position + 1 + level, tilt.shape[1] - 1)].to(scores.device)
            better = ~(scores <= scores.gather(-1, token(at + 2 + level).to(scores.device)))  # a NaN guesses nothing
            ranks[:, position, level] = better.sum(-1).to(device).where(at + 2 + level < ends, UNKNOWN)
    return ranks


def tilt_of_seed(model: Any, rows: int, new_tokens: int, temperature: float, seed: int = 0) -> torch.Tensor | None:
    """What tilts the guesses of texts that `generate` samples after `torch.manual_seed(seed)`.

    With `rank_paths` and `foretold_steps` this gives the tokens per step at a temperature from one pass over the texts.

    Args:
        model: with draft heads.
        rows: B texts of one call.
        new_tokens: M of each.
        temperature: of the call; 0 is greedy.
        seed: of the call.

    Returns:
        (B, M, V), as `Rules.tilt` has it; None where the call is greedy.
    """
    if not temperature:
        return None
    vocabulary = model.base.config.get_text_config(decoder=True).vocab_size
    with own_seed(model, seed):
        noise = torch.empty(new_tokens, rows, vocabulary, device=model.base.device)
        for drawn in noise:  # one call for each position, as the base makes them
            drawn.exponential_(1)
    return noise.transpose(0, 1).log_().mul_(-temperature)


def foretold_steps(tree: DraftTree, ranks: torch.Tensor) -> list[list[int]]:
    """Tokens emitted by each step of generating the texts behind `ranks` with this tree, row by row.

    Args:
        tree: any.
        ranks: (B, S, K) from `rank_paths`.
    """
    return [[emitted for _, emitted in _walked(tree.paths, row)] for row in ranks.tolist()]


def _walked(paths: Sequence[RankPath], row: list[list[int]]) -> list[tuple[int, int]]:
    """Where each step of generating a text begins, and how many tokens it emits; see `foretold_steps`."""
    known, width = set(paths), max(map(len, paths), default=0)
    end = len(row)  # new tokens after the first, which needs no step
    while end and row[end - 1][0] == UNKNOWN:
        end -= 1
    steps, position = [], 0
    while position < end:
        levels, depth = tuple(row[position]), width
        while depth and levels[:depth] not in known:
            depth -= 1
        steps.append((position, min(depth + 1, end - position)))
        position += depth + 1
    return steps


def grow_tree(ranks: torch.Tensor, nodes: int) -> list[RankPath]:
    """The most valuable rank paths, best first: every beginning of the list is the best tree of its size.

    Args:
        ranks: (..., K) from `rank_paths`.
        nodes: N, the root included; fewer come back where the text shows no more.

    Raises:
        ValueError: fewer than 2 nodes.
    """
    if nodes < 2:
        raise ValueError(f"a tree of {nodes} nodes drafts nothing: ask for at least 2, the root and one guess.")
    worth = _worth(ranks)
    return _most_valuable(worth, worth, nodes)


def recounted(
    paths: list[RankPath], rows: Sequence[list[list[int]]], nodes: int, depth: int, ranks_below: int
) -> list[RankPath]:
    """A tree that was counted at all positions, counted anew where its own steps begin, as long as that saves steps.

    A step begins where the one before ended, often behind a token that was hard to guess, and what is right there
    differs from what is right elsewhere. (Hydra, arXiv 2402.05109, adds node by node what such steps lack.)

    Args:
        paths: of the tree.
        rows: (S, K) of each text, ranks from `rank_paths`.
        nodes: of the tree at most, the root included.
        depth: of the tree at most.
        ranks_below: no path has a rank that is not below this.
    """
    steps = [_walked(paths, row) for row in rows]
    while True:
        begun = [row[position] for row, taken in zip(rows, steps) for position, _ in taken]
        worth = _worth(torch.tensor(begun))
        fitting = (path for path in worth if len(path) <= depth and max(path) < ranks_below)
        anew = _most_valuable(worth, fitting, nodes)
        fewer = [_walked(anew, row) for row in rows]
        if sum(map(len, fewer)) >= sum(map(len, steps)):
            return paths
        paths, steps = anew, fewer


def grow_tree_by_product(ranks: torch.Tensor, nodes: int) -> list[RankPath]:
    """As `grow_tree`, with Medusa's estimate of a node's worth (arXiv 2401.10774, section 2.3.3).

    The worth of (r_1, ..., r_d) is the product of the shares in which head i had the next token at rank r_i, as if the
    heads guessed independently of each other. Ties go to the shorter path, then to the lower ranks.
    """
    if nodes < 2:
        raise ValueError(f"a tree of {nodes} nodes drafts nothing: ask for at least 2, the root and one guess.")
    ranks = ranks.flatten(0, -2)
    ranks = ranks[ranks[:, -1] != UNKNOWN]
    shares: list[list[float]] = []  # of each level, by rank
    for level in ranks.T if len(ranks) else []:
        shares.append((level.bincount().double() / len(ranks)).tolist())
    chosen: list[RankPath] = []
    ranked = [sorted(range(len(level)), key=level.__getitem__, reverse=True) for level in shares]
    # a path waits as (worth, length, path, places of its ranks in `ranked`, worth of its parent)
    waiting: list[tuple[float, int, RankPath, RankPath, float]] = []
    if shares:
        waiting.append((-shares[0][ranked[0][0]], 1, (ranked[0][0],), (0,), 1.0))
    while waiting and len(chosen) < nodes - 1:
        worth, depth, path, places, above = heapq.heappop(waiting)
        if not worth:
            break
        chosen.append(path)
        if depth < len(shares):
            best = ranked[depth][0]
            heapq.heappush(waiting, (worth * shares[depth][best], depth + 1, (*path, best), (*places, 0), -worth))
        if (place := places[-1] + 1) < len(ranked[depth - 1]):
            rank = ranked[depth - 1][place]
            sibling = (*path[:-1], rank)
            heapq.heappush(waiting, (-above * shares[depth - 1][rank], depth, sibling, (*places[:-1], place), above))
    return chosen


def _most_valuable(worth: Counter[RankPath], paths: Iterable[RankPath], nodes: int) -> list[RankPath]:
    """The n - 1 most valuable of some paths, the most valuable first."""
    # a parent is worth at least as much as its children and is shorter, so it always comes first
    return heapq.nsmallest(nodes - 1, paths, key=lambda path: (-worth[path], len(path), path))


def _worth(ranks: torch.Tensor) -> Counter[RankPath]:
    """At how many positions each rank path is what really follows; those near a row's end do not tell."""
    ranks = ranks.flatten(0, -2)
    worth: Counter[RankPath] = Counter()
    for path, count in Counter(map(tuple, ranks[ranks[:, -1] != UNKNOWN].tolist())).items():
        for depth in range(1, len(path) + 1):
            worth[path[:depth]] += count
    return worth
