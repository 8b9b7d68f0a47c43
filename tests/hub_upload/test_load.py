"""Heads and their base, fetched from the Hub: every argument gets through, every refusal says whose it is."""

import json
from pathlib import Path

import pytest

# Loads, says one fact about what came, and generates as the base alone does.
USE = """
prompt = AutoTokenizer.from_pretrained("org/heads", **words)("abc", return_tensors="pt")
def same(model):
    ids = model.generate(**prompt, max_new_tokens=8)
    assert torch.equal(ids, model.base.generate(**prompt, max_new_tokens=8))
    return ids[0].tolist()
"""


def content(folder: Path, **edits) -> dict[str, bytes]:
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    if edits:
        files["config.json"] = json.dumps(json.loads(files["config.json"]) | edits).encode()
    return files


@pytest.fixture
def heads(hub, base, models):
    """Heads that name the base's commit."""
    edits = {"base_model_name_or_path": "org/base", "base_model_revision": base.refs["main"]}
    return hub.add("org/heads", content(models / "medusa", **edits))


def load(clients, words: dict | None = None, *, loader: str = "MedusaForCausalLM", **how):
    code = f"model = {loader}.from_pretrained('org/heads', **words)\nprint(json.dumps(len(model.drafter.state_dict())))"
    return clients.run(code, words=words or {}, **how)


def last_line(answer) -> str:
    assert answer.code != 0
    return answer.err.strip().splitlines()[-1]


def test_every_door_leads_to_heads_on_their_base(hub, heads, clients):
    said = clients.run(
        USE
        + """
one = same(AutoModel.from_pretrained("org/heads"))
two = same(AutoModelForCausalLM.from_pretrained("org/heads", device_map="auto", dtype="float64"))
said = pipeline("text-generation", model="org/heads", device_map="auto")("abc", max_new_tokens=8, do_sample=False)
print(json.dumps([one == two, said[0]["generated_text"]]))
""",
        words={},
    ).said
    assert said == [True, "abcdefghijk"]


def test_arguments_reach_the_base_and_the_heads(hub, heads, clients):
    said = clients.run(
        """
seen = []
for loader in (AutoModel, AutoModelForCausalLM):
    model = loader.from_pretrained("org/heads", dtype="bfloat16", device_map={"": "cpu"}, attn_implementation="eager",
                                   cache_dir="elsewhere")
    seen.append([str(model.base.dtype), str(next(model.drafter.parameters()).dtype),
                 model.base.config._attn_implementation])
own = pipeline("text-generation", model="org/heads", model_kwargs={"base_model": model.base}).model
seen.append([own.base is model.base])
import os
seen.append(sorted(name for name in os.listdir("elsewhere") if name.startswith("models")))
print(json.dumps(seen))
"""
    ).said
    one = ["torch.bfloat16", "torch.bfloat16", "eager"]
    assert said == [one, one, [True], ["models--org--base", "models--org--heads"]]


def test_a_revision_of_the_heads_is_not_one_of_the_base(hub, base, heads, clients, models):
    first = heads.refs["main"]
    hub.add("org/heads", content(models / "hydra", base_model_name_or_path="org/base"))
    heads.refs["old"] = first
    code = """
found = [type(loader.from_pretrained("org/heads", **words)).__name__ for loader in (AutoModel, AutoModelForCausalLM)]
print(json.dumps(found))
"""
    assert clients.run(code, words={"revision": "old"}).said == ["MedusaForCausalLM"] * 2
    assert clients.run(code, words={"revision": first}).said == ["MedusaForCausalLM"] * 2
    assert clients.run(code, words={}).said == ["HydraForCausalLM"] * 2


def test_the_heads_get_the_commit_of_the_base_that_they_were_trained_on(hub, base, heads, clients, models):
    trained_on = base.refs["main"]
    changed = content(models / "base")
    changed["generation_config.json"] = b'{"max_length": 99}'
    hub.add("org/base", changed)
    code = """
model = AutoModel.from_pretrained("org/heads", **words)
print(json.dumps(model.generation_config.max_length == 99))
"""
    assert clients.run(code, words={}).said is False
    assert hub.count("GET", f"/org/base/resolve/(?!{trained_on})") == 0
    assert clients.run(code, words={"base_revision": "main"}).said is True


def test_a_draft_model_of_the_hub_is_recorded_with_its_commit(hub, base, clients, models):
    draft = hub.add("org/draft", content(models / "base"))
    code = """
from hf_drafthead import DraftModelForCausalLM
model = DraftModelForCausalLM.from_base("org/base", draft="org/draft")
print(json.dumps([model.config.draft_model_name_or_path, model.config.draft_model_revision]))
"""
    assert clients.run(code).said == ["org/draft", draft.refs["main"]]


