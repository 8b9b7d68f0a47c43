"""Question files and data sets are read, or refused naming the row; conversations are put through the template."""

import json

import pytest
from datasets import Dataset

from hf_drafthead.evaluation.questions import (
    SPEC_BENCH_TASKS,
    TOPICS,
    UNCATEGORISED,
    Question,
    check_template,
    read_questions,
    text_of,
)
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
        Question(("Write.", "Again."), "writing", (("Yes",), ("No",)), chat=True),
        Question(("Translate: ja",), "translation", (("yes",),), chat=True),
        Question(("def f(\u2028)",), UNCATEGORISED, (("pass",),)),
        Question(("Hi", "And?"), chat=True),
    ]
    assert found[2].where.endswith("questions.jsonl line 3")


def test_spec_bench_s_file_has_the_topics_of_mt_bench_as_one_task(tmp_path):
    topics = [{**MT_BENCH, "category": name} for name in sorted(TOPICS)]
    tasks = [{**SPEC_BENCH, "category": name} for name in sorted(SPEC_BENCH_TASKS)]
    assert {one.category for one in read_questions(file_of(tmp_path, *topics, *tasks))} == {
        "mt_bench",
        *("translation", "summarization", "qa", "math_reasoning", "rag"),
    }
    assert {one.category for one in read_questions(file_of(tmp_path, *topics))} == TOPICS
    assert [one.category for one in read_questions(file_of(tmp_path, topics[0], tasks[0]))][0] == "mt_bench"
    own = {**SPEC_BENCH, "category": "mine"}  # whoever groups by hand is left alone
    assert read_questions(file_of(tmp_path, *topics, *tasks, own))[0].category == topics[0]["category"]


def test_several_references_of_a_turn_are_kept_together(tmp_path):
    (found,) = read_questions(file_of(tmp_path, {**SPEC_BENCH, "reference": [["a", "b"]]}))
    assert found.references == (("a", "b"),)


def test_a_data_set_is_read_by_name(tmp_path):
    rows = Dataset.from_list([{"prompt": ["a", "b"], "category": "x", "reference": None}])
    (tmp_path / "set").mkdir()
    rows.to_parquet(tmp_path / "set" / "train.parquet")
    expected = [Question(("a", "b"), "x", chat=True)]
    assert read_questions(str(tmp_path / "set")) == read_questions(str(tmp_path / "set"), "train") == expected
    with pytest.raises(ValueError, match="has no split 'test': choose one of train with --split"):
        read_questions(str(tmp_path / "set"), "test")


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "holds no prompt: write one"),
        ('{"prompt": "a"}\n{"prompt": ', "line 2 is not JSON (Expecting value): write one object per line."),
        ('{"prompt": "a"}\n{"prompt": ""}', 'line 2 is {"prompt": ""}, a prompt that is empty: give the text'),
        ('{"turns": ["a", " "]}', 'line 1 is {"turns": ["a", " "]}, a prompt that is empty: give the text'),
        ('{"text": "a"}', 'line 1 is {"text": "a"}: expected an object with "turns", a list of texts'),
        ('["a"]', 'line 1 is ["a"]: expected an object with "turns"'),
        ('{"turns": []}', 'line 1 is {"turns": []}: expected an object with "turns"'),
        ('{"turns": "a"}', 'line 1 is {"turns": "a"}: expected an object with "turns"'),
        ('{"turns": ["a", 3]}', 'line 1 is {"turns": ["a", 3]}: expected an object with "turns"'),
        (
            '{"prompt": "a", "reference": [3]}',
            'line 1 has the "reference" [3]: expected a text, or some per turn.',
        ),
    ],
)
def test_a_row_of_no_known_form_is_named(tmp_path, text, message):
    file = tmp_path / "questions.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError) as refused:
        read_questions(file)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    "name, message",
    [
        ("nowhere.jsonl", "there is no question file 'nowhere.jsonl': give a JSON lines file, or a data set's name."),
        ("no/such-data-set", "'no/such-data-set' is no question file, and no data set could be read there ("),
    ],
)
def test_what_is_not_there_is_refused(name, message):
    with pytest.raises(OSError) as refused:
        read_questions(name)
    assert message in str(refused.value)


def test_a_later_turn_is_asked_after_the_model_s_own_answers():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    question = Question(("Write.", "Again."), chat=True)
    assert text_of(tokenizer, question, []) == "<s>[user] Write.\n[assistant] "
    assert text_of(tokenizer, question, ["so"]) == "<s>[user] Write.\n[assistant] so\n[user] Again.\n[assistant] "
    assert text_of(tokenizer, Question(("def f",)), []) == "def f"


def test_a_conversation_without_a_template_is_refused():
    tokenizer = byte_tokenizer()
    questions = [Question(("def f",)), Question(("Hi",), chat=True, where="q.jsonl line 2")]
    check_template(tokenizer, questions[:1])
    with pytest.raises(ValueError, match="q.jsonl line 2 is a conversation, but the tokenizer at .* has no chat templ"):
        check_template(tokenizer, questions)


def test_a_template_that_refuses_is_named():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no user wanted') }}"
    with pytest.raises(ValueError, match="the chat template cannot take q line 1 .no user wanted.: mend it."):
        text_of(tokenizer, Question(("Hi",), chat=True, where="q line 1"), [])
