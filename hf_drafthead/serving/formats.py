"""The three calls of OpenAI's API: what a request to each asks for, and how its answer is written."""

import json
import time
import uuid
from collections.abc import Iterator
from typing import Any

from pydantic import TypeAdapter

from hf_drafthead.serving.answers import CUT, Choice, Delta
from hf_drafthead.serving.fields import CHAT, COMPLETIONS, ITEMS, RESPONSES, Refused, checked, fields
from hf_drafthead.serving.served import Prompt, Served

Object = dict[str, Any]
OF_REQUESTS = {"input", "model", "include", "stream", "stream_options"}  # fields that a response does not repeat
OF_KINDS = {kind: TypeAdapter(fields(**known)) for kind, known in ITEMS.items()}


def event(data: Object | str, name: str | None = None) -> str:
    return f"event: {name}\n" * bool(name) + f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n"


def named(text: str, logprob: float, others: Any = None) -> Object:
    """A token with its log probability; a part of a character has no bytes that are known."""
    token: Object = {"token": text, "logprob": logprob, "bytes": None if CUT in text else [*text.encode()]}
    return token if others is None else token | {"top_logprobs": [named(*other) for other in others]}


class Completions:
    """`/v1/completions`: reads a request, and writes its answer whole or as the events of a stream.

    What a `Choice` asks of it is `most`, the tokens that a client wants, None where it says nothing, then `default`;
    `alternatives`, log probabilities beside each token's, None for none; the answer's `schema`; a chat's `tools`.
    """

    kind: Any = TypeAdapter(fields(**COMPLETIONS))
    names = "cmpl", "text_completion", "text_completion"  # an id's beginning, and what an answer and a piece of it are
    default: int | None = 16
    chat, alternatives = False, None
    tools: Any = None
    schema: Any = None

    def __init__(self, served: Served, body: Any):
        self.served, self.body, self.created = served, checked(self.kind, body), int(time.time())
        self.key, self.most = uuid.uuid4().hex, self.body.get("max_tokens")
        if self.body.get("model", served.name) != served.name:
            raise Refused("model", f"{served.name!r} is served here, no other.", "model_not_found")
        if self.body.get("store") and not served.options.learn:
            raise Refused("store", "it is true for a server that learns alone: `serve --learn`.")
        if "stream_options" in self.body and not self.body.get("stream"):
            raise Refused("stream_options", "it is of streams alone.")
        self.prompts = self.read(self.body)
        pairs = [(prompt, sibling) for prompt in self.prompts for sibling in range(self.body.get("n", 1))]
        self.choices = [Choice(self, prompt, at, sibling) for at, (prompt, sibling) in enumerate(pairs)]

    def read(self, body: Object) -> list[Prompt]:
        prompt, self.alternatives = body.get("prompt"), body.get("logprobs")
        several = prompt if isinstance(prompt, list) and not all(type(item) is int for item in prompt) else [prompt]
        if not all(isinstance(item, (str, list)) and item for item in several):
            raise Refused("prompt", "expected a text or token ids, or a list of these, none of them empty.")
        return [self.served.prompt(item) for item in several]

    def part(self, choice: Choice, delta: Delta, whole: bool) -> Object:
        """A choice: all of it, or what it has grown by."""
        logprobs: Object | None = None
        if self.alternatives is not None:
            texts, values, others, places = zip(*delta.tokens) if delta.tokens else ((),) * 4
            top = [{**dict(other), text: value} for text, value, other in zip(texts, values, others)]
            logprobs = {"tokens": texts, "token_logprobs": values, "top_logprobs": top, "text_offset": places}
        return {"text": delta.content, "logprobs": logprobs}

    def ended(self, choice: Choice, delta: Any, whole: bool) -> Object:
        return self.part(choice, delta, whole) | {"index": choice.index, "finish_reason": choice.finish or None}

    def wrapped(self, parts: list[Object], counts: Object | None, whole: bool) -> Object:
        prefix, answer, piece = self.names
        about = {"id": f"{prefix}-{self.key}", "object": answer if whole else piece, "created": self.created}
        about |= {"model": self.served.name, "choices": parts} | ({} if counts is None else {"usage": counts})
        return about | {name: self.body[name] for name in ("metadata",) if name in self.body}

    def usage(self) -> Object:
        """How many tokens were read and written, and how many of these were drafted and accepted."""
        read = sum(len(prompt.ids) for prompt in self.prompts)
        wrote, results = sum(choice.count for choice in self.choices), [choice.result for choice in self.choices]
        drafts = {f"{name}_tokens": sum(getattr(one, name, 0) for one in results) for name in ("drafted", "accepted")}
        return {"prompt_tokens": read, "completion_tokens": wrote, "total_tokens": read + wrote, **drafts}

    def whole(self) -> Object:
        return self.wrapped([self.ended(choice, choice.delta, True) for choice in self.choices], self.usage(), True)

    def grown(self, choice: Choice, delta: Any) -> Iterator[str]:
        """The events of what a choice has grown by."""
        if choice.finish or delta != Delta():
            yield event(self.wrapped([self.ended(choice, delta, False)], None, False))

    def failed(self, error: Object) -> Iterator[str]:
        yield event({"error": error})

    def end(self) -> Iterator[str]:
        if self.body.get("stream_options", {}).get("include_usage"):
            yield event(self.wrapped([], self.usage(), False))
        yield event("[DONE]")


