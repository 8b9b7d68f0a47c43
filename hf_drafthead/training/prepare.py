"""From the user's data to rows of tokens, some of them held out."""

import os
from itertools import islice
from typing import Any

from datasets import Dataset, IterableDataset

from hf_drafthead.data.rows import data_hash
from hf_drafthead.data.sources import read_rows, stream_hash, uniform
from hf_drafthead.modeling.base import DraftHeadPreTrainedModel
from hf_drafthead.training.arguments import DraftHeadTrainingArguments
from hf_drafthead.training.data import tokenize_rows
from hf_drafthead.training.examples import PreparedData, most_tokens, positions_of

HELD_OUT = 64  # rows to evaluate on, unless the data is small
SHUFFLED = 4096  # rows of the shuffle buffer of a stream


def read_data(
    model: DraftHeadPreTrainedModel,
    tokenizer: Any,
    data: str | os.PathLike | Dataset | IterableDataset,
    settings: DraftHeadTrainingArguments,
) -> PreparedData:
    """Tokenize the rows that `data` names or holds; without a number of rows to hold out, a tenth, at most 64."""
    if isinstance(data, (Dataset, IterableDataset)):
        raw, source = uniform(data), getattr(data.info, "dataset_name", None) or f"a {type(data).__name__}"
        if settings.streaming and isinstance(raw, Dataset):
            raw = raw.to_iterable_dataset()
    else:
        source = os.fspath(data)
        raw = read_rows(source, streaming=settings.streaming, split=settings.split)
    held_out_rows = settings.held_out_rows
    first = list(islice(iter(raw), 10 * HELD_OUT if held_out_rows is None else held_out_rows + 1))
    if held_out_rows is None:
        held_out_rows = max(1, len(first) // 10)
    if len(first) <= held_out_rows:
        raise ValueError(
            f"the data holds {len(first)} rows, of which {held_out_rows} are to be held out: give more data, or hold "
            "out fewer with --held-out-rows."
        )
    limits: dict[str, Any] = {"max_length": settings.max_length or most_tokens(model), "positions": positions_of(model)}
    limits["vocab_size"] = model.config.get_text_config().vocab_size
    chosen = Dataset.from_list(first[:held_out_rows], features=raw.features)
    held_out, _ = tokenize_rows(chosen, tokenizer, **limits)
    rows, report = tokenize_rows(raw.skip(held_out_rows), tokenizer, packing=settings.packing, **limits)
    if isinstance(rows, IterableDataset):
        seed = settings.seed if settings.data_seed is None else settings.data_seed
        rows = rows.shuffle(seed=seed, buffer_size=SHUFFLED)
        return PreparedData(rows, held_out, source, stream_hash(source, first), report)
    return PreparedData(rows, held_out, source, data_hash(raw), report)
