"""What cannot be converted or exported is refused in one line: what was found, what was expected, what to do."""

import json
import pickle
import re
import shutil
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, LlamaConfig

from hf_drafthead import convert_checkpoint, export_checkpoint
from hf_drafthead.modeling import (
    AmphistaForCausalLM,
    EagleForCausalLM,
    HydraForCausalLM,
    MedusaConfig,
    MedusaForCausalLM,
)
from tests.bases import tiny_base
from tests.families import Family
from tests.formats.originals import ORIGINALS
from tests.modeling.golden import golden_base

BY_NAME = {original.golden: original for original in ORIGINALS}


@contextmanager
def refused(kind, message):
    """One line of this text, with `...` for what differs between runs."""
    with pytest.raises(kind) as caught:
        yield
    text = str(caught.value)
    pattern = ".*".join(map(re.escape, message.split("...")))
    assert re.fullmatch(pattern, text), text
    assert "\n" not in text


@pytest.fixture
def place(golden_folder, tmp_path):
    """A function that writes a set of golden heads, changed, into a folder."""

    def write(golden: str, change=None, config=None, file=None):
        original, folder = BY_NAME[golden], tmp_path / "heads"
        tensors = original.write(folder, golden_folder)
        if change is not None:
            change(tensors)
            torch.save(tensors, folder / original.file)
        if config is not None:
            found = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps({**found, **config}))
        return folder

    return write


MEDUSA, HYDRA, EAGLE = "medusa_v1_own_lmhead_l1", "hydrapp_prefix_mlp_l1_grounded", "eagle1"


def test_nothing_there(tmp_path):
    with refused(OSError, "there is no file or folder './nowhere/at all': give one, or the id of a repository on..."):
        convert_checkpoint("./nowhere/at all")
    with refused(OSError, "'...' holds no weights (...): expected one of medusa_lm_head.safetensors, ..."):
        convert_checkpoint(tmp_path)


def test_an_unknown_layout(tmp_path):
    save_file({"owl.wing": torch.zeros(2), "owl.beak": torch.zeros(2)}, tmp_path / "model.safetensors")
    with refused(
        ValueError,
        "'...' is of no known layout: it has 2 tensors such as 'owl.beak', 'owl.wing'; known are FasterDecoding "
        "Medusa, ...: give one of these; a base without heads needs no conversion, put new heads on it with from_base.",
    ):
        convert_checkpoint(tmp_path)


def test_two_layouts(place, golden_folder):
    folder = place(MEDUSA)
    shutil.copy(place_of(HYDRA, folder.parent, golden_folder) / "hydra_lm_head.pt", folder)
    message = (
        "'...' holds heads twice: '...medusa_lm_head.pt' (FasterDecoding Medusa) and '...hydra_lm_head.pt' (Hydra); "
        "give the file of one of them."
    )
    with refused(ValueError, message):
        convert_checkpoint(folder)
    assert convert_checkpoint(folder / "hydra_lm_head.pt").layout == "Hydra"


def place_of(golden, parent, base):
    BY_NAME[golden].write(parent / golden, base)
    return parent / golden


def test_a_base_beside_the_heads_is_no_second_layout(place, golden_folder):
    folder = place(MEDUSA)
    shutil.copy(golden_folder / "model.safetensors", folder)
    assert convert_checkpoint(folder).layout == "FasterDecoding Medusa"


def test_heads_of_this_library(golden_folder, tmp_path):
    MedusaForCausalLM.from_base(golden_base()).save_pretrained(tmp_path / "ours")
    with refused(ValueError, "'...' is a checkpoint of this library already: load it with AutoModel.from_pretrained."):
        convert_checkpoint(tmp_path / "ours")


