"""Self-distillation through a server with the API of OpenAI, with many requests at once.

Such servers are vLLM, SGLang, TGI, `transformers serve` and `hf-drafthead serve`.

The rows are those of `distill`, without the tokens of the answers, which such a server does not return.
"""

import asyncio
import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from hf_drafthead.data.chats import Chat, Refused
from hf_drafthead.data.rows import THOUGHTS, as_row, data_hash
from hf_drafthead.data.texts import beginning_of
from hf_drafthead.training.answers import CONTROL, CUT, EMPTY, Counts, Task, question_end, questions_of
from hf_drafthead.training.collect import UNFIT_IN_A_ROW, DistillReport, Shards, Todo, collect, own_rows, own_share
from hf_drafthead.training.distill import check_choices, is_greedy, own_choices
from hf_drafthead.training.templates import THOUGHTS_LEFT_OUT, ChatEncoder, frame, without_post_processor

CUT_WHILE_THINKING = "the answer was cut while the base was thinking: raise max_new_tokens"
HIDDEN_THOUGHTS = (
    "the server returns thoughts apart from the answers, and the base's chat template does not show them: start the "
    "server without a reasoning parser, or give the template that the base was trained with"
)
REFUSALS = 20  # refused rows, with none answered, after which the run ends
TIMEOUT = 600.0  # seconds for one answer


def distill_from_endpoint(
    url: str,
    model: str,
    rows: Iterable[Mapping[str, Any]],
    output: str | Path,
    *,
    tokenizer: Any = None,
    max_new_tokens: int = 512,
    temperature: float = 0.0,
    top_p: float = 1.0,
    prompt_tokens: int = 64,
    seed: int = 0,
    concurrency: int = 32,
    retries: int = 8,
    progress: Callable[[], None] | None = None,
) -> DistillReport:
    """Let a server answer the data's questions, as `distill` lets a model in this process.

    Requests that fail (no connection, no answer in time, too many requests, an error of the server) are sent again
    after a pause that doubles. Answers are written as they arrive; the same call resumes a run that ended early.

    Args:
        url: of the server, such as `http://127.0.0.1:8000/v1`; `/v1` is added where it names no path.
        model: as the server calls it.
        rows, output: as for `distill`.
        tokenizer: the base's fast one: cuts plain texts after `prompt_tokens`, and takes the white space of its chat
            template off the answers; None where the data holds neither.
        max_new_tokens, temperature, top_p, prompt_tokens, seed: as for `distill`; a server may ignore the seed.
        concurrency: requests at once, in each process.
        retries: how often a failed request is sent again before the run ends.
        progress: called once for each row, in this process.

    A server's key is read from the environment variable OPENAI_API_KEY.

    Raises:
        OSError: the package `openai` is missing, the server cannot be reached, refuses the key or has no such model,
            or failed too often.
        ValueError: as `distill` does, or the server refuses every row.
    """
    counts = {"max_new_tokens": max_new_tokens, "prompt_tokens": prompt_tokens, "concurrency": concurrency}
    check_choices(temperature, top_p, **counts)
    if find_spec("openai") is None:
        raise OSError("--endpoint needs the package openai: pip install 'hf-drafthead[endpoint]'.")
    choices: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": float(temperature),
        "top_p": float(top_p),
        "prompt_tokens": prompt_tokens,
        "seed": seed,
    }
    tell = progress or (lambda: None)

    def work(todo: Todo, shards: Shards, report: DistillReport) -> Counts:
        asker = Asker(url, model, tokenizer, choices, retries)
        asyncio.run(_ask_all(asker, todo, shards, report, concurrency, tell))
        return asker.counts

    return collect(rows, output, {"endpoint_model": model, "data": data_hash(rows), **choices}, work, tell)