class Chat(Completions):
    """`/v1/chat/completions`."""

    kind, names = TypeAdapter(fields(**CHAT)), ("chatcmpl", "chat.completion", "chat.completion.chunk")
    default, chat = None, True

    def read(self, body: Object) -> list[Prompt]:
        self.most, form = body.get("max_completion_tokens", self.most), body.get("response_format", {})
        if body.get("max_tokens", self.most) != self.most:
            raise Refused("max_tokens", "it is another number than max_completion_tokens.")
        if "top_logprobs" in body and not body.get("logprobs"):
            raise Refused("top_logprobs", "it goes with logprobs: true.")
        self.alternatives = body.get("top_logprobs", 0) if body.get("logprobs") else None
        messages, effort = body.get("messages", []), body.get("reasoning_effort")
        return self.conversation(messages, body.get("tools"), form | form.get("json_schema", {}), effort)

    def conversation(self, messages: list[Object], tools: Any, form: Object, effort: Any) -> list[Prompt]:
        """A chat, and the form of its answer."""
        kind, self.tools = form.get("type", "text"), None if self.body.get("tool_choice") == "none" else tools
        if kind == "json_schema" and "schema" not in form:
            raise Refused("json_schema", "it needs a schema.")
        self.schema = None if kind == "text" else {"type": "object"} if kind == "json_object" else form["schema"]
        return [self.served.chat(messages, self.tools, self.body.get("chat_template_kwargs", {}), effort)]

    def part(self, choice: Choice, delta: Delta, whole: bool) -> Object:
        message: Object = {"role": "assistant"} if delta.first else {}
        message["content"] = delta.content if delta.content or not delta.calls else None
        if delta.reasoning:
            message["reasoning_content"] = delta.reasoning
        if delta.calls:
            message["tool_calls"] = [
                {
                    "id": f"call_{choice.id}_{at}",
                    "type": "function",
                    "function": call,
                    **({} if whole else {"index": at}),
                }
                for at, call in enumerate(delta.calls, choice.calls - len(delta.calls))
            ]
        logprobs = None if self.alternatives is None else {"content": [named(*one[:3]) for one in delta.tokens]}
        return {"message" if whole else "delta": message, "logprobs": logprobs}


