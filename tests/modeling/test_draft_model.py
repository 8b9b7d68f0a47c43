"""A draft model drafts what it would write itself, wherever it is loaded from, and is refused where it cannot."""

import re
from functools import partial

import pytest
import torch
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import AutoModel, LlamaConfig, PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

from hf_drafthead.modeling import DraftModelConfig, DraftModelForCausalLM
from tests.bases import VOCABULARY, tiny_base

CHAIN = [[0] * depth for depth in range(1, 5)]
TREE = [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 0, 0]]
PROMPTS = {
    "input_ids": torch.tensor([[0, 0, 5, 9, 33], [3, 4, 7, 12, 64]]),
    "attention_mask": torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]),
}
LONG = {"max_new_tokens": 30, "eos_token_id": None}
KINDS = ["llama-gqa", "llama-tied", "mistral-sliding", "gpt2", "qwen2", "gemma2", "gpt-neox"]


@pytest.fixture
def base():
    return tiny_base("llama-gqa")


def save_tokenizer(folder, tokens: list[str]) -> None:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=tokens[0]))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=tokens[0]).save_pretrained(folder)


def assert_same(model, other) -> None:
    ours, theirs = model.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    for name, buffer in model.drafter.named_buffers():
        assert torch.equal(buffer, other.drafter.get_buffer(name)), name
    expected = model.generate(**PROMPTS, **LONG, draft_tree=TREE, return_dict_in_generate=True)
    found = other.generate(**PROMPTS, **LONG, draft_tree=TREE, return_dict_in_generate=True)
    assert torch.equal(found.sequences, expected.sequences)
    assert torch.equal(found.accepted_lengths, expected.accepted_lengths)


@pytest.mark.parametrize("rows", [slice(1, 2), slice(0, 2)], ids=["one row", "two rows"])
def test_the_base_as_its_own_draft_model_is_right_at_every_level(base, rows):
    model = DraftModelForCausalLM.from_base(base, draft=base)
    prompts = {name: tensor[rows] for name, tensor in PROMPTS.items()}
    for tree, levels in ((CHAIN, 4), (TREE, 4)):
        output = model.generate(**prompts, **LONG, draft_tree=tree, return_dict_in_generate=True)
        assert torch.equal(output.sequences, base.generate(**prompts, **LONG))
        assert (output.accepted_lengths[:, :-1] == levels + 1).all()


@pytest.mark.parametrize("kind", KINDS)
def test_it_drafts_what_it_would_write_itself(base, kind):
    """Its guesses along its own greedy text are that text, with windows, position tables and tied weights too."""
    draft = tiny_base(kind, seed=5)
    drafter = DraftModelForCausalLM.from_base(base, draft=draft).drafter
    text = draft.generate(torch.tensor([[7, 9, 33]]), max_new_tokens=24, do_sample=False, eos_token_id=None)
    state, known = drafter.start(1, 64), 0
    for length in (3, 1, 4, 11, 2):
        lengths = torch.tensor([length])
        new = text[:, known : known + length]
        known += length
        state = drafter.observe(state, torch.zeros(1, length, 0), new, lengths)
        level, token, at = state, text[:, known - 1 : known], torch.zeros(1, 1, dtype=torch.long)
        for depth in range(3):
            level, guesses = drafter.expand(level, token, at)
            token = guesses.top(1)[0][:, :, 0]
            assert token.item() == text[0, known + depth]


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_saved_with_its_weights_and_with_the_base(base, kind, tmp_path):
    draft = tiny_base(kind, seed=5)
    base.save_pretrained(tmp_path / "base")
    draft.save_pretrained(tmp_path / "draft")
    model = DraftModelForCausalLM.from_base(tmp_path / "base", draft=tmp_path / "draft")
    assert torch.equal(model.generate(**PROMPTS, **LONG, draft_tree=TREE), base.generate(**PROMPTS, **LONG))
    model.save_pretrained(tmp_path / "heads")
    model.save_pretrained(tmp_path / "whole", include_base=True)
    for form in ("heads", "whole"):
        loaded = AutoModel.from_pretrained(tmp_path / form)
        assert type(loaded) is DraftModelForCausalLM and loaded.config.family == "draft-model"
        assert_same(model, loaded)
    if kind == "llama-tied":
        assert loaded.drafter.model.lm_head.weight is loaded.drafter.model.model.embed_tokens.weight


