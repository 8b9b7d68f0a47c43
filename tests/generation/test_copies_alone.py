"""A model without heads: `hf_drafthead.from_base(base)` guesses copies of the text alone, on every base that drafts."""

import copy
import pickle

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, pipeline

import hf_drafthead
from hf_drafthead import LookupForCausalLM
from hf_drafthead.generation.state import Guesses
from hf_drafthead.training import train_heads
from hf_drafthead.trees.calibrate import calibrate
from tests.bases import EARLIER, HYBRID, KINDS, VOCABULARY, tiny_base
from tests.generation import test_recorded
from tests.generation.agreement import as_the_base, shared_base
from tests.generation.test_lookup import RUNNERS, circling_base, repeating_prompt

DRAFTS = [*(kind for kind in KINDS if kind not in ("mpt", "mamba")), *HYBRID]
SAMPLED = {"do_sample": True, "top_k": 20, "temperature": 0.7}
recordings = test_recorded.recordings  # where there are graphs


def fields_of(kind: str) -> dict:
    """States are float32 whatever the dtype; eager attention of padding in float64 gives what is no number."""
    return {"dtype": torch.float32, "attn_implementation": None} if kind in (*HYBRID, "gemma2") else {}


def both(model, rows=3, **call):
    """The same call of the model, which drafts, and of its base: the same text and state of the generator."""
    call = {**repeating_prompt(rows), "max_new_tokens": 20, "eos_token_id": 5, "pad_token_id": 0, **call}
    return as_the_base(model, call)


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kind", DRAFTS)
def test_the_text_is_the_base_s_on_every_base(kind, rows, sampling):
    both(hf_drafthead.from_base(shared_base(kind, **fields_of(kind))), rows, **sampling)


@pytest.mark.slow
@pytest.mark.parametrize("how", RUNNERS)
@pytest.mark.parametrize("kind", ["llama-gqa", "qwen3.5", "granite-hybrid", "lfm2"])
def test_with_every_runner(kind, how, recordings):
    found = both(hf_drafthead.from_base(tiny_base(kind, **fields_of(kind))), **RUNNERS[how])
    assert (len(recordings) > 0) == (how in ("recorded", "captured")) and (found.accepted_lengths >= 0).all()


def test_text_that_repeats_itself_takes_fewer_steps():
    base = circling_base()
    text = base.generate(**repeating_prompt(1), max_new_tokens=VOCABULARY, eos_token_id=None)
    call = {"max_new_tokens": 23, "eos_token_id": None, "attention_mask": torch.ones_like(text)}
    found = both(hf_drafthead.from_base(base), 1, input_ids=text, **call)
    assert found.accepted_lengths.tolist() == [[11, 11]]
    found = both(hf_drafthead.from_base(base, num_draft_heads=4), 1, input_ids=text, **call)
    assert found.accepted_lengths.tolist() == [[5, 5, 5, 5, 2]]
    found = hf_drafthead.from_base(base).generate(
        text, **call, prompt_lookup_num_tokens=2, return_dict_in_generate=True, draft_tree="auto"
    )
    assert found.accepted_lengths.tolist() == [[3] * 7 + [1]]


def test_the_drafter_is_asked_for_no_guess_and_has_no_weights(monkeypatch):
    def asked(*_):
        raise AssertionError

    monkeypatch.setattr(Guesses, "top", asked)
    model = hf_drafthead.from_base(shared_base("llama"))
    both(model)
    assert [*model.drafter.parameters(), *model.drafter.buffers()] == []


def test_a_call_that_cannot_draft_is_the_base_s_own_and_no_lookup_of_transformers():
    base = tiny_base("qwen3.5", dtype=torch.float32, attn_implementation=None)  # which refuses that
    model, call = hf_drafthead.from_base(base), {**repeating_prompt(2), "max_new_tokens": 6, "num_beams": 2}
    assert torch.equal(model.generate(**call), base.generate(**call))


@pytest.mark.few(1)
@pytest.mark.parametrize("included", [False, True])
def test_a_checkpoint_names_the_base_and_holds_no_tensors(included, tmp_path):
    tiny_base("lfm2", dtype=torch.float32, attn_implementation=None).save_pretrained(tmp_path / "base")
    model = hf_drafthead.from_base(tmp_path / "base", num_draft_heads=6)
    model.save_pretrained(tmp_path / "copies", include_base=included)
    size = sum(file.stat().st_size for file in (tmp_path / "copies").rglob("*.safetensors"))
    assert (size > 10_000) == included
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "copies")
    assert type(loaded) is LookupForCausalLM and loaded.why_no_drafts() is None
    assert loaded.drafter.copies == 6
    assert torch.equal(both(loaded).sequences, both(model).sequences)
    for other in (copy.deepcopy(loaded), pickle.loads(pickle.dumps(loaded))):
        assert torch.equal(both(other).sequences, both(model).sequences)