def synthesize_from_endpoint(
    url: str,
    model: str,
    count: int,
    output: str | Path,
    *,
    tokenizer: Any,
    turns: int = 1,
    greedy: float = 0.5,
    max_new_tokens: int = 512,
    question_tokens: int = 96,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
    concurrency: int = 32,
    retries: int = 8,
    progress: Callable[[], None] | None = None,
) -> DistillReport:
    """Let a server write chats from nothing, as `synthesize` lets a model in this process.

    The server must complete raw prompts (`/completions`): questions are what the model writes behind the beginning of
    the base's chat template, answers come from `/chat/completions`.

    Args:
        url, model, concurrency, retries, progress: as for `distill_from_endpoint`.
        count, output, turns, greedy, max_new_tokens, question_tokens, temperature, top_p, seed: as for `synthesize`.
        tokenizer: the base's fast one, with its chat template.

    Raises:
        OSError: as `distill_from_endpoint` does.
        ValueError: as `synthesize` does.
    """
    choices = own_choices(turns, greedy, max_new_tokens, question_tokens, temperature, top_p, seed)
    check_choices(temperature, top_p, count=count, concurrency=concurrency)
    if find_spec("openai") is None:
        raise OSError("--endpoint needs the package openai: pip install 'hf-drafthead[endpoint]'.")
    question_end(tokenizer, lambda: ChatEncoder(tokenizer))
    tell = progress or (lambda: None)

    def work(todo: Todo, shards: Shards, report: DistillReport) -> Counts:
        asker = Asker(url, model, tokenizer, choices, retries)
        asker.asked |= shards.asked()
        own = own_rows(count, max(UNFIT_IN_A_ROW, 4 * concurrency), shards, asker.counts, report)
        asyncio.run(_ask_all(asker, own, shards, report, concurrency, tell, own_share(count, shards)))
        return asker.counts

    return collect((), output, {"endpoint_model": model, **choices}, work, tell, own=True)


class Answer(NamedTuple):
    """What a server answers: words, thoughts and calls of tools apart, and whether it ended by itself."""

    words: str
    ended: bool
    tokens: int
    thought: str = ""
    calls: list[dict[str, Any]] | None = None