def test_a_fresh_one_starts_from_the_base_s_embeddings(base):
    model = DraftModelForCausalLM.from_base(base)
    assert model.config.draft_config.num_hidden_layers == 2
    assert torch.equal(model.drafter.model.get_input_embeddings().weight, base.get_input_embeddings().weight)
    assert torch.equal(model.drafter.model.lm_head.weight, base.lm_head.weight)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    own = DraftModelForCausalLM.from_base(base, draft=LlamaConfig(**sizes, num_hidden_layers=1))
    assert len(own.drafter.model.model.layers) == 1


def test_the_draft_model_given_is_used_and_the_base_stays_as_it_is(base):
    draft = tiny_base("qwen2", seed=5)
    model = DraftModelForCausalLM.from_base(base, draft=draft)
    assert model.drafter.model is draft and model.base is base
    half = tiny_base("qwen2", seed=5, dtype=torch.bfloat16)
    model = DraftModelForCausalLM.from_base(base, draft=half)
    assert half.dtype == torch.bfloat16 and model.drafter.model.dtype == torch.float64


@pytest.mark.few(1)
@pytest.mark.parametrize("sizes", [(67, 61), (67, 71)], ids=["draft smaller", "draft larger"])
def test_padded_vocabularies_of_one_family(sizes, tmp_path):
    """Sizes differ, tokens do not: what only one of the models scores is read, but never drafted."""
    tokens = [f"token{i}" for i in range(60)]
    for name, size, seed in (("base", sizes[0], 0), ("draft", sizes[1], 5)):
        tiny_base("llama-gqa", seed=seed, vocab_size=size).save_pretrained(tmp_path / name)
        save_tokenizer(tmp_path / name, tokens)
    model = DraftModelForCausalLM.from_base(tmp_path / "base", draft=tmp_path / "draft")
    prompt = torch.tensor([[5, 66, 9]])
    for sampling in ({"do_sample": False}, {"do_sample": True, "temperature": 2.0, "top_k": 0}):
        expected, found = (
            (torch.manual_seed(1), generate(prompt, **LONG, **sampling))[1]
            for generate in (model.base.generate, partial(model.generate, draft_tree=TREE))
        )
        assert torch.equal(found, expected)
    state = model.drafter.start(1, 8)
    state = model.drafter.observe(state, torch.zeros(1, 3, 0), prompt, torch.tensor([3]))
    _, guesses = model.drafter.expand(state, prompt[:, -1:], torch.zeros(1, 1, dtype=torch.long))
    assert guesses.logits.shape[-1] == min(sizes) and guesses.top(min(sizes))[0].max() == min(sizes) - 1
    model.save_pretrained(tmp_path / "heads")
    assert_same(model, AutoModel.from_pretrained(tmp_path / "heads"))


def test_tokenizers_that_differ_are_refused_with_the_first_such_token(tmp_path):
    tokens = [f"token{i}" for i in range(60)]
    for name, seed in (("base", 0), ("draft", 5)):
        tiny_base("llama-gqa", seed=seed).save_pretrained(tmp_path / name)
        save_tokenizer(tmp_path / name, tokens)
        tokens = [*tokens[:17], tokens[18], tokens[17], *tokens[19:]]
    with pytest.raises(ValueError) as refusal:
        DraftModelForCausalLM.from_base(tmp_path / "base", draft=tmp_path / "draft")
    assert str(refusal.value) == (
        f"the tokenizers of the base {str(tmp_path / 'base')!r} and the draft model {str(tmp_path / 'draft')!r} "
        "differ: token 17 is 'token17' for the first and 'token18' for the second; give a draft model with the base's "
        "tokenizer."
    )


