"""What must not leave the machine is found before anything does."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from hf_drafthead.hub_upload import preflight
from hf_drafthead.modeling import MedusaConfig, MedusaForCausalLM, MtpConfig


@pytest.fixture
def folder(models, tmp_path) -> Path:
    """A checkpoint that may go out, as far as its files are concerned."""
    shutil.copytree(models / "medusa", tmp_path / "heads")
    return tmp_path / "heads"


def edit_weights(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_good_folder_passes(folder):
    preflight.check_files(folder)
    preflight.check_weights(folder)


@pytest.mark.parametrize(
    "name, words",
    [
        ("__pycache__/model.cpython-311.pyc", "belongs to a cache"),
        (".cache/huggingface/x.lock", "belongs to a cache"),
        (".git/HEAD", "belongs to a cache"),
        ("pytorch_model.bin", "is a pickle"),
        ("heads.pt", "is a pickle"),
        (".env", "looks like a secret"),
        ("deploy.pem", "looks like a secret"),
        ("token", "looks like a secret"),
    ],
)
def test_files_that_do_not_belong_there(folder, name, words):
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(b"x")
    with pytest.raises(ValueError) as refused:
        preflight.check_files(folder)
    assert str(refused.value).startswith(f"{name!r} in {str(folder)!r} {words}")


STATE = {
    "optimizer.pt": "optimizer.pt",
    "checkpoint-500/model.safetensors": "checkpoint-500",
    "checkpoint-500/rng_state.pth": "checkpoint-500",
    "runs/day1/events.out.tfevents.17": "runs/day1/events.out.tfevents.17",
    "training_args.bin": "training_args.bin",
    "run.json": "run.json",
    "clock.json": "clock.json",
}


def test_the_state_of_a_training_stays_behind(folder):
    before, behind = preflight.sort_files(folder)
    assert behind == []
    for name in STATE:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")
    preflight.check_files(folder)
    assert preflight.sort_files(folder) == (before, sorted(set(STATE.values())))


SECRETS = {
    "hub": "hf_" + "aB3" * 11,
    "openai": "sk-" + "proj-4f" * 4,
    "aws": "AKIA" + "ABCD" * 4,
    "github": "ghp_" + "0aZ" * 12,
    "private key": "-----BEGIN OPENSSH PRIVATE KEY-----",
    "password in an address": "https://me:hunter2@example.org/data",
}


@pytest.mark.parametrize("secret", SECRETS.values(), ids=SECRETS)
def test_a_secret_in_a_file_is_found_and_not_repeated(folder, secret):
    (folder / "training_summary.json").write_text(f'{{\n "seed": 0,\n "command": "train --with {secret}"}}\n')
    with pytest.raises(ValueError) as refused:
        preflight.check_files(folder)
    assert str(refused.value) == (
        f"'training_summary.json' in {str(folder)!r} holds what looks like a token, password or private key (line 3): "
        "remove it, and revoke it if anybody may have seen it."
    )


def test_ones_own_token_is_found_in_whatever_form_it_has(folder, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "letmein-1234")
    (folder / "notes.md").write_text("signed in with letmein-1234")
    with pytest.raises(ValueError, match=r"'notes.md' in .* \(line 1\)"):
        preflight.check_files(folder)


def test_words_of_a_vocabulary_are_no_secrets(folder):
    (folder / "vocab.json").write_text(json.dumps({SECRETS["aws"]: 1}))
    preflight.check_files(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_tensors_that_are_not_finite(folder, value):
    edit_weights(folder, lambda tensors: tensors["drafter.blocks.0.bias"][0].fill_(value))
    with pytest.raises(ValueError, match=r"^the tensor 'drafter.blocks.0.bias' in .* holds NaN or infinity: train"):
        preflight.check_weights(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_that_are_not_those_of_the_model(folder, models, dtype):
    live = MedusaForCausalLM.from_pretrained(folder, base_model=models / "base").to(dtype)
    live.save_pretrained(folder)
    preflight.check_weights(folder, live.state_dict())
    edit_weights(folder, lambda tensors: tensors["drafter.blocks.0.bias"][0].add_(1))
    with pytest.raises(
        ValueError, match=r"^the tensor 'drafter.blocks.0.bias' in .* is another than in the model that"
    ):
        preflight.check_weights(folder, live.state_dict())


def test_tensors_that_come_back_as_others(folder, monkeypatch):
    right = preflight.load_again

    def wrong(*given):
        model = right(*given)
        next(model.drafter.parameters()).data.mul_(1.5).add_(1)
        return model

    monkeypatch.setattr(preflight, "load_again", wrong)
    with pytest.raises(ValueError, match=r"^the tensor 'drafter\..*' in .* is another when it is loaded again: save"):
        preflight.check_weights(folder)


def test_a_checkpoint_with_its_base(folder, models):
    model = MedusaForCausalLM.from_pretrained(folder, base_model=models / "base")
    model.save_pretrained(folder, include_base=True)
    preflight.check_weights(folder, model.state_dict())
    edit_weights(folder / "base", lambda tensors: tensors["model.norm.weight"].fill_(float("nan")))
    with pytest.raises(ValueError, match=r"'base/model.norm.weight' in .* holds NaN or infinity"):
        preflight.check_weights(folder)


def test_heads_for_a_base_of_remote_code(folder):
    config = json.loads((folder / "config.json").read_text())
    config["base_config"] |= {"model_type": "of_somebody", "auto_map": {"AutoModelForCausalLM": "theirs.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    preflight.check_weights(folder)


def test_heads_that_their_config_does_not_describe(folder):
    edit_weights(folder, lambda tensors: tensors.pop("drafter.blocks.0.bias"))
    with pytest.raises(ValueError, match=r"lacks the tensor 'drafter.blocks.0.bias'"):
        preflight.check_weights(folder)


def test_a_truncated_file(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(
        OSError, match=r"model.safetensors' is not a readable safetensors file \(.*\): copy or download"
    ):
        preflight.check_weights(folder)


def test_a_folder_without_weights(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(OSError, match=r"holds no model.safetensors"):
        preflight.check_weights(folder)


def test_one_file_beside_the_index_of_shards(folder):
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(
        ValueError, match=r"holds model.safetensors and model.safetensors.index.json, .* remove the one"
    ):
        preflight.check_files(folder)


@pytest.mark.parametrize("base", ["../base", "/models/base", "./base", "~/base", "a/b/c", None])
def test_a_base_that_only_this_machine_has(folder, base):
    config = MedusaForCausalLM.config_class.from_pretrained(folder)
    config.base_model_name_or_path = base
    with pytest.raises(ValueError, match=r"name it on the Hub .* or push it along with its heads"):
        preflight.check_public_base(config, folder, None)
    config.base_included = True
    assert preflight.check_public_base(config, folder, None) == []


def test_a_folder_beside_the_checkpoint_is_no_repository_on_the_hub(folder):
    config = MedusaForCausalLM.config_class.from_pretrained(folder)
    config.base_model_name_or_path = "org/base"
    (folder / "org" / "base").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"is the local path 'org/base'"):
        preflight.check_public_base(config, folder, None)


def test_a_card_without_a_license(models, folder):
    from hf_drafthead.cards import write_card

    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"base_model_name_or_path": "org/base"}))
    write_card(folder, license="mit")
    preflight.check_card(folder, "org/heads")
    (folder / "README.md").write_text((folder / "README.md").read_text().replace("license: mit\n", ""))
    with pytest.raises(ValueError) as refused:
        preflight.check_card(folder, "org/heads")
    assert str(refused.value).startswith("the card of 'org/heads' is not complete: license: ")
    assert str(folder) not in str(refused.value)


@pytest.mark.parametrize("family, counted, included", [("medusa", 1, True), ("medusa", 0, True), ("mtp", 1, True)])
def test_a_base_does_not_lose_its_modules_in_silence(family, counted, included):
    base = LlamaConfig(num_nextn_predict_layers=counted)
    config = {"medusa": MedusaConfig, "mtp": MtpConfig}[family](base_config=base, base_included=included)
    if family == "mtp" or not counted:
        return preflight.check_modules(config)
    with pytest.raises(ValueError, match="config counts 1 module.* for multi-token prediction, which the weights"):
        preflight.check_modules(config)
    config.base_included = False
    return preflight.check_modules(config)
