"""Save -> load -> the same model, in both checkpoint forms and through every door."""

import copy
import inspect
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, BitsAndBytesConfig, GenerationConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from hf_drafthead.modeling import EagleForCausalLM, HydraForCausalLM, LookupForCausalLM, MedusaForCausalLM
from hf_drafthead.modeling.base_model import auto_class
from tests.base_table import tiny
from tests.bases import SIZES, VOCABULARY, tiny_base
from tests.families import FAMILIES, feature_size, features_of

# For what no family does in its own way: one without and one with a layer of its own.
two_families = pytest.mark.parametrize(
    "family", [family for family in FAMILIES if family.name in ("medusa", "eagle")], ids=lambda family: family.name
)
medusa = pytest.mark.parametrize("family", FAMILIES[:1], ids=["medusa"])
IDS = torch.tensor([[5, 9, 33, 21, 8, 40], [7, 7, 12, 64, 3, 11]])


def assert_same(model, other, **tolerance):
    """Every tensor, the base's logits and every head's logits are equal."""
    ours, theirs = model.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name
    with torch.no_grad():
        features = features_of(model, IDS)
        torch.testing.assert_close(other(IDS).logits, model(IDS).logits, **tolerance)
        for i, (mine, its) in enumerate(
            zip(model.drafter.head_states(features, IDS), other.drafter.head_states(features, IDS), strict=True)
        ):
            torch.testing.assert_close(
                other.drafter.head_logits(i, its), model.drafter.head_logits(i, mine), **tolerance
            )


def stored_names(folder: Path) -> set[str]:
    names = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            names |= set(tensors.keys())
    return names


# how a model is saved, and loaded
SAVED = {
    "heads only": ({}, {}),
    "with base": ({"include_base": True}, {}),
    "in shards": ({"max_shard_size": "20KB"}, {}),
    "with base, in shards": ({"include_base": True, "max_shard_size": "20KB"}, {}),
    "asked for as safetensors": ({"include_base": True}, {"use_safetensors": True}),
}


@pytest.mark.few(6)
@pytest.mark.parametrize("door", [None, AutoModel, AutoModelForCausalLM], ids=["own class", "AutoModel", "for text"])
@pytest.mark.parametrize("form", SAVED)
def test_round_trip(family, saved, form, door):
    folder, model = saved
    save, load = SAVED[form]
    model.save_pretrained(folder / "again", **save)
    if "include_base" in save:
        shutil.rmtree(folder / "base")
    files = {file.name for file in (folder / "again").glob("*.safetensors")}
    assert len(files) > 1 if "shards" in form else files == {"model.safetensors"}
    loaded, info = (door or family.model_class).from_pretrained(folder / "again", output_loading_info=True, **load)
    assert type(loaded) is family.model_class
    assert not loaded.training and not any(info.values())
    assert loaded.drafter.base is loaded.base and loaded.config.base_config is loaded.base.config
    assert_same(model, loaded)
    prompt = IDS[:1, :4]
    assert torch.equal(loaded.generate(prompt, max_new_tokens=12), model.base.generate(prompt, max_new_tokens=12))


@two_families
def test_only_the_heads_are_stored_unless_the_base_is_asked_for(family, saved):
    folder, model = saved
    assert stored_names(folder / "heads") == {name for name in model.state_dict() if name.startswith("drafter.")}
    model.save_pretrained(folder / "whole", include_base=True)
    assert stored_names(folder / "whole") == stored_names(folder / "heads")
    assert stored_names(folder / "whole" / "base") == set(model.base.state_dict())
    assert not model.config.base_included


def test_no_two_tensors_of_the_heads_share_memory(family, base):
    drafter = family.build(base).drafter
    layers = getattr(drafter.config, "num_layers", None)
    deeper = family.build(base, num_layers=layers + 2).drafter if layers else drafter
    for one in (drafter, deeper):
        assert len({tensor.data_ptr() for tensor in one.state_dict().values()}) == len(one.state_dict())
    assert (sum(p.numel() for p in deeper.parameters()) > sum(p.numel() for p in drafter.parameters())) == bool(layers)


