"""What every setting and argument of transformers' `generate` does here: each is tried on the base and on the model.

    python -m tests.callers.table docs/generate.md     # writes the table between its two comments

Every field of `GenerationConfig` and every argument of `generate` has an entry in SETTINGS or ARGUMENTS: what it is
tried with, or why it cannot be tried. A release of transformers that adds one fails the tests until it is decided here.
"""

import inspect
import logging
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from transformers import (
    AutoModel,
    AutoTokenizer,
    CompileConfig,
    GenerationConfig,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    StoppingCriteriaList,
    WatermarkingConfig,
)
from transformers.generation import BaseStreamer, MaxLengthCriteria

from hf_drafthead import zoo
from hf_drafthead.generation import programs

PROMPTS = ["def read(self, name):\n    ", "import os, sys\n\nclass Stack:\n    def"]
NEW_TOKENS = 16
FALLBACK = re.compile(r"Draft heads are not used, the base decodes by itself: (.*)\.$")
SAMPLED = {"do_sample": True, "temperature": 0.7}


@dataclass(frozen=True)
class Tried:
    """One entry.

    call: the arguments it is tried with; what makes them afresh from the base, where they keep a state; or a text: why
    it is not tried. rows: prompts of the batch.
    """

    call: dict[str, Any] | Callable[[Any], dict[str, Any]] | str
    rows: int = 2


class Collects(BaseStreamer):
    """A streamer that keeps what it is shown."""

    def __init__(self) -> None:
        self.shown: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.shown.append(value.tolist())

    def end(self) -> None:
        self.shown.append("end")


