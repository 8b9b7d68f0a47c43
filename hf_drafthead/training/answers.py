"""Who answers: the questions of chats, the base's own questions, or the beginnings of texts.

Questions are written as Magpie does (arXiv 2406.08464): the chat template up to where a user's words would stand, is
sampled from until the turn ends. A base without a chat template writes the beginnings of plain texts in their place,
sampled from where its tokenizer begins a text.

Greedy or sampled, the answers of a model in this process depend on the row, the settings and the seed alone: not on the
other rows of its batch, nor on where a run was interrupted. The limit is rounding: in another batch a row is padded
differently, which can exchange two nearly equal logits, more often in half precision.

Shapes: B rows, P positions of the longest prompt, D new tokens, V vocabulary.
"""

import copy
import hashlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from transformers import LogitsProcessor, LogitsProcessorList, StopStringCriteria, TopPLogitsWarper

from hf_drafthead.data.chats import Chat, Refused, asked_in
from hf_drafthead.data.rows import as_row
from hf_drafthead.data.texts import beginning_of, same_words, why_no_question
from hf_drafthead.training import templates
from hf_drafthead.training.collect import DistillReport
from hf_drafthead.training.templates import ChatEncoder, frame
from hf_drafthead.trees.rank_paths import PAD, left_padded

EMPTY = "the answer is empty"
CUT_WHILE_THINKING = "the answer was cut while the base was thinking: raise max_new_tokens"
HIDDEN_THOUGHTS = (
    "the server returns thoughts apart from the answers, and the base's chat template does not show them: start the "
    "server without a reasoning parser, or give the template that the base was trained with"
)
# Of a generation config, what does not make the text another, but returns it otherwise, searches for several, needs
# more than token ids, or serves one row alone; with the values that write one text for each prompt, from its tokens.
ONE_TEXT: dict[str, Any] = {
    **dict.fromkeys(("num_return_sequences", "num_beams"), 1),
    **dict.fromkeys(("return_dict_in_generate", "output_scores", "output_logits", "early_stopping"), False),
    **dict.fromkeys(("output_attentions", "output_hidden_states", "low_memory", "token_healing", "use_mtp"), False),
    "is_assistant": False,
    **dict.fromkeys(("num_beam_groups", "diversity_penalty", "constraints", "force_words_ids", "penalty_alpha")),
    **dict.fromkeys(("dola_layers", "max_time", "stop_strings", "prompt_lookup_num_tokens", "speculation_type")),
    **dict.fromkeys(("assistant_early_exit", "cache_implementation", "cache_config", "max_cache_len")),
    **dict.fromkeys(("compile_config", "prefill_chunk_size")),
    "forced_eos_token_id": None,  # which makes an answer that is cut look like one that has ended
    "use_cache": True,
}
DUPLICATE, CUT, CONTROL = "duplicate", "cut", "control tokens"  # why questions are dropped


@dataclass(frozen=True)
class Sampling:
    """How answers are written, and questions where the base writes these too; see `distill`."""

    max_new_tokens: int
    temperature: float
    top_p: float = 1.0
    seed: int = 0
    max_length: int | None = None
    prompt_tokens: int = 1
    question_tokens: int = 96
    turns: int | None = None  # None where the questions are given

    def __post_init__(self) -> None:
        at_least_one(max_new_tokens=self.max_new_tokens, prompt_tokens=self.prompt_tokens)
        if self.temperature < 0:
            raise ValueError(f"temperature is {self.temperature}: expected 0 for greedy, or a number above it.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}: expected a number above 0, at most 1.")
        if self.turns is not None:
            at_least_one(turns=self.turns, question_tokens=self.question_tokens)


def at_least_one(**counts: int) -> None:
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name} is {value}: expected at least 1.")


