"""Modules for multi-token prediction in the repositories of bases: found, read, refused, and written back."""

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from hf_drafthead.formats import convert_checkpoint, export_checkpoint
from hf_drafthead.formats.mtp import find_modules
from hf_drafthead.modeling import MtpForCausalLM, mtp
from hf_drafthead.modeling.base_model import auto_class
from tests.base_table import DEEPSEEK, EXPERTS, GROUPS, LINEAR
from tests.bases import SIZES, SPECIAL, VOCABULARY, tiny_base
from tests.families import Family

SLIDING = {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 8}
GLM = {"num_key_value_heads": 2, "head_dim": 8, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, **EXPERTS}
GLM |= {"first_k_dense_replace": 1}
ERNIE = {**GROUPS, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16}
MIMO_V2 = {**SLIDING, **EXPERTS, "n_routed_experts": 4, "v_head_dim": 8}
QWEN = {**GROUPS, **LINEAR, "head_dim": 8, "num_hidden_layers": 4}
QWEN_MOE = {**QWEN, **EXPERTS, "shared_expert_intermediate_size": 16}
# By model_type: config fields, how many modules, and a name that the files have for the joining layer of the first.
KINDS = {
    "deepseek_v3": ({"num_key_value_heads": 4, **DEEPSEEK}, 1, "model.layers.2.eh_proj.weight"),
    "glm4_moe": (GLM, 1, "model.layers.2.eh_proj.weight"),
    "glm4_moe_lite": ({"num_key_value_heads": 4, **DEEPSEEK}, 1, "model.layers.2.eh_proj.weight"),
    "hy_v3": (GLM, 1, "model.layers.2.eh_proj.weight"),
    "ernie4_5_moe": (ERNIE, 1, "model.mtp_linear_proj.0.weight"),
    "exaone_moe": ({**SLIDING, **EXPERTS, "num_shared_experts": 1}, 1, "mtp.fc.weight"),
    "mellum": ({**SLIDING, **EXPERTS}, 1, "mtp.fc.weight"),
    "mimo_v2_flash": (MIMO_V2, 3, "model.mtp.layers.0.eh_proj.weight"),
    "qwen3_next": (QWEN_MOE, 1, "mtp.fc.weight"),
    "qwen3_5_text": (QWEN, 1, "mtp.fc.weight"),
    "qwen3_5_moe_text": (QWEN_MOE, 1, "mtp.fc.weight"),
}


@cache
def base_of(model_type: str):
    config = AutoConfig.for_model(model_type, **{**SIZES, **SPECIAL, **KINDS[model_type][0]})
    torch.manual_seed(0)
    return auto_class(config).from_config(config, dtype=torch.float32).eval()


def modules_on(model_type: str, **fields) -> MtpForCausalLM:
    """Random modules on a base of this architecture."""
    return Family("mtp", MtpForCausalLM, {"num_modules": KINDS[model_type][1], **fields}).build(base_of(model_type))


