"""Inputs that a step does not make, such as images, turn drafting off for one reason: that a tree with them failed."""

import functools
import inspect
import sys

import pytest
import torch
from transformers import AutoConfig, GPT2LMHeadModel

import hf_drafthead
from hf_drafthead.bases import releases
from tests.base_table import IMAGE_PROMPTS, SEEING, image_inputs, tiny
from tests.bases import EARLIER, SIZES, SPECIAL
from tests.drafters import Drafted
from tests.families import FAMILIES
from tests.generation.agreement import TREE, count_forwards, prompt, shared_base
from tests.generation.test_caches import same_cache
from tests.generation.test_streamers import Recorder

GREEDY = {"max_new_tokens": 12, "do_sample": False}


class Unusual(GPT2LMHeadModel):
    """A base with inputs of which nothing is known: `gain` scales the logits, `unmasked` hides the mask from attention,
    `age` grows with the text, `broken` cannot be read."""

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        inputs_embeds=None,
        gain=None,
        unmasked=None,
        age=None,
        broken=None,
        **kwargs,
    ):
        if broken is not None:
            raise ValueError(f"broken is {broken}")
        mask = None if unmasked else attention_mask
        inputs = {"input_ids": input_ids, "position_ids": position_ids, "inputs_embeds": inputs_embeds}
        output = super().forward(attention_mask=mask, **inputs, **kwargs)
        for factor in (gain, age):
            if factor is not None:  # another factor for every second token of the vocabulary
                output.logits[..., ::2] = output.logits[..., ::2] * factor[..., :1].to(output.logits)[..., None]
        return output

    def _update_model_kwargs_for_generation(self, outputs, model_kwargs, *args, num_new_tokens=1, **kwargs):
        later = super()._update_model_kwargs_for_generation(
            outputs, model_kwargs, *args, num_new_tokens=num_new_tokens, **kwargs
        )
        return later if later.get("age") is None else {**later, "age": later["age"] + num_new_tokens}


@pytest.fixture
def unusual() -> Unusual:
    config = AutoConfig.for_model("gpt2", **{**SIZES, **SPECIAL})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Unusual(config).double().eval()


def drafted(model, call, **settings) -> bool:
    """Whether a call drafts; its text is the base's."""
    got = model.generate(**call, **settings, draft_tree=TREE, return_dict_in_generate=True)
    assert torch.equal(got.sequences, model.base.generate(**call, **settings))
    return getattr(got, "accepted_lengths", None) is not None


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("rows", [1, 3])
def test_an_entry_per_token_goes_on_as_the_base_goes_on(family, rows, fallbacks):
    """GPT-2 embeds token types; each later token has the one of the last."""
    call = {**prompt(rows), **GREEDY}
    kinds = torch.arange(call["input_ids"].shape[1]).expand_as(call["input_ids"])
    assert drafted(family.build(shared_base("gpt2")), {**call, "token_type_ids": kinds})
    assert fallbacks == []


@pytest.mark.parametrize("settings", [{}, {"cache_implementation": "static"}], ids=["eager", "static"])
def test_a_value_of_a_call_is_that_of_no_other(settings, unusual, fallbacks, untraced):
    model, texts = FAMILIES[0].build(unusual), []
    for gain in (1.0, 3.0, None, 0.2):
        call = {**prompt(2), **GREEDY} | ({} if gain is None else {"gain": torch.full((2, 1), gain)})
        assert drafted(model, call, **settings)
        texts.append(unusual.generate(**call).tolist())
    assert len({str(text) for text in texts}) > 1 and fallbacks == []


@pytest.mark.parametrize("ends", [False, True], ids=["all to the end", "one row ends"])
def test_the_cache_of_the_output_is_the_bases_own(ends):
    """Where a row has ended the base reads padding behind it, with the inputs of every other token."""
    base, call = shared_base("gpt2"), {**prompt(3), "max_new_tokens": 12, "do_sample": True}
    call["token_type_ids"] = torch.full_like(call["input_ids"], 3)

    def output(model, eos, **settings):
        torch.manual_seed(0)
        return model.generate(**call, eos_token_id=eos, return_dict_in_generate=True, **settings)

    text = output(base, None).sequences
    eos = next(token for token in text[0, 10:-2].tolist() if token not in text[1:, 9:]) if ends else None
    expected, got = output(base, eos), output(FAMILIES[0].build(base), eos, draft_tree=TREE)
    assert torch.equal(got.sequences, expected.sequences) and got.accepted_lengths is not None
    same_cache(got[releases.CACHE], expected[releases.CACHE])