@dataclass
class Task:
    """A row that is being answered: the questions that are not asked yet, the turns so far; or the given beginning of a
    text, and that with its continuation, whose tokens are `ids`. `to_write`: questions, or beginnings of texts
    (`plain`), that the base is still to write; `refused`: why there is no answer at all."""

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
    plain: bool = False
    greedy: bool = False

    @property
    def asks(self) -> bool:
        """Whether the next thing to write is a question, or the beginning of a text."""
        return self.to_write > 0 and (not self.messages or self.messages[-1]["role"] == "assistant")

    def to_row(self) -> dict[str, Any]:
        if self.given is None:
            return {"row": self.index, "messages": self.messages, **({"tools": self.tools} if self.tools else {})}
        written = {} if self.ids is None else {"ids": self.ids}
        return {"row": self.index, "text": self.text, "given": len(self.given), **written}


class Answer(NamedTuple):
    """What was written: words, and whether it ended by itself; the tokens' ids, thought and calls of tools if known."""

    words: str
    ended: bool
    tokens: int
    ids: list[int] | None = None
    thought: str = ""
    calls: list[dict[str, Any]] | None = None


class Writer:
    """What all that answer have in common: they begin tasks, and take what was written into them. `asked` holds
    `same_words` of questions that are not to be asked again, `in_vain` counts chats without a question in a row; after
    `most_refused` rows that may not be asked, with none answered, a run ends."""

    most_refused: int | None = None
    writes_texts = True  # where there is no chat template

    def __init__(self, tokenizer: Any, sampling: Sampling) -> None:
        self.tokenizer, self.sampling = tokenizer, sampling
        self.report, self.asked, self.in_vain = DistillReport(), set[int](), 0
        self.bare = None if tokenizer is None else templates.without_post_processor(tokenizer)
        self.chats: ChatEncoder | None = None
        self.question_end, self.ends_with_token = "", False
        if sampling.turns is not None:
            self._begin_questions()
        elif getattr(tokenizer, "chat_template", None):
            with suppress(ValueError):  # told at the first chat: texts do without
                self.chats = ChatEncoder(tokenizer)

    def _begin_questions(self) -> None:
        if getattr(self.tokenizer, "chat_template", None) is None:
            lacking = f"the tokenizer of {self.tokenizer.name_or_path!r} has no chat template"
            why = "" if self.beginning() else ", and no token with which a text begins or ends"
            if (self.sampling.turns or 0) > 1:
                why = ", so that the base writes plain texts, which have no turns"
            if not self.writes_texts:
                why = ", which tells where a base would write a question"
            if why:
                raise ValueError(
                    f"{lacking}{why}: give the one it was trained with ({templates.GIVE_IT}), or data (--data)."
                )
            return
        try:
            self.chats = ChatEncoder(self.tokenizer)
            self.chats.before_question([])
            self.question_end, self.ends_with_token = self.chats.end_of_question()
            if not self.question_end:
                raise Refused("the chat template puts nothing behind a user's words")
        except ValueError as reason:
            why = str(reason).rstrip(".")
            raise ValueError(f"the base cannot write questions ({why}): give questions (--data).") from None

    def beginning(self) -> list[int]:
        """The tokens that begin a text of the base's own, or that end the one before."""
        begin, end = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        return frame(self.tokenizer)[0] or [token for token in (begin, end) if token is not None][:1]

    def begin(self, index: int, row: Mapping[str, Any]) -> Task:
        """A task for a row, whose answers are ignored; Refused where it holds nothing that can be asked."""
        row = row if {"tools", "given", "unused"} <= set(row) else as_row(row)
        if row["messages"] is not None or row["turns"] is not None:
            asked = self.fitted(asked_in(row))
            system = [turn for turn in asked.messages if turn["role"] == "system"]
            first, *later = [turn["content"] for turn in asked.messages if turn["role"] == "user"]
            return Task(index, later, [*system, {"role": "user", "content": first}], tools=asked.tools)
        if not row["text"]:
            raise Refused("it has neither messages nor text")
        if row["given"]:
            return Task(index, given=row["text"][: row["given"]])
        if self.bare is None:
            raise ValueError(
                f"row {index} is a plain text, of which the first {self.sampling.prompt_tokens} tokens are given: "
                "name the base too (hf-drafthead distill MODEL --endpoint ...), whose tokenizer finds them."
            )
        return Task(index, given=beginning_of(self.bare, row["text"], self.sampling.prompt_tokens))

    def begin_own(self, index: int) -> Task:
        """A task of which the base writes the questions too; every second one has greedy answers."""
        return Task(index, to_write=self.sampling.turns or 0, plain=self.chats is None, greedy=index % 2 == 0)

    def answer(self, tasks: list[Task]) -> None:
        """Write the next answer or question of some of these tasks, at least of one; what ends becomes `done`."""
        raise NotImplementedError

    def close(self) -> None:
        """Nothing is answered any more."""

    def fitted(self, chat: Chat) -> Chat:
        return chat if self.chats is None else self.chats.fit(chat)

    def has_room(self, task: Task) -> bool:
        return True

    def temperature(self, task: Task) -> float:
        return 1.0 if task.asks else 0.0 if task.greedy else self.sampling.temperature

    def key(self, task: Task) -> str:
        """What the random numbers of the next thing to write depend on."""
        return f"{self.sampling.seed}/{task.index}/{'question' * task.asks}{task.answers}"

    def take_question(self, task: Task, words: str, ended: bool, controls: bool) -> None:
        """Put a question into the task, or end the task before it where it was cut, has control tokens or is none."""
        self.report.questions += 1
        words = words if task.plain else words.strip()
        reason = CONTROL if controls else why_no_question(words) if ended else CUT
        if not task.messages and reason is None:
            reason = DUPLICATE if same_words(words) in self.asked else None
            self.asked.add(same_words(words))
        if reason is None:
            before = task.messages
            task.to_write -= 1
            task.given = words if task.plain else None
            task.messages = before if task.plain else [*before, {"role": "user", "content": words}]
            if self.has_room(task):
                self.in_vain = 0
                return
            task.given, task.messages, reason = None, before, CUT
        self.report.dropped[reason] += 1
        task.done = True
        if not task.messages:
            task.refused = reason
            self.in_vain += 1

    def take(self, task: Task, answer: Answer) -> None:
        """Put an answer into the task, and the next question behind it; without one, or room for it, the task ends."""
        self.report.answers += 1
        self.report.cut += not answer.ended
        self.report.tokens += answer.tokens
        task.done, task.answers = True, task.answers + 1
        # half a character may stand where an answer was cut
        words = answer.words if answer.ended else answer.words.rstrip("\N{REPLACEMENT CHARACTER}")
        if task.given is not None:
            task.text, task.ids = task.given + words, answer.ids
            task.refused = None if words or answer.ids else EMPTY
            return
        if self.chats is not None:
            chats = self.chats.of(task.tools)
            words = words.removeprefix(chats.lead)
            words = words.removesuffix(chats.trail) if answer.ended else words
        turn: dict[str, Any] = {"role": "assistant", "content": words}
        turn |= {} if answer.ids is None else {"ids": answer.ids}
        turn |= {"reasoning_content": answer.thought} if answer.thought.strip() else {}
        turn |= {"tool_calls": answer.calls} if answer.calls else {}
        if reason := self._why_unusable(task, answer, turn):
            self.report.unusable[reason] += 1
            if task.answers > 1:
                task.messages.pop()  # the chat ends with the answer before
            else:
                task.refused = reason
            return
        task.messages.append(turn if answer.ended else {**turn, "cut": True})
        if not answer.ended or answer.calls:  # nobody answers the calls
            return
        asked = [{"role": "user", "content": task.questions.pop(0)}] if task.questions else []
        task.messages += asked
        task.done = not ((asked or task.to_write) and self.has_room(task))
        if task.done and asked:
            task.messages.pop()

    def _why_unusable(self, task: Task, answer: Answer, turn: dict[str, Any]) -> str | None:
        """Why an answer cannot be trained on: it says nothing, or the base's template does not show all of it."""
        if not turn["content"].strip() and not answer.calls:
            return CUT_WHILE_THINKING if answer.thought.strip() and not answer.ended else EMPTY
        if self.chats is None or answer.ids is not None:
            return None
        try:
            fitted = self.chats.fit(Chat([task.messages[-1], turn], tools=task.tools))
        except Refused as reason:
            return str(reason)
        return HIDDEN_THOUGHTS if templates.THOUGHTS_LEFT_OUT in fitted.mapped else None


