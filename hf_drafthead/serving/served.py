"""The model that is served: its prompts, from texts, chats and images, and how its answers are scored, ended and read.

Shapes: B rows of one request (several where it has beams), T tokens of the answer, V vocabulary.
"""

import asyncio
import copy
import json
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoProcessor, LogitsProcessor
from transformers.processing_utils import ProcessorMixin

from hf_drafthead.evaluation.calls import encode, positions_of
from hf_drafthead.evaluation.loading import load, load_arguments
from hf_drafthead.serving.requests import Object, Refused

RESERVED = {"messages", "tools", "add_generation_prompt", "chat_template"}  # of a template's words, no client's
EFFORT, THINKS, NO_EFFORT = "reasoning_effort", "enable_thinking", ("none", "minimal")
SPACES: Any = {"whitespace_flexible": True, "whitespace_pattern": " ?"}  # of JSON: a model may write them for ever
LEAST = -9999.0  # what OpenAI's API says of tokens that are hardly possible
MARGIN = 8  # tokens that are read again before those in which a stop string may begin
Prompt = tuple[list[int], Object]  # token ids, and what a base reads beside them


class Served:
    """A model with draft heads, what reads and writes its tokens, as the base does, and the manager that decodes."""

    def __init__(self, options: Any):
        self.options, self.name = options, options.model
        place, _, revision = (self.name, "", "") if Path(self.name).exists() else self.name.partition("@")
        device = None if options.device == "auto" else options.device
        arguments = load_arguments(options.dtype, device, None, options.trust_remote_code)
        self.model, tokenizer = load(place, **arguments, revision=revision or "main", exact=options.exact)
        self.base, self.processor = self.model.base, None
        own = {"config": self.base.config, "trust_remote_code": options.trust_remote_code}
        places = (self.base.name_or_path, "main"), (place, revision or "main")
        for name, version in places if hasattr(self.base.config, "vision_config") else ():
            with suppress(OSError, ValueError, ImportError):
                found = AutoProcessor.from_pretrained(name, revision=version, **own)
                self.processor = found if isinstance(found, ProcessorMixin) else self.processor
        self.tokenizer = getattr(self.processor, "tokenizer", tokenizer)
        self.decoder = copy.deepcopy(self.tokenizer)  # one that encodes cannot be read by other threads meanwhile
        self.reader = ThreadPoolExecutor(1)  # whose thread alone encodes
        self.special = dict(zip(self.tokenizer.all_special_tokens, self.tokenizer.all_special_ids))
        self.context = options.context or positions_of(self.model)
        self.vocabulary = self.base.get_input_embeddings().num_embeddings
        self.bounds = f"expected the ids of tokens, from 0 to {self.vocabulary - 1}."
        self.config = self.model.generation_config
        self.ends = listed(self.config.eos_token_id) or listed(self.tokenizer.eos_token_id)
        self.template = getattr(self.tokenizer, "response_template", None)
        with suppress(ImportError):  # it may move
            from transformers.cli.serving.utils import get_response_template

            self.template = get_response_template(self.tokenizer, self.base)
        self.grammar: Any = None
        self.open: set[asyncio.Queue[Any]] = set()  # where results of requests are waited for
        given = {name: getattr(options, name) for name in ("slots", "max_queue_size", "lookup_answers")}
        self.manager = self.model.init_continuous_batching(**given)
        if options.learn:
            self.manager.learn(everybody=False)
        self.manager.warmup()
        self.manager.start()

    def stop(self) -> None:
        """End all requests, with an error."""
        for results in self.open:  # before the manager, which reads a prompt to its end
            results.put_nowait(SimpleNamespace(error="the manager was stopped: this answer is not complete."))
        self.manager.stop(block=False, hard_stop=True)

    def prompt(self, given: Any) -> Prompt:
        """A text, or token ids, to be continued; what some tokenizers put behind a text, its end, is left out."""
        if not isinstance(given, str):
            if max(given) >= self.vocabulary:
                raise Refused("prompt", self.bounds)
            return given, {}
        return encode(self.model, self.tokenizer, [given])["input_ids"][0].tolist(), {}

    def chat(self, body: Object) -> Prompt:
        """A conversation as the chat template writes it, which has to read all that it is given."""
        variables, reader = self.options.chat_template_kwargs.copy(), self.processor or self.tokenizer
        variables |= body.get("chat_template_kwargs", {})
        tools, effort = body.get("tools"), body.get("reasoning_effort")
        template = str(reader.chat_template or self.tokenizer.chat_template or "")
        names, called = set(re.findall(r"\w+", template)), "tool_calls" in (self.template or {}).get("fields", {})
        if not template:
            raise Refused("messages", "this model has no chat template: ask /v1/completions.")
        if tools and not ("tools" in names and called):
            raise Refused("tools", "this model's chat template and tokenizer do not say how it calls tools.")
        if effort is not None:
            if not names & {EFFORT, THINKS}:
                raise Refused(EFFORT, "this model's chat template has no switch for it.")
            variables |= {EFFORT: effort} if EFFORT in names else {THINKS: effort not in NO_EFFORT}
        if unknown := variables.keys() - (names - RESERVED):
            raise Refused(f"chat_template_kwargs.{min(unknown)}", "this model's chat template does not read it.")
        turns = [self._turn(message, "developer" in names) for message in body["messages"]]
        form = {"tokenize": True, "return_dict": True, "return_tensors": "pt", "add_generation_prompt": True}
        inputs = reader.apply_chat_template(turns, tools=tools, **form, **variables)
        ids, _ = inputs.pop("input_ids")[0].tolist(), inputs.pop("attention_mask", None)
        images = any(name.startswith("pixel") for name in inputs)
        return ids, dict(inputs.to(self.base.device, self.base.dtype)) if images else {}

    def _turn(self, turn: Object, developers: bool) -> Object:
        """A message as chat templates read it: arguments as objects, images as images, text in one piece."""
        if turn["role"] == "developer" and not developers:
            turn["role"] = "system"
        for call in turn.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"] or "{}")
        content, parts = turn.get("content") or "", list[Object]()
        for part in [{"text": content}] if isinstance(content, str) else content:
            image = part.get("image_url")
            if image is not None and self.processor is None:
                raise Refused("messages.content.image_url", "this model reads text alone.")
            url = image["url"] if isinstance(image, dict) else image
            parts.append({"type": "text", "text": part["text"]} if url is None else {"type": "image", "url": url})
        turn["content"] = parts if self.processor else " ".join(part["text"] for part in parts)
        return turn

    def decode(self, ids: list[int], special: bool = False) -> str:
        """The text of an answer's tokens, with special ones or without."""
        return str(self.decoder.decode(ids, skip_special_tokens=not special))

    def name_of(self, token: int) -> str:
        """The text of one token, with the space that it begins with."""
        text, piece = self.decode([token], True), str(self.decoder.convert_ids_to_tokens(token))
        return f" {text}" if piece.startswith("▁") and not text.startswith(" ") else text

    def parser(self, prompt: list[int], body: Object) -> Any:
        """What takes thoughts and calls out of an answer, as the base writes them; None where that is unknown."""
        if self.template is None:
            return None
        from transformers.utils.chat_parsing import ResponseParser

        calls = body.get("tool_choice") != "none"
        fields = {name: rule for name, rule in self.template["fields"].items() if calls or name != "tool_calls"}
        about = {"prefix": self.decode(prompt, True), "tools": body.get("tools")}
        return ResponseParser({**self.template, "fields": fields}, **about)

    def matcher(self, schema: Object, parser: Any) -> Any:
        """A matcher of JSON that fits a schema; `Refused` for what is no schema, or has what is not supported."""
        if parser is not None and parser.initial_events and parser.initial_events[-1]["type"] != "region_close":
            raise Refused("response_format", "the chat template lets the model think first: turn that off.")
        try:
            from llguidance import LLMatcher
            from llguidance.hf import from_tokenizer
        except ImportError:
            raise Refused("response_format", "pip install 'hf-drafthead[structured]', which it needs.") from None
        size = max(self.vocabulary, len(self.decoder))
        self.grammar = self.grammar or from_tokenizer(self.decoder, n_vocab=size, eos_token=self.ends)
        matcher = LLMatcher(self.grammar, LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=SPACES))
        if problem := matcher.get_error():
            raise Refused("response_format", f"this schema cannot be used: {' '.join(problem.split())}")
        return matcher


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


