"""Text that the base itself writes, at which ranks the heads guess it, and the trees that grow from these.

A node is on the accepted path exactly when the next tokens of the text have the ranks that the node is named by. So
one pass of the heads over a text says for every tree at once which of its nodes each step would accept. The worth of
(0, 2) is the share of positions where head 1 had the next token first and head 2 the one after third.

Shapes: P prompt tokens, B rows, T tokens, S positions, K levels, M new tokens, V vocabulary.
"""

from __future__ import annotations

import heapq
import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from hf_drafthead.bases.reader import BaseReader
from hf_drafthead.generation.tree import ROOT_ALONE, DraftTree, RankPath
from hf_drafthead.trees.costs import ALONE, Size

UNLIMITED_DEPTH = 5  # levels that are looked at where the drafter could go on for ever
TEXTS_AT_ONCE = 32
PAD = 0  # any token that the base embeds will do: a tokenizer's pad token need not be one
# What a base's generation config may ask for otherwise: a call that measures wants tokens alone, a row of each prompt.
TOKENS_ALONE: dict[str, Any] = {"return_dict_in_generate": False, "num_return_sequences": 1}
TOKENS_ALONE |= {f"output_{name}": False for name in ("scores", "logits", "attentions", "hidden_states")}
# ... and, where all texts are to be of one length, that they do not end at words.
TO_THE_END: dict[str, Any] = {"stop_strings": None, "token_healing": False, "eos_token_id": None}
TO_THE_END |= {"exponential_decay_length_penalty": None}  # of the end-of-text token, which there is none of
NODES = (2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256)  # of trees that are tried
Texts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # (B, T); lengths (B,) of prompts, and of all
MOST_RANK = 64  # ranks from here on are never grown: finding them costs more than they are worth
UNKNOWN = -1  # rank of a token behind the end of its row


def check_temperature(temperature: float) -> None:
    """Raise ValueError for a temperature at which nothing can be sampled."""
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature is {temperature}: expected a number above 0, or 0 for greedy decoding.")


@contextmanager
def own_seed(model: Any, seed: int = 0) -> Iterator[None]:
    """Draw from a generator with a fixed seed, and leave the caller's as it was."""
    device = model.base.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def sampled_prompts(model: Any, count: int = 48, length: int = 32, new_tokens: int = 128) -> list[torch.Tensor]:
    """Beginnings of texts (P,) that the base writes by itself, where nobody gives any: sampled at temperature 1."""
    base = model.base
    positions = getattr(base.config.get_text_config(decoder=True), "max_position_embeddings", None)
    length = length if positions is None else max(min(length, positions - new_tokens), 2)
    config = base.generation_config
    first = next((token for token in (config.bos_token_id, config.eos_token_id) if token is not None), 0)
    start = torch.as_tensor(first, device=base.get_input_embeddings().weight.device).view(-1)[:1]
    alone = torch.ones(count, 1, dtype=torch.long, device=start.device)
    sampling: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "num_beams": 1}
    sampling |= {**TOKENS_ALONE, **TO_THE_END, "prompt_lookup_num_tokens": None}  # which decodes one row at a time
    with own_seed(model):
        return list(base.generate(start * alone, attention_mask=alone, max_new_tokens=length - 1, **sampling))


def own_texts(
    model: Any,
    prompts: Sequence[torch.Tensor],
    new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    **settings: Any,
) -> Texts:
    """Let a model with draft heads continue some prompts (P,), all at once, to the base's own text: greedy, or sampled
    from the seed at a temperature. settings: others of `generate`; by default each step drafts one node."""
    settings |= {"do_sample": True, "temperature": float(temperature)} if temperature else {"do_sample": False}
    batch, end = left_padded(model, prompts), model.generation_config.eos_token_id
    starts, width = batch["attention_mask"].sum(1), batch["input_ids"].shape[1]
    call = {**batch, **TOKENS_ALONE, **TO_THE_END, "eos_token_id": end, "pad_token_id": PAD, "draft_tree": [[0]]}
    call |= {"max_new_tokens": new_tokens, **settings}
    with own_seed(model, seed):
        texts = model.generate(**call)
    ended = torch.isin(texts[:, width:], torch.as_tensor([] if end is None else end, device=texts.device))
    first_end = torch.where(ended.any(1), ended.int().argmax(1) + 1, texts.shape[1] - width)
    # prompts begin in the first column
    rows = [text.roll(start - width) for text, start in zip(texts, starts.tolist(), strict=True)]
    return torch.stack(rows), starts, starts + first_end