def own_loop(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
    return torch.cat([input_ids, input_ids[:, :3]], dim=1)


def newline(base) -> int:
    return tools()[1].convert_tokens_to_ids(tools()[1].tokenize("\n"))[0]


def long_processors() -> LogitsProcessorList:
    return LogitsProcessorList([MinLengthLogitsProcessor(30, 0)])


def negative_prompt() -> dict[str, Any]:
    return {"guidance_scale": 1.5, "negative_prompt_ids": encoded(2)["input_ids"][:, -3:]}


def letters(base) -> list[int]:
    return list(range(40, 400))


SETTINGS: dict[str, Tried] = {
    "max_length": Tried({"max_length": 40, "max_new_tokens": None}),
    "max_new_tokens": Tried({"max_new_tokens": 7}),
    "min_length": Tried({"min_length": 30}),
    "min_new_tokens": Tried({"min_new_tokens": 20}),
    "early_stopping": Tried({"early_stopping": True, "num_beams": 2}),
    "max_time": Tried({"max_time": 1e6}),
    "stop_strings": Tried(lambda base: {"stop_strings": ["return"], "tokenizer": tools()[1]}),
    "do_sample": Tried({"do_sample": True}),
    "num_beams": Tried({"num_beams": 2}),
    "use_mtp": Tried({"use_mtp": True}),
    "use_cache": Tried({"use_cache": False}),
    "cache_implementation": Tried({"cache_implementation": "static"}),
    "cache_config": Tried({"cache_config": {"backend": "quanto"}}),
    "max_cache_len": Tried({"max_cache_len": 100}),
    "temperature": Tried({"do_sample": True, "temperature": 0.5}),
    "top_k": Tried({**SAMPLED, "top_k": 5}),
    "top_p": Tried({**SAMPLED, "top_p": 0.8}),
    "min_p": Tried({**SAMPLED, "min_p": 0.05}),
    "top_h": Tried({**SAMPLED, "top_h": 0.5}),
    "typical_p": Tried({**SAMPLED, "typical_p": 0.8}),
    "epsilon_cutoff": Tried({**SAMPLED, "epsilon_cutoff": 1e-3}),
    "eta_cutoff": Tried({**SAMPLED, "eta_cutoff": 1e-3}),
    "repetition_penalty": Tried({"repetition_penalty": 1.2}),
    "encoder_repetition_penalty": Tried({"encoder_repetition_penalty": 1.2}),
    "length_penalty": Tried({"length_penalty": 0.5, "num_beams": 2}),
    "no_repeat_ngram_size": Tried({"no_repeat_ngram_size": 2}),
    "bad_words_ids": Tried(lambda base: {"bad_words_ids": [[newline(base)]]}),
    "renormalize_logits": Tried({**SAMPLED, "renormalize_logits": True}),
    "forced_bos_token_id": Tried({"forced_bos_token_id": 5}),
    "forced_eos_token_id": Tried({"forced_eos_token_id": 0}),
    "remove_invalid_values": Tried({"remove_invalid_values": True}),
    "exponential_decay_length_penalty": Tried({"exponential_decay_length_penalty": (5, 1.2)}),
    "suppress_tokens": Tried(lambda base: {"suppress_tokens": [newline(base)]}),
    "begin_suppress_tokens": Tried(lambda base: {"begin_suppress_tokens": [newline(base)]}),
    "sequence_bias": Tried(lambda base: {"sequence_bias": [[[newline(base)], -5.0]]}),
    "token_healing": Tried(lambda base: {"token_healing": True, "tokenizer": tools()[1]}, rows=1),
    "guidance_scale": Tried({"guidance_scale": 1.5}),
    "watermarking_config": Tried(lambda base: {"watermarking_config": WatermarkingConfig(bias=2.0), **SAMPLED}),
    "num_return_sequences": Tried({**SAMPLED, "num_return_sequences": 2}),
    "output_attentions": Tried({"output_attentions": True, "return_dict_in_generate": True}),
    "output_hidden_states": Tried({"output_hidden_states": True, "return_dict_in_generate": True}),
    "output_scores": Tried({"output_scores": True, "return_dict_in_generate": True}),
    "output_logits": Tried({"output_logits": True, "return_dict_in_generate": True}),
    "return_dict_in_generate": Tried({"return_dict_in_generate": True}),
    "pad_token_id": Tried(lambda base: {"pad_token_id": 3, "eos_token_id": newline(base)}),
    "bos_token_id": Tried({"bos_token_id": 1}),
    "eos_token_id": Tried(lambda base: {"eos_token_id": [newline(base), 0]}),
    "encoder_no_repeat_ngram_size": Tried({"encoder_no_repeat_ngram_size": 2}),
    "decoder_start_token_id": Tried({"decoder_start_token_id": 1}),
    "is_assistant": Tried({"is_assistant": True}),
    "num_assistant_tokens": Tried({"num_assistant_tokens": 3}),
    "num_assistant_tokens_schedule": Tried({"num_assistant_tokens_schedule": "constant"}),
    "assistant_confidence_threshold": Tried({"assistant_confidence_threshold": 0.5}),
    "prompt_lookup_num_tokens": Tried({"prompt_lookup_num_tokens": 3}, rows=1),
    "max_matching_ngram_size": Tried({"max_matching_ngram_size": 2}),
    "assistant_early_exit": Tried({"assistant_early_exit": 1}, rows=1),
    "assistant_lookbehind": Tried({"assistant_lookbehind": 5}),
    "target_lookbehind": Tried({"target_lookbehind": 5}),
    "assistant_ensemble_weight": Tried({"assistant_ensemble_weight": 0.5}),
    "speculation_type": Tried({"speculation_type": "assisted"}),
    "compile_config": Tried(lambda base: {"compile_config": CompileConfig()}),
    "disable_compile": Tried({"disable_compile": True}),
    "continuous_batching_config": Tried("a setting of `generate_batch`, not of `generate`"),
    "low_memory": Tried({"low_memory": True}),
    "penalty_alpha": Tried({"penalty_alpha": 0.5}),
    "dola_layers": Tried({"dola_layers": "low"}),
    "diversity_penalty": Tried({"diversity_penalty": 0.5, "num_beams": 2, "num_beam_groups": 2}),
    "num_beam_groups": Tried({"num_beam_groups": 2, "num_beams": 2}),
    "constraints": Tried({"constraints": []}),
    "force_words_ids": Tried({"force_words_ids": [[5]], "num_beams": 2}),
    "prefill_chunk_size": Tried({"prefill_chunk_size": 4}),
    "_from_model_config": Tried("set by transformers itself"),
    "transformers_version": Tried("written by transformers itself"),
}
ARGUMENTS: dict[str, Tried] = {
    "inputs": Tried(lambda base: {"inputs": encoded(2)["input_ids"], "input_ids": None}),
    "generation_config": Tried(lambda base: {"generation_config": GenerationConfig(max_new_tokens=9)}),
    "logits_processor": Tried(lambda base: {"logits_processor": long_processors()}),
    "stopping_criteria": Tried(lambda base: {"stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(30)])}),
    "prefix_allowed_tokens_fn": Tried(lambda base: {"prefix_allowed_tokens_fn": lambda row, ids: letters(base)}),
    "synced_gpus": Tried({"synced_gpus": False}),
    "assistant_model": Tried(lambda base: {"assistant_model": base}, rows=1),
    "streamer": Tried(lambda base: {"streamer": Collects()}, rows=1),
    "negative_prompt_ids": Tried(lambda base: negative_prompt()),
    "negative_prompt_attention_mask": Tried(
        lambda base: {**negative_prompt(), "negative_prompt_attention_mask": torch.ones(2, 3, dtype=torch.long)}
    ),
    "custom_generate": Tried({"custom_generate": own_loop}),
    "use_model_defaults": Tried({"use_model_defaults": True}),
}
NOT_ARGUMENTS = {"self", "kwargs"}


@dataclass
class Outcome:
    """What came of one entry: `drafts`, the reason why the base decoded, or the error that both raise."""

    name: str
    tried: str
    outcome: str
    differences: list[str] = field(default_factory=list)


@cache
def tools() -> tuple[Any, Any]:
    """The bundled Medusa model in float64, and its tokenizer."""
    path = zoo.path("medusa")
    return AutoModel.from_pretrained(path, dtype=torch.float64).eval(), AutoTokenizer.from_pretrained(path)


def encoded(rows: int) -> dict[str, torch.Tensor]:
    return dict(tools()[1](PROMPTS[:rows], return_tensors="pt", padding=True, padding_side="left"))


@contextmanager
def fallback_reasons() -> Iterator[list[str]]:
    """Why the base decoded by itself, as the library warns."""
    transformers.utils.logging.warning_once.cache_clear()
    reasons: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: reasons.extend(FALLBACK.findall(record.getMessage()))  # type: ignore[method-assign]
    logger = logging.getLogger("hf_drafthead")
    logger.addHandler(handler)
    try:
        yield reasons
    finally:
        logger.removeHandler(handler)


def fields_there_are() -> list[str]:
    return list(vars(GenerationConfig()))


def arguments_there_are() -> list[str]:
    parameters = inspect.signature(transformers.GenerationMixin.generate).parameters
    return [name for name in parameters if name not in NOT_ARGUMENTS]


def outcome(name: str, tried: Tried) -> Outcome:
    """Try one entry on the base and on the model, and compare all that they return."""
    if isinstance(tried.call, str):
        return Outcome(name, "", tried.call)
    model, _ = tools()
    results, shown = [], {}
    for one in (model.base, model):
        call = dict(tried.call) if isinstance(tried.call, dict) else tried.call(model.base)
        shown = {key: value for key, value in call.items() if value is not None}
        call = {"max_new_tokens": NEW_TOKENS, "return_dict_in_generate": True, **encoded(tried.rows), **call}
        if "generation_config" in call:
            del call["max_new_tokens"]
        torch.manual_seed(0)
        # a compiler takes long and changes nothing: what is tried is the call, `test_runner` compiles
        with fallback_reasons() as reasons, patch.object(programs, "compiled", lambda function, config: function):
            try:
                result = one.generate(**{key: value for key, value in call.items() if value is not None})
            except Exception as error:  # what the base refuses is to be refused alike, whatever it is
                result = error
        results.append((result, torch.get_rng_state(), getattr(call.get("streamer"), "shown", None), reasons))
    (expected, *_), (got, _, _, reasons) = results
    settings = ", ".join(f"`{key}={written_out(value)}`" for key, value in shown.items())
    if isinstance(expected, Exception):
        found = Outcome(name, settings, f"the base refuses it: {type(expected).__name__}")
        if type(got) is not type(expected):
            found.differences.append(f"the base raises {expected!r}, the model {got!r:.300}")
        return found
    drafted = getattr(got, "accepted_lengths", None) is not None
    what = "drafts" if drafted and not reasons else "; ".join(reasons) or "nothing was drafted"
    found = Outcome(name, settings, what)
    if isinstance(got, Exception):
        found.differences.append(f"the model raises {got!r}")
        return found
    (_, state, stream, _), (_, own_state, own_stream, _) = results
    if not torch.equal(state, own_state):
        found.differences.append("the generator is left in another state")
    theirs, ours = ([t for s in one or () if s != "end" for t in flat(s)] for one in (stream, own_stream))
    if theirs != ours:
        found.differences.append("the streamer is shown other tokens")
    found.differences += differences(expected, got)
    return found


def written_out(value: Any) -> str:
    """A setting as the table shows it: plain values as they are written, others by the names of their types."""
    if isinstance(value, (LogitsProcessorList, StoppingCriteriaList)):
        return f"[{', '.join(type(one).__name__ for one in value)}]"
    if isinstance(value, (int, float, str, list, tuple, dict)):
        return repr(value)
    return "a function" if inspect.isfunction(value) else type(value).__name__


def flat(value: Any) -> list[int]:
    return [token for part in value for token in flat(part)] if isinstance(value, list) else [value]


def differences(expected: Any, got: Any) -> list[str]:
    """Which of the base's outputs the model's do not have alike."""
    if isinstance(expected, torch.Tensor):
        return [] if isinstance(got, torch.Tensor) and torch.equal(expected, got) else ["other tokens"]
    found = [] if torch.equal(expected.sequences, got.sequences) else ["other tokens"]
    for name in ("scores", "logits"):
        theirs, ours = expected.get(name), got.get(name)
        if (theirs is None) != (ours is None) or (theirs is not None and len(theirs) != len(ours)):
            found.append(f"other {name}")
        elif theirs is not None and not all(torch.allclose(a, b) for a, b in zip(theirs, ours)):
            found.append(f"other {name}")
    for name in ("hidden_states", "attentions"):
        if (expected.get(name) is None) != (got.get(name) is None):
            found.append(f"no {name}")
    return found


def rows(entries: dict[str, Tried], there: list[str]) -> list[str]:
    """The lines of the table for the entries that the installed transformers has."""
    outcomes = [outcome(name, entries[name]) for name in there if not name.startswith("_")]
    if wrong := {found.name: found.differences for found in outcomes if found.differences}:
        raise AssertionError(wrong)
    return [f"| `{found.name}` | {found.tried} | {found.outcome} |" for found in outcomes]


def table() -> str:
    """Both tables, as Markdown."""
    head = "| {} | tried with | what happens |\n|---|---|---|"
    return "\n".join(
        [
            head.format("setting"),
            *rows(SETTINGS, fields_there_are()),
            "",
            head.format("argument"),
            *rows(ARGUMENTS, arguments_there_are()),
        ]
    )


BEGIN, END = "<!-- tried: python -m tests.callers.table docs/generate.md -->", "<!-- end of what was tried -->"


def written(page: str, text: str) -> str:
    """The page with this text between its two comments."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(written(path.read_text(encoding="utf-8"), table()), encoding="utf-8")
