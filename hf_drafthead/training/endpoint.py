"""A server with the API of OpenAI that answers in place of a model in this process, many requests at once.

Such servers are vLLM, SGLang, TGI, `transformers serve` and `hf-drafthead serve`.

The rows are those of a model in this process, without the tokens of the answers, which such a server does not return.
"""

import asyncio
import hashlib
import json
import os
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from hf_drafthead.data.rows import THOUGHTS, calls_of
from hf_drafthead.training.answers import Answer, Sampling, Task, Writer
from hf_drafthead.training.templates import frame

RESUMES = "the same command resumes."
TIMEOUT = 600.0  # seconds for one answer
CUTS = ("length", "content_filter")  # of the reasons that servers give for an end; an end of text has many names


@dataclass(frozen=True)
class Server:
    """A server that `distill` asks; its key is read from the environment variable OPENAI_API_KEY.

    For the model's own chats it must complete raw prompts (`/completions`): questions are what it writes behind the
    beginning of the base's chat template, answers come from `/chat/completions`. A request that failed is sent again,
    after a pause that doubles, so many times before the run ends; `template_values` are variables that the server's
    chat template reads. An ImportError where the package `openai`
    is missing.
    """

    url: str
    model: str
    retries: int = 8
    template_values: dict[str, Any] = field(default_factory=dict)


class ServerWriter(Writer):
    """Asks a server, which may ignore the seed. The tokenizer may be None for chats whose questions are given."""

    most_refused = 20
    writes_texts = False  # some servers refuse an empty prompt

    def __init__(self, server: Server, tokenizer: Any, sampling: Sampling) -> None:
        super().__init__(tokenizer, sampling)
        self.server = server
        self._openai = import_module("openai")  # an optional dependency, needed only here
        self._client = self._openai.AsyncOpenAI(
            base_url=server.url,
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
            what = f"--endpoint (with its /v1), --model {self.server.model!r} and OPENAI_API_KEY"
            what += ", and whether the server completes raw prompts (/completions)" if task.asks else ""
            why = f"{error.status_code} ({_reason(error)})"
            raise OSError(f"the server at {self.server.url!r} answers {why}: check {what}; {RESUMES}") from error
        except (self._openai.APIError, json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
            what = f"the server at {self.server.url!r} does not answer ({_reason(error)})"
            raise OSError(f"{what}: start it, then give the same command again, which resumes.") from error

    async def _asked(self, path: str, task: Task, limit: int, **body: Any) -> tuple[dict[str, Any], bool, int]:
        """What the server writes: its message, or `content` alone; whether that ended by itself; the tokens."""
        body |= {"model": self.server.model, "max_tokens": limit, "temperature": self.temperature(task)}
        if body["temperature"]:
            number = int.from_bytes(hashlib.blake2b(self.key(task).encode(), digest_size=4).digest(), "big")
            body |= {"seed": number >> 1} | ({} if task.asks else {"top_p": self.sampling.top_p})
        done: Any = await self._client.post(path, cast_to=object, body=body)
        try:
            choice = done["choices"][0]
            message = choice["message"] if "message" in choice else {"content": choice["text"]}
            tokens = (done.get("usage") or {}).get("completion_tokens") or 0
            return {**message, "content": message.get("content") or ""}, choice["finish_reason"] not in CUTS, tokens
        except (AttributeError, LookupError, TypeError) as error:
            what = f"answers what chat completions do not have ({str(done)[:60]!r}, {_reason(error)})"
            raise OSError(f"the server at {self.server.url!r} {what}: check --endpoint; {RESUMES}") from None

    async def _question(self, task: Task) -> None:
        assert self.chats is not None
        prompt = self.chats.before_question(task.messages)
        begin = getattr(self.tokenizer, "bos_token", None)
        if begin and frame(self.tokenizer)[0]:  # the server puts it in front of every prompt
            prompt = prompt.removeprefix(begin)
        how: dict[str, Any] = {"prompt": prompt, "stop": [self.question_end]}
        written, ended, _ = await self._asked("/completions", task, self.sampling.question_tokens, **how)
        special = {str(token) for token in self.tokenizer.added_tokens_decoder.values()}
        self.take_question(task, written["content"], ended, any(token in written["content"] for token in special))

    async def _answer(self, task: Task) -> None:
        if task.given is not None:
            path, body = "/completions", dict[str, Any](prompt=task.given)
        else:
            messages = [{"role": turn["role"], "content": turn["content"]} for turn in task.messages]
            path, body = "/chat/completions", {"messages": messages, **({"tools": task.tools} if task.tools else {})}
            values = self.server.template_values
            body |= {"chat_template_kwargs": values} if values else {}
        message, ended, tokens = await self._asked(path, task, self.sampling.max_new_tokens, **body)
        thought = next((message[name] for name in THOUGHTS if message.get(name)), "")
        calls = calls_of(message.get("tool_calls") or [])
        self.take(task, Answer(message["content"], ended, tokens, None, thought, calls))


def _reason(error: Exception) -> str:
    cause = f": {error.__cause__}" if error.__cause__ is not None else ""
    return " ".join(f"{error}{cause}".split())[:300].rstrip(".")
