"""One answer: what the manager is asked for it, and what becomes of its tokens."""

import functools
import json
import re
from dataclasses import dataclass, field
from typing import Any

from hf_drafthead.serving.fields import Refused, generation_config
from hf_drafthead.serving.processors import StopText, TokenScores
from hf_drafthead.serving.served import Prompt

LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
PIECES = re.compile("[^<>]+|.", re.DOTALL)  # so that what stands before the marker behind a faulty call is not lost
CUT = "\N{REPLACEMENT CHARACTER}"  # what a decoder writes for a part of a character
# Text, log probability, those of others, and where it begins.
Token = tuple[str, float, list[tuple[str, float]], int]


@dataclass
class Delta:
    """What an answer has grown by; `first` is of its beginning."""

    first: bool = False
    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, str]] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)


class TextSoFar:
    """Decodes tokens as they come: the pieces together are the text of all tokens."""

    def __init__(self, decode: Any):
        self.decode, self.tokens, self.shown, self.length = decode, list[int](), 0, 0

    def add(self, tokens: list[int], last: bool = False) -> str:
        """What is sure of the text now; a character of which a part has come waits for the others."""
        self.tokens += tokens
        before, text = self.decode(self.tokens[: self.shown]), self.decode(self.tokens)
        if len(text) <= len(before) or text.endswith(CUT) and not last:
            return ""
        self.tokens, self.shown = self.tokens[self.shown :], len(self.tokens) - self.shown  # before the next ones
        self.length += len(text) - len(before)
        return text[len(before) :]


