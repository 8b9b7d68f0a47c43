"""The fields of OpenAI's three calls that work here, with the values that they may have; others are refused."""

from contextlib import suppress
from typing import Annotated, Any, Literal, get_origin

from fastapi import HTTPException
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import Required, TypeAliasType, TypedDict

Object = dict[str, Any]
LONGEST = 1 << 40  # characters, so that a text is looked at, and one with half a character refused
Value = TypeAliasType("Value", "dict[Text, Value] | list[Value] | Text | int | float | bool | None")
Text = Annotated[str, Field(max_length=LONGEST)]
many: Any = list
by_name: Any = dict


def fields(**kinds: Any) -> Any:
    """An object with these fields and no others, each of which may be left out, or null, unless it is `Required`."""
    known = {name: kind if get_origin(kind) is Required else kind | None for name, kind in kinds.items()}
    made: Any = TypedDict("Fields", known, total=False)  # type: ignore
    return with_config(ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, str_max_length=LONGEST))(made)


def number(least: Any, most: Any) -> Any:
    return Annotated[type(least), Field(ge=least, le=most)]


def some(kind: Any) -> Any:
    return Annotated[kind, Field(min_length=1)]


COUNT, NO, MUST, TOKENS = number(1, (1 << 31) - 1), Literal[False], Required[str], some(many[number(0, (1 << 31) - 1)])
LEFT = {"annotations": list, "logprobs": list, "detail": Literal["auto"]}  # of parts, without effect
OF_PARTS: Any = Literal["text", "input_text", "output_text", "reasoning_text", "image_url", "input_image"]
IMAGE, DETAIL = Annotated[str, Field(pattern="^data:image/")], Literal["auto"]  # nothing is fetched
PART = fields(type=Required[OF_PARTS], text=str, image_url=IMAGE | fields(url=Required[IMAGE], detail=DETAIL), **LEFT)
FUNCTION = {"name": MUST, "description": str, "parameters": by_name[str, Value], "strict": NO}
SCHEMA = {"name": str, "description": str, "schema": by_name[str, Value], "strict": bool}
FORMAT = {"type": Literal["text", "json_object", "json_schema"]}
ROLE, CONTENT = Literal["system", "developer", "user", "assistant", "tool"], str | many[PART]
CALL = fields(id=str, type=str, index=int, function=Required[fields(name=MUST, arguments=MUST)])
MESSAGE = {"role": Required[ROLE], "content": CONTENT, "annotations": list, "tool_calls": many[CALL]}
MESSAGE |= dict.fromkeys(("name", "tool_call_id", "reasoning_content", "refusal"), str)
OF_ITEMS = {"message": {"role", "content"}, "function_call": {"name", "arguments", "call_id"}}
OF_ITEMS |= {"function_call_output": {"call_id", "output"}, "reasoning": {"content", "summary"}}
ITEM: Object = {"type": Literal["message", "function_call", "function_call_output", "reasoning"], "role": ROLE}
ITEM |= dict.fromkeys(("id", "status", "name", "arguments", "call_id"), str)
ITEM |= {"content": CONTENT, "output": CONTENT, "summary": list}
COMMON: Object = {"model": str, "temperature": number(0.0, 2), "top_p": number(0.0, 1), "stream": bool}
COMMON |= {"top_k": COUNT, "min_p": number(0.0, 1), "repetition_penalty": number(0.01, 100)}
COMMON |= {"seed": number(-(1 << 63), (1 << 64) - 1), "store": bool}
COMMON |= {"stream_options": fields(include_usage=bool, include_obfuscation=NO)}
SCORES: Object = {"logit_bias": by_name[str, number(-100.0, 100)], "n": number(1, 128)}
SCORES |= {"stop": some(str) | many[some(str)], "max_tokens": COUNT}
OF_CHATS: Object = {"tool_choice": Literal["auto", "none"], "parallel_tool_calls": bool}
OF_CHATS |= {"chat_template_kwargs": by_name[str, Value], "service_tier": Literal["auto", "default"]}
COMPLETIONS = {**COMMON, **SCORES, "logprobs": number(0, 20)}
COMPLETIONS |= {"prompt": Required[some(str) | TOKENS | some(many[some(str) | TOKENS])]}
CHAT = {**COMMON, **SCORES, **OF_CHATS, "messages": Required[some(many[fields(**MESSAGE)])]}
CHAT |= {"max_completion_tokens": COUNT, "logprobs": bool, "top_logprobs": number(0, 20), "reasoning_effort": str}
CHAT |= dict.fromkeys(("frequency_penalty", "presence_penalty"), number(-2.0, 2))
CHAT |= {"tools": many[fields(type=Literal["function"], function=Required[fields(**FUNCTION)])]}
CHAT |= {"response_format": fields(**FORMAT, json_schema=fields(**SCHEMA)), "modalities": many[Literal["text"]]}
RESPONSES = {**COMMON, **OF_CHATS, "input": Required[some(str | many[fields(**ITEM)])], "instructions": str}
RESPONSES |= {"reasoning": fields(effort=str), "text": fields(format=fields(**FORMAT, **SCHEMA)), "background": NO}
RESPONSES |= {"tools": many[fields(type=Literal["function"], **FUNCTION)], "max_output_tokens": COUNT}
RESPONSES |= {"metadata": by_name[str, str], "truncation": Literal["disabled"]}
RESPONSES |= {"stream_options": fields(include_obfuscation=NO)}