class Answerer(Writer):
    """A model in this process, with draft heads or without, which answers in batches."""

    def __init__(self, model: Any, tokenizer: Any, sampling: Sampling) -> None:
        super().__init__(tokenizer, sampling)
        self.model = model
        self._first, _ = frame(tokenizer)
        eos = model.generation_config.eos_token_id
        self._ends = {*(eos if isinstance(eos, list) else [eos]), tokenizer.eos_token_id} - {None}
        ends = [self.question_end] * self.ends_with_token
        if self.chats is not None:
            ends.append(self.chats.end_of_turn)
            with suppress(ValueError):  # told at the first chat with tools
                ends.append(self.chats.of(templates.TOOLS).end_of_turn)
        for end in ends:
            self._ends |= set(self._ids(end)[-1:])
        self._control = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
        if sampling.turns and not self.has_room(first := self.begin_own(0)):
            raise ValueError(
                f"max_length is {sampling.max_length}, but the {'text' if first.plain else 'chat template'} has "
                f"{len(self._prompt(first))} tokens before a {'word' if first.plain else 'question'}: give more."
            )

    def begin(self, index: int, row: Mapping[str, Any]) -> Task:
        """As `Writer.begin`; also refuses a prompt that is too long, or that the base cannot embed."""
        task = super().begin(index, row)
        prompt = self._prompt(task)
        templates.refuse_unknown(self.tokenizer, prompt, self.model.config.get_text_config().vocab_size)
        if self._room(task, prompt) < 1:
            most = self.sampling.max_length
            raise Refused(f"its prompt of {len(prompt)} tokens leaves no room for an answer in {most}")
        return task

    def answer(self, tasks: list[Task]) -> None:
        """Write every task's next answer, or its next question. Tasks of one limit are one batch."""
        prompts = [self._prompt(task) for task in tasks]
        limits = [self._room(task, prompt) for task, prompt in zip(tasks, prompts)]
        for limit in sorted(set(limits)):
            part = [number for number, its_limit in enumerate(limits) if its_limit == limit]
            written = self._generate([tasks[number] for number in part], [prompts[number] for number in part], limit)
            for number, ids in zip(part, written):
                self.take_ids(tasks[number], prompts[number], ids)

    def take_ids(self, task: Task, prompt: list[int], ids: list[int]) -> None:
        """Put what was written behind a prompt into the task."""
        ended = bool(ids) and ids[-1] in self._ends
        within = ids[:-1] if ended else ids
        words = self._words(prompt, within)
        if not task.asks:
            strings = self.model.generation_config.stop_strings or ()
            held = (string in words for string in ([strings] if isinstance(strings, str) else strings))
            stopped = not ended and any(held)
            # behind a stop string no token ends the turn, so that the tokens alone do not show where it ends
            answer_ids = None if stopped and task.given is None else ids
            self.take(task, Answer(words, ended or stopped, len(ids), answer_ids))
            return
        if task.plain:  # its beginning ends anywhere
            words, ended = words.rstrip("\N{REPLACEMENT CHARACTER}"), True
        elif not self.ends_with_token and self.question_end in words:
            words, ended = words.partition(self.question_end)[0], True
        self.take_question(task, words, ended, controls=bool(self._control & set(within)))

    def fitted(self, chat: Chat) -> Chat:
        return (self.chats or ChatEncoder(self.tokenizer)).fit(chat)  # which says that there is no template

    def has_room(self, task: Task) -> bool:
        return self._room(task, self._prompt(task)) > 0

    def _ids(self, text: str) -> list[int]:
        return self.bare(text, add_special_tokens=False, verbose=False)["input_ids"]  # type: ignore[misc, no-any-return]

    def _prompt(self, task: Task) -> list[int]:
        if task.given is not None:
            return self._first + self._ids(task.given)
        if task.plain:
            return self.beginning()
        assert self.chats is not None
        if task.asks:
            return self._ids(self.chats.before_question(task.messages))
        return self._ids(self.chats.render(task.messages, prompt=True, tools=task.tools))

    def _room(self, task: Task, prompt: list[int]) -> int:
        most = self.sampling.question_tokens if task.asks else self.sampling.max_new_tokens
        return most if self.sampling.max_length is None else min(most, self.sampling.max_length - len(prompt))

    def _generate(self, tasks: list[Task], prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        """What the model writes after each prompt, up to and including the token that ends it."""
        batch, width = left_padded(self.model, [torch.tensor(prompt) for prompt in prompts]), max(map(len, prompts))
        processors = LogitsProcessorList()
        temperatures = [self.temperature(task) for task in tasks]
        if any(temperatures):
            keys = [self.key(task) for task in tasks]
            processors.append(RowDraws(keys, width, new_tokens, temperatures, self.sampling.top_p))
        settings: dict[str, Any] = {**one_text(self.model), "max_new_tokens": new_tokens, "do_sample": False}
        settings |= {"eos_token_id": sorted(self._ends) or None, "pad_token_id": PAD, "return_dict_in_generate": True}
        if writes_in_place(self.model):
            settings |= {"cache_implementation": "static", "disable_compile": True}
        if strings := self.model.generation_config.stop_strings:
            settings |= {"stop_strings": strings, "tokenizer": self.tokenizer}
        output = self.model.generate(**batch, logits_processor=processors, **settings)
        self.model.__dict__.pop("_cache", None)  # of this batch's size, where it was static
        accepted = getattr(output, "accepted_lengths", None)
        if accepted is not None:
            self.report.steps += int((accepted > 0).sum())
            self.report.step_tokens += int(accepted.sum())
        written = []
        for row in output.sequences:
            tokens = row[width:].tolist()
            length = next((place + 1 for place, token in enumerate(tokens) if token in self._ends), len(tokens))
            if strings:
                holds: Any = StopStringCriteria(self.tokenizer, strings)
                behind = range(1, length + 1)
                length = next((at for at in behind if bool(holds(row[None, : width + at], None).any())), length)
            written.append(tokens[:length])
        return written

    def _words(self, prompt: list[int], tokens: list[int]) -> str:
        """Tokens as text; behind their prompt, for some tokenizers drop a space at the very beginning."""
        before, both, alone = (
            self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            for ids in (prompt, prompt + tokens, tokens)
        )
        return both[len(before) :] if both.startswith(before) else alone


def one_text(model: Any) -> dict[str, Any]:
    """Settings with which a model writes one text for each prompt, whatever its generation config says."""
    stored = vars(model.generation_config)
    return {name: value for name, value in ONE_TEXT.items() if name in stored and stored[name] not in (None, value)}


def writes_in_place(model: Any) -> bool:
    """Whether a cache of fixed size pays: on a GPU one that grows is copied in every step. Heads bring their own."""
    return model.device.type != "cpu" and not hasattr(model, "drafter") and model._can_compile_fullgraph


class RowDraws(LogitsProcessor):
    """Makes the greedy choice a draw from the processed distribution, for the rows with a temperature: the first token
    whose cumulative probability exceeds a uniform number, of which each row has its own by its key and position."""

    def __init__(
        self, keys: list[str], prompt_length: int, new_tokens: int, temperatures: list[float], top_p: float
    ) -> None:
        self.prompt_length, self.top_p = prompt_length, top_p
        seeds = [int.from_bytes(hashlib.blake2b(key.encode(), digest_size=7).digest(), "big") for key in keys]
        draws = [torch.rand(new_tokens, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        self.uniforms, self.temperatures = torch.stack(draws), torch.tensor(temperatures)[:, None]

    def for_rows(self, rows: list[int]) -> "RowDraws":
        """The draws of some rows of the batch only, for decoding in which each row advances at its own pace."""
        part = copy.copy(self)
        part.uniforms, part.temperatures = self.uniforms[rows], self.temperatures[rows]
        return part

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
