"""What a push sends, in how many commits, and what survives when the storage fails."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load

# What a client does who has trained heads on a base that is at the Hub.
TRAINED = """
torch.manual_seed(seed)
model = MedusaForCausalLM.from_base("org/base", num_draft_heads=2)
model.generation_config.draft_tree = [[0], [1], [0, 0]]
for parameter in model.drafter.parameters():
    torch.nn.init.normal_(parameter)
"""
PUSH = TRAINED + "commit = model.push_to_hub('org/heads', license='mit', **words)\nprint(json.dumps(commit.oid))"
SENT = {
    "README.md",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "modeling_drafthead.py",
    "tokenizer.json",
    "tokenizer_config.json",
}


def nothing_was_sent(hub) -> bool:
    return {one.method for one in hub.asked} <= {"GET", "HEAD"}


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def push(clients, *, seed: int = 0, token: str | None = "hf_owner", **words):
    return clients.run(PUSH, token=token, seed=seed, words=words)


def command(clients, *words, token: str | None = "hf_owner"):
    line = "hf_drafthead.cli.main(words)"
    return clients.run(line, token=token, words=[str(word) for word in words])


def test_a_push_is_one_commit_with_all_that_belongs_to_the_heads(hub, base, clients):
    assert push(clients).said == hub.repos["org/heads"].refs["main"]
    repo = hub.repos["org/heads"]
    assert not repo.private
    assert [commit.title for commit in repo.commits] == ["initial commit", "Upload draft heads"]
    files = repo.files()
    assert set(files) - {".gitattributes"} == SENT
    assert all(name.startswith("drafter.") for name in load(files["model.safetensors"]))
    config = json.loads(files["config.json"])
    assert config["base_model_name_or_path"] == "org/base"
    assert config["base_model_revision"] == base.refs["main"]
    assert json.loads(files["generation_config.json"])["draft_tree"] == [[0], [1], [0, 0]]
    assert b"license: mit" in files["README.md"] and b"base_model: org/base" in files["README.md"]


def test_a_second_push_of_the_same_heads_makes_no_commit(hub, base, clients):
    first, again = push(clients).said, push(clients).said
    assert first == again == hub.repos["org/heads"].refs["main"]
    assert len(hub.repos["org/heads"].commits) == 2
    assert hub.count("PUT", "^/lfs/") == 1  # weights, once
    assert push(clients, seed=1).said != first
    assert len(hub.repos["org/heads"].commits) == 3


def test_transformers_words_for_a_push_are_understood(hub, base, clients):
    words = {
        "private": True,
        "commit_message": "heads",
        "revision": "trial",
        "tags": ["mine"],
        "max_shard_size": "10KB",
    }
    push(clients, **words)
    repo = hub.repos["org/heads"]
    assert repo.private and set(repo.refs) == {"main", "trial"}
    assert repo.commits[-1].title == "heads" and repo.refs["trial"] == repo.commits[-1].oid
    assert list(repo.files("main")) == [".gitattributes"]
    files = repo.files("trial")
    assert "model.safetensors.index.json" in files and "model.safetensors" not in files
    assert b"- mine\n" in files["README.md"]


def test_who_may_not_write_can_propose(hub, base, clients):
    push(clients)
    refused = push(clients, seed=1, token="hf_stranger")
    line = "OSError: the push to 'org/heads' failed (You don't have the rights to write to org/heads): log in"
    assert refused.err.splitlines()[-1].startswith(line)
    assert push(clients, use_temp_dir=1).err.endswith("push_to_hub has no argument use_temp_dir=: leave it out.\n")
    assert push(clients, seed=1, token="hf_stranger", create_pr=True).code == 0
    repo = hub.repos["org/heads"]
    assert set(repo.refs) == {"main", "refs/pr/1"}
    assert repo.files("refs/pr/1")["model.safetensors"] != repo.files()["model.safetensors"]


TRAIN = """
ids = torch.arange(5, 25)[None]
def train(model):
    model.base.requires_grad_(True)
    model.base(ids, labels=ids).loss.backward()
    torch.optim.SGD(model.base.parameters(), lr=1.0).step()
    model.zero_grad()
    return model.generate(ids, max_new_tokens=12).tolist()
"""


def test_a_trained_base_is_pushed_whole_and_stays_whole_in_its_own_repository(hub, base, clients):
    code = (
        TRAINED
        + TRAIN
        + """
texts = [train(model)]
model.push_to_hub("org/heads", license="mit", max_shard_size="10KB")
again = AutoModel.from_pretrained("org/heads")
texts.append(again.generate(ids, max_new_tokens=12).tolist())
again.push_to_hub("org/heads", license="mit")
texts.append(train(again))
again.push_to_hub("org/heads", license="mit")
texts.append(AutoModel.from_pretrained("org/heads", force_download=True).generate(ids, max_new_tokens=12).tolist())
print(json.dumps(texts))
"""
    )
    first, loaded, trained_again, last = clients.run(code, token="hf_owner", seed=0).said
    assert loaded == first and last == trained_again
    weights = {name for name in hub.repos["org/heads"].files() if "safetensors" in name}
    assert weights == {"model.safetensors", "base/model.safetensors"}  # and none of the earlier shards
    assert all("base/config.json" in commit.files for commit in hub.repos["org/heads"].commits[1:])


def test_figures_go_along_with_the_heads_that_they_are_of(hub, base, clients, models, tmp_path):
    (tmp_path / "heads").mkdir()
    code = (
        TRAINED
        + """
