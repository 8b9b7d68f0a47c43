"""Speed of a model with draft heads against its own base, measured side by side.

Every prompt is decoded by the base and by the heads in turn, several times over, in one process, and counts with its
median time: a machine that gets busy or hot half way slows both, and a single hiccup slows neither.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

from hf_drafthead.evaluation.acceptance import histogram, tokens_per_step
from hf_drafthead.evaluation.loading import family_of
from hf_drafthead.evaluation.prompts import Prompt
from hf_drafthead.generation.tree import DraftTree


@dataclass(frozen=True)
class Measurement:
    """One model on one list of prompts, greedy; `dataclasses.asdict` is its JSON form."""

    model: str
    base: str
    family: str
    device: str
    dtype: str
    batch_size: int
    prompts: int
    new_tokens: int  # over all prompts, each row up to its own end
    base_forwards: int  # what the heads needed for them, prefills included
    tokens_per_step: float | None
    base_tokens_per_second: float
    tokens_per_second: float
    speedup: float
    speedup_over_compiled: float | None
    efficiency: float | None  # speedup / tokens_per_step: 1.0 if drafting, tree and bookkeeping cost nothing
    identical: bool
    per_category: dict[str, dict[str, Any]]
    tree_nodes: int
    accepted_lengths: dict[int, int]  # how many steps emitted 1, 2, 3 ... tokens
    transformers: str
    torch: str


@dataclass
class _Tally:
    """What a set of prompts added up to."""

    prompts: int = 0
    tokens: int = 0
    base_tokens: int = 0
    seconds: float = 0.0
    base_seconds: float = 0.0
    forwards: int = 0
    identical: bool = True
    accepted: list[torch.Tensor] = field(default_factory=list)

    @property
    def speedup(self) -> float:
        return (self.tokens / self.seconds) / (self.base_tokens / self.base_seconds)

    @property
    def efficiency(self) -> float | None:
        tau = tokens_per_step(self.accepted)
        return None if tau is None else self.speedup / tau

    def figures(self) -> dict[str, Any]:
        return {
            "prompts": self.prompts,
            "tokens_per_step": tokens_per_step(self.accepted),
            "speedup": self.speedup,
            "identical": self.identical,
        }


def measure(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    *,
    tree: DraftTree,
    max_new_tokens: int,
    batch_size: int = 1,
    repeats: int = 3,
    progress: Callable[[], object] = lambda: None,
) -> Measurement:
    """Decode the prompts greedily with the base and with the heads, in turn.

    Args:
        model: a model with draft heads; its base is what it is compared with.
        tokenizer: the base's.
        prompts: what to continue, `batch_size` of one category at a time, padded on the left.
        tree: the draft tree of every step.
        max_new_tokens: per prompt, at most.
        batch_size: prompts per call.
        repeats: timed runs of each prompt, of which the median counts.
        progress: called after each batch.

    Raises:
        ValueError: no prompt, one that is empty, or one that leaves the base no room for `max_new_tokens`.
    """
    batches = batched(prompts, batch_size)
    settings = {"do_sample": False, "max_new_tokens": max_new_tokens}
    tallies = {"": _Tally(), **{prompt.category: _Tally() for prompt in prompts}}  # "" adds up all
    inputs = encode_all(model, tokenizer, batches, max_new_tokens)
    warm_up(model, tree, inputs[0], settings)
    with ForwardCount(model.base) as count:
        for batch, given in zip(batches, inputs, strict=True):
            runs = {
                "base": lambda given=given: (model.base.generate(**given, **settings), count.take()),
                "heads": lambda given=given: (draft(model, tree, given, settings), count.take()),
            }
            results, seconds = race(runs, repeats, model.base.device)
            (plain, _), (drafted, forwards) = results["base"], results["heads"]
            for tally in (tallies[""], tallies[batch[0].category]):
                tally.prompts += len(batch)
                tally.forwards += forwards
                tally.tokens += new_tokens(model, given, drafted.sequences)
                tally.base_tokens += new_tokens(model, given, plain)
                tally.seconds += seconds["heads"]
                tally.base_seconds += seconds["base"]
                tally.identical &= torch.equal(drafted.sequences, plain)
                tally.accepted.append(steps_of(drafted))
            progress()
    total = tallies.pop("")
    return Measurement(
        model=model.name_or_path,
        base=model.base.name_or_path,
        family=family_of(model.config),
        device=device_name(model.base.device),
        dtype=str(model.base.dtype).removeprefix("torch."),
        batch_size=batch_size,
        prompts=total.prompts,
        new_tokens=total.tokens,
        base_forwards=total.forwards,
        tokens_per_step=tokens_per_step(total.accepted),
        base_tokens_per_second=total.base_tokens / total.base_seconds,
        tokens_per_second=total.tokens / total.seconds,
        speedup=total.speedup,
        speedup_over_compiled=None,
        efficiency=total.efficiency,
        identical=total.identical,
        per_category={category: tally.figures() for category, tally in tallies.items()},
        tree_nodes=tree.num_nodes,
        accepted_lengths=histogram(total.accepted),
        transformers=transformers.__version__,
        torch=torch.__version__,
    )


def fastest_tree(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    trees: Sequence[DraftTree],
    *,
    max_new_tokens: int,
    progress: Callable[[], object] = lambda: None,
) -> DraftTree:
    """The tree with which the model decodes these prompts fastest on this machine, one prompt at a time, greedily."""
    settings = {"do_sample": False, "max_new_tokens": max_new_tokens}
    inputs = encode_all(model, tokenizer, batched(prompts, 1), max_new_tokens)
    totals = dict.fromkeys(trees, 0.0)
    for tree in trees:
        warm_up(model, tree, inputs[0], settings)
    for given in inputs:
        runs = {tree: lambda tree=tree, given=given: draft(model, tree, given, settings) for tree in trees}
        _, seconds = race(runs, 2, model.base.device)
        for tree in trees:
            totals[tree] += seconds[tree]
        progress()
    return min(totals, key=totals.__getitem__)


def race(runs: Mapping[Any, Callable[[], Any]], repeats: int, device: torch.device) -> tuple[dict, dict[Any, float]]:
    """Call each in turn, `repeats` times over: what each returned last, and the median of its seconds."""
    results: dict[Any, Any] = {}
    seconds: dict[Any, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            wait(device)
            start = time.perf_counter()
            results[name] = run()
            wait(device)
            seconds[name].append(time.perf_counter() - start)
    return results, {name: statistics.median(taken) for name, taken in seconds.items()}


def draft(model: Any, tree: DraftTree, given: Mapping[str, torch.Tensor], settings: Mapping[str, Any]) -> Any:
    """One call of the heads, with what they accepted."""
    return model.generate(**given, **settings, draft_tree=tree, return_dict_in_generate=True)


def steps_of(drafted: Any) -> torch.Tensor:
    """`accepted_lengths` (B, S) of one output; without steps where the base decoded by itself."""
    accepted = getattr(drafted, "accepted_lengths", None)
    return torch.zeros(len(drafted.sequences), 0, dtype=torch.long) if accepted is None else accepted.cpu()


def warm_up(model: Any, tree: DraftTree, given: Mapping[str, torch.Tensor], settings: Mapping[str, Any]) -> None:
    """Everything that only the first call pays for: the probe of the base, allocations, the tree's tensors."""
    model.base.generate(**given, **settings)
    draft(model, tree, given, settings)


