"""Rows of chats or text as token ids and labels, and these as examples of the wanted length."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from datasets import Features, List, Value

from hf_drafthead.data.chats import Chat, Refused, repaired
from hf_drafthead.training.objectives import IGNORED
from hf_drafthead.training.templates import ChatEncoder, encode_span, frame, without_post_processor

TOKENS = Features({"input_ids": List(Value("int32")), "labels": List(Value("int32"))})
ENCODED = Features(
    {
        **TOKENS,
        "mapped": List(Value("string")),
        "unused": List(Value("string")),
        "refused": Value("string"),
        "cut": Value("bool"),
        "split": Value("bool"),
    }
)
ANSWER_THEM = "generate answers with `hf-drafthead distill` and train on them"
OTHER_TOKENS = "token ids of another tokenizer ignored"


class Encode:
    """Batches of rows to token ids and labels, one for one; a refused row has the reason instead."""

    def __init__(
        self, tokenizer: Any, max_length: int | None, positions: int | None, packing: bool, vocab_size: int | None
    ) -> None:
        self.tokenizer, self.max_length, self.positions, self.packing = tokenizer, max_length, positions, packing
        self.vocab_size = vocab_size
        self._bare = without_post_processor(tokenizer)
        self._chats: ChatEncoder | None = None  # made at the first chat: plain text needs no chat template
        self.beginning, self._ending = frame(tokenizer)
        known = (
            tokenizer.backend_tokenizer.to_str(),
            repr(tokenizer.chat_template),
            repr(tokenizer.special_tokens_map),
        )
        self.known_by = (*known, max_length, positions, packing, vocab_size)

    def __call__(self, batch: Mapping[str, Sequence[Any]]) -> dict[str, list]:
        out: dict[str, list] = {name: [] for name in ENCODED}
        for values in zip(*(batch[name] for name in batch)):
            for name, value in self._row(dict(zip(batch, values))).items():
                out[name].append(value)
        return out

    def _row(self, row: dict[str, Any]) -> dict[str, Any]:
        name = f"{row['source']} row {row['row']}".strip()
        cut = split = False
        mapped: list[str] = []
        refused: str | None = None
        try:
            if row["messages"] is not None:
                if self._chats is None:
                    self._chats = ChatEncoder(self.tokenizer)
                chat = self._chats.fit(self._readable(repaired(row["messages"], row["tools"]).answered()))
                mapped = list(chat.mapped)
                ids, labels = self._chats.encode(chat)
            else:
                ids, labels = self._text(row)
            refuse_unknown(self.tokenizer, ids, self.vocab_size)
            if self.max_length is None and self.positions is not None and len(ids) > self.positions:
                raise ValueError(
                    f"{name} has {len(ids)} tokens, but the base has {self.positions} positions: "
                    f"set max_length to cut such rows, at most {self.positions}."
                )
            if self.max_length is not None and len(ids) > self.max_length and not self.packing:
                cut, split = row["messages"] is not None, row["messages"] is None
                if cut:
                    ids, labels = ids[: self.max_length], labels[: self.max_length]
            if all(label == IGNORED for label in labels):
                raise Refused(
                    f"no answer within the first {self.max_length} tokens" if cut else "it has no token to train on"
                )
        except Refused as reason:
            ids, labels, mapped, cut, split = [], [], [], False, False
            refused = f"{name}: {reason}"
        return {
            "input_ids": ids,
            "labels": labels,
            "mapped": mapped,
            "unused": row["unused"],
            "refused": refused,
            "cut": cut,
            "split": split,
        }

    def _readable(self, chat: Chat) -> Chat:
        """The chat without token ids, unless they spell its answers: those of another tokenizer do not."""
        answers = [turn["content"] for turn in chat.messages if turn["role"] == "assistant"]
        if all(ids is None or self._spells(ids, answer) for ids, answer in zip(chat.ids, answers)):
            return chat
        return chat.noting(OTHER_TOKENS, ids=[None] * len(answers))

    def _spells(self, ids: list[int], text: str) -> bool:
        try:
            read = self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        except (IndexError, OverflowError):  # not of this vocabulary
            return False
        return read.strip().startswith(text.strip())

    def _text(self, row: dict[str, Any]) -> tuple[list[int], list[int]]:
        if row["turns"] is not None:
            raise Refused(f"it has questions without answers: {ANSWER_THEM}")
        if row["text"] is None:
            raise Refused("it has neither messages nor text")
        given, written = row["text"][: row["given"]], row["text"][row["given"] :]
        if row["ids"] is not None and self._spells(row["ids"], written):
            context = self.beginning + self._bare(given, add_special_tokens=False, verbose=False)["input_ids"]
            return context + row["ids"], [IGNORED] * len(context) + row["ids"]
        if row["text"] and not written:
            raise Refused(f"it is a prompt without an answer: {ANSWER_THEM}")
        ids, labels = encode_span(self._bare, row["text"], [(row["given"], len(row["text"]))])
        beginning = [IGNORED if row["given"] else token for token in self.beginning]
        return self.beginning + ids + self._ending, beginning + labels + self._ending


def refuse_unknown(tokenizer: Any, ids: list[int], vocab_size: int | None) -> None:
    """Refuse tokens that a base cannot embed: they were added to its tokenizer alone.

    Raises:
        Refused: there is one.
    """
    if vocab_size is not None and (most := max(ids, default=0)) >= vocab_size:
        raise Refused(
            f"it has the token {tokenizer.convert_ids_to_tokens(most)!r}, number {most} of the tokenizer, but the base "
            f"embeds {vocab_size}"
        )


class Fit:
    """Batches of encoded rows to examples of the wanted length; rows without labels are dropped."""

    def __init__(self, max_length: int | None, packing: bool, beginning: list[int]) -> None:
        self.max_length, self.packing, self.beginning = max_length, packing, beginning

    def __call__(self, batch: Mapping[str, Sequence[Any]]) -> dict[str, list]:
        pairs: Iterable[tuple[list[int], list[int]]]
        pairs = [pair for pair in zip(batch["input_ids"], batch["labels"]) if pair[0]]
        if self.packing:
            joined = ([token for ids, _ in pairs for token in ids], [label for _, labels in pairs for label in labels])
            pairs = self._pieces(*joined, beginning=[])
        elif self.max_length is not None:
            pairs = [piece for pair in pairs for piece in self._pieces(*pair, beginning=self.beginning)]
        kept = [(ids, labels) for ids, labels in pairs if any(label != IGNORED for label in labels)]
        return {"input_ids": [ids for ids, _ in kept], "labels": [labels for _, labels in kept]}

    def _pieces(self, ids: list[int], labels: list[int], beginning: list[int]) -> list[tuple[list[int], list[int]]]:
        """A row cut into pieces; those after the first start with `beginning`, which has no labels."""
        assert self.max_length is not None
        pieces = [(ids[: self.max_length], labels[: self.max_length])]
        room = self.max_length - len(beginning)
        for at in range(self.max_length, len(ids), room):
            context = [IGNORED] * len(beginning)
            pieces.append((beginning + ids[at : at + room], context + labels[at : at + room]))
        return pieces
