"""One door for any id: the right class on its base, which drafts the base's own text, or one line of why not."""

import json
import shutil

import pytest
import torch
from transformers import AutoConfig

import hf_drafthead
from hf_drafthead import cli, export_checkpoint, from_base, zoo
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
from tests.bases import tiny_base
from tests.families import Family
from tests.formats.test_mtp import modules_on, publish
from tests.gguf_base import write_gguf
from tests.modeling.block_golden import golden_base, load

CALL = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
BLOCKS = {
    "dflash_z_qwen3_b8_n3_l2": DFlashForCausalLM,
    "dspark_vanilla_qwen3_b7": DFlashForCausalLM,
    "dflash2_z_qwen3_b8_n3_l2": DFlash2ForCausalLM,
    "dflash2_z_swa_noncausal_scaled_b6": DFlash2ForCausalLM,
    "dspark_s_vanilla_qwen3_b5": DFlashForCausalLM,
    "loss_dflash2_s_qwen3_b4": DFlash2ForCausalLM,
    "e2e_peagle_s_qwen3_k5": PEagleForCausalLM,
}


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


@pytest.mark.parametrize("name", BLOCKS)
def test_published_block_drafters(name, base, tmp_path):
    """Where nothing names the base it is asked for, or read off the card."""
    folder = load(name).write(tmp_path / "theirs")
    found = recognize(str(folder))
    assert found.kind == "a drafter of another project" and found.base is None
    assert found.line.endswith("base_model=...), whose base its files do not name")
    with pytest.raises(ValueError, match="does not say which base its heads were trained for: give its id or path"):
        hf_drafthead.from_pretrained(folder)
    assert_drafts(hf_drafthead.from_pretrained(folder, base_model=base), BLOCKS[name])
    (folder / "README.md").write_text(f"---\nbase_model: {base}\n---\n")
    assert recognize(str(folder)).base == str(base)
    assert_drafts(hf_drafthead.from_pretrained(folder), BLOCKS[name])


CHANGED = {
    "DSpark of SpecForge": (
        "dspark_vanilla_qwen3_b7",
        {"architectures": ["DSparkDraftModel"], "auto_map": {"AutoModel": "dspark.DSparkDraftModel"}},
        ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"),
        {"projector_type": "dspark", "attention_mode": "gqa"},
    ),
    "a flat DFlash": ("dflash_z_qwen3_b8_n3_l2", {"auto_map": {"AutoModel": "dflash.DFlashDraftModel"}}, (), {}),
    "a nested block size": ("dflash_z_qwen3_b8_n3_l2", {}, ("block_size",), {}),
    "LFM2.5": ("dspark_vanilla_qwen3_b7", {"architectures": ["Lfm2DSparkDraftModel"]}, ("num_target_layers",), {}),
}


@pytest.mark.parametrize("name, changed, inside, more", CHANGED.values(), ids=CHANGED)
def test_other_spellings_of_the_same(name, changed, inside, more, base, tmp_path):
    case = load(name)
    nested = {
        **case.facts["config"].get("dflash_config", {}),
        **{key: case.facts["config"][key] for key in inside},
        **more,
    }
    folder = case.write(tmp_path / "theirs", **changed, dflash_config=nested, **dict.fromkeys(inside))
    model = hf_drafthead.from_pretrained(folder, base_model=base)
    wanted = case.model(tmp_path / "plain")
    assert_drafts(model, DFlashForCausalLM)
    for field in wanted.config.heads_fields() - {"layer_config"}:
        assert getattr(model.config, field) == getattr(wanted.config, field), field


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


REFUSED = {
    "DominoDraftModel": "is Domino, which has no family here",
    "MuseGlimmerAssistantModel": "says model_type 'muse_glimmer_assistant'",
}


@pytest.mark.parametrize("architecture, message", REFUSED.items())
def test_what_is_left_out_is_refused_by_name(architecture, message, base, tmp_path):
    kind = {"model_type": "muse_glimmer_assistant"} if "Muse" in architecture else {}
    folder = load("dflash_z_qwen3_b8_n3_l2").write(tmp_path / "theirs", architectures=[architecture], **kind)
    with pytest.raises(ValueError, match=message):
        hf_drafthead.from_pretrained(folder, base_model=base)


def test_nothing_there(tmp_path):
    with pytest.raises(OSError, match="'./nowhere' is no folder, id or file of weights: give one"):
        hf_drafthead.from_pretrained("./nowhere")
    with pytest.raises(OSError, match="holds no config.json and no weights: give a folder or id that does"):
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
    line = start.write_back(tmp_path / "new")
    assert line == f"in the layout that they were found in (--to {target}): {tmp_path / 'new'}-{target}"
    again = hf_drafthead.from_pretrained(f"{tmp_path / 'new'}-{target}", base_model=golden_base())
    for key, tensor in model.drafter.state_dict().items():
        assert torch.equal(again.drafter.state_dict()[key], tensor), key
    assert start_from(str(folder), str(tmp_path / "new-start"), str(base)) == start  # as a second run finds it
    with pytest.raises(ValueError, match="is a base .* without modules of its own: give --base and --family"):
        start_from(str(base), str(tmp_path / "other"))
