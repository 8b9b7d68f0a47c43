"""The three calls of OpenAI's API: what a request to each asks for, and how its answer is written."""

import json
import time
from collections.abc import Iterator
from typing import Any

from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response

from hf_drafthead.serving.answers import CUT, Asked, Choice, Delta
from hf_drafthead.serving.fields import CHAT, COMPLETIONS, ITEMS, RESPONSES, Refused, checked
from hf_drafthead.serving.served import Served

Object = dict[str, Any]
# Fields of a request for a response that are part of it.
ECHOED = {"instructions", "max_output_tokens", "metadata", "temperature", "top_p", "text", "reasoning", "tools"}
ECHOED |= {"tool_choice", "parallel_tool_calls", "top_logprobs"}


def event(data: Object | str, name: str | None = None) -> str:
    """A server-sent event."""
    return f"event: {name}\n" * bool(name) + f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n"


def valid(model: Any, data: Object) -> Object:
    """Data that fits a model of `openai`."""
    dumped: Object = data if model is None else model.model_validate(data).model_dump(mode="json", exclude_unset=True)
    return dumped


def named(text: str, logprob: float, others: Any = None) -> Object:
    """A token with its log probability; a part of a character has no bytes that are known."""
    token: Object = {"token": text, "logprob": logprob, "bytes": None if CUT in text else [*text.encode()]}
    return token if others is None else token | {"top_logprobs": [named(*other) for other in others]}


class Completions:
    """`/v1/completions`: reads a request, and writes its answer whole or as the events of a stream."""

    fields, prefix, kind, chunk_kind = COMPLETIONS, "cmpl", "text_completion", "text_completion"
    model: Any = Completion
    chunk_model: Any = None  # of `openai`, which has none for chunks whose choices go on

    def __init__(self, served: Served, body: Any):
        self.served, self.body, self.created = served, checked(body, self.fields), int(time.time())
        if self.body.get("model", served.name) != served.name:
            raise Refused("model", f"{served.name!r} is served here, no other.", "model_not_found")
        if "stream_options" in self.body and not self.body.get("stream"):
            raise Refused("stream_options", "it is of streams alone.")
        self.asked, several = self.read(self.body), range(self.body.get("n", 1))
        pairs = [(prompt, sibling) for prompt in self.asked.prompts for sibling in several]
        self.choices = [Choice(served, self.asked, prompt, at, sibling) for at, (prompt, sibling) in enumerate(pairs)]

    def read(self, body: Object) -> Asked:
        """What is asked for."""
        given, alternatives = body.get("prompt"), body.get("logprobs")
        several = given if isinstance(given, list) and not all(type(item) is int for item in given) else [given]
        if not all(isinstance(item, (str, list)) and item for item in several):
            raise Refused("prompt", "expected a text or token ids, or a list of these, none of them empty.")
        if body.get("echo") and alternatives is not None:
            raise Refused("echo", "there are no log probabilities of prompts: leave out echo or logprobs.")
        prompts = [self.served.prompt(item) for item in several]
        return Asked(body, prompts, body.get("max_tokens"), default=16, alternatives=alternatives)

    def part(self, choice: Choice, delta: Delta, first: bool, whole: bool) -> Object:
        """A choice: all of it, or what it has grown by."""
        logprobs: Object | None = None
        if self.asked.alternatives is not None:
            logprobs = {"tokens": [token[0] for token in delta.tokens]}
            logprobs["token_logprobs"] = [token[1] for token in delta.tokens]
            logprobs["top_logprobs"] = [dict([*token[2], token[:2]]) for token in delta.tokens]
            logprobs["text_offset"] = [token[3] for token in delta.tokens]
        echo = choice.prompt.text * bool(first and self.body.get("echo"))
        return {"text": echo + delta.content, "logprobs": logprobs}

    def wrapped(self, parts: list[Object], counts: Object | None, whole: bool) -> Object:
        """Choices with what is said of all."""
        kind, model = (self.kind, self.model) if whole else (self.chunk_kind, self.chunk_model)
        about: Object = {"id": f"{self.prefix}-{self.asked.key}", "object": kind, "created": self.created}
        about |= {"model": self.served.name, "choices": parts, "usage": counts}
        return valid(model, about | {name: self.body[name] for name in ("metadata",) if name in self.body})

    def usage(self) -> Object:
        """How many tokens were read and written, and how many of these were drafted and accepted."""
        read = sum(len(prompt.ids) for prompt in self.asked.prompts)
        wrote, results = sum(choice.count for choice in self.choices), [choice.result for choice in self.choices]
        drafts = {f"{name}_tokens": sum(getattr(one, name, 0) for one in results) for name in ("drafted", "accepted")}
        return {"prompt_tokens": read, "completion_tokens": wrote, "total_tokens": read + wrote, **drafts}

    def whole(self, deltas: list[Delta]) -> Object:
        """The answer as one object, of a delta for each choice."""
        ends = [{"index": choice.index, "finish_reason": choice.finish} for choice in self.choices]
        parts = [self.part(choice, delta, True, True) for choice, delta in zip(self.choices, deltas)]
        return self.wrapped([part | end for part, end in zip(parts, ends)], self.usage(), True)

    def begin(self) -> Iterator[str]:
        """The events before the first token."""
        for choice in self.choices:
            yield from self.grown(choice, Delta(), True)

    def grown(self, choice: Choice, delta: Delta, first: bool = False) -> Iterator[str]:
        """The events of what a choice has grown by."""
        end = {"index": choice.index, "finish_reason": None if first else choice.finish or None}
        if first or choice.finish or delta != Delta():
            yield event(self.wrapped([self.part(choice, delta, first, False) | end], None, False))

    def failed(self, error: Object) -> Iterator[str]:
        """The last event of a stream that an error ends."""
        yield event({"error": error})

    def end(self) -> Iterator[str]:
        """The last events of a stream."""
        if self.body.get("stream_options", {}).get("include_usage"):
            yield event(self.wrapped([], self.usage(), False))
        yield event("[DONE]")