class Asker:
    """Asks a server for the answers of one task after the other.

    Args:
        url, model, tokenizer, retries: as for `distill_from_endpoint`.
        choices: its settings of sampling and lengths.
    """

    def __init__(self, url: str, model: str, tokenizer: Any, choices: Mapping[str, Any], retries: int) -> None:
        self.url, self.model, self.choices = url, model, choices
        self.counts, self.asked = Counts(), set[int]()
        self._bare = None if tokenizer is None else without_post_processor(tokenizer)
        template = None if tokenizer is None else getattr(tokenizer, "chat_template", None)
        self._chats = ChatEncoder(tokenizer) if template else None
        self._openai = import_module("openai")  # an optional dependency, needed only here
        self._client = self._openai.AsyncOpenAI(
            base_url=with_path(url),
            api_key=os.environ.get("OPENAI_API_KEY") or "none",
            max_retries=retries,
            timeout=TIMEOUT,
        )

    def begin(self, index: int, row: Mapping[str, Any]) -> Task:
        """A task for a row.

        Raises:
            Refused: it holds nothing that can be asked.
            ValueError: a plain text, and no tokenizer to cut it.
        """
        if "turns" in self.choices:
            return Task(index, to_write=self.choices["turns"], greedy=is_greedy(index, self.choices["greedy"]))
        row = as_row(row)
        asked = questions_of(row)
        if asked is not None:
            return Task.of_questions(index, asked if self._chats is None else self._chats.fit(asked))
        if row["given"]:
            return Task(index, given=row["text"][: row["given"]])
        if self._bare is None:
            raise ValueError(
                f"row {index} is a plain text, of which the first {self.choices['prompt_tokens']} tokens are given: "
                "name the base too (hf-drafthead distill MODEL --endpoint ...), whose tokenizer finds them."
            )
        return Task(index, given=beginning_of(self._bare, row["text"], self.choices["prompt_tokens"]))

    async def finish(self, task: Task) -> None:
        """Ask all remaining questions of a task.

        Raises:
            Refused: the server refuses the first question, as too long for instance.
            OSError: the server cannot be used, or failed too often.
        """
        while not task.done:
            try:
                if task.asks:
                    await self._question(task)
                    continue
                answer = await self._answer(task)
            except self._openai.BadRequestError as error:
                if task.answers == 0:
                    raise Refused(f"the server refuses it ({_said(error)})") from None
                if not task.asks:
                    task.messages.pop()  # a question that there is no room for
                task.done = True
                return
            except self._openai.APIStatusError as error:
                what = ", and whether the server completes raw prompts (/completions)" if task.asks else ""
                raise OSError(
                    f"the server at {self.url!r} answers {error.status_code} ({_said(error)}): check --endpoint, "
                    f"--model {self.model!r} and OPENAI_API_KEY{what}; the same command resumes."
                ) from error
            except self._openai.APIConnectionError as error:
                raise OSError(
                    f"the server at {self.url!r} does not answer ({_said(error)}): start it, then give the same "
                    "command again, which resumes."
                ) from error
            self.counts.answers += 1
            self.counts.cut += not answer.ended
            self.counts.tokens += answer.tokens
            self._take(task, answer)

    async def close(self) -> None:
        """End all connections."""
        await self._client.close()

    async def _question(self, task: Task) -> None:
        """Put a question that the server's model writes into the task, or end the task."""
        assert self._chats is not None
        end, _ = self._chats.end_of_question()
        prompt = self._chats.before_question(task.messages)
        begin = getattr(self._chats.tokenizer, "bos_token", None)
        if begin and frame(self._chats.tokenizer)[0]:  # the server puts it in front of every prompt
            prompt = prompt.removeprefix(begin)
        how = {"model": self.model, "max_tokens": self.choices["question_tokens"], "temperature": 1.0}
        key = f"{self.choices['seed']}/{task.index}/question{task.answers}"
        done = await self._client.completions.create(prompt=prompt, stop=[end], seed=_number(key), **how)
        words = (done.choices[0].text or "").strip()
        self.counts.questions += 1
        special = {str(token) for token in self._chats.tokenizer.added_tokens_decoder.values()}
        reason = CUT if done.choices[0].finish_reason != "stop" else None
        reason = CONTROL if any(token in words for token in special) else reason
        reason = reason or task.ask(words, self.asked)
        if reason is None:
            self.counts.in_vain = 0
        else:
            self.counts.drop(task, reason)

    async def _answer(self, task: Task) -> Answer:
        """The server's answer."""
        how: dict[str, Any] = {"model": self.model, "max_tokens": self.choices["max_new_tokens"]}
        how["temperature"] = 0.0 if task.greedy else self.choices["temperature"]
        if how["temperature"] > 0:
            key = f"{self.choices['seed']}/{task.index}/{task.answers}"
            how |= {"top_p": self.choices["top_p"], "seed": _number(key)}
        if task.given is not None:
            done = await self._client.completions.create(prompt=task.given, **how)
            more: dict[str, Any] = {"words": done.choices[0].text or ""}
        else:
            said = [{"role": turn["role"], "content": turn["content"]} for turn in task.messages]
            how |= {"tools": task.tools} if task.tools else {}
            done = await self._client.chat.completions.create(messages=said, **how)
            message = done.choices[0].message
            thoughts = (getattr(message, name, None) for name in THOUGHTS)
            calls = [call.model_dump(exclude_none=True) for call in message.tool_calls or ()]
            thought = next((found for found in thoughts if isinstance(found, str)), "")
            more = {"words": message.content or "", "thought": thought, "calls": calls}
        tokens = 0 if done.usage is None else done.usage.completion_tokens
        return Answer(ended=done.choices[0].finish_reason in ("stop", "tool_calls"), tokens=tokens, **more)

    def _take(self, task: Task, answer: Answer) -> None:
        words, ended = answer.words, answer.ended
        task.done = True
        task.answers += 1
        if not ended:
            words = words.rstrip("\N{REPLACEMENT CHARACTER}")  # half a character
        if task.given is not None:
            task.text, task.refused = task.given + words, None if words else EMPTY
            return
        if self._chats is not None:
            words = words.removeprefix(self._chats.lead)
        if not words.strip() and not answer.calls:
            cut_while_thinking = answer.thought.strip() and not ended
            return task.leave_unanswered(CUT_WHILE_THINKING if cut_while_thinking else EMPTY, self.counts)
        turn: dict[str, Any] = {"role": "assistant", "content": words}
        turn |= {"reasoning_content": answer.thought} if answer.thought.strip() else {}
        turn |= {"tool_calls": answer.calls} if answer.calls else {}
        if reason := self._why_not_shown([*task.messages, turn], task.tools):
            return task.leave_unanswered(reason, self.counts)
        task.messages.append(turn if ended else {**turn, "cut": True})
        if ended and task.questions and not answer.calls:  # nobody answers the calls
            task.messages.append({"role": "user", "content": task.questions.pop(0)})
            task.done = False
        if ended and task.to_write and not answer.calls:
            task.done = False

    def _why_not_shown(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str | None:
        """Why the last answer could not be trained on: the base's template does not show all of it; else None."""
        if self._chats is None:
            return None
        try:
            fitted = self._chats.fit(Chat(messages[-2:], tools=tools))
        except Refused as reason:
            return str(reason)
        return HIDDEN_THOUGHTS if THOUGHTS_LEFT_OUT in fitted.mapped else None


async def _ask_all(
    asker: Asker,
    todo: Todo,
    shards: Shards,
    report: DistillReport,
    concurrency: int,
    progress: Callable[[], None],
    most: int | None = None,
) -> None:
    """Work on so many tasks concurrently until no row is left; finished rows are written immediately.

    With `most` the server's model writes the questions, and what is finished beyond so many is left out.
    """

    async def work() -> None:
        for index, row in todo:  # all workers take from the same rows
            try:
                task = asker.begin(index, row)
                await asker.finish(task)
                if most is not None and (task.refused or report.written >= most):
                    continue
                if task.refused:
                    raise Refused(task.refused)
            except Refused as reason:
                report.refuse(index, reason)
                if report.refused >= REFUSALS and not report.written + report.found:
                    raise ValueError(
                        f"nothing can be asked: the first {REFUSALS} rows were refused ({'; '.join(report.refusals)})."
                    ) from None
            else:
                shards.write([task.to_row()])
                report.written += 1
            progress()

    workers = [asyncio.create_task(work()) for _ in range(concurrency)]
    try:
        await asyncio.gather(*workers)
    finally:
        for one in workers:
            one.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        await asker.close()


def with_path(url: str) -> str:
    """The address of the API: where it names no path, the usual one.

    >>> with_path("http://127.0.0.1:8000"), with_path("https://host/api/v3/")
    ('http://127.0.0.1:8000/v1', 'https://host/api/v3/')

    Raises:
        ValueError: it is no address.
    """
    scheme, separator, rest = url.partition("://")
    if scheme not in ("http", "https") or not separator or not rest.strip("/"):
        raise ValueError(f"--endpoint {url!r} is no address: give one such as http://127.0.0.1:8000/v1.")
    return url if "/" in rest.rstrip("/") else f"{url.rstrip('/')}/v1"


def _number(key: str) -> int:
    """A seed that depends on the key alone."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest(), "big") >> 1


def _said(error: Exception) -> str:
    """What went wrong, on one line."""
    cause = f": {error.__cause__}" if error.__cause__ is not None else ""
    return " ".join(f"{error}{cause}".split())[:300].rstrip(".")
