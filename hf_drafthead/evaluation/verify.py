"""Check that a model with draft heads generates the text of its base: token by token, greedy and sampled, alone and in
batches, up to an end of text, and with the user's settings.

Shapes: B rows, P prompt positions.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from rich.table import Table

from hf_drafthead.bases.generators import generator_of
from hf_drafthead.cards.facts import FULL_PRECISION, counts_in_words
from hf_drafthead.evaluation.calls import as_tokens, drafted, new_rows, steps_of
from hf_drafthead.evaluation.measurement import identity
from hf_drafthead.evaluation.report import plain_table
from hf_drafthead.evaluation.rounding import BaseCall, FirstDifference, counted
from hf_drafthead.exactness import is_exact
from hf_drafthead.generation.state import guessed_among
from hf_drafthead.trees.calibrate import Bar, no_bar
from hf_drafthead.trees.choice import small_paths
from hf_drafthead.trees.rank_paths import left_padded

Tokens = list[int]


@dataclass(frozen=True, kw_only=True)
class Difference(FirstDifference):
    """One text that is not the base's, of a check, with the tokens of its prompt and the rows of the call."""

    check: str
    prompt: Tokens
    rows: int

    def in_words(self, tokenizer: Any) -> str:
        """The difference on one line."""
        where = "" if self.rows == 1 else f" in a batch of {self.rows}"
        if self.base is None and self.heads is None:
            return f"{self.check}: the text is the base's, but not its length or the state of the random generator."
        tokens = (self.base, self.heads)
        theirs, ours = ("its end" if token is None else repr(tokenizer.decode([token])) for token in tokens)
        margin = "" if self.margin is None else f", {self.margin:.3g} apart in the base's logits"
        return (
            f"{self.check}: the shortest prompt with a difference is {tokenizer.decode(self.prompt)!r}{where}; "
            f"after {self.position} new tokens the base has {theirs} and the heads have {ours}{margin}."
        )


@dataclass
class Check:
    """One way to decode: the settings of its calls, the prompts per call, and the result."""

    name: str
    settings: dict[str, Any]
    rows: int
    ends: bool = False  # whether a token inside a step shall end the text
    texts: int = 0
    calls: int = 0
    undrafted: int = 0  # calls in whose steps nothing was guessed
    guessing: int = 0  # calls in which something was; others ended with their first token
    with_scores: bool = False  # whether logits are compared too
    scores: int = 0  # texts in which they have other bits
    differences: list[Difference] = field(default_factory=list)

    @property
    def faults(self) -> list[Difference]:
        """Differences that rounding does not explain."""
        return [difference for difference in self.differences if not difference.near_tie]

    def to_json(self) -> dict[str, Any]:
        """What was seen."""
        counts = counted(self.texts, self.differences)
        return {
            "name": self.name,
            "texts": self.texts,
            "same": self.texts - len(self.differences),
            "near_ties": counts["rounding"],
            "largest_margin": counts["largest_margin"],
            "different": counts["faults"],
            "calls": self.calls,
            "undrafted_calls": self.undrafted,
            "texts_with_other_scores": self.scores,
        }


