"""The decoding loop of one call: a batch whose rows begin together. Step after step until every row has ended.

One step costs one forward of the base over N nodes and emits between 1 and D tokens per row.

Shapes: B rows, N nodes, D nodes on the longest path.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

import torch

from hf_drafthead.bases.releases import CACHE
from hf_drafthead.generation.batch import Batch
from hf_drafthead.generation.lookup import accepted_copies
from hf_drafthead.generation.runner import Execution
from hf_drafthead.generation.settings import DraftPlan
from hf_drafthead.generation.state import DecodingState, DraftHeadGenerateOutput, Member, StepRecord
from hf_drafthead.generation.step import now
from hf_drafthead.generation.tree import LookupTree

P = ParamSpec("P")
T = TypeVar("T")

FRAME_WORDS = 1 << 15  # of 8 bytes; a frame of so many gets a block of twice as many: the rest is for those below it


def with_room(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function so that it and what it calls have 256 KiB for their frames in one block.

    CPython keeps frames in blocks of 16 KiB. A call whose frame does not fit into the rest of a block takes a new one
    from the operating system, and gives it back when it returns: where a block happens to end between the loop of
    decoding and the functions that it calls, up to 200 times in a step of the bundled Medusa, 26 in a captured one.

    >>> with_room(max)(1, 2)
    2
    """
    call = types.FunctionType(_apply.__code__.replace(co_stacksize=FRAME_WORDS), globals())

    @functools.wraps(function)
    def roomy(*args: P.args, **kwargs: P.kwargs) -> T:
        result: T = call(function, args, kwargs)
        return result

    return roomy


def _apply(function, args, kwargs):
    return function(*args, **kwargs)


@torch.no_grad()
def decode(
    member: Member,
    model: Any,
    execution: Execution,
    on_step: Callable[[StepRecord], None] | None = None,
) -> DraftHeadGenerateOutput | torch.Tensor:
    """Generate with draft heads behind a prompt that was read.

    Args:
        member: the call.
        model: with `base` and `drafter`; programs are kept with it.
        execution: how its steps run.
        on_step: is given a record of the prefill and of every step.

    Returns:
        (B, length) token ids, or the output class where `return_dict_in_generate` asks for it.
    """
    device, start = model.base.device, 0.0
    with contextlib.closing(Batch.of_one(model, member, execution, timed=on_step is not None)) as batch:
        state = batch.state
        assert state is not None
        if on_step is not None:
            start = now(device)
            roots = state.rows.sequences.gather(1, state.rows.lengths[:, None] - 1)[..., None].tolist()
            on_step(StepRecord(0, roots, [], [1] * len(roots), 0, {"prefill": member.prefilled_in}, plan=member.plan))
        while not member.has_ended(state):
            for record in batch.step():
                if on_step is not None:
                    start, last = now(device), start
                    record.seconds["step"] = start - last
                    on_step(telling_copies(record, member.plan, state))
        if member.error is not None:
            raise member.error
        return finish(member, state)


def telling_copies(record: StepRecord, plan: DraftPlan, state: DecodingState) -> StepRecord:
    """A record that tells which guesses were copies, where the tree holds some."""
    if not isinstance(plan.tree, LookupTree):
        return record
    texts = plan.texts_on(state.rows.lengths.device)
    of_step = plan.tree, texts, state.rows.sequences, [*state.lengths], record.tokens
    return replace(record, copied=functools.partial(accepted_copies, *of_step))


def finish(member: Member, state: DecodingState) -> DraftHeadGenerateOutput | torch.Tensor:
    """What the base's generate would return, in its form."""
    rules, (ordinary_cache, cached_length) = member.rules, member.given
    length = max(end for end in state.ends if end is not None)
    if rules.samples:
        rules.random.chosen(length - rules.prompt_length)
    if member.stream is not None:
        member.stream.end()
    sequences = state.rows.sequences[:, :length].to(rules.device, copy=True)
    in_dict = rules.config.return_dict_in_generate
    if in_dict or getattr(ordinary_cache, "_is_user_defined", False):
        cache = state.rows.cache
        if (first := min(state.lengths) - 1) < length - 1:  # the base has read the padding behind a row's end, too
            if cache.recurrent:  # what grows must not be a program's
                cache = cache.twin()
                cache.fixed, cache.extent = False, int(cache.lengths.max())
            rows, start = state.rows, first + state.past_shift
            member.reader.rewrite(
                rows.sequences[:, first : length - 1], cache, start, rows.position_shift, rows.visible
            )
        cache.unload(ordinary_cache, cached_length, length - 1 + state.past_shift)
    if not in_dict:
        return sequences
    steps = torch.tensor(member.counted, dtype=torch.long, device=sequences.device)
    new = length - rules.prompt_length
    return DraftHeadGenerateOutput(
        sequences=sequences,
        scores=tuple(rules.scores[:new]) if rules.keeps_scores else None,
        logits=tuple(rules.logits[:new]) if rules.keeps_logits else None,
        accepted_lengths=steps.reshape(-1, len(state.lengths)).T,
        **{CACHE: ordinary_cache},
    )
