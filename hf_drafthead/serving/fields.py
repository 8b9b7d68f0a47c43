"""The fields of OpenAI's three calls that work here, with the values that they may have; others are refused.

A rule is a type, a `range` of whole numbers, the least and the most of a number as a pair, a list of the values that
are allowed, the rules of an object's fields, or {EACH: the rules of each object of a list}.
"""

import copy
import json
import reprlib
from typing import Any

from transformers import GenerationConfig

EACH, LARGEST, COUNT = "each", 1 << 63, range(1, 1 << 31)
FUNCTION = {"name": str, "description": str, "parameters": dict, "strict": [False]}
SCHEMA = {"name": str, "description": str, "schema": dict, "strict": bool}
FORMAT = {"type": ["text", "json_object", "json_schema"]}
MESSAGE: dict[str, Any] = dict.fromkeys(("name", "tool_call_id", "reasoning_content", "refusal"), str)
MESSAGE |= {"role": ["system", "developer", "user", "assistant", "tool"], "content": str | list}
MESSAGE |= {"tool_calls": list, "annotations": list}
COMMON: dict[str, Any] = {"model": str, "temperature": (0, 2), "top_p": (0, 1), "seed": range(-LARGEST, 2 * LARGEST)}
COMMON |= {"stream": bool, "stream_options": {"include_usage": bool, "include_obfuscation": [False]}}
COMMON |= {"generation_config": str | dict}
SCORES = {"frequency_penalty": (-2, 2), "presence_penalty": (-2, 2), "logit_bias": dict, "n": range(1, 129)}
SCORES |= {"stop": str | list, "max_tokens": COUNT}
OF_CHATS = {"tool_choice": ["auto", "none"], "parallel_tool_calls": bool, "top_logprobs": range(21), "store": [False]}
OF_CHATS |= {"chat_template_kwargs": dict, "metadata": dict, "service_tier": ["auto", "default"]}
COMPLETIONS = {**COMMON, **SCORES, "prompt": str | list, "logprobs": range(21), "echo": bool}
CHAT = {**COMMON, **SCORES, **OF_CHATS, "messages": {EACH: MESSAGE}, "max_completion_tokens": COUNT, "logprobs": bool}
CHAT |= {"tools": {EACH: {"type": ["function"], "function": FUNCTION}}, "modalities": [["text"]]}
CHAT |= {"response_format": {**FORMAT, "json_schema": SCHEMA}, "reasoning_effort": str}
RESPONSES = {**COMMON, **OF_CHATS, "input": str | list, "instructions": str, "max_output_tokens": COUNT}
RESPONSES |= {"reasoning": {"effort": str}, "text": {"format": {**FORMAT, **SCHEMA}}, "background": [False]}
RESPONSES |= {"tools": {EACH: {"type": ["function"], **FUNCTION}}, "truncation": ["disabled"]}
RESPONSES |= {"include": [[], ["message.output_text.logprobs"]]}
RESPONSES["stream_options"] = {"include_obfuscation": [False]}
OF_ITEMS = {"type": str, "id": str, "status": str}
ITEMS: dict[str, dict[str, Any]] = {"message": {**MESSAGE, **OF_ITEMS}}
ITEMS["function_call"] = {**OF_ITEMS, "call_id": str, "name": str, "arguments": str}
ITEMS["function_call_output"] = {**OF_ITEMS, "call_id": str, "output": str | list}
ITEMS["reasoning"] = {**OF_ITEMS, "summary": list, "content": list}
# Of a generation config, what a client may set; and what would make an answer something else than one text.
OF_CONFIGS = set("do_sample temperature top_k top_p min_p top_h typical_p epsilon_cutoff eta_cutoff seed".split())
OF_CONFIGS |= set("repetition_penalty no_repeat_ngram_size bad_words_ids suppress_tokens sequence_bias".split())
OF_CONFIGS |= set("begin_suppress_tokens exponential_decay_length_penalty renormalize_logits guidance_scale".split())
OF_CONFIGS |= set("max_new_tokens min_new_tokens num_beams length_penalty early_stopping".split())
FIXED = {"num_return_sequences": 1, "return_dict_in_generate": False, "max_length": None, "stop_strings": None}
FIXED |= dict.fromkeys(("output_scores", "output_logits", "output_attentions", "output_hidden_states"), False)
UNKNOWN = "this server does not know or support it: leave it out."


class Refused(ValueError):
    """What a client has asked for and does not get."""

    def __init__(self, field: str, reason: str, code: str | None = None):
        super().__init__(f"{field}: {reason}")
        self.field, self.code = field, code


def checked(body: Any, rules: dict[str, Any], inside: str = "") -> dict[str, Any]:
    """The fields of an object that are not null; those that are unknown, or do not fit, are `Refused`."""
    if not isinstance(body, dict):
        raise Refused(inside.rstrip(".") or "body", "expected a JSON object.")
    kept: dict[str, Any] = {}
    for name, value in body.items():
        rule, place, fits, expected = rules.get(name), f"{inside}{name}", True, ""
        if value is None:
            continue
        if rule is None:
            raise Refused(place, UNKNOWN)
        if isinstance(rule, dict) and EACH in rule:
            fits, expected = isinstance(value, list), "a list"
            value = [checked(item, rule[EACH], f"{place}[{at}].") for at, item in enumerate(value if fits else [])]
        elif isinstance(rule, dict):
            value = checked(value, rule, f"{place}.")
        elif isinstance(rule, range):
            fits, expected = type(value) is int and value in rule, f"a whole number from {rule[0]} to {rule[-1]}"
        elif isinstance(rule, tuple):
            fits, expected = type(value) in (int, float) and rule[0] <= value <= rule[1], f"a number of {[*rule]}"
        elif isinstance(rule, list):
            fits, expected = any(value is one or value == one != 0 for one in rule), " or ".join(map(json.dumps, rule))
        else:
            fits, expected = isinstance(value, rule), getattr(rule, "__name__", str(rule))
        if not fits:
            raise Refused(place, f"it is {reprlib.repr(body[name])}: expected {expected}.")
        kept[name] = value
    return kept


def generation_config(body: dict[str, Any], of_base: GenerationConfig) -> GenerationConfig:
    """How a request is decoded: as the base says, but for what the client asks for."""
    config, given = copy.deepcopy(of_base), body.get("generation_config", {})
    given = json.loads(given) if isinstance(given, str) else given
    for name, value in checked(given, dict.fromkeys(given, object), "generation_config.").items():
        if value not in (getattr(of_base, name, None), FIXED.get(name)) and name != "transformers_version":
            if name not in OF_CONFIGS:
                raise Refused(f"generation_config.{name}", UNKNOWN)
            setattr(config, name, value)
    for name, value in FIXED.items():
        setattr(config, name, value)
    if not body.keys().isdisjoint(("temperature", "top_p", "seed")) or body.get("n", 1) > 1:
        config.do_sample = body.get("temperature", 1) > 0
        for name in {"temperature", "top_p"} & body.keys() if config.do_sample else ():
            setattr(config, name, float(body[name]))
    return config
