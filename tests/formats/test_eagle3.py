"""EAGLE-3 heads: parity with the original code, what a layout leaves open, and what a target would run wrongly."""

import json
from functools import cache, partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, LlamaConfig, LlamaForCausalLM

from hf_drafthead import convert_checkpoint, export_checkpoint
from hf_drafthead.modeling import Eagle3ForCausalLM
from tests.bases import tiny_base
from tests.families import Family
from tests.formats.test_bad_input import refused as refused_as
from tests.modeling.golden import FOLDER, drafted

DATA = FOLDER / "eagle3"
IDS = "eagle_aux_hidden_state_layer_ids"


refused = partial(refused_as, ValueError)


@cache
def golden(name):
    return load_file(DATA / f"{name}.safetensors")


def facts(name):
    return json.loads((DATA / f"{name}.json").read_text())


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eagle3") / "base"
    base = LlamaForCausalLM(LlamaConfig(**facts("base_tiny_l8")))
    base.load_state_dict(golden("base_tiny_l8"))
    base.save_pretrained(folder)
    return folder


def original_tensors():
    return {
        name.removeprefix("heads."): tensor.clone()
        for name, tensor in golden("eagle3").items()
        if name.startswith("heads.")
    }


@pytest.fixture
def write(tmp_path, base_folder):
    """A function that writes the golden heads in a layout, changed, into a folder."""

    def call(layout="safeailab", change=None, **config):
        folder, tensors = tmp_path / "heads", original_tensors()
        fields = facts("eagle3")["draft_config"]
        if layout != "safeailab":
            tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
        if layout == "specforge":
            fields["architectures"] = ["LlamaForCausalLMEagle3"]
        if layout == "speculators":
            fields = {
                "speculators_model_type": "eagle3",
                "draft_vocab_size": fields.pop("draft_vocab_size"),
                "norm_before_residual": False,
                "transformer_layer_config": fields,
                "speculators_config": {"verifier": {"name_or_path": str(base_folder)}},
            }
        if change is not None:
            change(tensors)
        fields |= config
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({k: v for k, v in fields.items() if v != "left out"}))
        if layout == "safeailab":
            torch.save(tensors, folder / "pytorch_model.bin")
        else:
            save_file(tensors, folder / "model.safetensors")
        return folder

    return call


@pytest.mark.parametrize("layout", ["safeailab", "specforge", "speculators"])
@torch.no_grad()
def test_golden_heads_draft_the_original_tokens(layout, write, base_folder, tmp_path):
    given, tree = golden("eagle3"), facts("eagle3")["static_small8"]
    named = {} if layout == "speculators" else {"base_model": str(base_folder)}
    report = convert_checkpoint(write(layout), tmp_path / "new", **named)
    assert report.layout == ("speculators" if layout == "speculators" else "EAGLE-3")
    for model in (
        AutoModel.from_pretrained(tmp_path / "new"),
        Eagle3ForCausalLM.from_pretrained(tmp_path / "heads", convert=True, **named),
    ):
        assert list(model.config.feature_layers) == facts("eagle3")["feature_hidden_state_indices"]
        state = model.drafter.start(1, 64)
        follow = given["in.shifted_input_ids"]
        state = model.drafter.observe(state, given["in.features"], follow, torch.tensor([follow.shape[1]]))
        found = drafted(model.drafter, state, follow[:, -1:], tree["paths"])
        assert found[1:] == given["out.static_small8.tokens"].flatten().tolist()[-8:]
        ids = given["in.input_ids"]
        settings = {"max_new_tokens": 20, "eos_token_id": None, "do_sample": False}
        out = model.generate(ids, return_dict_in_generate=True, **settings)
        assert torch.equal(out.sequences, model.base.generate(ids, **settings))
        assert out.accepted_lengths.float().mean() > 1.2  # the golden heads are trained


# ---- what a layout leaves open --------------------------------------------------------------------------------------


