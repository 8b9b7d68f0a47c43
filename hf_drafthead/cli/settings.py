"""`--set NAME=VALUE` for `generate`: values of the wrong type are refused here, where the name is still known."""

from typing import Any

from hf_drafthead.cli.common import parse_options

NUMBERS = {"temperature", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff", "repetition_penalty"}
NUMBERS |= {"encoder_repetition_penalty", "length_penalty", "max_time", "posterior_threshold", "posterior_alpha"}
WHOLE = {"max_new_tokens", "min_new_tokens", "max_length", "min_length", "top_k", "no_repeat_ngram_size", "num_beams"}
WHOLE |= {"encoder_no_repeat_ngram_size", "num_return_sequences", "pad_token_id", "prompt_lookup_num_tokens"}
FLAGS = {"do_sample", "use_cache", "renormalize_logits", "remove_invalid_values"}


def parse_settings(pairs: list[str] | None) -> dict[str, Any]:
    """Settings of `generate` from NAME=VALUE pairs; a whole number where transformers asks for a float becomes one.

    Raises:
        ValueError: one is no such pair, or its value is of another type than the setting.
    """
    settings = parse_options(pairs or [])
    for name, value in settings.items():
        kind = type(value)
        if value is None:
            continue
        if name in NUMBERS and kind not in (int, float):
            raise ValueError(f"--set {name}={value}: expected a number.")
        if name in WHOLE and kind is not int:
            raise ValueError(f"--set {name}={value}: expected a whole number.")
        if name in FLAGS and kind is not bool:
            raise ValueError(f"--set {name}={value}: expected true or false.")
        if name in NUMBERS:
            settings[name] = float(value)
    return settings
