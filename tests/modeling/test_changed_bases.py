"""A base that is not the named one any more is found out, however little of it changed and whoever changed it."""

import copy
import os
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, TrainableTokensConfig, get_peft_model
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, BitsAndBytesConfig

from hf_drafthead import MedusaForCausalLM
from hf_drafthead.modeling import base as saving
from hf_drafthead.modeling.adapters import activate
from hf_drafthead.modeling.base_model import ASIDE, change_of_base, replacing
from hf_drafthead.modeling.files import read_json
from hf_drafthead.trees.entries import heads_hash
from tests.bases import tiny_base

IDS = torch.tensor([[5, 9, 33, 21]])
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft asks
LORA = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)


@pytest.fixture
def named(tmp_path) -> Path:
    tiny_base("llama-gqa").save_pretrained(tmp_path / "named")
    return tmp_path / "named"


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def change(model) -> str | None:
    """Why the base would lie beside the heads if they were saved in a new folder."""
    return change_of_base(model.base, model.config, model._as_loaded, {}, Path("nowhere"))


def saved(model, folder: Path, **how) -> torch.nn.Module:
    """The model as it is loaded again, of which the law holds."""
    wanted = logits(model.eval())
    model.save_pretrained(folder, **how)
    again = AutoModel.from_pretrained(folder)
    torch.testing.assert_close(logits(again), wanted)
    return again


def edit_one_value(base):
    base.get_input_embeddings().weight.data[5, 3] += 3
    return base


def live(folder, **fields):
    return AutoModelForCausalLM.from_pretrained(folder, **fields)


LIVE = {
    "one value changed before": lambda folder: edit_one_value(live(folder)),
    "another rope": lambda folder: live(folder, rope_parameters={"rope_type": "default", "rope_theta": 3.0}),
    "fewer layers": lambda folder: live(folder, num_hidden_layers=1),
    "of the named config alone": lambda folder: AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)),
}


@pytest.mark.parametrize("what", LIVE)
def test_a_live_base_is_compared_with_the_named_one(named, tmp_path, what):
    MedusaForCausalLM.from_base(named).save_pretrained(tmp_path / "heads")
    if what == "of the named config alone":
        (named / "model.safetensors").unlink()
    base = LIVE[what](named)
    for number, model in enumerate(
        (MedusaForCausalLM.from_base(base), MedusaForCausalLM.from_pretrained(tmp_path / "heads", base_model=base))
    ):
        assert change(model) is not None
        saved(model, tmp_path / f"saved {number}")
        with pytest.raises(ValueError, match="include_base=False would lose the base, which .* does not name any more"):
            model.save_pretrained(tmp_path / "lost", include_base=False)


def test_an_unchanged_live_base_is_named(named):
    assert change(MedusaForCausalLM.from_base(live(named))) is None
    assert change(MedusaForCausalLM.from_base(live(named, dtype=torch.bfloat16))) is None


