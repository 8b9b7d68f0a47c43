"""The zoo's tokenizer, a byte-level BPE trained on the corpus, and the packing of texts into rows.

Every row starts with ``<|begin|>``, as the tokenizer puts it in front of every prompt, so a prompt cut from the middle
of a file looks to the base like any row it was trained on. Files follow one another, each closed by ``<|end|>``.
"""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from .corpus import SourceFile

BOS, EOS, PAD = "<|begin|>", "<|end|>", "<|pad|>"  # strings that no file of the library contains


def train_tokenizer(files: list[SourceFile], vocab_size: int, max_length: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE that starts every prompt with ``<|begin|>`` and pads left.

    Args:
        files: the training text.
        vocab_size: tokens, specials included; at least 259: 256 bytes and three special tokens.
        max_length: most tokens the model can hold.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((file.text for file in files), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        padding_side="left",
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


def pack(tokenizer: PreTrainedTokenizerFast, files: list[SourceFile], length: int) -> torch.Tensor:
    """Join the files and cut them into rows, each with ``<|begin|>`` in front; what does not fill a row is dropped.

    Returns:
        LongTensor (rows, length).
    """
    encoded = tokenizer([file.text for file in files], add_special_tokens=False, verbose=False)["input_ids"]
    stream = torch.tensor([token for tokens in encoded for token in [*tokens, tokenizer.eos_token_id]])
    rows = stream[: len(stream) // (length - 1) * (length - 1)].view(-1, length - 1)
    return torch.cat([torch.full((len(rows), 1), tokenizer.bos_token_id), rows], dim=1)