def publish(model: MtpForCausalLM, folder: Path, **more: torch.Tensor) -> Path:
    """The base's repository as its makers publish it: two shards, of which the second holds the modules."""
    export_checkpoint(model, folder.parent / f"{folder.name} modules", "base")
    model.base.save_pretrained(folder)
    modules = load_file(folder.parent / f"{folder.name} modules" / "model.safetensors") | more
    (folder / "model.safetensors").rename(folder / "first.safetensors")
    save_file(modules, folder / "second.safetensors")
    names = dict.fromkeys(load_file(folder / "first.safetensors"), "first.safetensors")
    weight_map = names | dict.fromkeys(modules, "second.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def edit(folder: Path, change) -> None:
    """Change the tensors of the shard that holds the modules."""
    tensors = load_file(folder / "second.safetensors")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if name not in tensors}
    tensors = change(tensors)
    index["weight_map"] |= dict.fromkeys(tensors, "second.safetensors")
    save_file(tensors, folder / "second.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


@pytest.fixture
def glm(tmp_path):
    return publish(modules_on("glm4_moe"), tmp_path / "base")


@pytest.mark.parametrize("model_type", KINDS)
def test_modules_are_read_from_the_repository_of_their_base(model_type, tmp_path):
    model = modules_on(model_type)
    folder = publish(model, tmp_path / "base")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"][KINDS[model_type][2]] == "second.safetensors"
    found = MtpForCausalLM.from_base(folder, dtype=torch.float32)
    assert found.config.num_modules == KINDS[model_type][1]
    assert_same(found.drafter.state_dict(), model.drafter.state_dict())
    prompt = torch.tensor([[5, 9, 33, 12]])
    call = {"max_new_tokens": 12, "do_sample": False}
    assert torch.equal(found.generate(prompt, **call), found.base.generate(prompt, **call))
    assert found.why_no_drafts() is None


def test_only_the_shards_that_hold_modules_are_fetched(glm):
    (glm / "first.safetensors").unlink()
    stored = find_modules(str(glm), base_of("glm4_moe").config, {})
    assert set(stored.files.values()) == {str(glm / "second.safetensors")}


def test_saved_modules_need_the_base_for_nothing_else(glm, tmp_path):
    model = MtpForCausalLM.from_base(glm, dtype=torch.float32)
    model.save_pretrained(tmp_path / "heads")
    edit(glm, lambda tensors: {"spare": torch.zeros(1)})
    again = MtpForCausalLM.from_pretrained(tmp_path / "heads")
    assert_same(again.drafter.state_dict(), model.drafter.state_dict())


def test_a_repository_that_lost_its_modules_names_the_one_that_it_was_made_of(glm, tmp_path):
    lost = tmp_path / "merged"
    base_of("glm4_moe").save_pretrained(lost)
    message = (
        f"{str(lost)!r} holds no module for multi-token prediction, though its config counts 1: merging, quantizing "
    )
    message += "and save_pretrained lose them; take them from the original repository with modules_from="
    with pytest.raises(ValueError) as error:
        MtpForCausalLM.from_base(lost)
    assert str(error.value).startswith(message + "'ORIGINAL'")
    (lost / "README.md").write_text(f"---\nbase_model: {glm}\n---\n")
    with pytest.raises(ValueError) as error:
        MtpForCausalLM.from_base(lost)
    assert str(error.value) == f"{message}{str(glm)!r}, or train fresh ones with modules_from=False."
    assert not MtpForCausalLM.from_base(lost, modules_from=False).drafter.loaded
    taken = MtpForCausalLM.from_base(lost, modules_from=glm, dtype=torch.float32)
    assert_same(taken.drafter.state_dict(), MtpForCausalLM.from_base(glm, dtype=torch.float32).drafter.state_dict())
    assert taken.config.base_model_name_or_path == str(lost)


def test_a_base_that_never_had_modules_gets_fresh_ones_with_a_notice(tmp_path, caplog):
    tiny_base("llama").save_pretrained(tmp_path)
    model = MtpForCausalLM.from_base(tmp_path)
    assert not model.drafter.loaded and model.config.num_modules == 1
    assert "has no modules for multi-token prediction: these are untrained" in caplog.text
    with pytest.raises(ValueError, match="holds no module for multi-token prediction: merging"):
        MtpForCausalLM.from_base(tmp_path, modules_from=tmp_path)


@pytest.mark.parametrize("block", [(16, 8), (128, 128)])
def test_fp8_is_unpacked_by_its_scales(block, glm):
    name = "model.layers.2.self_attn.q_proj.weight"
    wanted = load_file(glm / "second.safetensors")[name]
    rows, columns = (-(-size // step) for size, step in zip(wanted.shape, block))
    scales = torch.rand(rows, columns) + 0.5
    steps = (min(block[0], 32), min(block[1], 32))
    wide = scales.repeat_interleave(steps[0], 0)[:32].repeat_interleave(steps[1], 1)[:, :32]
    packed = (wanted / wide).to(torch.float8_e4m3fn)
    edit(glm, lambda tensors: {**tensors, name: packed, f"{name}_scale_inv": scales})
    found = MtpForCausalLM.from_base(glm, dtype=torch.float32).drafter.mtp[0].body.layer.self_attn.q_proj.weight
    torch.testing.assert_close(found, (packed.float() * wide).bfloat16().float())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.int32])
def test_packed_modules_without_scales_are_refused(dtype, glm):
    name = "model.layers.2.self_attn.q_proj.weight"
    edit(glm, lambda tensors: {**tensors, name: tensors[name].to(dtype)})
    with pytest.raises(ValueError, match=f"holds {name!r} of its module .* of which nothing says how it is unpacked"):
        MtpForCausalLM.from_base(glm)


@pytest.mark.parametrize("own", [False, True])
def test_copies_of_the_base_are_dropped_and_others_kept(own, glm):
    base = base_of("glm4_moe")
    copies = {"embed_tokens": base.model.embed_tokens.weight, "shared_head.head": base.lm_head.weight}
    more = {f"model.layers.2.{name}.weight": copy.detach() + own for name, copy in copies.items()}
    edit(glm, lambda tensors: tensors | more)
    model = MtpForCausalLM.from_base(glm, dtype=torch.float32)
    assert (model.config.own_embeddings, model.config.own_lm_heads) == (own, own)
    if own:
        assert torch.equal(model.drafter.embed_tokens.weight, copies["embed_tokens"] + 1)
        assert torch.equal(model.drafter.mtp[0].lm_head.weight, copies["shared_head.head"] + 1)
        reduced = MtpForCausalLM.from_base(glm, dtype=torch.float32, draft_tokens=[9, 5, 7])
        assert torch.equal(reduced.drafter.mtp[0].lm_head.weight, copies["shared_head.head"][[9, 5, 7]] + 1)


def test_modules_that_do_not_fit_are_refused(glm):
    name = "model.layers.2.self_attn.q_proj.weight"
    edit(glm, lambda tensors: {**tensors, name: tensors[name][:8].clone()})
    with pytest.raises(ValueError, match="does not fit its config: mismatched keys|is no 'glm4_moe' layer"):
        MtpForCausalLM.from_base(glm)
    edit(glm, lambda tensors: {key: value for key, value in tensors.items() if key != name})
    with pytest.raises(ValueError, match="does not fit its config: missing keys"):
        MtpForCausalLM.from_base(glm)


def test_a_damaged_shard_is_one_line(glm):
    (glm / "second.safetensors").write_bytes(b"12345678")
    with pytest.raises(OSError, match="second.safetensors' is not a readable safetensors file"):
        find_modules(str(glm), base_of("glm4_moe").config, {}).tensors()
    (glm / "second.safetensors").unlink()
    with pytest.raises(OSError, match="lacks second.safetensors, which its model.safetensors.index.json names"):
        find_modules(str(glm), base_of("glm4_moe").config, {})


def test_modules_of_another_form_are_refused_by_name(glm):
    config = AutoConfig.for_model("nemotron_h", num_hidden_layers=2)
    edit(glm, lambda tensors: {"mtp.layers.0.eh_proj.weight": torch.zeros(1)})
    with pytest.raises(ValueError, match="modules for multi-token prediction with several blocks in each"):
        find_modules(str(glm), config, {})


@pytest.mark.parametrize("to", ["base", "speculators"])
@pytest.mark.parametrize("model_type", ["glm4_moe", "qwen3_5_text"])
def test_export_and_convert_change_nothing(model_type, to, tmp_path):
    model = modules_on(model_type)
    model.base.save_pretrained(tmp_path / "base")
    export_checkpoint(model, tmp_path / "theirs", to)
    convert_checkpoint(tmp_path / "theirs", tmp_path / "ours", base_model=tmp_path / "base")
    again = MtpForCausalLM.from_pretrained(tmp_path / "ours")
    assert_same(again.drafter.state_dict(), model.drafter.state_dict())


def test_the_draft_vocabulary_is_the_first_tokens_of_a_ranking(glm, tmp_path):
    (tmp_path / "ranking.json").write_text("[7, 3, 11, 5]")
    model = MtpForCausalLM.from_base(glm, draft_tokens=tmp_path / "ranking.json", draft_vocab_size=3)
    assert model.drafter.draft_tokens.tolist() == [7, 3, 11]
    assert MtpForCausalLM.from_base(glm, draft_tokens=[4, 2]).drafter.draft_tokens.tolist() == [4, 2]
    for wrong, message in (("[1, 2", "is no JSON"), ('{"a": 1}', "expected token ids"), ("[]", "expected token ids")):
        (tmp_path / "ranking.json").write_text(wrong)
        with pytest.raises(ValueError, match=message):
            MtpForCausalLM.from_base(glm, draft_tokens=tmp_path / "ranking.json")


def test_a_large_vocabulary_is_spoken_of_once(glm, caplog, monkeypatch):
    monkeypatch.setattr(mtp, "LARGE_VOCABULARY", VOCABULARY - 1)
    MtpForCausalLM.from_base(glm)
    assert f"guess among all {VOCABULARY} tokens of the base" in caplog.text
