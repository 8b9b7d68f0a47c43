"""One door for any id: the right class on its base, which drafts the base's own text, or one line of why not."""

import functools
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText, Qwen3Config

import hf_drafthead
from hf_drafthead import cli, convert_checkpoint, export_checkpoint, from_base, zoo
from hf_drafthead.door import recognize, start_from
from hf_drafthead.evaluation.loading import load as opened_by_commands
from hf_drafthead.modeling import (
    DFlash2ForCausalLM,
    DFlashForCausalLM,
    Eagle3ForCausalLM,
    LookupForCausalLM,
    MedusaForCausalLM,
    MtpForCausalLM,
    PEagleForCausalLM,
)
from hf_drafthead.modeling.files import edit_json
from tests import base_table
from tests.bases import tiny_base
from tests.families import Family
from tests.formats.test_mtp import modules_on, publish
from tests.gguf_base import write_gguf
from tests.modeling.block_golden import golden_base, load

CALL = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("door") / "base"
    golden_base().save_pretrained(folder)
    return folder


def assert_drafts(model, kind):
    assert type(model) is kind
    ids = torch.tensor([[5, 9, 33, 12, 40, 5, 9, 33]])
    assert torch.equal(model.generate(ids, **CALL), model.base.generate(ids, **CALL))
    assert model.why_no_drafts() is None


@pytest.mark.parametrize("name", ["dflash_z_qwen3_b8_n3_l2", "e2e_peagle_s_qwen3_k5"])
def test_a_base_that_nothing_names_is_asked_for(name, base, tmp_path):
    folder = load(name).write(tmp_path / "theirs")
    found = recognize(str(folder))
    assert found.kind == "a drafter of another project" and found.base is None
    assert found.line.endswith("base_model=...), whose base its files do not name")
    with pytest.raises(ValueError, match="does not say which base its heads were trained for: give the base"):
        hf_drafthead.from_pretrained(folder)
    (folder / "README.md").write_text(f"---\nbase_model: {base}\n---\n")
    assert recognize(str(folder)).base == str(base)


DFLASH, DSPARK, DFLASH2 = "dflash_z_qwen3_b8_n3_l2", "dspark_vanilla_qwen3_b7", "dflash2_z_qwen3_b8_n3_l2"
OF_SPECULATORS = "dspark_s_vanilla_qwen3_b5"
SLIDING = {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True, "sliding_window": 2048}
SLIDING |= {"is_causal": False, "num_target_layers": None}
OF_SPECFORGE = {"architectures": ["DSparkDraftModel"], "auto_map": {"AutoModel": "dspark.DSparkDraftModel"}}
HEADS_INSIDE = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
OF_GLM = {"rms_norm_eps": 1e-5, "runtime_block_size": 8, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}
OF_MUSE = {"output_multiplier": 0.19611613513818404, "final_logit_softcapping": 20}
IDS_THRICE = {"block_size": None, "eagle_aux_hidden_state_layer_ids": [1, 2, 3], "target_layer_ids": [0, 1, 2]}


def sample(outcome, golden, inside=(), more=None, **changed):
    return outcome, golden, inside, more or {}, changed