class Chat(Completions):
    """`/v1/chat/completions`."""

    fields, prefix, kind, chunk_kind = CHAT, "chatcmpl", "chat.completion", "chat.completion.chunk"
    model, chunk_model = ChatCompletion, ChatCompletionChunk

    def read(self, body: Object) -> Asked:
        most, form = body.get("max_completion_tokens", body.get("max_tokens")), body.get("response_format", {})
        if body.get("max_tokens", most) != most:
            raise Refused("max_tokens", "it is another number than max_completion_tokens.")
        if "top_logprobs" in body and not body.get("logprobs"):
            raise Refused("top_logprobs", "it goes with logprobs: true.")
        alternatives = body.get("top_logprobs", 0) if body.get("logprobs") else None
        messages, effort = body.get("messages", []), body.get("reasoning_effort")
        return self.chat(messages, body.get("tools"), form | form.get("json_schema", {}), effort, most, alternatives)

    def chat(self, messages: Any, tools: Any, form: Object, effort: Any, most: Any, alternatives: Any) -> Asked:
        """A conversation, and the form of its answer."""
        kind, tools = form.get("type", "text"), None if self.body.get("tool_choice") == "none" else tools
        if kind == "json_schema" and "schema" not in form:
            raise Refused("json_schema", "it needs a schema.")
        schema = None if kind == "text" else {"type": "object"} if kind == "json_object" else form["schema"]
        prompt = self.served.chat(messages, tools, self.body.get("chat_template_kwargs", {}), effort)
        return Asked(self.body, [prompt], most, None, True, alternatives, schema, tools)

    def part(self, choice: Choice, delta: Delta, first: bool, whole: bool) -> Object:
        message: Object = {"role": "assistant"} if first else {}
        message["content"] = delta.content if delta.content or not delta.calls else None
        if delta.reasoning:
            message["reasoning_content"] = delta.reasoning
        if delta.calls:
            number = choice.calls - len(delta.calls)
            calls = [{"type": "function", "function": call} for call in delta.calls]
            ids: list[Object] = [{"id": f"call_{choice.id}_{at}"} for at in range(number, choice.calls)]
            ids = ids if whole else [one | {"index": at} for at, one in enumerate(ids, number)]
            message["tool_calls"] = [one | call for one, call in zip(ids, calls)]
        logprobs = None if self.asked.alternatives is None else {"content": [named(*one[:3]) for one in delta.tokens]}
        return {"message" if whole else "delta": message, "logprobs": logprobs}


