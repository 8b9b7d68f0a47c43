"""What cannot be converted or exported is refused in one line: what was found, what was expected, what to do."""

import json
import pickle
import re
import shutil
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

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


OTHER = "has 1 tensor(s) that the layout '{}' does not have, such as '{}..."
MEDUSA, HYDRA, EAGLE = "medusa_v1_own_lmhead_l1", "hydrapp_prefix_mlp_l1_grounded", "eagle1"


def test_what_is_no_checkpoint_of_another_project(golden_folder, tmp_path):
    with refused(OSError, "there is no file or folder './nowhere/at all': give one, or the id of a repository on..."):
        convert_checkpoint("./nowhere/at all")
    with refused(OSError, "'...' holds no weights: expected one of medusa_lm_head.safetensors, ..."):
        convert_checkpoint(tmp_path)
    with refused(OSError, "'org/none' cannot be read (...): expected one of medusa_lm_head.safetensors, ..."):
        convert_checkpoint("org/none", local_files_only=True)
    save_file({"owl.wing": torch.zeros(2), "owl.beak": torch.zeros(2)}, tmp_path / "model.safetensors")
    known = "'owl.beak', 'owl.wing'; known are FasterDecoding Medusa, ...: give one of these; a base without..."
    with refused(ValueError, f"'...' is of no known layout: it has 2 tensors such as {known}"):
        convert_checkpoint(tmp_path)
    MedusaForCausalLM.from_base(golden_base()).save_pretrained(tmp_path / "ours")
    with refused(ValueError, "'...' is a checkpoint of this library already: load it with AutoModel.from_pretrained."):
        convert_checkpoint(tmp_path / "ours")


def test_what_lies_beside_heads(place, golden_folder):
    """Other heads, of which one file is to be given; a base is no second layout."""
    folder = place(MEDUSA)
    shutil.copy(golden_folder / "model.safetensors", folder)
    assert convert_checkpoint(folder).layout == "FasterDecoding Medusa"
    BY_NAME[HYDRA].write(folder.parent / "hydra", golden_folder)
    shutil.copy(folder.parent / "hydra" / "hydra_lm_head.pt", folder)
    files = "'...medusa_lm_head.pt' (FasterDecoding Medusa) and '...hydra_lm_head.pt' (Hydra)"
    with refused(ValueError, f"'...' holds heads twice: {files}; give the file of one of them."):
        convert_checkpoint(folder)
    assert convert_checkpoint(folder / "hydra_lm_head.pt").layout == "Hydra"


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


