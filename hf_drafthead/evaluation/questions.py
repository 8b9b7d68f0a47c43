"""Questions to measure on: MT-Bench and Spec-Bench files, other JSON lines, or a data set by name.

A row is an object with `turns`, texts that are asked one after the other through the chat template, each after the
model's own answer to the one before; or with `prompt`, a text that is continued as it is. `category` names the group
that a row is reported under, `reference` the answer that its quality is judged by: a text, or for each turn a text or
several, any of which will do.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hf_drafthead.evaluation.loading import one_line

EXPECTED = (
    'expected an object with "turns", a list of texts to ask one after the other, or "prompt", a text to continue'
)


UNCATEGORISED = "uncategorised"
MT_BENCH = "mt_bench"  # as Spec-Bench calls the eight topics of MT-Bench, taken together
TOPICS = frozenset({"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"})
SPEC_BENCH_TASKS = frozenset({"translation", "summarization", "qa", "math_reasoning", "rag"})


@dataclass(frozen=True)
class Question:
    """One conversation, or one text to continue.

    turns: what the user says, in order; category: the group it is reported under; references: the answers to each turn
    that will do, as far as there are any; chat: whether the chat template applies; where: its place in the file, for
    messages.
    """

    turns: tuple[str, ...]
    category: str = UNCATEGORISED
    references: tuple[tuple[str, ...], ...] = ()
    chat: bool = False
    where: str = field(default="the prompt", compare=False)

    @property
    def text(self) -> str:
        """The first turn."""
        return self.turns[0]


def read_questions(source: str | Path, split: str | None = None) -> list[Question]:
    """The questions of a JSON lines file, or of a data set that `datasets.load_dataset` finds by this name.

    Args:
        source: the file, or the data set's name or folder.
        split: of the data set; by default its only one, or the one called `test`.

    Returns:
        in their order; the topics of MT-Bench are one category where the file is Spec-Bench's.

    Raises:
        OSError: there is neither such a file nor such a data set.
        ValueError: it holds no question, or a row that is none; the message names the row.
    """
    path = Path(source)
    if path.is_file():
        rows = _json_rows(path)
    elif path.suffix in (".jsonl", ".json"):
        raise OSError(f"there is no question file {str(source)!r}: give a JSON lines file, or a data set's name.")
    else:
        rows = _data_set_rows(str(source), split)
    questions = [question_of(row, where) for where, row in rows]
    if not questions:
        raise ValueError(f'{source} holds no prompt: write one {{"prompt": "..."}} or {{"turns": [...]}} per line.')
    return as_spec_bench_groups(questions)


def as_spec_bench_groups(questions: Sequence[Question]) -> list[Question]:
    """MT-Bench's topics as one task where Spec-Bench's other tasks stand beside them, as in its tables."""
    found = {question.category for question in questions}
    if not (found & SPEC_BENCH_TASKS and found <= SPEC_BENCH_TASKS | TOPICS):
        return list(questions)
    return [replace(one, category=MT_BENCH) if one.category in TOPICS else one for one in questions]


def question_of(row: Any, where: str) -> Question:
    """One row as a question.

    Args:
        row: as it was read.
        where: how a message shall name it.

    Raises:
        ValueError: it is of no known form, or a text in it is empty.
    """
    shown = json.dumps(row, ensure_ascii=False, default=str)
    shown = shown if len(shown) <= 60 else shown[:60] + "..."
    given: Any = row.get("turns", row.get("prompt")) if isinstance(row, dict) else None
    chat = isinstance(given, (list, tuple))
    turns = tuple(given) if chat else (given,)
    if not turns or not all(isinstance(turn, str) for turn in turns) or ("turns" in row and not chat):
        raise ValueError(f"{where} is {shown}: {EXPECTED}.")
    if not all(turn.strip() if chat else turn for turn in turns):
        raise ValueError(f"{where} is {shown}, a prompt that is empty: give the text that the model shall answer.")
    category = row.get("category")
    category = UNCATEGORISED if category in (None, "") else str(category)
    return Question(turns, category, _references(row.get("reference"), where), chat, where)


def check_template(tokenizer: Any, questions: Iterable[Question]) -> None:
    """Refuse conversations where nothing says how the base was taught to converse.

    Raises:
        ValueError: with the first question that needs a template.
    """
    chat = next((question for question in questions if question.chat), None)
    if chat is not None and not tokenizer.chat_template:
        raise ValueError(
            f"{chat.where} is a conversation, but the tokenizer at {tokenizer.name_or_path!r} has no chat template: "
            'give one with --chat-template FILE, or give texts to continue, {"prompt": "..."}.'
        )


def text_of(tokenizer: Any, question: Question, answers: Sequence[str]) -> str:
    """What the model is to continue: the prompt itself, or the conversation up to the next answer.

    A conversation holds the special tokens that its template writes: tokenize it without adding others.

    Args:
        tokenizer: its chat template applies to conversations.
        question: the user's side.
        answers: the model's answers so far.

    Raises:
        ValueError: the template refuses the conversation.
    """
    if not question.chat:
        return question.turns[0]
    messages = []
    for turn, answer in zip(question.turns, answers):
        messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": answer}]
    messages.append({"role": "user", "content": question.turns[len(answers)]})
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # whatever a template raises, it is the template that must be looked at
        raise ValueError(f"the chat template cannot take {question.where} ({one_line(error)}): mend it.") from error


def _references(given: Any, where: str) -> tuple[tuple[str, ...], ...]:
    by_turn = [given] if isinstance(given, str) else given or []
    several = [[one] if isinstance(one, str) else one for one in by_turn] if isinstance(by_turn, list) else [by_turn]
    if not all(isinstance(answers, list) and all(isinstance(text, str) for text in answers) for answers in several):
        raise ValueError(
            f'{where} has the "reference" {json.dumps(given, default=str)}: expected a text, or some per turn.'
        )
    return tuple(tuple(text for text in answers if text) for answers in several)


def _json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            yield f"{path} line {number}", json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} line {number} is not JSON ({error.msg}): write one object per line.") from None


def _data_set_rows(name: str, split: str | None) -> Iterator[tuple[str, Any]]:
    from datasets import load_dataset  # type: ignore[import-untyped]

    try:
        found = load_dataset(name)
    except (OSError, ValueError) as error:
        raise OSError(
            f"{name!r} is no question file, and no data set could be read there ({one_line(error)}): give a JSON lines "
            "file, or the name of a data set."
        ) from error
    chosen = split or (next(iter(found)) if len(found) == 1 else "test")
    if chosen not in found:
        asked = f"no split {split!r}" if split else "several splits"
        raise ValueError(f"the data set {name!r} has {asked}: choose one of {', '.join(found)} with --split.")
    for number, row in enumerate(found[chosen]):
        yield f"{name} row {number}", row