class Refused(HTTPException):
    """What a client has asked for and does not get."""

    def __init__(self, field: str, reason: str, code: str | None = None):
        self.field, self.reason, self.code = field, reason, code
        message = " ".join(f"{field}: {reason}".split())
        super().__init__(400, {"message": message, "param": field, "code": code})


def checked(kind: TypeAdapter, body: Any) -> Any:
    """The fields of an object that are not null; those that are unknown, or do not fit, are `Refused`."""
    try:
        return kind.dump_python(kind.validate_python(body), exclude_none=True)
    except ValidationError as error:
        of_types = [(len(each["loc"]), "unicode" in each["type"], each) for each in error.errors()]
        worst = max(of_types, key=lambda of_type: of_type[:2])[2]  # the type that fits best
    place = ""
    for part in worst["loc"]:
        with suppress(TypeError, LookupError):  # the name of a type
            body, place = body[part], f"{place}[{part}]" if isinstance(part, int) else f"{place}.{part}"
    place += f".{worst['loc'][-1]}" if worst["type"] == "missing" else ""
    unknown = worst["type"] == "extra_forbidden"
    reason = "this server does not know or support it: leave it out" if unknown else worst["msg"]
    raise Refused(place.removeprefix(".") or "body", f"{reason}.")


def as_chat(body: Object) -> Object:
    """What the body of a response asks for, in the fields of a chat; thoughts, text and calls of a turn are one."""
    given, form = body["input"], body.get("text", {}).get("format", {})
    messages: list[Object] = [{"role": "system", "content": body["instructions"]}] if "instructions" in body else []
    items: list[Object] = [{"role": "user", "content": given}] if isinstance(given, str) else given
    for place, item in enumerate(items):
        turn: Object = {"role": "assistant"}
        kind = item.get("type", "message")
        for name in item.keys() - {"type", "id", "status"} - OF_ITEMS[kind]:
            raise Refused(f"input[{place}].{name}", f"an item of type {kind!r} has none: leave it out.")
        match kind:
            case "function_call":
                function = {"name": item["name"], "arguments": item["arguments"]}
                turn["tool_calls"] = [{"id": item["call_id"], "type": "function", "function": function}]
            case "function_call_output":
                turn = {"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]}
            case "reasoning":
                said = item.get("summary", []) + item.get("content", [])
                turn["reasoning_content"] = "".join(part["text"] for part in said)
            case _:
                turn = {"role": item["role"], "content": item["content"]}
        last: Object = messages[-1] if messages else {"role": None}
        if turn["role"] == last["role"] == "assistant" and not turn.keys() & last.keys() - {"role", "tool_calls"}:
            turn["tool_calls"] = last.get("tool_calls", []) + turn.get("tool_calls", [])
            last |= turn
        else:
            messages.append(turn)
    tools = [{"function": {name: tool[name] for name in FUNCTION if name in tool}} for tool in body.get("tools", [])]
    chat = {"messages": messages, "tools": tools, "response_format": form | {"json_schema": form}}
    return body | chat | {"reasoning_effort": body.get("reasoning", {}).get("effort")}