class Responses(Chat):
    """`/v1/responses`: thoughts, text and calls are items of their own, in the order in which they are written."""

    kind = TypeAdapter(fields(**RESPONSES))

    def read(self, body: Object) -> list[Prompt]:
        self.items, self.sent, self.most = list[Object](), 0, body.get("max_output_tokens")
        self.alternatives = body.get("top_logprobs", 0 if body.get("include") else None)
        tools = [{"type": "function", "function": {**tool, "type": None}} for tool in body.get("tools", [])] or None
        messages = [{"role": "system", "content": body["instructions"]}] if "instructions" in body else []
        form, effort = body.get("text", {}).get("format", {}), body.get("reasoning", {}).get("effort")
        return self.conversation(messages + turns(body.get("input", [])), tools, form, effort)

    def response(self, status: str, error: Object | None = None) -> Object:
        """All that is said of the answer."""
        choice, incomplete = self.choices[0], None
        if choice.finish == "length" and error is None:
            status, incomplete = "incomplete", {"reason": "max_output_tokens"}
        about = {"id": f"resp_{self.key}", "object": "response", "created_at": self.created, "status": status}
        about |= {"model": self.served.name, "output": self.items, "error": error, "incomplete_details": incomplete}
        about |= {"store": False, "tools": [], "tool_choice": "auto", "parallel_tool_calls": True}
        about |= {name: self.body[name] for name in self.body.keys() - OF_REQUESTS}
        return about | {"usage": self.usage() if choice.finish else None}

    def usage(self) -> Object:
        counts = super().usage()
        thoughts = "".join(item["content"][0]["text"] for item in self.items if item["type"] == "reasoning")
        details = {"reasoning_tokens": len(self.served.decoder(thoughts, add_special_tokens=False)["input_ids"])}
        counts |= {"input_tokens": counts.pop("prompt_tokens"), "output_tokens": counts.pop("completion_tokens")}
        counts["input_tokens_details"] = {"cached_tokens": 0, "cache_write_tokens": 0}
        return counts | {"output_tokens_details": details}

    def whole(self) -> Object:
        for _ in self.grown(self.choices[0], self.choices[0].delta):
            pass
        return self.response("completed")

    def sends(self, kind: str, **more: Any) -> str:
        self.sent += 1
        return event({"type": f"response.{kind}", "sequence_number": self.sent - 1, **more}, f"response.{kind}")

    def grown(self, choice: Choice, delta: Any) -> Iterator[str]:
        if delta.first:
            yield self.sends("created", response=self.response("in_progress"))
        if delta.reasoning:
            yield from self.written("reasoning", delta.reasoning, {}, summary=[])
        if delta.content:
            logprobs = {"logprobs": [named(*one[:3]) for one in delta.tokens]}
            yield from self.written("output", delta.content, logprobs, role="assistant")
        for call in delta.calls:
            name = f"fc_{choice.id}_{len(self.items)}"
            item = {"id": name, "type": "function_call", "call_id": f"call_{name}", **call}
            yield from self.opened(item, arguments="")
            place = {"item_id": name, "output_index": len(self.items) - 1}
            yield self.sends("function_call_arguments.delta", **place, delta=call["arguments"])
        if choice.finish:
            yield from self.closed("incomplete" if choice.finish == "length" else "completed")

    def written(self, kind: str, text: str, logprobs: Object, **of_item: Any) -> Iterator[str]:
        """The events of a text or of thoughts, which may begin a new item."""
        name = "message" if kind == "output" else kind
        if not self.items or self.items[-1]["type"] != name:
            part: Object = {"type": f"{kind}_text", "text": "", **dict.fromkeys(logprobs, [])}
            part |= {"annotations": []} if logprobs else {}
            item = {"id": f"{name}_{self.key}_{len(self.items)}", "type": name, **of_item, "content": [part]}
            yield from self.opened(item, content=[])
        place = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, "content_index": 0}
        part = self.items[-1]["content"][0]
        if not part["text"]:
            yield self.sends("content_part.added", **place, part=part)
        part |= {"text": part["text"] + text} | {name: part[name] + logprobs[name] for name in logprobs}
        yield self.sends(f"{kind}_text.delta", **place, delta=text, **logprobs)

    def opened(self, item: Object, **empty: Any) -> Iterator[str]:
        """The event of a new item, which ends the one before."""
        yield from self.closed("completed")
        self.items.append(item | {"status": "in_progress"})
        yield self.sends("output_item.added", output_index=len(self.items) - 1, item=self.items[-1] | empty)

    def closed(self, status: str) -> Iterator[str]:
        """The event of the end of the last item."""
        if self.items:
            self.items[-1]["status"] = status
            yield self.sends("output_item.done", output_index=len(self.items) - 1, item=self.items[-1])

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
        kind, place = item.get("type", "message") if isinstance(item, dict) else None, f"input[{at}]"
        if kind not in OF_KINDS:
            raise Refused(f"{place}.type", f"expected {' or '.join(OF_KINDS)}.")
        item = checked(OF_KINDS[kind], item, place)
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
