"""The three calls of OpenAI's API: what a request to each asks for, and how its answers are written."""

import functools
import itertools
import json
import re
import time
import uuid
from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import TypeAdapter

from hf_drafthead.evaluation.calls import as_tokens
from hf_drafthead.serving.requests import CHAT, COMPLETIONS, RESPONSES, Object, Refused, as_chat, checked, fields
from hf_drafthead.serving.served import Prompt, Served, TokenScores, listed

SAMPLING = ("temperature", "top_p", "top_k", "min_p")
COLD = 1e-6  # up to this temperature the likeliest token is taken: scores that are divided by less may be infinite
OWN: Object = {"max_length": None, "stop_strings": None}  # is done here
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
CACHED = {"cached_tokens": 0, "cache_write_tokens": 0}
ABOUT: Object = {"object": "response", "store": False, "tools": [], "tool_choice": "auto", "parallel_tool_calls": True}
OF_REQUESTS = {"input", "model", "stream", "stream_options"}  # fields that a response does not repeat
PIECES = re.compile("[^<>]+|.", re.DOTALL)  # so that what stands before the marker behind a faulty call is not lost
HERE = {"messages": "input", "response_format": "text.format", "reasoning_effort": "reasoning.effort"}
KINDS = {"content": "message", "reasoning_content": "reasoning", "thinking": "reasoning"}  # of items, by parsed fields
OF_TEXTS: Object = {"message": ("output_text", {"role": "assistant"}), "reasoning": ("reasoning_text", {"summary": []})}
CUT = "\N{REPLACEMENT CHARACTER}"  # what a decoder writes for a part of a character