def test_other_sizes_without_tokenizers_to_compare_are_refused(base):
    with pytest.raises(ValueError, match="the base has 67 tokens and the draft model 70, and their tokenizers are not"):
        DraftModelForCausalLM.from_base(base, draft=tiny_base(vocab_size=70))


@pytest.mark.parametrize("kind", ["gpt2", "llama-gqa"])
def test_it_stops_drafting_at_its_own_limit_and_the_text_goes_on(base, kind, monkeypatch):
    model = DraftModelForCausalLM.from_base(base, draft=tiny_base(kind, seed=5, max_position_embeddings=24))
    read: list[int] = []
    decoder = model.drafter.model.get_decoder()
    decoder.register_forward_pre_hook(
        lambda module, given, named: read.append(int(named["position_ids"].max())), with_kwargs=True
    )
    for new in (17, 60):
        read.clear()
        call = {**PROMPTS, "max_new_tokens": new, "eos_token_id": None}
        found = model.generate(**call, draft_tree=TREE, return_dict_in_generate=True)
        assert torch.equal(found.sequences, base.generate(**call))
        assert max(read) <= 23
        steps_with_drafts = sum(position < 23 for position in read)
        assert steps_with_drafts > 12
        if new == 60:  # behind the limit nothing is run
            assert len(read) < 4 * found.accepted_lengths.shape[1]
    prompt = torch.randint(3, VOCABULARY, (1, 30))
    read.clear()
    assert torch.equal(
        model.generate(prompt, max_new_tokens=4, draft_tree=TREE), base.generate(prompt, max_new_tokens=4)
    )
    assert not read


def refused(error: type[Exception], message: str, call) -> None:
    with pytest.raises(error) as refusal:
        call()
    assert re.fullmatch(message, str(refusal.value)), str(refusal.value)


def test_an_encoder_decoder(base, tmp_path):
    config = T5Config(vocab_size=67, d_model=16, d_ff=16, d_kv=8, num_layers=1, num_heads=2)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    line = (
        rf"the draft model '{tmp_path / 't5'}' cannot be loaded \(Unrecognized .*\): give the id "
        "or path of a small causal language model."
    )
    refused(OSError, line, lambda: DraftModelForCausalLM.from_base(base, draft=tmp_path / "t5"))
    line = (
        r"the draft model is an encoder-decoder \('t5'\): it cannot go on from the base's text, give a causal language "
        r"model\."
    )
    refused(ValueError, line, lambda: DraftModelConfig(draft_config=config))


def test_a_model_that_cannot_take_a_tree(base):
    line = r"the draft model cannot draft a tree: it folds its past into a state .* MambaMixer .*; give another .*"
    refused(ValueError, line, lambda: DraftModelForCausalLM.from_base(base, draft=tiny_base("mamba")))
    line = "the draft model cannot draft a tree: it keeps a state, from which .*; give another draft model."
    refused(ValueError, line, lambda: DraftModelForCausalLM.from_base(base, draft=tiny_base("lfm2")))


def test_a_draft_model_that_is_not_there(base, tmp_path):
    for name in (tmp_path, tmp_path / "not there", "org/not-downloaded"):
        line = (
            rf"the draft model '{name}' cannot be loaded \(.*\): give the id or path of a small causal language model."
        )
        refused(OSError, line, partial(DraftModelForCausalLM.from_base, base, draft=name, local_files_only=True))


def test_what_it_is_trained_on_is_what_it_drafts(base):
    drafter = DraftModelForCausalLM.from_base(base, draft=tiny_base("qwen2", seed=5)).drafter
    ids = torch.randint(3, VOCABULARY, (2, 9))
    with torch.no_grad():
        (states,) = drafter.head_states(torch.zeros(2, 9, 0), ids)
        logits: Tensor = drafter.head_logits(0, states)
        torch.testing.assert_close(logits[:, :-1], drafter.model(ids).logits[:, 1:])
