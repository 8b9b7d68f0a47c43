"""What users do with a base that keeps states: caches of their own, adapters, quantization, offloading, training."""

import copy
import inspect
import json
import sys
import types

import accelerate
import pytest
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    DynamicCache,
    PreTrainedTokenizerFast,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback

import hf_drafthead
from hf_drafthead import MedusaForCausalLM
from hf_drafthead.bases.mixers.layer import Nodes
from hf_drafthead.bases.releases import CACHE
from hf_drafthead.modeling.families import TRAINED
from hf_drafthead.training.distill import distill
from hf_drafthead.training.run import train_heads
from tests.bases import VOCABULARY, tiny_base
from tests.families import FAMILIES
from tests.generation import test_stopping
from tests.generation.agreement import TREE, prompt

KINDS = ["qwen3.5", "granite-hybrid", "lfm2"]
each_kind = pytest.mark.parametrize("kind", KINDS)
PROJECTIONS = {"qwen3.5": "in_proj_qkv", "granite-hybrid": "in_proj", "lfm2": "in_proj"}


def base_of(kind: str, **overrides):
    return tiny_base(kind, dtype=torch.float32, attn_implementation=None, **overrides)


def both(model, drafts: bool = True, make=dict, **call):
    """The outputs of the model and of its base for one call, which say the same; whether it drafted."""
    call = {**prompt(3), "max_new_tokens": 14, "eos_token_id": None, "return_dict_in_generate": True, **call}
    tree = call.pop("draft_tree", TREE)
    expected, found = model.base.generate(**call, **make()), model.generate(**call, **make(), draft_tree=tree)
    assert torch.equal(found.sequences, expected.sequences)
    assert (getattr(found, "accepted_lengths", None) is not None) == drafts
    return found, expected


def medusa(base):
    return MedusaForCausalLM.from_base(base, num_draft_heads=3)


def same_states(mine: DynamicCache, theirs: DynamicCache) -> None:
    for layer, other in zip(mine.layers, theirs.layers):
        for name in ("conv_states", "recurrent_states"):
            for number, expected in (getattr(other, name, None) or {}).items():
                if expected is not None:
                    state = getattr(layer, name)[number]
                    atol = 2e-5 * max(float(expected.nan_to_num(0.0).abs().max()), 1.0)
                    torch.testing.assert_close(state, expected, rtol=0, atol=atol, equal_nan=True)


# ---- caches --------------------------------------------------------------------------------------------------------


def filled(base, tokens: torch.Tensor, **more) -> DynamicCache:
    cache = DynamicCache(config=base.config, **more)
    with torch.no_grad():
        base(tokens, **{CACHE: cache}, use_cache=True)
    return cache


@each_kind
def test_a_cache_without_layers_for_states_is_refused_as_by_the_base_before_anything_is_drawn(kind):
    model, ends = medusa(base_of(kind)), []
    for each in (model.base, model):
        torch.manual_seed(3)
        with pytest.raises((IndexError, ValueError)) as raised:
            each.generate(torch.tensor([[5, 6, 7]]), do_sample=True, max_new_tokens=9, **{CACHE: DynamicCache()})
        ends.append((str(raised.value), torch.get_rng_state().tolist()))
    assert ends[0] == ends[1]


@each_kind
@pytest.mark.parametrize("length, finite", [(1, True), (4, True), (8, True), (4, False)])
def test_a_cache_that_holds_the_beginning_of_the_prompt(length, finite, kind):
    """And where a state is not finite, that stays in its row."""
    model = medusa(base_of(kind))
    text = prompt(2, attention_mask=False)["input_ids"].clamp(min=3)
    cache = filled(model.base, text[:, :length])
    if not finite:
        state = next(layer for layer in cache.layers if hasattr(layer, "conv_states"))
        (state.conv_states[0] if state.recurrent_states[0] is None else state.recurrent_states[0])[1] = torch.nan
    call = {"input_ids": text, "attention_mask": torch.ones_like(text)}
    found, expected = both(model, **call, make=lambda: {CACHE: copy.deepcopy(cache)})
    same_states(found[CACHE], expected[CACHE])


@each_kind
def test_a_cache_of_another_number_of_rows_is_refused_as_the_base_refuses_it(kind, caplog):
    model = medusa(base_of(kind))
    cache = filled(model.base, torch.tensor([[5, 6, 7]]))
    call = {"input_ids": torch.tensor([[5, 6, 7, 8], [9, 8, 7, 6]]), "max_new_tokens": 4}
    said = []
    for decodes in (model.base, model):
        with pytest.raises(RuntimeError) as error:
            decodes.generate(**call, **{CACHE: copy.deepcopy(cache)})
        said.append(str(error.value))
    assert said[0] == said[1]
    assert "the cache holds 1 row(s), and the call has 2" in caplog.text


