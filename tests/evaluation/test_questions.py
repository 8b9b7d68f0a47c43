"""Question files and data sets are read, or refused naming the row; conversations are put through the template."""

import json

import pytest

from hf_drafthead.evaluation.calls import encode_all
from hf_drafthead.evaluation.questions import UNCATEGORISED, Question, read_questions, text_of
from tests.checkpoints import byte_tokenizer

MT_BENCH = {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."], "reference": ["Yes", "No"]}
SPEC_BENCH = {"question_id": 161, "category": "translation", "turns": ["Translate: ja"], "reference": ["yes"]}
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def file_of(folder, *rows):
    file = folder / "questions.jsonl"
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return file


def test_mt_bench_spec_bench_and_plain_rows_are_read(tmp_path):
    plain = {"prompt": "def f(\u2028)", "reference": "pass"}  # a line separator inside a text ends no line
    nothing = {"prompt": ["Hi", "And?"], "category": None}
    found = read_questions(file_of(tmp_path, MT_BENCH, SPEC_BENCH, plain, nothing))
    assert found == [
        Question(("Write.", "Again."), "writing", chat=True),
        Question(("Translate: ja",), "translation", chat=True),
        Question(("def f(\u2028)",), UNCATEGORISED),
        Question(("Hi", "And?"), chat=True),
    ]
    assert found[2].where.endswith("questions.jsonl line 3")


def test_chats_and_texts_are_asked_as_distillation_asks_them(tmp_path):
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    said += [{"role": "assistant", "content": "NEVER"}, {"role": "user", "content": "And?"}]
    sharegpt = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "NEVER"}]
    rows = [{"messages": said}, {"conversations": sharegpt}, {"text": "abc" * 40}, {"text": "abcNEVER", "given": 3}]
    rows += [{"prompt": "abc", "completion": "NEVER"}, {"prompt": said[1:2], "completion": said[2:3]}]
    found = read_questions(file_of(tmp_path, *rows))
    assert [(one.turns, one.system, one.chat) for one in found] == [
        (("Hi", "And?"), "Be brief.", True),
        (("Hi",), None, True),
        (("abc" * 40,), None, False),
        (("abc",), None, False),
        (("abc",), None, False),
        (("Hi",), None, True),
    ]
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    assert text_of(tokenizer, found[2], []) == ("abc" * 40)[:64]  # a token is a byte here
    assert text_of(tokenizer, found[0], ["so"]) == (
        "<s>[system] Be brief.\n[user] Hi\n[assistant] so\n[user] And?\n[assistant] "
    )
    knows_no_system = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + TEMPLATE
    for template in (knows_no_system, TEMPLATE.replace("messages %}", "messages if m.role != 'system' %}")):
        tokenizer.chat_template = template
        assert text_of(tokenizer, found[0], []) == "<s>[user] Be brief.\n\nHi\n[assistant] "


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "holds no prompt: write one"),
        ('{"prompt": "a"}\n{"prompt": ', "line 2 is not JSON (Expecting value): write one object per line, or"),
        ('{"prompt": "a"}\n{"prompt": ""}', 'line 2 is {"prompt": ""}, a prompt that is empty: give the text'),
        ('{"turns": ["a", " "]}', 'line 1 is {"turns": ["a", " "]}, a chat that cannot be asked: one of its'),
        ('{"question": "a"}', 'line 1 is {"question": "a"}: expected a chat as {"messages": ['),
        ('["a"]', 'row 0 is "a": expected a chat as'),
        ('{"turns": ["a", 3]}', 'line 1 is {"turns": ["a", 3]}: expected a chat as {"messages": ['),
    ],
)
def test_a_row_of_no_known_form_is_named(tmp_path, text, message):
    file = tmp_path / "questions.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError) as refused:
        read_questions(file)
    assert message in str(refused.value)


def test_a_conversation_without_a_template_is_refused():
    tokenizer = byte_tokenizer()
    questions = [Question(("def f",)), Question(("Hi",), chat=True, where="q.jsonl line 2")]
    with pytest.raises(ValueError, match="q.jsonl line 2 is a conversation, but the tokenizer at .* has no chat templ"):
        encode_all(None, tokenizer, [questions], 1)


def test_a_template_that_refuses_is_named():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no user wanted') }}"
    with pytest.raises(ValueError, match="the chat template cannot take q line 1 .no user wanted.: correct the"):
        text_of(tokenizer, Question(("Hi",), chat=True, where="q line 1"), [])


def test_a_part_of_the_questions_is_of_all_categories(tmp_path):
    rows = [{"turns": [f"{category}{number}"], "category": category} for category in "abc" for number in range(3)]
    file = file_of(tmp_path, *rows)
    asked = {limit: [one.text for one in read_questions(file, limit=limit)] for limit in (2, 4, 99)}
    assert asked == {2: ["a0", "b0"], 4: ["a0", "a1", "b0", "c0"], 99: [row["turns"][0] for row in rows]}