class Choice:
    """One answer to a prompt of a call, the `sibling`th: `settings` for the manager, and what its results add to it.

    grown: what the last result has added, kinds of items of a response, each with a text or a call; tokens: names, log
        probabilities, others and places in the text of its tokens. finish: why it has ended, empty while it has not.
    """

    def __init__(self, call: Any, prompt: Prompt, index: int, sibling: int):
        self.call, self.served, self.prompt, self.index = call, call.served, prompt[0], index
        self.id, body, special = f"{call.key}-{index}", call.body, self.served.special
        stops = [*listed(body.get("stop")), *listed(self.served.config.stop_strings)]
        self.stops = [stop for stop in stops if stop not in special]
        self.ends = [*self.served.ends, *(special[stop] for stop in stops if stop in special)]
        self.parser = self.served.parser(self.prompt, body) if call.chat else None
        self.decode = functools.partial(self.served.decode, special=self.parser is not None)
        self.window, self.shown, self.said, self.sent, self.raw = list[int](), 0, "", 0, ""
        self.scored, self.count, self.called, self.finish, self.cut = list[Any](), 0, 0, "", False
        self.grown, self.tokens = list[tuple[str, Any]](), list[Any]()
        penalties = body.get("presence_penalty", 0.0), body.get("frequency_penalty", 0.0)
        matcher = None if call.schema is None else self.served.matcher(call.schema, self.parser)
        self.scores = TokenScores(len(self.prompt), penalties, call.alternatives, matcher)
        self.settings: Object = as_tokens(self.served.model, self._settings(body), None) | prompt[1]
        self.settings["seed"] = body["seed"] + sibling if "seed" in body else None
        if any(penalties) or matcher is not None or call.alternatives is not None:
            self.settings["logits_processor"] = [self.scores]
        if self.stops or call.alternatives is not None:
            ended = self.scores.ended
            self.settings["stopping_criteria"] = [lambda ids, *_, **__: ended(ids, self.decode, self.stops)]

    def _settings(self, body: Object) -> Object:
        """How the answer is decoded: as the base says, but for what the client asks for."""
        config, context, length = self.served.config, self.served.context, len(self.prompt)
        asked = {name: body[name] for name in LENGTHS if name in body}
        most = min(asked.values(), default=None)
        if context and (total := length + (most or 1)) > context:
            reason = f"This model's maximum context length is {context} tokens, and {total} are asked for, {length} of"
            raise Refused(next(iter(asked), self.call.field), f"{reason} them the prompt.", "context_length_exceeded")
        left = context - length if context else 1024
        most = most or min(config.max_new_tokens or self.call.default or left, left)
        told: Object = {"max_new_tokens": most, "eos_token_id": self.ends or None, **OWN}
        if not body.keys().isdisjoint((*SAMPLING, "seed")) or body.get("n", 1) > 1:
            told["do_sample"] = body.get("temperature", 1) > COLD
        named = ("repetition_penalty", *(SAMPLING if told.get("do_sample", config.do_sample) else ()))
        told |= {name: body[name] for name in named if name in body}
        if given := body.get("logit_bias"):
            if not all(token.isdecimal() and int(token) < self.served.vocabulary for token in given):
                raise Refused("logit_bias", self.served.bounds)
            biases = [[[int(token)], value] for token, value in given.items()]
            told["sequence_bias"] = [*(config.sequence_bias or []), *biases]
        if self.call.alternatives is not None and (config.num_beams or 1) > 1:
            raise Refused("logprobs", "an answer by beams has none.")
        return told

    def take(self, result: Any) -> None:
        """Grow by a result of the manager; with the last one there is a reason for the end."""
        new, last, name = result.generated_tokens[self.count :], result.is_finished(), self.served.name_of
        ended = last and bool(new) and new[-1] in self.ends
        for place, token in enumerate([] if self.cut else new[: len(new) - ended], self.count):
            if place in self.scores.noted:
                logprob, best = self.scores.noted.pop(place)
                others = [(name(other), value) for other, value in best]
                self.scored.append((name(token), logprob, others, len(self.said)))
            self._decode(token)
        if last and not self.cut:
            self._decode()
        self.count, self.grown = self.count + len(new), []
        for piece in [*PIECES.findall(self._released(last)), *[""] * last]:
            self._parse(piece)
        if last:
            self.result = result
            self.finish = "tool_calls" if self.called else "stop" if ended or self.cut else "length"

    def _decode(self, *tokens: int) -> None:
        """Add the text of a token; a part of a character waits for the others, or for a call without a token."""
        self.window += tokens
        before, text = self.decode(self.window[: self.shown]), self.decode(self.window)
        if len(text) > len(before) and not (text.endswith(CUT) and tokens):
            self.window, self.shown = self.window[self.shown :], len(self.window) - self.shown  # before the next ones
            self.said += text[len(before) :]

    def _released(self, last: bool) -> str:
        """The text in which no stop string can begin any more, up to the first of them; and its tokens."""
        found = [place for stop in self.stops if (place := self.said.find(stop, self.sent)) >= 0]
        sure = min(found, default=len(self.said) - (0 if last else max(map(len, self.stops), default=1) - 1))
        begun, self.sent, self.cut = self.sent, max(self.sent, sure), self.cut or bool(found)
        self.tokens = [token for token in self.scored if token[3] < sure or last and not self.cut]
        self.scored = self.scored[len(self.tokens) :]
        return self.said[begun : self.sent]

    def _parse(self, piece: str) -> None:
        """Sort text, or its end, into content, thoughts and calls; a call that is not whole, or no JSON, is content."""
        if self.parser is None:
            self.grown.append(("message", piece))
            return
        try:
            for event in self.parser.feed(piece) if piece else self.parser.finalize()[1]:
                name, said, closed = event["field"], event.get("text", ""), event["type"] == "region_close"
                if name in KINDS:
                    self.grown.append((KINDS[name], said))
                for call in listed(event["value"]) if closed and name == "tool_calls" else ():
                    self._call(**call["function"])
                self.raw = "" if closed else self.raw + said * bool(event.get("dirty"))
        except (ValueError, RuntimeError, LookupError, TypeError):
            self.parser, self.grown = None, [*self.grown, ("message", self.raw)]

    def _call(self, name: str, arguments: Any) -> None:
        """Note a tool call, as the API has it."""
        if not self.called or self.call.body.get("parallel_tool_calls", True):
            text = arguments if isinstance(arguments, str) else json.dumps(arguments)
            about = {"index": self.called, "id": f"call_{self.id}_{self.called}", "type": "function"}
            self.grown.append(("function_call", about | {"function": {"name": name, "arguments": text}}))
            self.called += 1

    def added(self, kind: str) -> str:
        """The text of a kind that the last result has added."""
        return "".join(said for each, said in self.grown if each == kind)


def event(data: Object, **named: str) -> str:
    """One of a stream of events; those of responses have a name."""
    return "".join(f"{key}: {value}\n" for key, value in named.items()) + f"data: {json.dumps(data)}\n\n"


def scored(text: str, logprob: float, others: Any = None, *_: Any) -> Object:
    """A token with its log probability; a part of a character has no bytes that are known."""
    token: Object = {"token": text, "logprob": logprob, "bytes": None if CUT in text else [*text.encode()]}
    return token if others is None else token | {"top_logprobs": [scored(*other) for other in others]}