@pytest.mark.parametrize("form", ["heads only", "with base"])
def test_tied_base(family, tmp_path, form):
    base = tiny_base("llama-tied")
    base.save_pretrained(tmp_path / "base")
    model = family.build(base, base_model_name_or_path=str(tmp_path / "base"))
    model.save_pretrained(tmp_path / "model", include_base=form == "with base")
    loaded = family.model_class.from_pretrained(tmp_path / "model")
    assert loaded.base.lm_head.weight is loaded.base.model.embed_tokens.weight
    tied = {"base.lm_head.weight": "base.model.embed_tokens.weight"}
    if family.name == "draft-model":  # the test's drafter is a model of the base's config, so it ties its own
        tied["drafter.model.lm_head.weight"] = "drafter.model.model.embed_tokens.weight"
        assert loaded.drafter.model.lm_head.weight is loaded.drafter.model.model.embed_tokens.weight
    assert loaded.all_tied_weights_keys == tied
    assert_same(model, loaded)


@two_families
@pytest.mark.parametrize("form", ["path", "object"])
def test_another_place_of_the_same_base(family, saved, form):
    folder, model = saved
    (folder / "base").rename(folder / "moved")
    base = folder / "moved" if form == "path" else copy.deepcopy(model.base)
    loaded = family.model_class.from_pretrained(folder / "heads", base_model=base)
    assert_same(model, loaded)
    assert (loaded.base is base) == (form == "object")
    assert_same(model, AutoModel.from_pretrained(folder / "heads", base_model=base))


@two_families
def test_heads_and_base_can_be_moved_together(family, saved):
    folder, model = saved
    assert json.loads((folder / "heads" / "config.json").read_text())["base_model_name_or_path"] == "../base"
    for name in ("base", "heads"):
        shutil.copytree(folder / name, folder / "elsewhere" / name)
        shutil.rmtree(folder / name)
    loaded = family.model_class.from_pretrained(folder / "elsewhere" / "heads")
    assert_same(model, loaded)
    loaded.save_pretrained(folder / "deep" / "down" / "heads")
    assert_same(model, family.model_class.from_pretrained(folder / "deep" / "down" / "heads"))
    assert_same(model, family.model_class.from_pretrained(folder / "elsewhere", subfolder="heads"))


@two_families
@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
def test_a_live_base_stays_as_it_was(family, saved, training):
    folder, _ = saved
    base = tiny_base("llama-gqa").train(training)
    base.lm_head.weight.requires_grad_(False)
    before, config = base(IDS).logits, copy.deepcopy(base.config)
    learns = {name: parameter.requires_grad for name, parameter in base.named_parameters()}
    model = family.model_class.from_pretrained(folder / "heads", base_model=base)
    assert {name: parameter.requires_grad for name, parameter in base.named_parameters()} == learns
    assert base.training == training
    for attached in (model, family.build(base)):
        assert attached.base is base
        assert torch.equal(base(IDS).logits, before)
        assert base.config == config and base.config._attn_implementation == "sdpa"
    loaded = family.model_class.from_pretrained(folder / "heads")
    assert not any(parameter.requires_grad for parameter in loaded.base.parameters())


def test_deepcopy_and_conversion_move_the_whole_model(family, base):
    model = family.build(base)
    twin = copy.deepcopy(model)
    assert twin.drafter.base is twin.base and twin.base is not base
    assert_same(model, twin)
    twin.half()
    assert {tensor.dtype for tensor in twin.parameters()} == {torch.float16}
    assert base.dtype == model.dtype == torch.float64


@two_families
@pytest.mark.parametrize("dtype", [torch.bfloat16, "bfloat16", "auto", None], ids=str)
@pytest.mark.parametrize("loader", [AutoModel, None], ids=["AutoModel", "own class"])
def test_drafter_and_config_take_the_dtype_of_the_base(family, saved, dtype, loader):
    folder, _ = saved
    loaded = (loader or family.model_class).from_pretrained(folder / "heads", dtype=dtype)
    expected = torch.float64 if dtype in ("auto", None) else torch.bfloat16
    assert {tensor.dtype for tensor in loaded.parameters()} == {expected} and loaded.config.dtype == expected
    live = tiny_base("llama-gqa").to(torch.bfloat16)
    assert family.model_class.from_pretrained(folder / "heads", base_model=live).config.dtype == torch.bfloat16
    assert family.model_class.from_base(live).config.dtype == torch.bfloat16