def words_tokenizer() -> PreTrainedTokenizerFast:
    """A word for each token."""
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(VOCABULARY)}, unk_token="w3"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    template = "{% for message in messages %}{{ message['content'] }} {% endfor %}w9"
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="w0", eos_token="w2", padding_side="left", chat_template=template
    )


@each_kind
@pytest.mark.parametrize("returned", [True, False], ids=["with the cache", "without"])
def test_rows_that_go_on_behind_their_ends_leave_no_state_behind_the_text(returned, kind):
    """Without padding a row that has ended goes on, and may be beyond the end of the others by a few tokens."""
    model, letters = medusa(base_of(kind)), test_stopping.tokenizer.__wrapped__()
    text = model.base.generate(**prompt(3), max_new_tokens=9, eos_token_id=None)

    def stops():
        stop = StopStringCriteria(letters, [letters.decode(token) for token in text[:, -2].tolist()])
        return {"stopping_criteria": StoppingCriteriaList([stop])}

    if not returned:
        call = {**prompt(3), "max_new_tokens": 14, "eos_token_id": None}
        found = model.generate(**call, **stops(), draft_tree=TREE)
        assert torch.equal(found, model.base.generate(**call, **stops()))
        return
    found, expected = both(model, drafts=False, make=stops)
    same_states(found[CACHE], expected[CACHE])


# ---- mixers that are not known -------------------------------------------------------------------------------------


def test_a_base_of_remote_code_decodes_by_itself_with_the_class_of_its_mixer(caplog):
    base = base_of("qwen3.5")
    mixer = type(base.model.layers[0].linear_attn)

    class RemoteMixer(mixer):
        """Of a model's own code: it does what is done there, by functions of other names."""

        def forward(self, hidden_states, *args, **kwargs):
            return mixer.forward(self, hidden_states, *args, **kwargs)

    for layer in base.model.layers:
        if hasattr(layer, "linear_attn"):
            layer.linear_attn.__class__ = RemoteMixer
    model = medusa(base)
    both(model, drafts=False)
    assert "keeps a state by a mixer that is not known, RemoteMixer" in (model.why_no_drafts() or "")
    assert caplog.text.count("RemoteMixer") == 2  # as the heads are made, and in the first call


# ---- kernels -------------------------------------------------------------------------------------------------------

# By a function of transformers the package that has it as a kernel, where, and its name there.
KERNELS = {
    "causal_conv1d_fn": ("causal_conv1d", "", "causal_conv1d_fn"),
    "causal_conv1d_update": ("causal_conv1d", "", "causal_conv1d_update"),
    "torch_chunk_gated_delta_rule": ("fla", "ops.gated_delta_rule", "chunk_gated_delta_rule"),
    "torch_recurrent_gated_delta_rule": ("fla", "ops.gated_delta_rule", "fused_recurrent_gated_delta_rule"),
    "mamba2_chunk_scan": ("mamba_ssm", "ops.triton.ssd_combined", "mamba_chunk_scan_combined"),
    "mamba2_selective_state_update": ("mamba_ssm", "ops.triton.selective_state_update", "selective_state_update"),
}


@each_kind
@pytest.mark.parametrize("rows", [1, 3])
def test_kernels_that_are_installed_read_the_prompt_and_never_see_a_tree(rows, kind, monkeypatch):
    base, used = base_of(kind), []
    module = sys.modules[type(base).__module__]
    for name, (package, inside, kernel) in KERNELS.items():
        plain = inspect.unwrap(getattr(module, name, None) or len)
        if plain is len:
            continue

        def run(*args, of=plain, called=name, **kwargs):
            assert not any(isinstance(value, Nodes) for value in (*args, *kwargs.values()))
            used.append(called)
            return of(*args, **kwargs)

        run.__signature__ = inspect.signature(plain)
        installed = sys.modules.get(package) or types.ModuleType(package)
        monkeypatch.setitem(sys.modules, package, installed)
        place = installed
        for part in filter(None, inside.split(".")):
            place.__dict__.setdefault(part, types.SimpleNamespace())
            place = getattr(place, part)
        setattr(place, kernel, run)
        monkeypatch.setattr(module, name, use_kernel_func_from_hub_with_fallback(kernel, package)(plain))
    both(medusa(base), **prompt(rows))
    assert {name for name in used if "update" not in name and "recurrent" not in name}


# ---- adapters, quantization, offloading, sizes ---------------------------------------------------------------------


@each_kind
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_a_base_with_an_adapter_in_its_mixers(kind):
    base = base_of(kind)
    plain = base.generate(**prompt(3), max_new_tokens=14, eos_token_id=None)
    target = [PROJECTIONS[kind], "out_proj"]
    get_peft_model(base, LoraConfig(r=4, target_modules=target, init_lora_weights=False, task_type="CAUSAL_LM")).eval()
    found, _ = both(medusa(base))
    assert not torch.equal(found.sequences, plain)