class Completions:
    """`/v1/completions`: reads a request, and writes its answer whole or as the events of a stream.

    field: what its prompt is called. What a `Choice` asks of it is `default`, the tokens where a client says nothing;
    `alternatives`, log probabilities beside each token's, None for none; and the answer's `schema`.
    """

    kind, field = TypeAdapter[Any](fields(**COMPLETIONS)), "prompt"
    names = "cmpl", "text_completion", "text_completion"  # an id's beginning, and what an answer and a piece of it are
    default: int | None = 16
    chat = False
    schema: Any = None

    def __init__(self, served: Served, body: Any):
        self.served, self.created, self.key = served, int(time.time()), uuid.uuid4().hex
        self.body = self.asked = checked(self.kind, body)
        self.stream: bool = self.body.get("stream", False)
        if self.body.get("model", served.name) != served.name:
            raise Refused("model", f"{served.name!r} is served here, no other.", "model_not_found")
        if self.body.get("store") and not served.options.learn:
            raise Refused("store", "it is true for a server that learns alone: `serve --learn`.")
        self.prompts = self.read()
        if not all(ids for ids, _ in self.prompts):
            raise Refused(self.field, "it says nothing: the prompt has no tokens.")
        pairs = [(prompt, sibling) for prompt in self.prompts for sibling in range(self.body.get("n", 1))]
        if len(pairs) > (most := served.options.max_queue_size):
            field = "n" if "n" in self.body else self.field
            raise Refused(field, f"{len(pairs)} answers are asked for at once, and max_queue_size is {most}.")
        self.choices = [Choice(self, prompt, at, sibling) for at, (prompt, sibling) in enumerate(pairs)]

    def read(self) -> list[Prompt]:
        self.alternatives, given = self.body.get("logprobs"), self.body["prompt"]
        one = isinstance(given, str) or isinstance(given[0], int)
        return [self.served.prompt(each) for each in ([given] if one else given)]

    def part(self, choice: Choice) -> Object:
        """What a choice has grown by, or all of it."""
        names, values, others, places = zip(*choice.tokens) if choice.tokens else ((),) * 4
        top = [{**dict(other), name: value} for name, value, other in zip(names, values, others)]
        logprobs = {"tokens": names, "token_logprobs": values, "top_logprobs": top, "text_offset": places}
        return {"text": choice.added("message"), "logprobs": None if self.alternatives is None else logprobs}

    def wrapped(self, choices: list[Choice]) -> Object:
        """Choices, in what stands around them."""
        about = {"id": f"{self.names[0]}-{self.key}", "object": self.names[1 + self.stream], "created": self.created}
        ends = [{"index": choice.index, "finish_reason": choice.finish or None} for choice in choices]
        parts = [self.part(choice) | end for choice, end in zip(choices, ends)]
        return about | {"model": self.served.name, "choices": parts}

    def usage(self) -> Object:
        """How many tokens were read and written, and how many of these were drafted and accepted."""
        read, wrote = sum(len(ids) for ids, _ in self.prompts), sum(choice.count for choice in self.choices)
        counts = {"prompt_tokens": read, "completion_tokens": wrote, "total_tokens": read + wrote}
        for name in ("drafted", "accepted"):
            counts[f"{name}_tokens"] = sum(getattr(choice.result, name) for choice in self.choices)
        return counts

    def begin(self) -> Iterable[str]:
        """The events before those of the first result: clients expect to meet the choices in their order."""
        return [event(self.wrapped([choice])) for choice in self.choices]

    def grown(self, choice: Choice) -> Iterator[str]:
        """The events of what a choice has grown by."""
        if choice.finish or any(said for _, said in choice.grown):
            yield event(self.wrapped([choice]))

    def end(self, error: Object | None = None) -> Iterator[str]:
        """The last events, or the whole answer."""
        if error is not None:
            yield event({"error": error})
        elif self.stream:
            if self.body.get("stream_options", {}).get("include_usage"):
                yield event(self.wrapped([]) | {"usage": self.usage()})
            yield "data: [DONE]\n\n"
        else:
            yield json.dumps(self.wrapped(self.choices) | {"usage": self.usage()})


class Chat(Completions):
    """`/v1/chat/completions`."""

    kind, field = TypeAdapter(fields(**CHAT)), "messages"
    names = "chatcmpl", "chat.completion", "chat.completion.chunk"
    default, chat = None, True

    def read(self) -> list[Prompt]:
        form = self.body.get("response_format", {})
        kind, schema = form.get("type"), form.get("json_schema", {}).get("schema")
        if kind == "json_schema" and schema is None:
            raise Refused("response_format", "it needs a JSON schema.")
        self.schema = {"type": "object"} if kind == "json_object" else schema if kind == "json_schema" else None
        self.alternatives = self.body.get("top_logprobs", 0 if self.body.get("logprobs") else None)
        self.body = self.body | {"tools": self.body.get("tools") if self.body.get("tool_choice") != "none" else None}
        return [self.served.chat(self.body)]

    def part(self, choice: Choice) -> Object:
        content, thoughts = choice.added("message"), choice.added("reasoning")
        calls = [call for kind, call in choice.grown if kind == "function_call"]
        message: Object = {"content": content if content or not calls else None}
        message |= {} if self.stream and choice.count else {"role": "assistant"}
        message |= {"reasoning_content": thoughts} if thoughts else {}
        message |= {"tool_calls": calls} if calls else {}
        logprobs = None if self.alternatives is None else {"content": [scored(*token) for token in choice.tokens]}
        return {"delta" if self.stream else "message": message, "logprobs": logprobs}


