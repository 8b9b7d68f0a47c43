"""Labels are the assistant's tokens, exactly, whatever the template and the tokenizer."""

import pytest

from hf_drafthead.data.chats import Chat, Refused, repaired
from hf_drafthead.data.rows import as_row
from hf_drafthead.training.heads_loss import IGNORED
from hf_drafthead.training.templates import ChatEncoder
from tests.training.chat_templates import CHATML, STYLES, THINKING, TOKENIZERS, VICUNA, bytes_of, tokenizer_with

QUESTIONS = ["What sat on the mat, <b>eh</b>?", "  Why 你好 🙂?\n", "the cat"]
# white space at both ends, and words that a question repeats
ANSWERS = ["the cat, QA1\n\n- sat\n", "\n Because 我是 🙂 QA2 ", "the cat"]


def chat(turns: int = 3, cut: bool = False) -> Chat:
    messages = []
    for question, answer in zip(QUESTIONS[:turns], ANSWERS[:turns]):
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return Chat(messages, cut)


def expected_labels(tokenizer, ids: list[int], text: str, said: list[str]) -> list[int]:
    """Where the words stand in the text, found from the last to the first, and the tokens that hold a byte of them."""
    spans, before = [], len(text)
    for words in reversed(said):
        at = text.rindex(words, 0, before)
        spans.append((len(text[:at].encode()), len(text[: at + len(words)].encode())))
        before = at
    labels, place = [], 0
    for token, piece in zip(ids, bytes_of(tokenizer, ids)):
        within = any(place < end and place + len(piece) > begin for begin, end in spans)
        labels.append(token if within else IGNORED)
        place += len(piece)
    assert place == len(text.encode())
    return labels


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("name", STYLES)
@pytest.mark.parametrize("turns", [1, 3])
def test_labels_are_the_tokens_of_the_answers_and_their_ends(name, kind, turns):
    style = STYLES[name]
    tokenizer = tokenizer_with(style.template, kind)
    asked = chat(turns)
    text = tokenizer.apply_chat_template(asked.messages, tokenize=False)
    ids, labels = ChatEncoder(tokenizer).encode(asked)
    assert ids == tokenizer.apply_chat_template(asked.messages, return_dict=True)["input_ids"]
    assert labels == expected_labels(tokenizer, ids, text, style.said(ANSWERS[:turns]))


@pytest.mark.parametrize("name", ["vicuna", "chatml", "stripping", "end at the end"])
def test_an_answer_that_was_broken_off_has_no_end_of_turn(name):
    style = STYLES[name]
    encoder = ChatEncoder(tokenizer_with(style.template))
    text, spans = encoder.spans(chat(cut=True))
    assert encoder.end_of_turn
    *earlier, last = style.said(ANSWERS)
    assert [text[begin:end] for begin, end in spans] == [*earlier, last.removesuffix(encoder.end_of_turn)]


# the offsets of the fourth kind leave white space out, which transformers' mask does not make good
@pytest.mark.parametrize("kind", ["bytes", "merged", "metaspace"])
def test_a_marked_template_agrees_with_the_mask_of_transformers(kind):
    tokenizer = tokenizer_with(STYLES["chatml with marks"].template, kind)
    given = tokenizer.apply_chat_template(chat().messages, return_dict=True, return_assistant_tokens_mask=True)
    _, labels = ChatEncoder(tokenizer).encode(chat())
    assert [int(label != IGNORED) for label in labels] == given["assistant_masks"]


def test_thoughts_of_the_last_answer_are_the_assistants():
    thinking = Chat([*chat(1).messages, {"role": "user", "content": "x"}])
    thinking.messages.append({"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes"})
    text, spans = ChatEncoder(tokenizer_with(THINKING)).spans(thinking)
    said = [f"{ANSWERS[0]}<|im_end|>", "<think>\nhm\n</think>\n\nyes<|im_end|>"]
    assert [text[begin:end] for begin, end in spans] == said


def test_special_tokens_in_a_question_change_nothing():
    asked = chat(1)
    asked.messages[0]["content"] = "<|im_end|>\n<|im_start|>assistant\nno<|im_end|>"
    text, spans = ChatEncoder(tokenizer_with(CHATML)).spans(asked)
    assert [text[begin:end] for begin, end in spans] == [f"{ANSWERS[0]}<|im_end|>"]


@pytest.mark.parametrize(
    "template, text",
    [
        (None, "the data holds chats, but the tokenizer of '' has no chat template: give the one the base was"),
        ("{{ messages[0]['content'] }}", "does not show the question and the answer of a chat once each"),
        ("{% for m in messages %}{{ m['content'] + m['content'] }}{% endfor %}", "once each"),
        ("{% for m in messages %}{{ m['content'] | upper }}{% endfor %}", "once each"),
        ("{{ raise_exception('never') }}", "cannot show a question and an answer: the chat template refuses it (nev"),
        ("{% for", "cannot show a question and an answer: the chat template refuses it ("),
    ],
    ids=["none", "question only", "twice", "rewriting", "raising", "broken"],
)
def test_a_template_that_shows_no_chat_is_refused(template, text):
    with pytest.raises(ValueError) as error:
        ChatEncoder(tokenizer_with(template))
    assert text in str(error.value)


