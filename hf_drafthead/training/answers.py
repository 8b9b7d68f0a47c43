"""The base's own answers to the questions of chats, and its own continuations of texts, a batch at a time.

Greedy or sampled, the answers to a row depend on that row, the settings and the seed alone: not on the other rows of
its batch, nor on where a run was interrupted. The limit is rounding: in another batch a row is padded differently,
which can exchange two nearly equal logits, more often in half precision.

Shapes: B rows, P positions of the longest prompt, V vocabulary.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList, TopPLogitsWarper

from hf_drafthead.data.chats import Chat, Refused, repaired
from hf_drafthead.data.rows import as_row
from hf_drafthead.data.texts import beginning_of
from hf_drafthead.training.data import padding_token
from hf_drafthead.training.encode import refuse_unknown
from hf_drafthead.training.templates import ChatEncoder, frame, without_post_processor

EMPTY = "the answer is empty"


@dataclass
class Task:
    """A row that is being answered: its prompt, and the base's answers so far.

    Attributes:
        index: the row's place in the data.
        questions: of a chat, those that are not asked yet, the next one first.
        messages: system, questions asked and the base's answers.
        given: the beginning of a text.
        text: the beginning followed by the base's continuation, once there is one.
        ids: the tokens of that continuation; those of a chat's answers are in its messages.
        answers: number of answers so far.
        done: whether no question is left.
        tools: the functions that a chat's assistant may call.
        refused: why there is no answer at all, of a row that is done.
    """

    index: int
    questions: list[str] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    given: str | None = None
    text: str | None = None
    ids: list[int] | None = None
    answers: int = 0
    done: bool = False
    tools: list[dict[str, Any]] | None = None
    refused: str | None = None

    @classmethod
    def of_questions(cls, index: int, asked: Chat) -> "Task":
        """A task for the questions of a chat."""
        system = [turn for turn in asked.messages if turn["role"] == "system"]
        first, *later = [turn["content"] for turn in asked.messages if turn["role"] == "user"]
        return cls(index, later, [*system, {"role": "user", "content": first}], tools=asked.tools)

    def leave_unanswered(self, reason: str, counts: "Counts") -> None:
        """End with the answer before the question that was asked last; without one the row is refused."""
        self.done = True
        counts.unusable[reason] = counts.unusable.get(reason, 0) + 1
        if any(turn["role"] == "assistant" for turn in self.messages):
            self.messages.pop()
        else:
            self.refused = reason

    def to_row(self) -> dict[str, Any]:
        """What is written to the file: a row that `read_rows` understands."""
        if self.given is None:
            return {"row": self.index, "messages": self.messages, **({"tools": self.tools} if self.tools else {})}
        known = {} if self.ids is None else {"ids": self.ids}
        return {"row": self.index, "text": self.text, "given": len(self.given), **known}


@dataclass
class Counts:
    """What was generated: answers, those cut at a limit, their tokens, and the forward passes of the base.

    `unusable` counts answers that are in no row, by the reason.

    `steps` counts for each row those that it took part in; it stays 0 without draft heads.
    """

    answers: int = 0
    cut: int = 0
    tokens: int = 0
    steps: int = 0
    step_tokens: int = 0
    unusable: dict[str, int] = field(default_factory=dict)


def questions_of(row: Mapping[str, Any]) -> Chat | None:
    """The system turn and the questions of a row, without answers; None if it is a text to continue.

    Raises:
        Refused: it holds nothing that can be asked.
    """
    if row.get("messages") is not None:
        chat = repaired(row["messages"], row.get("tools"))
        return Chat([turn for turn in chat.messages if turn["role"] in ("system", "user")], tools=chat.tools)
    if row.get("turns") is not None:
        if not all(turn.strip() for turn in row["turns"]):
            raise Refused("one of its turns is empty")
        return Chat([{"role": "user", "content": turn} for turn in row["turns"]])
    if not row.get("text"):
        raise Refused("it has neither messages nor text")
    return None


class Answerer:
    """Answers tasks with a model.

    Args:
        model: a causal language model, with or without draft heads.
        tokenizer: its fast tokenizer, with a chat template if there are chats.
        max_new_tokens: of each answer.
        max_length: of a prompt and its answer together; None for no limit.
        temperature: 0 is greedy.
        top_p: sample from the likeliest tokens that have this probability together.
        prompt_tokens: of a text, how many are given.
        seed: of the sampling.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        max_new_tokens: int,
        max_length: int | None,
        temperature: float,
        top_p: float,
        prompt_tokens: int,
        seed: int,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.max_new_tokens, self.max_length, self.prompt_tokens = max_new_tokens, max_length, prompt_tokens
        self.temperature, self.top_p, self.seed = temperature, top_p, seed
        self.counts = Counts()
        self._bare = without_post_processor(tokenizer)
        self._first, _ = frame(tokenizer)
        self._chats: ChatEncoder | None = None
        known = model.generation_config.eos_token_id
        self._ends = {*(known if isinstance(known, list) else [known]), tokenizer.eos_token_id} - {None}
        self._pad = padding_token(model, tokenizer)

    def begin(self, index: int, row: Mapping[str, Any]) -> Task:
        """A task for a row; the answers in the row are ignored.

        Raises:
            Refused: it holds neither text nor a chat that can be understood, or its prompt is too long.
        """
        row = as_row(row)
        asked = questions_of(row)
        if asked is None:
            text = row["text"]
            task = Task(
                index,
                given=text[: row["given"]] if row.get("given") else beginning_of(self._bare, text, self.prompt_tokens),
            )
        else:
            if self._chats is None:
                self._chats = ChatEncoder(self.tokenizer)
                stop = self._bare(self._chats.end_of_turn, add_special_tokens=False)["input_ids"]
                self._ends |= set(stop[-1:])
            task = Task.of_questions(index, self._chats.fit(asked))
        prompt = self._prompt(task)
        refuse_unknown(self.tokenizer, prompt, self.model.config.get_text_config().vocab_size)
        if self._room(length := len(prompt)) < 1:
            raise Refused(f"its prompt of {length} tokens leaves no room for an answer in {self.max_length}")
        return task

    def answer(self, tasks: list[Task]) -> None:
        """Answer every task's next question, all tasks in one batch; tasks without further questions become `done`."""
        prompts = [self._prompt(task) for task in tasks]
        rooms = [self._room(len(prompt)) for prompt in prompts]
        together = [number for number, room in enumerate(rooms) if room == self.max_new_tokens]
        # the others have different limits, so each is generated alone
        alone = [[number] for number, room in enumerate(rooms) if room < self.max_new_tokens]
        for group in [together, *alone]:
            if group:
                part = [tasks[number] for number in group]
                written = self._generate(part, [prompts[number] for number in group], rooms[group[0]])
                for task, prompt, tokens in zip(part, (prompts[number] for number in group), written):
                    self._take(task, prompt, tokens)

    def _prompt(self, task: Task) -> list[int]:
        if task.given is not None:
            return self._first + self._bare(task.given, add_special_tokens=False, verbose=False)["input_ids"]
        assert self._chats is not None
        text = self._chats.render(task.messages, prompt=True, tools=task.tools)
        return self._bare(text, add_special_tokens=False, verbose=False)["input_ids"]

    def _room(self, length: int) -> int:
        """How many tokens may follow a prompt."""
        return self.max_new_tokens if self.max_length is None else min(self.max_new_tokens, self.max_length - length)

    def _generate(self, tasks: list[Task], prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        """What the model writes after each prompt, up to and including the token that ends it."""
        width = max(map(len, prompts))
        ids = torch.tensor([[self._pad] * (width - len(prompt)) + prompt for prompt in prompts])  # (B, P)
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        processors = LogitsProcessorList()
        if self.temperature > 0:
            keys = [f"{self.seed}/{task.index}/{task.answers}" for task in tasks]
            processors.append(RowNoise(keys, width, self.temperature, self.top_p))
        ends = sorted(self._ends)
        output = self.model.generate(
            input_ids=ids.to(self.model.device),
            attention_mask=mask.to(self.model.device),
            max_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=ends or None,
            pad_token_id=self._pad,
            logits_processor=processors,
            return_dict_in_generate=True,
        )
        accepted = getattr(output, "accepted_lengths", None)
        if accepted is not None:
            self.counts.steps += int((accepted > 0).sum())
            self.counts.step_tokens += int(accepted.sum())
        written = []
        for tokens in output.sequences[:, width:].tolist():
            length = next((place + 1 for place, token in enumerate(tokens) if token in self._ends), len(tokens))
            written.append(tokens[:length])
        return written

    def _take(self, task: Task, prompt: list[int], tokens: list[int]) -> None:
        """Put what was written into the task, and the next question behind it."""
        ended = bool(tokens) and tokens[-1] in self._ends
        self.counts.answers += 1
        self.counts.cut += not ended
        self.counts.tokens += len(tokens)
        words = self._words(prompt, tokens[:-1] if ended else tokens)
        if not ended:
            words = words.rstrip("\N{REPLACEMENT CHARACTER}")  # half a character
        task.done = True
        task.answers += 1
        if task.given is not None:
            task.text, task.ids = task.given + words, tokens
            return
        assert self._chats is not None
        words = words.removeprefix(self._chats.lead)
        if ended and self._chats.trail:
            words = words.removesuffix(self._chats.trail)
        if not words.strip():
            task.leave_unanswered(EMPTY, self.counts)
            return
        answer = {"role": "assistant", "content": words, "ids": tokens}
        task.messages.append(answer if ended else {**answer, "cut": True})
        if ended and task.questions:
            task.messages.append({"role": "user", "content": task.questions.pop(0)})
            task.done = self._room(len(self._prompt(task))) < 1
            if task.done:
                task.messages.pop()

    def _words(self, prompt: list[int], tokens: list[int]) -> str:
        """Tokens as text; behind their prompt, for some tokenizers drop a space at the very beginning."""
        before, both, alone = (
            self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            for ids in (prompt, prompt + tokens, tokens)
        )
        return both[len(before) :] if both.startswith(before) else alone


class RowNoise(LogitsProcessor):
    """Makes the greedy choice a draw from the processed distribution: argmax(log p - log noise), noise exponential.

    The noise of a row's position comes from a separate generator, so neither the batch nor the position at which an
    interrupted run was resumed can change the draw.

    Args:
        keys: one for each row of the batch, in its order.
        prompt_length: P.
        temperature: above 0.
        top_p: 1.0 keeps all tokens.
    """

    def __init__(self, keys: list[str], prompt_length: int, temperature: float, top_p: float) -> None:
        self.keys, self.prompt_length, self.temperature = keys, prompt_length, temperature
        self.top_p = top_p

    def for_rows(self, rows: list[int]) -> "RowNoise":
        """The noise of some rows of the batch only, for decoding in which each row advances at its own pace."""
        return RowNoise([self.keys[row] for row in rows], self.prompt_length, self.temperature, self.top_p)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores (B, V) whose greatest is the token drawn."""
        scores = scores.float() / self.temperature
        if self.top_p < 1:
            scores = TopPLogitsWarper(self.top_p)(input_ids, scores)
        position = input_ids.shape[1] - self.prompt_length
        noise = torch.empty_like(scores)
        generator = torch.Generator(scores.device)
        for row, key in zip(noise, self.keys, strict=True):
            digest = hashlib.blake2b(f"{key}/{position}".encode(), digest_size=7).digest()
            row.exponential_(generator=generator.manual_seed(int.from_bytes(digest, "big")))
        return scores - noise.clamp_min(torch.finfo(noise.dtype).tiny).log()