model.save_pretrained(folder)
for name, facts in (("training_summary", {"steps": 7}), ("evaluation", {"tokens_per_step": 2.5, "identical": True})):
    open(f"{folder}/{name}.json", "w").write(json.dumps(facts))
model = AutoModel.from_pretrained(folder)
model.push_to_hub("org/same", license="mit")
model.drafter.blocks[0].weight.data += 1
model.push_to_hub("org/other", license="mit")
"""
    )
    answer = clients.run(code, token="hf_owner", seed=0, folder=str(tmp_path / "heads"))
    assert answer.code == 0, answer.err
    figures = {"training_summary.json", "evaluation.json"}
    assert set(hub.repos["org/same"].files()) - {".gitattributes"} == SENT | figures
    assert set(hub.repos["org/other"].files()) - {".gitattributes"} == SENT
    assert b"2.5" in hub.repos["org/same"].files()["README.md"]
    assert b"not measured" in hub.repos["org/other"].files()["README.md"]


@pytest.mark.parametrize("loader", ["AutoModel", "MedusaForCausalLM"])
def test_what_belongs_to_heads_of_a_revision_comes_from_there(hub, base, clients, loader):
    push(clients)
    files = hub.repos["org/heads"].files()
    heads = hub.add("org/heads", {**files, "NOTICE": b"of the first"})
    heads.refs["first"] = heads.refs["main"]
    hub.add("org/heads", {**files, "NOTICE": b"of the second"})
    code = f"{loader}.from_pretrained('org/heads', revision='first').push_to_hub('org/copy', license='mit')"
    assert clients.run(code, token="hf_owner").code == 0
    assert hub.repos["org/copy"].files()["NOTICE"] == b"of the first"


def test_a_folder_with_a_local_base_is_pushed_once_the_base_is_named(hub, base, clients, models):
    before = content(models / "medusa")
    refused = command(clients, "push", models / "medusa", "org/heads", "--license", "mit")
    assert refused.code == 2
    assert refused.err.endswith(
        "the base of these heads is the local path '../base', which others cannot load: name it on the Hub (--base "
        "ORG/NAME, or model.config.base_model_name_or_path = 'org/name'), or push it along with its heads "
        "(--include-base, or include_base=True).\n"
    )
    assert "org/heads" not in hub.repos
    words = ("push", models / "medusa", "org/heads", "--license", "mit", "--base", "org/base")
    done = command(clients, *words)
    assert done.code == 0, done.err
    assert done.out.splitlines()[-1] == f"{hub.url}/org/heads/commit/{hub.repos['org/heads'].refs['main']}"
    assert command(clients, *words).out.splitlines()[-1] == "nothing has changed: no commit was made"
    assert hub.repos["org/heads"].files()["model.safetensors"] == before["model.safetensors"]
    assert content(models / "medusa") == before  # the folder itself stays as it is


def test_a_dry_run_shows_what_would_be_sent_and_sends_nothing(hub, base, clients, models, tmp_path):
    words = ("push", models / "medusa", "org/heads", "--license", "mit", "--base", "org/base")
    file = tmp_path / "plan.json"
    dry = command(clients, *words, "--dry-run", "--json", file)
    assert dry.code == 0 and dry.out.splitlines()[-1] == "dry run: nothing was sent"
    assert "org/heads" not in hub.repos and nothing_was_sent(hub)
    plan = json.loads(file.read_text())
    command(clients, *words)
    sent = hub.repos["org/heads"].files()
    sizes = {name: len(data) for name, data in sent.items() if name != ".gitattributes"}
    assert {one["path"]: one["bytes"] for one in plan["files"]} == sizes and plan["removed"] == []
    hub.add("org/heads", sent | {"model-00001-of-00001.safetensors": b"old"})
    dry = command(clients, *words, "--dry-run", "--json", file)
    assert json.loads(file.read_text())["removed"] == ["model-00001-of-00001.safetensors"]
    assert any(line.split() == ["model-00001-of-00001.safetensors", "removed"] for line in dry.out.splitlines())


def test_an_upload_that_fails_is_completed_by_pushing_again(hub, base, clients):
    hub.fail("PUT", "^/lfs/", times=20, status=503)
    failed = clients.run(PATIENCE + PUSH, token="hf_owner", seed=0, words={})
    assert "OSError: the push to 'org/heads' failed (" in failed.err
    assert "push again; what was uploaded is not sent twice." in failed.err
    assert len(hub.repos["org/heads"].commits) == 1  # no half of a push
    hub.faults.clear()
    assert push(clients).code == 0
    assert set(hub.repos["org/heads"].files()) - {".gitattributes"} == SENT


def test_two_pushes_at_a_time_leave_no_mixture(hub, base, clients):
    hub.fail("POST", "/commit/", times=1, status=200)
    assert "OSError: the push to 'org/heads' failed (" in push(clients, max_shard_size="10KB").err.splitlines()[-1]
    push(clients, max_shard_size="10KB")
    code = """
