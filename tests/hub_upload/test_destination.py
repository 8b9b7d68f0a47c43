"""What a push finds where it goes: another model stays, and so does what people wrote."""

import json

import pytest

from tests.hub_upload.clients import Answer, printed
from tests.hub_upload.conftest import tokens_of
from tests.hub_upload.test_push import PATIENCE, PUSH, command, content, nothing_was_sent, push

THANKS = b"\n## Thanks\n\nTo my cat.\n"


def words(folder, repo_id: str = "org/heads") -> tuple:
    return "push", folder, repo_id, "--license", "mit", "--base", "org/base"


def append_to_card(hub, text: bytes) -> None:
    files = dict(hub.repos["org/heads"].files())
    files["README.md"] += text
    hub.add("org/heads", files)


OF_THE_BASE = "'org/base' is the repository of the base, which the heads would overwrite: push them to another."
OF_A_MODEL = (
    "'org/other' holds a 'llama' model without draft heads (config.json), which the heads would overwrite: push them "
    "to a repository of their own."
)


@pytest.mark.slow
@pytest.mark.parametrize("repo_id, line", [("org/base", OF_THE_BASE), ("org/other", OF_A_MODEL)])
@pytest.mark.parametrize("extra", [(), ("--dry-run",), ("--create-pr",), ("--revision", "trial")], ids=" ".join)
def test_another_model_is_not_overwritten(hub, base, clients, models, folder, repo_id, line, extra):
    hub.add("org/other", content(models / "base"))
    answer = command(clients, *words(folder, repo_id), *extra)
    assert answer.code == 2 and answer.err.splitlines()[-1] == f"hf-drafthead: {line}"
    assert nothing_was_sent(hub) and len(hub.repos[repo_id].commits) == 1


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "unet/model.bin", "model_index.json"])
def test_a_model_without_a_config_is_one_all_the_same(hub, base, clients, folder, name):
    hub.add("org/other", {name: b"{}", "README.md": b"mine"})
    answer = command(clients, *words(folder, "org/other"))
    assert answer.code == 2 and answer.err.splitlines()[-1] == (
        f"hf-drafthead: 'org/other' holds another model ({name}), which the heads would overwrite: push them to a "
        "repository of their own."
    )
    assert nothing_was_sent(hub)


def test_a_loaded_model_does_not_overwrite_its_base(hub, base, clients):
    code = PUSH.replace("org/heads", "org/base")
    answer = clients.run(code, token="hf_owner", seed=0, words={})
    assert answer.err.splitlines()[-1] == f"ValueError: {OF_THE_BASE}"
    assert nothing_was_sent(hub) and len(base.commits) == 1


def test_only_weights_that_would_be_read_instead_are_removed(hub, base, clients):
    push(clients)
    files = dict(hub.repos["org/heads"].files())
    read = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"}
    other = {"model.fp16.safetensors", "model_ema.safetensors", "old/model.safetensors", "models/model.safetensors"}
    hub.add("org/heads", files | dict.fromkeys(read | other, b"weights"))
    assert push(clients, seed=1).code == 0
    assert set(hub.repos["org/heads"].files()) == set(files) | other


def test_nothing_is_left_of_what_other_heads_were_measured_to_do(hub, base, clients, models, folder):
    stale = ["evaluation-chat.json", "head_accuracies.png", "training.png", "training_summary.json"]
    for name in stale:
        (folder / name).write_text("{}")
    (folder / "NOTICE").write_text("mine")
    push(clients)
    there = hub.repos["org/heads"].files()
    hub.add("org/heads", there | {path.name: path.read_bytes() for path in folder.iterdir() if path.name in stale})
    other = words(models / "hydra")
    lines = command(clients, *other, "--dry-run").out.splitlines()
    assert {line.split()[0] for line in lines if line.endswith(" removed")} == set(stale)
    assert command(clients, *other).code == 0
    after = hub.repos["org/heads"].files()
    assert not set(stale) & set(after)
    tags = after["README.md"].decode().partition("tags:")[2].partition("\n---")[0]
    assert "- hydra\n" in tags and "- medusa\n" not in tags


def test_a_name_without_an_owner_is_completed_everywhere(hub, base, clients, folder):
    answer = command(clients, *words(folder, "mine"))
    assert answer.code == 0 and "files for owner/mine" in answer.out
    card = hub.repos["owner/mine"].files()["README.md"].decode()
    assert '"owner/mine"' in card and '"mine"' not in card


def test_paths_of_this_machine_stay_here(hub, base, clients, folder):
    figures = {"model": "/home/me/heads", "base": "org/base", "tokens_per_step": 2.5, "identical": True}
    (folder / "evaluation.json").write_text(json.dumps(figures | {"command": "hf-drafthead bench /home/me/heads"}))
    assert command(clients, *words(folder)).code == 0
    sent = json.loads(hub.repos["org/heads"].files()["evaluation.json"])
    assert sent == figures | {"model": "heads", "command": "hf-drafthead bench heads"}