class Code:
    """A pickle that would write a file when it is opened."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (self.path, "w"))


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_a_pickle_with_code_in_it_is_never_run(place, zipped, tmp_path):
    folder, witness = place(MEDUSA), tmp_path / "was here"
    bad = {"0.0.linear.weight": torch.zeros(2, 2), "x": Code(str(witness))}
    torch.save(bad, folder / "medusa_lm_head.pt", _use_new_zipfile_serialization=zipped)
    message = (
        "'...medusa_lm_head.pt' is a pickle that holds more than tensors (...): it could run code, so it is not "
        "opened; ask its author for safetensors."
    )
    with refused(OSError, message):
        convert_checkpoint(folder)
    (folder / "medusa_lm_head.pt").write_bytes(pickle.dumps(Code(str(witness))))
    with pytest.raises(OSError, match="medusa_lm_head.pt' is "):
        convert_checkpoint(folder)
    assert not witness.exists()


def test_a_truncated_file(place):
    folder = place(MEDUSA)
    file = folder / "medusa_lm_head.pt"
    whole = file.read_bytes()
    for length in (len(whole) // 2, len(whole) - 10):
        file.write_bytes(whole[:length])
        with refused(OSError, "'...medusa_lm_head.pt' is cut off: copy or download it again."):
            convert_checkpoint(folder)
    file.write_bytes(b"")
    with refused(OSError, "'...medusa_lm_head.pt' is cut off or damaged (...): copy or download it again."):
        convert_checkpoint(folder)
    safe = folder / "medusa_lm_head.safetensors"
    save_file({"0.0.linear.weight": torch.zeros(64, 64)}, safe)
    safe.write_bytes(safe.read_bytes()[:-8])
    with refused(
        OSError, "'...medusa_lm_head.safetensors' is not a readable safetensors file (...): copy or download..."
    ):
        convert_checkpoint(folder)


def test_a_git_lfs_pointer(place):
    folder = place(MEDUSA)
    (folder / "medusa_lm_head.pt").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with refused(OSError, "'...' is a Git LFS pointer and not the file itself: fetch it with `git lfs pull`."):
        convert_checkpoint(folder)


def test_a_missing_shard(tmp_path):
    index = {"metadata": {}, "weight_map": {"medusa_head.0.0.linear.weight": "model-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with refused(OSError, "'...' lacks model-00001-of-00001.safetensors, which its model.safetensors.index.json..."):
        convert_checkpoint(tmp_path)


def test_something_else_than_a_state_dict(place):
    folder = place(MEDUSA)
    torch.save([1, 2], folder / "medusa_lm_head.pt")
    with refused(OSError, "'...' holds a list and not a state dict: save the heads' state_dict()."):
        convert_checkpoint(folder)


def test_a_state_dict_in_an_envelope_is_read(place):
    folder = place(MEDUSA)
    tensors = torch.load(folder / "medusa_lm_head.pt")
    torch.save({"epoch": 3, "state_dict": tensors}, folder / "medusa_lm_head.pt")
    assert convert_checkpoint(folder).fields["num_draft_heads"] == 5


@pytest.mark.parametrize(
    "golden, change, message",
    [
        (
            MEDUSA,
            lambda tensors: tensors.pop("3.1.weight"),
            "'...' lacks the tensor '3.1.weight': the file is not complete, get it again.",
        ),
        (
            MEDUSA,
            lambda tensors: tensors.pop("2.0.linear.bias"),
            "'...' lacks the tensor '2.0.linear.bias': the file is not complete, get it again.",
        ),
        (
            MEDUSA,
            lambda tensors: tensors.update({"1.1.weight": torch.zeros(128, 32)}),
            "'...' has '1.1.weight' of shape [128, 32], but the tensors beside it ask for [128, 64]: the file is...",
        ),
        (
            MEDUSA,
            lambda tensors: tensors.update({"1.0.linear.weight": torch.zeros(64, 64).half()}),
            "'...' has '0.0.linear.weight' and 4 more that belong together in several types (float16, float32)...",
        ),
        (
            HYDRA,
            lambda tensors: tensors.pop("hydra_mlp.2.1.res_connection.weight"),
            "'...' lacks the tensor 'hydra_mlp.2.1.res_connection.weight': the file is not complete, get it again.",
        ),
        (
            HYDRA,
            lambda tensors: [tensors.pop(name) for name in list(tensors) if "res_connection" in name],
            "'...' holds Hydra heads that do not read the tokens of their path (grounded_heads false): there is no...",
        ),
        (
            HYDRA,
            lambda tensors: tensors.update({"hydra_mlp.0.1.gate.weight": torch.zeros(2)}),
            "'...' has 1 tensor(s) that the layout 'Hydra' does not have, such as 'hydra_mlp.0.1.gate.weight' [2]...",
        ),
        (
            EAGLE,
            lambda tensors: tensors.update({"layers.0.input_layernorm.weight": torch.ones(64)}),
            "'...' has 'layers.0.input_layernorm.weight', a norm before attention, which no EAGLE head has...",
        ),
        (
            EAGLE,
            lambda tensors: tensors.update({"layers.1.self_attn.q_proj.weight": torch.ones(64, 64)}),
            "'...' has 1 tensor(s) that the layout 'EAGLE' does not have, such as 'layers.1.self_attn.q_proj...",
        ),
        (
            MEDUSA,
            lambda tensors: tensors["1.0.linear.weight"][3].fill_(float("nan")),
            "'...' holds NaN or infinity in '1.0.linear.weight' and 0 more tensor(s), as after an overflow or...",
        ),
        (
            EAGLE,
            lambda tensors: tensors.pop("layers.0.mlp.up_proj.weight"),
            "'...' lacks the tensor 'drafter.body.layer.mlp.up_proj.weight' [128, 64] that its config asks for: ...",
        ),
    ],
)
def test_a_damaged_file(place, golden_folder, golden, change, message):
    with refused(ValueError, message):
        convert_checkpoint(place(golden, change), base_model=golden_folder)


def test_heads_and_config_that_disagree_are_converted_and_told(place):
    notes = convert_checkpoint(place(MEDUSA)).notes
    assert notes == ["config.json says medusa_num_heads 2, the tensors have 5: the tensors are right."]


@pytest.mark.parametrize(
    "golden, config, note",
    [
        (HYDRA, {"hydra_num_layers": 4}, "config.json says hydra_num_layers 4, the tensors have 1: the tensors are..."),
        (HYDRA, {"hydra_head_arch": "mlp"}, "config.json says hydra_head_arch 'mlp', the tensors have 'prefix-mlp'..."),
        (HYDRA, {"grounded_heads": False}, "config.json says grounded_heads False, the tensors have True: the..."),
        (EAGLE, {"bias": False}, "config.json says bias False, the tensors have True: the tensors are right."),
        (EAGLE, {"intermediate_size": 99}, "config.json says intermediate_size 99, the tensors have 128: the..."),
        (EAGLE, {"num_key_value_heads": 2}, "config.json says num_key_value_heads 2, the tensors have 4: the..."),
    ],
)
def test_the_tensors_win_over_the_config_aloud(place, golden_folder, golden, config, note):
    (found,) = convert_checkpoint(place(golden, config=config), base_model=golden_folder).notes
    assert re.fullmatch(".*".join(map(re.escape, note.split("..."))), found)


def test_heads_that_read_another_hidden_state(place):
    with refused(
        ValueError, "'...' reads the hidden state 2 layers before the last one (hidden_state_offset): Hydra..."
    ):
        convert_checkpoint(place(HYDRA, config={"hidden_state_offset": 2}))


def test_attention_that_does_not_divide(place, golden_folder):
    folder = place(EAGLE, config={"num_attention_heads": 5})
    with refused(
        ValueError, "'...' has query and key projections of 64 and 64 rows, which 5 attention heads (...) do..."
    ):
        convert_checkpoint(folder, base_model=golden_folder)


def test_a_layer_without_a_config(place, golden_folder):
    folder = place(EAGLE)
    (folder / "config.json").unlink()
    with refused(ValueError, "'...' has no config.json that says num_attention_heads, which tensors do not tell..."):
        convert_checkpoint(folder, base_model=golden_folder)


def test_a_config_that_is_no_json(place):
    folder = place(MEDUSA)
    (folder / "config.json").write_text("{")
    with refused(OSError, "'...config.json' is not readable JSON (...): copy or download it again."):
        convert_checkpoint(folder)


def test_a_base_that_nobody_names(place, tmp_path):
    folder = place(EAGLE)
    message = (
        "'...' does not say which base its heads were trained for: give the base that they were trained for "
        "(base_model=, on the command line --base)."
    )
    with refused(ValueError, message):
        convert_checkpoint(folder, tmp_path / "new")
    with refused(ValueError, message):
        EagleForCausalLM.from_pretrained(folder, convert=True)
    assert convert_checkpoint(folder).base is None  # a look needs none
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "sizes, words",
    [
        ({"hidden_size": 128}, "base of hidden size 64; the base '...other' has 128"),
        ({"vocab_size": 129}, "base of vocabulary 128; the base '...other' has 129"),
    ],
)
def test_a_base_that_does_not_fit(place, tmp_path, sizes, words):
    fields = {"hidden_size": 64, "vocab_size": 128, "num_attention_heads": 4, "intermediate_size": 128, **sizes}
    LlamaConfig(**fields).save_pretrained(tmp_path / "other")
    message = (
        f"the heads at '...' were trained for a {words}: give the base that they were trained for (base_model=, on the "
        "command line --base)."
    )
    with refused(ValueError, message):
        convert_checkpoint(place(MEDUSA), tmp_path / "new", base_model=tmp_path / "other")


def test_a_base_whose_layer_is_another(place, tmp_path, golden_folder):
    config = LlamaConfig.from_pretrained(golden_folder)
    config.intermediate_size = 100
    config.save_pretrained(tmp_path / "other")
    with refused(
        ValueError, "'...' has 'drafter.prefix.layer.mlp.gate_proj.weight' as ... [128, 64], but its config..."
    ):
        convert_checkpoint(place(HYDRA), base_model=tmp_path / "other")


@pytest.mark.parametrize("golden", [HYDRA, EAGLE])
def test_embeddings_of_another_base(place, golden_folder, golden):
    def shift(tensors):
        name = "input_embed_fn.weight" if golden == HYDRA else "embed_tokens.weight"
        tensors[name] = tensors[name] + 0.01

    folder = place(golden, shift)
    message = "'...' holds input embeddings that are not those of the base '...', as heads for another base do: give..."
    with refused(ValueError, message):
        convert_checkpoint(folder, base_model=golden_folder)
    with refused(ValueError, message):
        BY_NAME[golden].model_class.from_pretrained(folder, convert=True, base_model=golden_base())


def test_embeddings_in_another_type_are_the_base_s(place):
    def halve(tensors):
        for name, tensor in tensors.items():
            tensors[name] = tensor.half()

    assert "input_embed_fn.weight" in convert_checkpoint(place(HYDRA, halve)).dropped


def test_embeddings_that_cannot_be_compared_are_told(place, golden_folder, tmp_path):
    LlamaConfig.from_pretrained(golden_folder).save_pretrained(tmp_path / "config alone")
    (note,) = convert_checkpoint(place(HYDRA), base_model=tmp_path / "config alone").notes
    assert note == (
        "the input embeddings in the file were not compared with the base's: its weights are not on this machine."
    )


def test_a_folder_that_exists(place, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for call in (
        lambda: convert_checkpoint(place(MEDUSA), tmp_path / "full"),
        lambda: export_checkpoint(tmp_path / "heads", tmp_path / "full", "tgi"),
    ):
        with refused(OSError, "'...full' exists: give a folder that does not, or that is empty."):
            call()
    with refused(OSError, "'...no/such' lies in '...no', which does not exist: make that folder first."):
        convert_checkpoint(tmp_path / "heads", tmp_path / "no" / "such")
    (tmp_path / "empty").mkdir()
    assert convert_checkpoint(tmp_path / "heads", tmp_path / "empty").folder == str(tmp_path / "empty")


def test_what_fails_leaves_no_folder(place, tmp_path, monkeypatch):
    folder = place(MEDUSA)
    before = sorted(tmp_path.iterdir())

    def broken(*arguments):
        raise OSError("the disk is full")

    monkeypatch.setattr("hf_drafthead.formats.convert.write_safetensors", broken)
    with pytest.raises(OSError, match="the disk is full"):
        convert_checkpoint(folder, tmp_path / "new")
    assert sorted(tmp_path.iterdir()) == before


def test_the_class_of_another_family(place):
    with refused(
        ValueError,
        "'...' holds heads in the layout 'Hydra': load them with HydraForCausalLM.from_pretrained(..., convert=True).",
    ):
        MedusaForCausalLM.from_pretrained(place(HYDRA), convert=True)


def test_a_config_beside_convert(place):
    with refused(ValueError, "config= cannot be given with convert=True, which reads it from the layout: drop it."):
        MedusaForCausalLM.from_pretrained(place(MEDUSA), convert=True, config=MedusaConfig())


@pytest.mark.parametrize("original", ORIGINALS, ids=lambda original: original.golden)
def test_loading_without_convert_says_the_line_and_the_command(heads, original):
    for there in (True, False):
        with pytest.raises(
            (OSError, ValueError), match="in another project's layout, give convert=True, or convert them"
        ):
            original.model_class.from_pretrained(heads)
        if there:
            (heads / "config.json").unlink()


def test_auto_classes_say_it_for_vllm_s_folders(golden_folder, tmp_path):
    MedusaForCausalLM.from_base(golden_base()).save_pretrained(tmp_path / "ours")
    export_checkpoint(tmp_path / "ours", tmp_path / "theirs", "vllm")
    for auto in (AutoModel, AutoConfig):
        with refused(
            ValueError,
            "'...theirs' holds no model of transformers: if these are heads in another project's layout, give "
            "convert=True, or convert them once with `hf-drafthead convert`.",
        ):
            auto.from_pretrained(tmp_path / "theirs")


# ---- export ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def base(tmp_path):
    base = tiny_base("llama-gqa", dtype=torch.float32)
    base.save_pretrained(tmp_path / "base")
    base.name_or_path = base.config._name_or_path = str(tmp_path / "base")
    return base


REFUSED = [
    (
        Family("untied medusa", MedusaForCausalLM, {"num_layers": 2}),
        "medusa",
        "its one_block is False, and the target has a place for True alone; use --to tgi or vllm.",
    ),
    (
        Family("medusa, shared, 2 blocks", MedusaForCausalLM, {"num_layers": 2, "share_lm_head": True}),
        "tgi",
        "its shared_blocks is 2, and the target has a place for 0 or 1 alone; use --to vllm.",
    ),
    (
        Family("untied hydra", HydraForCausalLM, {"num_layers": 3}),
        "hydra",
        "its one_block is False, and the target has a place for True alone; train it otherwise.",
    ),
    (
        Family("hydra, shared", HydraForCausalLM, {"share_lm_head": True}),
        "hydra",
        "its share_lm_head is True, and the target has a place for False alone; train it with share_lm_head False.",
    ),
    (
        Family("hydra, other layer", HydraForCausalLM, {"prefix_layer": True, "layer_config": tiny_base().config}),
        "hydra",
        "its layer_config is ..., and the target has a place for None alone; train it with...",
    ),
    (
        Family("eagle, bias", EagleForCausalLM, {"fc_bias": True}),
        "vllm",
        "fc has a bias, which vLLM drops without a word; let --fold-bias (fold_bias=True) move it into embeddings...",
    ),
    (
        Family("eagle, two states", EagleForCausalLM, {"feature_layers": [1, 2]}),
        "eagle",
        "its feature_layers is [1, 2], and the target has a place for [-1] alone; train it with feature_layers [-1].",
    ),
    (
        Family("eagle, qwen3", EagleForCausalLM, {"layer_config": tiny_base("qwen3").config}),
        "sglang",
        "its layer_model_type is 'qwen3', and the target has a place for 'llama' or 'mistral' or 'qwen2' alone...",
    ),
    (
        Family("eagle, qwen2", EagleForCausalLM, {"layer_config": tiny_base("qwen2").config}),
        "sglang",
        "its biases_in_layers is True, and the target has a place for False alone; use --to eagle or vllm.",
    ),
]


@pytest.mark.parametrize("family, to, why", [pytest.param(*case, id=f"{case[0].name}-{case[1]}") for case in REFUSED])
def test_what_a_target_would_damage_is_refused(base, tmp_path, family, to, why):
    family.build(base).save_pretrained(tmp_path / "ours")
    with refused(ValueError, f"'...ours' cannot be written as '{to}': {why}" + ("" if why.endswith(".") else "...")):
        export_checkpoint(tmp_path / "ours", tmp_path / "theirs", to)
    assert not (tmp_path / "theirs").exists()


@pytest.mark.parametrize("to", ["tgi", "vllm"])
def test_heads_that_were_trained_with_their_base_are_written_for_the_base_that_lies_with_them(base, tmp_path, to):
    model = Family("medusa", MedusaForCausalLM).build(base)
    torch.nn.init.ones_(model.base.model.norm.weight).mul_(3)
    model.save_pretrained(tmp_path / "ours")
    export_checkpoint(tmp_path / "ours", tmp_path / "theirs", to)
    if to == "tgi":
        fields = json.loads((tmp_path / "theirs" / "config.json").read_text())
        assert fields["base_model_name_or_path"] == str(tmp_path / "ours" / "base")
    again = MedusaForCausalLM.from_pretrained(
        tmp_path / "theirs", convert=True, base_model=tmp_path / "ours" / "base", dtype=torch.float32
    )
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_a_target_that_the_family_has_no_form_in(base, tmp_path):
    Family("hydra", HydraForCausalLM).build(base).save_pretrained(tmp_path / "hydra")
    Family("amphista", AmphistaForCausalLM).build(base).save_pretrained(tmp_path / "amphista")
    with refused(ValueError, "'...hydra' holds hydra heads, which have no form in 'vllm': expected one of hydra."):
        export_checkpoint(tmp_path / "hydra", tmp_path / "new", "vllm")
    with refused(
        ValueError, "'...' holds amphista heads, which have no form in 'vllm': no other project has a form..."
    ):
        export_checkpoint(tmp_path / "amphista", tmp_path / "new", "vllm")
    with refused(ValueError, "--to 'gguf' is no known target: expected one of base, eagle, ...hydra, medusa, ...vllm."):
        export_checkpoint(tmp_path / "hydra", tmp_path / "new", "gguf")


def test_what_is_exported_must_be_heads_of_this_library(place, tmp_path):
    with refused(ValueError, "'...' holds a 'None' model without draft heads: ..."):
        export_checkpoint(place(MEDUSA), tmp_path / "new", "tgi")


def test_a_folded_bias_gives_the_same_sums(base, tmp_path):
    model = Family("eagle", EagleForCausalLM, {"fc_bias": True}).build(base)
    done = export_checkpoint(model, tmp_path / "theirs", "vllm", fold_bias=True)
    assert re.match(r"folded into input embeddings of its own, the bias of fc is off by up to \d", done.notes[0])
    tensors = load_file(tmp_path / "theirs" / "model.safetensors")
    assert "fc.bias" not in tensors
    ids, hidden = torch.arange(67), torch.randn(67, 32)
    pair = torch.cat([base.get_input_embeddings()(ids), hidden], dim=-1)
    folded = torch.cat([tensors["embed_tokens.weight"][ids], hidden], dim=-1)
    torch.testing.assert_close(folded @ tensors["fc.weight"].T, model.drafter.fc(pair), atol=1e-4, rtol=1e-4)


def test_a_bias_that_does_not_fold_is_refused(base, tmp_path):
    model = Family("eagle", EagleForCausalLM, {"fc_bias": True}).build(base)
    with torch.no_grad():
        left, right = (torch.linalg.qr(torch.randn(32, 32))[0] for _ in range(2))
        model.drafter.fc.weight[:, :32] = left @ torch.diag(torch.logspace(0, -7, 32)) @ right
    with refused(
        ValueError, "'...' cannot be written as 'vllm': folded into embeddings, the bias of fc is off by up to..."
    ):
        export_checkpoint(model, tmp_path / "theirs", "vllm", fold_bias=True)
    with torch.no_grad():
        model.drafter.fc.weight[:, :32] = 0
    with refused(
        ValueError, "'...' cannot be written as 'vllm': the half of fc that reads embeddings is singular; ..."
    ):
        export_checkpoint(model, tmp_path / "theirs", "vllm", fold_bias=True)


def test_sglang_always_gets_a_bias(base, tmp_path):
    Family("eagle", EagleForCausalLM).build(base).save_pretrained(tmp_path / "ours")
    export_checkpoint(tmp_path / "ours", tmp_path / "theirs", "sglang")
    bias = load_file(tmp_path / "theirs" / "model.safetensors")["fc.bias"]
    assert bias.shape == (32,) and not bias.any()


def test_what_the_engines_read_is_in_their_configs(base, tmp_path):
    Family("medusa", MedusaForCausalLM, {"num_draft_heads": 3}).build(base).save_pretrained(tmp_path / "medusa")
    Family("eagle", EagleForCausalLM).build(base).save_pretrained(tmp_path / "eagle")

    def config(heads, to):
        export_checkpoint(tmp_path / heads, tmp_path / f"{heads}-{to}", to)
        return json.loads((tmp_path / f"{heads}-{to}" / "config.json").read_text())

    vllm = config("medusa", "vllm")
    assert vllm["hidden_size"] == 32 and vllm["vocab_size"] == 67 and vllm["medusa_fc_bias"] is True
    # vLLM renames every key with these words to its own counts
    assert [key for key in vllm if "num" in key and ("heads" in key or "layers" in key)] == [
        "num_heads",
        "num_hidden_layers",
    ]
    assert "architectures" not in config("medusa", "tgi")
    assert config("medusa", "medusa")["medusa_num_heads"] == 3
    assert config("eagle", "vllm")["architectures"] == ["LlamaForCausalLM"]
    assert "bias" not in config("eagle", "sglang")  # vLLM and SGLang would give attention one
    assert config("eagle", "eagle")["bias"] is False