def batched(prompts: Sequence[Prompt], batch_size: int) -> list[list[Prompt]]:
    """The prompts in batches of one category each.

    Raises:
        ValueError: there is none, or the batch size is below 1.
    """
    if not prompts:
        raise ValueError("there is no prompt to measure on: give at least one.")
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}: expected at least 1.")
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.category, []).append(prompt)
    return [group[i : i + batch_size] for group in groups.values() for i in range(0, len(group), batch_size)]


def encode(model: Any, tokenizer: Any, texts: Sequence[str]) -> dict[str, torch.Tensor]:
    """The texts as `input_ids` and `attention_mask` (B, T), padded on the left, on the base's device.

    Raises:
        ValueError: a text is empty, or they need padding that the tokenizer cannot give.
    """
    if not all(texts):
        raise ValueError("the prompt is empty: give the text that the model shall continue.")
    if len(texts) > 1 and tokenizer.pad_token is None:
        raise ValueError(
            "the tokenizer has no pad token, which a batch needs: set tokenizer.pad_token, or batch_size=1."
        )
    encoded = tokenizer(list(texts), return_tensors="pt", padding=len(texts) > 1, padding_side="left")
    return {name: encoded[name].to(model.base.device) for name in ("input_ids", "attention_mask")}


def encode_all(model: Any, tokenizer: Any, batches: Sequence[Sequence[Prompt]], max_new_tokens: int) -> list[dict]:
    """`encode` for every batch.

    Raises:
        ValueError: a prompt that leaves the base no room for `max_new_tokens`.
    """
    inputs = [encode(model, tokenizer, [prompt.text for prompt in batch]) for batch in batches]
    room = getattr(model.base.config.get_text_config(), "max_position_embeddings", None)
    longest = max(given["input_ids"].shape[1] for given in inputs)
    if room is not None and longest + max_new_tokens > room:
        raise ValueError(
            f"a prompt of {longest} tokens and {max_new_tokens} new ones exceed the base's {room} positions: "
            "shorten the prompt, or ask for fewer tokens."
        )
    return inputs


def new_tokens(model: Any, given: Mapping[str, torch.Tensor], sequences: torch.Tensor) -> int:
    """How many tokens were generated, each row counted up to and including its own end-of-sequence token."""
    ends = model.base.generation_config.eos_token_id
    ends = torch.tensor(ends if isinstance(ends, list) else [] if ends is None else [ends], device=sequences.device)
    generated = sequences[:, given["input_ids"].shape[1] :]
    ended_before = torch.isin(generated, ends).cumsum(1) - torch.isin(generated, ends).long()
    return int((ended_before == 0).sum())


class ForwardCount:
    """Counts the forwards of a base while it is open."""

    def __init__(self, base: Any):
        self._decoder = base.get_decoder()
        self.forwards = 0

    def take(self) -> int:
        """The forwards since the last call of this."""
        taken, self.forwards = self.forwards, 0
        return taken

    def __enter__(self) -> "ForwardCount":
        self._hook = self._decoder.register_forward_hook(self._add)
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()

    def _add(self, *_: object) -> None:
        self.forwards += 1


def wait(device: torch.device) -> None:
    """Let queued work on a GPU end, so that a clock around it measures it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_name(device: torch.device) -> str:
    """The GPU's name, or the device's type."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
