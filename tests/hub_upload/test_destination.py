"""What a push finds where it goes: another model stays, and so does what people wrote."""

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from tests.hub_upload.clients import Answer, printed
from tests.hub_upload.conftest import tokens_of
from tests.hub_upload.test_push import PATIENCE, PUSH, command, content, push

THANKS = b"\n## Thanks\n\nTo my cat.\n"


@pytest.fixture
def base(hub, models):
    return hub.add("org/base", content(models / "base"))


@pytest.fixture
def folder(models, tmp_path):
    """Heads without a card."""
    shutil.copytree(models / "medusa", tmp_path / "heads")
    return tmp_path / "heads"


def words(folder, repo_id: str = "org/heads") -> tuple:
    return "push", folder, repo_id, "--license", "mit", "--base", "org/base"


def append_to_card(hub, text: bytes) -> None:
    files = dict(hub.repos["org/heads"].files())
    files["README.md"] += text
    hub.add("org/heads", files)


def nothing_was_sent(hub) -> bool:
    return {one.method for one in hub.asked} <= {"GET", "HEAD"}


OF_THE_BASE = "'org/base' is the repository of the base, which the heads would overwrite: push them to another."
OF_A_MODEL = (
    "'org/other' holds a 'llama' model without draft heads, which the heads would overwrite: push them to a repository "
    "of their own."
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
        f"hf-drafthead: 'org/other' holds another model ({name}), whose card the heads' would replace: push them to a "
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


@pytest.mark.slow
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
    assert f"note: removed from the repository, because they belong to earlier heads: {', '.join(stale)}" in lines
    assert len([line for line in lines if line.endswith(" removed")]) == len(stale)
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
    figures = {"model": "/home/me/heads", "base": "../base", "tokens_per_step": 2.5, "identical": True}
    figures["command"] = "hf-drafthead bench /home/me/heads --repeats 3"
    (folder / "evaluation.json").write_text(json.dumps(figures))
    answer = command(clients, *words(folder))
    assert answer.code == 0
    sent = json.loads(hub.repos["org/heads"].files()["evaluation.json"])
    figures |= {"model": "org/heads", "base": "org/base", "command": "hf-drafthead bench heads --repeats 3"}
    assert sent == figures


def test_a_base_that_goes_along_is_not_named_by_its_path(hub, clients, models):
    assert command(clients, *words(models / "medusa")[:-2], "--include-base").code == 0
    files = hub.repos["org/heads"].files()
    assert not json.loads(files["config.json"]).get("base_model_name_or_path")
    for name in ("config.json", "README.md", "generation_config.json", "tokenizer_config.json"):
        assert str(models).encode() not in files[name] and b"../base" not in files[name], name
    code = "model = AutoModel.from_pretrained('org/heads')\nprint(json.dumps(type(model.base).__name__))"
    assert clients.run(code).said == "LlamaForCausalLM"


def test_refusals_name_the_folder_that_was_given(hub, base, clients, folder):
    tensors = load_file(folder / "model.safetensors")
    next(iter(tensors.values())).view(-1)[0] = float("nan")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    line = command(clients, *words(folder)).err.splitlines()[-1]
    assert f"in {str(folder)!r} holds NaN or infinity" in line


def test_a_token_and_the_size_of_files_can_be_given(hub, base, clients, folder, models):
    given = ("--token", "hf_owner", "--include-base", "--max-shard-size", "20KB")
    answer = command(clients, *words(models / "medusa"), *given, token=None)
    assert answer.code == 0 and "hf_owner" not in answer.out + answer.err
    assert "model.safetensors.index.json" in hub.repos["org/heads"].files()


def test_who_proposes_already_is_not_told_to(hub, base, clients, folder):
    line = command(clients, *words(folder), "--create-pr", token="hf_reader").err.splitlines()[-1]
    assert "the token may not write to 'org/heads'" in line and "propose" not in line


def test_a_card_that_cannot_be_read_is_not_overwritten(hub, base, clients):
    push(clients)
    append_to_card(hub, THANKS)
    hub.fail("HEAD", "/org/heads/resolve/.*README.md", times=99, status=503)
    answer = clients.run(PATIENCE + PUSH, token="hf_owner", seed=1, words={})
    assert answer.err.splitlines()[-1] == (
        f"OSError: README.md of 'org/heads' at {hub.repos['org/heads'].refs['main']!r} cannot be fetched: the Hub "
        "answered 503: try again later."
    )
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
    answer = command(clients, *words(folder))
    assert "note: '## Advice' in the published card differs from the folder's, which is sent" in answer.out.splitlines()
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


def test_a_dry_run_without_the_network_tells_what_the_folder_holds(hub, base, clients, folder):
    hub.fail("GET", "/api/models/org/heads", times=99, status=503)
    answer = command(clients, *words(folder), "--dry-run")
    assert answer.code == 0, answer.err
    lines = answer.out.splitlines()
    assert any(line.startswith("note: 'org/heads' could not be read: ") for line in lines)
    assert any(line.startswith("model.safetensors ") for line in lines)


def test_a_failure_that_is_not_the_hubs_is_told_as_it_is(hub, base, clients):
    code = """
def full(*given, **more):
    raise RuntimeError("CUDA out of memory")
MedusaForCausalLM.save_pretrained = full
"""
    answer = clients.run(code + PUSH, token="hf_owner", seed=0, words={})
    assert answer.err.splitlines()[-1] == "RuntimeError: CUDA out of memory"


def test_a_wrong_token_that_is_printed_is_noticed(hub, clients):
    clients.run("HfApi().model_info('org/heads')".replace("HfApi", "transformers.utils.hub.HfApi"), token="hf_nobody")
    assert "hf_nobody" in tokens_of(hub)
    assert printed([Answer(1, "", "the token hf_nobody is wrong")], tokens_of(hub)) == ["hf_nobody"]


def test_heads_on_a_local_base_can_be_looked_at_and_written(hub, clients, models, folder, tmp_path):
    shutil.copytree(models / "base", tmp_path / "base")
    given = ("push", folder, "org/heads", "--license", "mit")
    line = "the base of these heads is the local path "
    refused = command(clients, *given)
    assert refused.code == 2 and line in refused.err
    dry = command(clients, *given, "--dry-run", "--json", tmp_path / "plan.json")
    assert dry.code == 1, dry.err
    lines = dry.out.splitlines()
    assert {"config.json", "model.safetensors", "README.md"} <= {shown.split()[0] for shown in lines}
    assert lines[-2].startswith(f"a push would be refused: {line}") and lines[-1] == "dry run: nothing was sent"
    assert json.loads((tmp_path / "plan.json").read_text())["refused"].startswith(line)
    written = command(clients, *given, "--to-folder", tmp_path / "elsewhere" / "out")
    assert written.code == 0, written.err
    assert written.out.splitlines()[-1].startswith("the files are in ")
    files = {path.name for path in (tmp_path / "elsewhere" / "out").iterdir()}
    assert {"config.json", "model.safetensors", "README.md", "tokenizer.json"} <= files
    assert nothing_was_sent(hub)
    code = """
        from transformers import AutoModelForCausalLM
        print(json.dumps(type(AutoModelForCausalLM.from_pretrained(place).base).__name__))
    """
    assert clients.run(code, place=str(tmp_path / "elsewhere" / "out")).said == "LlamaForCausalLM"
    again = command(clients, *given, "--to-folder", tmp_path / "elsewhere" / "out")
    assert again.code == 2 and "is there already: name a folder that is not" in again.err


def test_a_model_to_serve_that_the_hub_does_not_have_is_refused(hub, clients):
    pytest.importorskip("uvicorn")
    answer = command(clients, "serve", "org/nothing", token=None)
    assert answer.code == 2 and answer.err.count("\n") == 1
    line = "hf-drafthead: the heads 'org/nothing' cannot be fetched: the Hub has no such repository"
    assert answer.err.startswith(line)
