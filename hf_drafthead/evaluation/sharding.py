"""Questions shared among the processes that `accelerate launch` starts."""

from collections.abc import Sequence
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object

from hf_drafthead.evaluation.questions import Question


def process_state() -> PartialState:
    """The state of this process; without a GPU, processes that `torchrun` or MPI started on the CPU count too."""
    return PartialState(cpu=not torch.cuda.is_available())


class Shard:
    """This process's share of the questions, and the rounds of all processes.

    Args:
        questions: all of them, the same in every process.

    Raises:
        ValueError: there are fewer questions than processes.
    """

    def __init__(self, questions: Sequence[Question]):
        state = process_state()
        self.processes = state.num_processes
        if self.processes > max(len(questions), 1):
            raise ValueError(
                f"{len(questions)} questions cannot be shared among {self.processes} processes: start fewer of them."
            )
        self.questions = list(questions)[state.process_index :: self.processes]

    def gather(self, course: Any) -> None:
        """Give every process the rounds of all processes, and a common reason for stopping."""
        if self.processes == 1:
            return
        course.rounds = gather_object(course.rounds)
        course.notices = list(dict.fromkeys(gather_object(course.notices)))
        course.stopped = next(filter(None, gather_object([course.stopped])), None)