from hf_drafthead.hub_upload import push as room
def send(*given):
    room._send = real
    model.push_to_hub("org/heads", license="mit", tags="mine")
    return real(*given)
real, room._send = room._send, send
"""
    answer = clients.run(TRAINED + code + PUSH, token="hf_owner", seed=1, words={"max_shard_size": "10KB"})
    assert "(a commit has happened since): push again" in answer.err.splitlines()[-1]
    files = hub.repos["org/heads"].files()
    assert "model.safetensors" in files and "model.safetensors.index.json" not in files
    assert b"- mine\n" in files["README.md"]


# The client waits a second, two, four ... between its tries; a test need not.
PATIENCE = "import time\ntime.sleep = lambda seconds: None\n"


@pytest.mark.parametrize(
    "token, repo_id, line",
    [
        ("hf_nobody", "org/heads", "the push to 'org/heads' failed (Invalid credentials"),
        (None, "org/heads", "the push to 'org/heads' failed ("),
        ("hf_reader", "org/heads", "the push to 'org/heads' failed (You don't have the rights"),
        ("hf_owner", "org//heads", "Repo id must be in the form 'repo_name' or 'namespace/repo_name': 'org//heads'"),
        ("hf_owner", "org/a b", "Repo id must use alphanumeric chars"),
    ],
)
def test_a_push_that_is_refused_says_so_in_one_line(hub, base, clients, models, token, repo_id, line):
    words = ("push", models / "medusa", repo_id, "--license", "mit", "--base", "org/base")
    answer = command(clients, *words, token=token)
    assert answer.code == 2 and "Traceback" not in answer.err
    assert answer.err.splitlines()[-1].startswith(f"hf-drafthead: {line}")
    assert ("log in (`hf auth login`, token=) as who may write there" in answer.err) == (token != "hf_owner")
    assert "org/heads" not in hub.repos


@pytest.mark.parametrize("token", ["hf_owner", None], ids=["signed in", "anonymous"])
def test_a_base_that_is_not_there(hub, base, clients, models, token):
    words = ("push", models / "medusa", "org/heads", "--license", "mit", "--base")
    answer = command(clients, *words, "org/nowhere", "--dry-run", token=token)
    assert answer.code == 2
    start = "hf-drafthead: there is no base 'org/nowhere' on the Hub (RepositoryNotFoundError: "
    assert answer.err.splitlines()[-1].startswith(start)
    answer = command(clients, *words, "org//base")
    assert answer.code == 2 and "no base 'org//base' on the Hub (HFValidationError: " in answer.err.splitlines()[-1]
    code = TRAINED + "model.config.base_model_revision = 'f' * 40\nmodel.push_to_hub('org/heads', license='mit')"
    answer = clients.run(code, token="hf_owner", seed=0)
    assert answer.err.splitlines()[-1].startswith("OSError: tokenizer.json of 'org/base' cannot be fetched (Revision")
    assert "org/heads" not in hub.repos


def test_a_base_that_not_everybody_may_have(hub, base, clients, models):
    words = ("push", models / "medusa", "org/heads", "--license", "mit", "--base", "org/base")
    base.private = True
    answer = command(clients, *words)
    start = (
        "hf-drafthead: the base 'org/base' is private, so that others cannot load these heads: push them to a private"
    )
    assert answer.code == 2 and answer.err.splitlines()[-1].startswith(start) and "org/heads" not in hub.repos
    answer = command(clients, *words, "--private")
    assert answer.code == 0 and hub.repos["org/heads"].private
    assert "note: the base 'org/base' is private: only users with access to it can load these heads" in answer.out
    assert command(clients, *words).code == 0  # the repository is private by now
    base.private, base.gated = False, True
    refused = command(clients, *words).err.splitlines()[-1]
    assert "config.json of the base 'org/base' cannot be fetched (You are trying to access a gated" in refused
    hub.users["hf_owner"].passed_gates += ("org/base",)
    try:
        noted = command(clients, *words).out
    finally:
        hub.users["hf_owner"].passed_gates = ("org/gated",)
    assert "note: the base 'org/base' is gated: users of these heads need access to it" in noted


def test_a_tokenizer_that_the_hub_does_not_give_out_is_not_one_that_is_missing(hub, base, clients):
    hub.fail("HEAD", "/org/base/resolve/.*/tokenizer", times=99, status=503)
    answer = clients.run(PATIENCE + PUSH, token="hf_owner", seed=0, words={})
    assert "OSError: tokenizer.json of 'org/base' cannot be fetched (" in answer.err.splitlines()[-1]
    assert "org/heads" not in hub.repos


def test_a_note_reaches_who_pushes_a_model(hub, base, clients):
    files = {name: data for name, data in base.files().items() if "token" not in name}
    hub.add("org/base", files)
    answer = push(clients)
    assert answer.code == 0, answer.err
    assert "there is no tokenizer: neither the heads nor their base bring one" in answer.err


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
