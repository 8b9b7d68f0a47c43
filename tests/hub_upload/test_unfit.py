"""What others could not use, or should not see, does not leave: no repository is made for it."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load, save_file

from tests.hub_upload.test_push import PUSH, command, content


@pytest.fixture
def base(hub, models):
    return hub.add("org/base", content(models / "base"))


def damage_weights(folder: Path) -> None:
    tensors = load((folder / "model.safetensors").read_bytes())
    tensors["drafter.blocks.0.bias"][0] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


UNFIT = {
    "not finite": (damage_weights, "the tensor 'drafter.blocks.0.bias' in "),
    "a secret": (
        lambda folder: (folder / "notes.md").write_text("hf_" + "aB3" * 11),
        "holds what looks like a token, password or private key (line 1)",
    ),
    "a pickle": (lambda folder: (folder / "heads.pt").write_bytes(b"x"), "'heads.pt' in "),
    "shards beside a whole file": (
        lambda folder: (folder / "model.safetensors.index.json").write_text("{}"),
        "holds model.safetensors and model.safetensors.index.json",
    ),
    "no license": (lambda folder: None, "is not complete: license: "),
}


@pytest.mark.parametrize("spoil, words", UNFIT.values(), ids=UNFIT)
def test_what_is_not_fit_for_others_does_not_leave(hub, base, clients, models, tmp_path, spoil, words):
    shutil.copytree(models / "medusa", tmp_path / "heads")
    spoil(tmp_path / "heads")
    license = () if "license" in words else ("--license", "mit")
    answer = command(clients, "push", tmp_path / "heads", "org/heads", "--base", "org/base", *license)
    assert answer.code == 2 and words in answer.err.splitlines()[-1]
    assert "org/heads" not in hub.repos


@pytest.mark.parametrize("spoil, words", [UNFIT["not finite"], (None, UNFIT["no license"][1])], ids=["NaN", "license"])
def test_a_loaded_model_is_looked_at_as_a_folder_is(hub, base, clients, spoil, words):
    worse = "model.drafter.blocks[0].bias.data[0] = float('nan')\n" if spoil else ""
    code = PUSH.replace("commit =", worse + "commit =")
    answer = clients.run(code if spoil else code.replace("license='mit', ", ""), token="hf_owner", seed=0, words={})
    assert answer.code == 1 and words in answer.err.splitlines()[-1]
    assert "org/heads" not in hub.repos


def on_the_hub(models, **fields) -> dict[str, bytes]:
    """The base's files, with other values in its config."""
    files = content(models / "base")
    return files | {"config.json": json.dumps(json.loads(files["config.json"]) | fields).encode()}


def test_a_base_that_is_named_again_stays_at_its_commit(hub, base, clients, models, tmp_path):
    trained_on = base.refs["main"]
    hub.add("org/base", on_the_hub(models, rope_theta=1.0))
    shutil.copytree(models / "medusa", tmp_path / "heads")
    config = json.loads((tmp_path / "heads" / "config.json").read_text())
    config |= {"base_model_name_or_path": "org/base", "base_model_revision": trained_on}
    (tmp_path / "heads" / "config.json").write_text(json.dumps(config))
    words = ("push", tmp_path / "heads", "org/heads", "--license", "mit", "--base")
    assert command(clients, *words, "org/base").code == 0
    assert json.loads(hub.repos["org/heads"].files()["config.json"])["base_model_revision"] == trained_on
    copy = hub.add("org/copy", content(models / "base"))
    assert command(clients, *words, "org/copy").code == 0
    assert json.loads(hub.repos["org/heads"].files()["config.json"])["base_model_revision"] == copy.refs["main"]


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"hidden_size": 64}, "(hidden size 32); the base at 'org/other' has hidden size 64"),
        ({"vocab_size": 999}, "(vocabulary 259); the base at 'org/other' has vocabulary 999"),
        ({"model_type": "of_somebody"}, "(model type llama); the base at 'org/other' has model type of_somebody"),
    ],
    ids=["hidden size", "vocabulary", "remote code"],
)
def test_a_base_that_the_heads_were_not_made_for(hub, clients, models, fields, words):
    hub.add("org/other", on_the_hub(models, **fields))
    answer = command(clients, "push", models / "medusa", "org/heads", "--license", "mit", "--base", "org/other")
    assert answer.code == 2 and words in answer.err.splitlines()[-1]
    assert "org/heads" not in hub.repos