@pytest.mark.few(20)
def test_loading_leaves_generators_and_what_other_threads_make_alone(family, saved, monkeypatch):
    folder, model = saved
    made, build = [], family.model_class.drafter_class.__init__

    def beside(drafter, config):
        with ThreadPoolExecutor(1) as threads:
            ours = {"generator": torch.Generator()}
            made.append(threads.submit(lambda: nn.init.normal_(torch.full((9,), 7.0), **ours)).result())
        build(drafter, config)

    monkeypatch.setattr(family.model_class.drafter_class, "__init__", beside)
    state = torch.get_rng_state()
    type(model).from_pretrained(folder / "heads", base_model=model.base)
    assert made and all((values != 7.0).all() for values in made)
    assert torch.equal(torch.get_rng_state(), state)


@medusa
def test_heads_loaded_for_inference_can_be_trained_later(saved):
    folder, model = saved
    with torch.inference_mode():
        loaded = type(model).from_pretrained(folder / "heads", base_model=model.base)
    states = loaded.drafter.head_states(torch.randn(1, 6, 32, dtype=torch.float64), IDS[:1])
    sum(state.sum() for state in states).backward()
    assert all(parameter.grad is not None for parameter in loaded.drafter.blocks.parameters())


def test_what_the_heads_compute_and_do_not_store_is_as_exact_in_any_type(family, saved):
    folder, model = saved
    loaded = family.model_class.from_pretrained(folder / "heads", dtype="bfloat16")
    computed = {
        name: buffer for name, buffer in model.drafter.named_buffers() if "drafter." + name not in model.state_dict()
    }
    assert bool(computed) == (family.name.partition("-")[0] not in ("medusa", "hydra"))
    for name, buffer in computed.items():
        assert torch.equal(loaded.drafter.get_buffer(name), buffer), name


HEARS = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_mel_bins": 8}
SOUND = {
    "voxtral": {**HEARS, "intermediate_size": 64, "max_source_positions": 16},
    "qwen2_audio": {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 24},
}
SOUND["qwen2_audio"] |= {"num_mel_bins": 8, "max_source_positions": 16}


@pytest.mark.parametrize("form", ["heads only", "with base"])
@pytest.mark.parametrize("kind", ["qwen2_5_vl", *SOUND])
def test_a_base_that_sees_or_hears_as_well(tmp_path, kind, form):
    if kind in SOUND:
        text = {**SIZES, "model_type": "llama", "num_key_value_heads": 2}
        config = AutoConfig.for_model(kind, text_config=text, audio_config=SOUND[kind])
        base = auto_class(config).from_config(config, dtype=torch.float64).eval()
    else:
        base = tiny(kind)
    base.save_pretrained(tmp_path / "base")
    model = EagleForCausalLM.from_base(tmp_path / "base")
    model.save_pretrained(tmp_path / "heads", include_base=form == "with base")
    loaded = AutoModel.from_pretrained(tmp_path / "heads")
    assert type(loaded.base) is type(model.base) is type(base)
    assert loaded.config.num_hidden_layers == 2 and loaded.config.vocab_size == VOCABULARY
    assert_same(model, loaded)
    got = loaded.generate(IDS[:1], max_new_tokens=6, return_dict_in_generate=True)
    assert torch.equal(got.sequences, base.generate(IDS[:1], max_new_tokens=6))
    assert got.accepted_lengths is not None


@pytest.mark.parametrize("names", [MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES])
def test_every_decoder_only_model_that_sees_or_hears_is_loaded_by_its_path(names):
    composed = {"encoder-decoder", "vision-encoder-decoder", "speech-encoder-decoder"}  # of two given models
    configs = {kind: CONFIG_MAPPING[kind]() for kind in names if kind not in {"evolla", *composed}}  # evolla: proteins
    refused = {kind for kind, config in configs.items() if not config.is_encoder_decoder and auto_class(config) is None}
    assert refused == set()


