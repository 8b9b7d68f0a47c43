"""One call of `generate`: its prompts as token ids, the methods that can answer them, and what came of it.

Shapes: B rows, T prompt tokens, L tokens of a sequence, S steps.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers import CompileConfig

from hf_drafthead.data.texts import frame
from hf_drafthead.evaluation.questions import Question, need_template, text_of
from hf_drafthead.generation.batch import with_room
from hf_drafthead.generation.tree import DraftTree
from hf_drafthead.modeling.files import refusing
from hf_drafthead.trees.rank_paths import PAD, TOKENS_ALONE, left_padded

BASE, HEADS, COMPILED = "base", "heads", "compiled"
PROMPT_LOOKUP = "prompt-lookup"
LOOKUP_TOKENS = 10  # guesses per step, as in the documentation of transformers
CAPTURED = {"cache_implementation": "static"}  # settings under which the steps of draft heads are compiled

# takes the prompts and the settings of `generate`, returns its output
Method = Callable[[Mapping[str, torch.Tensor], Mapping[str, Any]], Any]


def decoding_methods(
    model: Any,
    tokenizer: Any,
    *,
    tree: str | DraftTree | None = None,
    acceptance: Mapping[str, Any] | None = None,
    captured: bool = False,
    compare: Sequence[str] = (),
) -> dict[str, Method]:
    """The base, the heads, and other methods by name, in the order in which they are run.

    `acceptance` holds settings that only the heads are given; `prompt_lookup_num_tokens=0` copies nothing, whatever
    the calibration says. `captured`: whether the heads' steps are compiled. `compare`: `prompt-lookup`,
    which decodes one prompt at a time; `compiled`, the base with a static cache under `torch.compile`; else a
    ValueError.
    """
    base, only_heads = model.base, {**(CAPTURED if captured else {}), **(acceptance or {})}
    if only_heads.get("prompt_lookup_num_tokens") == 0:
        del only_heads["prompt_lookup_num_tokens"]
        entries = getattr(model.generation_config, "calibration", None) or []
        only_heads |= {"calibration": [{**entry, "lookup": 0} for entry in entries]} if entries else {}
    methods: dict[str, Method] = {
        BASE: _of_base(base, tokenizer, {}),
        HEADS: lambda inputs, settings: draft(model, tree, inputs, {**settings, **only_heads}, tokenizer),
    }
    for name in compare:
        if name == PROMPT_LOOKUP:
            more: dict[str, Any] = {"prompt_lookup_num_tokens": LOOKUP_TOKENS}
        elif name == COMPILED:
            config = CompileConfig()
            config._compile_all_devices = True  # else only a GPU's forward is compiled
            more = {"cache_implementation": "static", "compile_config": config}
        else:
            raise ValueError(f"--compare {name!r} is not known: expected {PROMPT_LOOKUP} or {COMPILED}.")
        methods[name] = _of_base(base, tokenizer, more)
    return methods


def _of_base(base: Any, tokenizer: Any, more: Mapping[str, Any]) -> Method:
    generate = with_room(base.generate)  # as the heads' `generate` has it
    return lambda inputs, settings: generate(**inputs, **{**as_tokens(base, settings, tokenizer), **more})


def sampling(temperature: float | None, lookup: int | None = None) -> dict[str, Any]:
    """Settings of `generate` for a temperature, 0 being greedy, and for copied tokens; None leaves the model's own."""
    settings: dict[str, Any] = {} if temperature is None else {"do_sample": temperature > 0}
    settings |= {"temperature": temperature} if temperature else {}
    return settings | ({} if lookup is None else {"prompt_lookup_num_tokens": lookup})


