"""Tiny draft-head checkpoints on disk: a LLaMA that recites the alphabet, heads for it, a tokenizer of single bytes.

Fresh Medusa heads say again what the base says: wrong while the alphabet lasts, then right, for after z comes z.
"""

from itertools import pairwise
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_drafthead.modeling import HydraForCausalLM, MedusaForCausalLM

FAMILIES = {"medusa": MedusaForCausalLM, "hydra": HydraForCausalLM}
TREE = [[0], [1], [0, 0], [2], [0, 1], [0, 0, 0], [1, 0], [3], [0, 0, 1]]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """256 bytes, `<s>`, `</s>` and `<pad>`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", padding_side="left"
    )


def save_base(folder: Path) -> Path:
    """The base and its tokenizer under `folder`/base."""
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=128,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    base = LlamaForCausalLM(config)
    codes = tokenizer("abcdefghijklmnopqrstuvwxyz")["input_ids"]
    follow = {**{token: token for token in range(3, len(tokenizer))}, **dict(pairwise(codes))}
    directions = torch.nn.functional.normalize(torch.randn(len(tokenizer), config.hidden_size), dim=-1)
    with torch.no_grad():
        base.get_input_embeddings().weight.copy_(3 * directions)  # outweighs what the random layers add
        base.lm_head.weight.zero_()
        for token, next_token in follow.items():
            base.lm_head.weight[next_token] += directions[token]
    base.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    return folder / "base"


def save_all(folder: Path) -> Path:
    """The base, and heads of every family, each under its name."""
    base = save_base(folder)
    for family in FAMILIES:
        save_heads(folder, base, family)
    return folder


def save_heads(folder: Path, base: Path, family: str) -> Path:
    """Fresh heads of a family under `folder`/family, with the tokenizer and a tree of their own."""
    torch.manual_seed(1)
    model = FAMILIES[family].from_base(str(base), num_draft_heads=3)
    model.generation_config.draft_tree = TREE
    model.save_pretrained(folder / family)
    byte_tokenizer().save_pretrained(folder / family)
    return folder / family