# Config files as they are published, with the sizes of tiny weights: the class that loads them, or what is said; whose
# weights; fields that lie in dflash_config, and what stands there besides; fields that differ.
SAMPLES = {
    "incoai/Qwen3.8-27B-DFlash2": sample(DFlash2ForCausalLM, DFLASH2, **SLIDING),
    "incoai/GLM-5.3-Flash-DFlash2": sample(
        DFlash2ForCausalLM, DFLASH2, (), {"runtime_block_size": 8}, **SLIDING, **OF_GLM
    ),
    "Muse-Glimmer-30B": sample(DFlash2ForCausalLM, DFLASH2, (), OF_MUSE, **SLIDING),
    "DFlash 2 on fewer tokens": sample("has selector_vocab_size 9 of", DFLASH2, (), {"selector_vocab_size": 9}),
    "DFlash 2 with experts": sample("says draft_ffn_type 'moe'", DFLASH2, draft_ffn_type="moe", num_experts=8),
    "speculators' DFlash 2 for Qwen3-4B": sample(DFlash2ForCausalLM, "loss_dflash2_s_qwen3_b4"),
    "RedHatAI/Qwen3-8B-speculator.peagle": sample(PEagleForCausalLM, "e2e_peagle_s_qwen3_k5"),
    "speculators' DSpark for Qwen3.8-27B": sample(DFlashForCausalLM, OF_SPECULATORS),
    "SpecForge's DSpark": sample(
        DFlashForCausalLM, DSPARK, HEADS_INSIDE, {"projector_type": "dspark", "attention_mode": "gqa"}, **OF_SPECFORGE
    ),
    "z-lab/Qwen3-4B-DFlash-b16": sample(DFlashForCausalLM, DFLASH, auto_map={"AutoModel": "dflash.DFlashDraftModel"}),
    "a block size inside": sample(DFlashForCausalLM, DFLASH, ("block_size",)),
    "JetSpec": sample(DFlashForCausalLM, DFLASH, (), {"causal_head": True}),
    "ModelOpt's window": sample(DFlashForCausalLM, DFLASH, use_swa=True, swa_window_size=6, is_causal=False),
    "MiMo-V2.5": sample("says partial_rotary_factor 0.5", DFLASH, partial_rotary_factor=0.5, attention_value_scale=0.6),
    "Nemotron-3.5-DSpark": sample("with attention sinks, which has no", DSPARK, attention_sink_bias=True),
    "Nemotron-3.5-DFlash": sample("does not say block_size, .*num_draft_heads=", DFLASH, **IDS_THRICE),
    "DeepSeek-V4-DSpark": sample("reads the output of the base's last layer", DSPARK, target_layer_ids=[2, 3]),
    "Domino": sample("is Domino, which", DFLASH, (), {"projector_type": "domino"}, architectures=["DominoDraftModel"]),
    "Muse-Glimmer's assistant": sample("says model_type 'muse_g", DFLASH, model_type="muse_glimmer_assistant"),
    "XPress": sample("holds a speculator of the kind 'xpress'", OF_SPECULATORS, speculators_model_type="xpress"),
}


@pytest.mark.few(99)
@pytest.mark.parametrize("outcome, name, inside, more, changed", SAMPLES.values(), ids=SAMPLES)
def test_every_published_config_loads_by_its_folder_alone_or_says_what_is_missing(
    outcome, name, inside, more, changed, base, tmp_path, caplog
):
    config = load(name).facts["config"]
    nested = {**config.get("dflash_config", {}), **{key: config[key] for key in inside}, **more}
    folder = load(name).write(tmp_path / "theirs", dflash_config=nested or None, **dict.fromkeys(inside), **changed)
    (folder / "README.md").write_text(f"---\nbase_model: {base}\n---\n")
    if isinstance(outcome, str):
        with pytest.raises(ValueError, match=outcome) as refused:
            hf_drafthead.from_pretrained(folder)
        assert "\n" not in str(refused.value)
    else:
        assert_drafts(hf_drafthead.from_pretrained(folder), outcome)
        notes = convert_checkpoint(folder).notes
        assert notes and [caplog.text.count(f"{str(folder)!r}: {note}") for note in notes] == [1] * len(notes)


# LiquidAI's: the kind of the base, in which of its layers it attends, and whose outputs are read; the drafter's layers
# and rotary base. A GGUF file holds the one before it.
OF_2_6B = ("lfm2", 30, (2, 5, 9, 13, 17, 21, 24, 27), [2, 9, 17, 21, 27], 5, 1e7)
LIQUID = {
    "LiquidAI/LFM2.5-1.2B-Instruct-DSpark": ("lfm2", 16, (2, 5, 8, 10, 12, 14), [2, 5, 8, 11, 14], 5, 1e6),
    "LiquidAI/LFM2.5-8B-A1B-DSpark": ("lfm2-moe", 24, (2, 6, 10, 14, 18, 21), [2, 6, 10, 14, 18], 5, 5e6),
    "LiquidAI/LFM2.5-VL-3B-DSpark": ("lfm2_vl", 30, OF_2_6B[2], OF_2_6B[3], 4, 1e7),
    "LiquidAI/LFM2.5-2.6B-DSpark": OF_2_6B,
    "LiquidAI/LFM2.5-2.6B-DSpark-GGUF": OF_2_6B,
}


