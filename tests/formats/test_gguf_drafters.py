"""Drafters in GGUF files, as llama.cpp's converter writes them, draft as the safetensors that they were made of."""

import re

import pytest
import torch

from hf_drafthead import convert_checkpoint
from hf_drafthead.modeling import DFlash2ForCausalLM, DFlashForCausalLM, Eagle3ForCausalLM
from tests.modeling.block_golden import golden_base, load

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
# By the names of safetensors, {} standing for the block.
NAMES = {
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "embed_tokens.weight": "token_embd.weight",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
    "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
    **{f"markov_head.markov_w{number}.weight": f"markov_w{number}.weight" for number in (1, 2)},
    **{f"confidence_head.proj.{kind}": f"conf_proj.{kind}" for kind in ("weight", "bias")},
}
OF_A_BLOCK = {"input_layernorm": "attn_norm", "hidden_norm": "attn_norm_2", "post_attention_layernorm": "ffn_norm"}
OF_A_BLOCK |= {"self_attn.o_proj": "attn_output", **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"}}
OF_A_BLOCK |= {f"self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"}
OF_A_BLOCK |= {f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")}
OF_A_BLOCK |= {"attention_conv.kernel_projection": "attn_conv_proj", "mlp_conv.kernel_projection": "ffn_conv_proj"}
NAMES |= {f"layers.{{}}.{name}.weight": f"blk.{{}}.{part}.weight" for name, part in OF_A_BLOCK.items()}
for conv, part in (("attention_conv", "attn_conv"), ("mlp_conv", "ffn_conv")):
    NAMES[f"layers.{{}}.{conv}.base_kernel"] = f"blk.{{}}.{part}_base"


SAME = ("d2t", "rope_freqs.weight")


def named(key: str) -> str:
    number = re.search(r"layers\.(\d+)\.", key)
    block = number[1] if number else ""
    return NAMES[re.sub(r"layers\.\d+\.", "layers.{}.", key)].format(block)


def write(path, kind, weights, config, mask_token=127, **own):
    """A file of that architecture; own keys stand behind it."""
    writer = gguf.GGUFWriter(path, kind)
    numbers = {
        "block_count": config["num_hidden_layers"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "context_length": config["max_position_embeddings"],
        "rope.dimension_count": config["head_dim"],
    }
    for key, value in numbers.items():
        writer.add_uint32(f"{kind}.{key}", value)
    writer.add_float32(f"{kind}.attention.layer_norm_rms_epsilon", config["rms_norm_eps"])
    rope = config.get("rope_parameters") or config
    writer.add_float32(f"{kind}.rope.freq_base", rope["rope_theta"])
    writer.add_uint32("tokenizer.ggml.mask_token_id", mask_token)
    writer.add_uint32(f"{kind}.vocab_size", config["vocab_size"])
    for key, value in own.items():
        if isinstance(value, list):
            writer.add_array(f"{kind}.{key}", value)
        else:
            add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}[type(value)]
            add(f"{kind}.{key}", value)
    for key, tensor in weights.items():
        writer.add_tensor(key if key in SAME else named(key), tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def keys_of(config):
    """Those that llama.cpp has for a block drafter."""
    flat = config | config.get("dflash_config", {})
    found = {"block_size": flat["block_size"], "target_layers": [layer + 1 for layer in flat["target_layer_ids"]]}
    found |= {"attention.causal": False}
    for name in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
        found |= {name: flat[name]} if name in flat else {}
    for key, name in {"logit_scale": "output_multiplier", "final_logit_softcapping": "final_logit_softcapping"}.items():
        found |= {key: flat[name]} if name in flat else {}
    if config.get("sliding_window"):
        found["attention.sliding_window"] = config["sliding_window"]
        found["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in config["layer_types"]]
    return found


BLOCKS = {
    "dflash_z_qwen3_b8_n3_l2": (DFlashForCausalLM, {}),
    "dspark_vanilla_qwen3_b7": (DFlashForCausalLM, {}),
    "dflash2_z_qwen3_b8_n3_l2": (DFlash2ForCausalLM, {}),
    "dflash2_z_swa_noncausal_scaled_b6": (DFlash2ForCausalLM, {"input_embedding_scale": 1.7}),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_drafter_is_that_of_the_safetensors(name, tmp_path):
    case, (kind, fields) = load(name), BLOCKS[name]
    config = case.facts["config"]
    weights = {
        key: tensor for key, tensor in case.weights.items() if key not in ("embed_tokens.weight", "lm_head.weight")
    }
    own = {**keys_of(config), **fields}
    file = write(tmp_path / "drafter.gguf", "dflash", weights, config, **own)
    model = kind.from_pretrained(file, convert=True, base_model=golden_base())
    wanted = case.model(tmp_path / "theirs")
    for field in wanted.config.heads_fields() - {"layer_config"}:
        expected = getattr(wanted.config, field)
        assert getattr(model.config, field) == (pytest.approx(expected) if isinstance(expected, float) else expected), (
            field
        )
    for key, tensor in wanted.drafter.state_dict().items():
        assert torch.equal(model.drafter.state_dict()[key], tensor), key
    ids, features = torch.randint(3, 120, (1, 9)), torch.randn(1, 9, 64 * len(model.drafter.reads))
    for one, other in zip(*(each.drafter.head_states(features, ids) for each in (model, wanted)), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


def neighbours(tensor, heads):
    """Rows as llama.cpp stores those of a Llama."""
    return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()


@pytest.mark.parametrize("layers", ["target_layers", "extract_layers"])
def test_an_eagle3_head_is_that_of_the_safetensors(layers, tmp_path):
    """Rows of queries and keys are put back, and the ids of the draft vocabulary are taken for ids."""
    case = load("peagle_s_llama_layers_k4")
    config = case.facts["config"]["transformer_layer_config"] | {"num_hidden_layers": 1}
    weights = {key: tensor for key, tensor in case.weights.items() if "layers.1" not in key}
    for key in ("mask_hidden", "t2d"):
        del weights[key]
    plain = dict(weights)
    for part, heads in (("q", 4), ("k", 2)):
        key = f"layers.0.self_attn.{part}_proj.weight"
        weights[key] = neighbours(weights[key], heads)
    ids = weights["d2t"] + torch.arange(len(weights["d2t"]))
    own = {layers: [1, 2, 3], "norm_before_residual": True}
    for number, d2t in enumerate((ids, weights["d2t"])):
        file = write(tmp_path / f"{number}.gguf", "eagle3", weights | {"d2t": d2t}, config, **own)
        model = Eagle3ForCausalLM.from_pretrained(file, convert=True, base_model=golden_base())
        assert list(model.config.feature_layers) == [1, 2, 3] and model.config.norm_before_residual
        assert torch.equal(model.drafter.draft_tokens, ids)
        for part in "qkvo":
            expected = plain[f"layers.0.self_attn.{part}_proj.weight"]
            assert torch.equal(getattr(model.drafter.body.layer.self_attn, f"{part}_proj").weight, expected)


REFUSED = {
    "a fork": ({"kind": "dflash-draft"}, "has the architecture 'dflash-draft': of drafters in GGUF files 'dflash'"),
    "another fork": ({"kind": "dspark"}, "has the architecture 'dspark'"),
    "a key": ({"gate": 2.5}, "says dflash.gate 2.5 in its config.json"),
    "two scalings": ({"rope.scaling.factor": 2.0, "freqs": True}, "says rope_freqs.weight 'beside another scaling'"),
    "two lists of layers": ({"extract_layers": [1, 2, 2]}, r"says target_layers \[1, 2, 3\] and extract_layers \[1, 2"),
    "a part of a head": ({"rope.dimension_count": 8}, "says partial_rotary_factor 0.5"),
}


@pytest.mark.parametrize("fields, message", REFUSED.values(), ids=REFUSED)
def test_what_is_not_known_is_refused_by_name(fields, message, tmp_path):
    case = load("dflash_z_qwen3_b8_n3_l2")
    config, own = case.facts["config"], {key: value for key, value in fields.items() if key not in ("kind", "freqs")}
    kind, weights = fields.get("kind", "dflash"), case.weights
    weights |= {"rope_freqs.weight": torch.ones(8)} if "freqs" in fields else {}
    file = write(tmp_path / "a.gguf", kind, weights, config, **{**keys_of(config), **own})
    with pytest.raises(ValueError, match=message):
        convert_checkpoint(file, base_model=tmp_path)


def test_a_factor_without_a_kind_is_linear_as_llama_cpp_takes_it(tmp_path):
    case = load("dflash_z_qwen3_b8_n3_l2")
    config = case.facts["config"]
    file = write(tmp_path / "a.gguf", "dflash", case.weights, config, **keys_of(config), **{"rope.scaling.factor": 2.0})
    rotary = convert_checkpoint(file).fields["layer_config"]["rope_parameters"]
    assert rotary["rope_type"] == "linear" and rotary["factor"] == 2.0


def test_a_cut_file_is_refused_in_one_line(tmp_path):
    case = load("dflash_z_qwen3_b8_n3_l2")
    config = case.facts["config"]
    file = write(tmp_path / "a.gguf", "dflash", case.weights, config, **keys_of(config))
    (tmp_path / "b.gguf").write_bytes(file.read_bytes()[:5000])
    with pytest.raises(OSError, match="cannot be read"):
        convert_checkpoint(tmp_path / "b.gguf")
    assert convert_checkpoint(file).fields["feature_layers"] == [1, 2, 3]
