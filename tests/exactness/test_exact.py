"""The same bits of scores, drafted or not, alone or among others; and what differs where a base is not exact."""

import contextlib
import copy
import functools
import math
import os
import pickle
import random
import weakref
from contextvars import ContextVar

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from transformers import CompileConfig

import hf_drafthead
from hf_drafthead.bases.generators import refusing_draws
from hf_drafthead.bases.releases import CACHE
from hf_drafthead.exactness import Inexact, attention, is_exact, products
from hf_drafthead.exactness.attention import order_free
from hf_drafthead.exactness.trial import try_ways
from hf_drafthead.generation.tree import DynamicTree
from tests.bases import HYBRID, KINDS, tiny_base
from tests.batching.conftest import managed  # noqa: F401
from tests.batching.requests import add, alone, final
from tests.families import FAMILIES
from tests.generation.agreement import prompt
from tests.generation.test_fuzz import trees

HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}
DTYPES = {**HALF, "float32": torch.float32}
REFUSED = {"mpt": "attends past", "mamba": r"mixer \(MambaMixer\) gives other bits"}
TREE = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]]
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "12"))
CASES = [(kind, dtype) for kind in (*KINDS, *HYBRID) if kind not in REFUSED for dtype in DTYPES]
CASES = [(kind, dtype) for kind, dtype in CASES if dtype in HALF or kind not in HYBRID or kind.startswith("lfm2")]
FEW_KINDS = ["llama-gqa", "gemma2", "gpt2", "qwen3.5", "granite-hybrid", "lfm2-moe"]
# As real models' heads: products of 16 numbers add in order, those of the other bases' 8 do not on every processor.
WIDER = {kind: {"head_dim": 16} for kind in ("llama-gqa", "gemma2")}


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch):
    """Blocks of the past that are seen in short texts."""
    monkeypatch.setattr(attention, "BLOCK", ContextVar("block", default=16))  # in all threads


@functools.cache
def exact_base(kind: str, dtype: torch.dtype):
    base = tiny_base(kind, dtype=dtype, attn_implementation=None, **WIDER.get(kind, {}))
    return hf_drafthead.exact(base.train()).eval()  # it is tried without dropout, whatever its mode


@functools.cache
def heads(family: str, kind: str, dtype: torch.dtype):
    return next(one for one in FAMILIES if one.name == family).build(exact_base(kind, dtype))


def said(generate, inputs, seed=3, **call):
    torch.manual_seed(seed)
    return generate(
        **inputs, pad_token_id=0, eos_token_id=None, output_logits=True, return_dict_in_generate=True, **call
    )


def same_bits(one, other) -> bool:
    """Whether two outputs have the same texts and, at each token, logits of the same bits."""
    logits = all(torch.equal(*pair) for pair in zip(one.logits, other.logits))
    return len(one.logits) == len(other.logits) and logits and torch.equal(one.sequences, other.sequences)


