"""Text that the base itself generates: this is what its heads have to predict, and it differs from human text.

Shapes: R rows, P tokens of a row that are given, T tokens of a finished row.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.utils.data import Dataset
from transformers import DynamicCache, PreTrainedModel

from hf_drafthead.bases.releases import CACHE
from hf_drafthead.training.heads_loss import IGNORED

GIVEN = 64  # tokens of a row that come from the corpus; the rest is the base's own
LENGTH = 256


class OwnRows(Dataset):
    """Rows with labels on the tokens that the base generated.

    Args:
        rows: (R, T).
        given: tokens at the beginning of each that the base did not write.
    """

    def __init__(self, rows: torch.Tensor, given: int) -> None:
        self.rows, self.given = rows, given

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        labels = self.rows[index].clone()
        labels[: self.given] = IGNORED
        return {"input_ids": self.rows[index], "labels": labels}


def starts(rows: torch.Tensor, count: int, given: int, seed: int) -> torch.Tensor:
    """Beginnings of texts, cut from packed rows at random: (count, given); the first token is that of the row.

    Args:
        rows: (rows, length) of a corpus, longer than ``given``.
    """
    generator = torch.Generator().manual_seed(seed)
    picked = torch.randint(0, len(rows), (count,), generator=generator)
    columns = torch.randint(1, rows.shape[1] - given + 1, (count,), generator=generator)
    inner = columns[:, None] + torch.arange(given - 1)
    return torch.cat([rows[picked, :1], rows[picked[:, None], inner]], dim=1)


def own_text(base: PreTrainedModel, rows: torch.Tensor, count: int, file: Path, *, seed: int) -> OwnRows:
    """`count` greedy texts of the base that continue beginnings from the corpus.

    They are stored in ``file``, because all families are trained on the same texts.
    """
    length = min(LENGTH, rows.shape[1])
    given = min(GIVEN, length // 4)
    if not file.is_file():
        texts = continue_rows(base, starts(rows, count, given, seed), length)
        file.parent.mkdir(parents=True, exist_ok=True)
        torn = file.with_suffix(".new")
        save_file({"texts": texts.clone()}, torn)
        torn.replace(file)
    return OwnRows(load_file(file)["texts"], given)


@torch.no_grad()
def continue_rows(base: PreTrainedModel, starts: torch.Tensor, length: int, batch_size: int = 256) -> torch.Tensor:
    """Let the base continue rows greedily, past any end of text, as in its training rows, which join several texts.

    Args:
        base: the base, in eval mode.
        starts: (R, P) first tokens of each row.
        length: T, at most the base's positions.
        batch_size: rows at a time.

    Returns:
        (R, T) LongTensor.
    """
    return torch.cat([_continue_batch(base, batch, length) for batch in starts.split(batch_size)])


def _continue_batch(base: PreTrainedModel, starts: torch.Tensor, length: int) -> torch.Tensor:
    cache = DynamicCache(config=base.config)
    columns = [starts]
    for _ in range(length - starts.shape[1]):
        logits = base(input_ids=columns[-1], **{CACHE: cache}, use_cache=True, logits_to_keep=1).logits
        columns.append(logits[:, -1:].argmax(-1))
    return torch.cat(columns, dim=1)
