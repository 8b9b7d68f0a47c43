"""The base's own answers to the questions of chats, its own questions, and its own continuations of texts, in batches.

Questions are written as Magpie does (arXiv 2406.08464): the chat template up to where a user's words would stand, is
sampled from until the turn ends.

Greedy or sampled, the answers to a row depend on that row, the settings and the seed alone: not on the other rows of
its batch, nor on where a run was interrupted. The limit is rounding: in another batch a row is padded differently,
which can exchange two nearly equal logits, more often in half precision.

Shapes: B rows, P positions of the longest prompt, D new tokens, V vocabulary.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList, TopPLogitsWarper

from hf_drafthead.data.chats import Chat, Refused, repaired
from hf_drafthead.data.rows import as_row
from hf_drafthead.data.texts import beginning_of, same_words, why_no_question
from hf_drafthead.training.examples import padding_token
from hf_drafthead.training.templates import ChatEncoder, frame, refuse_unknown, without_post_processor

EMPTY = "the answer is empty"
DUPLICATE, CUT, CONTROL = "duplicate", "cut", "control tokens"  # why questions are dropped


@dataclass
class Task:
    """A row that is being answered: its prompt, and the base's answers so far.

    Attributes:
        index: the row's place in the data, or among the base's own questions.
        questions: of a chat, those that are not asked yet, the next one first.
        messages: system, questions asked and the base's answers.
        given: the beginning of a text.
        text: the beginning followed by the base's continuation, once there is one.
        ids: the tokens of that continuation; those of a chat's answers are in its messages.
        answers: number of answers so far.
        done: whether no question is left.
        tools: the functions that a chat's assistant may call.
        refused: why there is no answer at all, of a row that is done.
        to_write: number of questions that the base is still to write itself.
        greedy: whether its answers are, at whatever temperature others are sampled.
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
    to_write: int = 0
    greedy: bool = False

    @property
    def asks(self) -> bool:
        """Whether the next thing to write is a question."""
        return self.to_write > 0 and (not self.messages or self.messages[-1]["role"] == "assistant")

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

    def ask(self, words: str, asked: set[int]) -> str | None:
        """Take a question that the base wrote, or return why it is dropped: then the chat ends before it.

        Args:
            words: of the question.
            asked: the first questions of other chats; this one is added.
        """
        reason = why_no_question(words)
        if not self.messages and reason is None:
            reason = DUPLICATE if same_words(words) in asked else None
            asked.add(same_words(words))
        if reason is None:
            self.messages.append({"role": "user", "content": words})
            self.to_write -= 1
        return reason

    def to_row(self) -> dict[str, Any]:
        """What is written to the file: a row that `read_rows` understands."""
        if self.given is None:
            return {"row": self.index, "messages": self.messages, **({"tools": self.tools} if self.tools else {})}
        known = {} if self.ids is None else {"ids": self.ids}
        return {"row": self.index, "text": self.text, "given": len(self.given), **known}


