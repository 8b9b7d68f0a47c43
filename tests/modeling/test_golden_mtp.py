"""MTP modules give the numbers of the original code, read from the base's own repository."""

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from hf_drafthead.modeling import MtpForCausalLM
from tests.modeling.golden import FOLDER

pytestmark = pytest.mark.usefixtures("without_gradients")
TOLERANCE = {"atol": 2e-5, "rtol": 2e-5}
MODEL_TYPES = {"mtp_glm4_moe_1": "glm4_moe", "mtp_qwen3_5_dense": "qwen3_5_text"}


@cache
def tensors(name: str) -> dict[str, Tensor]:
    return load_file(FOLDER / "mtp" / f"{name}.safetensors")


@cache
def facts(name: str) -> dict:
    return json.loads((FOLDER / "mtp" / f"{name}.json").read_text())


def part(name: str, prefix: str) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): value for key, value in tensors(name).items() if key.startswith(prefix)}


def repository(name: str, folder: Path) -> Path:
    """The base's repository as it was published: its own tensors and those of its module, in two shards."""
    fields = {key: value for key, value in facts(name)["config"].items() if key != "model_type"}
    AutoConfig.for_model(MODEL_TYPES[name], **fields).save_pretrained(folder)
    shards = {
        "model-00001-of-00002.safetensors": part(name, "base."),
        "model-00002-of-00002.safetensors": part(name, "drafter."),
    }
    for file, held in shards.items():
        save_file({key: value.contiguous() for key, value in held.items()}, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {key: file for file, held in shards.items() for key in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: repository(name, tmp_path_factory.mktemp(name)) for name in MODEL_TYPES}


@cache
def loaded(folder: Path) -> MtpForCausalLM:
    return MtpForCausalLM.from_base(folder, dtype=torch.float32)


def observed(model, hidden: Tensor, ids: Tensor, state=None):
    """The state behind verified hidden states (1, T, H), which the tokens ids[1:] follow."""
    drafter = model.drafter
    state = drafter.start(1, 64) if state is None else state
    return drafter.observe(state, hidden, ids, torch.tensor([hidden.shape[1]]))


def levels(model, state, root: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Logits (levels, V) and tokens of a greedy chain."""
    tokens, found, logits = root.view(1, 1), [], []
    for _ in range(count):
        state, guesses = model.drafter.expand(state, tokens, torch.zeros_like(tokens))
        logits.append(guesses.logits[0, 0])
        tokens = logits[-1].argmax().view(1, 1)
        found.append(int(tokens))
    return torch.stack(logits), torch.tensor(found)


@pytest.mark.parametrize("name", MODEL_TYPES)
def test_a_module_over_a_text(folders, name):
    model, given = loaded(folders[name]), tensors(name)
    ids = given["in.input_ids"]
    base = model.base(ids, output_hidden_states=True)
    torch.testing.assert_close(base.hidden_states[-1], given["in.base_hidden"], **TOLERANCE)
    out = model.drafter.head_states(given["in.base_hidden"], ids)[0][:, :-1]  # no token follows the last
    torch.testing.assert_close(
        model.drafter.mtp[0].norm(out), given["out.module_hidden"].reshape(1, -1, 64), **TOLERANCE
    )
    logits = model.drafter.head_logits(0, out)
    torch.testing.assert_close(logits, given["out.module_logits"].reshape(1, -1, 128), **TOLERANCE)


def test_levels_of_one_module_and_the_step_after(folders):
    name = "mtp_qwen3_5_dense"
    model, given = loaded(folders[name]), tensors(name)
    known = int(given["in.level_known"])
    ids, anchor = given["in.input_ids"], given["out.level_anchor"]
    follow = torch.cat([ids[:, 1:known], anchor], dim=1)
    state = observed(model, given["in.base_hidden"][:, :known], follow)
    logits, drafted = levels(model, state, anchor, 3)
    torch.testing.assert_close(logits, given["out.level_logits"][0], **TOLERANCE)
    assert drafted.tolist() == given["out.level_tokens"][0].tolist()
    # two of the drafts are accepted: their pairs are entered again with the base's own states
    ids, hidden = given["in.step2_ids"], given["in.step2_base_hidden"]
    state = observed(model, hidden[:, known:], ids[:, known + 1 :], state)
    logits, drafted = levels(model, state, ids[0, -1], 3)
    torch.testing.assert_close(logits, given["out.step2_level_logits"][0], **TOLERANCE)
    assert drafted.tolist() == given["out.step2_level_tokens"][0].tolist()


@pytest.mark.parametrize("run", [0, 1])
def test_what_is_drafted_in_every_round_of_a_generation(folders, run):
    name = "mtp_glm4_moe_1"
    model, given, expected = loaded(folders[name]), tensors(name), facts(name)["runs"][run]
    text = torch.tensor([expected["output_ids"]])
    hidden = model.base(text, output_hidden_states=True).hidden_states[-1]
    at, state = 0, model.drafter.start(1, 64)
    for number, (length, drafted) in enumerate(zip(expected["known_length"], expected["drafted"], strict=True)):
        state = observed(model, hidden[:, at : length - 1], text[:, at + 1 : length], state)
        logits, found = levels(model, state, text[0, length - 1], 1)
        torch.testing.assert_close(logits, given[f"out.run{run}.draft_logits"][number], **TOLERANCE)
        assert found.tolist() == drafted
        at = length - 1


@pytest.mark.parametrize("run", [0, 1])
def test_a_generation_takes_what_is_drafted(folders, run):
    name = "mtp_glm4_moe_1"
    model, given, expected = loaded(folders[name]), tensors(name), facts(name)["runs"][run]
    out = model.generate(
        given[f"in.run{run}.input_ids"],
        max_new_tokens=facts(name)["max_new_tokens"],
        draft_tree=[[0]],
        use_mtp=True,
        return_dict_in_generate=True,
        do_sample=False,
    )
    assert out.sequences[0].tolist() == expected["output_ids"]
    assert out.accepted_lengths.shape[1] == len(expected["drafted"])  # one of the steps that the base took with it
