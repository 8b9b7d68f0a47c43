"""The step of many requests at once: they share the draft and the forward, and each walks by its own rules.

Shapes: B rows, N nodes, D nodes on the longest path, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from hf_drafthead.bases.topology import Topology
from hf_drafthead.batching.rows import view
from hf_drafthead.generation.acceptance import walk_greedily, walk_on_device, walk_on_host
from hf_drafthead.generation.decoding import Stream
from hf_drafthead.generation.rules import Rules
from hf_drafthead.generation.state import Candidates, DecodingState, RowWalk, Verified, Walk, are_numbers
from hf_drafthead.generation.step import Step, deepest
from hf_drafthead.generation.tree import Tree

# What `Step` asks of the rules of a call, where each row has its own.
SHARED_RULES: Any = SimpleNamespace(
    rejects=False, greedy=False, on_device=False, max_length=None, pad_token=0, config=SimpleNamespace(do_sample=False)
)


@dataclass
class Member:
    """A request in the batch.

    request: whose tokens these are; rules, stream: of its call; state: of its row alone, until it joins and while it is
    set aside; error: what has ended it.
    """

    request: Any
    rules: Rules
    stream: Stream
    state: DecodingState | None
    prompt_length: int
    error: BaseException | None = None
    noise: torch.Tensor | None = field(default=None, repr=False)


class SharedStep(Step):
    """The steps of a batch with one tree.

    Args:
        members: by row, None where nobody is; the batch changes the list as requests join and leave.
        others: see `Step`.
    """

    def __init__(self, reader: Any, drafter: Any, tree: Tree, *, members: list[Member | None], **others: Any):
        super().__init__(reader, drafter, tree, rules=SHARED_RULES, **others)
        self.members, self.ahead = members, False  # whether a row has ended is known before the next step

    def noise_ahead(self, state: DecodingState) -> tuple[None, torch.Tensor | None]:
        """What tilts the guesses of rows that sample, (B, D, V); members keep their noise (1, D, V) for the walk."""
        tilts: dict[int, torch.Tensor] = {}
        vocabulary = self.stages.reader.vocabulary
        for row, member in enumerate(self.members):
            if member is None or member.rules.tape is None:
                continue
            try:
                noise = member.rules.noise_ahead([state.lengths[row]], [0], self.depth, vocabulary)
                assert noise is not None
                member.noise = noise.to(self.device)
                tilts[row] = member.rules.tilt(noise)[0]
            except BaseException as error:
                member.error = error
        if not tilts and not state.rows.cache.fixed:  # a program takes the same arguments in every step
            return None, None
        shape = next((tilt.shape for tilt in tilts.values()), (self.depth, vocabulary))
        nothing = torch.zeros(shape, device=next((tilt.device for tilt in tilts.values()), self.device))
        rows = [tilts.get(row, nothing) for row in range(len(state.lengths))]
        return None, torch.stack(rows).to(self.device)

    def walk(self, state: DecodingState, candidates: Candidates, verified: Verified, noise: None, stages: Any) -> Walk:
        """Each row's walk, on the device where its rules allow that and it is no CPU."""
        logits = verified.logits
        walks: list[RowWalk] = []
        together = self._on_device(state, candidates, logits)
        depth = self.depth if state.rows.cache.fixed or together is not None else None
        for row, member in enumerate(self.members):
            walk: RowWalk = (0, 0, state.ends[row], [], [])
            if member is not None and member.error is None and not self._is_on_device(member):
                try:
                    walk = self._walk_row(state, row, member, candidates, logits[row : row + 1])
                except BaseException as error:  # of a processor, a criterion, a streamer: it ends this request alone
                    member.error = error
            walks.append(walk)
        alone = Walk.of_rows(walks, depth, SHARED_RULES.pad_token, self.device)
        if together is None:
            return alone
        mask = [member is not None and member.error is None and self._is_on_device(member) for member in self.members]
        on_device = torch.tensor(mask, device=self.device)[:, None]
        return Walk(torch.where(on_device, together.packed, alone.packed))  # type: ignore[call-arg]

    def _is_on_device(self, member: Member) -> bool:
        return self.device.type != "cpu" and member.rules.on_device

    def _on_device(self, state: DecodingState, candidates: Candidates, logits: torch.Tensor) -> Walk | None:
        """The walk of all rows whose rules allow it; what it says of the others has no meaning."""
        rows = [
            (row, member)
            for row, member in enumerate(self.members)
            if member is not None and self._is_on_device(member)
        ]
        if not rows:
            return None
        choice, valid = logits.argmax(-1), are_numbers(logits)
        for row, member in rows:
            if not member.rules.greedy:
                depths, this_row = candidates.topology.depths, slice(row, row + 1)
                of_row = depths if len(depths) == 1 else depths[this_row]
                choice[this_row], valid[this_row] = member.rules.choose_everywhere(
                    logits[this_row], of_row, member.noise
                )
        return walk_on_device(
            choice, valid, candidates, state.rows, state.limits, deepest(state.limits, state.rows.cache)
        )

    def _walk_row(
        self, state: DecodingState, row: int, member: Member, candidates: Candidates, logits: torch.Tensor
    ) -> RowWalk:
        """The walk of one row, as that of a call with this row alone."""
        rules, row_state = member.rules, view(state, row, member.prompt_length)
        parts = (part if len(part) == 1 else part[row : row + 1] for part in candidates.topology)
        nodes = Candidates(candidates.tokens[row : row + 1], Topology(*parts))
        show = None if member.stream.streamer is None else member.stream.show
        if rules.greedy and show is None:
            walk = walk_greedily(logits, nodes, row_state, rules)
        else:
            walk = walk_on_host(logits, nodes, row_state, rules, show=show)
        count, observed, end, _, *tokens_and_nodes = walk.packed[0].tolist()
        half = len(tokens_and_nodes) // 2
        return count, observed, end or None, tokens_and_nodes[:count], tokens_and_nodes[half : half + count]
