"""From rows of chats or text to rows of token ids and labels.

Labels are the assistant's tokens in chats, and every token of a plain text. Rows that cannot be used are left out,
counted and named in the report.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset, Features, List, Value

from hf_drafthead.data.chats import Chat, Refused, repaired
from hf_drafthead.data.rows import data_hash
from hf_drafthead.data.sources import read_rows, uniform
from hf_drafthead.modeling.base import DraftHeadPreTrainedModel
from hf_drafthead.training.arguments import DraftHeadTrainingArguments
from hf_drafthead.training.collect import NAMED, in_words, refused_in_words
from hf_drafthead.training.examples import PreparedData, longest_text_of
from hf_drafthead.training.heads_loss import IGNORED
from hf_drafthead.training.templates import ChatEncoder, encode_span, frame, refuse_unknown, without_post_processor

HELD_OUT = 64  # rows to evaluate on, unless the data is small
WINDOW = 1000  # rows that are counted at a time
FORM = "5"  # of what is cached: change it to invalidate caches of older versions
TOKENS = Features({"input_ids": List(Value("int32")), "labels": List(Value("int32"))})
NOTES = {"mapped": List(Value("string")), "unused": List(Value("string")), "refused": Value("string")}
ENCODED = Features({**TOKENS, **NOTES})
ANSWER_THEM = "generate answers with `hf-drafthead distill` and train on them"
OTHER_TOKENS = "token ids of another tokenizer ignored"


@dataclass
class DataReport:
    """How the rows of a source were used: `kept` have a label; `mapped`: what was done to them ("cut" chats lost their
    end, "split" texts became several); `unused`: rows with a field that is not read; `examples` came out."""

    rows: int = 0
    kept: int = 0
    refused: int = 0
    refusals: list[str] = field(default_factory=list)
    mapped: Counter[str] = field(default_factory=Counter)
    unused: Counter[str] = field(default_factory=Counter)
    examples: int = 0
    tokens: int = 0
    labels: int = 0
    held_out: int = 0

    def __str__(self) -> str:
        line = f"{self.rows:,} rows read, {self.kept:,} kept"
        line += f" ({in_words(self.mapped)})" if self.mapped else ""
        line += f": {self.examples:,} examples of {self.tokens:,} tokens, {self.labels:,} of them labels"
        line += f"; {self.held_out:,} examples are held out" if self.held_out else ""
        line += refused_in_words(self)
        if self.unused:
            line += f"\nnot used: {', '.join(f'{name} ({count:,} rows)' for name, count in self.unused.items())}"
        return line

    def count_rows(self, batch: Mapping[str, Sequence[Any]]) -> None:
        self.rows += len(batch["refused"])
        for refused, mapped, unused in zip(batch["refused"], batch["mapped"], batch["unused"]):
            self.unused.update(unused)
            if refused is None:
                self.kept += 1
                self.mapped.update(mapped)
            else:
                self.refused += 1
                self.refusals += [refused][: NAMED - len(self.refusals)]

    def count_examples(self, batch: Mapping[str, Sequence[Sequence[int]]]) -> None:
        for labels in batch["labels"]:
            self.examples += 1
            self.tokens += len(labels)
            self.labels += len(labels) - list(labels).count(IGNORED)


class Encoder:
    """Batches of rows to token ids and labels, one for one, and those to examples of the wanted length."""

    def __init__(self, tokenizer: Any, max_length: int | None, positions: int | None, vocab_size: int | None) -> None:
        self.tokenizer, self.max_length = tokenizer, max_length
        self.positions, self.vocab_size = positions, vocab_size
        self._bare = without_post_processor(tokenizer)
        self._chats: ChatEncoder | None = None  # made at the first chat: plain text needs no chat template
        self._beginning, self._ending = frame(tokenizer)
        about = (repr(tokenizer.chat_template), repr(tokenizer.special_tokens_map))
        self.known_by = (tokenizer.backend_tokenizer.to_str(), *about, max_length, positions, vocab_size)

    def encode(self, batch: Mapping[str, Sequence[Any]]) -> dict[str, list]:
        """Rows as `read_rows` gives them to tokens, with what was done to each; a refused one has the reason."""
        rows = [self._row(dict(zip(batch, values))) for values in zip(*batch.values())]
        return {name: [row[name] for row in rows] for name in ENCODED}

    def fit(self, batch: Mapping[str, Sequence[Any]]) -> dict[str, list]:
        """Encoded rows to examples; those without labels are dropped."""
        pairs = map(self._pieces, batch["input_ids"], batch["labels"])
        examples = [pair for pieces in pairs for pair in pieces if any(label != IGNORED for label in pair[1][1:])]
        return {"input_ids": [ids for ids, _ in examples], "labels": [labels for _, labels in examples]}

    def _pieces(self, ids: list[int], labels: list[int]) -> list[tuple[list[int], list[int]]]:
        """A row cut into pieces; those after the first begin as the tokenizer begins a text, without labels there."""
        beginning, longest = self._beginning, self.max_length or len(ids)
        pieces = [(ids[:longest], labels[:longest])]
        room = max(longest - len(beginning), 1)
        for at in range(longest, len(ids), room):
            context = [IGNORED] * len(beginning)
            pieces.append((beginning + ids[at : at + room], context + labels[at : at + room]))
        return pieces

    def _row(self, row: dict[str, Any]) -> dict[str, Any]:
        name, is_chat, refused = f"{row['source']} row {row['row']}".strip(), row["messages"] is not None, None
        try:
            if is_chat:
                if self._chats is None:
                    self._chats = ChatEncoder(self.tokenizer)
                chat = self._chats.fit(self._readable(repaired(row["messages"], row["tools"]).answered()))
                (ids, labels), mapped = self._chats.encode(chat), list(chat.mapped)
            else:
                (ids, labels), mapped = self._text(row), []
            refuse_unknown(self.tokenizer, ids, self.vocab_size)
            if self.max_length is None and self.positions is not None and len(ids) > self.positions:
                what = f"{name} has {len(ids)} tokens, but the base has {self.positions} positions"
                raise ValueError(f"{what}: set max_length to cut such rows, at most {self.positions}.")
            if self.max_length is not None and len(ids) > self.max_length:
                mapped = [*mapped, "cut" if is_chat else "split"]
                if is_chat:
                    ids, labels = ids[: self.max_length], labels[: self.max_length]
            if all(label == IGNORED for label in labels[1:]):  # nothing guesses the first
                late = f"no answer within the first {self.max_length} tokens"
                raise Refused(late if "cut" in mapped else "it has no token to train on")
        except Refused as reason:
            ids, labels, mapped, refused = [], [], [], f"{name}: {reason}"
        return dict(zip(ENCODED, (ids, labels, mapped, row["unused"], refused), strict=True))

    def _readable(self, chat: Chat) -> Chat:
        """The chat without token ids, unless they spell its answers: those of another tokenizer do not."""
        answers = [turn["content"] for turn in chat.messages if turn["role"] == "assistant"]
        if all(ids is None or self._spells(ids, answer) for ids, answer in zip(chat.ids, answers)):
            return chat
        return chat.noting(OTHER_TOKENS, ids=[None] * len(answers))

    def _spells(self, ids: list[int], text: str) -> bool:
        try:
            read = self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        except (IndexError, OverflowError):  # not of this vocabulary
            return False
        return read.strip().startswith(text.strip())

    def _text(self, row: dict[str, Any]) -> tuple[list[int], list[int]]:
        if row["turns"] is not None:
            raise Refused(f"it has questions without answers: {ANSWER_THEM}")
        if row["text"] is None:
            raise Refused("it has neither messages nor text")
        context_text, written = row["text"][: row["given"]], row["text"][row["given"] :]
        if row["ids"] is not None and self._spells(row["ids"], written):
            context = self._beginning + self._bare(context_text, add_special_tokens=False, verbose=False)["input_ids"]
            return context + row["ids"], [IGNORED] * len(context) + row["ids"]
        if row["text"] and not written:
            raise Refused(f"it is a prompt without an answer: {ANSWER_THEM}")
        ids, labels = encode_span(self._bare, row["text"], [(row["given"], len(row["text"]))])
        beginning = [IGNORED if row["given"] else token for token in self._beginning]
        return self._beginning + ids + self._ending, beginning + labels + self._ending


def tokenize_rows(
    rows: Dataset,
    tokenizer: Any,
    max_length: int | None = None,
    *,
    positions: int | None = None,
    vocab_size: int | None = None,
) -> tuple[Dataset, DataReport]:
    """Rows of token ids and labels, in the order of the source, each with a label; and how the rows were used.

    Chats longer than `max_length` lose their end; longer texts become several examples, each beginning as the
    tokenizer begins a text. Nothing may be longer than the `positions` of the base, or have tokens beyond its
    `vocab_size`, as far as these are known.

    A ValueError where no row has a label, `max_length` is too large, or missing where a row is too long for the
    base; or of chats without a chat template.
    """
    if max_length is not None and max_length < 2:
        raise ValueError(f"max_length is {max_length}: expected at least 2 tokens, of which one can be guessed.")
    if max_length is not None and positions is not None and max_length > positions:
        raise ValueError(f"max_length is {max_length}, but the base has {positions} positions: give at most that many.")
    rows = uniform(rows)
    encoder, report = Encoder(tokenizer, max_length, positions, vocab_size), DataReport()
    known_by = hashlib.sha256(repr((FORM, rows._fingerprint, encoder.known_by)).encode()).hexdigest()
    how = {"remove_columns": rows.column_names, "features": ENCODED, "desc": "tokenizing"}
    encoded = rows.map(encoder.encode, batched=True, new_fingerprint=known_by[:32], **how)
    how = {"remove_columns": list(ENCODED), "features": TOKENS, "desc": "fitting"}
    examples = encoded.map(encoder.fit, batched=True, batch_size=WINDOW, new_fingerprint=known_by[32:], **how)
    # read from what was written, for it may come from a cache
    for batch in encoded.select_columns(list(NOTES)).iter(WINDOW):
        report.count_rows(batch)
    for batch in examples.select_columns("labels").iter(WINDOW):
        report.count_examples(batch)
    if not report.examples:
        why = f" ({'; '.join(report.refusals)})" if report.refusals else ""
        raise ValueError(
            f"no row of the data can be trained on: {report.refused} of {report.rows} rows were refused{why}. "
            "Give chats with answers of the assistant, or text."
        )
    return examples, report


def read_data(
    model: DraftHeadPreTrainedModel,
    tokenizer: Any,
    data: str | os.PathLike | Dataset,
    settings: DraftHeadTrainingArguments,
) -> PreparedData:
    """Tokenize the rows that `data` names or holds; without a number of rows to hold out, a tenth, at most 64."""
    if isinstance(data, (str, os.PathLike)):
        source = os.fspath(data)
        raw = read_rows(source, split=settings.split)
    elif isinstance(data, Dataset):
        raw, source = uniform(data), data.info.dataset_name or "a Dataset"
    else:
        raise ValueError(f"the data is a {type(data).__name__}: give a file, a name, or a datasets.Dataset.")
    examples, report = tokenize_rows(
        raw,
        tokenizer,
        settings.max_length,
        positions=longest_text_of(model),
        vocab_size=model.config.get_text_config().vocab_size,
    )
    report.held_out = settings.held_out_rows or max(1, min(HELD_OUT, len(examples) // 10))
    if len(examples) <= report.held_out:
        what = f"the data holds {len(examples)} rows, of which {report.held_out} are to be held out"
        raise ValueError(f"{what}: give more data, or hold out fewer with --held-out-rows.")
    rows, held_out = examples.skip(report.held_out), examples.take(report.held_out)
    return PreparedData(rows, held_out, source, data_hash(raw), report)
