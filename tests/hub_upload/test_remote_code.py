"""From the Hub to text in three lines of Python, on a machine that has transformers and torch and nothing of ours.

By default that machine is this interpreter with hf_drafthead out of its reach; REMOTE_CODE_PYTHON names another one.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from safetensors.torch import load

from hf_drafthead import zoo
from tests.hub_upload.clients import environment

PYTHON = os.environ.get("REMOTE_CODE_PYTHON", sys.executable)
THREE_LINES = """
from transformers import pipeline
write = pipeline("text-generation", model="org/hydra", trust_remote_code=True)
print(write("def read_json(path):\\n", max_new_tokens=24, do_sample=False)[0]["generated_text"])
"""
NOT_INSTALLED = """
import sys
class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "hf_drafthead":
            raise ModuleNotFoundError(f"No module named {name!r}")
sys.meta_path.insert(0, NotInstalled())
"""
# The same for every set of heads, and what came with it.
ALL = """
import json
from transformers import AutoModelForCausalLM, AutoTokenizer
told = {}
for name in NAMES:
    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True)
    given = tokenizer(["def read_json(path):\\n", "import os\\n"], return_tensors="pt", padding=True)
    out = model.generate(**given, max_new_tokens=24, return_dict_in_generate=True)
    told[name] = {
        "module": type(model).__module__,
        "same": out.sequences.equal(model.base.generate(**given, max_new_tokens=24)),
        "tokens": out.sequences.tolist(),
        "steps": int((out.accepted_lengths > 0).sum()),
        "sum": {key: tensor.double().sum().item() for key, tensor in model.drafter.state_dict().items()},
    }
print(json.dumps(told))
"""


def repository(family: str) -> str:
    return "org/" + family.replace("+", "-plus")


@pytest.fixture(scope="module")
def published(running):
    """The zoo at the Hub: once for all tests here."""
    hub, clients = running
    hub.reset()
    base = Path(zoo.path("base"))
    hub.add("org/base", {path.name: path.read_bytes() for path in base.iterdir()})
    code = """
    for folder, name in pairs:
        try:
            hf_drafthead.cli.main(["push", folder, name, "--base", "org/base", "--license", "apache-2.0"])
        except SystemExit as end:
            assert end.code == 0, name
    """
    pairs = [(zoo.path(family), repository(family)) for family in zoo.families()]
    done = clients.run(code, token="hf_owner", pairs=pairs)
    assert done.code == 0, done.err
    return hub


@pytest.fixture(scope="module")
def printed(published, tmp_path_factory) -> str:
    """What that Python prints, in a home of its own."""
    folder = tmp_path_factory.mktemp("remote_code")
    names = [repository(family) for family in zoo.families()]
    absent = NOT_INSTALLED if PYTHON == sys.executable else ""
    run = subprocess.run(
        [PYTHON, "-I", "-c", f"{absent}{THREE_LINES}\nNAMES = {names}\n{ALL}"],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment(published.url, folder / "home"),
        stdin=subprocess.DEVNULL,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.slow
def test_three_lines_from_the_hub_to_text(printed, running):
    plain = THREE_LINES.replace("org/hydra", "org/base").replace(", trust_remote_code=True", "")
    text = running[1].run(plain).out
    assert printed.startswith(text)
    assert text.startswith("def read_json(path):\n") and len(text) > 40


@pytest.mark.slow
def test_the_zoo_comes_back_as_it_was(printed, published):
    told = json.loads(printed.splitlines()[-1])
    names = {repository(family): family for family in zoo.families()}
    assert set(told) == set(names)
    for name, found in told.items():
        files = published.repos[name].files()
        assert files["model.safetensors"] == (Path(zoo.path(names[name])) / "model.safetensors").read_bytes()
        sums = {key: tensor.double().sum().item() for key, tensor in load(files["model.safetensors"]).items()}
        of_model = {f"drafter.{key}": value for key, value in found["sum"].items()}
        of_model.pop("drafter.model.lm_head.weight", None)  # of the draft model, tied to its embeddings
        assert of_model == pytest.approx(sums)
        assert found["same"], name
        assert found["steps"] < 2 * 23, name  # a step is saved, so the guesses were of use
        assert found["module"].startswith("transformers_modules.")
    assert len({json.dumps(found["tokens"]) for found in told.values()}) == 1


@pytest.mark.slow
def test_the_cards_of_the_zoo_are_complete(published):
    for family in zoo.families():
        files = published.repos[repository(family)].files()
        card = ModelCard(files["README.md"].decode())
        assert card.data.base_model == "org/base"
        assert card.data.license == "apache-2.0"
        assert "not measured" in card.text or card.data.eval_results
        assert "| top 1 |" in card.text
        assert "missing" not in card.text.lower()
        assert {"tree.png", "head_accuracies.png"} <= set(files)
    # as the Hub itself judged them, before every commit
    assert published.count("POST", "^/api/validate-yaml") >= len(zoo.families())