NO_SUCH = "org/{} is not a local folder and is not a valid model identifier listed on"
IS_GATED = "You are trying to access a gated repo. Make sure to have access to it at"
REFUSALS = {
    "private": ({"private": True}, None, NO_SUCH),
    "private, to a stranger": ({"private": True}, "hf_stranger", NO_SUCH),
    "gated": ({"gated": True}, None, IS_GATED),
    "gated, to a stranger": ({"gated": True}, "hf_stranger", IS_GATED),
    "missing": (None, None, NO_SUCH),
    "missing, to its owner": (None, "hf_owner", NO_SUCH),
}


def change(hub, repo_id: str, state: dict | None) -> None:
    if state is None:
        del hub.repos[repo_id]
    else:
        for name, value in state.items():
            setattr(hub.repos[repo_id], name, value)


@pytest.mark.parametrize("state, token, reason", REFUSALS.values(), ids=REFUSALS)
def test_heads_that_are_refused_are_named(hub, heads, clients, state, token, reason):
    change(hub, "org/heads", state)
    line = last_line(load(clients, token=token))
    assert line.startswith("OSError: 'org/heads' is no draft-head checkpoint (") and reason.format("heads") in line
    through_auto = load(clients, loader="AutoModel", token=token)
    assert "org/heads" in through_auto.err and "org/base" not in through_auto.err


@pytest.mark.parametrize("loader", ["MedusaForCausalLM", "AutoModel"])
@pytest.mark.parametrize("state, token, reason", REFUSALS.values(), ids=REFUSALS)
def test_a_base_that_is_refused_is_named(hub, base, heads, clients, loader, state, token, reason):
    change(hub, "org/base", state)
    line = last_line(load(clients, loader=loader, token=token))
    assert line.startswith("OSError: the base 'org/base' of 'org/heads' cannot be read (")
    assert reason.format("base") in line and "pass base_model=" in line


def test_a_token_gets_heads_and_base_through(hub, heads, clients):
    for repo in hub.repos.values():
        repo.private = True
    assert load(clients, {"token": "hf_owner"}, loader="AutoModel").code == 0
    assert load(clients, token="hf_owner", loader="AutoModelForCausalLM").code == 0
    code = "said = pipeline('text-generation', model='org/heads', token='hf_owner')('abc', max_new_tokens=2)"
    assert clients.run(code).code == 0
    hub.repos["org/heads"].private = False
    assert "the base 'org/base' of 'org/heads' cannot be read" in last_line(load(clients))


def test_a_token_that_nobody_has(hub, heads, clients):
    for line in (load(clients, token="hf_nobody"), load(clients, {"token": "hf_nobody"})):
        assert last_line(line).startswith("OSError: 'org/heads' is no draft-head checkpoint (") and "401" in line.err


def test_a_revision_that_is_not_there(hub, base, heads, clients):
    assert "v9 is not a valid git identifier" in last_line(load(clients, {"revision": "v9"}))
    line = last_line(load(clients, {"base_revision": "v9"}, loader="AutoModel"))
    assert "the base 'org/base' of 'org/heads' cannot be read" in line and "v9 is not a valid git identifier" in line
    base.commits.clear()  # the history was rewritten
    base.commit({}, "all anew")
    line = last_line(load(clients, loader="AutoModel"))
    assert line.startswith("OSError: the base 'org/base' of 'org/heads' cannot be read (")


def test_a_busy_storage_says_whose_file_it_is(hub, base, heads, clients):
    hub.fail("GET", "^/lfs/", times=1, status=503)
    line = last_line(load(clients, home="busy"))
    assert line.startswith("OSError: model.safetensors of 'org/heads' cannot be fetched (") and "503" in line
    weights = base.at("main").files["model.safetensors"].sha256
    hub.fail("GET", f"^/lfs/{weights}", times=1, status=503)
    line = last_line(load(clients, home="busy"))
    assert line.startswith("OSError: the base 'org/base' of 'org/heads' cannot be read (") and "503" in line
    assert load(clients, home="busy").code == 0


def test_a_pickle_is_never_opened(hub, heads, clients):
    files = dict(heads.files())
    files["pytorch_model.bin"] = files.pop("model.safetensors")
    hub.add("org/heads", files)
    for loader in ("MedusaForCausalLM", "AutoModel"):
        line = last_line(load(clients, loader=loader))
        assert line.startswith("OSError: 'org/heads' holds no model.safetensors (") and "a pickle such as" in line
    assert not any(one.storage for one in hub.asked)


@pytest.mark.parametrize("name", ["org//heads", "org/a b", "a/b/c"])
def test_a_name_that_is_none(hub, clients, name):
    answer = clients.run("hf_drafthead.cli.main(['info', name])", name=name)
    assert answer.code == 2 and len(answer.err.splitlines()) == 1
    assert name in answer.err
    assert hub.asked == []