@dataclass
class Verdict:
    """The results of all checks."""

    about: dict[str, Any]
    checks: list[Check]

    @property
    def differences(self) -> list[Difference]:
        """Of all checks."""
        return [difference for check in self.checks for difference in check.differences]

    @property
    def shortest(self) -> Difference | None:
        """The fault with the shortest prompt."""
        faults = [fault for check in self.checks for fault in check.faults]
        return min(faults, key=lambda fault: (len(fault.prompt), fault.rows), default=None)

    @property
    def unverified(self) -> list[str]:
        """The names of checks in which nothing was guessed, unless their texts have one token alone."""
        nothing = not any(check.guessing for check in self.checks)
        return [check.name for check in self.checks if not check.guessing and (check.undrafted or nothing)]

    @property
    def counts(self) -> dict[str, Any]:
        """Of all checks together, see `rounding.counted`."""
        return counted(sum(check.texts for check in self.checks), self.differences)

    @property
    def scores(self) -> int:
        """Texts whose logits have other bits than the base's."""
        return sum(check.scores for check in self.checks)

    def in_words(self) -> str:
        """What was seen, in one sentence; in half precision also how exactness is checked."""
        precise = self.about["dtype"] in FULL_PRECISION or self.about["exact"]
        compared = any(check.with_scores for check in self.checks)
        scores = f" The scores of {self.scores} texts have other bits." if compared else ""
        how = "" if precise else " The checks of exactness are --exact and --dtype float32."
        return f"{counts_in_words(self.counts)}.{scores}{how}"

    @property
    def passed(self) -> bool:
        """Whether rounding explains every difference; of an exact base, whether there is none, in scores either."""
        none = not self.differences and not self.scores
        return not self.unverified and (none if self.about["exact"] else not self.counts["faults"])

    def to_json(self, tokenizer: Any) -> dict[str, Any]:
        """What was seen in all and in each check, and the shortest prompt of a fault."""
        shortest = self.shortest
        return {
            **self.about,
            "identical": not self.differences,
            "passed": self.passed,
            "unverified": self.unverified,
            "differences": self.counts,
            "checks": [check.to_json() for check in self.checks],
            "shortest": shortest and {**asdict(shortest), "text": tokenizer.decode(shortest.prompt)},
        }


def verify(
    model: Any,
    prompts: Sequence[Tokens],
    *,
    max_new_tokens: int = 64,
    batch_size: int = 4,
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
    tokenizer: Any = None,
    scores: bool = False,
    bar: Bar = no_bar,
) -> Verdict:
    """Compare the heads with their base on every prompt, with every check.

    Args:
        model: with draft heads.
        prompts: token ids, each with at least one.
        max_new_tokens: of every text.
        batch_size: rows of the checks in batches, padded on the left.
        seed: of sampling; the random generator must also be left in the same state.
        settings: of `generate`, such as processors; everything is checked with and without them.
        tokenizer: the base's, needed where the settings have `stop_strings`.
        scores: whether the bits of logits are compared too.
        bar: shows how many calls were compared, as of `calibrate`.
    """
    checks = all_checks(max_new_tokens, batch_size, settings or {}, model.base.generation_config.pad_token_id)
    todo = [(check, group) for check in checks for group in groups(prompts, check.rows)]
    for check in checks:
        check.with_scores = scores
        check.settings = as_tokens(model, check.settings, tokenizer)
    with bar(len(todo)) as begin:
        advance = begin("exact" if is_exact(model) else "verify")
        for check, group in todo:
            compare(model, check, group, seed)
            advance()
    return Verdict(
        about={
            **identity(model),
            "prompts": len(prompts),
            "batch_size": batch_size,
            "max_new_tokens": max_new_tokens,
            "seed": seed,
            "settings": dict(settings or {}),
            "exact": is_exact(model),
        },
        checks=checks,
    )


def all_checks(
    max_new_tokens: int, batch_size: int, settings: Mapping[str, Any], pad: int | None = None
) -> list[Check]:
    """Greedy, sampled and up to an end of text, alone and in batches; and all again with the user's settings."""
    plain = {"max_new_tokens": max_new_tokens, "pad_token_id": 0 if pad is None else pad}
    named = ", ".join(f"{name}={value}" for name, value in settings.items())
    checks = []
    for suffix, more in {"": {}, f" with {named}": settings}.items() if settings else {"": {}}.items():
        for rows in dict.fromkeys((1, batch_size)):
            where = "" if rows == 1 else f", batches of {rows}"
            greedy, sampled = ({**plain, "do_sample": samples, **more} for samples in (False, True))
            checks += [
                Check(f"greedy{where}{suffix}", greedy, rows),
                Check(f"sampled{where}{suffix}", sampled, rows),
                Check(f"end of text{where}{suffix}", greedy, rows, ends=True),
            ]
    return checks


