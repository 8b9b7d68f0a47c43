"""From rows of chats or text to rows of token ids and labels.

Labels are the assistant's tokens in chats, and every token of a plain text. Rows that cannot be used are left out,
counted and named in the report.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from datasets import Dataset, IterableDataset

from hf_drafthead.data.rows import data_hash
from hf_drafthead.data.sources import read_rows, uniform
from hf_drafthead.training.encode import ENCODED, TOKENS, Encode, Fit
from hf_drafthead.training.objectives import IGNORED

__all__ = ["DataReport", "data_hash", "read_rows", "tokenize_rows"]

WINDOW = 1000  # rows that are packed together
FORM = "3"  # of what is cached: change it to invalidate caches of older versions


@dataclass
class DataReport:
    """How the rows of a source were used.

    With streaming it counts what has been read, in this process, and counts again in every pass over the data.

    Attributes:
        rows: read from the source.
        kept: rows with at least one label.
        refused: rows left out.
        refusals: the first of these, each with its number (from 0) and the reason.
        mapped: how many rows were changed, by what was done to them.
        unused: in how many rows a column, or a field of a turn, holds something that is not read, by its name.
        cut: chats that were too long and lost their end.
        split: texts that were too long and became several examples.
        examples: rows of token ids that came out.
        tokens: in them.
        labels: tokens that count in the loss.
    """

    rows: int = 0
    kept: int = 0
    refused: int = 0
    refusals: list[str] = field(default_factory=list)
    mapped: dict[str, int] = field(default_factory=dict)
    unused: dict[str, int] = field(default_factory=dict)
    cut: int = 0
    split: int = 0
    examples: int = 0
    tokens: int = 0
    labels: int = 0

    NAMED = 5

    def to_json(self) -> dict[str, Any]:
        """The counts, for a summary."""
        return asdict(self)

    def __str__(self) -> str:
        changed = [f"{count:,} {kind}" for kind, count in sorted(self.mapped.items(), key=lambda item: -item[1])]
        changed += [f"{self.cut:,} cut"] * bool(self.cut) + [f"{self.split:,} split"] * bool(self.split)
        line = f"{self.rows:,} rows read, {self.kept:,} kept"
        line += f" ({', '.join(changed)})" if changed else ""
        line += f": {self.examples:,} examples of {self.tokens:,} tokens, {self.labels:,} of them labels"
        if self.refused:
            more = ", ..." if self.refused > len(self.refusals) else ""
            line += f"\n{self.refused:,} rows refused: {', '.join(self.refusals)}{more}"
        if self.unused:
            line += f"\nnot used: {', '.join(f'{name} ({count:,} rows)' for name, count in self.unused.items())}"
        return line

    def _count_rows(self, batch: Mapping[str, Sequence[Any]]) -> None:
        self.rows += len(batch["refused"])
        for refused, mapped, unused in zip(batch["refused"], batch["mapped"], batch["unused"]):
            for name in unused:
                self.unused[name] = self.unused.get(name, 0) + 1
            if refused is not None:
                self.refused += 1
                if len(self.refusals) < self.NAMED:
                    self.refusals.append(refused)
                continue
            self.kept += 1
            for kind in mapped:
                self.mapped[kind] = self.mapped.get(kind, 0) + 1
        self.cut += sum(batch["cut"])
        self.split += sum(batch["split"])

    def _count_examples(self, batch: Mapping[str, Sequence[Sequence[int]]]) -> None:
        self.examples += len(batch["labels"])
        self.tokens += sum(map(len, batch["labels"]))
        self.labels += sum(label != IGNORED for row in batch["labels"] for label in row)


def tokenize_rows(
    rows: Dataset | IterableDataset,
    tokenizer: Any,
    max_length: int | None = None,
    *,
    packing: bool = False,
    positions: int | None = None,
    vocab_size: int | None = None,
) -> tuple[Dataset | IterableDataset, DataReport]:
    """Rows of token ids and labels, in the order of the source.

    Chats longer than `max_length` lose their end; longer texts become several examples, each beginning as the tokenizer
    begins a text. With packing, examples are joined and cut into rows of exactly `max_length`, with nothing lost, but
    one shorter row at the end of every thousand source rows. The base then sees several examples in one row.

    Args:
        rows: from `read_rows`, or a data set with a column that it reads, such as `messages` or `text`.
        tokenizer: the base's, a fast one; with a chat template if there are chats.
        max_length: most tokens of a row; by default as many as the longest one has, with packing `positions`.
        packing: fill rows up.
        positions: how many the base has, if that is known: nothing may be longer.
        vocab_size: tokens that the base embeds, if that is known: rows with others are refused.

    Returns:
        Rows with `input_ids` and `labels` (IGNORED at positions without a loss), each with at least one label; and
        how the rows were used. A streamed source gives a stream, whose report grows while it is read.

    Raises:
        ValueError: no row has a label; `max_length` is too large, or missing where a row is too long
            for the base; chats without a chat template.
    """
    if max_length is not None and max_length < 2:
        raise ValueError(f"max_length is {max_length}: expected at least 2 tokens, of which one can be guessed.")
    if max_length is not None and positions is not None and max_length > positions:
        raise ValueError(f"max_length is {max_length}, but the base has {positions} positions: give at most that many.")
    if packing and max_length is None:
        max_length = positions
        if max_length is None:
            raise ValueError("packing needs max_length, the tokens of a full row: give one.")
    rows = uniform(rows)
    encode = Encode(tokenizer, max_length, positions, packing, vocab_size)
    fit = Fit(max_length, packing, encode.beginning)
    report = DataReport()
    if isinstance(rows, IterableDataset):
        first = DataReport()  # reading the first example is no pass over the data
        if next(iter(_stream(rows, encode, fit, first)), None) is None:
            raise _nothing_left(first)
        return _stream(rows, encode, fit, report), report
    known_by = hashlib.sha256(repr((FORM, rows._fingerprint, encode.known_by)).encode()).hexdigest()
    encoded = rows.map(
        encode,
        batched=True,
        remove_columns=rows.column_names,
        features=ENCODED,
        new_fingerprint=known_by[:32],
        desc="tokenizing",
    )
    examples = encoded.map(
        fit,
        batched=True,
        batch_size=WINDOW,
        remove_columns=encoded.column_names,
        features=TOKENS,
        new_fingerprint=known_by[32:],
        desc="packing" if packing else "fitting",
    )
    # read from what was written, for it may come from a cache
    for batch in encoded.remove_columns(["input_ids", "labels"]).iter(WINDOW):
        report._count_rows(batch)
    for batch in examples.with_format("arrow").iter(WINDOW):
        labels = batch["labels"].combine_chunks().flatten().to_numpy()
        report.examples += len(batch)
        report.tokens += len(labels)
        report.labels += int((labels != IGNORED).sum())
    if not report.examples:
        raise _nothing_left(report)
    return examples, report


def _stream(rows: IterableDataset, encode: Encode, fit: Fit, report: DataReport) -> IterableDataset:
    def counted(step: Callable, count: Callable) -> Callable:
        def run(batch: Mapping[str, Sequence[Any]]) -> dict[str, list]:
            out = step(batch)
            count(out)
            return out

        return run

    batched: dict[str, Any] = {"batched": True, "batch_size": WINDOW}
    columns = list(rows.column_names or ())
    encoded = rows.map(counted(encode, report._count_rows), remove_columns=columns, features=ENCODED, **batched)
    fitted = counted(fit, report._count_examples)
    return encoded.map(fitted, remove_columns=list(ENCODED), features=TOKENS, **batched)


def _nothing_left(report: DataReport) -> ValueError:
    why = f" ({'; '.join(report.refusals)})" if report.refusals else ""
    return ValueError(
        f"no row of the data can be trained on: {report.refused} of {report.rows} rows were refused{why}. "
        "Give chats with answers of the assistant, or text."
    )
