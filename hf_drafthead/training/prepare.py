"""From the user's data to rows of tokens, some of them held out; and checks of the data before training."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from torch import Tensor
from transformers.utils import logging

from hf_drafthead.data.rows import data_hash
from hf_drafthead.data.sources import read_rows, stream_hash, uniform
from hf_drafthead.modeling.base import DraftHeadPreTrainedModel
from hf_drafthead.training.data import DataReport, PaddingCollator, tokenize_rows
from hf_drafthead.training.likeness import Likeness, likeness
from hf_drafthead.training.objectives import IGNORED
from hf_drafthead.training.vocabulary import frequent_tokens

logger = logging.get_logger(__name__)

HELD_OUT = 64  # rows to evaluate on, unless the data is small
USUAL_LENGTH = 2048  # tokens of a row, as in the papers
SHUFFLED = 4096  # rows of the shuffle buffer of a stream


@dataclass(frozen=True)
class PreparedData:
    """Tokenized rows, ready for training.

    rows: each with `input_ids` and `labels` (T,), -100 at positions without a loss, and if the base's last hidden
    states are known, `features` (T, H); held_out: rows to evaluate on; source: what they were made from, for the
    training summary; sha256: of that; report: how its rows were used.
    """

    rows: Any
    held_out: Any
    source: str
    sha256: str
    report: DataReport | None = None


def read_data(
    model: DraftHeadPreTrainedModel,
    tokenizer: Any,
    data: str | os.PathLike | Dataset | IterableDataset,
    max_length: int | None,
    packing: bool,
    streaming: bool,
    split: str,
    held_out_rows: int | None,
    seed: int,
) -> PreparedData:
    """Tokenize the rows that `data` names or holds; without a number of rows to hold out, a tenth, at most 64."""
    if isinstance(data, (Dataset, IterableDataset)):
        raw, source = uniform(data), getattr(data.info, "dataset_name", None) or f"a {type(data).__name__}"
        if streaming and isinstance(raw, Dataset):
            raw = raw.to_iterable_dataset()
    else:
        source = os.fspath(data)
        raw = read_rows(source, streaming=streaming, split=split)
    first = list(islice(iter(raw), 10 * HELD_OUT if held_out_rows is None else held_out_rows + 1))
    if held_out_rows is None:
        held_out_rows = max(1, len(first) // 10)
    if len(first) <= held_out_rows:
        raise ValueError(
            f"the data holds {len(first)} rows, of which {held_out_rows} are to be held out: give more data, or hold "
            "out fewer with --held-out-rows."
        )
    limits: dict[str, Any] = {"max_length": max_length or most_tokens(model), "positions": positions_of(model)}
    limits["vocab_size"] = model.config.get_text_config().vocab_size
    chosen = Dataset.from_list(first[:held_out_rows], features=raw.features)
    held_out, _ = tokenize_rows(chosen, tokenizer, **limits)
    rows, report = tokenize_rows(raw.skip(held_out_rows), tokenizer, packing=packing, **limits)
    if isinstance(rows, IterableDataset):
        rows = rows.shuffle(seed=seed, buffer_size=SHUFFLED)
        return PreparedData(rows, held_out, source, stream_hash(source, first), report)
    return PreparedData(rows, held_out, source, data_hash(raw), report)


def own_prompts(rows: Sequence[dict[str, Any]], count: int, longest: int) -> list[Tensor]:
    """What comes before the first answer of some rows; of a row that is all text, its first quarter.

    Args:
        rows: with `input_ids` and `labels`.
        count: of prompts, at most.
        longest: tokens of a prompt; longer ones are left out.
    """
    prompts = []
    for row in rows:
        ids, labels = torch.as_tensor(row["input_ids"]), torch.as_tensor(row["labels"])
        answered = (labels != IGNORED).nonzero().flatten()
        first = int(answered[0]) if len(answered) else 0
        first = first or len(ids) // 4
        if 0 < first <= longest:
            prompts.append(ids[:first])
    return prompts[:count]


def refuse_short_rows(model: DraftHeadPreTrainedModel, rows: Any) -> None:
    """Refuse data in which the last head never has a label."""
    ahead = model.config.num_draft_heads + 1
    longest = max(len(rows[row]["input_ids"]) for row in range(len(rows)))
    if longest <= ahead:
        raise ValueError(
            f"rows of {longest} tokens have no label {ahead} tokens ahead: give longer rows, or train fewer heads."
        )


def look_at(
    model: DraftHeadPreTrainedModel, held_out: Any, collator: PaddingCollator, batch_size: int
) -> Likeness | None:
    """Warn about data that differs from the base's own text."""

    def batches() -> Iterator[dict[str, Tensor]]:
        for first in range(0, len(held_out), batch_size):
            yield collator([held_out[row] for row in range(first, min(first + batch_size, len(held_out)))])

    looks = likeness(model.base.eval(), batches())
    if looks is not None and (warning := looks.warning()):
        logger.warning(warning)
    return looks


def most_tokens(model: DraftHeadPreTrainedModel) -> int:
    """The default limit of a row's tokens."""
    return min(USUAL_LENGTH, positions_of(model))


def positions_of(model: DraftHeadPreTrainedModel) -> int:
    return getattr(model.base.config.get_text_config(), "max_position_embeddings", None) or 2048


def choose_vocabulary(model: DraftHeadPreTrainedModel, rows: Any) -> float | None:
    """Give heads with a reduced vocabulary the most frequent tokens of the data; returns their share of all labels."""
    size, known = model.config.draft_vocab_size, model.config.known_tokens
    if size is None or known is None or size >= known:
        return None
    tokens, share = frequent_tokens(rows, size, known)
    model.drafter.choose_vocabulary(tokens)
    return share