def test_what_a_tree_cannot_do_with_an_input_is_the_reason(unusual, fallbacks):
    model = FAMILIES[0].build(unusual)
    assert not drafted(model, {**prompt(), **GREEDY, "unmasked": True})
    assert fallbacks[0].startswith("with the model input unmasked the base does not honour tree masks (a node's logits")
    assert drafted(model, {**prompt(), **GREEDY}) and len(fallbacks) == 1


def test_what_failed_is_not_tried_again(unusual):
    model, call = FAMILIES[0].build(unusual), {**prompt(), **GREEDY, "unmasked": True}
    counts = []
    for _ in range(3):
        with count_forwards(unusual) as lengths:
            model.generate(**call)
        counts.append(len(lengths))
    assert counts[0] > counts[1] == counts[2] == 12


def test_an_input_that_each_step_has_otherwise(unusual, fallbacks):
    assert not drafted(FAMILIES[0].build(unusual), {**prompt(), **GREEDY, "age": torch.ones(1, 1)})
    assert fallbacks == ["the model input age depends on the step, and the nodes of a tree are of several."]


def test_an_input_that_the_base_cannot_read_raises_what_the_base_raises(unusual, fallbacks):
    model = FAMILIES[0].build(unusual)
    with pytest.raises(ValueError, match="broken is 1"):
        model.generate(**prompt(), **GREEDY, broken=1)
    assert "with the model input broken the base cannot read the prompt (ValueError: broken is 1)" in fallbacks[0]


def test_chunks_of_a_prompt_are_left_to_the_base(fallbacks):
    call = {**prompt(), **GREEDY, "token_type_ids": torch.full((1, 9), 3), "prefill_chunk_size": 4}
    assert not drafted(FAMILIES[0].build(shared_base("gpt2")), call)
    assert fallbacks == ["prefill_chunk_size cannot divide the model input token_type_ids."]


@pytest.mark.parametrize("sampled", [False, True])
def test_a_trial_that_fails_leaves_no_trace(sampled, unusual):
    model, results = FAMILIES[0].build(unusual), []
    for each in (unusual, model):
        torch.manual_seed(3)
        streamer = Recorder()
        each.generate(**prompt(), max_new_tokens=9, do_sample=sampled, unmasked=True, streamer=streamer)
        results.append((streamer.calls, torch.get_rng_state().tolist()))
    assert results[0] == results[1]


@pytest.mark.parametrize("installed", ["5.24.1", "5.25.0.dev0", "6.0.0"])
def test_a_newer_transformers_is_named_where_something_failed(installed, unusual, monkeypatch, fallbacks):
    monkeypatch.setattr(sys.modules["transformers"], "__version__", installed)
    said = f"(transformers {installed} is installed, which is newer than 5.24.0, the newest that was tested)."
    assert drafted(FAMILIES[0].build(unusual), {**prompt(), **GREEDY}) and fallbacks == []
    assert not drafted(FAMILIES[0].build(unusual), {**prompt(), **GREEDY, "unmasked": True})
    model = Drafted(shared_base("mpt"), FAMILIES[0].build(shared_base("llama")).drafter)
    model.generate(**prompt(), max_new_tokens=2, use_cache=True)
    assert len(fallbacks) == 2 and all(reason.endswith(said) for reason in fallbacks)


@pytest.mark.parametrize("installed", ["5.24.0", "5.23.0", "5.17.0"])
def test_a_tested_transformers_is_not_named(installed, monkeypatch):
    monkeypatch.setattr(sys.modules["transformers"], "__version__", installed)
    assert releases.untested() == ""


WHOLE_TEXTS = {
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_5",
}  # earlier releases hand the kinds of all tokens to each of their steps
seen_base = functools.cache(tiny)
each_seeing = pytest.mark.parametrize("kind", sorted(SEEING))


def call_with_images(kind: str, rows: list[int]) -> dict:
    """Rows of IMAGE_PROMPTS, of which the last is of text alone."""
    ids = IMAGE_PROMPTS[rows]
    return {
        "input_ids": ids,
        "attention_mask": (ids > 0).long(),
        **image_inputs(kind, ids),
        "max_new_tokens": 12,
        "pad_token_id": 0,
    }


