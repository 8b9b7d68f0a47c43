"""Find the assistant's tokens of a chat exactly with the tokenizer's chat template, or refuse the chat.

What counts as the assistant's: everything the base would write after the generation prompt, with the end-of-turn token
where the template puts one. A token with any of these characters counts.
"""

import copy
from contextlib import suppress
from typing import Any

from hf_drafthead.data.chats import Chat, Refused
from hf_drafthead.data.texts import frame as frame
from hf_drafthead.training.heads_loss import IGNORED

# placeholders that no chat contains and no template strips, splits or changes
QUESTION, ANSWER, SYSTEM = "QzPxquestionQzPx", "QzPxanswerQzPx", "QzPxsystemQzPx"
PART = "QzPxpart{}QzPx"
PARAMETERS = {"type": "object", "properties": {}, "required": []}
TOOLS = [{"type": "function", "function": {"name": "QzPxtoolQzPx", "description": "-", "parameters": PARAMETERS}}]
GIVE_IT = "--chat-template FILE, tokenizer.chat_template"
THOUGHTS_LEFT_OUT = "thoughts left out by the chat template"
TOOLS_LEFT_OUT = "tools left out by the chat template"


def need_offsets(tokenizer: Any) -> None:
    """ValueError for a tokenizer without character offsets, one that is not fast."""
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"{type(tokenizer).__name__} has no character offsets, which are needed to mark the answers: load a fast "
            "tokenizer. Of one of mistral-common, tokenizer.save_pretrained(FOLDER, save_format='hf') writes the "
            "tokenizer.json of a fast one; put it beside the base's files."
        )