def test_a_base_in_another_dtype_is_named_and_has_its_weights_in_that_dtype(named, tmp_path):
    model = MedusaForCausalLM.from_base(named)
    for dtype, beside in ((torch.bfloat16, False), (torch.float64, True)):  # rounded, by then
        model.to(dtype).save_pretrained(tmp_path / str(dtype))
        assert (tmp_path / str(dtype) / "base").exists() == beside
        again = AutoModel.from_pretrained(tmp_path / str(dtype), dtype=dtype).state_dict()
        assert all(torch.equal(tensor, again[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    "twin", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
@pytest.mark.parametrize("tied", [False, True])
def test_a_copied_model_names_its_base(tmp_path, tied, twin):
    """Also where its embeddings are its lm_head, of which files hold one."""
    tiny_base("llama-gqa", tie_word_embeddings=tied).save_pretrained(tmp_path / "named")
    model = twin(MedusaForCausalLM.from_base(tmp_path / "named"))
    assert change(model) is None
    model.base.set_output_embeddings(copy.deepcopy(model.base.get_output_embeddings()))
    model.base.get_output_embeddings().weight.data += 3
    assert change(model) is not None


@pytest.mark.parametrize("renamed", [False, True])
def test_one_value_is_seen_that_no_count_of_writes_tells(named, tmp_path, renamed):
    model = MedusaForCausalLM.from_base(named)
    model.config.base_model_name_or_path = "org/not-here" if renamed else str(named)
    assert change(model) is None
    edit_one_value(model.base)
    saved(model, tmp_path / "saved")


def test_trained_tokens_that_were_merged_are_saved(named, tmp_path):
    config = TrainableTokensConfig(target_modules=["embed_tokens"], token_indices=[5, 9])
    adapted = get_peft_model(MedusaForCausalLM.from_base(named), config)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(3)
    saved(adapted.merge_and_unload(), tmp_path / "saved")


def test_a_state_dict_of_another_base_is_what_is_saved(named, tmp_path):
    model = MedusaForCausalLM.from_base(named)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state["base.lm_head.weight"][7, 7] += 1
    model.save_pretrained(tmp_path / "saved", state_dict=state)
    again = AutoModel.from_pretrained(tmp_path / "saved").base.lm_head.weight
    torch.testing.assert_close(again, state["base.lm_head.weight"])
    prefixed = {f"module.{name}": tensor for name, tensor in state.items()}
    with pytest.raises(ValueError, match="has no tensor of the heads"):
        model.save_pretrained(tmp_path / "prefixed", state_dict=prefixed)


def test_saving_where_the_base_lies_keeps_the_base(named, tmp_path):
    model = MedusaForCausalLM.from_base(named)
    saved(model, named)
    saved(model, tmp_path / "elsewhere")  # its name is that of the heads now
    nested = MedusaForCausalLM.from_base(named / "base")
    nested.add_adapter(LORA, "x")
    saved(nested, named)


def test_saving_into_the_folder_inside_the_named_one_where_the_base_lies_keeps_it(tmp_path):
    tiny_base("llama-gqa").save_pretrained(tmp_path / "named" / "inside")
    model = MedusaForCausalLM.from_base(tmp_path / "named", subfolder="inside")
    saved(model, tmp_path / "saved")
    assert not (tmp_path / "saved" / "base").exists()
    saved(model, tmp_path / "named" / "inside")


def test_an_embedding_that_is_tied_no_more_is_saved(tmp_path):
    tiny_base("llama-tied").save_pretrained(tmp_path / "named")
    model = MedusaForCausalLM.from_base(tmp_path / "named")
    model.base.lm_head.weight = torch.nn.Parameter(-model.base.lm_head.weight, requires_grad=False)
    model.base.config.tie_word_embeddings = False
    saved(model, tmp_path / "saved")


@pytest.mark.parametrize("first", ["q_proj", "up_proj"])
@pytest.mark.parametrize("on", [["a", "b"], ["a"], ["b"]])
def test_adapters_of_other_layers_with_other_modules_are_loaded_as_they_were(named, tmp_path, first, on):
    model = MedusaForCausalLM.from_base(named)
    others = {"r": 2, "init_lora_weights": False}
    model.add_adapter(LoraConfig(target_modules=[first], modules_to_save=["lm_head"], **others), "a")
    model.add_adapter(LoraConfig(target_modules=["up_proj", "q_proj"], **others), "b")  # as ".base_layer" begins
    with torch.no_grad():
        model.base.lm_head.modules_to_save["a"].weight.neg_()
    activate(model.base, on)
    saved(saved(model, tmp_path / "saved"), tmp_path / "again")


def test_an_adapter_whose_name_is_no_folder_s_is_refused_before_anything_is_written(named, tmp_path):
    model = MedusaForCausalLM.from_base(named)
    model.add_adapter(LORA, "a/b")
    with pytest.raises(ValueError, match="expected names of folders"):
        model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_adapters_alone_remove_no_base_that_lies_there(named, tmp_path):
    model = MedusaForCausalLM.from_base(named)
    edit_one_value(model.base)
    saved(model, tmp_path / "saved")
    other = MedusaForCausalLM.from_base(named)
    other.add_adapter(LORA, "x")
    saved(other, tmp_path / "saved")
    assert (tmp_path / "saved" / "base" / "model.safetensors").is_file()


@pytest.mark.parametrize("whole", [True, False], ids=["of heads and base", "of the base"])
def test_merged_adapters_that_stay_in_their_layers_are_in_the_weights(named, tmp_path, whole):
    model = MedusaForCausalLM.from_base(named)
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, modules_to_save=["lm_head"])
    adapted = get_peft_model(model if whole else model.base, config).eval()
    with torch.no_grad():
        model.base.lm_head.modules_to_save["default"].weight.neg_()
    adapted.merge_adapter()
    saved(model, tmp_path / "saved")
    adapted.unmerge_adapter()
    saved(model, tmp_path / "saved")


def test_adapters_that_are_partly_merged_are_refused(named, tmp_path):
    model = MedusaForCausalLM.from_base(named)
    adapted = get_peft_model(model, LORA, "a")
    adapted.add_adapter("b", LORA)
    adapted.merge_adapter(["a"])
    with pytest.raises(ValueError, match="'a' is merged and 'b' is not"):
        model.save_pretrained(tmp_path / "saved")


@pytest.mark.few(9)
@pytest.mark.parametrize("links, beside", [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize("name", ["base/model.safetensors", "model.safetensors", "config.json"])
def test_all_is_put_back_where_a_replacement_could_not_be(named, tmp_path, monkeypatch, name, links, beside):
    model, replace = MedusaForCausalLM.from_base(named), os.replace
    if beside:  # else there is no folder of a base before, nor behind
        edit_one_value(model.base)
    saved(model, tmp_path / "saved")
    wanted, heads = logits(model), heads_hash(model.drafter.state_dict().items())
    before = sorted((tmp_path / "saved").rglob("*"))

    def full(place, target):
        if Path(target) == tmp_path / "saved" / name and not Path(place).name.isdigit():
            raise OSError(28, "No space left on device")
        replace(place, target)

    monkeypatch.setattr(os, "replace", full)
    if not links:
        monkeypatch.setattr(os, "link", lambda *_: os.stat(""))  # raises an OSError
    with torch.no_grad():
        model.base.lm_head.weight.neg_()
        for parameter in model.drafter.parameters():
            parameter.add_(1)
    with pytest.raises(OSError, match="No space"):
        model.save_pretrained(tmp_path / "saved", max_shard_size="20KB" if name == "config.json" else "1GB")
    again = AutoModel.from_pretrained(tmp_path / "saved")
    torch.testing.assert_close(logits(again), wanted)
    assert heads_hash(again.drafter.state_dict().items()) == heads
    assert sorted((tmp_path / "saved").rglob("*")) == before


def test_what_a_linked_folder_holds_stays_there(named, tmp_path):
    model = MedusaForCausalLM.from_base(named)
    edit_one_value(model.base)
    saved(model, tmp_path / "saved")
    (tmp_path / "saved" / "base").rename(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "notes.txt").write_text("mine")
    (tmp_path / "saved" / "base").symlink_to(tmp_path / "elsewhere")
    before = sorted((tmp_path / "elsewhere").iterdir())
    saved(model, tmp_path / "saved")
    assert sorted((tmp_path / "elsewhere").iterdir()) == before


def test_threads_that_save_at_once_do_not_disturb_each_other(named, tmp_path, monkeypatch):
    at_work: list[Path] = []
    others: list[bool] = []

    @contextmanager
    def slowly(folder, *arguments):
        others.append(bool(at_work))
        at_work.append(folder)
        with replacing(folder, *arguments) as new:
            time.sleep(0.02)
            yield new
        at_work.remove(folder)

    monkeypatch.setattr(saving, "replacing", slowly)
    model = MedusaForCausalLM.from_base(named).eval()
    model.add_adapter(LORA, "x")
    edit_one_value(model.base)
    ways = [("one", {}), ("one", {}), ("two", {"include_base": False, "base_model": "org/other"})] * 4
    with ThreadPoolExecutor(3) as threads:
        for done in [threads.submit(model.save_pretrained, tmp_path / place, **how) for place, how in ways]:
            done.result()
    assert others == [False] * len(ways), "a save began while another one replaced files"
    torch.testing.assert_close(logits(AutoModel.from_pretrained(tmp_path / "one")), logits(model.eval()))
    assert read_json(tmp_path / "two" / "config.json")["base_model_name_or_path"] == "org/other"
    assert model.config.base_model_name_or_path == str(named)


def test_an_adapter_on_a_base_in_eight_bits_is_saved_beside_it(tmp_path):
    pytest.importorskip("bitsandbytes")
    tiny_base("llama-gqa").float().save_pretrained(tmp_path / "named")
    settings = BitsAndBytesConfig(load_in_8bit=True)
    model = MedusaForCausalLM.from_base(tmp_path / "named", quantization_config=settings)
    model.add_adapter(LORA, "x")
    saved(saved(model, tmp_path / "saved"), tmp_path / "again")
    assert (tmp_path / "again" / "base" / "model.safetensors").exists()


def test_heads_in_a_form_of_a_quantizer_are_hashed_by_their_values():
    quantized = torch.quantize_per_tensor(torch.tensor([1.0, 2.5]), 0.5, 0, torch.qint8)

    class Packed(torch.Tensor):
        def detach(self):
            return self

        def dequantize(self):
            return quantized.dequantize()

    packed = torch.zeros(2).as_subclass(Packed)
    assert heads_hash([("a", packed)]) == heads_hash([("a", torch.tensor([1.0, 2.5]))])


@pytest.mark.parametrize("base", ["lora", "named"])
def test_saving_where_an_adapter_lies_keeps_it(named, tmp_path, base):
    adapted = get_peft_model(live(named), LORA)
    adapted.save_pretrained(tmp_path / "lora")
    saved(MedusaForCausalLM.from_base(tmp_path / base), tmp_path / "lora")
    model = MedusaForCausalLM.from_base(tmp_path / "lora" / ASIDE)
    torch.testing.assert_close(logits(model), logits(adapted))
