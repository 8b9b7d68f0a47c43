"""Which draft trees are fastest for the zoo's heads on the machine that builds it: the entries of a calibration.

Shapes: P prompt tokens.
"""

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from hf_drafthead.trees.calibrate import calibrate

from .corpus import read_corpus
from .prompts import BUNDLED, cut_prompts

BATCH_SIZES = (1, 2, 4, 8)
CAPTURED_BATCH_SIZES = (1,)  # minutes each
MORE_PROMPTS, NEW_TOKENS = 240, 128


def more_prompts(tokenizer: PreTrainedTokenizerBase, longest: int) -> list[torch.Tensor]:
    """Held-out prompts (P,) besides those of `prompts.jsonl`.

    Args:
        tokenizer: the base's.
        longest: P at most; of a longer prompt its end is taken.
    """
    cut = cut_prompts(read_corpus(), BUNDLED + MORE_PROMPTS)[BUNDLED:]
    return [tokenizer(one["prompt"], return_tensors="pt")["input_ids"][0, -longest:] for one in cut]


def calibrate_heads(folder: Path, *, captured: bool, again: bool = False) -> None:
    """Calibrate heads for all batch sizes, on every second one of `more_prompts`: the others are left to measure on.

    Args:
        folder: of the heads, whose generation config gets the entries.
        captured: for compiled steps.
        again: measure also what is there already.
    """
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    longest = model.base.config.max_position_embeddings - NEW_TOKENS
    calibrate(
        model,
        more_prompts(AutoTokenizer.from_pretrained(folder), longest)[::2],
        batch_sizes=_batch_sizes(captured),
        captured=captured,
        new_tokens=NEW_TOKENS,
        resume=not again,
        keep=lambda entry: model.generation_config.save_pretrained(folder),
    )


def is_calibrated(folder: Path, *, captured: bool) -> bool:
    """Whether there is an entry for each of the batch sizes."""
    found = json.loads((folder / "generation_config.json").read_text()).get("calibration", [])
    compiled = {"compiled"} if captured else {"eager", "recorded"}
    return {one["batch_size"] for one in found if one["execution"] in compiled} >= set(_batch_sizes(captured))


def _batch_sizes(captured: bool) -> tuple[int, ...]:
    return CAPTURED_BATCH_SIZES if captured else BATCH_SIZES