class TokenScores(LogitsProcessor):
    """Takes penalties, keeps log probabilities, `alternatives` beside the chosen one's, and keeps to a grammar."""

    def __init__(self, prompt_length: int, penalties: Any, alternatives: int | None, matcher: Any):
        self.prompt_length, (self.presence, self.frequency) = prompt_length, penalties
        self.alternatives, self.matcher = alternatives, matcher
        self.read: list[int] = []  # by the matcher
        self.noted: dict[int, tuple[float, list[tuple[int, float]]]] = {}  # by place in the answer

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        answer = input_ids[:, self.prompt_length :]  # (B, T)
        times = torch.zeros_like(scores).scatter_add_(1, answer, torch.ones_like(answer, dtype=scores.dtype))
        scores = scores - self.frequency * times - self.presence * (times > 0)
        if self.alternatives is not None:
            self.newest = scores[0].float().log_softmax(-1)
        for row, tokens in enumerate(answer.tolist() if self.matcher is not None else ()):
            self._read(tokens)
            allowed = torch.frombuffer(bytearray(self.matcher.compute_logit_bias()), dtype=torch.uint8) > 0
            allowed = torch.nn.functional.pad(allowed, (0, scores.shape[1] - len(allowed)))
            scores[row].masked_fill_(~allowed.to(scores.device), -torch.inf)
        return scores

    def certain_path(self, prefix: Tensor, most: int) -> list[int]:
        """The tokens that the grammar leaves no choice of behind a prefix (P,), see `generation.grammar`."""
        if self.matcher is None:
            return []
        self._read(prefix[self.prompt_length :].tolist())
        path: list[int] = self.matcher.compute_ff_tokens()
        return path[:most]

    def _read(self, answer: list[int]) -> None:
        """Let the matcher stand behind an answer."""
        same = len(os.path.commonprefix([answer, self.read]))
        self.matcher.rollback(len(self.read) - same)
        self.matcher.try_consume_tokens(answer[same:])
        self.read = answer

    def ended(self, input_ids: Tensor, decode: Callable[[list[int]], str], stops: list[str]) -> Tensor:
        """Which answers end behind a stop string, (B,); log probabilities of what was chosen are noted."""
        answers = input_ids[:, self.prompt_length :].tolist()
        if self.alternatives is not None:
            values, tokens = self.newest.topk(self.alternatives)
            best = [*zip(tokens.tolist(), values.clamp(min=LEAST).tolist())]
            self.noted[len(answers[0]) - 1] = max(float(self.newest[answers[0][-1]]), LEAST), best
        window = max((len(stop.encode()) for stop in stops), default=0) + MARGIN
        texts = [decode(answer[-window:]) for answer in answers]
        return torch.tensor([any(stop in text for stop in stops) for text in texts], device=input_ids.device)