@dataclass
class Counts:
    """What was generated: answers, those cut at a limit, their tokens, and the forward passes of the base.

    `unusable` counts answers that are in no row, by the reason. `questions` counts those that the base wrote, `dropped`
    those that were not asked, by the reason, and `in_vain` the chats without a question since the last one with any.

    `steps` counts for each row those that it took part in; it stays 0 without draft heads.
    """

    answers: int = 0
    cut: int = 0
    tokens: int = 0
    steps: int = 0
    step_tokens: int = 0
    unusable: dict[str, int] = field(default_factory=dict)
    questions: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    in_vain: int = 0

    def drop(self, task: Task, reason: str) -> None:
        """End a task before a question of the base that cannot be asked."""
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
        task.done = True
        if not task.messages:
            task.refused = reason
            self.in_vain += 1


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
        question_tokens: of a question that the base writes, at most.
        asked: `same_words` of first questions that are not to be asked again.
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
        question_tokens: int = 96,
        asked: set[int] | None = None,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.max_new_tokens, self.max_length, self.prompt_tokens = max_new_tokens, max_length, prompt_tokens
        self.temperature, self.top_p, self.seed = temperature, top_p, seed
        self.question_tokens, self.asked = question_tokens, asked or set()
        self.counts = Counts()
        self._bare = without_post_processor(tokenizer)
        self._first, _ = frame(tokenizer)
        self._chats: ChatEncoder | None = None
        self._stop: str | None = None
        self._control: set[int] = set()
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
            task = Task.of_questions(index, self._encoder().fit(asked))
        prompt = self._prompt(task)
        refuse_unknown(self.tokenizer, prompt, self.model.config.get_text_config().vocab_size)
        if self._room(length := len(prompt)) < 1:
            raise Refused(f"its prompt of {length} tokens leaves no room for an answer in {self.max_length}")
        return task

    def begin_own(self, index: int, questions: int, greedy: bool) -> Task:
        """A task of which the base writes the questions too.

        Raises:
            ValueError: there is no chat template, it does not show a lone question, or is too long.
        """
        task = Task(index, to_write=questions, greedy=greedy)
        if self._stop is None:
            self._end_of_question()
            if self._room(length := len(self._prompt(task)), question=True) < 1:
                raise ValueError(
                    f"max_length is {self.max_length}, but the chat template has {length} tokens before a question: "
                    "give more."
                )
        return task

    def answer(self, tasks: list[Task]) -> None:
        """Write every task's next answer, or its next question; tasks without further questions become `done`.

        Tasks of one limit are one batch.
        """
        prompts = [self._prompt(task) for task in tasks]
        limits = [self._room(len(prompt), task.asks) for task, prompt in zip(tasks, prompts)]
        for limit in sorted(set(limits)):
            group = [number for number in range(len(tasks)) if limits[number] == limit]
            part, its_prompts = [tasks[number] for number in group], [prompts[number] for number in group]
            written = self._generate(part, its_prompts, limit)
            for task, prompt, tokens in zip(part, its_prompts, written):
                (self._take_question if task.asks else self._take)(task, prompt, tokens)

    def _encoder(self) -> ChatEncoder:
        if self._chats is None:
            self._chats = ChatEncoder(self.tokenizer)
            stop = self._bare(self._chats.end_of_turn, add_special_tokens=False)["input_ids"]
            self._ends |= set(stop[-1:])
        return self._chats

    def _end_of_question(self) -> str:
        """What ends a user's turn if no token does; empty if one does, which then ends answers as well."""
        if self._stop is None:
            end, is_token = question_end(self.tokenizer, self._encoder)
            self._stop = "" if is_token else end
            self._ends |= set(self._bare(end, add_special_tokens=False)["input_ids"]) if is_token else set()
            self._control = set(self.tokenizer.all_special_ids) | set(self.tokenizer.added_tokens_decoder)
        return self._stop

    def _prompt(self, task: Task) -> list[int]:
        if task.given is not None:
            return self._first + self._bare(task.given, add_special_tokens=False, verbose=False)["input_ids"]
        chats = self._encoder()
        if task.asks:
            text = chats.before_question(task.messages)
        else:
            text = chats.render(task.messages, prompt=True, tools=task.tools)
        return self._bare(text, add_special_tokens=False, verbose=False)["input_ids"]

    def _room(self, length: int, question: bool = False) -> int:
        """How many tokens may follow a prompt."""
        most = self.question_tokens if question else self.max_new_tokens
        return most if self.max_length is None else min(most, self.max_length - length)

    def _generate(self, tasks: list[Task], prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        """What the model writes after each prompt, up to and including the token that ends it."""
        width = max(map(len, prompts))
        ids = torch.tensor([[self._pad] * (width - len(prompt)) + prompt for prompt in prompts])  # (B, P)
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        processors = LogitsProcessorList()
        temperatures = [self._temperature(task) for task in tasks]
        if any(temperatures):
            keys = [f"{self.seed}/{task.index}/{'question' * task.asks}{task.answers}" for task in tasks]
            processors.append(RowDraws.of(keys, width, new_tokens, temperatures, self.top_p))
        ends = sorted(self._ends)
        in_place = {"cache_implementation": "static", "disable_compile": True} if writes_in_place(self.model) else {}
        output = self.model.generate(
            input_ids=ids.to(self.model.device),
            attention_mask=mask.to(self.model.device),
            max_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=ends or None,
            pad_token_id=self._pad,
            logits_processor=processors,
            return_dict_in_generate=True,
            **in_place,
        )
        self.model.__dict__.pop("_cache", None)  # of this batch's size, where it was static
        accepted = getattr(output, "accepted_lengths", None)
        if accepted is not None:
            self.counts.steps += int((accepted > 0).sum())
            self.counts.step_tokens += int(accepted.sum())
        written = []
        for tokens in output.sequences[:, width:].tolist():
            length = next((place + 1 for place, token in enumerate(tokens) if token in self._ends), len(tokens))
            written.append(tokens[:length])
        return written

    def _temperature(self, task: Task) -> float:
        return 1.0 if task.asks else 0.0 if task.greedy else self.temperature

    def _take_question(self, task: Task, prompt: list[int], tokens: list[int]) -> None:
        """Put the question that was written into the task, or end the task."""
        stop = self._end_of_question()
        ended = bool(tokens) and tokens[-1] in self._ends
        tokens = tokens[:-1] if ended else tokens
        self.counts.questions += 1
        reason = CONTROL if self._control & set(tokens) else None
        words = self._words(prompt, tokens)
        if stop and stop in words:
            words, ended = words.partition(stop)[0], True
        reason = reason or (None if ended else CUT) or task.ask(words.strip(), self.asked)
        if reason is None and self._room(len(self._prompt(task))) < 1:
            task.messages.pop()
            reason = CUT
        if reason is None:
            self.counts.in_vain = 0
        else:
            self.counts.drop(task, reason)

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
        if ended and task.to_write:
            task.done = self._room(len(self._prompt(task)), question=True) < 1

    def _words(self, prompt: list[int], tokens: list[int]) -> str:
        """Tokens as text; behind their prompt, for some tokenizers drop a space at the very beginning."""
        before, both, alone = (
            self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            for ids in (prompt, prompt + tokens, tokens)
        )
        return both[len(before) :] if both.startswith(before) else alone


def writes_in_place(model: Any) -> bool:
    """Whether a cache of fixed size pays: on a GPU one that grows is copied in every step. Heads bring their own."""
    return model.device.type != "cpu" and not hasattr(model, "drafter") and model._can_compile_fullgraph


def question_end(tokenizer: Any, encoder: Callable[[], ChatEncoder]) -> tuple[str, bool]:
    """What ends a user's turn in the chat template, and whether it is a special token.

    Args:
        tokenizer: the base's.
        encoder: makes its `ChatEncoder`.

    Raises:
        ValueError: there is no chat template, or it does not show a lone question.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError(
            f"the tokenizer of {tokenizer.name_or_path!r} has no chat template, which tells where a base would write a "
            "question: give the one it was trained with (--chat-template FILE, tokenizer.chat_template), or questions "
            "(--data)."
        )
    try:
        chats = encoder()
        chats.before_question([])
        end, is_token = chats.end_of_question()
        if not end:
            raise Refused("the chat template puts nothing behind a user's words")
        return end, is_token
    except Refused as reason:
        raise ValueError(f"the base cannot write questions ({reason}): give questions (--data).") from None


class RowDraws(LogitsProcessor):
    """Makes the greedy choice a draw from the processed distribution, for the rows with a temperature.

    The token drawn is the first whose cumulative probability exceeds a uniform number. The numbers of a row come from
    a key of its own, so neither the batch nor the place where an interrupted run was resumed can change the draw; and
    there is one for each position, not one for each token of the vocabulary.

    Args:
        uniforms: (B, D) between 0 and 1.
        temperatures: (B, 1), 0 for rows that stay greedy.
        prompt_length: P.
        top_p: 1.0 keeps all tokens.
    """

    def __init__(self, uniforms: torch.Tensor, temperatures: torch.Tensor, prompt_length: int, top_p: float) -> None:
        self.uniforms, self.temperatures = uniforms, temperatures
        self.prompt_length, self.top_p = prompt_length, top_p

    @classmethod
    def of(
        cls, keys: list[str], prompt_length: int, new_tokens: int, temperatures: list[float], top_p: float
    ) -> "RowDraws":
        """The draws of rows with these keys, D = `new_tokens`."""
        uniforms = []
        for key in keys:
            seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=7).digest(), "big")
            uniforms.append(torch.rand(new_tokens, generator=torch.Generator().manual_seed(seed)))
        return cls(torch.stack(uniforms), torch.tensor(temperatures)[:, None], prompt_length, top_p)

    def for_rows(self, rows: list[int]) -> "RowDraws":
        """The draws of some rows of the batch only, for decoding in which each row advances at its own pace."""
        return RowDraws(self.uniforms[rows], self.temperatures[rows], self.prompt_length, self.top_p)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores (B, V) whose greatest is the token chosen."""
        if self.uniforms.device != scores.device:
            self.uniforms, self.temperatures = self.uniforms.to(scores.device), self.temperatures.to(scores.device)
        sampled = self.temperatures > 0
        scaled = scores.float() / torch.where(sampled, self.temperatures, 1.0)
        if self.top_p < 1:
            scaled = TopPLogitsWarper(self.top_p)(input_ids, scaled)
        below = scaled.softmax(-1).cumsum(-1)
        whole = below[:, -1:]
        position = input_ids.shape[1] - self.prompt_length
        at = (self.uniforms[:, position, None] * whole).minimum(whole.nextafter(torch.zeros_like(whole)))
        token = torch.where(sampled, torch.searchsorted(below, at, right=True), scores.argmax(-1, keepdim=True))
        return torch.full_like(scores, -torch.inf).scatter_(1, token, 0.0)
