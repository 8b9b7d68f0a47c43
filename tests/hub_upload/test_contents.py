"""What must not leave the machine stays or is refused, before a repository is made for it."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_drafthead.hub_upload import contents
from hf_drafthead.modeling import MedusaConfig
from tests.hub_upload.test_push import PUSH, command, content


def set_first(folder: Path, value: float) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["drafter.blocks.0.bias"][0] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def push_of(folder: Path, *more: str) -> tuple:
    return "push", folder, "org/heads", "--base", "org/base", *more


LEFT = {
    "optimizer.pt": "optimizer.pt",
    "checkpoint-500/model.safetensors": "checkpoint-500",
    "runs/day1/events.out.tfevents.17": "runs/day1/events.out.tfevents.17",
    "clock.json": "clock.json",
    "__pycache__/model.cpython-311.pyc": "__pycache__",
    ".git/HEAD": ".git",
    ".env": ".env",
    "heads.pt": "heads.pt",
    "deploy.pem": "deploy.pem",
    "base/training_args.bin": "base/training_args.bin",
}


def test_states_of_a_training_caches_pickles_and_keys_stay_here(folder):
    before, behind = contents.sort_files(folder)
    assert behind == []
    for name in LEFT:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")
    contents.check_files(folder)
    assert contents.sort_files(folder) == (before, sorted(set(LEFT.values())))


SECRETS = {
    "hub": "hf_" + "aB3" * 11,
    "openai": "sk-" + "proj-4f" * 4,
    "aws": "AKIA" + "ABCD" * 4,
    "github": "ghp_" + "0aZ" * 12,
    "private key": "-----BEGIN OPENSSH PRIVATE KEY-----",
    "password in an address": "https://me:hunter2@example.org/data",
    "the one that is signed in": "letmein-1234",
}


@pytest.mark.few(7)
@pytest.mark.parametrize("secret", SECRETS.values(), ids=SECRETS)
def test_a_secret_in_a_file_is_found_and_not_repeated(folder, monkeypatch, secret):
    monkeypatch.setenv("HF_TOKEN", SECRETS["the one that is signed in"])
    (folder / "vocab.json").write_text(json.dumps({secret: 1}))  # words of a vocabulary are no secrets
    contents.check_files(folder)
    (folder / "training_summary.json").write_text(f'{{\n "seed": 0,\n "command": "train --with {secret}"}}\n')
    with pytest.raises(ValueError) as refused:
        contents.check_files(folder)
    assert str(refused.value) == (
        f"'training_summary.json' in {str(folder)!r} holds what looks like a token, password or private key (line 3): "
        "remove it, and revoke it if anybody may have seen it."
    )


UNFIT = {
    "not finite": (lambda folder: set_first(folder, float("nan")), "in {!r} holds NaN or infinity: train these heads"),
    "a secret": (lambda folder: (folder / "notes.md").write_text("hf_" + "aB3" * 11), "'notes.md' in {!r} holds what"),
    "a cut file": (
        lambda folder: (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-99]),
        "is not a readable safetensors file",
    ),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "holds no model.safetensors"),
    "weights of others": (
        lambda folder: save_file({"drafter.x": torch.ones(2)}, folder / "model.safetensors", {"format": "pt"}),
        "lacks the tensor 'drafter.blocks.0.weight'",
    ),
    "no license": (lambda folder: None, "the card of {!r} is not complete: license: "),
}


@pytest.mark.few(7)
@pytest.mark.parametrize("spoil, words", UNFIT.values(), ids=UNFIT)
def test_what_is_not_fit_for_others_does_not_leave(hub, base, clients, folder, spoil, words):
    spoil(folder)
    license = () if "license" in words else ("--license", "mit")
    answer = command(clients, *push_of(folder, *license))
    assert answer.code == 2 and words.format(str(folder)) in answer.err.splitlines()[-1]
    assert "org/heads" not in hub.repos


@pytest.mark.parametrize(
    "spoil, words", [UNFIT["not finite"], (None, "is not complete: license: ")], ids=["NaN", "license"]
)
def test_a_loaded_model_is_looked_at_as_a_folder_is(hub, base, clients, spoil, words):
    worse = "model.drafter.blocks[0].bias.data[0] = float('nan')\n" if spoil else ""
    code = PUSH.replace("commit =", worse + "commit =")
    answer = clients.run(code if spoil else code.replace("license='mit', ", ""), token="hf_owner", seed=0, words={})
    assert answer.code == 1 and words.format("org/heads") in answer.err.splitlines()[-1]
    assert "org/heads" not in hub.repos


@pytest.mark.few(6)
@pytest.mark.parametrize("base", ["../base", "/models/base", "./base", "~/base", "a/b/c", "org/beside", None])
def test_a_base_that_only_this_machine_has(folder, base):
    (folder / "org" / "beside").mkdir(parents=True)
    config = MedusaConfig.from_pretrained(folder)
    config.base_model_name_or_path = base
    with pytest.raises(ValueError, match=r"name it on the Hub .* or push it along with its heads"):
        contents.check_base(config, folder, None, private=True)


def test_a_base_that_is_to_lie_beside_its_heads_does(folder):
    config = MedusaConfig.from_pretrained(folder)
    config.base_included, config.base_model_name_or_path = True, "base"
    with pytest.raises(ValueError, match=r"^the base of these heads is to lie in .*heads/base', which is not there"):
        contents.check_base(config, folder, None, private=False)
    (folder / "base").mkdir()
    assert contents.check_base(config, folder, None, private=False) == []


def test_a_base_beside_its_heads_is_finite(folder):
    shutil.copytree(folder, folder.parent / "copy")
    (folder.parent / "copy").rename(folder / "base")
    config = MedusaConfig.from_pretrained(folder)
    contents.check_weights(folder, config)
    set_first(folder / "base", float("inf"))
    with pytest.raises(ValueError, match=r"^the tensor 'base/drafter.blocks.0.bias' in .* holds NaN or infinity"):
        contents.check_weights(folder, config)


def on_the_hub(models, **fields) -> dict[str, bytes]:
    """The base's files, with other values in its config."""
    files = content(models / "base")
    return files | {"config.json": json.dumps(json.loads(files["config.json"]) | fields).encode()}


