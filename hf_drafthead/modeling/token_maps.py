"""Whether a base and a draft model mean the same by a token id."""

from collections.abc import Mapping
from typing import Any

from transformers import AutoTokenizer


def check_token_maps(config: Any, fetch: Mapping[str, Any]) -> None:
    """Compare the tokenizers of a base and a draft model id by id, as far as both have tokens.

    Where one of them has no tokenizer at hand, as models built in memory, their vocabularies must be of one size.

    Args:
        config: of a draft-model model: names, revisions and vocabularies of both.
        fetch: keyword arguments of every download.

    Raises:
        ValueError: they differ; the first token that does is named.
    """
    base, draft = config.base_model_name_or_path, config.draft_model_name_or_path
    ours = _tokens(base, config.base_model_revision, fetch)
    theirs = _tokens(draft, config.draft_model_revision, fetch)
    if ours is None or theirs is None:
        sizes = config.get_text_config().vocab_size, config.draft_text_config.vocab_size
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"the base has {sizes[0]} tokens and the draft model {sizes[1]}, and their tokenizers are not at hand "
                "to be compared: give both by name, with their tokenizers, or a draft model of the base's vocabulary."
            )
        return
    for token in sorted(ours.keys() & theirs.keys()):
        if ours[token] != theirs[token]:
            raise ValueError(
                f"the tokenizers of the base {base!r} and the draft model {draft!r} differ: token {token} is "
                f"{ours[token]!r} for the first and {theirs[token]!r} for the second; give a draft model with the "
                "base's tokenizer."
            )


def _tokens(name: str | None, revision: str | None, fetch: Mapping[str, Any]) -> dict[int, str] | None:
    """Every token by its id; None where there is no tokenizer."""
    if not name:
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision or "main", **fetch)
    except Exception:  # a folder without a tokenizer makes each kind of tokenizer raise in its own way
        return None
    return {token: text for text, token in tokenizer.get_vocab().items()}