@each_seeing
@pytest.mark.parametrize("rows", [[0], [0, 1], [0, 1, 2]], ids=["one", "two", "two and a text"])
def test_a_call_with_images_drafts(kind, rows, fallbacks):
    model, call = FAMILIES[0].build(seen_base(kind)), call_with_images(kind, rows)
    for settings in ({"do_sample": False}, {"do_sample": True, "temperature": 0.8}):
        results = []
        for each in (model.base, model):
            torch.manual_seed(3)
            results.append(each.generate(**call, **settings, return_dict_in_generate=True))
        assert torch.equal(results[0].sequences, results[1].sequences)
        if EARLIER and kind in WHOLE_TEXTS:
            assert results[1].get("accepted_lengths") is None
            assert "mm_token_type_ids depends on the step" in fallbacks[0]
            return
        assert results[1].accepted_lengths is not None
    assert drafted(model, {**prompt(len(rows)), **GREEDY, "pad_token_id": 0})  # text alone, behind an image
    assert fallbacks == []


@each_seeing
def test_tokens_of_images_without_an_image(kind, fallbacks):
    """Gemma 4 embeds padding in their place, which its decoder does not know of."""
    ids = torch.tensor([[5, 64, 66, 65, 9, 63, 62, 8], [7, 66, 66, 66, 66, 61, 60, 9]])
    assert drafted(FAMILIES[0].build(seen_base(kind)), {"input_ids": ids, **GREEDY}) and fallbacks == []


@pytest.mark.few(9)
@each_seeing
@pytest.mark.parametrize("kinds", [None, "token_type_ids", "mm_token_type_ids"])
def test_a_prompt_of_text_alone_is_one_like_those_of_other_bases(kinds, kind, fallbacks):
    """What says that there is no image, and positions that are the same on every axis, are no inputs to be tried."""
    model, call = FAMILIES[0].build(seen_base(kind)), {**prompt(2), **GREEDY, "pad_token_id": 0}
    if kinds in inspect.signature(model.base.forward).parameters:
        call[kinds] = torch.zeros_like(call["input_ids"])
    pieces = None if EARLIER and kind in WHOLE_TEXTS else 4  # whose positions such a base does not divide
    assert drafted(model, {**call, "prefill_chunk_size": pieces}) and fallbacks == []


@pytest.mark.skipif(EARLIER, reason="earlier releases hand on the kinds of all tokens")
@each_seeing
@pytest.mark.parametrize("rows", [[0], [2, 0, 1]], ids=["one", "two and a text"])
def test_a_conversation_goes_on_behind_an_image(kind, rows, fallbacks):
    texts = []
    base = seen_base(kind)
    for decodes in (base, FAMILIES[0].build(base)):
        call = call_with_images(kind, rows)
        for turn in range(3):
            found = decodes.generate(**call, do_sample=False, eos_token_id=None, return_dict_in_generate=True)
            text = torch.cat([found.sequences, torch.tensor([[7 + turn, 8, 9]]).expand(len(rows), -1)], dim=1)
            mask = torch.nn.functional.pad(
                call["attention_mask"], (0, text.shape[1] - call["attention_mask"].shape[1]), value=1
            )
            call = {
                "input_ids": text,
                "attention_mask": mask,
                releases.CACHE: found[releases.CACHE],
                "max_new_tokens": 9,
            }
            assert decodes is base or found.accepted_lengths is not None, turn
        texts.append(text)
    assert torch.equal(*texts)


@pytest.mark.skipif(EARLIER, reason="earlier releases hand on the kinds of all tokens")
@each_seeing
def test_images_with_fixed_shapes_and_with_copies(kind, untraced, fallbacks):
    model, call = FAMILIES[0].build(seen_base(kind)), {**call_with_images(kind, [0, 1, 2]), "do_sample": False}
    assert drafted(model, call, cache_implementation="static")
    found = hf_drafthead.from_base(model.base).generate(**call, return_dict_in_generate=True)
    assert found.accepted_lengths is not None and torch.equal(found.sequences, model.base.generate(**call))


@pytest.mark.skipif(EARLIER, reason="earlier releases hand on the kinds of all tokens")
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_5"])
def test_a_prompt_that_ends_within_an_image_turns_off_no_other(kind, fallbacks):
    """The base goes on from another place on each axis there."""
    model = FAMILIES[0].build(seen_base(kind))
    ids = torch.tensor([[5, 64, *[66] * 8]])
    tall = {"pixel_values": torch.ones(32, 384, dtype=torch.float64), "image_grid_thw": torch.tensor([[1, 8, 4]])}
    tall |= {"input_ids": ids, "mm_token_type_ids": (ids == 66).long()}
    assert not drafted(model, {**tall, **GREEDY})
    assert fallbacks == ["a row of the prompt ends where its positions have several axes that differ."]
    assert drafted(model, {**call_with_images(kind, [0]), "do_sample": False})
