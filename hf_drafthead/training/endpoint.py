"""A server with the API of OpenAI that answers in place of a model in this process, many requests at once.

Such servers are vLLM, SGLang, TGI, `transformers serve` and `hf-drafthead serve`.

The rows are those of a model in this process, without the tokens of the answers, which such a server does not return.
"""

import asyncio
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from hf_drafthead.data.rows import THOUGHTS, calls_of
from hf_drafthead.training.answers import CONTROL, CUT, Answer, Sampling, Task, Writer
from hf_drafthead.training.templates import frame

RESUMES = "the same command resumes."
TIMEOUT = 600.0  # seconds for one answer
# Servers have many words for an answer that ended by itself (stop, eos_token, stop_sequence, end_turn, COMPLETE), and
# for one that was broken off by a limit, a filter or a failure; all of the latter have one of these in them.
BROKEN_OFF = (
    "length max limit trunc incomplete filter safety recitation block prohibit spii refus abort cancel error time "
    "resource overload pause exceed malformed unexpected disconnect preempt"
).split()
ENDED = ("stop", "eos", "end", "complete", "call", "tool")


@dataclass(frozen=True)
class Server:
    """A server that `distill` asks; its key is read from the environment variable OPENAI_API_KEY.

    For the model's own chats it must complete raw prompts (`/completions`): questions are what it writes behind the
    beginning of the base's chat template, answers come from `/chat/completions`. A request that failed is sent again,
    after a pause that doubles, so many times before the run ends; `template_values` are variables that the server's
    chat template reads. An OSError where the package `openai` is missing.
    """

    url: str
    model: str
    retries: int = 8
    template_values: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if find_spec("openai") is None:
            raise OSError("--endpoint needs the package openai: pip install 'hf-drafthead[endpoint]'.")


