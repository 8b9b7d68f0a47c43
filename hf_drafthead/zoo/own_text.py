"""Text that the base itself writes: what its heads will have to guess, which is not quite what people write.

Shapes: R rows, P tokens of a row that are given, T tokens of a finished row.
"""

import torch
from transformers import DynamicCache, PreTrainedModel


@torch.inference_mode()
def continue_rows(base: PreTrainedModel, starts: torch.Tensor, length: int, batch_size: int = 64) -> torch.Tensor:
    """Let the base continue rows greedily, past any end of text, as the rows it was trained on go on with another one.

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
        logits = base(input_ids=columns[-1], past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        columns.append(logits[:, -1:].argmax(-1))
    return torch.cat(columns, dim=1)