def liquid_base(kind, layers, attending):
    """A tiny base with the published one's layers, of text alone or around images."""
    types = ["full_attention" if layer in attending else "conv" for layer in range(layers)]
    fields = {"num_hidden_layers": layers, "layer_types": types, "tie_word_embeddings": True}
    if kind != "lfm2_vl":
        return tiny_base(kind, dtype=torch.float32, **fields)
    text, (_, _, vision, others) = tiny_base("lfm2", **fields).config, base_table.IMAGES["lfm2_vl"]
    config = AutoConfig.for_model("lfm2_vl", text_config=text, vision_config=vision, **others)
    return AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()


@pytest.mark.few(99)
@pytest.mark.parametrize("name", LIQUID)
def test_liquid_s_drafters_load_by_their_folder_alone_on_their_own_kinds_of_bases(name, tmp_path):
    """Their rows of queries and keys are for rotary positions that pair neighbours, but for those in a GGUF file."""
    kind, layers, attending, ids, count, theta = LIQUID[name]
    base = liquid_base(kind, layers, attending)
    layer = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    layer |= {"head_dim": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 512}
    rotary = {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}
    fields = {"num_layers": count, "num_draft_heads": 9, "feature_layers": [layer + 1 for layer in ids]}
    fields |= {"layer_config": Qwen3Config(**layer, **rotary), "mask_token_id": 60, "markov_rank": 4}
    fields |= {"confidence_head": True, "sample_from_anchor": True}
    model = Family("dspark", DFlashForCausalLM, fields).build(base)
    base.save_pretrained(tmp_path / "base")
    export_checkpoint(model, folder := tmp_path / "theirs", "sglang")
    weights = load_file(folder / "model.safetensors")
    inside = {"mask_token_id": 60, "target_layer_ids": ids, "num_target_layers": layers}
    config = {**layer, "model_type": "qwen3", "architectures": ["Lfm2DSparkDraftModel"], "hidden_act": "silu"}
    config |= {"num_hidden_layers": count, "vocab_size": 67, "rope_theta": theta, "block_size": 9, "markov_rank": 4}
    config |= {"layer_types": ["full_attention"] * count, "markov_head_type": "vanilla", "dtype": "bfloat16"}
    config |= {"rope_is_neox_style": False, "enable_confidence_head": True, "dflash_config": inside}
    if name.endswith("GGUF"):
        gguf_drafters = pytest.importorskip("tests.formats.test_gguf_drafters")
        keys = gguf_drafters.keys_of(config)
        folder = gguf_drafters.write(tmp_path / "a.gguf", "dflash", weights, config, mask_token=60, **keys)
    else:
        for key in [key for key in weights if key.endswith(("q_proj.weight", "k_proj.weight", "_norm.weight"))]:
            if "self_attn" in key:
                weights[key] = weights[key].unflatten(0, (-1, 2, 4)).transpose(1, 2).flatten(0, 2).contiguous()
        save_file(weights, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "README.md").write_text(f"---\nbase_model: {tmp_path / 'base'}\n---\n")
    loaded = hf_drafthead.from_pretrained(folder, **({"base_model": tmp_path / "base"} if folder.is_file() else {}))
    assert_drafts(loaded, DFlashForCausalLM)
    assert loaded.config.max_depth == 9 and loaded.config.own_layer.rope_parameters["rope_theta"] == theta
    for key, tensor in model.drafter.state_dict().items():
        assert torch.equal(loaded.drafter.state_dict()[key], tensor), key


def cut(file):
    file.write_bytes(file.read_bytes()[:-100])


def put_nan(file, part="norm.weight"):
    tensors = load_file(file)
    save_file({name: tensor * torch.nan if name.endswith(part) else tensor for name, tensor in tensors.items()}, file)


def lose(part):
    return lambda file: save_file({name: it for name, it in load_file(file).items() if part not in name}, file)


DAMAGED = {
    "cut": (cut, "is not a readable safetensors file"),
    "no weights": (lambda file: file.unlink(), "holds no weights: expected one of"),
    "NaN": (put_nan, "holds NaN or infinity in"),
    "a layer": (lose("layers.1."), "has 1 of the 2 layers of its config.json: get the file again"),
    "a tensor": (lose("layers.0.mlp.up"), "lacks the tensor"),
    "another base": (None, "were trained for a base of hidden size 64; the base .* has 32"),
}