def encode_span(tokenizer: Any, text: str, spans: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Token ids of a rendered text, and labels: the ids within the spans of characters, else IGNORED."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids = encoded["input_ids"]
    within = (any(begin < end and last > first for first, end in spans) for begin, last in encoded["offset_mapping"])
    return ids, [token if inside else IGNORED for token, inside in zip(ids, within)]


def without_post_processor(tokenizer: Any) -> Any:
    """A copy whose offsets are whole: some post-processors take the white space off them."""
    need_offsets(tokenizer)
    bare = copy.deepcopy(tokenizer)
    bare.backend_tokenizer.post_processor = None
    return bare


def refuse_unknown(tokenizer: Any, ids: list[int], vocab_size: int | None) -> None:
    """Refused where a base cannot embed one of the tokens: they were added to its tokenizer alone."""
    if vocab_size is not None and (most := max(ids, default=0)) >= vocab_size:
        token = f"the token {tokenizer.convert_ids_to_tokens(most)!r}, number {most} of the tokenizer"
        raise Refused(f"it has {token}, but the base embeds {vocab_size}")


class ChatEncoder:
    """Encodes chats with a fast tokenizer's chat template and marks what the assistant wrote; else a ValueError.

    A tokenizer may have named templates: chats with tools are encoded with the one called `tool_use`, others with
    the one called `default`, as `apply_chat_template` does. The attributes are of chats without tools; `of` has the
    others. `end_of_turn` is what the template puts behind an answer, up to and including the first special token,
    `trail` the part in front of that, nearly always nothing, `lead` what stands between the generation prompt and an
    answer.
    """

    def __init__(self, tokenizer: Any, tools: bool = False) -> None:
        self.tokenizer = tokenizer
        if getattr(tokenizer, "chat_template", None) is None:
            what = f"the data holds chats, but the tokenizer of {tokenizer.name_or_path!r} has no chat template"
            raise ValueError(f"{what}: give the one the base was trained with ({GIVE_IT}), or plain text.")
        self._bare = without_post_processor(tokenizer)
        named = tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else {}
        if named and not {"default", "tool_use"} & set(named):
            what = f"the tokenizer of {tokenizer.name_or_path!r} has the chat templates {', '.join(sorted(named))}"
            raise ValueError(f"{what}, none of which is called default: give one ({GIVE_IT}).")
        # such a template may show no chat without tools
        self._tools = TOOLS if "tool_use" in named and (tools or "default" not in named) else None
        self._template = tokenizer.get_chat_template(tools=self._tools)
        self._of_tools = None if self._tools is None and "tool_use" in named else self
        question, answer = {"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}
        try:
            pair, prompt = self._shown([question, answer]), self._shown([question], prompt=True)
        except Refused as error:
            raise ValueError(f"the chat template cannot show a question and an answer: {error}.") from None
        if pair.count(QUESTION) != 1 or pair.count(ANSWER) != 1:
            what = "the question and the answer of a chat once each"
            raise ValueError(f"the chat template does not show {what}: set another.")
        before, after = pair.split(ANSWER)
        self.trail, special = self._before_special(after)
        self.end_of_turn = self.trail + special
        self.lead = before[len(prompt) :] if before.startswith(prompt) else ""
        # without one the answer's header, if there is any, would be taken for the assistant's words
        self._has_prompt = prompt != self._shown([question]) or not self.lead.strip()
        self.takes_system = False
        with suppress(Refused):
            self.takes_system = SYSTEM in self._shown([{"role": "system", "content": SYSTEM}, question, answer])

    def of(self, tools: list[Any] | None) -> "ChatEncoder":
        """The encoder of chats with these tools, or with none."""
        if not tools:
            return self
        if self._of_tools is None:
            self._of_tools = ChatEncoder(self.tokenizer, tools=True)
        return self._of_tools

    def _shown(self, messages: list[dict[str, Any]], prompt: bool = False) -> str:
        return self.render(messages, prompt, self._tools)

    def render(self, messages: list[dict[str, Any]], prompt: bool = False, tools: list[Any] | None = None) -> str:
        """The text of a chat, with the generation prompt behind it if asked for; Refused where the template refuses."""
        template = self.of(tools)._template
        try:
            return self.tokenizer.apply_chat_template(  # type: ignore[no-any-return]
                messages, tools, chat_template=template, add_generation_prompt=prompt, tokenize=False
            )
        except Exception as error:  # a template is a program and may raise anything
            raise Refused(f"the chat template refuses it ({' '.join(str(error).split())})") from None

    def before_question(self, messages: list[dict[str, Any]]) -> str:
        """The text of a chat up to where the user's next words stand; Refused where these are not shown once."""
        parts = self.render([*messages, {"role": "user", "content": QUESTION}]).split(QUESTION)
        if len(parts) != 2:
            raise Refused(f"the chat template shows a user's words {len(parts) - 1} times")
        return parts[0]

    def end_of_question(self) -> tuple[str, bool]:
        """What ends a user's turn, and whether it is a special token; else the words before the assistant's."""
        text = self.render([{"role": "user", "content": QUESTION}], prompt=True).partition(QUESTION)[2]
        before, special = self._before_special(text)
        return (special, True) if special and not before.strip() else (text.strip(), False)

    def fit(self, chat: Chat) -> Chat:
        """The chat as the template can show it, what it leaves out noted; Refused where that is calls of tools."""
        if (encoder := self.of(chat.tools)) is not self:
            return encoder.fit(chat)
        if self._tools is not None and not chat.tools:
            raise Refused("it has no tools, and the tokenizer has no chat template called default for such chats")
        chat = chat if self.takes_system else chat.without_system()
        if chat.tools and not self._shows_tools(chat):
            chat = chat.noting(TOOLS_LEFT_OUT, tools=chat.tools if self._tools else None)
        needed, thoughts, numbered = set(), set(), []
        for number, turn in enumerate(chat.messages):
            part = PART.format(number)
            if turn["role"] == "tool":
                turn = {**turn, "content": part}
                needed.add(part)
            if turn.get("tool_calls"):
                function = {**turn["tool_calls"][0]["function"], "name": part}
                turn = {**turn, "tool_calls": [{**turn["tool_calls"][0], "function": function}]}
                needed.add(part)
            if turn.get("reasoning_content"):
                turn = {**turn, "reasoning_content": f"thought{part}"}
                thoughts.add(f"thought{part}")
            numbered.append(turn)
        if not needed | thoughts:
            return chat
        text = self.render(numbered, tools=chat.tools)
        if any(part not in text for part in needed):
            raise Refused("the chat template does not show calls of tools and their answers: set another")
        return chat if all(thought in text for thought in thoughts) else chat.noting(THOUGHTS_LEFT_OUT)

    def _shows_tools(self, chat: Chat) -> bool:
        with_tools = self.render(chat.messages, tools=chat.tools)
        with suppress(Refused):
            return with_tools != self.render(chat.messages)
        return True  # it shows nothing without them

    def encode(self, chat: Chat) -> tuple[list[int], list[int]]:
        """Token ids of a chat, and labels: the ids of the assistant's tokens, IGNORED elsewhere."""
        text, spans = self.of(chat.tools).spans(chat)
        if not chat.ids or any(ids is None for ids in chat.ids):
            return encode_span(self._bare, text, spans)
        ids: list[int] = []
        labels: list[int] = []
        at = 0
        for (begin, end), written in zip([*spans, (len(text), len(text))], [*chat.ids, []], strict=True):
            assert written is not None
            # what lies between the answers is tokenized as it was to ask the base
            between = self._bare(text[at:begin], add_special_tokens=False, verbose=False)["input_ids"]
            ids += between + written
            labels += [IGNORED] * len(between) + written
            at = end
        return ids, labels

    def spans(self, chat: Chat) -> tuple[str, list[tuple[int, int]]]:
        """The text of a chat, and from and to which character each answer goes."""
        text = self.render(chat.messages, tools=chat.tools)
        spans: list[tuple[int, int]] = []
        for number, turn in enumerate(chat.messages):
            if turn["role"] != "assistant":
                continue
            before, after = self._around(chat, number, text)
            end = len(text) - len(after)
            begin = len(before) if text.startswith(before) else None
            if self._has_prompt:  # what the base is given before it answers; some templates leave parts of it out later
                prompt = self.render(chat.messages[:number], prompt=True, tools=chat.tools)
                if text.startswith(prompt) and len(prompt) <= end:
                    begin = len(prompt)
            if begin is None or not text.endswith(after) or not (spans[-1][1] if spans else 0) <= begin <= end:
                raise Refused(f"where turn {number} begins and ends cannot be determined from the chat template")
            broken_off = chat.cut and number == len(chat.messages) - 1
            if not broken_off and text.startswith(self.end_of_turn, end):
                end += len(self.end_of_turn)
            spans.append((begin, end))
        return text, spans

    def _around(self, chat: Chat, number: int, text: str) -> tuple[str, str]:
        """What the template puts before and behind an answer: another answer is rendered in its place."""
        turn = chat.messages[number]
        plain = {"role": "assistant", "content": ANSWER}
        others = [plain] if set(turn) == set(plain) else [plain, {**turn, "content": ANSWER}]
        for other in others:  # some templates want a call before a tool's answer
            try:
                messages = [*chat.messages[:number], other, *chat.messages[number + 1 :]]
                parts = self.render(messages, tools=chat.tools).split(ANSWER)
            except Refused:
                if other is others[-1]:
                    raise
                continue
            if len(parts) == 2 and text.endswith(parts[1]):
                return parts[0], parts[1]
        if len(parts) != 2:
            raise Refused(f"the chat template shows turn {number} {len(parts) - 1} times")
        return parts[0], parts[1]

    def _before_special(self, text: str) -> tuple[str, str]:
        """What a text holds in front of its first special token, and that token; nothing if it holds none."""
        special = {str(token) for token in self.tokenizer.added_tokens_decoder.values()} | {self.tokenizer.eos_token}
        present = [token for token in special if token and not token.isspace() and token in text]
        if not present:
            return "", ""
        first = min(present, key=lambda token: (text.index(token), -len(token)))  # the longer one of two at one place
        return text[: text.index(first)], first