GIVEN = ({IDS: []}, {}, {IDS: [1, 3, 4]})
WITHOUT_AUXILIARY = [{"eagle_config": {"use_aux_hidden_state": False, **ids}} for ids in GIVEN]
WITHOUT_AUXILIARY += [{"use_aux_hidden_state": False}, {"num_aux_hidden_states": 0}]


@pytest.mark.parametrize("layout", ["safeailab", "specforge", "speculators"])
@pytest.mark.parametrize("about", WITHOUT_AUXILIARY, ids=str)
@pytest.mark.parametrize("joined", [True, False], ids=["with fc", "without fc"])
def test_a_head_without_auxiliary_states_is_refused(layout, about, joined, write, base_folder):
    folder = write(layout, None if joined else lambda tensors: tensors.pop("fc.weight"), **about)
    with refused("... says ..._aux_hidden_state...: EAGLE-3 heads here read inputs of layers...feature_layers=..."):
        convert_checkpoint(folder, base_model=base_folder)


@pytest.mark.parametrize("layout", ["safeailab", "speculators"])
def test_a_user_may_say_which_layers_a_head_reads_whatever_its_config_says(layout, write, base_folder):
    folder = write(layout, use_aux_hidden_state=False)
    found = convert_checkpoint(folder, base_model=base_folder, fields={"feature_layers": [2, 4, 5]})
    assert found.fields["feature_layers"] == [2, 4, 5]


LAYERS = [
    *(("specforge", config, [2, 4, 5]) for config in ({IDS: []}, {"eagle_config": {IDS: []}}, {"eagle_config": None})),
    ("specforge", {"eagle_config": {IDS: [1, 3, 4]}}, [2, 4, 5]),  # numbers of SpecForge and SGLang are one less
    ("speculators", {IDS: [1, 3, 6]}, [1, 3, 6]),
]


@pytest.mark.few(5)
@pytest.mark.parametrize("layout, config, layers", LAYERS, ids=str)
def test_numbers_of_layers_are_those_of_their_project_or_the_published(layout, config, layers, write, base_folder):
    assert convert_checkpoint(write(layout, **config), base_model=base_folder).fields["feature_layers"] == layers