@pytest.mark.few(6)
@pytest.mark.parametrize("damage, message", DAMAGED.values(), ids=DAMAGED)
def test_damaged_files_and_other_bases_are_one_line_and_nothing_is_written(damage, message, base, tmp_path):
    tiny_base("qwen3").save_pretrained(tmp_path / "other")
    for name in (DFLASH, DSPARK, DFLASH2, "dflash_s_swa_causal_qwen3_b6", "e2e_peagle_s_qwen3_k5"):
        folder = load(name).write(tmp_path / name)
        if damage is not None:
            damage(folder / "model.safetensors")
        for call in (hf_drafthead.from_pretrained, functools.partial(convert_checkpoint, folder=tmp_path / "new")):
            with pytest.raises((OSError, ValueError), match=message) as refused:
                call(folder, base_model=tmp_path / "other" if damage is None else base)
            assert "\n" not in str(refused.value) and not (tmp_path / "new").exists()


def test_damaged_modules_of_a_base_are_one_line(tmp_path):
    folder = publish(modules_on("glm4_moe"), tmp_path / "glm")
    put_nan(folder / "second.safetensors", "eh_proj.weight")
    with pytest.raises(ValueError, match="has modules with NaN or infinity in 'fc.weight': download it again"):
        hf_drafthead.from_pretrained(folder)
    cut(folder / "second.safetensors")
    with pytest.raises(OSError, match="the base .* cannot be read .SafetensorError: .*: give the id or path"):
        hf_drafthead.from_pretrained(folder)


def test_other_spellings_are_the_same_heads(base, tmp_path):
    nested = {key: load(DSPARK).facts["config"][key] for key in HEADS_INSIDE}
    folder = load(DSPARK).write(
        tmp_path / "theirs", dflash_config=nested, **dict.fromkeys(HEADS_INSIDE), **OF_SPECFORGE
    )
    model, wanted = hf_drafthead.from_pretrained(folder, base_model=base), load(DSPARK).model(tmp_path / "plain")
    for field in wanted.config.heads_fields() - {"layer_config"}:
        assert getattr(model.config, field) == getattr(wanted.config, field), field


def test_a_raw_p_eagle_as_amazon_publishes_it(base, tmp_path):
    case = load("e2e_peagle_s_qwen3_k5")
    config, folder = case.facts["config"], tmp_path / "raw"
    flags = {key: config[key] for key in ("norm_before_residual", "norm_output", "fc_norm", "norm_before_fc")}
    about = {**flags, **config["transformer_layer_config"], "ptd_token_id": config["mask_token_id"]}
    about |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 128, "num_hidden_layers": 2}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(about | {"base_model_name_or_path": str(base)}))
    tensors = {key.replace("layers.0.", "midlayer."): value for key, value in case.weights.items()}
    save_file(tensors, folder / "model.safetensors")
    model = hf_drafthead.from_pretrained(folder, feature_layers=config["eagle_aux_hidden_state_layer_ids"])
    assert_drafts(model, PEagleForCausalLM)
    for key, tensor in case.model(tmp_path / "theirs").drafter.state_dict().items():
        assert torch.equal(model.drafter.state_dict()[key], tensor), key


def test_heads_of_this_library_and_of_other_layouts(tmp_path):
    tiny_base("llama-gqa", dtype=torch.float32, num_hidden_layers=8).save_pretrained(tmp_path / "base")
    for kind, fields, target in (
        (MedusaForCausalLM, {}, "medusa"),
        (Eagle3ForCausalLM, {"feature_layers": [2, 4, 5]}, "sglang"),
        (Eagle3ForCausalLM, {"feature_layers": [1, 3, 5]}, "speculators"),
    ):
        model = Family("heads", kind, fields).build(from_base(tmp_path / "base").base)
        model.save_pretrained(tmp_path / target)
        export_checkpoint(model, tmp_path / f"to {target}", target)
        assert recognize(str(tmp_path / target)).kind == "draft heads of this library"
        assert_drafts(hf_drafthead.from_pretrained(tmp_path / target), kind)
        assert_drafts(hf_drafthead.from_pretrained(tmp_path / f"to {target}"), kind)


