"""Nothing that works on the base stops working: what a tree cannot do the base decodes, and one warning says why."""

import copy

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, StaticCache
from transformers.utils import ModelOutput

from hf_drafthead.bases.errors import Unsupported
from hf_drafthead.bases.probe import attention_windows
from hf_drafthead.bases.releases import CACHE, check_length
from tests.bases import SIZES, SPECIAL, tiny_base
from tests.drafters import Drafted
from tests.families import FAMILIES
from tests.generation.agreement import TREE, agree, prompt, shared_base
from tests.generation.test_stopping import tokenizer  # noqa: F401


def sampled_by_hand(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
    """A decoding loop of the user's own."""
    return torch.cat([input_ids, input_ids[:, :3]], dim=1)


def static_cache(base):
    return StaticCache(config=base.config, max_cache_len=32)


CALLS = {
    "beams": (lambda base: {"num_beams": 3}, "beam search"),
    "sampled beams": (lambda base: {"num_beams": 2, "do_sample": True}, "beam sample"),
    "returned beams": (lambda base: {"num_beams": 3, "num_return_sequences": 2}, "beam search"),
    "an assistant": (lambda base: {"assistant_model": tiny_base("llama", seed=9)}, "assisted generation"),
    "hidden states": (lambda base: {"output_hidden_states": True}, "attentions or hidden states are asked for"),
    "no cache": (lambda base: {"use_cache": False}, "use_cache is False"),
    "no cache by None": (lambda base: {"use_cache": None}, "use_cache is None"),
    "a static cache": (lambda base: {CACHE: static_cache(base)}, "a cache of type StaticCache"),
    "a loop of the user's own": (lambda base: {"custom_generate": sampled_by_hand}, "custom_generate is given"),
}
every_call = pytest.mark.parametrize("make, reason", CALLS.values(), ids=CALLS)


def same(one, other) -> None:
    """Two outputs are alike, field by field."""
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
        return
    assert isinstance(one, ModelOutput) and set(one) == set(other)
    assert torch.equal(one.sequences, other.sequences)
    for name in ("scores", "logits"):
        for a, b in zip(getattr(one, name) or (), getattr(other, name) or ()):
            assert torch.equal(a, b)
    if one.get("hidden_states") is not None:
        assert torch.equal(one.hidden_states[-1][-1], other.hidden_states[-1][-1])
    if one.get("attentions") is not None:
        assert torch.equal(one.attentions[-1][-1], other.attentions[-1][-1])


@pytest.fixture(autouse=True)
def transformers_own_deprecated_calls(request):
    """Assisted generation in transformers calls what transformers deprecates."""
    if "assistant" in request.node.name:
        transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity_warning()


def check(base, make, reason, fallbacks, inputs=None, seed=4, **call) -> None:
    """The base's result, no accepted lengths, and exactly one warning, which names the reason."""
    model = Drafted(base, FAMILIES[0].build(shared_base("llama")).drafter)
    inputs = inputs or prompt()
    torch.manual_seed(seed)
    expected = base.generate(**inputs, max_new_tokens=6, **make(base), **call)
    left_at = torch.get_rng_state()
    torch.manual_seed(seed)
    got = model.generate(**inputs, max_new_tokens=6, draft_tree=TREE, **make(base), **call)
    assert torch.equal(torch.get_rng_state(), left_at)
    same(expected, got)
    assert getattr(got, "accepted_lengths", None) is None
    assert len(fallbacks) == 1 and reason in fallbacks[0]


@pytest.mark.parametrize("output", [{}, {"return_dict_in_generate": True, "output_scores": True}], ids=str)
@every_call
def test_what_the_tree_cannot_do_is_decoded_by_the_base(make, reason, output, fallbacks):
    if reason != "custom_generate is given" or not output:  # a loop of the user's own returns what it likes
        check(shared_base("llama"), make, reason, fallbacks, **output)


def test_attentions(fallbacks):
    base = shared_base("llama", attn_implementation="eager")
    call = {"return_dict_in_generate": True}
    check(base, lambda base: {"output_attentions": True}, "attentions or hidden states", fallbacks, **call)


def test_a_base_in_training_mode(fallbacks):
    base = tiny_base("llama", attention_dropout=0.3).train()
    check(base, lambda base: {}, "in training mode", fallbacks)
    fallbacks.clear()
    base.eval()
    agree(base, call={"max_new_tokens": 6})
    assert fallbacks == []


@pytest.mark.parametrize("name", ["llama", "qwen3.5", "qwen3.5-moe"])
def test_a_base_in_training_mode_without_dropout_drafts(name, fallbacks):
    base = tiny_base(name, dtype=torch.float32)
    model = next(family for family in FAMILIES if family.name.startswith("hydra")).build(base).train()
    call = {**prompt(), "max_new_tokens": 9, "eos_token_id": None}
    found = model.generate(**call, draft_tree=TREE, return_dict_in_generate=True)
    assert found.accepted_lengths is not None and fallbacks == [] and model.base.training
    assert torch.equal(found.sequences, base.generate(**call)) and torch.equal(
        found.sequences, base.eval().generate(**call)
    )


@pytest.mark.parametrize("change", ["gradient_checkpointing", "a dropout", "a norm"])
def test_a_base_that_training_changes_decodes_by_itself(change, fallbacks):
    base = tiny_base("llama")
    model = FAMILIES[0].build(base)
    if change == "gradient_checkpointing":
        base.model.layers[0].gradient_checkpointing = True
    else:
        base.model.layers[0].more = torch.nn.Dropout(0.1) if change == "a dropout" else torch.nn.BatchNorm1d(3)
    assert model.train().generate(**prompt(), max_new_tokens=3, draft_tree=TREE) is not None
    assert len(fallbacks) == 1 and "in training mode, which changes what it computes" in fallbacks[0]
    fallbacks.clear()
    model.eval().generate(**prompt(), max_new_tokens=3, draft_tree=TREE)
    assert fallbacks == []


def test_a_drafter_in_training_mode(fallbacks):
    base = shared_base("llama")
    family = next(family for family in FAMILIES if family.name.startswith("hydra"))
    model = family.build(base, dropout=0.5)
    model.drafter.train()
    outcomes = []
    for generate, ours in ((base.generate, {}), (model.generate, {"draft_tree": TREE})):
        torch.manual_seed(0)
        text = generate(**prompt(), max_new_tokens=12, do_sample=True, **ours)
        outcomes.append((text.tolist(), torch.get_rng_state().tolist()))
    assert outcomes[0] == outcomes[1]
    assert len(fallbacks) == 1 and "in training mode" in fallbacks[0]


def other_base(model_type: str, **fields):
    """A tiny base of a kind on which no tree can be checked."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**SIZES, **SPECIAL, **fields})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()


OTHERS = {
    "mpt": lambda: shared_base("mpt"),
    "mamba": lambda: shared_base("mamba"),
    "bloom": lambda: other_base("bloom", n_layer=2, n_head=4),
    "gpt-neox-japanese": lambda: other_base("gpt_neox_japanese", intermediate_multiple_size=2),
    "falcon with alibi": lambda: other_base("falcon", alibi=True, new_decoder_architecture=False),
}


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_base_that_does_not_honour_a_tree(rows, make, fallbacks):
    inputs = {"input_ids": prompt(rows)["input_ids"].clamp_min(3)}
    call = {"return_dict_in_generate": True, "do_sample": True, "use_cache": True}
    check(make(), lambda base: {}, "the base", fallbacks, inputs, **call)


def test_a_base_is_probed_once_and_every_call_warns_no_more_than_once(fallbacks):
    model = Drafted(shared_base("mpt"), FAMILIES[0].build(shared_base("llama")).drafter)
    for _ in range(3):
        model.generate(**prompt(), max_new_tokens=2)
    assert len(fallbacks) == 1


def test_a_base_too_short_for_the_probe(fallbacks):
    base = shared_base("gpt2", max_position_embeddings=8)
    check(base, lambda base: {}, "the base cannot verify a tree", fallbacks, {"input_ids": torch.tensor([[5, 6]])})


def test_a_mask_of_other_numbers_than_0_and_1(fallbacks):
    inputs = {name: tensor * (1 + (name == "attention_mask")) for name, tensor in prompt(2).items()}
    check(shared_base("llama"), lambda base: {}, "the attention mask has other values than 0 and 1", fallbacks, inputs)


def scaled(**fields):
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    return tiny_base("llama", rope_parameters=scaling, max_position_embeddings=20, **fields)


@pytest.mark.parametrize("given", ["tokens", "embeddings", "a cache"])
def test_rotary_frequencies_that_change_with_the_length(given, fallbacks):
    base, inputs, make = scaled(), prompt(longest=17), dict
    with torch.no_grad():
        if given == "embeddings":
            inputs = {"inputs_embeds": base.get_input_embeddings()(inputs["input_ids"])}
        if given == "a cache":
            past = base(inputs["input_ids"][:, :15], use_cache=True)[CACHE]
            inputs["input_ids"] = inputs["input_ids"][:, 15:]
            make = lambda: {CACHE: copy.deepcopy(past)}  # noqa: E731
    reason = "rotary scaling changes with the length beyond 20 positions"
    check(base, lambda base: make(), reason, fallbacks, inputs)


def test_token_healing(tokenizer, fallbacks):  # noqa: F811
    healed = {"token_healing": True, "tokenizer": tokenizer}
    check(shared_base("llama"), lambda base: healed, "token healing", fallbacks)


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default `max_length`")
def test_what_fails_on_the_base_fails_alike_on_the_model():
    base = shared_base("llama")
    model = FAMILIES[0].build(base)
    for call in (
        {"cache_implementation": "quantized"},
        {"penalty_alpha": 0.6, "top_k": 4},
        {"num_return_sequences": 2},
        {"max_length": 3},
        {"no_such_argument": 1},
        {"attention_mask": torch.ones(1, 1, 9, 9)},
    ):
        with pytest.raises(Exception) as by_base:
            base.generate(prompt()["input_ids"], max_new_tokens=None, **call)
        with pytest.raises(type(by_base.value)) as by_model:
            model.generate(prompt()["input_ids"], max_new_tokens=None, **call)
        assert str(by_model.value) == str(by_base.value)


def test_layers_whose_masks_are_unknown():
    config = shared_base("llama").config.__class__(**SIZES)
    config.layer_types = ["full_attention", "compressed_attention"]
    with pytest.raises(Unsupported, match="layers of type compressed_attention"):
        attention_windows(config)
    config.layer_types, config.attention_chunk_size = None, 16
    with pytest.raises(Unsupported, match="attends in chunks"):
        attention_windows(config)


def test_fresh_heads_on_a_base_that_never_drafts_say_so_at_once(fallbacks, caplog):
    model = FAMILIES[0].build(shared_base("mpt"))
    assert model.why_no_drafts().startswith("the base does not honour tree masks (a node's logits are off by")
    assert "These heads will never draft, the base will decode by itself: the base does not honour" in caplog.text
    caplog.clear()
    assert FAMILIES[0].build(shared_base("llama")).why_no_drafts() is None and caplog.text == ""


def test_chunks_of_attention_are_a_reason_beyond_the_first(fallbacks):
    fields = {"attention_chunk_size": 48, "num_local_experts": 2, "intermediate_size_mlp": 48, "head_dim": 8}
    config = AutoConfig.for_model("llama4_text", **{**SIZES, **fields, "num_key_value_heads": 2})
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(config, dtype=torch.float64, experts_implementation="eager").eval()
    assert "chunked_attention" in config.layer_types
    model = FAMILIES[0].build(base)
    for tokens, reasons in ((12, 0), (60, 1)):
        call = {**prompt(2), "max_new_tokens": tokens, "do_sample": False}
        got = model.generate(**call, draft_tree=TREE, return_dict_in_generate=True)
        assert torch.equal(got.sequences, base.generate(**call)) and len(fallbacks) == reasons
    assert "attends in chunks, and the text may reach beyond the first 48 positions" in fallbacks[0]


def test_fixed_rotary_scaling_is_no_reason():
    for kind in ("default", "linear", "llama3", "yarn"):
        config = shared_base("llama").config.__class__(**SIZES)
        config.rope_parameters = {"rope_type": kind, "factor": 2.0, "original_max_position_embeddings": 16}
        check_length(config, 10_000)


def test_a_quantized_base_is_told_what_is_allowed(monkeypatch):
    base = tiny_base("mpt")
    monkeypatch.setattr(type(base), "is_quantized", True, raising=False)
    reason = FAMILIES[0].build(base).why_no_drafts()
    assert reason.startswith("the quantized base rounds too differently, or ignores tree masks (a node's logits")
    assert reason.endswith("and 1e-05 is allowed)")


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("tokens", [71, 60])
def test_heads_go_on_where_their_base_got_more_tokens_and_stop_where_it_lost_some(family, tokens, tmp_path):
    model = family.build(tiny_base("llama-gqa"))
    call = {"do_sample": True, "max_new_tokens": 8, "return_dict_in_generate": True}
    assert model.generate(torch.arange(5, 14)[None], **call).accepted_lengths is not None
    model.resize_token_embeddings(tokens)
    ids = torch.tensor([[5, 9, tokens - 1]])
    models = [model]
    if tokens > 67:
        assert model.train()(ids.expand(2, -1).repeat(1, 3), labels=ids.expand(2, -1).repeat(1, 3)).loss.isfinite()
        model.eval()
        model.save_pretrained(tmp_path)
        models.append(AutoModel.from_pretrained(tmp_path))
    else:
        with pytest.raises(ValueError, match="cannot be saved with their base .* resized from 67 to 60 tokens under"):
            model.save_pretrained(tmp_path)
    for one in models:
        texts = []
        for generate in (model.base.generate, one.generate):
            torch.manual_seed(0)
            texts.append(generate(ids, **call))
        assert torch.equal(texts[0].sequences, texts[1].sequences)
        assert (texts[1].accepted_lengths is not None) == (tokens > 67)
        assert bool(one.why_no_drafts()) == (tokens < 67)