TWO_MEANINGS = {
    "feature_layers": (
        ("specforge", {IDS: [2, 4, 5]}),
        "reads the layers [2, 4, 5] (eagle_aux_hidden_state_layer_ids), the inputs of these for vLLM, of [3, 5, 6] for "
        "SGLang and SpecForge: say which by feature_layers=[2, 4, 5] or feature_layers=[3, 5, 6] (on the command line "
        "--set).",
        [[2, 4, 5], [3, 5, 6]],
    ),
    "norm_output": (
        ("specforge", {"norm_output": True}),
        "says norm_output: SGLang and vLLM feed the normed output back then, ...",
        [True, False],
    ),
    "norm_before_residual": (
        ("speculators", {"norm_before_residual": "left out"}),
        "does not say norm_before_residual, which speculators takes for false and vLLM for true: say...",
        [True, False],
    ),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("field", TWO_MEANINGS)
def test_what_means_two_things_is_refused_until_it_is_said(field, write, base_folder):
    (layout, config), message, values = TWO_MEANINGS[field]
    folder = write(layout, **config)
    with refused(f"'...' {message}"):
        convert_checkpoint(folder, base_model=base_folder)
    for value in values:
        report = convert_checkpoint(folder, base_model=base_folder, fields={field: value})
        model = Eagle3ForCausalLM.from_pretrained(folder, convert=True, base_model=base_folder, **{field: value})
        assert report.fields[field] == value == getattr(model.config, field)


def test_what_is_not_known_is_refused(write, base_folder, tmp_path):
    with refused("... has eagle_aux_hidden_state_layer_ids '2, 4': expected a list of layer numbers; correct ..."):
        convert_checkpoint(write("specforge", **{IDS: "2, 4"}), base_model=base_folder)
    (tmp_path / "heads").rename(tmp_path / "first")
    kinds = "eagle3, peagle, mtp, dflash, dspark, dflash2"
    with refused(f"'...' holds a speculator of the kind 'xpress'; known are {kinds}: give..."):
        convert_checkpoint(write("speculators", speculators_model_type="xpress"))


def test_a_field_that_the_family_does_not_have(write, base_folder):
    with refused("'wings' is no config field of Eagle3ForCausalLM: expected some of draft_vocab_size, ..."):
        convert_checkpoint(write(), base_model=base_folder, fields={"wings": 2})


def test_rotary_positions_are_the_drafter_s_own(write, base_folder):
    model = Eagle3ForCausalLM.from_pretrained(write(rope_theta=500000.0), convert=True, base_model=base_folder)
    assert model.config.own_layer.rope_parameters["rope_theta"] == 500000.0
    assert model.base.config.rope_parameters["rope_theta"] == 10000.0


def test_a_sliding_window_is_kept(write, tmp_path):
    layer = facts("eagle3")["draft_config"] | {"sliding_window": 16, "layer_types": ["sliding_attention"]}
    convert_checkpoint(write("speculators", transformer_layer_config=layer), tmp_path / "new")
    assert AutoModel.from_pretrained(tmp_path / "new").config.window == 16
    export_checkpoint(tmp_path / "new", tmp_path / "theirs", "speculators")
    report = convert_checkpoint(tmp_path / "theirs", tmp_path / "again")
    assert report.fields["layer_config"]["sliding_window"] == 16
    with refused(
        "'...' cannot be written as 'vllm': its window is 16, and the target has a place for None alone; use..."
    ):
        export_checkpoint(tmp_path / "new", tmp_path / "other", "vllm")


# ---- the draft vocabulary -------------------------------------------------------------------------------------------


def lose(*names):
    return lambda tensors: [tensors.pop(name) for name in names]


def test_a_lost_d2t_is_read_from_t2d(write, base_folder, tmp_path):
    report = convert_checkpoint(write(change=lose("d2t")), tmp_path / "new", base_model=base_folder)
    assert report.notes == ["the file has no d2t: the draft vocabulary is what t2d marks, in ascending order."]
    found = load_file(tmp_path / "new" / "model.safetensors")["drafter.draft_tokens"]
    assert torch.equal(found, original_tensors()["d2t"] + torch.arange(48))


def zero(tensors):
    tensors["d2t"] = torch.zeros_like(tensors["d2t"])
    del tensors["t2d"]


def damage(place, value):
    def change(tensors):
        tokens = tensors["d2t"] + torch.arange(48)
        tensors["d2t"][place] = tokens[0] - place if value is None else value

    return change


NO_VOCABULARY = {"lost": lose("d2t", "t2d"), "of zeros, as lost ones are filled": zero}
NO_VOCABULARY |= {"negative": damage(3, -100), "beyond": damage(3, 1000), "twice": damage(5, None)}


@pytest.mark.parametrize("change", NO_VOCABULARY.values(), ids=NO_VOCABULARY)
def test_a_lost_or_damaged_d2t_is_refused(write, base_folder, change):
    with refused("'...' has no d2t (and t2d) that names 48 of 128 tokens: it is damaged or lost, get the file again."):
        convert_checkpoint(write(change=change), base_model=base_folder)


def test_features_that_do_not_fit(write, base_folder):
    folder = write(change=lambda tensors: tensors.update({"fc.weight": tensors["fc.weight"][:, :128].contiguous()}))
    with refused("'...' has 'drafter.fc.weight' ... [64, 128], but its config asks for ... [64, 192]: ..."):
        convert_checkpoint(folder, base_model=base_folder)


# ---- what a target would run wrongly --------------------------------------------------------------------------------

SMALL = {"draft_vocab_size": 50}
WIDE, SMALL_LAYER = (
    LlamaConfig(
        hidden_size=width, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=head_dim
    )
    for width, head_dim in ((32, 16), (16, 4))
)
REFUSED = [  # a target, fields of heads, and the one that it has no place for
    ("sglang", {"norm_before_residual": True}, "norm_before_residual is True"),
    ("eagle3", {"norm_before_residual": True}, "norm_before_residual is True"),
    ("eagle3", {"norm_output": True}, "norm_output is True"),
    ("eagle3", {"fc_norm": True}, "fc_norm is True"),
    ("eagle3", {"feature_layers": [1, 3, 6]}, "reads_as_published is False"),
    ("sglang", {"feature_layers": [0, 3, 6]}, "reads_embeddings is True"),
    ("sglang", {"feature_layers": [1, 2, 3, 4, 5]}, "feature_count is 5"),
    ("vllm", {"feature_layers": [6, 4, 2]}, "reads_in_order is False"),
    ("vllm", {"fc_bias": True}, "fc_bias is True"),
    ("speculators", {"fc_bias": True}, "fc_bias is True"),
    ("sglang", {"num_layers": 2}, "num_layers is 2"),
    ("vllm", {"layer_config": tiny_base("qwen3").config}, "layer_model_type is 'qwen3'"),
    ("eagle3", {"layer_config": WIDE}, "heads_fill_width is False"),
    ("speculators", {"own_embeddings": True, "layer_config": SMALL_LAYER}, "as_wide_as_base is False"),
]


@pytest.mark.parametrize("to, fields, why", REFUSED, ids=[f"{to}, {why}" for to, _, why in REFUSED])
def test_what_a_target_would_run_wrongly_is_refused(base, tmp_path, to, fields, why):
    Family("eagle3", Eagle3ForCausalLM, SMALL | fields).build(base).save_pretrained(tmp_path / "ours")
    with refused(f"'...ours' cannot be written as '{to}': its {why}, and the target has a place for ... alone; ..."):
        export_checkpoint(tmp_path / "ours", tmp_path / "theirs", to)


def test_embeddings_that_are_not_the_base_s_are_not_left_to_sglang(base, tmp_path):
    model = Family("eagle3", Eagle3ForCausalLM, SMALL | {"own_embeddings": True}).build(base)
    with refused("...cannot be written as 'sglang': it has embeddings of its own, in the place of which..."):
        export_checkpoint(model, tmp_path / "theirs", "sglang")


def test_embeddings_that_are_the_base_s_are_left_to_sglang(base, tmp_path):
    model = Family("eagle3", Eagle3ForCausalLM, SMALL | {"own_embeddings": True}).build(base)
    model.drafter.embed_tokens.load_state_dict(base.get_input_embeddings().state_dict())
    done = export_checkpoint(model, tmp_path / "theirs", "sglang")
    assert "embed_tokens.weight" not in done.shapes


def test_every_flag_is_written_where_it_matters(base, tmp_path):
    fields = SMALL | {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}
    fields["feature_layers"] = [1, 3, 6]
    Family("eagle3", Eagle3ForCausalLM, fields).build(base).save_pretrained(tmp_path / "ours")
    for to in ("vllm", "speculators"):
        export_checkpoint(tmp_path / "ours", tmp_path / to, to)
        config = json.loads((tmp_path / to / "config.json").read_text())
        for name in ("norm_before_residual", "norm_before_fc", "norm_output"):
            assert config[name] is True
        assert config["fc_norm"] is False
        assert config[IDS] == [1, 3, 6]
    assert config["speculators_config"]["verifier"]["name_or_path"] == str(tmp_path / "base")
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
    Family("eagle3", Eagle3ForCausalLM, SMALL | {"feature_layers": [1, 3, 6]}).build(base).save_pretrained(
        tmp_path / "two"
    )
    export_checkpoint(tmp_path / "two", tmp_path / "sglang", "sglang")
    config = json.loads((tmp_path / "sglang" / "config.json").read_text())
    assert config["eagle_config"][IDS] == [0, 2, 5]  # outputs of layers
    assert IDS not in config


def test_a_draft_vocabulary_out_of_order_is_written_in_order(base, tmp_path):
    model = Family("eagle3", Eagle3ForCausalLM, SMALL).build(base)  # its tokens are shuffled
    done = export_checkpoint(model, tmp_path / "theirs", "speculators")
    assert "the draft vocabulary is written in ascending order, which all readers of t2d expect." in done.notes
    tensors = load_file(tmp_path / "theirs" / "model.safetensors")
    tokens = tensors["d2t"] + torch.arange(50)
    assert torch.equal(tokens, tokens.sort().values) and torch.equal(tensors["t2d"].nonzero()[:, 0], tokens)
    place = model.drafter.draft_tokens.tolist().index(int(tokens[7]))
    assert torch.equal(tensors["lm_head.weight"][7], model.drafter.lm_head.weight[place])


def named(new):
    def change(tensors):
        for name in list(tensors):
            tensors[new(name)] = tensors.pop(name)

    return change


NAMES = {
    "NeMo AutoModel": named(lambda name: name if name in ("lm_head.weight", "d2t", "t2d") else f"model.{name}"),
    "DDP": named("module.{}".format),
    "torch.compile": named("_orig_mod.{}".format),
    "both": named("module._orig_mod.{}".format),
    "a layer compiled alone": named(lambda name: name.replace("layers.0.", "layers.0._orig_mod.")),
}


@pytest.mark.parametrize("form", NAMES)
def test_names_of_other_trainers_are_the_same_heads(form, write, base_folder, tmp_path):
    plain = convert_checkpoint(write("specforge"), tmp_path / "plain", base_model=str(base_folder))
    (tmp_path / "heads").rename(tmp_path / "first")
    found = convert_checkpoint(write("specforge", NAMES[form]), tmp_path / "new", base_model=str(base_folder))
    assert found.fields == plain.fields
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "new"))
    assert set(one) == set(other) and all(torch.equal(one[name], other[name]) for name in one)


