"""A new user's path, command by command: generate, train on ten chats, calibrate, measure, push, load elsewhere.

The commands run in copies of a process that has imported everything (see `clients`), because importing takes seconds;
`tests/test_cli.py` starts the installed command itself.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hf_drafthead import zoo
from tests.hub_upload.clients import ROOT, environment
from tests.hub_upload.test_push import command, content

TEMPLATE = (
    "{% for m in messages %}{{ 'user: ' if m.role == 'user' else 'assistant: ' }}{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
FEW_STEPS = ("max_steps=2", "per_device_train_batch_size=2", "num_draft_heads=2", "use_cpu=true", "report_to=none")
ELSEWHERE = """
import json
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained("org/heads", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("org/heads", trust_remote_code=True)
chat = [{"role": "user", "content": "abc?"}]
given = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
out = model.generate(**given, max_new_tokens=12, return_dict_in_generate=True, draft_tree=[[0], [1]])
print(json.dumps({
    "class": type(model).__name__,
    "same": out.sequences.equal(model.base.generate(**given, max_new_tokens=12)),
    "steps": out.accepted_lengths.shape[1],
    "calibrated": len(model.generation_config.calibration),
}))
"""


def test_the_first_command_of_the_readme_writes_text(hub, clients):
    words = ("generate", zoo.path("eagle"), "--prompt", "def main(", "--max-new-tokens", 8, "--color")
    answer = command(clients, *words, token=None)
    assert answer.code == 0, answer.err
    assert "\x1b[32m" in answer.out and "8 tokens in" in answer.err


@pytest.fixture
def trained(hub, clients, models, tmp_path) -> Path:
    """Heads trained on ten chats, for a base that is at the Hub; calibrated, measured and checked."""
    hub.add("org/base", content(models / "base"))
    turns = [("user", "abc{}?"), ("assistant", "defg hijk lmno")]
    chats = [{"messages": [{"role": role, "content": text.format(n)} for role, text in turns]} for n in range(10)]
    data, template, heads = tmp_path / "chats.jsonl", tmp_path / "chat.jinja", tmp_path / "my-heads"
    data.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    template.write_text(TEMPLATE)
    settings = [word for pair in FEW_STEPS for word in ("--set", pair)]
    rows = ("--answer-tokens", 8, "--no-calibrate")
    few = ("--limit", 2, "--max-new-tokens", 8)
    source = ("--base", "org/base", "--family", "medusa", "--data", data, "--chat-template", template)
    for words in (
        ("train", *source, "--output", heads, *rows, *settings),
        ("calibrate", heads, "--prompts", data, "--max-nodes", 4, "--max-new-tokens", 32),
        ("bench", heads, "--questions", data, "--repeats", 1, *few, "--json", heads / "evaluation.json"),
        ("verify", heads, "--prompts", data, *few, "--json", heads / "evaluation_verify.json"),
    ):
        answer = command(clients, *words)
        assert answer.code == 0, (words[0], answer.err)
    return heads


def test_heads_trained_on_ten_chats_are_published_and_load_without_an_import(hub, clients, trained, tmp_path):
    summary = json.loads((trained / "training_summary.json").read_text())
    assert (summary["base"], summary["steps"]) == ("org/base", 2) and summary["data_report"]["kept"] == 10
    assert json.loads((trained / "evaluation.json").read_text())["identical"]
    answer = command(clients, "push", trained, "org/heads", "--license", "mit")
    assert answer.code == 0, answer.err
    sent = hub.repos["org/heads"].files()
    assert {"model.safetensors", "modeling_drafthead.py", "chat_template.jinja", "evaluation_verify.json"} <= set(sent)
    assert b"base_model: org/base" in sent["README.md"]
    assert (trained / "clock.json").is_file() and not {"clock.json", "run.json"} & set(sent)  # of the training

    ended = subprocess.run(
        [sys.executable, "-c", ELSEWHERE],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment(hub.url, tmp_path / "home"),
        stdin=subprocess.DEVNULL,
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["class"] == "MedusaForCausalLM" and found["same"] and found["calibrated"] == 1 and found["steps"] <= 11
