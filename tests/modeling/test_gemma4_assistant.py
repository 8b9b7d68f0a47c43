"""Gemma 4's assistants: the numbers of transformers' own module, in trees and with what it has no form for."""

import json
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig
from transformers.generation import candidate_generator

from hf_drafthead.bases.reader import BaseReader
from hf_drafthead.formats import convert_checkpoint, export_checkpoint
from hf_drafthead.modeling import GemmaAssistantConfig, GemmaAssistantForCausalLM
from tests.bases import EARLIER, tiny_base
from tests.families import features_of

SIZES = {"vocab_size": 64, "vocab_size_per_layer_input": 64}
# Which share keys, as E2B and E4B, or have their own, fewer and larger ones where attention is full, as the others.
BASES = {
    "shared keys": SIZES,
    "own keys": SIZES | {"num_kv_shared_layers": 0, "global_head_dim": 16},
    "few global keys": SIZES
    | {"num_kv_shared_layers": 0, "global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
}
CLUSTERS = {"all tokens": {}, "clusters": {"use_ordered_embeddings": True}}
DRAFTS, CLOSE = 4, {"atol": 1e-9, "rtol": 0}


of_this_release = pytest.mark.skipif(EARLIER, reason="the generator of earlier releases drafts with other keys")


def base_of(which: str = "shared keys", dtype=torch.float64):
    return tiny_base("gemma4-sharing", dtype=dtype, **BASES[which])


def assistant_of(base, **fields) -> Gemma4AssistantForCausalLM:
    """One of transformers' own, with random weights that are far from any default."""
    text = base.config.to_dict() | {"hidden_size": 24, "num_attention_heads": 4, "intermediate_size": 40}
    text |= {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
    text |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_kv_shared_layers": 3}
    kept = {key: text[key] for key in text if not key.startswith("_") and key not in ("per_layer_config", "model_type")}
    full = base.config.per_layer_config[1]
    kept |= {"global_head_dim": full.head_dim, "num_global_key_value_heads": full.num_key_value_heads}
    config = Gemma4AssistantConfig(
        text_config=Gemma4TextConfig(**kept),
        backbone_hidden_size=32,
        num_centroids=16,
        centroid_intermediate_top_k=3,
        **fields,
    )
    model = Gemma4AssistantForCausalLM(config).to(base.dtype).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            parameter.copy_(1 + 0.3 * noise if parameter.dim() == 1 else noise * parameter.shape[-1] ** -0.5 * 1.5)
        for layer in model.model.layers:
            layer.layer_scalar.fill_(0.7)
        if model.masked_embedding is not None:
            model.masked_embedding.token_ordering.copy_(torch.randperm(64, generator=generator))
    return model


@pytest.fixture
def published(tmp_path, request):
    """A base, an assistant of transformers, and the folder that it is saved in."""

    def make(which: str = "shared keys", **fields):
        base = base_of(which)
        assistant = assistant_of(base, **fields)
        assistant.save_pretrained(tmp_path / "assistant")
        return base, assistant, tmp_path / "assistant"

    return make


def text(length: int, rows: int = 1, seed: int = 0):
    return torch.randint(3, 64, (rows, length), generator=torch.Generator().manual_seed(seed))


def drafted_by_transformers(base, assistant, ids, tokens) -> tuple[torch.Tensor, torch.Tensor]:
    """The chain (1, K) that transformers' generator drafts behind a text (1, T), and its logits (1, K, V)."""
    outputs = base(ids[:, :-1], output_hidden_states=True, return_shared_kv_states=True)
    assistant.generation_config.num_assistant_tokens = tokens
    settings = mock.Mock(max_length=ids.shape[1] + 100)
    generator = candidate_generator.SinglePositionMultiTokenCandidateGenerator(
        assistant, base.get_input_embeddings(), settings
    )
    found, logits = generator.get_candidates(
        ids, {"attention_mask": torch.ones_like(ids)}, outputs, is_first_iteration=False, n_last_matches=0
    )
    return found[:, ids.shape[1] :], logits


def drafted_here(model, ids, tokens) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by the drafter."""
    drafter, known = model.drafter, ids.shape[1] - 1
    features = BaseReader.of_texts(model.base, drafter.reads).read_texts(ids[:, :-1]).features
    state = drafter.observe(drafter.start(1, 64), features, ids[:, 1:], torch.tensor([known]))
    node, chain, logits = ids[:, -1:], [], []
    for _ in range(tokens):
        state, guesses = drafter.expand(state, node, torch.zeros_like(node))
        node, _ = guesses.top(1)
        node = node[:, 0]
        chain.append(node)
        logits.append(guesses.logits)
    return torch.cat(chain, 1), torch.cat(logits, 1)


@of_this_release
@pytest.mark.parametrize("fields", CLUSTERS.values(), ids=CLUSTERS)
@pytest.mark.parametrize("which", BASES)
@torch.inference_mode()
def test_chains_are_those_of_transformers(published, which, fields):
    """In texts shorter and longer than the window of 8, to which one key more is shown."""
    base, assistant, folder = published(which, **fields)
    model = GemmaAssistantForCausalLM.from_pretrained(folder, convert=True, base_model=base)
    assert model.config.num_centroids == (16 if fields else 0) and len(model.drafter.reads) == 3
    chains = set()
    for length in (2, 7, 9, 10, 11, 20):
        ids = text(length, seed=length)
        theirs, their_logits = drafted_by_transformers(base, assistant, ids, DRAFTS)
        ours, our_logits = drafted_here(model, ids, DRAFTS)
        torch.testing.assert_close(our_logits, their_logits, **CLOSE)
        assert torch.equal(ours, theirs)
        chains.add(tuple(ours[0].tolist()))
    assert len(chains) > 3  # the texts were told apart


@of_this_release
@torch.inference_mode()
def test_a_window_of_one_key_less_would_show(published):
    base, assistant, folder = published()
    model = GemmaAssistantForCausalLM.from_pretrained(folder, convert=True, base_model=base)
    model.drafter.body.reach -= 1
    _, theirs = drafted_by_transformers(base, assistant, text(20), 1)
    _, ours = drafted_here(model, text(20), 1)
    assert (ours - theirs).abs().max() > 1e-3


@of_this_release
@torch.inference_mode()
def test_the_first_draft_of_a_call_is_that_of_transformers(published):
    base, assistant, folder = published()
    drafts = []
    kind = candidate_generator.SinglePositionMultiTokenCandidateGenerator
    plain = kind.get_candidates

    def noted(self, input_ids, *args, **kwargs):
        found, logits = plain(self, input_ids, *args, **kwargs)
        drafts.append((input_ids.clone(), found[:, input_ids.shape[1] :]))
        return found, logits

    assistant.generation_config.num_assistant_tokens = DRAFTS
    with mock.patch.object(kind, "get_candidates", noted):
        expected = base.generate(text(12), assistant_model=assistant, max_new_tokens=8, do_sample=False)
    model = GemmaAssistantForCausalLM.from_pretrained(folder, convert=True, base_model=base)
    ids, chain = next((ids, chain) for ids, chain in drafts if chain.numel())
    assert torch.equal(drafted_here(model, ids, DRAFTS)[0], chain)
    chain_tree = [[0] * depth for depth in range(1, DRAFTS + 1)]
    assert torch.equal(model.generate(text(12), max_new_tokens=8, do_sample=False, draft_tree=chain_tree), expected)


@torch.inference_mode()
def test_a_converted_assistant_drafts_for_rows_with_padding_and_behind_a_cache(tmp_path):
    base = base_of(dtype=torch.float64)
    assistant_of(base, use_ordered_embeddings=True).save_pretrained(tmp_path / "theirs")
    convert = {"convert": True, "base_model": base}
    model = GemmaAssistantForCausalLM.from_pretrained(tmp_path / "theirs", **convert)
    ids, mask = text(14, rows=3), torch.ones(3, 14, dtype=torch.long)
    mask[0, :5] = mask[2, :1] = 0
    seen = []
    expand = model.drafter.expand
    model.drafter.expand = lambda state, tokens, parents: seen.append(state) or expand(state, tokens, parents)
    for settings in ({"draft_tree": "dynamic"}, {"draft_tree": [[0], [1], [0, 0]], "prompt_lookup_num_tokens": 3}):
        for sampled in (False, True):
            how = {"max_new_tokens": 12, "do_sample": sampled, "attention_mask": mask, "eos_token_id": None}
            torch.manual_seed(1)
            expected = base.generate(ids, **how)
            torch.manual_seed(1)
            assert torch.equal(model.generate(ids, **how, **settings), expected)
    first = seen[0]
    assert first.cache.lengths.tolist()[1] >= 14 > 9 == int(mask[0].sum())
    # what the drafter knows behind a cache of an earlier turn is what it knows of the whole text
    seen.clear()
    known = base(ids[1:2, :9], use_cache=True)
    cache = getattr(known, "cache", None) or known.past_key_values
    name = "cache" if hasattr(known, "cache") else "past_key_values"
    model.generate(ids[1:2], max_new_tokens=2, draft_tree=[[0]], **{name: cache})
    behind = seen[0]
    seen.clear()
    model.generate(ids[1:2], max_new_tokens=2, draft_tree=[[0]])
    for number in range(2):
        count = 8 if number else 14  # of a layer with a window an ordinary cache holds the end alone
        for ours, whole in zip(behind.cache.past(number), seen[0].cache.past(number)):
            torch.testing.assert_close(ours[:, :, 14 - count : 14], whole[:, :, 14 - count : 14])


def test_saved_loaded_and_written_back(published, tmp_path):
    base, assistant, folder = published(use_ordered_embeddings=True)
    base.save_pretrained(tmp_path / "base")
    found = convert_checkpoint(folder, tmp_path / "heads", base_model=tmp_path / "base")
    assert found.family == "gemma4-assistant" and not found.dropped
    model = AutoModel.from_pretrained(tmp_path / "heads")
    assert type(model) is GemmaAssistantForCausalLM
    model.save_pretrained(tmp_path / "again")
    again = AutoModel.from_pretrained(tmp_path / "again")
    features, ids = features_of(model, text(9)), text(9)
    with torch.no_grad():
        for one, other in zip(model.drafter.head_states(features, ids), again.drafter.head_states(features, ids)):
            assert torch.equal(one, other)
    export_checkpoint(tmp_path / "again", tmp_path / "back", "transformers")
    back, info = Gemma4AssistantForCausalLM.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not (info["missing_keys"] or info["unexpected_keys"] or info["mismatched_keys"])
    for name, tensor in assistant.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), name


def damaged(folder, **changes) -> None:
    """Change the tensors of a folder, or drop one, or its config."""
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    changes.get("tensors", lambda found: None)(tensors)
    changes.get("config", lambda found: None)(config)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def test_what_does_not_fit_is_refused_in_one_line(published):
    base, _, folder = published(use_ordered_embeddings=True)

    def refused(match: str, base=base):
        with pytest.raises(ValueError, match=match) as caught:
            GemmaAssistantForCausalLM.from_pretrained(folder, convert=True, base_model=base)
        assert "\n" not in str(caught.value)

    wide = tiny_base(vocab_size=64, hidden_size=48)
    refused("^the heads at .* were trained for a base of hidden size 32; the base .* has 48: give", wide)
    refused("^the heads at .* were trained for a base of vocabulary 64; the base", tiny_base())
    refused(
        r"^the assistant reads 2 key heads of size 8 \(full_attention\); layer 1 of the base has 4 of size 8: give the",
        tiny_base(vocab_size=64),
    )
    damaged(folder, tensors=lambda found: found["masked_embedding.token_ordering"].fill_(3))
    refused("^'drafter.token_ordering' in .* has the token 3 more than once: give every token one place.$")
    damaged(folder, config=lambda found: found["text_config"].update(attention_multiplier=0.5))
    refused("says attention_multiplier 0.5 of its text_config in its config.json, for which there is no place here")
    damaged(folder, config=lambda found: found["text_config"].pop("attention_multiplier"))
    damaged(folder, config=lambda found: found.update(tie_word_embeddings=False))
    refused("lacks the tensor 'lm_head.weight'")
    damaged(folder, config=lambda found: found.update(text_config={"model_type": "llama"}))
    refused("has no text_config of 'gemma4_text'")
    damaged(folder, tensors=lambda found: found.pop("post_projection.weight"))
    with pytest.raises(ValueError, match="is of no known layout"):
        GemmaAssistantForCausalLM.from_pretrained(folder, convert=True, base_model=base)


@pytest.mark.parametrize(
    "kind, why",
    [
        ("kimi-linear", "^an assistant reads keys and values of one size, and a 'kimi_linear"),
        ("mamba", "reads keys and values of its base, and a 'mamba' model has none: use Medusa"),
    ],
)
def test_a_base_whose_keys_do_not_fit_is_refused_when_heads_are_built(kind, why):
    with pytest.raises(ValueError, match=why):
        GemmaAssistantForCausalLM.from_base(tiny_base(kind))


def test_a_base_whose_keys_are_others_than_its_config_says_decodes_by_itself():
    base = tiny_base()
    model = GemmaAssistantForCausalLM.from_base(base)
    model.drafter.__dict__["_tried"] = None
    model.drafter.key_width += 8
    assert "other keys and values than its config says" in model.why_no_drafts()


def test_a_fresh_assistant_follows_its_base():
    config = GemmaAssistantForCausalLM.from_base(base_of("few global keys"), num_layers=3).config
    layer = config.layer_config
    assert layer.layer_types == ["sliding_attention"] * 2 + ["full_attention"] and layer.sliding_window == 8
    assert config.keys == [(1, 16), (2, 8)] and layer.hidden_size == 64
    assert layer.rope_parameters == base_of("few global keys").config.rope_parameters
    assert GemmaAssistantConfig(**config.to_dict()).keys == config.keys
