"""What is known of a base holds as long as what it depends on: hooks, autocast, memory; and keys chosen by score."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hf_drafthead.bases.errors import Unsupported
from hf_drafthead.bases.hooks import watched
from hf_drafthead.bases.probe import attention_windows
from hf_drafthead.bases.releases import CACHE, check_length
from hf_drafthead.generation import mixin
from tests.bases import EARLIER, SIZES, SPECIAL, tiny_base
from tests.families import FAMILIES
from tests.generation.agreement import TREE, prompt, shared_base

LONG = {"max_new_tokens": 10, "eos_token_id": None}


def drafts(model) -> torch.Tensor:
    """The base's text, drafted."""
    call = {**prompt(2), **LONG}
    got = model.generate(**call, draft_tree=TREE, return_dict_in_generate=True)
    assert torch.equal(got.sequences, model.base.generate(**call))
    assert got.accepted_lengths is not None
    return got.sequences


def test_a_hook_that_only_looks_sees_every_forward():
    model = FAMILIES[0].build(tiny_base("llama"))
    steps = model.generate(**prompt(), **LONG, draft_tree=TREE, return_dict_in_generate=True).accepted_lengths.shape[1]
    seen = []
    model.base.register_forward_pre_hook(lambda module, args, kwargs: seen.append(1), with_kwargs=True)
    model._base_reader()
    seen.clear()
    model.generate(**prompt(), **LONG, draft_tree=TREE)
    assert len(seen) == 4 + 1 + steps  # what the base is tried by, the prompt, and the steps


def test_what_lies_between_base_and_decoder_is_watched_and_what_lies_in_it_is_not():
    base = tiny_base("llama")
    assert not watched(base)
    base.get_decoder().layers[0].register_forward_hook(lambda *given: None)
    base.get_decoder().register_forward_hook(lambda *given: None)
    assert not watched(base)
    base.register_forward_pre_hook(lambda *given: None)
    assert watched(base)


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_another_lm_head_is_read_from_the_next_call_on(kind):
    """An adapter puts another module in its place, too."""
    model = FAMILIES[0].build(tiny_base(kind))
    before = drafts(model)
    head = model.base.get_output_embeddings()
    other = torch.nn.Linear(head.in_features, head.out_features, bias=False, dtype=head.weight.dtype)
    model.base.set_output_embeddings(other)
    assert not torch.equal(drafts(model), before)  # each is the base's own text
    model.base.set_output_embeddings(head)
    assert torch.equal(drafts(model), before)


def test_a_call_under_autocast_says_nothing_about_the_next():
    model = FAMILIES[0].build(tiny_base("llama", dtype=torch.float32))
    with torch.autocast("cpu", torch.bfloat16):
        got = model.generate(**prompt(), **LONG, draft_tree=TREE, return_dict_in_generate=True)
    assert got.accepted_lengths is not None
    drafts(model)


def test_another_way_to_compute_experts_is_tried():
    base = tiny_base("qwen3.5-moe")  # in float64, for which products in groups are not made
    base.set_experts_implementation("grouped_mm")
    model = FAMILIES[0].build(base)
    assert "Double" in model.why_no_drafts()
    base.set_experts_implementation("eager")
    drafts(model)


def test_memory_that_was_short_once_is_tried_again(monkeypatch, fallbacks):
    model = FAMILIES[0].build(tiny_base("llama"))
    del model.__dict__["_readers"]  # what was found when the heads were made
    with monkeypatch.context() as patch:
        forward = type(model.base).forward

        def short(self, *args, **kwargs):
            if kwargs.get(CACHE) is None:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return forward(self, *args, **kwargs)

        patch.setattr(type(model.base), "forward", short)
        model.generate(**prompt(), **LONG, draft_tree=TREE)
    assert len(fallbacks) == 1 and "CUDA out of memory" in fallbacks[0]
    drafts(model)


def test_a_base_that_another_thread_trains_while_it_is_probed_is_probed_again(monkeypatch):
    model = FAMILIES[0].build(tiny_base("llama"))
    del model.__dict__["_readers"]

    def trained(base, *arguments):
        with torch.no_grad():
            base.lm_head.weight.mul_(1.0)
        raise Unsupported("the base does not honour tree masks")

    with monkeypatch.context() as patch, pytest.raises(Unsupported):
        patch.setattr(mixin, "probe", trained)
        model._base_reader()
    drafts(model)


def test_a_base_that_can_not_is_probed_once(monkeypatch):
    model = FAMILIES[0].build(shared_base("mpt"))
    probed = []
    monkeypatch.setattr(mixin, "probe", lambda *arguments: probed.append(arguments))
    for _ in range(2):
        with pytest.raises(Unsupported):  # as it was found when the heads were made
            model._base_reader()
    assert probed == []


def doge(**fields):
    fields = {**SIZES, **SPECIAL, "num_key_value_heads": 2, "is_moe": False, **fields}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("doge", **fields), dtype=torch.float64).eval()


@pytest.mark.skipif(EARLIER, reason="Doge of earlier versions does not honour tree masks, and never drafts")
def test_keys_that_doge_chooses_by_score_are_a_reason_beyond_its_window(fallbacks):
    model = FAMILIES[0].build(doge(keep_window_size=40))
    call = {**prompt(2), "eos_token_id": None}
    for tokens, reasons in ((12, 0), (30, 1)):
        got = model.generate(**call, max_new_tokens=tokens, draft_tree=TREE, return_dict_in_generate=True)
        assert torch.equal(got.sequences, model.base.generate(**call, max_new_tokens=tokens))
        assert (got.accepted_lengths is None) == bool(reasons) and len(fallbacks) == reasons
    assert "the base's attention chooses keys by score beyond 40 positions" in fallbacks[0]


def test_the_length_from_which_doge_chooses_keys_by_score():
    config = doge(keep_window_size=40).config
    check_length(config, 30, nodes=10)
    with pytest.raises(Unsupported, match="beyond 40 positions"):
        check_length(config, 31, nodes=10)


@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa", "minimax_m3_vl_text", "deepseek_v4"])
def test_layers_with_an_index_of_their_keys_are_refused(kind):
    try:
        config = AutoConfig.for_model(kind)
    except ValueError:
        pytest.skip(f"this version of transformers has no {kind}")
    with pytest.raises(Unsupported, match="layers of type|chooses keys by score"):
        attention_windows(config)
    config.layer_types = None  # as configs of earlier versions
    with pytest.raises(Unsupported, match="the base's attention chooses keys by score .index_topk"):
        attention_windows(config)
