"""The fields of OpenAI's three calls that work here, with the values that they may have; others are refused."""

import copy
from typing import Annotated, Any, Literal, get_origin

from pydantic import ConfigDict, Field, Json, TypeAdapter, ValidationError, with_config
from transformers import GenerationConfig
from typing_extensions import Required, TypedDict


def fields(**kinds: Any) -> Any:
    """An object with these fields and no others, each of which may be left out, or null, unless it is `Required`."""
    known = {name: kind if get_origin(kind) is Required else kind | None for name, kind in kinds.items()}
    made: Any = TypedDict("Fields", known, total=False)  # type: ignore
    return with_config(ConfigDict(extra="forbid", strict=True, allow_inf_nan=False))(made)


def number(least: Any, most: Any) -> Any:
    return Annotated[type(least), Field(ge=least, le=most)]


COUNT, TEXT, NO = number(1, (1 << 31) - 1), Annotated[str, Field(min_length=1)], Literal[False]
FUNCTION = {"name": str, "description": str, "parameters": dict, "strict": NO}
SCHEMA = {"name": str, "description": str, "schema": dict, "strict": bool}
FORMAT = {"type": Literal["text", "json_object", "json_schema"]}
ROLE = Literal["system", "developer", "user", "assistant", "tool"]
MESSAGE: dict[str, Any] = {"role": Required[ROLE], "content": str | list, "tool_calls": list, "annotations": list}
MESSAGE |= dict.fromkeys(("name", "tool_call_id", "reasoning_content", "refusal"), str)
COMMON: dict[str, Any] = {"model": str, "temperature": number(0.0, 2), "top_p": number(0.0, 1), "stream": bool}
COMMON |= {"seed": number(-(1 << 63), (1 << 64) - 1), "generation_config": Json[dict] | dict}
COMMON |= {"stream_options": fields(include_usage=bool, include_obfuscation=NO)}
SCORES: dict[str, Any] = {"logit_bias": dict[str, number(-100.0, 100)], "n": number(1, 128)}  # type: ignore
SCORES |= {"stop": TEXT | list[TEXT], "max_tokens": COUNT}  # type: ignore
OF_CHATS = {"tool_choice": Literal["auto", "none"], "parallel_tool_calls": bool, "top_logprobs": number(0, 20)}
OF_CHATS |= {"chat_template_kwargs": dict, "metadata": dict, "service_tier": Literal["auto", "default"], "store": bool}
COMPLETIONS = {**COMMON, **SCORES, "prompt": str | list, "logprobs": number(0, 20)}
CHAT = {**COMMON, **SCORES, **OF_CHATS, "messages": list[fields(**MESSAGE)]}  # type: ignore
CHAT |= {"max_completion_tokens": COUNT, "logprobs": bool, "reasoning_effort": str}
CHAT |= dict.fromkeys(("frequency_penalty", "presence_penalty"), number(-2.0, 2))
CHAT |= {"tools": list[fields(type=Literal["function"], function=fields(**FUNCTION))]}  # type: ignore
CHAT |= {"response_format": fields(**FORMAT, json_schema=fields(**SCHEMA)), "modalities": list[Literal["text"]]}
RESPONSES = {**COMMON, **OF_CHATS, "input": str | list, "instructions": str, "max_output_tokens": COUNT}
RESPONSES |= {"reasoning": fields(effort=str), "text": fields(format=fields(**FORMAT, **SCHEMA)), "background": NO}
RESPONSES |= {"tools": list[fields(type=Literal["function"], **FUNCTION)]}  # type: ignore
RESPONSES |= {"include": list[Literal["message.output_text.logprobs"]], "truncation": Literal["disabled"]}
RESPONSES |= {"stream_options": fields(include_obfuscation=NO)}
OF_ITEMS = {"type": str, "id": str, "status": str}
ITEMS: dict[str, Any] = {"message": {**MESSAGE, **OF_ITEMS, "content": Required[str | list]}}
ITEMS["function_call"] = {**OF_ITEMS, **dict.fromkeys(("call_id", "name", "arguments"), Required[str])}
ITEMS["function_call_output"] = {**OF_ITEMS, "call_id": Required[str], "output": Required[str | list]}
ITEMS["reasoning"] = {**OF_ITEMS, "summary": list, "content": list[fields(type=str, text=Required[str])]}  # type: ignore
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


def checked(kind: TypeAdapter, body: Any, place: str = "") -> dict[str, Any]:
    """The fields of an object that are not null; those that are unknown, or do not fit, are `Refused`."""
    try:
        fitting: dict[str, Any] = kind.dump_python(kind.validate_python(body), exclude_none=True)
        return fitting
    except ValidationError as error:
        first = error.errors()[0]
    for part in first["loc"]:  # which ends with the names of types, where there are several
        if isinstance(body, dict) and part in body:
            place, body = f"{place}.{part}", body[part]
        elif isinstance(body, list) and isinstance(part, int):
            place, body = f"{place}[{part}]", body[part]
    place += f".{first['loc'][-1]}" if first["type"] == "missing" else ""
    reason = UNKNOWN if first["type"] == "extra_forbidden" else f"{first['msg']}."
    raise Refused(place.removeprefix(".") or "body", reason)


def generation_config(body: dict[str, Any], of_base: GenerationConfig) -> GenerationConfig:
    """How a request is decoded: as the base says, but for what the client asks for."""
    config, given = copy.deepcopy(of_base), body.get("generation_config", {})
    for name, value in given.items():
        if value not in (None, getattr(of_base, name, None), FIXED.get(name)) and name != "transformers_version":
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