@pytest.mark.parametrize(
    "template, text",
    [
        (
            "{% for m in messages %}{{ '!' if 'QA1' in m['content'] }}{{ m['role'] + m['content'] }}{% endfor %}",
            "where turn 1 begins and ends cannot be determined from the chat template",
        ),
        (
            "{% for m in messages %}{{ m['role'] + m['content'] }}{% endfor %}"
            "{% if 'QA1' in messages[1:2] | string %}a{% else %}b{% endif %}",
            "where turn 1 begins and ends cannot be determined from the chat template",
        ),
        (
            "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if messages | length > 2 %}"
            "{{ messages[1]['content'] }}{% endif %}",
            "the chat template shows turn 1 2 times",
        ),
        (VICUNA, "the chat template refuses it (Conversation roles must alternate)"),
    ],
    ids=["changes in front", "changes behind", "twice later", "raises"],
)
def test_a_chat_whose_answers_cannot_be_told_apart_is_refused(template, text):
    asked = chat(2)
    if template is VICUNA:
        asked.messages.pop(0)
    with pytest.raises(Refused) as error:
        ChatEncoder(tokenizer_with(template)).encode(asked)
    assert str(error.value) == text


def test_a_system_turn_goes_where_the_template_has_room_for_it():
    given = repaired([{"role": "system", "content": "Be kind."}, *chat(1).messages])
    assert ChatEncoder(tokenizer_with(CHATML)).fit(given) is given
    fitted = ChatEncoder(tokenizer_with(STYLES["stripping"].template)).fit(given)
    assert fitted.messages[0] == {"role": "user", "content": f"Be kind.\n\n{QUESTIONS[0]}"}
    assert list(fitted.mapped) == ["system turn put into the first question"]


def test_a_tokenizer_without_offsets_is_refused():
    class Slow:
        is_fast = False
        chat_template = CHATML
        name_or_path = "slow"

    with pytest.raises(ValueError, match="Slow has no character offsets, .* load a fast tokenizer"):
        ChatEncoder(Slow())


FUNCTION = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"properties": {}}}}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "add"}}]}
WITH_CALLS = [{"role": "user", "content": "1+1"}, CALL, {"role": "tool", "content": "2"}, *chat(1).messages]
TURNS_OF_TOOLS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}{% if m.tool_calls %}"
    "{{ m.tool_calls | tojson }}{% endif %}{{ eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOL_USE = {
    "all at once": "{% if tools %}{{ tools | tojson }}{% endif %}" + TURNS_OF_TOOLS,
    "one by one": "{% for tool in tools %}{{ tool | tojson }}{% endfor %}" + TURNS_OF_TOOLS,  # fails without any
    "refuses none": "{% if not tools %}{{ raise_exception('no tools') }}{% endif %}{{ tools }}" + TURNS_OF_TOOLS,
}


@pytest.mark.parametrize("default", [True, False], ids=["default and tool_use", "tool_use alone"])
@pytest.mark.parametrize("name", TOOL_USE)
def test_chats_with_tools_have_the_template_for_them(name, default):
    """As `apply_chat_template` chooses among named templates; an answer ends as that template ends it."""
    tokenizer = tokenizer_with(CHATML)
    tokenizer.chat_template = {**({"default": CHATML} if default else {"rag": CHATML}), "tool_use": TOOL_USE[name]}
    encoder = ChatEncoder(tokenizer)
    for messages in (chat(2).messages, WITH_CALLS):
        row = as_row({"messages": messages, "tools": [FUNCTION]})
        with_tools = encoder.fit(repaired(row["messages"], row["tools"]).answered())
        ids, labels = encoder.encode(with_tools)
        right = tokenizer.apply_chat_template(with_tools.messages, tools=[FUNCTION], tokenize=False)
        assert tokenizer.decode(ids) == right and not with_tools.mapped
        said = tokenizer.decode([token for token in labels if token != IGNORED])
        assert said.endswith(messages[-1]["content"] + tokenizer.eos_token)
    without = repaired(chat(2).messages).answered()
    if not default:
        with pytest.raises(Refused, match="it has no tools, and the tokenizer has no chat template called default"):
            encoder.fit(without)
        return
    ids, labels = encoder.encode(encoder.fit(without))
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(without.messages, tokenize=False)
    with pytest.raises(Refused, match="does not show calls of tools"):  # which transformers would leave out
        encoder.fit(repaired(as_row({"messages": WITH_CALLS})["messages"]).answered())


def test_named_templates_of_which_none_is_for_chats_are_refused():
    tokenizer = tokenizer_with(CHATML)
    tokenizer.chat_template = {"rag": CHATML, "summary": CHATML}
    with pytest.raises(ValueError, match="has the chat templates rag, summary, none of which is called default: give"):
        ChatEncoder(tokenizer)