@pytest.mark.parametrize("loader", [AutoModel, EagleForCausalLM], ids=["AutoModel", "own class"])
@pytest.mark.parametrize("form", ["heads only", "with base"])
def test_layers_of_the_heads_compute_attention_and_experts_as_the_base_does(tmp_path, loader, form):
    fields = {"model_type": "mixtral", "num_key_value_heads": 2, "num_local_experts": 4}
    base = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**SIZES, **fields}), dtype=torch.float64)
    base.save_pretrained(tmp_path / "base")
    EagleForCausalLM.from_base(tmp_path / "base").save_pretrained(tmp_path / "heads", include_base=form == "with base")

    def computed(model) -> set[tuple[str, str]]:
        configs = [
            model.base.config,
            model.drafter.body.layer.self_attn.config,
            model.drafter.body.layer.mlp.experts.config,
        ]
        return {(config._attn_implementation, config._experts_implementation) for config in configs}

    words = {"attn_implementation": "eager", "experts_implementation": "batched_mm"}
    model = loader.from_pretrained(tmp_path / "heads", **words)
    assert computed(model) == {("eager", "batched_mm")}
    model.set_attn_implementation("sdpa")
    model.set_experts_implementation("eager")
    assert computed(model) == {("sdpa", "eager")}
    assert torch.equal(model.generate(IDS[:1], max_new_tokens=6), model.base.generate(IDS[:1], max_new_tokens=6))


@pytest.mark.parametrize("on_disk", ["base.model", "base.lm_head", "drafter"])
@pytest.mark.parametrize("form", ["heads only", "with base"])
def test_a_model_in_pieces_some_of_them_on_disk(family, saved, form, on_disk):
    folder, model = saved
    model.save_pretrained(folder / "heads", include_base=form == "with base")
    pieces = {"base.model": "cpu", "base.lm_head": "cpu", "drafter": "cpu", on_disk: "disk"}
    if form == "heads only":  # the names of the base alone will do
        pieces = {name.removeprefix("base."): place for name, place in pieces.items() if name != "drafter"}
    loaded = AutoModel.from_pretrained(folder / "heads", device_map=pieces, offload_folder=folder / "offload")
    if on_disk != "drafter":  # the heads follow the base, wherever they are told to go
        assert loaded.hf_device_map[on_disk] == "disk" and "drafter" in loaded.hf_device_map
    features = torch.randn(1, 6, feature_size(model.drafter), dtype=torch.float64)
    ours, theirs = (m.drafter.head_states(features, IDS[:1]) for m in (model, loaded))
    for i, (mine, its) in enumerate(zip(ours, theirs, strict=True)):
        torch.testing.assert_close(loaded.drafter.head_logits(i, its), model.drafter.head_logits(i, mine))
    if on_disk != "base.model":
        prompt = IDS[:1, :4]
        assert torch.equal(loaded.generate(prompt, max_new_tokens=8), model.base.generate(prompt, max_new_tokens=8))


@two_families
def test_generation_follows_the_base_and_drafts_as_the_heads_say(family, saved):
    folder, model = saved
    base = tiny_base("llama-gqa")
    base.generation_config = GenerationConfig(temperature=0.5, do_sample=True, eos_token_id=2, pad_token_id=0)
    base.save_pretrained(folder / "base")
    settings = {
        "draft_tree": [[0], [1], [0, 0]],
        "acceptance": "typical",
        "posterior_threshold": 0.2,
        "posterior_alpha": 0.4,
        "calibration": [{"device": "cpu", "tree": [[0]]}],
    }
    assert model.generation_config.draft_tree == "mc_sim_7b_63"
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    model.generation_config.repetition_penalty = 1.3
    model.save_pretrained(folder / "heads")
    loaded = AutoModel.from_pretrained(folder / "heads")
    assert loaded.generation_config.do_sample and loaded.generation_config.temperature == 0.5
    loaded.save_pretrained(folder / "whole", include_base=True)
    for one in (loaded, AutoModel.from_pretrained(folder / "whole")):
        assert one.generation_config.temperature == one.base.generation_config.temperature == 0.5
        assert one.generation_config.repetition_penalty == 1.3
        for name, value in settings.items():
            assert getattr(one.generation_config, name) == value
            assert not hasattr(one.base.generation_config, name)
    given = GenerationConfig(max_new_tokens=3)
    loaded = family.model_class.from_pretrained(folder / "heads", generation_config=given)
    assert loaded.generation_config.max_new_tokens == 3