class Choice:
    """One answer to a prompt of a `call` of `formats`, the `sibling`th: `settings` for the manager, and its results."""

    def __init__(self, call: Any, prompt: Prompt, index: int, sibling: int):
        self.call, self.prompt, self.index, self.id = call, prompt, index, f"{call.key}-{index}"
        self.served, body, of_base = call.served, call.body, call.served.model.generation_config
        self.config = generation_config(body, of_base)
        self._set_length()
        stops = [stop for some in (body.get("stop"), of_base.stop_strings) for stop in listed(some)]
        special = dict(zip(self.served.tokenizer.all_special_tokens, self.served.tokenizer.all_special_ids))
        self.ends = [*self.served.ends, *(special[stop] for stop in stops if stop in special)]
        self.stops = [stop for stop in stops if stop not in special]
        self.config.eos_token_id = self.ends or None
        self.parser = self.served.parser(prompt, call.tools, body.get("tool_choice") != "none") if call.chat else None
        decode = functools.partial(self.served.decode, special=self.parser is not None)
        self.scores, self.text, self.held, self.raw = self._scores(), TextSoFar(decode), "", ""
        self.count, self.calls, self.finish, self.cut, self.result = 0, 0, "", False, None
        self.tokens: list[Token] = []  # whose text is held
        self.delta: Delta | None = None
        seed = None if "seed" not in body else body["seed"] + sibling
        self.settings: dict[str, Any] = {"generation_config": self.config, "seed": seed, **prompt.inputs}
        if self.scores is not None:
            self.settings["logits_processor"] = [self.scores]
        if self.stops:
            self.settings["stopping_criteria"] = [StopText(decode, self.stops, len(prompt.ids))]

    def _set_length(self) -> None:
        context, length, most = self.served.context, len(self.prompt.ids), self.call.most
        if context is not None and (total := length + (most or 1)) > context:
            field = next((name for name in LENGTHS if name in self.call.body), "prompt")
            asked = f"you requested {total} tokens ({length} in the prompt, {most or 1} in the completion)"
            reason = f"This model's maximum context length is {context} tokens. However, {asked}: ask for fewer."
            raise Refused(field, reason, "context_length_exceeded")
        left = 1024 if context is None else context - length
        self.config.max_new_tokens = most or min(self.config.max_new_tokens or self.call.default or left, left)

    def _scores(self) -> TokenScores | None:
        """What changes the scores of tokens, or notes them; None where nothing does but what the config says."""
        body, alternatives, matcher, size = self.call.body, self.call.alternatives, None, self.served.vocabulary
        if given := body.get("logit_bias"):
            if not all(token.isdecimal() and int(token) < size for token in given):
                raise Refused("logit_bias", f"expected numbers by the ids of tokens, from 0 to {size - 1}.")
            biases = [[[int(token)], float(value)] for token, value in given.items()]
            self.config.sequence_bias = [*(self.config.sequence_bias or []), *biases]
        if alternatives is not None and (self.config.num_beams or 1) > 1:
            raise Refused("logprobs", "an answer by beams has none.")
        if self.call.schema is not None:
            begun = [] if self.parser is None else self.parser.initial_events
            if begun and begun[-1]["type"] != "region_close":
                raise Refused("response_format", "the chat template lets the model think first: turn that off.")
            matcher = self.served.matcher(self.call.schema)
        penalties = body.get("presence_penalty", 0.0), body.get("frequency_penalty", 0.0)
        if not any(penalties) and matcher is None and alternatives is None:
            return None
        return TokenScores(len(self.prompt.ids), penalties, alternatives, matcher)

    def take(self, result: Any) -> Delta:
        """What a result of the manager adds to the answer; with the last one it has a reason for its end."""
        new, first, last = result.generated_tokens[self.count :], self.count, result.is_finished()
        ended, self.count = last and bool(new) and new[-1] in self.ends, len(result.generated_tokens)
        if not self.cut:
            self._hold(new[: len(new) - ended], first, last)
        held = 0 if last or self.cut else max(map(len, self.stops), default=1) - 1  # a stop string may have begun
        sure = self.held[: max(len(self.held) - held, 0)]
        self.held = self.held[len(sure) :]
        tokens = [token for token in self.tokens if last or token[3] < self.text.length - len(self.held)]
        self.tokens = self.tokens[len(tokens) :]
        self.delta = self._parsed(sure, last, Delta(first=self.delta is None, tokens=tokens))
        if last:
            self.result, self.finish = result, "tool_calls" if self.calls else "stop" if ended or self.cut else "length"
        return self.delta

    def _hold(self, new: list[int], first: int, last: bool) -> None:
        """Let the text that is held grow by new tokens, and cut it where the first stop string begins."""
        if self.scores is not None and self.call.alternatives is not None:
            for place, token in enumerate(new, first):
                logprob, best = self.scores.logprob(place, token)
                named = [(self.served.name_of(other), value) for other, value in best]
                self.tokens.append((self.served.name_of(token), logprob, named, self.text.length))
                self.held += self.text.add([token])
            new = []
        self.held += self.text.add(new, last)
        if places := [self.held.find(stop) for stop in self.stops if stop in self.held]:
            end = self.text.length - len(self.held) + min(places)
            self.held, self.cut = self.held[: min(places)], True
            self.tokens = [token for token in self.tokens if token[3] < end]

    def _parsed(self, text: str, last: bool, delta: Delta) -> Delta:
        """Text sorted into content, thoughts and calls; a call that is not whole, or no JSON, is content."""
        several = self.call.body.get("parallel_tool_calls", True)
        for piece in [*PIECES.findall(text), *[""] * last]:
            if self.parser is None:
                delta.content += piece
                continue
            try:
                events = self.parser.feed(piece) if piece else self.parser.finalize()[1]
            except (ValueError, RuntimeError):
                delta.content, events, self.parser = delta.content + self.raw, [], None
            for event in events:
                kind, name, said = event["type"], event.get("field"), event.get("text", "")
                self.raw = "" if kind == "region_close" else self.raw + said * bool(event.get("dirty"))
                delta.content += said if name == "content" else ""
                delta.reasoning += said if name in ("reasoning_content", "thinking") else ""
                if kind == "region_close" and name == "tool_calls" and (several or not self.calls):
                    called, self.calls = event["value"]["function"], self.calls + 1
                    given = called["arguments"]
                    given = given if isinstance(given, str) else json.dumps(given)
                    delta.calls.append({"name": called["name"], "arguments": given})
        return delta


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]