def left_padded(model: Any, prompts: Sequence[torch.Tensor], pad: int = PAD) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask` (B, P) of a batch of prompts, on the model's device."""
    device = model.get_input_embeddings().weight.device
    rows = [prompt.to(device) for prompt in prompts]
    ids = torch.nn.utils.rnn.pad_sequence(rows, True, pad, padding_side="left")
    mask = torch.nn.utils.rnn.pad_sequence([*map(torch.ones_like, rows)], True, 0, padding_side="left")
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def rank_paths(
    model: Any,
    input_ids: torch.Tensor,
    prompt_lengths: int | torch.Tensor,
    lengths: torch.Tensor | None = None,
    depth: int | None = None,
    tilt: torch.Tensor | None = None,
    features: torch.Tensor | None = None,
) -> torch.Tensor:
    """At which rank each level of guesses has the token that really follows, asked as in a generation.

    Args:
        model: with draft heads, in eval mode.
        input_ids: (B, T) texts, padded on the right; what follows the prompts should be the base's own answers.
        prompt_lengths: (B,), or one number for all; positions before a prompt's last are not counted.
        lengths: (B,) tokens of each text, prompt included; default: T.
        depth: K, levels to look at; default: the number of heads, or 5 where there is no such limit.
        tilt: (B, M, V) where the texts were sampled (`tilt_of_seed`): the ranks of guesses that know the noise.
        features: (B, T, F*H) that the drafter reads, where the base has read these texts before.

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
    if features is None:
        attention_mask = (torch.arange(width, device=device) < ends[:, None]).long()
        features = BaseReader.of_texts(model.base, drafter.reads).read_texts(input_ids, attention_mask).features
    vocabulary = model.base.config.get_text_config(decoder=True).vocab_size
    every_row = torch.arange(rows, device=device)
    on_path = torch.zeros(rows, 1, dtype=torch.long, device=device)

    def token(at: torch.Tensor) -> torch.Tensor:
        return input_ids[every_row, at.clamp(max=width - 1)].unsqueeze(1)  # (B, 1)

    longest = int(prompts.max())
    state = drafter.start(rows, width)
    more = int(not drafter.reads)  # a model of its own reads every token, the first one too
    follow = (input_ids if more else input_ids.roll(-1, dims=1))[:, : longest + more]
    state = drafter.observe(state, features[:, : longest + more], follow, prompts + more)
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


def ranks_by_text(
    model: Any, prompts: Sequence[torch.Tensor], new_tokens: int, temperature: float = 0.0
) -> list[torch.Tensor]:
    """(S, K) on the host: the ranks of the base's own answer to each prompt; none where answers are one token long."""
    ranks: list[torch.Tensor] = []
    for seed in range(0, len(prompts), TEXTS_AT_ONCE):
        some = prompts[seed : seed + TEXTS_AT_ONCE]
        texts, prompt_lengths, lengths = own_texts(model, some, new_tokens, temperature, seed)
        if int((lengths - prompt_lengths).max()) > 1:
            tilt = tilt_of_seed(model, len(some), new_tokens, temperature, seed)
            ranks += rank_paths(model, texts, prompt_lengths, lengths, tilt=tilt).cpu()
    return ranks


def tilt_of_seed(model: Any, rows: int, new_tokens: int, temperature: float, seed: int = 0) -> torch.Tensor | None:
    """`Rules.tilt` (B, M, V) of M tokens of B texts that `generate` samples from this seed; None at temperature 0."""
    if not temperature:
        return None
    vocabulary = model.base.config.get_text_config(decoder=True).vocab_size
    with own_seed(model, seed):
        noise = torch.empty(new_tokens, rows, vocabulary, device=model.base.device)
        for drawn in noise:  # one call for each position, as the base makes them
            drawn.exponential_(1)
    return noise.transpose(0, 1).log_().mul_(-temperature)


def foretold_steps(tree: DraftTree, ranks: torch.Tensor) -> list[int]:
    """Tokens emitted by each step of generating the text behind ranks (S, K) with this tree."""
    paths, steps, position = set(tree.paths), list[int](), 0
    tokens = [tuple(levels) for levels in ranks.tolist() if levels[0] != UNKNOWN]  # after the first, without a step
    while position < len(tokens):
        depth = tree.max_depth
        while depth and tokens[position][:depth] not in paths:
            depth -= 1
        steps.append(min(depth + 1, len(tokens) - position))
        position += depth + 1
    return steps


def grow_tree(ranks: torch.Tensor, nodes: int, ranks_below: int = MOST_RANK) -> list[RankPath]:
    """The rank paths that were right most often, best first: every beginning of the list is the best tree of its size.

    Args:
        ranks: (..., K) from `rank_paths`; positions near a row's end, whose last level is not known, do not count.
        nodes: N, at least 2, the root included; fewer come back where the text shows no more.
        ranks_below: no path has a rank that is not below this.
    """
    if nodes < 2:
        raise ValueError(f"a tree of {nodes} nodes drafts nothing: ask for at least 2, the root and one guess.")
    ranks = ranks.flatten(0, -2)
    known = ranks[ranks[:, -1] != UNKNOWN].tolist()
    worth: Counter[RankPath] = Counter()
    for path, count in Counter(map(tuple, known)).items():
        for depth in range(1, len(path) + 1):
            worth[path[:depth]] += count
    fitting = (path for path in worth if max(path) < ranks_below)
    # a parent is worth at least as much as its children and is shorter, so it always comes first
    return heapq.nsmallest(nodes - 1, fitting, key=lambda path: (-worth[path], len(path), path))


@dataclass(frozen=True)
class TreeStatistics:
    """What the base's own text says of trees, on any machine.

    paths: the rank paths of the best tree of each size, the most valuable first, so that every beginning is a tree;
    steps: by the size of a tree, tokens emitted by each step of generating each text, foretold with a tree that was not
    grown on that text; positions: that were counted.
    """

    paths: dict[Size, list[RankPath]]
    steps: dict[Size, list[list[int]]]
    positions: int

    @classmethod
    def of(cls, ranks: Sequence[torch.Tensor], max_nodes: int, ranks_below: int) -> TreeStatistics:
        """Of texts whose ranks (S, K) are given. Every second one is foretold with the tree of the others, and the
        other way round: a large tree knows the text that it was grown on better than any other."""
        deepest = ranks[0].shape[1]
        texts = torch.cat([*ranks]), torch.cat([*ranks[1::2]]), torch.cat([*ranks[0::2]])
        paths: dict[Size, list[RankPath]] = {ALONE: []}
        steps = {ALONE: [foretold_steps(ROOT_ALONE, text) for text in ranks]}
        for depth, nodes in itertools.product(range(1, deepest + 1), NODES):
            every, *halves = (grow_tree(some[:, :depth], min(nodes, max_nodes), ranks_below) for some in texts)
            if all((every, *halves)) and (size := Size(len(every) + 1, max(map(len, every)))) not in paths:
                paths[size] = every
                trees = [DraftTree(half) for half in halves]  # of even and odd texts
                steps[size] = [foretold_steps(trees[n % 2], text) for n, text in enumerate(ranks)]
        return cls(paths, dict(sorted(steps.items())), sum(map(len, ranks)))

    def tokens_per_step(self, size: Size) -> float:
        """Tokens that a step gives to a row."""
        return statistics.mean(itertools.chain(*self.steps[size]))

    def fewer_steps(self, size: Size, rows: int) -> float:
        """How many times fewer steps than the base's own texts take in batches of B neighbours, each of which ends with
        the row that takes most steps."""
        texts, base = self.steps[size], self.steps[ALONE]
        batches = [[(first + row) % len(texts) for row in range(rows)] for first in range(len(texts))]
        steps = sum(max(len(texts[text]) for text in batch) for batch in batches)
        return sum(max(len(base[text]) for text in batch) for batch in batches) / steps