def test_the_config_round_trips(family, saved):
    folder, model = saved
    config = AutoConfig.from_pretrained(folder / "heads")
    assert type(config) is family.model_class.config_class
    assert config.get_text_config().vocab_size == VOCABULARY
    assert config.get_text_config().rope_parameters == model.base.config.rope_parameters
    for name in family.model_class.config_class.__annotations__:
        assert getattr(config, name) == getattr(model.config, name)


@two_families
def test_a_quantization_of_the_base_does_not_reach_the_heads(family, saved):
    folder, model = saved
    quantization = {"quant_method": "quanto", "weights": "int8"}
    model.config.base_config.quantization_config = model.config.quantization_config = quantization
    model.save_pretrained(folder / "heads")
    stored = json.loads((folder / "heads" / "config.json").read_text())
    assert "quantization_config" not in stored and "quantization_config" not in stored["base_config"]
    del model.config.base_config.quantization_config, model.config.quantization_config
    stored["quantization_config"] = stored["base_config"]["quantization_config"] = quantization
    (folder / "heads" / "config.json").write_text(json.dumps(stored))
    loaded = AutoModel.from_pretrained(folder / "heads")
    assert_same(model, loaded)
    assert not hasattr(loaded.config, "quantization_config")


@medusa
def test_a_quantized_base_can_be_loaded_without_its_quantization(saved):
    pytest.importorskip("bitsandbytes")
    folder, model = saved
    AutoModelForCausalLM.from_pretrained(
        folder / "base", quantization_config=BitsAndBytesConfig(load_in_8bit=True)
    ).save_pretrained(folder / "small")
    for words, kind in (({}, "Linear8bitLt"), ({"quantization_config": None}, "Linear")):
        loaded = type(model).from_pretrained(folder / "heads", base_model=folder / "small", **words)
        assert type(loaded.base.model.layers[0].self_attn.q_proj).__name__ == kind
        if words:
            again = type(model).from_base(folder / "small", **words).base
            assert type(again.model.layers[0].mlp.up_proj) is nn.Linear


# A folder of an adapter alone has no config: only AutoModel looks there for whose it is.
@medusa
@pytest.mark.parametrize(
    "loader, place",
    [(AutoModel, "of its own"), (AutoModel, "beside the heads"), (MedusaForCausalLM, "beside the heads")],
    ids=["own folder", "same folder", "same folder, own class"],
)
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft asks for it
def test_an_adapter_is_loaded_with_the_heads_that_it_was_trained_on(saved, loader, place):
    folder, _ = saved
    at = folder / ("heads" if place == "beside the heads" else "adapter")
    settings = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    adapted = get_peft_model(MedusaForCausalLM.from_pretrained(folder / "heads"), settings)
    adapted.save_pretrained(at)
    loaded = loader.from_pretrained(at)
    with torch.no_grad():
        torch.testing.assert_close(loaded(IDS).logits, adapted(IDS).logits)


@two_families
def test_forward_is_the_bases_own_and_declares_its_parameters(family, base):
    model = family.build(base)
    parameters = inspect.signature(model.forward).parameters
    for name in ("input_ids", "attention_mask", "position_ids", "past_key_values", "labels", "logits_to_keep"):
        assert name in parameters
    mask = torch.ones_like(IDS)
    ours, theirs = (m(IDS, attention_mask=mask, labels=IDS, logits_to_keep=0) for m in (model, base))
    assert family.model_class.drafter_class.__name__ in model._no_split_modules
    assert torch.equal(ours.loss, theirs.loss) and torch.equal(ours.logits, theirs.logits)
    assert model(IDS, logits_to_keep=1).logits.shape[1] == 1
    assert model.can_generate() and family.model_class.can_generate()
    assert model.get_input_embeddings() is base.get_input_embeddings()