class ServerWriter(Writer):
    """Asks a server, which may ignore the seed. The tokenizer may be None where the data holds no plain texts and the
    base writes no questions; it also takes the white space of its chat template off the answers."""

    most_refused = 20
    writes_texts = False  # some servers refuse an empty prompt

    def __init__(self, server: Server, tokenizer: Any, sampling: Sampling) -> None:
        super().__init__(tokenizer, sampling)
        self.server = server
        self._openai = import_module("openai")  # an optional dependency, needed only here
        self._client = self._openai.AsyncOpenAI(
            base_url=with_path(server.url),
            api_key=os.environ.get("OPENAI_API_KEY") or "none",
            max_retries=server.retries,
            timeout=TIMEOUT,
        )
        self._loop = asyncio.new_event_loop()
        self._pending: dict[int, asyncio.Task[None]] = {}

    def answer(self, tasks: list[Task]) -> None:
        """Ask for what is to be written next of all tasks, and wait for some of it; OSError where the server fails."""
        self._loop.run_until_complete(self._answer_some(tasks))

    def close(self) -> None:
        self._loop.run_until_complete(self._end())
        self._loop.close()

    async def _end(self) -> None:
        for request in self._pending.values():
            request.cancel()
        await asyncio.gather(*self._pending.values(), return_exceptions=True)
        await self._client.close()

    async def _answer_some(self, tasks: list[Task]) -> None:
        for task in tasks:
            if task.index not in self._pending:
                self._pending[task.index] = asyncio.create_task(self._write(task))
        done, _ = await asyncio.wait(self._pending.values(), return_when=asyncio.FIRST_COMPLETED)
        answered = [index for index, request in self._pending.items() if request in done and not request.exception()]
        for index in answered:
            del self._pending[index]
        if not answered:  # what came with a failure is kept before the run ends
            done.pop().result()

    async def _write(self, task: Task) -> None:
        try:
            await (self._question if task.asks else self._answer)(task)
        except self._openai.BadRequestError as error:  # too long, for instance
            task.done = True
            if task.answers == 0:
                task.refused = f"the server refuses it ({_reason(error)})"
            elif not task.asks:
                task.messages.pop()  # a question that there is no room for
        except self._openai.APIStatusError as error:
            what = f"--endpoint, --model {self.server.model!r} and OPENAI_API_KEY"
            what += ", and whether the server completes raw prompts (/completions)" if task.asks else ""
            why = f"{error.status_code} ({_reason(error)})"
            raise OSError(f"the server at {self.server.url!r} answers {why}: check {what}; {RESUMES}") from error
        except (self._openai.APIError, json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
            what = f"the server at {self.server.url!r} does not answer ({_reason(error)})"
            raise OSError(f"{what}: start it, then give the same command again, which resumes.") from error

    async def _asked(self, path: str, task: Task, limit: int, **body: Any) -> tuple[Any, str, bool, int]:
        """What the server writes: its message or None, the text, whether that ended by itself, the number of tokens."""
        body |= {"model": self.server.model, "max_tokens": limit, "temperature": self.temperature(task)}
        if body["temperature"]:
            number = int.from_bytes(hashlib.blake2b(self.key(task).encode(), digest_size=4).digest(), "big")
            body |= {"seed": number >> 1} | ({} if task.asks else {"top_p": self.sampling.top_p})
        where = f"the server at {self.server.url!r}"
        # as the server sends it, for servers differ in what they leave out
        done = await self._client.post(path, cast_to=object, body=body)
        choice = next(iter(_listed(_field(done, "choices"))), None)
        message, text = _field(choice, "message"), _field(choice, "text")
        if message is None and text is None:
            raise OSError(f"{where} answers with no text ({str(done)[:60]!r}): check --endpoint; {RESUMES}")
        tokens = _field(_field(done, "usage"), "completion_tokens")
        tokens = tokens if isinstance(tokens, int) else 0
        words = _text(text if message is None else _field(message, "content"))
        return message, words, has_ended(_field(choice, "finish_reason"), tokens >= limit), tokens

    async def _question(self, task: Task) -> None:
        assert self.chats is not None
        prompt = self.chats.before_question(task.messages)
        begin = getattr(self.tokenizer, "bos_token", None)
        if begin and frame(self.tokenizer)[0]:  # the server puts it in front of every prompt
            prompt = prompt.removeprefix(begin)
        how: dict[str, Any] = {"prompt": prompt, "stop": [self.question_end]}
        _, words, ended, _ = await self._asked("/completions", task, self.sampling.question_tokens, **how)
        words, end, _ = words.partition(self.question_end)  # some servers return it
        special = {str(token) for token in self.tokenizer.added_tokens_decoder.values()}
        reason = None if ended or end else CUT
        self.take_question(task, words.strip(), CONTROL if any(token in words for token in special) else reason)

    async def _answer(self, task: Task) -> None:
        if task.given is not None:
            path, body = "/completions", dict[str, Any](prompt=task.given)
        else:
            messages = [{"role": turn["role"], "content": turn["content"]} for turn in task.messages]
            path, body = "/chat/completions", {"messages": messages, **({"tools": task.tools} if task.tools else {})}
            values = self.server.template_values
            body |= {"chat_template_kwargs": values} if values else {}
        message, words, ended, tokens = await self._asked(path, task, self.sampling.max_new_tokens, **body)
        if ended and self.chats is not None and self.chats.end_of_turn.strip():  # some servers return it
            words = words.removesuffix(self.chats.of(task.tools).end_of_turn)
        holders = [message, *_listed(_field(message, "content"))]  # a part may be the thought
        names = {True: (*THOUGHTS, "text"), False: THOUGHTS}
        thoughts = (_text(_field(holder, name)) for holder in holders for name in names[_thinks(holder)])
        calls = _field(message, "tool_calls") or _field(message, "function_call")  # as it was called before
        calls = calls_of(_listed(calls)) if calls else []
        self.take(task, Answer(words, ended, tokens, None, next(filter(None, thoughts), ""), calls))


def has_ended(reason: Any, limit_reached: bool) -> bool:
    """Whether an answer ended by itself, by the reason that a server gives; where it gives none that is known, whether
    it stayed below the limit.

    >>> [has_ended(reason, False) for reason in ("stop", "eos_token", "MAX_TOKENS", "content_filter", None)]
    [True, True, False, False, True]
    >>> has_ended("stop", True), has_ended(None, True)
    (True, False)
    """
    word = str(_field(reason, "type") or reason or "").lower()
    if any(part in word for part in BROKEN_OFF):
        return False
    return not limit_reached or any(part in word for part in ENDED)


def _field(holder: Any, name: str) -> Any:
    return holder.get(name) if isinstance(holder, Mapping) else None


def _text(content: Any) -> str:
    """A text, which some servers give in parts; thoughts among them, and those of another kind, are left out."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(map(_text, content))
    if content is None or _thinks(content):
        return ""
    return next(filter(None, (_text(_field(content, name)) for name in ("text", "value", "content"))), "")


def _thinks(part: Any) -> bool:
    kind = str(_field(part, "type")).lower()
    return "think" in kind or "reason" in kind


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


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


def _reason(error: Exception) -> str:
    cause = f": {error.__cause__}" if error.__cause__ is not None else ""
    return " ".join(f"{error}{cause}".split())[:300].rstrip(".")
