"""From a training straight to the Hub: what belongs to the heads goes along, what belongs to the training stays."""

import json

from hf_drafthead.training.run import train_heads
from tests.hub_upload.test_push import PATIENCE, command, content


def test_the_folder_of_a_training_is_pushed_as_it_is(hub, base, clients, models, tmp_path):
    rows = [{"text": f"abcdefgh ijkl {number} mnop qrst uvwx"} for number in range(12)]
    (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    heads = tmp_path / "heads"
    few = {"max_steps": 2, "save_steps": 1, "per_device_train_batch_size": 2, "held_out_rows": 3, "answer_tokens": 4}
    quiet = {"use_cpu": True, "disable_tqdm": True, "report_to": "none"}
    train_heads(str(models / "base"), "medusa", tmp_path / "texts.jsonl", heads, **few, **quiet)
    assert (heads / "checkpoint-2").is_dir()
    before = sorted(heads.rglob("*"))
    words = ("push", heads, "org/heads", "--license", "mit", "--base", "org/base")
    dry = command(clients, *words, "--dry-run", "--json", tmp_path / "plan.json")
    assert dry.code == 0, dry.err
    told = [line for line in dry.out.splitlines() if line.startswith("note: not uploaded")]
    behind = "checkpoint-1, checkpoint-2, clock.json, run.json"
    assert told == [f"note: not uploaded, because others need none of it: {behind}"]
    planned = {one["path"] for one in json.loads((tmp_path / "plan.json").read_text())["files"]}
    assert {"model.safetensors", "tokenizer.json", "training_summary.json"} <= planned
    assert command(clients, *words).code == 0
    sent = set(hub.repos["org/heads"].files()) - {".gitattributes"}
    assert sent == planned and not any("checkpoint" in name or name in ("run.json", "clock.json") for name in sent)
    assert sorted(heads.rglob("*")) == before


def test_facts_that_the_hub_does_not_give_out_are_not_left_out(hub, base, clients, models):
    config = json.loads((models / "medusa" / "config.json").read_text()) | {"base_model_name_or_path": "org/base"}
    files = content(models / "medusa") | {"config.json": json.dumps(config).encode()}
    hub.add("org/heads", files | {"training_summary.json": b'{"steps": 7}'})
    hub.fail("HEAD", "/org/heads/resolve/.*training_summary", times=99, status=503)
    code = """
model = AutoModel.from_pretrained("org/heads")
model.push_to_hub("org/copy", license="mit")
"""
    answer = clients.run(PATIENCE + code, token="hf_owner", home="facts")
    assert "OSError: what belongs to the heads 'org/heads' cannot be fetched (" in answer.err.splitlines()[-1]
    assert "org/copy" not in hub.repos
    hub.faults.clear()
    assert clients.run(code, token="hf_owner", home="facts").code == 0
    assert "training_summary.json" in hub.repos["org/copy"].files()
