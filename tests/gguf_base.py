"""A LLaMA of 30,000 parameters with its tokenizer, written as a GGUF file by the package gguf."""

from pathlib import Path

import torch

WORDS = ["<unk>", "<start>", "<end>", "a", "b", "c", "d", "Ġ", "Ġa", "ab"]
TEMPLATE = (
    "{% for message in messages %}<start>{{ message['role'] }} {{ message['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant {% endif %}"
)


def write_gguf(file: Path, seed: int = 0, architecture: str = "llama") -> None:
    """Random weights in float32; hidden size 32, two layers, tied to nothing."""
    import gguf

    hidden, inner, heads, layers = 32, 64, 4, 2
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_name("Tiny Llama of a test")
    writer.add_context_length(256)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_block_count(layers)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(WORDS) + 256)
    byte_words = [chr(0x100 + byte) for byte in range(256)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(WORDS + byte_words)
    writer.add_token_types([3, 3, 3] + [1] * (len(WORDS) + 253))
    writer.add_token_merges(["Ġ a", "a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    generator = torch.Generator().manual_seed(seed)

    def add(name: str, *shape: int, scale: float = 0.2) -> None:
        writer.add_tensor(name, (torch.randn(*shape, generator=generator) * scale).numpy())

    vocabulary = len(WORDS) + 256
    add("token_embd.weight", vocabulary, hidden)
    add("output.weight", vocabulary, hidden)
    writer.add_tensor("output_norm.weight", torch.ones(hidden).numpy())
    for layer in range(layers):
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{norm}.weight", torch.ones(hidden).numpy())
        for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"blk.{layer}.{part}.weight", hidden, hidden)
        add(f"blk.{layer}.ffn_gate.weight", inner, hidden)
        add(f"blk.{layer}.ffn_up.weight", inner, hidden)
        add(f"blk.{layer}.ffn_down.weight", hidden, inner)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