class Responses(Chat):
    """`/v1/responses`: thoughts, text and calls are items of their own, in the order in which they are written."""

    kind, field = TypeAdapter(fields(**RESPONSES)), "input"

    def __init__(self, served: Served, body: Any):
        try:
            super().__init__(served, body)
        except Refused as refused:  # by the name that a field of chats has here
            raise Refused(HERE.get(refused.field, refused.field), refused.reason, refused.code) from None

    def read(self) -> list[Prompt]:
        self.items, self.numbers, self.body = list[Object](), itertools.count(), as_chat(self.asked)
        return super().read()

    def response(self, status: str, error: Object | None = None) -> Object:
        """All that is said of the answer."""
        cut = self.choices[0].finish == "length" and error is None
        reason = {"reason": "max_output_tokens"} if cut else None
        about = ABOUT | {"id": f"resp_{self.key}", "created_at": self.created, "model": self.served.name}
        about |= {"status": "incomplete" if cut else status, "usage": self.usage() if self.choices[0].finish else None}
        about |= {"output": self.items, "incomplete_details": reason}
        about["error"] = error and {"code": "server_error", "message": error["message"]}
        return about | {name: self.asked[name] for name in self.asked.keys() - OF_REQUESTS}

    def usage(self) -> Object:
        counts = super().usage()
        thoughts = "".join(item["content"][0]["text"] for item in self.items if item["type"] == "reasoning")
        details = {"reasoning_tokens": len(self.served.decoder(thoughts, add_special_tokens=False)["input_ids"])}
        counts |= {"input_tokens": counts.pop("prompt_tokens"), "output_tokens": counts.pop("completion_tokens")}
        return counts | {"input_tokens_details": CACHED, "output_tokens_details": details}

    def begin(self) -> Iterable[str]:
        return [self.sends("created", response=self.response("in_progress"))]

    def grown(self, choice: Choice) -> Iterator[str]:
        for kind, said in choice.grown:
            if kind == "function_call":
                yield from self.opened({"type": kind, "call_id": said["id"], **said["function"], "arguments": ""})
                self.items[-1] |= said["function"]
                yield self.sends("function_call_arguments.delta", delta=said["function"]["arguments"])
            elif said:
                yield from self.written(kind, said)
        if choice.finish:
            yield from self.closed("incomplete" if choice.finish == "length" else "completed")

    def written(self, kind: str, text: str) -> Iterator[str]:
        """The events of a text or of thoughts, which may begin a new item."""
        name, about = OF_TEXTS[kind]
        if not self.items or self.items[-1]["type"] != kind:
            yield from self.opened(about | {"type": kind, "content": []})
            self.items[-1]["content"].append({"type": name, "text": "", "annotations": [], "logprobs": []})
            yield self.sends("content_part.added", part=self.items[-1]["content"][0])
        self.items[-1]["content"][0]["text"] += text
        yield self.sends(f"{name}.delta", delta=text, logprobs=[])

    def opened(self, item: Object) -> Iterator[str]:
        """The event of a new item, which ends the one before."""
        yield from self.closed("completed")
        self.items.append(item | {"id": f"{item['type']}_{self.key}_{len(self.items)}", "status": "in_progress"})
        yield self.sends("output_item.added", item=self.items[-1])

    def closed(self, status: str) -> Iterator[str]:
        """The events of the end of the last item."""
        for item in self.items[-1:]:
            item["status"] = status
            for part in item.get("content", []):
                yield self.sends(f"{part['type']}.done", text=part["text"], logprobs=[])
                yield self.sends("content_part.done", part=part)
            if item["type"] == "function_call":
                yield self.sends("function_call_arguments.done", name=item["name"], arguments=item["arguments"])
            yield self.sends("output_item.done", item=item)

    def sends(self, kind: str, **more: Any) -> str:
        """An event, which is of the last item unless it is of the whole response."""
        if "response" not in more:
            more |= {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, "content_index": 0}
        kind = f"response.{kind}"
        return event({"type": kind, "sequence_number": next(self.numbers), **more}, event=kind)

    def end(self, error: Object | None = None) -> Iterator[str]:
        if error is not None:
            yield from self.closed("incomplete")
        response = self.response("completed" if error is None else "failed", error)
        yield self.sends(response["status"], response=response) if self.stream else json.dumps(response)
