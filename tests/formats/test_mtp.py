"""Modules for multi-token prediction in the repositories of bases: found, read, refused, and written back."""

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from transformers.utils import logging

from hf_drafthead.formats import convert_checkpoint, export_checkpoint
from hf_drafthead.formats.mtp import find_modules
from hf_drafthead.modeling import DFlashForCausalLM, GemmaAssistantForCausalLM, MtpForCausalLM, mtp
from hf_drafthead.modeling.base_model import auto_class
from tests.base_table import DEEPSEEK, EXPERTS, GROUPS, LINEAR
from tests.bases import SIZES, SPECIAL, VOCABULARY, tiny_base
from tests.families import Family
from tests.formats.test_round_trip import assert_same
from tests.modeling.test_drafters import STEPS, chain, observed, text_and_features

SLIDING = {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 8}
GLM = {"num_key_value_heads": 2, "head_dim": 8, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, **EXPERTS}
GLM |= {"first_k_dense_replace": 1}
ERNIE = {**GROUPS, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16}
MIMO_V2 = {**SLIDING, **EXPERTS, "n_routed_experts": 4, "v_head_dim": 8}
QWEN = {**GROUPS, **LINEAR, "head_dim": 8, "num_hidden_layers": 4}
QWEN_MOE = {**QWEN, **EXPERTS, "shared_expert_intermediate_size": 16}
NEMOTRON = {**GROUPS, **EXPERTS, "head_dim": 8, "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 4}
NEMOTRON |= {
    "n_groups": 2,
    "n_routed_experts": 4,
    "moe_shared_expert_intermediate_size": 16,
    "num_nextn_predict_layers": 1,
}
NEMOTRON |= {"hybrid_override_pattern": "M-*E", "mtp_hybrid_override_pattern": "*E"}
LONGCAT = {"num_layers": 2, "ffn_hidden_size": 48, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4}
LONGCAT |= {"head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "n_routed_experts": 4, "moe_topk": 2}
LONGCAT |= {"expert_ffn_hidden_size": 16, "zero_expert_num": 2}
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
    "nemotron_h": (NEMOTRON, 1, "mtp.layers.0.eh_proj.weight"),
    "longcat_flash": (LONGCAT, 1, "model.mtp.layers.0.eh_proj.weight"),
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


QUERIES, FC = "model.layers.2.self_attn.q_proj.weight", "model.layers.2.eh_proj.weight"


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


@pytest.mark.parametrize("model_type", ["nemotron_h", "longcat_flash"])
@torch.inference_mode()
def test_a_block_of_another_form_drafts_as_it_is_trained(model_type):
    drafter = modules_on(model_type).drafter
    ids, features = text_and_features(drafter, 3, 16)
    features = features.float()
    trained = drafter.head_states(features, ids)
    ends = STEPS["ragged"][-1]
    drafted = chain(drafter, observed(drafter, features, ids, STEPS["ragged"]), ids, ends, len(trained))
    for level, logits in enumerate(drafted):
        for row, end in enumerate(ends):
            expected = drafter.head_logits(level, trained[level][row, end - 1])
            torch.testing.assert_close(logits[row], expected, atol=2e-5, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
def test_a_block_of_nemotron_is_its_layers_one_behind_the_other(tmp_path):
    base = base_of("nemotron_h")
    attention, experts = base.model.layers[2:]
    own = {f"mtp.layers.0.{name}": tensor for name, tensor in attention.state_dict().items()}
    base.save_pretrained(tmp_path / "whole")
    stored = load_file(tmp_path / "whole" / "model.safetensors")
    root = next(name.partition("layers.3.")[0] for name in stored if "layers.3." in name)
    own |= {f"mtp.layers.1.{name.removeprefix(f'{root}layers.3.')}": stored[name] for name in stored if ".3." in name}
    folder = publish(modules_on("nemotron_h"), tmp_path / "base")
    edit(folder, lambda tensors: {**tensors, **{name: tensor.clone() for name, tensor in own.items()}})
    found = MtpForCausalLM.from_base(folder, dtype=torch.float32)
    (module,) = found.drafter.mtp
    x = torch.randn(2, 7, 32)
    hidden = attention(x, attention_mask=torch.full((7, 7), -torch.inf).triu(1)[None, None])
    torch.testing.assert_close(module.body.over_text(x, None), experts(hidden))
    gradients = []
    for recomputed in (False, True):
        found.train()
        if recomputed:
            found.gradient_checkpointing_enable()
        found.zero_grad()
        ids = torch.arange(3, 15).view(2, 6)
        states = torch.stack(found.drafter.head_states(torch.linspace(-1, 1, 2 * 6 * 32).view(2, 6, 32), ids))
        states.sum().backward()
        gradients.append([parameter.grad.clone() for parameter in module.body.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)
    assert all(gradient.any() for gradient in gradients[0])


def test_the_attention_of_longcat_is_deepseek_s_with_larger_norms(tmp_path):
    base = base_of("longcat_flash")
    theirs = base.model.layers[0].self_attn[0]
    own = {f"model.mtp.layers.0.self_attn.{name}": tensor.clone() for name, tensor in theirs.state_dict().items()}
    folder = publish(modules_on("longcat_flash"), tmp_path / "base")
    edit(folder, lambda tensors: {**tensors, **own})
    (module,) = MtpForCausalLM.from_base(folder, dtype=torch.float32).drafter.mtp
    x, positions = torch.randn(2, 7, 32), torch.arange(7)[None]
    mask = torch.full((7, 7), -torch.inf).triu(1)[None, None]
    ours, _ = module.body.layer.self_attn(x, position_embeddings=module.body.rotary(x, positions), attention_mask=mask)
    expected, _ = theirs(x, position_embeddings=base.model.rotary_emb(x, positions), attention_mask=mask)
    torch.testing.assert_close(ours, expected)


def test_a_rotary_embedding_that_takes_three_positions_is_given_the_text_s(monkeypatch):
    """As Qwen's are up to transformers 5.17."""
    model = modules_on("qwen3_5_text")
    x, kind = torch.randn(2, 7, 32), type(model.base.get_decoder().rotary_emb)
    expected = model.drafter.mtp[0].body.over_text(x, None)
    forward = kind.forward

    def of_three(self, x, positions):
        if positions.dim() != 3:
            raise IndexError("too many indices for tensor of dimension 2")
        return forward(self, x, positions)

    monkeypatch.setattr(kind, "forward", of_three)
    again = modules_on("qwen3_5_text")
    assert again.config.own_layer.model_type == "qwen3_5_text"
    again.drafter.load_state_dict(model.drafter.state_dict())
    torch.testing.assert_close(again.drafter.mtp[0].body.over_text(x, None), expected)


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


@pytest.mark.parametrize(
    "place, said", [("/nowhere/at/all", "there is no folder '/nowhere/at/all'"), (True, "is True:")]
)
def test_a_place_of_modules_that_is_none_is_refused_before_the_base_is_loaded(place, said):
    with pytest.raises((OSError, ValueError), match=said):
        MtpForCausalLM.from_base("/no/base/either", modules_from=place)


def test_a_base_that_never_had_modules_gets_fresh_ones_with_a_notice(tmp_path, caplog):
    tiny_base("llama").save_pretrained(tmp_path)
    model = MtpForCausalLM.from_base(tmp_path)
    assert not model.drafter.loaded and model.config.num_modules == 1
    assert "has no modules for multi-token prediction: these are untrained" in caplog.text
    with pytest.raises(ValueError, match="holds no module for multi-token prediction: merging"):
        MtpForCausalLM.from_base(tmp_path, modules_from=tmp_path)


SCALES = {"of blocks": (2, 4), "a large block": (1, 1), "of all": (), "of rows": (32,)}


@pytest.mark.few(4)
@pytest.mark.parametrize("form", SCALES.values(), ids=SCALES)
@pytest.mark.parametrize("ending", ["_scale_inv", "_scale"])
def test_weights_in_eight_bits_are_unpacked_by_their_scales(form, ending, glm):
    wanted = load_file(glm / "second.safetensors")[QUERIES]
    scales = torch.rand(form) + 0.5
    wide = scales[:, None] if len(form) == 1 else scales
    if len(form) == 2:
        wide = wide.repeat_interleave(32 // form[0], 0).repeat_interleave(32 // form[1], 1)
    packed = (wanted / wide).to(torch.float8_e4m3fn)
    inputs = {QUERIES.replace("weight", "input_scale"): torch.ones(())}
    edit(glm, lambda tensors: {**tensors, QUERIES: packed, QUERIES + ending: scales, **inputs})
    found = MtpForCausalLM.from_base(glm, dtype=torch.float32).drafter.mtp[0].body.layer.self_attn.q_proj.weight
    torch.testing.assert_close(found, (packed.float() * wide).bfloat16().float())


@pytest.mark.parametrize("holder", ["quantization_config", "text_config"])
def test_blocks_that_do_not_divide_a_weight_are_as_wide_as_the_config_says(holder, glm):
    """As the 576 rows of DeepSeek's in blocks of 128."""
    scales = torch.tensor([[0.5, 2.0], [3.0, 0.25]])
    packed = load_file(glm / "second.safetensors")[QUERIES].to(torch.float8_e4m3fn)
    edit(glm, lambda tensors: {**tensors, QUERIES: packed, f"{QUERIES}_scale_inv": scales})
    fields = json.loads((glm / "config.json").read_text())
    (glm / "config.json").write_text(json.dumps({**fields, holder: {"q": {"weight_block_size": [24, 20]}}}))
    (module,) = find_modules(str(glm), base_of("glm4_moe").config, {}).tensors()
    wide = scales.repeat_interleave(24, 0)[:32].repeat_interleave(20, 1)[:, :32]
    assert torch.equal(module["body.layer.self_attn.q_proj.weight"], (packed.float() * wide).bfloat16())


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


@pytest.mark.few(6)
@pytest.mark.parametrize("pattern", ["*", "*E*E", "*M", "E*", "-*", "M*E"])
def test_patterns_of_nemotron_that_are_not_attention_and_then_experts_are_refused(pattern, glm):
    fields = {**SIZES, **SPECIAL, **NEMOTRON, "mtp_hybrid_override_pattern": pattern}
    config = AutoConfig.for_model("nemotron_h", **fields)
    assert mtp.own_block(config, mtp.MTP_KINDS["nemotron_h"]) is None
    assert mtp.MtpConfig(base_config=config).own_layer.model_type == "llama"
    edit(glm, lambda tensors: {"mtp.layers.0.eh_proj.weight": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"modules for multi-token prediction with the layers \[.*its config counts 1"):
        find_modules(str(glm), config, {})
    with pytest.raises(ValueError, match="no decoder layer with rotary positions can be built from a 'nemotron_h'"):
        MtpForCausalLM.from_base(
            tiny_base("llama"),
            modules_from=False,
            layer_config=AutoConfig.for_model("nemotron_h", **{**fields, "hybrid_override_pattern": "M-*E"}),
        )


def test_a_base_of_nemotron_s_that_counts_no_modules_gets_a_layer_of_a_llama():
    model = MtpForCausalLM.from_base(tiny_base("nemotron-h"))
    assert model.config.own_layer.model_type == "llama"
    assert sum(parameter.numel() for parameter in model.drafter.parameters()) < 20_000


@pytest.mark.parametrize("model_type", ["nemotron_h", "qwen3_5_text"])
def test_several_modules_are_not_written_under_the_names_of_one(model_type, tmp_path):
    with pytest.raises(ValueError, match="it has several modules, and the target has names for one"):
        export_checkpoint(modules_on(model_type, num_modules=2), tmp_path / "theirs", "base")


def test_fewer_modules_than_the_config_counts_are_refused_unless_they_are_asked_for(glm):
    fields = json.loads((glm / "config.json").read_text())
    (glm / "config.json").write_text(json.dumps({**fields, "num_nextn_predict_layers": 3}))
    with pytest.raises(ValueError, match="holds 1 of the 3 modules .* its config counts: .*or say num_modules=1.$"):
        MtpForCausalLM.from_base(glm)
    assert MtpForCausalLM.from_base(glm, num_modules=1).config.num_modules == 1


def test_a_damaged_shard_is_one_line(glm):
    (glm / "second.safetensors").write_bytes(b"12345678")
    with pytest.raises(OSError, match="second.safetensors' is not a readable safetensors file"):
        find_modules(str(glm), base_of("glm4_moe").config, {}).tensors()
    save_file({"spare": torch.zeros(1)}, glm / "second.safetensors")
    with pytest.raises(OSError, match="second.safetensors' lacks 'model.layers.2.*which the index says is there"):
        find_modules(str(glm), base_of("glm4_moe").config, {}).tensors()
    (glm / "second.safetensors").unlink()
    with pytest.raises(OSError, match="lacks second.safetensors, which its model.safetensors.index.json names"):
        find_modules(str(glm), base_of("glm4_moe").config, {})


# What llama.cpp's converter calls the parts of a module; it stores norms as 1 + weight.
LLAMA_CPP = {"fc": "nextn.eh_proj", "embedding_norm": "nextn.enorm", "hidden_norm": "nextn.hnorm"}
LLAMA_CPP |= {"norm": "nextn.shared_head_norm"}
OF_BLOCK = {"input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm"}
OF_BLOCK |= {f"self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"}
OF_BLOCK |= {"self_attn.o_proj": "attn_output", **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"}}
OF_BLOCK |= {"mlp.gate": "ffn_gate_inp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp"}
for part in ("gate", "up", "down"):
    OF_BLOCK |= {f"mlp.{part}_proj": f"ffn_{part}", f"mlp.shared_expert.{part}_proj": f"ffn_{part}_shexp"}
LLAMA_CPP |= {f"body.layer.{name}": part for name, part in OF_BLOCK.items()}


def write_gguf_module(file: Path, model: MtpForCausalLM, architecture: str, **more: torch.Tensor) -> None:
    """The module alone, as llama.cpp writes it with `--mtp`, one of its matrices in blocks of 8 bits."""
    gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
    writer, layers = gguf.GGUFWriter(file, architecture), model.config.get_text_config().num_hidden_layers
    tensors = {name.removeprefix("mtp.0."): tensor for name, tensor in model.drafter.state_dict().items()}
    experts = "body.layer.mlp.experts."
    if f"{experts}gate_up_proj" in tensors:
        gate, up = tensors.pop(f"{experts}gate_up_proj").chunk(2, dim=1)
        parts = {"ffn_gate_exps": gate, "ffn_up_exps": up, "ffn_down_exps": tensors.pop(f"{experts}down_proj")}
    else:
        parts = {}
    parts |= {LLAMA_CPP[name.removesuffix(".weight")]: tensor for name, tensor in tensors.items()} | more
    for part, tensor in parts.items():
        values = (tensor + 1 if part.endswith("norm") else tensor).numpy()
        kind = gguf.GGMLQuantizationType.Q8_0 if part == "attn_output" else None
        packed = values if kind is None else gguf.quantize(values, kind)
        writer.add_tensor(f"blk.{layers}.{part}.weight", packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("model_type, architecture", [("qwen3_5_text", "qwen35"), ("qwen3_5_moe_text", "qwen35moe")])
def test_a_gguf_file_may_carry_the_module(model_type, architecture, tmp_path):
    model = modules_on(model_type)
    write_gguf_module(tmp_path / "mtp.gguf", model, architecture)
    found = MtpForCausalLM.from_base(base_of(model_type), modules_from=tmp_path / "mtp.gguf").drafter.state_dict()
    wanted = model.drafter.state_dict()
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():  # of eight bits, or of 1 + a weight that was rounded
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0.02 if "o_proj" in name else 1e-6)


def test_a_gguf_file_whose_module_is_not_known_is_refused(tmp_path):
    model, base = modules_on("qwen3_5_text"), base_of("qwen3_5_text")
    write_gguf_module(tmp_path / "other.gguf", model, "deepseek2")
    with pytest.raises(ValueError, match="a module for multi-token prediction of the architecture 'deepseek2': known"):
        MtpForCausalLM.from_base(base, modules_from=tmp_path / "other.gguf")
    write_gguf_module(tmp_path / "more.gguf", model, "qwen35", ssm_a=torch.zeros(1))
    with pytest.raises(ValueError, match=r"has 'blk.4.ssm_a.weight', which is not known here"):
        MtpForCausalLM.from_base(base, modules_from=tmp_path / "more.gguf")
    (tmp_path / "cut.gguf").write_bytes((tmp_path / "more.gguf").read_bytes()[:200])
    with pytest.raises(OSError, match="the GGUF file .*cut.gguf' cannot be read"):
        MtpForCausalLM.from_base(base, modules_from=tmp_path / "cut.gguf")


def test_modules_of_another_form_are_refused_by_name(glm):
    config = AutoConfig.for_model("glm_moe_dsa", num_hidden_layers=2)
    edit(glm, lambda tensors: {"model.layers.2.eh_proj.weight": torch.zeros(1)})
    with pytest.raises(
        ValueError, match="modules for multi-token prediction with attention that chooses keys by score"
    ):
        find_modules(str(glm), config, {})


@pytest.mark.parametrize("to", ["base", "speculators"])
@pytest.mark.parametrize("model_type", ["glm4_moe", "qwen3_5_text", "longcat_flash"])
def test_export_and_convert_change_nothing(model_type, to, tmp_path):
    model = modules_on(model_type)
    model.base.save_pretrained(tmp_path / "base")
    export_checkpoint(model, tmp_path / "theirs", to)
    convert_checkpoint(tmp_path / "theirs", tmp_path / "ours", base_model=tmp_path / "base")
    again = MtpForCausalLM.from_pretrained(tmp_path / "ours")
    assert_same(again.drafter.state_dict(), model.drafter.state_dict())


@pytest.mark.parametrize("to", ["base", "speculators"])
def test_a_module_that_goes_on_from_what_is_not_normed_has_no_place_in_files_that_do_not_say_so(to, tmp_path):
    model = modules_on("glm4_moe", feed_normed=False)
    model.base.save_pretrained(tmp_path / "base")
    with pytest.raises(ValueError, match="its feed_normed is False, and the target has a place for True alone"):
        export_checkpoint(model, tmp_path / "theirs", to)


def test_the_draft_vocabulary_is_the_first_tokens_of_a_ranking(glm, tmp_path):
    (tmp_path / "ranking.json").write_text("[7, 3, 11, 5]")
    model = MtpForCausalLM.from_base(glm, draft_tokens=tmp_path / "ranking.json", draft_vocab_size=3)
    assert model.drafter.draft_tokens.tolist() == [7, 3, 11]
    assert MtpForCausalLM.from_base(glm, draft_tokens=[4, 2]).drafter.draft_tokens.tolist() == [4, 2]
    no_ids = [(text, "expected token ids") for text in ('{"a": 1}', "[]")]
    for wrong, message in (("[1, 2", "is no JSON"), *no_ids):
        (tmp_path / "ranking.json").write_text(wrong)
        with pytest.raises(ValueError, match=message):
            MtpForCausalLM.from_base(glm, draft_tokens=tmp_path / "ranking.json")


@pytest.mark.few(3)
@pytest.mark.parametrize("model_class", [MtpForCausalLM, GemmaAssistantForCausalLM, DFlashForCausalLM])
def test_a_drafter_in_float16_computes_in_bfloat16_and_says_so_once(model_class, caplog):
    logging.get_logger("hf_drafthead.modeling.drafter").warning_once.cache_clear()
    base = tiny_base("llama-gqa", dtype=torch.float16)
    model = model_class.from_base(base)
    call = {"input_ids": torch.arange(3, 9)[None], "max_new_tokens": 6, "draft_tree": [[0], [0, 0]]}
    for _ in range(2):
        assert torch.equal(model.generate(**call), base.generate(call["input_ids"], max_new_tokens=6))
    assert next(model.drafter.parameters()).dtype == torch.bfloat16 and model.base.dtype == torch.float16
    assert caplog.text.count("computes in bfloat16: its states overflow in float16") == 1


def test_a_large_vocabulary_is_spoken_of_once(glm, caplog, monkeypatch):
    monkeypatch.setattr(mtp, "LARGE_VOCABULARY", VOCABULARY - 1)
    MtpForCausalLM.from_base(glm)
    assert f"guess among all {VOCABULARY} tokens of the base" in caplog.text


@pytest.mark.parametrize("name", ["mtp.safetensors", "extra.bin"])
def test_modules_in_a_file_that_the_index_leaves_out_are_read(glm, name):
    expected = MtpForCausalLM.from_base(glm, dtype=torch.float32).drafter.state_dict()
    modules = load_file(glm / "second.safetensors")
    edit(glm, lambda tensors: {"unused": torch.zeros(1)})
    with pytest.raises(ValueError, match="holds no module for multi-token prediction"):
        MtpForCausalLM.from_base(glm)
    save_file(modules, glm / name) if name.endswith("safetensors") else torch.save(modules, glm / name)
    assert_same(MtpForCausalLM.from_base(glm, dtype=torch.float32).drafter.state_dict(), expected)


def in_type(dtype):
    return lambda tensors: tensors | {QUERIES: tensors[QUERIES].to(dtype)}


def without(part):
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if part not in name}


BROKEN = {
    **{
        str(dtype): ("glm4_moe", in_type(dtype), f"holds {QUERIES!r} .* of which nothing says how it is unpacked")
        for dtype in (torch.uint8, torch.float8_e4m3fn, torch.int32)
    },
    "a scale of what is not packed": (
        "glm4_moe",
        lambda tensors: tensors | {f"{QUERIES}_scale": torch.ones(1)},
        "q_proj.weight' .* in float32, which is not packed, beside a scale: take it from",
    ),
    "scales of blocks of no known width": (
        "glm4_moe",
        lambda tensors: tensors | {FC: tensors[FC].to(torch.float8_e4m3fn), f"{FC}_scale_inv": torch.ones(3, 5)},
        r"holds .*eh_proj.weight' .* with scales \[3, 5\], which are not those of its",
    ),
    "scales of another form": (
        "glm4_moe",
        lambda tensors: tensors | {FC: tensors[FC].to(torch.float8_e4m3fn), f"{FC}_scale_inv": torch.ones(33, 3)},
        r"holds .*eh_proj.weight' .* with scales \[33, 3\], which are not those of its",
    ),
    "a smaller tensor": (
        "glm4_moe",
        lambda tensors: tensors | {QUERIES: tensors[QUERIES][:8].clone()},
        "block has mismatched keys|is no 'glm4_moe' layer",
    ),
    "a lost tensor": ("glm4_moe", without(QUERIES), r"block has missing keys .*q_proj.* for a 'glm4_moe' layer"),
    "a lost norm": (
        "nemotron_h",
        without("final_layernorm"),
        "has modules without the norm behind their block",
    ),
    "a lost module": ("mimo_v2_flash", without(".mtp.layers.1."), "number 1 is missing, and number 2 is there"),
}


@pytest.mark.few(8)
@pytest.mark.parametrize("model_type, change, message", BROKEN.values(), ids=BROKEN)
def test_modules_that_cannot_be_read_are_refused(model_type, change, message, tmp_path):
    folder = publish(modules_on(model_type), tmp_path / "base")
    edit(folder, change)
    with pytest.raises(ValueError, match=message):
        MtpForCausalLM.from_base(folder)