class Responses(Chat):
    """`/v1/responses`: thoughts, text and calls are items of their own, in the order in which they are written."""

    fields = RESPONSES

    def read(self, body: Object) -> Asked:
        self.items, self.sent = list[Object](), 0
        tools = [{"type": "function", "function": {**tool, "type": None}} for tool in body.get("tools", [])] or None
        messages = [{"role": "system", "content": body["instructions"]}] if "instructions" in body else []
        messages += turns(body.get("input", []))
        form, effort = body.get("text", {}).get("format", {}), body.get("reasoning", {}).get("effort")
        most, alternatives = body.get("max_output_tokens"), body.get("top_logprobs", 0 if body.get("include") else None)
        return self.chat(messages, tools, form, effort, most, alternatives)

    def response(self, status: str, error: Object | None = None) -> Object:
        """All that is said of the answer."""
        choice, incomplete = self.choices[0], None
        if choice.finish == "length" and error is None:
            status, incomplete = "incomplete", {"reason": "max_output_tokens"}
        about = {"id": f"resp_{self.asked.key}", "object": "response", "created_at": self.created, "status": status}
        about |= {"model": self.served.name, "output": self.items, "error": error, "incomplete_details": incomplete}
        about |= {"store": False, "tools": [], "tool_choice": "auto", "parallel_tool_calls": True}
        about |= {name: self.body[name] for name in ECHOED & self.body.keys()}
        return valid(Response, about | {"usage": self.usage() if choice.finish else None})

    def usage(self) -> Object:
        counts = super().usage()
        thoughts = "".join(item["content"][0]["text"] for item in self.items if item["type"] == "reasoning")
        details = {"reasoning_tokens": len(self.served.decoder(thoughts, add_special_tokens=False)["input_ids"])}
        counts |= {"input_tokens": counts.pop("prompt_tokens"), "output_tokens": counts.pop("completion_tokens")}
        counts["input_tokens_details"] = {"cached_tokens": 0, "cache_write_tokens": 0}
        return counts | {"output_tokens_details": details}

    def whole(self, deltas: list[Delta]) -> Object:
        for _ in self.grown(self.choices[0], deltas[0]):
            pass
        return self.response("completed")

    def sends(self, kind: str, **more: Any) -> str:
        """An event, of the last item where there is one and the response is not meant."""
        self.sent += 1
        if "response" not in more:
            more["output_index"] = len(self.items) - 1
        if not {"response", "item"} & more.keys():
            more["item_id"] = self.items[-1]["id"]
            more |= {} if self.items[-1]["type"] == "function_call" else {"content_index": 0}
        return event({"type": f"response.{kind}", "sequence_number": self.sent - 1, **more}, f"response.{kind}")

    def begin(self) -> Iterator[str]:
        for kind in ("created", "in_progress"):
            yield self.sends(kind, response=self.response("in_progress"))

    def grown(self, choice: Choice, delta: Delta, first: bool = False) -> Iterator[str]:
        if delta.reasoning:
            yield from self.written("reasoning", delta.reasoning, {}, {"summary": []}, {})
        if delta.content:
            logprobs = {"logprobs": [named(*one[:3]) for one in delta.tokens]}
            yield from self.written("output", delta.content, logprobs, {"role": "assistant"}, {"annotations": []})
        for call in delta.calls:
            yield from self.closed("completed")
            self.items.append({"id": f"fc_{choice.id}_{len(self.items)}", "type": "function_call"})
            self.items[-1] |= {"call_id": f"call_{self.items[-1]['id']}", **call, "status": "in_progress"}
            yield self.sends("output_item.added", item=self.items[-1] | {"arguments": ""})
            yield self.sends("function_call_arguments.delta", delta=call["arguments"])
            yield self.sends("function_call_arguments.done", arguments=call["arguments"], name=call["name"])
            yield from self.closed("completed")
        if choice.finish:
            yield from self.closed("incomplete" if choice.finish == "length" else "completed")

    def written(self, kind: str, text: str, logprobs: Object, of_item: Object, of_part: Object) -> Iterator[str]:
        """The events of a text or of thoughts, which may begin a new item."""
        name = "message" if kind == "output" else kind
        if not self.items or (self.items[-1]["type"], self.items[-1]["status"]) != (name, "in_progress"):
            yield from self.closed("completed")
            part = {"type": f"{kind}_text", "text": "", **of_part, **dict.fromkeys(logprobs, [])}
            item = {"id": f"{name}_{self.asked.key}_{len(self.items)}", "type": name, "status": "in_progress"}
            self.items.append(item | of_item | {"content": [part]})
            yield self.sends("output_item.added", item=self.items[-1] | {"content": []})
            yield self.sends("content_part.added", part=part)
        part = self.items[-1]["content"][0]
        part |= {"text": part["text"] + text} | {name: part[name] + logprobs[name] for name in logprobs}
        yield self.sends(f"{kind}_text.delta", delta=text, **logprobs)

    def closed(self, status: str) -> Iterator[str]:
        """The events of the end of the last item."""
        if not self.items or self.items[-1]["status"] != "in_progress":
            return
        self.items[-1]["status"] = status
        for part in self.items[-1].get("content", []):
            more = {name: part[name] for name in ("text", "logprobs") if name in part}
            yield self.sends(f"{part['type']}.done", **more)
            yield self.sends("content_part.done", part=part)
        yield self.sends("output_item.done", item=self.items[-1])

    def failed(self, error: Object) -> Iterator[str]:
        yield from self.closed("incomplete")
        about = {"code": "server_error", "message": error["message"]}
        yield self.sends("failed", response=self.response("failed", about))

    def end(self) -> Iterator[str]:
        response = self.response("completed")
        yield self.sends(response["status"], response=response)


def turns(given: str | list[Any]) -> list[Object]:
    """The input of a response as the messages of a chat: calls and thoughts belong to the message of the assistant."""
    messages: list[Object] = []
    for at, item in enumerate([{"role": "user", "content": given}] if isinstance(given, str) else given):
        kind = item.get("type", "message") if isinstance(item, dict) else None
        item = checked(item, ITEMS.get(str(kind), {"type": [*ITEMS]}), f"input[{at}].")
        if kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
        elif kind == "message" and item["role"] != "assistant":
            messages.append({"role": item["role"], "content": item["content"]})
        else:
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            if kind == "message":
                messages[-1]["content"] = item["content"]
            elif kind == "reasoning":
                messages[-1]["reasoning_content"] = "".join(part["text"] for part in item.get("content", []))
            else:
                call = {"name": item["name"], "arguments": item["arguments"]}
                calls = messages[-1].setdefault("tool_calls", [])
                calls.append({"id": item["call_id"], "type": "function", "function": call})
    return messages