def test_a_base_drafts_by_its_own_modules_or_by_copies(tmp_path):
    folder = publish(modules_on("glm4_moe"), tmp_path / "glm")
    assert recognize(str(folder)).modules == 1
    assert_drafts(hf_drafthead.from_pretrained(folder, dtype=torch.float32), MtpForCausalLM)
    tiny_base().save_pretrained(tmp_path / "plain")
    assert recognize(str(tmp_path / "plain")).kind == "a base"
    assert_drafts(hf_drafthead.from_pretrained(tmp_path / "plain"), LookupForCausalLM)
    (folder / "second.safetensors").unlink()
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"] = {key: file for key, file in index["weight_map"].items() if file.startswith("first")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_drafts(hf_drafthead.from_pretrained(folder, dtype=torch.float32), LookupForCausalLM)
    with pytest.raises(ValueError, match="is a base .* and no drafter: drop base_model="):
        hf_drafthead.from_pretrained(folder, base_model=folder)


def test_a_base_in_the_only_gguf_file_of_a_folder(tmp_path):
    pytest.importorskip("gguf", reason="the package gguf is not installed")
    write_gguf(tmp_path / "tiny.gguf")
    found = recognize(str(tmp_path))
    assert (found.kind, found.name) == ("a base", str(tmp_path / "tiny.gguf"))
    assert type(hf_drafthead.from_pretrained(tmp_path)) is LookupForCausalLM
    write_gguf(tmp_path / "other.gguf")
    with pytest.raises(OSError, match="it holds 2 GGUF files, such as .*other.gguf': give one of them"):
        recognize(str(tmp_path))


def test_a_drafter_in_a_folder_of_its_base(base, tmp_path):
    shutil.copytree(base, tmp_path / "both")
    load("dflash_z_qwen3_b8_n3_l2").write(tmp_path / "both" / "dflash")
    assert recognize(str(tmp_path / "both")).by == "its folder dflash"
    assert_drafts(hf_drafthead.from_pretrained(tmp_path / "both", base_model=base), DFlashForCausalLM)


def test_nothing_there(tmp_path):
    with pytest.raises(OSError, match="'./nowhere' is no folder, id or file of weights: give one"):
        hf_drafthead.from_pretrained("./nowhere")
    with pytest.raises(OSError, match="holds no config.json and no weights .it has none.: give a folder or id"):
        hf_drafthead.from_pretrained(tmp_path)
    AutoConfig.for_model("llama").save_pretrained(tmp_path)
    with pytest.raises(OSError):
        hf_drafthead.from_pretrained(tmp_path)


def test_commands_open_what_was_published(base, tmp_path):
    folder = load("dflash2_z_qwen3_b8_n3_l2").write(tmp_path / "theirs")
    assert_drafts(opened_by_commands(str(folder), base_model=str(base))[0], DFlash2ForCausalLM)


def test_commands_open_a_base_which_drafts_by_itself(tmp_path, capsys):
    shutil.copytree(zoo.path("base"), tmp_path / "base")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "def f(self):\\n    return self.a\\n\\ndef f(self):\\n"}\n')
    for command in (
        ["generate", "--exact", "--prompt", "x = 1\nx = 1\n"],
        ["bench", "--questions", str(tmp_path / "prompts.jsonl")],
        ["verify", "--prompts", str(tmp_path / "prompts.jsonl")],
    ):
        with pytest.raises(SystemExit) as ended:
            cli.main([command[0], str(tmp_path / "base"), *command[1:], "--max-new-tokens", "24"])
        assert ended.value.code == 0, (command, capsys.readouterr())


@pytest.mark.parametrize(
    "name, words", [("dflash2_z_qwen3_b8_n3_l2", "architecture DFlash2DraftModel"), (None, "by copies")]
)
def test_info_says_what_an_id_is(name, words, base, tmp_path, capsys):
    folder = base if name is None else load(name).write(tmp_path / "theirs")
    for file in folder.glob("*.safetensors") if name else ():
        file.unlink()  # no weights are read
    with pytest.raises(SystemExit) as ended:
        cli.main(["info", str(folder)])
    out = capsys.readouterr().out
    assert ended.value.code == 0 and words in out and "hf_drafthead.from_pretrained(" in out