@pytest.mark.skipif(
    EARLIER, reason="a pipeline of earlier releases gives its own settings in a way that these deprecate"
)
def test_in_a_pipeline():
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(VOCABULARY)}, unk_token="w3"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w2", padding_side="left")
    base = tiny_base("granite-hybrid", dtype=torch.float32, attn_implementation=None)
    texts = []
    for model in (base, hf_drafthead.from_base(base)):
        write = pipeline("text-generation", model=model, tokenizer=tokenizer)
        texts.append(write(["w5 w6 w7 w5 w6", "w9"], max_new_tokens=12, do_sample=False, batch_size=2))
    assert texts[0] == texts[1]


def test_a_base_that_was_resized_drafts():
    model = hf_drafthead.from_base(tiny_base("llama-gqa", dtype=torch.float32))
    model.resize_token_embeddings(VOCABULARY + 3)
    both(model)


def test_more_copies_than_any_text_has_take_no_more_memory():
    model, call = hf_drafthead.from_base(tiny_base("llama-gqa", dtype=torch.float32)), {"max_new_tokens": 9}
    as_the_base(model, repeating_prompt(3) | call, prompt_lookup_num_tokens=10**6)


@pytest.mark.parametrize("tree", [[[0]], "dynamic", "mc_sim_7b_63", {"dynamic": {"nodes": 4}}], ids=str)
def test_a_tree_of_heads_is_refused(tree):
    model = hf_drafthead.from_base(shared_base("llama"))
    for call, ids in ((model.generate, torch.tensor([[5, 6]])), (model.generate_batch, [[5, 6]])):
        with pytest.raises(ValueError, match="this model has no heads and guesses copies of the text alone: leave"):
            call(ids, draft_tree=tree, max_new_tokens=4)


def test_auto_guesses_copies_alone_in_managers_and_from_a_config():
    model, prompt = hf_drafthead.from_base(tiny_base("llama", dtype=torch.float32)), repeating_prompt(1)["input_ids"]
    text, call = both(model, 1).sequences, {"max_new_tokens": 20, "eos_token_id": 5}
    (output,) = model.generate_batch(prompt.tolist(), draft_tree="auto", **call).values()
    assert [*prompt[0].tolist(), *output.generated_tokens] == text[0].tolist()
    model.generation_config.draft_tree = "auto"
    assert torch.equal(model.generate(prompt, **call), text)


def test_what_needs_heads_is_refused(tmp_path):
    base = tiny_base("llama", dtype=torch.float32)
    model = hf_drafthead.from_base(base)
    with pytest.raises(ValueError, match="copies of the text alone: there is no tree to choose"):
        calibrate(model)
    with pytest.raises(ValueError, match="'lookup' has nothing to train, it copies from the text alone: give one of"):
        train_heads(str(tmp_path), "lookup", None, tmp_path / "out")
    text = torch.tensor([[5, 6, 7, 8]])
    with pytest.raises(ValueError, match="'lookup' has nothing to train"):
        model.train()(text, labels=text)
    with pytest.raises(ValueError, match="draft_vocab_size is 8, but copies are of all tokens"):
        hf_drafthead.from_base(base, draft_vocab_size=8)
    with pytest.raises(ValueError, match="num_draft_heads is 0: expected a whole number from 1 to 64"):
        hf_drafthead.from_base(base, num_draft_heads=0)


@pytest.mark.parametrize("kind", ["llama-gqa", "granite-hybrid"])
def test_many_requests_copy_too(kind):
    base = tiny_base(kind, **fields_of(kind) or {"dtype": torch.float32})
    model, prompts = hf_drafthead.from_base(base), [[5, 6, 7, 5, 6], [9, 8, 7, 9, 8, 3], [4]]
    found = model.generate_batch(prompts, max_new_tokens=9, eos_token_id=None)
    for tokens, output in zip(prompts, found.values()):
        expected = base.generate(torch.tensor([tokens]), max_new_tokens=9, eos_token_id=None)
        assert [*tokens, *output.generated_tokens] == expected[0].tolist()


def test_a_family_puts_fresh_heads_on_the_base():
    assert hf_drafthead.from_base(tiny_base("llama"), "medusa", num_draft_heads=2).config.family == "medusa"