@pytest.mark.parametrize("model_class", [MedusaForCausalLM, HydraForCausalLM])
def test_building_from_a_config_gives_a_whole_random_model(model_class):
    base = tiny_base("llama-tied")
    config = model_class.config_class(base_config=base.config, num_draft_heads=2)
    for model in (model_class(config), AutoModel.from_config(config)):
        assert model.drafter.base is model.base is not base
        assert torch.equal(model.drafter.projections.up[1].weight, model.base.lm_head.weight)
        model.generate(IDS[:1], max_new_tokens=4)


def test_fresh_heads_start_at_the_bases_own_projection(base):
    medusa = MedusaForCausalLM.from_base(base, num_draft_heads=3, num_layers=2)
    assert torch.equal(medusa.drafter.projections.up[2].weight, base.lm_head.weight)
    assert all(not block.weight.any() and block.bias.any() for block in medusa.drafter.blocks)
    hydra = HydraForCausalLM.from_base(base, num_draft_heads=3, num_layers=2)
    assert torch.equal(hydra.drafter.projections.up[2].weight, base.lm_head.weight)
    residual, gate = hydra.drafter.heads[1].path.weight.chunk(2)
    assert residual.any() and not gate.any() and not hydra.drafter.heads[1].blocks[0].linear.weight.any()


def test_from_base_by_path_passes_on_what_is_for_the_base(tmp_path):
    tiny_base().save_pretrained(tmp_path)
    model = MedusaForCausalLM.from_base(tmp_path, num_draft_heads=2, dtype=torch.bfloat16, attn_implementation="eager")
    assert model.config.num_draft_heads == 2 and model.config.base_model_name_or_path == str(tmp_path)
    assert {tensor.dtype for tensor in model.parameters()} == {torch.bfloat16}
    assert model.base.config._attn_implementation == "eager"


# ---- bases on the Hub, played by a filled cache --------------------------------------------------------------------

FIRST, SECOND = "1" * 40, "2" * 40


@pytest.fixture
def cached_hub(tmp_path) -> dict:
    """A cache that holds org/tiny in two revisions: `main` is the second."""
    repository = tmp_path / "hub" / "models--org--tiny"
    for commit in (FIRST, SECOND):
        tiny_base().save_pretrained(repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    for name, commit in (("main", SECOND), ("v1", FIRST)):
        (repository / "refs" / name).write_text(commit)
    return {"cache_dir": str(tmp_path / "hub"), "local_files_only": True}


@pytest.mark.parametrize("revision, commit", [(None, SECOND), ("v1", FIRST), (FIRST, FIRST)])
def test_the_commit_that_was_used_is_recorded_and_used_again(tmp_path, cached_hub, revision, commit):
    model = MedusaForCausalLM.from_base("org/tiny", base_revision=revision, num_draft_heads=2, **cached_hub)
    assert model.config.base_model_name_or_path == "org/tiny"
    assert model.config.base_model_revision == commit
    model.save_pretrained(tmp_path / "heads")
    assert AutoModel.from_pretrained(tmp_path / "heads", **cached_hub).config.base_model_revision == commit


def test_a_base_that_was_chosen_is_the_one_that_is_named_and_the_former_is_recorded(tmp_path, cached_hub):
    MedusaForCausalLM.from_base("org/tiny", num_draft_heads=2, **cached_hub).save_pretrained(tmp_path / "heads")
    loaded = AutoModel.from_pretrained(tmp_path / "heads", **cached_hub)
    assert (loaded.config.base_model_revision, loaded.config.base_origin) == (SECOND, None)
    loaded.base.lm_head.weight.data.mul_(2)
    loaded.base.save_pretrained(tmp_path / "another")
    other = AutoModel.from_pretrained(tmp_path / "heads", base_model=tmp_path / "another")
    other.save_pretrained(tmp_path / "again")
    again = AutoModel.from_pretrained(tmp_path / "again")
    assert torch.equal(again.base.lm_head.weight, loaded.base.lm_head.weight)
    assert again.config.base_origin == "org/tiny" and again.config.base_model_revision is None
    assert not (tmp_path / "again" / "base").exists()


def test_the_list_of_families_holds_every_model_class():
    from hf_drafthead.modeling import MODEL_CLASSES

    assert {family.model_class for family in FAMILIES} | {LookupForCausalLM} == set(MODEL_CLASSES)