@torch.no_grad()
def test_a_draft_without_an_lm_head_uses_the_base_s(write, base_folder, tmp_path):
    """As the same head with a copy of the base's rows."""

    def copy_rows(tensors):
        rows = load_file(base_folder / "model.safetensors")["lm_head.weight"]
        chosen = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
        tensors["lm_head.weight"] = rows[chosen].contiguous()

    convert_checkpoint(write("specforge", copy_rows), tmp_path / "own", base_model=str(base_folder))
    (tmp_path / "heads").rename(tmp_path / "first")
    without = write("specforge", lambda tensors: tensors.pop("lm_head.weight"))
    report = convert_checkpoint(without, tmp_path / "shared", base_model=str(base_folder))
    assert report.fields["share_lm_head"] and "the file has no lm_head: the base's is used." in report.notes
    own, shared = (AutoModel.from_pretrained(tmp_path / name) for name in ("own", "shared"))
    states = torch.randn(2, 3, shared.config.width)
    assert torch.allclose(own.drafter.head_logits(0, states), shared.drafter.head_logits(0, states), atol=1e-5)
    ids = golden("eagle3")["in.input_ids"]
    outs = [model.generate(ids, max_new_tokens=20, return_dict_in_generate=True) for model in (own, shared)]
    assert torch.equal(outs[0].sequences, outs[1].sequences)
    assert torch.equal(outs[0].accepted_lengths, outs[1].accepted_lengths)
    with refused("...cannot be written as 'sglang': its share_lm_head is True...train it with share_lm_head False."):
        export_checkpoint(tmp_path / "shared", tmp_path / "out", "sglang")