@pytest.mark.few(3)
@pytest.mark.parametrize("samples", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind, dtype", CASES)
def test_a_drafted_text_has_the_bits_of_the_bases(kind, dtype, samples):
    model, drafted = heads("medusa", kind, DTYPES[dtype]), 0
    for rows, tree in ((1, TREE), (3, [[0]]), (4, "dynamic"), (2, [*TREE, *[[3, rank] for rank in range(9)]])):
        inputs, call = prompt(rows, longest=20, seed=rows), {"max_new_tokens": 12, "do_sample": samples}
        expected = said(model.base.generate, inputs, **call)
        tree = [path for path in tree if path[:-1] in [[], *tree]] if isinstance(tree, list) else tree
        found = said(model.generate, inputs, **call, draft_tree=tree, prompt_lookup_num_tokens=2 if rows == 2 else None)
        assert same_bits(found, expected)
        drafted += found.accepted_lengths is not None
    assert drafted == 4


@pytest.mark.few(3)
@pytest.mark.parametrize("kind, dtype", CASES)
def test_a_row_of_a_batch_has_the_bits_of_the_row_alone(kind, dtype):
    base, inputs = exact_base(kind, DTYPES[dtype]), prompt(5, longest=30)
    together = said(base.generate, inputs, max_new_tokens=8, do_sample=False)
    for row, mask in enumerate(inputs["attention_mask"].bool()):
        single = said(base.generate, {"input_ids": inputs["input_ids"][row, mask][None]}, max_new_tokens=8)
        assert torch.equal(single.sequences[0, -8:], together.sequences[row, -8:])
        assert all(torch.equal(one[0], other[row]) for one, other in zip(single.logits, together.logits))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_heads_of_every_family(family):
    model, inputs = heads(family.name, "llama-gqa", torch.bfloat16), prompt(2, longest=20)
    expected = said(model.base.generate, inputs, max_new_tokens=16)
    assert same_bits(said(model.generate, inputs, max_new_tokens=16, draft_tree=[[0], [1]]), expected)


@pytest.mark.parametrize("kind", FEW_KINDS)
def test_a_request_among_others_has_the_text_of_one_alone(kind, managed):  # noqa: F811
    model, dice = heads("medusa", kind, torch.bfloat16), random.Random(kind)
    manager = managed(model, draft_tree=[[0], [1], [0, 0]])
    sampled = [{}, {"do_sample": True, "temperature": 0.8, "seed": 7}]
    requests = []
    for number in range(9):
        tokens = [dice.randrange(3, 67) for _ in range(dice.randint(2, 40))]
        requests.append((tokens, {"max_new_tokens": 14, "eos_token_id": None, **sampled[number % 2]}))
    names = [add(manager, request) for request in requests]
    assert [final(manager, name).generated_tokens for name in names] == [alone(model.base, one) for one in requests]


@pytest.mark.parametrize("call", [{"cache_implementation": "static"}, {"prefill_chunk_size": 3}], ids=["static", "3"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_cache_and_any_way_to_read_the_prompt(call, dtype):
    model, inputs = heads("medusa", "mistral-sliding", DTYPES[dtype]), prompt(2, longest=20)
    how = {"max_new_tokens": 10, "do_sample": False}
    expected = said(model.base.generate, inputs, **how)
    for generate, more in ((model.base.generate, {}), (model.generate, {"draft_tree": TREE})):
        more |= {"disable_compile": True} if "cache_implementation" in call else {}
        assert same_bits(said(generate, inputs, **how, **call, **more), expected)


def test_a_cache_goes_on_with_the_next_turn():
    model, inputs = heads("medusa", "qwen3.5", torch.bfloat16), prompt(1, longest=20)
    how = {"max_new_tokens": 10, "do_sample": False, "draft_tree": TREE}
    first = said(model.generate, inputs, **how)
    longer = {"input_ids": torch.cat([first.sequences, torch.tensor([[9, 11, 5]])], dim=1)}
    again = said(model.generate, longer, **how, **{CACHE: first[CACHE]})
    assert same_bits(again, said(model.base.generate, longer, max_new_tokens=10, do_sample=False))


@pytest.mark.parametrize("dtype", HALF)
def test_the_policys_chances_of_a_text_are_those_of_its_drafted_rollout(dtype):
    """What trainers of policies compare: one forward over whole texts, padded, and the steps that wrote them."""
    model, inputs = heads("medusa", "llama-gqa", HALF[dtype]), prompt(3, longest=12)
    rollout = said(model.generate, inputs, max_new_tokens=10, do_sample=True, draft_tree=TREE)
    written = torch.stack(rollout.logits, dim=1).log_softmax(-1)
    new, mask = rollout.sequences[:, 12:], torch.ones_like(rollout.sequences)
    mask[:, :12] = inputs["attention_mask"]
    model.base.requires_grad_(True)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.autocast("cpu", HALF[dtype]):  # as trainers have it
        logits = model.base(rollout.sequences, attention_mask=mask, position_ids=positions, use_cache=False).logits
    policy = logits[:, 11:-1].float().log_softmax(-1)
    chances = (part.gather(-1, new[..., None]) for part in (policy, written.float()))
    assert torch.equal(*chances)
    policy.gather(-1, new[..., None]).sum().backward()
    assert all(weight.grad.isfinite().all() and weight.grad.any() for weight in model.base.model.layers.parameters())


def drafted_call(accepted, place, kind, dtype, tree, rows, longest, seed, samples, lookup):
    model = heads(FAMILIES[place].name, kind, HALF[dtype])
    tree = [path for path in tree if len(path) <= (model.drafter.max_depth or 5)] if isinstance(tree, list) else tree
    inputs, call = prompt(rows, longest=longest, seed=seed), {"max_new_tokens": 12, "do_sample": samples}
    expected = said(model.base.generate, inputs, seed, **call)
    found = said(model.generate, inputs, seed, **call, draft_tree=tree, prompt_lookup_num_tokens=lookup)
    assert same_bits(found, expected)
    accepted.append(found.accepted_lengths is not None)


def test_any_call_in_half_precision():
    accepted = []
    strategies = {
        "place": st.integers(0, len(FAMILIES) - 1),
        "kind": st.sampled_from(FEW_KINDS),
        "dtype": st.sampled_from(list(HALF)),
        "tree": trees() | st.sampled_from([DynamicTree(8, 2, 3), DynamicTree(12, 3, 3)]),
        "rows": st.integers(1, 4),
        "longest": st.integers(1, 40),
        "seed": st.integers(0, 1000),
        "samples": st.booleans(),
        "lookup": st.none() | st.integers(1, 6),
    }
    fuzz = hypothesis.given(**strategies)(lambda **call: drafted_call(accepted, **call))
    seed = os.environ.get("FUZZ_SEED")
    how = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow], "database": None}
    fuzz = hypothesis.settings(max_examples=EXAMPLES, derandomize=seed is None, **how)(fuzz)
    (fuzz if seed is None else hypothesis.seed(int(seed))(fuzz))()
    assert len(accepted) >= EXAMPLES and sum(accepted) >= 0.7 * len(accepted)


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", ["llama-gqa", "qwen3.5", "granite-hybrid"])
def test_the_trial_sees_what_a_base_does_that_is_not_exact(kind):
    base = tiny_base(kind, dtype=torch.bfloat16 if kind in HYBRID else torch.float32)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Inexact, match="gives other bits where a text is read"):
        patch.setattr("hf_drafthead.exactness.trial._check_attended", lambda *_: None)
        try_ways(base)
    try_ways(hf_drafthead.exact(base))


