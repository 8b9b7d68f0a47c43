"""Many requests at once: rows that join and leave while the tree goes on, behind transformers' own calls for that."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from transformers import GenerationConfig
from transformers.utils import logging

from hf_drafthead.bases.releases import GenerationOutput
from hf_drafthead.batching.manager import Manager
from hf_drafthead.batching.requests import config_value

__all__ = ["Manager", "generate_batch", "running_manager"]


@contextlib.contextmanager
def running_manager(
    model: Any,
    generation_config: GenerationConfig | None = None,
    block: bool = True,
    timeout: float | None = None,
    continuous_batching_config: Any = None,
    persistent_manager: bool = False,
    warmup: bool = True,
    workload_hints: Any = None,
    **settings: Any,
) -> Iterator[Manager]:
    """A manager that runs within this context; at its end all requests are finished first, unless it ends by an error.

    Arguments as of transformers, and of `Manager`: `block` waits for the end, `timeout` seconds at most; `warmup` finds
    out how to decode before requests come; what is worth keeping stays without `persistent_manager`.
    """
    manager = Manager(model, generation_config, continuous_batching_config, workload_hints, **settings)
    if warmup:
        manager.warmup()
    manager.start()
    try:
        yield manager
    except BaseException:
        manager.stop(block=block, timeout=timeout, hard_stop=True)
        raise
    manager.stop(block=block, timeout=timeout)


def generate_batch(
    model: Any,
    inputs: list[list[int]],
    generation_config: GenerationConfig | None = None,
    continuous_batching_config: Any = None,
    record_timestamps: bool = False,
    progress_bar: bool = False,
    persistent_manager: bool = False,
    warmup: bool = True,
    *,
    slots: int | None = None,
    draft_tree: Any = None,
    **settings: Any,
) -> dict[str, GenerationOutput]:
    """Generate for many prompts of any lengths, `slots` of them at a time: one that ends makes room for the next.

    Args:
        model: with draft heads.
        inputs: the prompts' token ids.
        generation_config, settings: of all requests, whatever `generate` takes: `max_new_tokens`, `seed`, ...
        continuous_batching_config, slots, draft_tree, persistent_manager, warmup: see `Manager`, `running_manager`.
        record_timestamps: results say when each token came.

    Returns:
        by the requests' ids, in the order of the inputs, what transformers gives: `generated_tokens`, `error`, ...
        Where a prompt has several sequences, the others come before it.
    """
    if not inputs:
        return {}
    several = config_value("num_return_sequences", settings, generation_config, model.generation_config) or 1
    how: dict[str, Any] = {"continuous_batching_config": continuous_batching_config, "slots": slots}
    how |= {"workload_hints": SimpleNamespace(num_requests=len(inputs) * several), "draft_tree": draft_tree}
    results: dict[str, GenerationOutput] = {}
    with running_manager(model, generation_config, warmup=warmup, **how) as manager:
        settings |= {"num_return_sequences": several, "record_timestamps": record_timestamps}
        for name in logging.tqdm(manager.add_requests(inputs, **settings), disable=not progress_bar, unit="request"):
            for each in (*(f"{name}__child#{child}" for child in range(several - 1)), name):
                result = manager.get_result(each)
                if result is None:
                    raise RuntimeError("the thread that decodes has ended before all requests were finished.")
                results[each] = result
    return results
