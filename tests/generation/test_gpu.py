"""The loop on a GPU: skipped, visibly, where there is none."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from hf_drafthead.bases.probe import probe
from hf_drafthead.bases.releases import CACHE
from hf_drafthead.bases.slots import SlotCache
from hf_drafthead.generation import DraftTree
from hf_drafthead.generation.noise import NoiseTape
from tests.bases import VOCABULARY, tiny_base
from tests.families import FAMILIES

DEVICE = "cuda"
TREE = DraftTree([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def padded_prompt(rows):
    tokens = torch.randint(3, VOCABULARY, (rows, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    for row in range(1, rows):
        mask[row, :row] = 0
    return {"input_ids": (tokens * mask).cuda(), "attention_mask": mask.cuda()}


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "top_k": 20}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_exact_on_a_gpu(family, sampling, rows):
    model = family.build(tiny_base("llama-gqa").cuda())
    settings = {**padded_prompt(rows), "max_new_tokens": 40, "eos_token_id": None, **sampling}
    torch.manual_seed(7)
    expected = model.base.generate(**settings)
    state = torch.cuda.get_rng_state()
    torch.manual_seed(7)
    output = model.generate(**settings, return_dict_in_generate=True)
    assert torch.equal(output.sequences, expected)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert (output.accepted_lengths.sum(1) + 1).tolist() == [40] * rows


def test_one_draw_of_multinomial_is_the_argmax_over_exponential_noise():
    chances = torch.rand(5, 1000, device="cuda").softmax(-1)
    torch.manual_seed(3)
    drawn = torch.multinomial(chances, 1)[:, 0]
    torch.manual_seed(3)
    assert torch.equal((chances / NoiseTape(5, chances.device).noise(0, chances)).argmax(-1), drawn)


def test_prompts_on_the_cpu_are_answered_there():
    model = FAMILIES[0].build(tiny_base("llama").cuda())
    prompt = torch.randint(3, VOCABULARY, (1, 6))
    settings = {"max_new_tokens": 12, "eos_token_id": None}
    output = model.generate(prompt, **settings)
    assert output.device.type == "cpu"
    assert torch.equal(output, model.base.generate(prompt, **settings))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kernel", ["CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH"])
@torch.no_grad()
def test_nodes_in_half_precision_with_the_kernels_that_users_run(kernel, rows):
    sizes = {"hidden_size": 256, "intermediate_size": 256, "initializer_range": 0.1}  # heads of 64 numbers
    base = tiny_base("llama-gqa", dtype=torch.bfloat16, **sizes).to(DEVICE)
    exact = tiny_base("llama-gqa", dtype=torch.float32, **sizes).to(DEVICE)
    exact.load_state_dict(base.state_dict())
    generator = torch.Generator().manual_seed(1)
    past = torch.randint(3, VOCABULARY, (rows, 37), generator=generator).to(DEVICE)
    nodes = torch.randint(3, VOCABULARY, (rows, TREE.num_nodes), generator=generator).to(DEVICE)
    topology = TREE.topology(DEVICE)
    with sdpa_kernel([getattr(SDPBackend, kernel), SDPBackend.MATH], set_priority=True):
        reader = probe(base, (-1,))
        cache = SlotCache(rows, base.config.num_hidden_layers, 64, TREE.slots)
        reader(True, input_ids=past, **{CACHE: cache}, use_cache=True)
        cache.count(past.shape[1])
        found, _ = reader.nodes(nodes, topology, cache, cache.lengths[:, None] + topology.depths, None)
    for node, depth in enumerate(TREE.depths):
        text = torch.cat([past, nodes[:, topology.paths[0, node, : depth + 1]]], dim=1)
        expected = exact(text).logits[:, -1]
        assert (found[:, node] - expected).abs().max() < 0.05 * expected.abs().max()
