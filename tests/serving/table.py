"""The table of fields in docs/serving.md: what a server answers where each is sent. python -m tests.serving.table"""

import json
import re
import tempfile
from pathlib import Path
from typing import Any

from openai.types.chat.completion_create_params import CompletionCreateParamsBase as OfChats
from openai.types.completion_create_params import CompletionCreateParamsBase as OfCompletions
from openai.types.responses.response_create_params import ResponseCreateParamsBase as OfResponses

from hf_drafthead.serving import requests

DOCS = Path(__file__).parents[2] / "docs" / "serving.md"
MARKS = "<!-- table -->\n", "<!-- end of table -->"
MESSAGES = [{"role": "user", "content": "def main("}]
CALLS = {
    "completions": ({"prompt": "def main(", "max_tokens": 2}, OfCompletions, requests.COMPLETIONS),
    "chat/completions": ({"messages": MESSAGES, "max_tokens": 2}, OfChats, requests.CHAT),
    "responses": ({"input": "def main(", "max_output_tokens": 2}, OfResponses, requests.RESPONSES),
}
OF_OPENAI = {call: set(params.__annotations__) | {"stream"} for call, (_, params, _) in CALLS.items()}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
# A value of each field that works where the field does, and what the table says of it.
VALUES: dict[str, tuple[Any, str]] = {
    "model": (None, "the name that is served, or nothing"),
    "messages": (MESSAGES, "what their roles and contents are is said below"),
    "prompt": ("def main(", "a text, token ids, or a list of these"),
    "input": ("def main(", "a text, or messages, calls, their results and thoughts"),
    "instructions": ("Be brief.", "a system message in front"),
    "temperature": (1.5, "0 to 2; up to 1e-6 is greedy. It samples whatever the base's generation config says"),
    "top_p": (0.9, "0 to 1; samples, too"),
    "seed": (3, "the text of `torch.manual_seed(seed)` and the base alone; samples, too"),
    "n": (2, "1 to 128; with a seed the answers are those of seeds that follow each other"),
    "max_tokens": (2, "16 by default for completions, else what the context leaves"),
    "max_completion_tokens": (2, "as max_tokens"),
    "max_output_tokens": (2, "as max_tokens"),
    "stop": ("\n", "a text or some; not in the answer"),
    "stream": (True, "events as they come"),
    "stream_options": ({"include_usage": True}, "with stream"),
    "frequency_penalty": (0.5, "-2 to 2"),
    "presence_penalty": (0.5, "-2 to 2"),
    "logit_bias": ({"5": -100}, "-100 to 100, by token id"),
    "logprobs": (True, "after penalties and biases, before temperature and top_p"),
    "top_logprobs": (2, "up to 20, with logprobs"),
    "response_format": ({"type": "json_object"}, "JSON, or JSON that fits a schema; needs `hf-drafthead[structured]`"),
    "text": ({"format": {"type": "json_object"}}, "`format`, as response_format"),
    "tools": ([TOOL], "where the base's template and tokenizer say how it calls them"),
    "tool_choice": ("none", "`auto` or `none`"),
    "parallel_tool_calls": (False, "false: the first call alone"),
    "reasoning_effort": ("low", "where the chat template has a switch; `none` turns `enable_thinking` off"),
    "reasoning": ({"effort": "low"}, "`effort`, as reasoning_effort"),
    "chat_template_kwargs": ({"reasoning_effort": "low"}, "variables that the chat template reads"),
    "top_k": (5, "from 1; samples, too, from so many of the likeliest tokens"),
    "min_p": (0.1, "0 to 1; samples, too, from tokens that are so likely beside the likeliest"),
    "repetition_penalty": (1.1, "0.01 to 100; above 1 what was written becomes less likely"),
    "metadata": ({"a": "b"}, "texts by name; comes back with the answer"),
    "store": (False, "`false`, or with `--learn` whether heads may learn from the answer"),
    "background": (False, "`false`"),
    "truncation": ("disabled", "`disabled`"),
    "service_tier": ("auto", "`auto`, `default`"),
    "modalities": (["text"], '`["text"]`'),
}
OTHERS = {("completions", "logprobs"): 2, ("responses", "tools"): [{"type": "function", "name": "add"}]}
OTHERS |= {("responses", "stream_options"): {"include_obfuscation": False}}
NEEDS = {"stream_options": {"stream": True}, "top_logprobs": {"logprobs": True}}


def outcome(client: Any, call: str, field: str) -> str:
    """What becomes of a field: works, or is refused by its name with status 400; anything else is an error."""
    plain, _, known = CALLS[call]
    value = OTHERS.get((call, field), VALUES.get(field, ("x", ""))[0])
    body = plain | {name: on for name, on in NEEDS.get(field, {}).items() if name in known} | {field: value}
    answer = client.post(f"/v1/{call}", json={name: one for name, one in body.items() if one is not None})
    if answer.status_code == 200:
        assert field in known, f"{field} is without effect in {call}"
        return "works"
    error = answer.json()["error"]
    assert answer.status_code == 400 and re.split(r"\W", error["param"])[0] == field, (field, call, error)
    return "as it is" if field in known else "refused"


def table(client: Any) -> str:
    """The table, as Markdown."""
    lines = ["| field | completions | chat | responses | |", "|---|---|---|---|---|"]
    extra = {name for _, _, known in CALLS.values() for name in known}
    for field in sorted(extra | set().union(*OF_OPENAI.values())):
        cells = []
        for call, (_, _, known) in CALLS.items():
            asked = field in OF_OPENAI[call] or field in known
            words = {"works": "yes", "refused": "400", "as it is": "where the model can"}
            cells.append(words[outcome(client, call, field)] if asked else "")
        lines.append(f"| `{field}` | {' | '.join(cells)} | {VALUES.get(field, ('', ''))[1]} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    from tests.serving.conftest import with_template
    from tests.serving.running import in_process

    with tempfile.TemporaryDirectory() as place, in_process(with_template(Path(place))) as client:
        text, written = DOCS.read_text(), table(client)
    begin, end = map(re.escape, MARKS)
    DOCS.write_text(re.sub(f"(?<={begin}).*?(?={end})", lambda _: written, text, flags=re.DOTALL))
    print(json.dumps({"fields": written.count("\n") - 2}))