def test_a_base_that_is_named_again_stays_at_its_commit(hub, base, clients, models, folder):
    trained_on = base.refs["main"]
    hub.add("org/base", on_the_hub(models, rope_theta=1.0))
    config = json.loads((folder / "config.json").read_text())
    config |= {"base_model_name_or_path": "org/base", "base_model_revision": trained_on}
    (folder / "config.json").write_text(json.dumps(config))
    words = ("push", folder, "org/heads", "--license", "mit", "--base")
    assert command(clients, *words, "org/base").code == 0
    assert json.loads(hub.repos["org/heads"].files()["config.json"])["base_model_revision"] == trained_on
    copy = hub.add("org/copy", content(models / "base"))
    assert command(clients, *words, "org/copy").code == 0
    assert json.loads(hub.repos["org/heads"].files()["config.json"])["base_model_revision"] == copy.refs["main"]


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "fields, words",
    [
        ({"hidden_size": 64}, "(hidden size 32); the base at 'org/other' has hidden size 64"),
        ({"vocab_size": 999}, "(vocabulary 259); the base at 'org/other' has vocabulary 999"),
        ({"model_type": "of_somebody"}, "(model type llama); the base at 'org/other' has model type of_somebody"),
        ({"model_type": "drafthead_hydra"}, "'org/other' has draft heads already: give their base"),
    ],
    ids=["hidden size", "vocabulary", "remote code", "heads"],
)
def test_a_base_that_the_heads_were_not_made_for(hub, clients, models, fields, words):
    hub.add("org/other", on_the_hub(models, **fields))
    answer = command(clients, "push", models / "medusa", "org/heads", "--license", "mit", "--base", "org/other")
    assert answer.code == 2 and words in answer.err.splitlines()[-1]
    assert "org/heads" not in hub.repos
