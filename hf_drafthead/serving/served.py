"""The model that is served: its prompts, from texts, chats and images, and how its answers are read."""

import copy
import json
import re
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from transformers import AutoProcessor
from transformers.processing_utils import ProcessorMixin

from hf_drafthead.data.texts import frame
from hf_drafthead.evaluation.calls import positions_of
from hf_drafthead.evaluation.loading import load, load_arguments
from hf_drafthead.serving.fields import Refused

TEXTS, IMAGES = ("text", "input_text", "output_text"), ("image_url", "input_image")
RESERVED = {"messages", "tools", "add_generation_prompt", "chat_template"}  # of a template's words, no client's
EFFORT, THINKS, NO_EFFORT = "reasoning_effort", "enable_thinking", ("none", "minimal")
SPACES: Any = {"whitespace_flexible": True, "whitespace_pattern": " ?"}  # of JSON: a model may write them for ever


@dataclass
class Prompt:
    """Token ids, and what a base reads beside them."""

    ids: list[int]
    inputs: dict[str, Any] = field(default_factory=dict)


class Served:
    """A model with draft heads and what reads and writes its tokens; what depends on the base is asked of the base."""

    def __init__(self, options: Any):
        self.options, self.name = options, options.model
        device = None if options.device == "auto" else options.device
        arguments = load_arguments(options.dtype, device, None, options.trust_remote_code) | options.hub
        if options.attn_implementation is not None:
            arguments["attn_implementation"] = options.attn_implementation
        self.model, tokenizer = load(options.place, **arguments, exact=options.exact)
        trust = {"trust_remote_code": True} if options.trust_remote_code else {}
        self.base, self.images = self.model.base, None
        places = [(self.base.name_or_path, trust), (options.place, {**options.hub, **trust})]
        for place, named in places if hasattr(self.base.config, "vision_config") else ():
            with suppress(OSError, ValueError, ImportError):
                found = AutoProcessor.from_pretrained(place, config=self.base.config, **named)
                self.images = found if isinstance(found, ProcessorMixin) else self.images
        own = getattr(self.images, "tokenizer", None)
        self.tokenizer = tokenizer if own is None else own
        self.decoder = copy.deepcopy(self.tokenizer)  # for other threads: one that encodes cannot be read meanwhile
        self.context = options.context or positions_of(self.model)
        self.vocabulary = self.base.get_input_embeddings().num_embeddings
        ends = self.model.generation_config.eos_token_id
        ends = self.tokenizer.eos_token_id if ends is None else ends
        self.ends: list[int] = [ends] if isinstance(ends, int) else list(ends or [])
        self.template = response_template(self.tokenizer, self.base)
        self._grammar: Any = None

    def prompt(self, given: Any) -> Prompt:
        """A text, or token ids, to be continued; what some tokenizers put behind a text, its end, is left out."""
        if not isinstance(given, str):
            if not all(type(token) is int and 0 <= token < self.vocabulary for token in given):
                raise Refused("prompt", f"expected the ids of tokens, from 0 to {self.vocabulary - 1}.")
            return Prompt(given)
        ids, ending = self.tokenizer(given)["input_ids"], frame(self.tokenizer)[1]
        return Prompt(ids[: -len(ending)] if ending and ids[-len(ending) :] == ending else ids)

    def chat(self, messages: list[dict[str, Any]], tools: Any, variables: dict[str, Any], effort: Any) -> Prompt:
        """A conversation as the chat template writes it, which has to read all that it is given."""
        variables = {**self.options.chat_template_kwargs, **variables}
        template = str(getattr(self.images, "chat_template", None) or self.tokenizer.chat_template or "")
        names, called = set(re.findall(r"\w+", template)), "tool_calls" in (self.template or {}).get("fields", {})
        if not template or not messages:
            reason = "expected some." if template else "this model has no chat template: ask /v1/completions."
            raise Refused("messages", reason)
        if tools and not ("tools" in names and called):
            raise Refused("tools", "this model's chat template and tokenizer do not say how it calls tools.")
        if effort is not None:
            if not names & {EFFORT, THINKS}:
                raise Refused(EFFORT, "this model's chat template has no switch for it.")
            variables |= {EFFORT: effort} if EFFORT in names else {THINKS: effort not in NO_EFFORT}
        if unknown := variables.keys() - (names - RESERVED):
            raise Refused(f"chat_template_kwargs.{min(unknown)}", "this model's chat template does not read it.")
        call = {**variables, "add_generation_prompt": True, "tools": tools}
        call |= {"tokenize": True, "return_dict": True, "return_tensors": "pt" if self.images else None}
        turns = [self._turn(message, "developer" in names) for message in messages]
        inputs = dict((self.images or self.tokenizer).apply_chat_template(turns, **call))
        ids, _ = inputs.pop("input_ids"), inputs.pop("attention_mask", None)
        if not self.images:
            return Prompt(ids)
        if not any(name.startswith("pixel") for name in inputs):
            return Prompt(ids[0].tolist())
        types = {name: self.base.dtype if value.is_floating_point() else None for name, value in inputs.items()}
        moved = {name: value.to(self.base.device, types[name]) for name, value in inputs.items()}
        return Prompt(ids[0].tolist(), moved)

    def _turn(self, message: dict[str, Any], developers: bool) -> dict[str, Any]:
        """A message as chat templates read it: arguments as objects, images as images, text in one piece."""
        turn = copy.deepcopy(message)
        turn["role"] = "system" if turn["role"] == "developer" and not developers else turn["role"]
        for call in turn.get("tool_calls", ()):
            if isinstance(call["function"]["arguments"], str):
                call["function"]["arguments"] = json.loads(call["function"]["arguments"] or "{}")
        content = turn.get("content") or []
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else [*map(self._part, content)]
        turn["content"] = parts if self.images else " ".join(part["text"] for part in parts)
        return turn

    def _part(self, part: dict[str, Any]) -> dict[str, Any]:
        kind, image = part["type"], part.get("image_url")
        if kind in TEXTS:
            return {"type": "text", "text": part["text"]}
        if kind not in IMAGES or not self.images:
            raise Refused(f"content.{kind}", f"this model reads text{' and images' * bool(self.images)} alone.")
        image = image if isinstance(image, dict) else {**part, "url": image}
        if image.get("detail", "auto") != "auto" or not str(image["url"]).startswith("data:image/"):
            raise Refused("image_url", "send the image itself, as a data: URL, without detail; nothing is fetched.")
        return {"type": "image", "url": image["url"]}

    def decode(self, ids: list[int], special: bool = False) -> str:
        """The text of an answer's tokens, with special ones or without."""
        return str(self.decoder.decode(ids, skip_special_tokens=not special))

    def name_of(self, token: int) -> str:
        """The text of one token, with the space that it begins with."""
        text, piece = self.decode([token], True), str(self.decoder.convert_ids_to_tokens(token))
        return f" {text}" if piece.startswith("▁") and not text.startswith(" ") else text

    def parser(self, prompt: Prompt, tools: Any, calls: bool) -> Any:
        """What takes thoughts and calls out of an answer, as the base writes them; None where that is unknown."""
        if self.template is None:
            return None
        from transformers.utils.chat_parsing import ResponseParser

        fields = {name: rule for name, rule in self.template["fields"].items() if calls or name != "tool_calls"}
        return ResponseParser({**self.template, "fields": fields}, prefix=self.decode(prompt.ids, True), tools=tools)

    def matcher(self, schema: dict[str, Any]) -> Any:
        """A matcher of JSON that fits a schema; `Refused` for what is no schema, or has what is not supported."""
        if find_spec("llguidance") is None:
            raise Refused("response_format", "llguidance is not installed: pip install 'hf-drafthead[structured]'.")
        from llguidance import LLMatcher
        from llguidance.hf import from_tokenizer

        size = max(self.vocabulary, len(self.decoder))
        self._grammar = self._grammar or from_tokenizer(self.decoder, n_vocab=size, eos_token=self.ends)
        matcher = LLMatcher(self._grammar, LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=SPACES))
        if problem := matcher.get_error():
            raise Refused("response_format", f"this schema cannot be used: {' '.join(problem.split())}")
        return matcher


def response_template(tokenizer: Any, base: Any) -> Any:
    """How the base's answers are parsed: as its tokenizer says, else as transformers' own server does; or None."""
    try:
        from transformers.cli.serving.utils import get_response_template
    except ImportError:  # it may move
        return getattr(tokenizer, "response_template", None)
    return get_response_template(tokenizer, base)