def as_tokens(model: Any, settings: Mapping[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Settings of a call that returns the tokens of one text for each prompt, whatever the model's generation config:
    with the tokenizer where they need it, and no pad token that the base cannot embed."""
    effective = {**vars(model.generation_config), **settings}
    call = {**settings, **TOKENS_ALONE}
    if tokenizer is not None and (effective.get("stop_strings") or effective.get("token_healing")):
        call["tokenizer"] = tokenizer
    if (effective.get("pad_token_id") or 0) >= len(model.get_input_embeddings().weight):
        call["pad_token_id"] = PAD
    return call


def draft(
    model: Any,
    tree: str | DraftTree | None,
    inputs: Mapping[str, torch.Tensor],
    settings: Mapping[str, Any],
    tokenizer: Any = None,
) -> Any:
    """One call of the heads, with what they accepted; None is the model's own tree."""
    chosen = {} if tree is None else {"draft_tree": tree}
    call = {**as_tokens(model, settings, tokenizer), **chosen, "return_dict_in_generate": True}
    return model.generate(**inputs, **call)


def drafted(output: Any) -> bool:
    """Whether the heads drafted it; False where the base decoded by itself."""
    return getattr(output, "accepted_lengths", None) is not None


def steps_of(output: Any) -> torch.Tensor:
    """`accepted_lengths` (B, S) of one output; without steps where the base decoded by itself."""
    if not drafted(output):
        return torch.zeros(len(getattr(output, "sequences", output)), 0, dtype=torch.long)
    return output.accepted_lengths.cpu()


def batched(questions: Sequence[Question], batch_size: int) -> list[list[Question]]:
    """The questions in batches of one category each; a ValueError where there is none, or the size is below 1."""
    if not questions:
        raise ValueError("there is no prompt to measure on: give at least one.")
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}: expected at least 1.")
    groups: dict[Any, list[Question]] = {}
    for question in questions:
        groups.setdefault((question.category, question.chat), []).append(question)
    return [group[i : i + batch_size] for group in groups.values() for i in range(0, len(group), batch_size)]


def encode(model: Any, tokenizer: Any, texts: Sequence[str], *, special_tokens: bool = True) -> dict[str, torch.Tensor]:
    """The texts as `input_ids` and `attention_mask` (B, T), padded on the left, on the base's device. The tokenizer
    adds its `special_tokens` in front; what some add behind every text is left out, for the text goes on. A ValueError
    for an empty text, or a token that the base does not embed."""
    if not all(texts):
        raise ValueError("the prompt is empty: give the text to continue.")
    with refusing(ValueError, "the prompt is not UTF-8 text", "convert it.", of=UnicodeError):
        "".join(texts).encode()
    rows = tokenizer(list(texts), add_special_tokens=special_tokens)["input_ids"]
    if special_tokens and (ending := frame(tokenizer)[1]):
        rows = [row[: -len(ending)] if row[-len(ending) :] == ending else row for row in rows]
    embedded = len(model.base.get_input_embeddings().weight)
    if (most := max(max(row, default=0) for row in rows)) >= embedded:
        raise ValueError(
            f"the prompt has the token {tokenizer.convert_ids_to_tokens(most)!r}, number {most} of the tokenizer, but "
            f"the base embeds {embedded}: use the tokenizer that the base was trained with."
        )
    pad = tokenizer.pad_token_id
    return left_padded(model, [torch.tensor(row) for row in rows], PAD if pad is None or pad >= embedded else pad)


def encode_all(
    model: Any, tokenizer: Any, batches: Sequence[Sequence[Question]], max_new_tokens: int
) -> list[dict[str, torch.Tensor]]:
    """The first turn of every question, batch by batch; a ValueError for a prompt that is empty or leaves the base no
    room for `max_new_tokens`, or a conversation without a chat template."""
    for chat in [question for batch in batches for question in batch if question.chat]:
        need_template(tokenizer, chat.where)
    inputs = []
    for batch in batches:
        inputs.append(encode_turn(model, tokenizer, batch, [()] * len(batch)))
        prompt_lengths = inputs[-1]["attention_mask"].sum(1)
        for question, length in zip(batch, prompt_lengths.tolist()):
            check_room(model, length, max_new_tokens, f"{question.where}: ")
    return inputs


def encode_turn(
    model: Any, tokenizer: Any, batch: Sequence[Question], answers: Sequence[Sequence[str]]
) -> dict[str, torch.Tensor]:
    """The next turn of each question of a batch, after the answers so far."""
    texts = [text_of(tokenizer, question, so_far) for question, so_far in zip(batch, answers)]
    return encode(model, tokenizer, texts, special_tokens=not batch[0].chat)


def positions_of(model: Any) -> int | None:
    """The positions that the base was made for; None where its config names no limit."""
    return getattr(model.base.config.get_text_config(), "max_position_embeddings", None)


def has_room(model: Any, length: int, max_new_tokens: int) -> bool:
    """Whether the base has positions for a prompt of `length` tokens and the new ones."""
    positions = positions_of(model)
    return positions is None or length + max_new_tokens <= positions


def check_room(model: Any, length: int, max_new_tokens: int, where: str = "") -> None:
    """Raise a ValueError, which begins with `where`, for a prompt that leaves the base no room for its answer."""
    if not has_room(model, length, max_new_tokens):
        what = f"a prompt of {length} tokens and {max_new_tokens} new ones exceed the base's {positions_of(model)}"
        raise ValueError(f"{where}{what} positions: shorten the prompt, or ask for fewer tokens.")


def new_rows(
    model: Any, inputs: Mapping[str, torch.Tensor], sequences: torch.Tensor, settings: Mapping[str, Any] | None = None
) -> list[list[int]]:
    """The tokens that were generated in each row of `sequences` (B, L), up to and including its own end of sequence."""
    ends = (settings or {}).get("eos_token_id", model.base.generation_config.eos_token_id)
    ends = torch.tensor(ends if isinstance(ends, list) else [] if ends is None else [ends], device=sequences.device)
    generated = sequences[:, inputs["input_ids"].shape[1] :]
    is_end = torch.isin(generated, ends)
    counts = (is_end.cumsum(1) - is_end.long() == 0).sum(1)
    return [row[:count].tolist() for row, count in zip(generated, counts.tolist())]