@pytest.mark.few(4)
@pytest.mark.parametrize("tokens", [1, 5, 7, 19])  # one by one, in parts, in trees, in a batch
def test_the_trial_sees_a_module_that_differs_in_forwards_of_some_lengths(tokens):
    base = hf_drafthead.exact(tiny_base("llama", dtype=torch.bfloat16))
    base.model.layers[1].mlp.register_forward_hook(lambda _, __, out: out * 1.01 if out.shape[1] == tokens else None)
    with pytest.raises(Inexact, match=r"model.layers.1.mlp \(LlamaMLP\) gives other bits"):
        try_ways(base)


def attend(parts, nodes, slots, seen, function=order_free, **how) -> torch.Tensor:
    """Attention of some nodes of a text, a row each of (N, H, e), whose keys lie in these slots among others' keys."""
    generator, length = torch.Generator().manual_seed(len(slots)), seen.shape[1]
    query, *stored = parts
    for at, part in enumerate(stored):
        stored[at] = torch.randn(1, part.shape[1], length, part.shape[3], generator=generator).to(part.dtype)
        stored[at][:, :, slots] = part[:, :, : len(slots)]
        stored[at] = stored[at].transpose(1, 2).contiguous().transpose(1, 2) if len(slots) % 2 else stored[at]
    return function(torch.nn.Module().eval(), query[:, :, nodes], *stored, seen[None, None], **how)[0][0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_in_other_slots_and_orders_give_other_bits_in_a_fused_attention_alone(dtype, monkeypatch):
    attention.BLOCK.set(128)
    generator, first = torch.Generator().manual_seed(0), torch.arange(37)
    text = [torch.randn(1, heads, 37, 16, generator=generator).to(DTYPES[dtype]) for heads in (400, 200, 200)]
    shuffled = torch.randperm(61, generator=torch.Generator().manual_seed(1))[:37]

    def fused(module, query, keys, values, mask):
        attended = torch.nn.functional.scaled_dot_product_attention(query, keys, values, mask, enable_gqa=True)
        return attended.transpose(1, 2), None

    def compare(function, slots, alike):
        seen = [torch.zeros(1, 61, dtype=torch.bool).index_fill(1, at, True) for at in (first, slots)]
        both = [attend(text, [36], at, mask, function) for at, mask in zip((first, slots), seen)]
        assert torch.equal(*both) == alike
        torch.testing.assert_close(*both, rtol=0.02, atol=0.002)

    compare(fused, shuffled.sort().values, False)
    compare(order_free, shuffled.sort().values, True)
    tried = []
    for mode in (contextlib.nullcontext(), products.RowByRow()):  # a module's, which leaves attention's as they are
        monkeypatch.setattr(products, "TRIED", {})
        with mode, refusing_draws(torch.device("cpu")):
            tried.append(attention._products.__wrapped__(16, 16, 128, torch.device("cpu"), torch.get_num_threads()))
            compare(order_free, shuffled.sort().values, True)
    assert tried[0] == tried[1]
    monkeypatch.setattr(attention, "_products", lambda *_: (4, 256, False))  # where products do not add in order
    compare(order_free, shuffled.sort().values if dtype == "float32" else shuffled, True)


def test_a_masked_key_and_a_node_that_sees_nothing_and_a_module_that_is_let_go(monkeypatch):
    module, value = torch.nn.Module().eval(), torch.randn(1, 2, 5, 8).bfloat16()
    mask = torch.tensor([[True, False, True, False, False], [False] * 5])[None, None]
    for most in (attention.MOST, 1):  # in one piece, and in as many as there can be
        monkeypatch.setattr(attention, "MOST", most)
        found, _ = order_free(module, value[:, :, :2], value, value, mask)
        alone, _ = order_free(module, value[:, :, :1], value[:, :, [2, 0]], value[:, :, [2, 0]], None)
        assert torch.equal(found[:, :1], alone) and found.isfinite().all()
    module = weakref.ref(module)
    assert module() is None


def test_what_was_planned_without_gradients_serves_where_there_are_some():
    module, query, value = torch.nn.Module(), torch.randn(1, 4, 20, 8, requires_grad=True), torch.randn(1, 2, 20, 8)
    with torch.inference_mode():
        order_free(module, query, value, value, None)
    order_free(module, query, value, value, None)[0].sum().backward()
    assert query.grad.isfinite().all() and query.grad.any()


@pytest.mark.few(4)
@pytest.mark.parametrize("how", [{}, {"softcap": 2.0, "s_aux": torch.linspace(-2, 2, 6)}], ids=["plain", "capped"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [16, 128])
def test_a_node_of_a_long_text_has_the_same_bits_wherever_its_keys_lie(block, dtype, how):
    """As eager attention; token by token; with holes between; in a window from within a block; as a path in a tree."""
    attention.BLOCK.set(block)
    generator, length = torch.Generator().manual_seed(0), 3 * block + 5
    text = [torch.randn(1, heads, length, 16, generator=generator).to(DTYPES[dtype]) for heads in (6, 2, 2)]
    order = torch.arange(length)
    whole = attend(text, order, order, order <= order[:, None], **how)
    queries, keys, values = (part[0].double().repeat_interleave(6 // part.shape[1], dim=0) for part in text)
    cap, sinks = how.get("softcap", 1e9), how.get("s_aux", torch.full((6,), -math.inf)).view(6, 1, 1)
    scores = ((queries @ keys.mT / 4 / cap).tanh() * cap).masked_fill(order > order[:, None], -math.inf)
    shares = torch.cat([scores, sinks.expand(-1, length, -1)], dim=-1).softmax(-1)[..., :-1]
    torch.testing.assert_close(whole.double(), (shares @ values).transpose(0, 1), rtol=0.02, atol=0.01)
    for node in range(0, length, 1 + length // 20):
        one = attend(text, [node], order[: node + 1], torch.ones(1, node + 1, dtype=torch.bool), **how)
        assert torch.equal(one[0], whole[node])
        slots = order[: node + 1] * 2 + order[: node + 1] // 7
        seen = torch.zeros(1, int(slots[-1]) + 4, dtype=torch.bool).index_fill(1, slots, True)
        assert torch.equal(attend(text, [node], slots, seen, **how)[0], whole[node])
    window, late = block * 2 + 3, order[-block:]
    within = (order <= order[:, None]) & (order > order[:, None] - window)
    last, seen = [part[:, :, -window:] for part in text], torch.ones(1, window, dtype=torch.bool)
    for more in (how, {**how, "sliding_window": window}):
        ends = attend(last, [-1], order[:window], seen, **more)
        assert torch.equal(attend(text, late, order, within[late], **more)[-1], ends[0])
    for start in (2 * block - 2, 3 * block - 1, 3 * block):  # a path 0, 2, 4 of a tree of 9 nodes behind a hole
        slots, path = torch.cat([order[:start], start + 6 + 2 * torch.arange(3)]), torch.arange(start, start + 3)
        nodes = torch.tensor([start, 0, start + 1, 1, start + 2, 2, 3, 4, 5])
        seen = torch.cat([torch.ones(9, start), torch.zeros(9, 6), torch.eye(9)], dim=1).bool()
        for depth in range(3):
            seen[2 * depth, start + 6 : start + 6 + 2 * depth : 2] = True
        assert torch.equal(attend(text, nodes, slots, seen, **how)[[0, 2, 4]], whole[path])


def uneven(rows: torch.Tensor, weight: torch.Tensor, bias=None) -> torch.Tensor:
    """A product whose order depends on the number of rows, and where there are 7 on the row's place."""
    count, half = rows.shape[-2], rows.shape[-1] // 3
    if count == 7:
        return torch.cat([rows[..., :3, :] @ weight.T, uneven(rows[..., 3:, :], weight)], dim=-2)
    if count >= 4:
        return rows @ weight.T
    return rows[..., half:] @ weight[:, half:].T + rows[..., :half] @ weight[:, :half].T


def test_rows_of_another_number_are_filled_up_to_one_that_agrees():
    generator = torch.Generator().manual_seed(0)
    rows, weight = torch.randn(300, 96, generator=generator), torch.randn(40, 96, generator=generator)
    whole = products.product(rows, weight, None, uneven)
    assert not torch.equal(uneven(rows[:1], weight), uneven(rows[:8], weight)[:1])
    for count in (1, 2, 3, 4, 5, 7, 31, 100, 299):
        assert torch.equal(products.product(rows[:count], weight, None, uneven), whole[:count])
        assert torch.equal(products.product(rows[None, -count:], weight, None, uneven), whole[None, -count:])
    assert [of for key, of in products.TRIED.items() if uneven in key] == [(8, 256)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_function_of_each_number_is_the_same_wherever_it_stands(dtype):
    numbers = torch.randn(5, 1003).to(DTYPES[dtype])
    for function in (torch.nn.functional.silu, torch.nn.functional.softplus, torch.nn.functional.gelu):
        whole = products.elementwise(function, numbers)
        for start, stop in ((0, 7), (3, 70), (900, 1003)):
            assert torch.equal(products.elementwise(function, numbers[2:, start:stop]), whole[2:, start:stop])
        torch.testing.assert_close(whole, function(numbers))


def test_it_is_undone_and_copied_and_pickled():
    base = tiny_base("llama-gqa", dtype=torch.bfloat16)
    ids, before = prompt(1)["input_ids"], base(prompt(1)["input_ids"]).logits
    kinds = [type(module) for module in base.modules()]
    assert hf_drafthead.exact(base) is base and is_exact(base) and base.config._attn_implementation == attention.NAME
    logits = base(ids).logits
    assert [type(module).__name__ for module in base.modules()] == [kind.__name__ for kind in kinds]
    for other in (copy.deepcopy(base), pickle.loads(pickle.dumps(base))):
        assert torch.equal(other(ids).logits, logits) and is_exact(other)
        assert isinstance(other.lm_head, torch.nn.Linear) and type(other.lm_head) is type(base.lm_head)
        assert not is_exact(hf_drafthead.exact(other, False))
    assert hf_drafthead.exact(base, False) is base and [type(module) for module in base.modules()] == kinds
    assert base.config._attn_implementation == "sdpa" and torch.equal(base(ids).logits, before)


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_exact_is_an_error_that_names_the_module(kind):
    base = tiny_base(kind, dtype=torch.bfloat16, attn_implementation=None)
    with pytest.raises(Inexact, match=REFUSED[kind]):
        hf_drafthead.exact(base)
    assert not is_exact(base) and not any(hasattr(type(module), "plain_class") for module in base.modules())


def test_a_state_in_float32_and_other_types_and_forwards_are_refused():
    with pytest.raises(Inexact, match=r"linear_attn \(Qwen3_5GatedDeltaNet\) keeps a state"):
        hf_drafthead.exact(tiny_base("qwen3.5", dtype=torch.float32))
    with pytest.raises(Inexact, match=r"torch.float64 is not made exact: load it in one of torch.bfloat16"):
        hf_drafthead.exact(tiny_base())
    base = tiny_base(dtype=torch.bfloat16)
    base.model.layers[1].mlp.up_proj.forward = base.model.layers[1].mlp.up_proj.forward
    with pytest.raises(Inexact, match=r"layers.1.mlp.up_proj \(Linear\) has a forward of its own"):
        hf_drafthead.exact(base)
    value = torch.randn(1, 2, 5, 8)
    with pytest.raises(Inexact, match="Module drops 10% of its shares: set its config's dropout to 0"):
        order_free(torch.nn.Module(), value, value, value, None, dropout=0.1)
    with pytest.raises(Inexact, match="Module has a mask of each head, for which it has to be in bfloat16"):
        order_free(torch.nn.Module(), value, value, value, torch.ones(1, 2, 5, 5, dtype=torch.bool))


def test_steps_that_are_to_be_compiled_run_operation_by_operation_and_say_so(caplog):
    model, inputs = heads("medusa", "llama-gqa", torch.bfloat16), prompt(1)
    call = {"max_new_tokens": 8, "do_sample": False}
    found = said(model.generate, inputs, **call, draft_tree=TREE, compile_config=CompileConfig())
    assert same_bits(found, said(model.base.generate, inputs, **call))
    assert "an exact base runs operation by operation" in caplog.text