def groups(prompts: Sequence[Tokens], rows: int) -> Iterator[list[Tokens]]:
    """The prompts in groups of `rows`, of different lengths so that they need padding; ends of prompts fill up."""
    pool = sorted(prompts, key=len)
    while len(pool) % rows:
        longest = max(pool, key=len)
        pool.append(longest[-max(len(longest) // (2 + len(pool) % rows), 1) :])
    count = len(pool) // rows
    for first in range(count):
        yield pool[first::count]


def compare(model: Any, check: Check, prompts: Sequence[Tokens], seed: int) -> None:
    """One call of the base and one of the heads; the result is added to the check."""
    inputs = left_padded(model, [torch.tensor(prompt) for prompt in prompts])
    settings = dict(check.settings)
    if check.ends:
        settings["eos_token_id"] = ends_inside_steps(model, inputs, settings)
    asked = {**settings, "return_dict_in_generate": True, "output_logits": check.with_scores}
    torch.manual_seed(seed)
    base_output = model.base.generate(**inputs, **asked)
    expected = base_output.sequences
    left_at = generator_of(expected.device).get_state()
    output, guessed = with_guesses(model, inputs, {"acceptance": "exact", **asked}, seed)
    generator_same = torch.equal(generator_of(expected.device).get_state(), left_at)
    check.calls += 1
    check.undrafted += guessed is False
    check.guessing += guessed is True
    check.texts += len(prompts)
    for row, tokens in enumerate(new_rows(model, inputs, expected, settings) if check.with_scores else ()):
        scores = zip(base_output.logits[: len(tokens)], output.logits)
        check.scores += not all(torch.equal(theirs[row], ours[row]) for theirs, ours in scores)
    if not (generator_same and torch.equal(expected, output.sequences)):
        base, heads = (new_rows(model, inputs, rows, settings) for rows in (expected, output.sequences))
        for row, first in BaseCall(model.base, inputs, settings, seed).differences(base, heads):
            where: dict[str, Any] = {"check": check.name, "prompt": list(prompts[row]), "rows": len(prompts)}
            check.differences.append(Difference(**asdict(first), **where))


def with_guesses(
    model: Any, inputs: Mapping[str, Any], settings: Mapping[str, Any], seed: int
) -> tuple[Any, bool | None]:
    """The output of a call of the heads that guesses, with a small tree where the model's own choice is to guess
    nothing, and whether it guessed; None where it has no step to guess in."""
    named = {"draft_tree": small_paths(*guessed_among(model))} if model.drafter.copies is None else {}
    for more in ({}, named):
        nodes = [0]
        call = {**more, **settings, "return_dict_in_generate": True}  # whatever the model's config has
        torch.manual_seed(seed)
        output = model.generate(**inputs, **call, on_step=lambda record, nodes=nodes: nodes.append(record.drafted))
        if max(nodes) > 1:
            break
    return output, max(nodes) > 1 or (None if drafted(output) and not steps_of(output).numel() else False)


def ends_inside_steps(model: Any, inputs: Mapping[str, torch.Tensor], settings: Mapping[str, Any]) -> list[int]:
    """For each row a token that was accepted inside a step and not at its end: the hardest position to stop at."""
    output, _ = with_guesses(model, inputs, settings, 0)
    answers = output.sequences[:, inputs["input_ids"].shape[1] :].tolist()
    chosen = set()
    for answer, accepted in zip(answers, steps_of(output)):
        ends = set(itertools.accumulate([0, *accepted.tolist()]))  # where a step ends with the base's own token
        inside = [at for at in range(min(len(answer), max(ends))) if at not in ends]
        first_seen = [at for at in inside if answer[at] not in answer[:at]]
        chosen.add(answer[(first_seen or inside or [len(answer) // 2])[-1]])
    return sorted(chosen)


def verdict_table(verdict: Verdict) -> Table:
    table = plain_table("check", "texts", "same", "near ties", "largest margin", "different")
    for check in verdict.checks:
        row = check.to_json()
        margin = "-" if row["largest_margin"] is None else f"{row['largest_margin']:.3g}"
        cells = (row["texts"], row["same"], row["near_ties"], margin, row["different"])
        table.add_row(check.name, *map(str, cells))
    return table