class WeightsOf8Bits(torch.nn.Linear):
    """A linear layer whose weights are whole numbers of 8 bits and a scale of each row."""

    def __init__(self, linear: torch.nn.Linear):
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None)
        scales = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("scales", scales)
        self.weight = torch.nn.Parameter((linear.weight / scales).round().to(torch.int8), requires_grad=False)
        self.bias = linear.bias

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(states, self.weight.to(states.dtype) * self.scales, self.bias)


@each_kind
def test_a_base_with_quantized_projections(kind):
    base = base_of(kind)
    for module in [*base.get_decoder().modules()]:
        for name, part in module.named_children():
            if type(part) is torch.nn.Linear:
                setattr(module, name, WeightsOf8Bits(part))
    both(medusa(base))
    both(medusa(base), do_sample=False, compile_config=None)


# Sizes that kernels for 4 bits on CPUs take.
WIDE = {
    "qwen3.5": {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "intermediate_size": 128},
    "granite-hybrid": {"mamba_d_head": 16, "mamba_d_state": 6, "shared_intermediate_size": 128},
    "lfm2": {"intermediate_size": 128},
}


@pytest.mark.few(1)
@each_kind
@pytest.mark.parametrize("twice", [False, True], ids=["nf4", "fp4, scales quantized too"])
def test_a_base_in_four_bits(twice, kind, tmp_path):
    pytest.importorskip("bitsandbytes")
    base_of(kind, hidden_size=64, **WIDE[kind]).save_pretrained(tmp_path)
    more = {"bnb_4bit_use_double_quant": True} if twice else {"bnb_4bit_quant_type": "nf4"}
    quantized = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32, **more)
    choice = {"quantization_config": quantized, "dtype": torch.float32, "device_map": {"": "cpu"}}
    base = AutoModelForCausalLM.from_pretrained(tmp_path, **choice)
    assert any(PROJECTIONS[kind] in name and type(part).__name__ == "Linear4bit" for name, part in base.named_modules())
    both(medusa(base))
    both(hf_drafthead.from_base(base), draft_tree="lookup")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_base_whose_activations_are_quantized_together_decodes_by_itself():
    """One scale for all tokens of a forward: what a token gives depends on those beside it."""
    base = torch.ao.quantization.quantize_dynamic(base_of("qwen3.5"), {torch.nn.Linear}, dtype=torch.qint8)
    model = hf_drafthead.from_base(base)
    call = {**prompt(1), "max_new_tokens": 8, "eos_token_id": None}
    assert torch.equal(model.generate(**call), base.generate(**call))
    assert "does not honour tree masks" in model.why_no_drafts()


@each_kind
@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_a_base_whose_weights_are_offloaded(place, kind, tmp_path):
    base = base_of(kind)
    expected = base.generate(**prompt(3), max_new_tokens=10, eos_token_id=None)
    if place == "cpu":
        accelerate.cpu_offload(base, execution_device=torch.device("cpu"))
    else:
        accelerate.disk_offload(base, tmp_path, execution_device=torch.device("cpu"))
    model = medusa(base)
    found = model.generate(
        **prompt(3), max_new_tokens=10, eos_token_id=None, draft_tree=TREE, return_dict_in_generate=True
    )
    assert found.accepted_lengths is not None and torch.equal(found.sequences, expected)


@each_kind
def test_a_base_that_was_resized(kind):
    base = base_of(kind)
    base.resize_token_embeddings(VOCABULARY + 5, mean_resizing=False)
    both(medusa(base))


# ---- training ------------------------------------------------------------------------------------------------------

NAMED = [family for family in FAMILIES if family.name in TRAINED]


@pytest.mark.slow
@each_kind
@pytest.mark.parametrize("family", NAMED, ids=lambda family: family.name)
def test_train_and_distill_take_such_a_base(family, kind, tmp_path):
    base, tokenizer = base_of(kind), words_tokenizer()
    base.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    chats = [{"messages": [{"role": "user", "content": f"w{number} w{number + 1} w5"}]} for number in range(10, 26)]
    report = distill(base, tokenizer, chats, tmp_path / "answers.jsonl", batch_size=4, max_new_tokens=12)
    assert report.written > 8
    written = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert all(row["messages"][-1]["role"] == "assistant" for row in written)
    quick = {"max_steps": 3, "per_device_train_batch_size": 2, "held_out_rows": 2, "answer_tokens": 6, "use_cpu": True}
    quick |= {"disable_tqdm": True, "report_to": "none"}
    fields = {name: value for name, value in family.fields.items() if name != "dropout"}
    train_heads(
        str(tmp_path / "base"), family.name, tmp_path / "answers.jsonl", tmp_path / "heads", fields=fields, **quick
    )
    loaded = AutoModel.from_pretrained(tmp_path / "heads")
    both(loaded)