def test_other_files_than_state_dicts(place, tmp_path):
    file = place(MEDUSA) / "medusa_lm_head.pt"
    tensors = torch.load(file)
    torch.save({"epoch": 3, "state_dict": tensors}, file)  # which is read
    assert convert_checkpoint(file.parent).fields["num_draft_heads"] == 5
    torch.save([1, 2], file)
    with refused(OSError, "'...' holds a list and not a state dict: save the heads' state_dict()."):
        convert_checkpoint(file.parent)
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with refused(OSError, "'...' is a Git LFS pointer and not the file itself: fetch it with `git lfs pull`."):
        convert_checkpoint(file.parent)
    torch.save(tensors, file)
    (file.parent / "config.json").write_text("{")
    with refused(OSError, "'...config.json' is not readable JSON (...): copy or download it again."):
        convert_checkpoint(file.parent)
    index = {"metadata": {}, "weight_map": {"medusa_head.0.0.linear.weight": "model-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with refused(OSError, "'...' lacks model-00001-of-00001.safetensors, which its model.safetensors.index.json..."):
        convert_checkpoint(tmp_path)


def lose(*names):
    return lambda tensors: [tensors.pop(name) for name in list(tensors) if any(part in name for part in names)]


def put(**found):
    return lambda tensors: tensors.update({name.replace("__", "."): tensor for name, tensor in found.items()})


DAMAGED = [
    (MEDUSA, lose("3.1.weight"), "lacks the tensor '3.1.weight': the file is not complete, get it again."),
    (MEDUSA, lose("2.0.linear.bias"), "lacks the tensor '2.0.linear.bias': the file is not complete, get it again."),
    (
        MEDUSA,
        put(**{"1__1__weight": torch.zeros(128, 32)}),
        "has 'drafter....up.1.weight' ... [128, 32], ...",
    ),
    (
        MEDUSA,
        put(**{"1__0__linear__weight": torch.zeros(64, 64).half()}),
        "has '0.0.linear.weight' and 4 more that belong together in several forms (float16 [64, 64], float32...",
    ),
    (
        MEDUSA,
        lambda tensors: tensors["1.0.linear.weight"][3].fill_(float("nan")),
        "holds NaN or infinity in '1.0.linear.weight' and 0 more tensor(s), as after an overflow or...",
    ),
    (
        HYDRA,
        lose("mlp.2.1.res_connection.weight"),
        "lacks the tensor 'hydra_mlp.2.1.res_connection.weight': ...",
    ),
    (HYDRA, put(hydra_mlp__0__1__gate__weight=torch.zeros(2)), OTHER.format("Hydra", "hydra_mlp.0.1.gate.weight' [2]")),
    (EAGLE, put(layers__1__self_attn__q_proj__weight=torch.ones(4, 4)), OTHER.format("EAGLE", "layers.1.self")),
    (EAGLE, put(layers__0__input_layernorm__weight=torch.ones(64)), "has ..., but its config asks for none: ..."),
    (EAGLE, lose("up_proj"), "lacks the tensor 'drafter.body.layer.mlp.up_proj.weight', but its config asks for ..."),
]


@pytest.mark.few(6)
@pytest.mark.parametrize("golden, change, message", DAMAGED, ids=[message[:40] for _, _, message in DAMAGED])
def test_a_damaged_file(place, golden_folder, golden, change, message):
    with refused(ValueError, f"'...' {message}"):
        convert_checkpoint(place(golden, change), base_model=golden_folder)


DIFFER = [
    (MEDUSA, {}, "medusa_num_heads 2, the tensors have 5"),
    (HYDRA, {"hydra_num_layers": 4}, "hydra_num_layers 4, the tensors have 1"),
    (HYDRA, {"hydra_head_arch": "mlp"}, "hydra_head_arch 'mlp', the tensors have 'prefix-mlp'"),
    (EAGLE, {"bias": False}, "bias False, the tensors have True"),
    (EAGLE, {"intermediate_size": 99}, "intermediate_size 99, the tensors have 128"),
    (EAGLE, {"num_key_value_heads": 2}, "num_key_value_heads 2, the tensors have 4"),
]


@pytest.mark.parametrize("golden, config, note", DIFFER, ids=[note for _, _, note in DIFFER])
def test_the_tensors_win_over_the_config_aloud(place, golden_folder, golden, config, note):
    notes = convert_checkpoint(place(golden, config=config), base_model=golden_folder).notes
    assert notes == [f"config.json says {note}: the tensors are right."]


UNFIT = [
    (HYDRA, {"hidden_state_offset": 2}, "says hidden_state_offset 2 in its config.json, ... (expected 0): ..."),
    (HYDRA, {"grounded_heads": False}, "says grounded_heads False in its config.json, ... (expected True): ..."),
    (
        EAGLE,
        {"num_attention_heads": 5},
        "has in its config.json a value... multiple of the number of attention...",
    ),
    (EAGLE, {"num_attention_heads": None}, "has no config.json that says num_attention_heads, which tensors do not..."),
]


@pytest.mark.few(3)
@pytest.mark.parametrize("golden, config, message", UNFIT, ids=[message[:30] for _, _, message in UNFIT])
def test_a_config_that_does_not_fit(place, golden_folder, golden, config, message):
    with refused(ValueError, f"'...' {message}"):
        convert_checkpoint(place(golden, config=config), base_model=golden_folder)


GIVE = "give the base that they were trained for (base_model=, on the command line --base)."


def test_a_base_that_nobody_names(place, tmp_path):
    folder = place(EAGLE)
    for call in (
        lambda: convert_checkpoint(folder, tmp_path / "new"),
        lambda: EagleForCausalLM.from_pretrained(folder, convert=True),
    ):
        with refused(ValueError, f"'...' does not say which base its heads were trained for: {GIVE}"):
            call()
    assert convert_checkpoint(folder).base is None  # a look needs none
    assert not (tmp_path / "new").exists()


TRAINED = "the heads at '...' were trained for a base of"
OTHERS = [
    (MEDUSA, {"hidden_size": 128}, f"{TRAINED} hidden size 64; the base '...other' has 128: {GIVE}"),
    (MEDUSA, {"vocab_size": 129}, f"{TRAINED} vocabulary 128; the base '...other' has 129: {GIVE}"),
    (HYDRA, {"intermediate_size": 100}, "'...' has 'drafter.prefix.layer.mlp....weight' as ... [128, 64], but its..."),
]


@pytest.mark.few(3)
@pytest.mark.parametrize("golden, sizes, message", OTHERS, ids=["width", "vocabulary", "layer"])
def test_a_base_that_does_not_fit(place, golden_folder, tmp_path, golden, sizes, message):
    config = LlamaConfig.from_pretrained(golden_folder)
    config.update(sizes)
    config.save_pretrained(tmp_path / "other")
    with refused(ValueError, message):
        convert_checkpoint(place(golden), tmp_path / "new", base_model=tmp_path / "other")


@pytest.mark.parametrize("golden", [HYDRA, EAGLE])
def test_embeddings_of_another_base(place, golden_folder, golden):
    def shift(tensors):
        name = "input_embed_fn.weight" if golden == HYDRA else "embed_tokens.weight"
        tensors[name] = tensors[name] + 0.01

    folder = place(golden, shift)
    message = "'...' holds input embeddings that are not those of the base '...', as heads for another base do: give..."
    with refused(ValueError, message):
        convert_checkpoint(folder, base_model=golden_folder)
    for base in (golden_base(), golden_folder):
        with refused(ValueError, message):
            BY_NAME[golden].model_class.from_pretrained(folder, convert=True, base_model=base)


def test_embeddings_are_compared_in_any_type_or_it_is_told_that_they_were_not(place, golden_folder, tmp_path):
    folder = place(HYDRA, lambda tensors: tensors.update({name: tensor.half() for name, tensor in tensors.items()}))
    assert "input_embed_fn.weight" in convert_checkpoint(folder).dropped
    LlamaConfig.from_pretrained(golden_folder).save_pretrained(tmp_path / "config alone")
    (note,) = convert_checkpoint(folder, base_model=tmp_path / "config alone").notes
    which = "the input embeddings in the file were not compared with the base's"
    assert note == f"{which}: it has no such weights here."


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


def test_another_class_and_another_config(place):
    advice = "load them with HydraForCausalLM.from_pretrained(..., convert=True)"
    with refused(ValueError, f"'...' holds heads in the layout 'Hydra': {advice}."):
        MedusaForCausalLM.from_pretrained(folder := place(HYDRA), convert=True)
    with refused(ValueError, "config= cannot be given with convert=True, which reads it from the layout: drop it."):
        MedusaForCausalLM.from_pretrained(folder, convert=True, config=MedusaConfig())


@pytest.mark.parametrize("original", ORIGINALS, ids=lambda original: original.golden)
def test_loading_without_convert_says_the_line_and_the_command(heads, original):
    message = "in another project's layout, give convert=True, or convert them"
    for there in (True, False):
        with pytest.raises((OSError, ValueError), match=message):
            original.model_class.from_pretrained(heads)
        if there:
            (heads / "config.json").unlink()


# ---- export ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def base(tmp_path):
    base = tiny_base("llama-gqa", dtype=torch.float32)
    base.save_pretrained(tmp_path / "base")
    base.name_or_path = base.config._name_or_path = str(tmp_path / "base")
    return base


OTHER_LAYER = {"prefix_layer": True, "layer_config": tiny_base().config}
OF_QWEN3, OF_QWEN2 = ({"layer_config": tiny_base(kind).config} for kind in ("qwen3", "qwen2"))
REFUSED = [  # fields of heads, a target, and what it has no place for
    (MedusaForCausalLM, {"num_layers": 2}, "medusa", "its one_block is False, ... True alone; use --to tgi or vllm."),
    (MedusaForCausalLM, {"num_layers": 2, "share_lm_head": True}, "tgi", "its shared_blocks is 2, ... 0 or 1 alone..."),
    (HydraForCausalLM, {"num_layers": 3}, "hydra", "its one_block is False, ... True alone; train it otherwise."),
    (HydraForCausalLM, {"share_lm_head": True}, "hydra", "its share_lm_head is True, ... train it with share_lm_he..."),
    (HydraForCausalLM, OTHER_LAYER, "hydra", "its layer_config is ..."),
    (EagleForCausalLM, {"fc_bias": True}, "vllm", "its fc_bias is True, ... False alone; use --to eagle or sglang."),
    (EagleForCausalLM, OF_QWEN3, "sglang", "its layer_model_type is 'qwen3', ..."),
    (EagleForCausalLM, OF_QWEN2, "sglang", "its biases_in_layers is True, ... alone; use --to eagle or vllm."),
]


@pytest.mark.parametrize("kind, fields, to, why", REFUSED, ids=[f"{why[:20]}, {to}" for _, _, to, why in REFUSED])
def test_what_a_target_would_damage_is_refused(base, tmp_path, kind, fields, to, why):
    Family("heads", kind, fields).build(base).save_pretrained(tmp_path / "ours")
    with refused(ValueError, f"'...ours' cannot be written as '{to}': {why}"):
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