@pytest.mark.parametrize(
    "name, target", [("dflash2_z_qwen3_b8_n3_l2", "sglang"), ("e2e_peagle_s_qwen3_k5", "speculators")]
)
def test_published_heads_are_trained_further_and_written_back(name, target, base, tmp_path):
    """On their base by its card, or a fine-tuned one; what was trained is read from their own layout again."""
    folder = load(name).write(tmp_path / "theirs")
    start = start_from(str(folder), str(tmp_path / "new-start"), str(base))
    assert start.family == {"sglang": "dflash2", "speculators": "peagle"}[target] and start.base == str(base)
    model = hf_drafthead.from_pretrained(start.folder, base_model=golden_base())
    with torch.no_grad():
        for parameter in model.drafter.parameters():
            parameter.add_(0.01)
    model.save_pretrained(tmp_path / "new")
    line, *notes = start.write_back(tmp_path / "new").split("\n")
    assert notes and all(note.startswith("note: ") for note in notes)
    assert line == f"in the layout that they were found in (--to {target}): {tmp_path / 'new'}-{target}"
    again = hf_drafthead.from_pretrained(f"{tmp_path / 'new'}-{target}", base_model=golden_base())
    for key, tensor in model.drafter.state_dict().items():
        assert torch.equal(again.drafter.state_dict()[key], tensor), key
    assert start_from(str(folder), str(tmp_path / "new-start"), str(base)) == start  # as a second run finds it
    why = start.write_back(tmp_path / "new")  # beside what an earlier training wrote
    assert why.startswith("not written back: ") and "exists: give a folder that does not" in why
    with pytest.raises(ValueError, match="is a base .* without modules of its own: give --base and --family"):
        start_from(str(base), str(tmp_path / "other"))


@pytest.mark.parametrize(
    "name, target", [("eagle3", "eagle3"), ("eagle3", "sglang"), ("eagle3", "vllm"), ("eagle", "sglang")]
)
def test_heads_go_back_to_the_engine_that_they_were_written_for(name, target, tmp_path):
    export_checkpoint(zoo.path(name), tmp_path / "theirs", target)
    if target == "sglang":  # as others write it
        edit_json(tmp_path / "theirs" / "config.json", hf_drafthead_export=None)
    start = start_from(str(tmp_path / "theirs"), str(tmp_path / "new"), zoo.path("base"))
    assert start.write_back(tmp_path / "new").startswith(f"in the layout that they were found in (--to {target}): ")


def test_heads_of_another_family_than_the_one_asked_for_are_not_trained(tmp_path, capsys):
    (tmp_path / "data.jsonl").write_text('{"text": "def f(a, b):\\n    return a + b"}\n' * 8)
    words = ["train", "--from", zoo.path("eagle"), "--family", "medusa", "--data", str(tmp_path / "data.jsonl")]
    with pytest.raises(SystemExit) as ended:
        cli.main([*words, "--output", str(tmp_path / "new"), "--dry-run"])
    assert (
        ended.value.code == 2 and "holds 'drafthead_eagle' heads, expected drafthead_medusa" in capsys.readouterr().err
    )


def test_heads_of_this_library_are_trained_further_on_the_base_that_lies_where_they_say(tmp_path):
    start = start_from(zoo.path("eagle"), str(tmp_path / "new"))
    assert start.base == str(Path(zoo.path("base")).resolve()) and start.targets is None
    model = hf_drafthead.from_pretrained(zoo.path("medusa"))
    model.save_pretrained(tmp_path / "both", include_base=True)
    assert start_from(str(tmp_path / "both"), str(tmp_path / "new")).base == str(tmp_path / "both" / "base")


def test_a_family_s_page_begins_with_a_published_id_and_the_line_that_loads_it():
    """Of Hydra, Amphista and a draft model nothing was published."""
    pages = {page.stem: page.read_text() for page in (Path(__file__).parents[1] / "docs" / "families").glob("*.md")}
    for name in pages.keys() - {"README", "hydra", "amphista", "draft-model"}:
        (published,) = re.findall(r"\A# (\S+/\S+): ", pages[name])
        first = pages[name].split("```")[1]
        assert f'hf_drafthead.from_pretrained("{published}"' in first, name