def test_a_base_that_goes_along_is_not_named_by_its_path(hub, clients, models):
    given = ("--include-base", "--token", "hf_owner", "--max-shard-size", "20KB")
    twice = command(clients, *words(models / "medusa"), *given, token=None)
    assert twice.code == 2 and twice.err.endswith("(base/) and is pushed with them: leave --base out.\n")
    answer = command(clients, *words(models / "medusa")[:-2], *given, token=None)
    assert answer.code == 0 and "hf_owner" not in answer.out + answer.err
    files = hub.repos["org/heads"].files()
    assert "base/model.safetensors.index.json" in files
    for name in ("config.json", "README.md", "generation_config.json", "tokenizer_config.json", "base/config.json"):
        assert str(models).encode() not in files[name] and b"../base" not in files[name], name
    code = "model = AutoModel.from_pretrained('org/heads')\nprint(json.dumps(type(model.base).__name__))"
    assert clients.run(code).said == "LlamaForCausalLM"


def test_a_card_that_cannot_be_read_is_not_overwritten(hub, base, clients):
    push(clients)
    append_to_card(hub, THANKS)
    hub.fail("HEAD", "/org/heads/resolve/.*README.md", times=99, status=503)
    answer = clients.run(PATIENCE + PUSH, token="hf_owner", seed=1, words={})
    assert "OSError: README.md of 'org/heads' cannot be fetched (" in answer.err.splitlines()[-1]
    assert b"To my cat." in hub.repos["org/heads"].files()["README.md"]


def test_a_new_branch_starts_with_what_people_wrote(hub, base, clients):
    push(clients)
    append_to_card(hub, THANKS)
    assert push(clients, seed=1, revision="trial").code == 0
    assert b"To my cat." in hub.repos["org/heads"].files("trial")["README.md"]


def test_the_card_of_a_folder_and_the_published_one_become_one(hub, base, clients, folder):
    command(clients, "card", folder, "--license", "mit")
    card = folder / "README.md"
    card.write_text(card.read_text() + "\n## Advice\n\nTrain longer.\n")
    assert command(clients, *words(folder)).code == 0
    append_to_card(hub, THANKS)
    files = dict(hub.repos["org/heads"].files())
    files["README.md"] = files["README.md"].replace(b"license: mit\n", b"license: mit\nlanguage: en\n")
    hub.add("org/heads", files)
    assert command(clients, *words(folder)).code == 0
    joined = hub.repos["org/heads"].files()["README.md"]
    assert joined.count(b"To my cat.") == joined.count(b"Train longer.") == 1 and b"language: en\n" in joined
    again = command(clients, *words(folder))
    assert again.out.splitlines()[-1] == "nothing has changed: no commit was made"
    card.write_text(card.read_text().replace("Train longer.", "Train shorter."))
    command(clients, *words(folder))
    joined = hub.repos["org/heads"].files()["README.md"]
    assert b"To my cat." in joined and b"Train shorter." in joined and b"Train longer." not in joined


@pytest.mark.few(1)
@pytest.mark.parametrize("private", [True, False], ids=["private", "public"])
def test_a_repository_that_others_see_otherwise_than_asked(hub, base, clients, private):
    push(clients, private=not private)
    hub.asked.clear()
    answer = push(clients, seed=1, private=private)
    is_, asked = ("public", "private") if private else ("private", "public")
    assert answer.err.splitlines()[-1] == (
        f"ValueError: 'org/heads' is {is_} already, and {asked} was asked for: change it in its settings on the Hub, "
        "or leave private= (--private, --public) out."
    )
    assert nothing_was_sent(hub) and len(hub.repos["org/heads"].commits) == 2
    assert push(clients, seed=1, private=not private).code == 0


def test_a_wrong_token_that_is_printed_is_noticed(hub, clients):
    clients.run("HfApi().model_info('org/heads')".replace("HfApi", "transformers.utils.hub.HfApi"), token="hf_nobody")
    assert "hf_nobody" in tokens_of(hub)
    assert printed([Answer(1, "", "the token hf_nobody is wrong")], tokens_of(hub)) == ["hf_nobody"]


def test_heads_on_a_local_base_can_be_looked_at(hub, clients, models, tmp_path):
    given = ("push", models / "medusa", "org/heads", "--license", "mit")
    dry = command(clients, *given, "--dry-run", "--json", tmp_path / "plan.json")
    assert dry.code == 1, dry.err
    *_, refused, last = dry.out.splitlines()
    assert refused.startswith("a push would be refused: the base of these heads is the local path '../base'")
    assert last == "dry run: nothing was sent" and nothing_was_sent(hub)
    assert refused.endswith(json.loads((tmp_path / "plan.json").read_text())["refused"])


def test_a_model_to_serve_that_the_hub_does_not_have_is_refused(hub, clients):
    pytest.importorskip("uvicorn")
    answer = command(clients, "serve", "org/nothing", token=None)
    assert answer.code == 2 and answer.err.count("\n") == 1
    assert answer.err.startswith("hf-drafthead: config.json of 'org/nothing' cannot be fetched (org/nothing is not")
