"""Bases: every node of every step has the logits of a plain forward over its path."""

import accelerate
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hf_drafthead.bases.probe import probe
from hf_drafthead.bases.reader import BaseReader
from hf_drafthead.bases.releases import CACHE
from hf_drafthead.generation.tree import DraftTree
from tests.bases import CANNOT_SDPA, SIZES, SPECIAL, VOCABULARY, tiny_base
from tests.drafters import Drafted, half_right
from tests.families import FAMILIES
from tests.generation.agreement import TREE, agree, prompt, shared_base

CAN = [
    "llama",
    "llama-gqa",
    "llama-tied",
    "mistral-sliding",
    "qwen2",
    "qwen3",
    "gemma2",
    "gpt-neox",
    "gpt2",
]
CASES = [
    (kind, attention) for kind in CAN for attention in ("sdpa", "eager") if (kind, attention) != ("gemma2", "sdpa")
]
# Eager attention takes its softmax in float32, and gpt-neox its rotary angles with it.
TOLERANCE = {"sdpa": 1e-10, "eager": 1e-5}
every_base = pytest.mark.parametrize("kind, attention", CASES, ids=["-".join(case) for case in CASES])


def ragged(rows: int, attention: str) -> dict[str, torch.Tensor]:
    """Left-padded prompts; under eager of one length, where padding in float64 gives NaN in transformers itself."""
    if attention == "sdpa":
        return prompt(rows, longest=13, seed=3)
    generator = torch.Generator().manual_seed(3)
    return {"input_ids": torch.randint(3, VOCABULARY, (rows, 13), generator=generator)}


def paths_of(topology, row: int) -> list[list[int]]:
    """The nodes from the root to each node."""
    ancestors = topology.ancestors[row % len(topology.ancestors)]
    depths = topology.depths[row % len(topology.depths)]
    return [sorted(line.nonzero().flatten().tolist(), key=lambda node: int(depths[node])) for line in ancestors]


@every_base
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("tree", [TREE, DraftTree([])], ids=["tree", "root alone"])
def test_every_node_has_the_logits_of_a_plain_forward_over_its_path(tree, rows, kind, attention, monkeypatch):
    base = shared_base(kind, attn_implementation=attention)
    inputs = ragged(rows, attention)
    steps, nodes = [], BaseReader.nodes

    def spy(self, tokens, topology, cache, positions, visible):
        past = cache.lengths.tolist()
        logits, features = nodes(self, tokens, topology, cache, positions, visible)
        steps.append((tokens.clone(), topology, past, logits.clone(), features.clone()))
        return logits, features

    probe(base, (-1,))
    monkeypatch.setattr(BaseReader, "nodes", spy)
    call = {"max_new_tokens": 18, "eos_token_id": None}
    found = agree(base, inputs, half_right, call=call, tree=tree, tolerance=TOLERANCE[attention])
    steps = steps[-found.steps :]  # the first one was the probe's
    worst, mask = 0.0, inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
    for row in range(rows):
        start = 13 - int(mask[row].sum())
        text = found.got.sequences[row].tolist()
        for tokens, topology, past, logits, features in steps:
            if past[row] + 1 + int(topology.depths.max()) > len(text) - 1:
                continue  # the last nodes' positions are not those of their paths: nobody asks for them
            assert int(tokens[row, 0]) == text[past[row]]
            paths = [text[start : past[row]] + tokens[row, path].tolist() for path in paths_of(topology, row)]
            longest = max(map(len, paths))
            plain = torch.tensor([path + [0] * (longest - len(path)) for path in paths])
            with torch.no_grad():
                out = base(plain, use_cache=False, output_hidden_states=True)
            last = torch.tensor([len(path) - 1 for path in paths])
            at = torch.arange(len(paths))
            worst = max(worst, float((out.logits[at, last] - logits[row]).abs().max()))
            worst = max(worst, float((out.hidden_states[-1][at, last] - features[row]).abs().max()))
    assert 0 < len(steps) and worst <= TOLERANCE[attention]


@every_base
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("choice", [{}, {"do_sample": True}], ids=["greedy", "sampled"])
def test_exact(choice, rows, kind, attention, fallbacks):
    base = shared_base(kind, attn_implementation=attention)
    agree(base, ragged(rows, attention), call={"max_new_tokens": 24, **choice}, tolerance=TOLERANCE[attention])
    assert fallbacks == []


@pytest.mark.parametrize("kind", [kind for kind in CAN if kind not in CANNOT_SDPA])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_dtype_passes_the_probe(dtype, kind):
    probe(shared_base(kind, dtype=dtype), (-1,))


@pytest.mark.parametrize("kind", CAN)
def test_whether_the_decoder_can_be_run_alone(kind):
    assert probe(shared_base(kind), (-1,)).split


@pytest.mark.parametrize("kind", ["llama-gqa", "mistral-sliding", "gemma2", "gpt2"])
def test_padding_under_eager_attention_in_float32(kind):
    base = shared_base(kind, attn_implementation="eager", dtype=torch.float32)
    found = agree(base, prompt(4), call={"max_new_tokens": 16}, tolerance=1e-3)
    assert found.got[CACHE].layers[0].keys.isfinite().all()


@pytest.mark.parametrize("rows", [1, 3])
def test_a_base_whose_weights_are_offloaded(rows, fallbacks):
    base = tiny_base("llama-gqa")
    expected = base.generate(**prompt(rows), max_new_tokens=9)
    model = FAMILIES[0].build(base)
    accelerate.cpu_offload(base, execution_device=torch.device("cpu"))
    assert base.get_input_embeddings().weight.is_meta
    got = model.generate(**prompt(rows), max_new_tokens=9, draft_tree=TREE)
    assert torch.equal(got, expected) and fallbacks == []


@pytest.mark.parametrize("rows", [1, 3])
def test_a_base_that_calls_something_else_its_decoder(rows, fallbacks):
    special = {"cls_token_id": 1, "sep_token_id": 2, "max_position_embeddings": 128, "local_attention": 8}
    config = AutoConfig.for_model("modernbert-decoder", **SIZES | SPECIAL | special)
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    assert isinstance(base.get_decoder(), torch.nn.Linear)
    inputs = {"input_ids": prompt(rows)["input_ids"].clamp_min(3)}
    expected = base.generate(**inputs, max_new_tokens=20)
    model = Drafted(base, FAMILIES[0].build(shared_base("llama")).drafter)
    assert torch.equal(model.generate(**inputs, max_new_tokens=20, draft_tree=TREE), expected)
    assert fallbacks == []
