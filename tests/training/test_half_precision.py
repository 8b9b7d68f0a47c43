"""Heads learn in float32, whatever the base computes in: half precision has no room for small updates."""

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModel

from hf_drafthead.modeling.families import TRAINED, fresh_heads
from hf_drafthead.training.run import train_heads
from hf_drafthead.training.trainer import loss_of, recipe_of
from tests.bases import tiny_base
from tests.training.test_run import QUICK, written_place


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return written_place(tmp_path_factory.mktemp("half"), ("bfloat16", "float16"))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "family, dtype",
    [*((family, "bfloat16") for family in TRAINED), ("medusa", "float16"), ("eagle", "float16")],
)
def test_heads_of_a_base_in_half_precision_learn(family, dtype, place, tmp_path):
    arguments = {**QUICK, "max_steps": 6, "warmup_steps": 0, "save_steps": 1, "save_total_limit": 9}
    heads = tmp_path / "heads"
    fields = {"feature_layers": [0, 1]} if family.startswith(("eagle3", "peagle")) else {}  # the base has two layers
    arguments |= {"fields": fields, "load": {"dtype": "auto"}}
    trained = train_heads(str(place / dtype), family, str(place / "texts.jsonl"), heads, **arguments)
    first, last = (load_file(heads / f"checkpoint-{step}" / "model.safetensors") for step in (1, 6))
    assert {tensor.dtype for tensor in last.values() if tensor.is_floating_point()} == {torch.float32}
    # of a vocabulary only the tokens that occur are learnt
    of_tokens = ("embed_tokens.weight", "lm_head.weight", "markov.w1.weight", "_codebook.weight", "draft_tokens")
    learnt = [name for name in last if not name.endswith(of_tokens)]
    moved = torch.cat([(last[name] != first[name]).flatten() for name in learnt]).float().mean().item()
    assert moved > 0.9
    loaded = AutoModel.from_pretrained(heads)
    assert {parameter.dtype for parameter in loaded.drafter.parameters()} == {getattr(torch, dtype)}
    assert trained.summary["tokens_per_step"] >= 1


class Products(TorchDispatchMode):
    """Collects the types in which matrices are multiplied."""

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.dtypes.add(args[-1].dtype)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("draft_vocab_size", [None, 32])
@pytest.mark.parametrize("family", TRAINED)
def test_all_products_of_a_step_are_in_half_precision(family, draft_vocab_size):
    shared = {"share_lm_head": True} if hasattr(TRAINED[family].model_class.config_class, "share_lm_head") else {}
    layers = {"feature_layers": [0, 1]} if family.startswith(("eagle3", "peagle")) else {}
    base = tiny_base("llama", dtype=torch.bfloat16)
    model = fresh_heads(family, base, draft_vocab_size=draft_vocab_size, **shared, **layers)
    model.drafter.float().requires_grad_(True)
    ids = torch.randint(0, 32, (2, 16), generator=torch.Generator().manual_seed(0))
    with Products() as products:
        loss_of(model, recipe_of(model))(model.train(), {"input_ids": ids, "labels": ids.clone()})[0].backward()
    assert products.dtypes == {torch.bfloat16}
