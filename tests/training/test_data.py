"""From files and data sets to rows of tokens: nothing lost, nothing changed unsaid, everything counted."""

import json
import re

import datasets
import pytest
import torch

from hf_drafthead.data import read_rows, sources
from hf_drafthead.data.chats import Refused, repaired
from hf_drafthead.data.rows import as_row, data_hash
from hf_drafthead.training.data import tokenize_rows
from hf_drafthead.training.examples import collate
from hf_drafthead.training.heads_loss import IGNORED
from tests.training.chat_templates import CHATML, STYLES, TOOL_TEMPLATE, tokenizer_with


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


def turns(*contents: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[place % 2], "content": words} for place, words in enumerate(contents)]


def sharegpt(*contents: str) -> list[dict[str, str]]:
    return [{"from": ("human", "gpt")[place % 2], "value": words} for place, words in enumerate(contents)]


CHATS = [[f"question {row}", f"answer {row}", "and?", f"more {row} 🙂"] for row in range(7)]


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def chats(tmp_path):
    return write_lines(tmp_path / "chats.jsonl", [{"messages": turns(*one)} for one in CHATS])


def listed(rows) -> list[dict]:
    return [dict(row) for row in rows]


def said(rows) -> list:
    return [(row["messages"], row["text"]) for row in rows]


def test_every_form_of_the_same_chats_gives_the_same_messages(tmp_path, chats):
    array = tmp_path / "chats.json"
    array.write_text(json.dumps([{"id": "x", "conversations": sharegpt(*one)} for one in CHATS], indent=1))
    lines = write_lines(tmp_path / "lines.json", [{"conversations": sharegpt(*one)} for one in CHATS])
    read = {path: listed(read_rows(path)) for path in (chats, array, lines)}
    words = {path: [[turn["content"] for turn in row["messages"]] for row in rows] for path, rows in read.items()}
    assert words[chats] == words[array] == words[lines] == CHATS
    assert [row["row"] for row in read[array]] == list(range(7))
    assert {row["source"] for row in read[array]} == {"chats.json"}


def test_a_data_set_gives_the_same_rows_by_folder_and_in_hand(tmp_path, chats):
    rows = read_rows(chats)
    plain = datasets.Dataset.from_list([{"messages": turns(*one), "id": 0} for one in CHATS])
    plain.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": plain, "test": plain.select([0])}).save_to_disk(tmp_path / "both")
    plain.to_parquet(tmp_path / "hub" / "train.parquet")
    (tmp_path / "hub" / "dataset_infos.json").write_text("{}")
    assert said(sources.uniform(plain)) == said(rows)
    for name in ("saved", "both", "hub"):
        assert said(read_rows(tmp_path / name)) == said(rows)
    assert len(read_rows(tmp_path / "both", split="test")) == 1


def test_prompts_and_questions_are_rows_too(tmp_path):
    question, answer = turns("a", "b")
    records = [
        ({"prompt": "ab"}, {"text": "ab", "given": 2}),
        ({"prompt": "ab", "completion": "cd"}, {"text": "abcd", "given": 2}),
        ({"prompt": ["a", "b"], "category": "x"}, {"turns": ["a", "b"]}),
        ({"turns": ["a"], "reference": ["r"]}, {"turns": ["a"]}),
        ({"prompt": [question], "completion": [answer]}, {"messages": ["a", "b"]}),
        ({"prompt": "a", "messages": [question, answer]}, {"messages": ["a", "b"]}),
    ]
    path = write_lines(tmp_path / "x.jsonl", [record for record, _ in records])
    nothing = {"messages": None, "turns": None, "text": None, "given": 0}
    for row, (_, expected) in zip(read_rows(path), records, strict=True):
        found = {name: row[name] for name in nothing}
        found["messages"] = found["messages"] and [turn["content"] for turn in found["messages"]]
        assert found == {**nothing, **expected}


def test_of_a_prompt_nothing_is_learnt_and_of_its_answer_everything(tmp_path):
    tokenizer = tokenizer_with(CHATML)
    rows = [{"prompt": "ab", "completion": "cd"}, {"prompt": "ab"}, {"turns": ["a", "b"]}]
    examples, report = tokenize_rows(read_rows(write_lines(tmp_path / "x.jsonl", rows)), tokenizer)
    (example,) = examples
    assert tokenizer.decode([token for token in example["labels"] if token != IGNORED]).startswith("cd")
    assert example["labels"].count(IGNORED) == len(example["labels"]) - len(tokenizer("cd")["input_ids"])
    assert (report.kept, report.refused) == (1, 2)
    assert "x.jsonl row 1: it is a prompt without an answer: generate answers with" in report.refusals[0]
    assert "x.jsonl row 2: it has questions without answers: generate answers with" in report.refusals[1]


ODD = [70, 223, 137, 200, 71]  # tokens of single bytes, some of which are no characters


def test_answers_are_learnt_in_the_tokens_that_the_base_wrote(tmp_path):
    tokenizer = tokenizer_with(CHATML)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    content = tokenizer.decode(ODD, clean_up_tokenization_spaces=False)
    assert tokenizer(content, add_special_tokens=False)["input_ids"] != ODD
    chat = [*turns("a", "b"), {"role": "user", "content": "c"}, {"role": "assistant", "content": content}]
    chat[1]["ids"] = [*tokenizer("b", add_special_tokens=False)["input_ids"], end]
    chat[3]["ids"] = [*ODD, end]
    text = {"text": "ab" + content, "given": 2, "ids": ODD}
    foreign = {"text": "abcd", "given": 2, "ids": [99999]}
    rows = [{"messages": chat}, text, foreign]
    examples, _ = tokenize_rows(read_rows(write_lines(tmp_path / "x.jsonl", rows)), tokenizer)
    learnt = [[token for token in example["labels"] if token != IGNORED] for example in examples]
    assert learnt[0] == chat[1]["ids"] + chat[3]["ids"]
    assert learnt[1] == ODD
    assert tokenizer.decode(learnt[2]).startswith("cd")
    asked = tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True, return_dict=True)["input_ids"]
    assert examples[0]["input_ids"][: len(asked) + 2] == asked + chat[1]["ids"]
    assert all(label in (IGNORED, token) for row in examples for token, label in zip(row["input_ids"], row["labels"]))
    chat[3]["ids"] = [99999]
    examples, report = tokenize_rows(read_rows(write_lines(tmp_path / "y.jsonl", [{"messages": chat}])), tokenizer)
    assert report.mapped == {"token ids of another tokenizer ignored": 1}
    assert 99999 not in examples[0]["input_ids"]


def test_texts_come_from_files_and_folders(tmp_path):
    folder = tmp_path / "texts"
    (folder / "inner").mkdir(parents=True)
    (folder / "b.txt").write_text("second\n")
    (folder / "a.txt").write_text("first")
    (folder / "inner" / "c.jsonl").write_text('{"text": "third"}\n\n{"text": "fourth", "given": 2}\n')
    (folder / "picture.png").write_bytes(b"\x89PNG")
    (folder / ".hidden").mkdir()
    (folder / ".hidden" / "d.txt").write_text("hidden")
    rows = listed(read_rows(folder))
    assert [row["text"] for row in rows] == ["first", "second\n", "third", "fourth"]
    assert [(row["source"], row["row"]) for row in rows[1:]] == [("b.txt", 0), ("c.jsonl", 0), ("c.jsonl", 1)]
    assert [row["given"] for row in rows] == [0, 0, 0, 2]
    assert [row["text"] for row in read_rows(folder / "b.txt")] == ["second\n"]


def test_a_long_text_becomes_rows_at_ends_of_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "BLOCK_SIZE", 30)
    text = "".join(f"line {number}\n" for number in range(50))
    (tmp_path / "long.txt").write_text(text)
    rows = [row["text"] for row in read_rows(tmp_path / "long.txt")]
    assert len(rows) > 10 and "".join(rows) == text
    assert all(row.endswith("\n") for row in rows)


def test_an_array_is_read_however_it_is_written(tmp_path):
    rows = [{"conversations": sharegpt(*one), "n": [1, -2.5e3, None, True, 'q"\\u00e9 ]', {}]} for one in CHATS]
    for number, text in enumerate([json.dumps(rows), f"\n {json.dumps(rows, indent=2)} \n\n", "[\n]"]):
        path = tmp_path / f"{number}.json"
        path.write_text(text)
        assert [record for _, record in sources.records_of(str(path))] == ([] if text == "[\n]" else rows)


def test_what_is_no_text_becomes_none_and_parts_are_put_together(tmp_path):
    parts = [{"type": "text", "text": "one, "}, {"type": "text", "text": "two"}]
    picture = [{"type": "image", "url": "x"}]
    contents = [parts, picture, 5, None, [], "x"]
    path = write_lines(tmp_path / "x.jsonl", [{"messages": [{"role": "user", "content": c} for c in contents]}])
    (row,) = read_rows(path)
    assert [turn["content"] for turn in row["messages"]] == ["one, two", None, None, None, "", "x"]
    nothing = {**dict.fromkeys(("messages", "turns", "text", "ids", "tools")), "unused": []}
    assert as_row("no object", "f", 3) == {**nothing, "given": 0, "source": "f", "row": 3}


def test_a_file_that_has_changed_is_read_again(tmp_path, chats):
    assert len(read_rows(chats)) == 7
    write_lines(chats, [{"messages": turns("a", "b")}])
    assert len(read_rows(chats)) == 1


def test_the_hash_tells_what_is_said_and_not_how_it_is_stored(tmp_path, chats):
    array = tmp_path / "other.json"
    array.write_text(json.dumps([{"messages": turns(*one)} for one in CHATS]))
    known = data_hash(read_rows(chats))
    assert known == data_hash(read_rows(array))
    assert len(known) == 64
    for other in (CHATS[1:], CHATS[::-1], [["question"], *CHATS[1:]]):
        assert data_hash(read_rows(write_lines(chats, [{"messages": turns(*one)} for one in other]))) != known


DEEP = "[" * 100_000 + "]" * 100_000
BAD_FILES = {
    "no.json": (None, "there is no data at"),
    "line.jsonl": ('{"text": "a"}\n\n{"text": \n', "line.jsonl line 3 is not JSON (Expecting value): write one object"),
    "cut.json": ('[{"text": "a"},\n', "cut.json line 2 is not JSON (Expecting value): write one"),
    "comma.json": ('[{"text": "a"} {"text": "b"}]', "comma.json line 1 is not JSON (Expecting ',' delimiter): "),
    "two.json": ('[{"text": "a"}]\n[]', "two.json line 2 is not JSON (Extra data): write one"),
    "kind.csv": ("a,b", "kind.csv' is not known: expected a file that ends in one of .json, .jsonl, .txt."),
    "form.jsonl": ('{"question": "a"}', 'form.jsonl begins with \'{"question": "a"}\': expected a chat as'),
    "plain.json": ("[[1]]", "plain.json begins with '[1]': expected a chat as "),
    "empty.jsonl": ("\n", "empty.jsonl: there is no row in it: expected a chat as "),
    "empty.json": ("[ ]", "empty.json: there is no row in it"),
    "deep.jsonl": (f'{{"text": "b", "more": {"[" * 200 + "]" * 200}}}\n', "deep.jsonl line 1 is nested more than 100"),
    "deeper.jsonl": (f'{{"text": {DEEP}}}\n', "deeper.jsonl line 1 is nested more than 100 levels deep: expected"),
    "deep.json": (f'[{{"text": "a"}}, {{"text": {DEEP}}}]', "deep.json array is nested more than 100 levels deep"),
    "digits.jsonl": (f'{{"text": "a", "id": {"9" * 5000}}}', "digits.jsonl line 1 is not JSON (Exceeds the "),
    "digits.json": (f'[{{"text": "a", "id": {"9" * 5000}}}]', "digits.json array is not JSON (Exceeds the limit"),
    "latin.txt": ("caf\xe9", "latin.txt is not UTF-8 text (unexpected end of data): convert it."),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files_are_refused_in_one_line(tmp_path, name):
    content, text = BAD_FILES[name]
    if content is not None:
        (tmp_path / name).write_bytes(content.encode("latin-1"))
    with pytest.raises((ValueError, OSError)) as error:
        read_rows(tmp_path / name)
    assert text in str(error.value) and "\n" not in str(error.value)


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path, chats):
    """Editors on Windows write one."""
    rows = [json.loads(line) for line in chats.read_text(encoding="utf-8").splitlines()]
    (tmp_path / "array.json").write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8-sig")
    (tmp_path / "lines.jsonl").write_text(chats.read_text("utf-8"), encoding="utf-8-sig")
    assert (
        said(read_rows(tmp_path / "array.json")) == said(read_rows(tmp_path / "lines.jsonl")) == said(read_rows(chats))
    )


@pytest.mark.parametrize("form", ["torch", "numpy", "pandas", "arrow", "python"])
def test_a_format_for_another_library_changes_no_row(tmp_path, chats, form):
    tokenizer = tokenizer_with(CHATML)
    plain = datasets.Dataset.from_list([{"messages": turns(*words)} for words in CHATS])
    formatted = plain.with_format(form)
    formatted.save_to_disk(tmp_path / "saved")  # which keeps the format
    right = [row["input_ids"] for row in tokenize_rows(plain, tokenizer)[0]]
    saved = read_rows(tmp_path / "saved")
    for rows in (formatted, saved):
        assert [row["input_ids"] for row in tokenize_rows(rows, tokenizer)[0]] == right


def test_a_format_that_hides_columns_hides_none_and_a_transform_of_the_user_s_is_refused():
    rows = datasets.Dataset.from_list([{"text": "abc", "number": 1}])
    assert [row["text"] for row in sources.uniform(rows.with_format(None, columns=["number"]))] == ["abc"]
    rows = rows.with_transform(lambda batch: {"text": [f"row {number}" for number in batch["number"]]})
    with pytest.raises(ValueError, match="the data has a transform, which is not applied here: apply it before, with"):
        sources.uniform(rows)


def test_half_a_character_is_replaced(tmp_path):
    """Where an emoji was cut, no tokenizer takes what is left of it."""
    write_lines(tmp_path / "cut.jsonl", [{"text": "a \ud83d b \U0001f600"}])
    assert "\\ud83d" in (tmp_path / "cut.jsonl").read_text()
    (row,) = read_rows(tmp_path / "cut.jsonl")
    assert row["text"] == "a \N{REPLACEMENT CHARACTER} b \U0001f600"


def test_unknown_data_sets_are_refused(tmp_path):
    with pytest.raises(OSError, match="no data could be read at 'org/none' .*: give a .json, .jsonl or .txt file"):
        read_rows("org/none")
    with pytest.raises(OSError, match="there is no data at './nowhere': give a"):
        read_rows("./nowhere")
    datasets.Dataset.from_list([{"question": "x"}]).save_to_disk(tmp_path / "saved")
    with pytest.raises(ValueError, match="saved has the columns question: expected a chat as"):
        read_rows(tmp_path / "saved")
    datasets.DatasetDict({"train": datasets.Dataset.from_list([{"text": "x"}])}).save_to_disk(tmp_path / "both")
    with pytest.raises(ValueError, match="both' has no split 'test': choose one of train with"):
        read_rows(tmp_path / "both", split="test")


def turn_of(role):
    return lambda content: {"role": role, "content": content}


U, A, S, H, G, OWL = map(turn_of, ("user", "assistant", "system", "human", "GPT", "owl"))
MENDED = {
    "as it should be": ([S("s"), U("u"), A("a")], "s u a", []),
    "other names": ([H("u"), G("a")], "u a", ["human -> user", "GPT -> assistant"]),
    "answer first": ([A("x"), U("u"), A("a")], "u a", ["leading assistant turn dropped"]),
    "answer behind the system": ([S("s"), A("x"), U("u"), A("a")], "s u a", ["leading assistant turn dropped"]),
    "empty system": ([S(" \n"), U("u"), A("a")], "u a", ["empty system turn dropped"]),
    "two systems": ([S("s"), S("t"), U("u"), A("a")], "s\n\nt u a", ["system turns joined"]),
    "two questions": ([U("u"), U("v"), A("a")], "u\n\nv a", ["user turns joined"]),
    "unanswered": ([U("u"), A("a"), U("v")], "u a", ["unanswered last turn dropped"]),
}
REFUSED = {
    "empty": ([], "it has no turns"),
    "unknown role": ([U("u"), OWL("x"), A("a")], "turn 1 has the unknown role 'owl'"),
    "tool first": ([U("u"), turn_of("tool")("x")], "turn 1 is a tool's, but no turn of the assistant comes before it"),
    "no role": ([U("u"), turn_of(None)("x")], "turn 1 has no role"),
    "no content": ([U("u"), A(None)], "turn 1 has no text"),
    "blank": ([U("u"), A(" ")], "turn 1 (assistant) is empty"),
    "two answers": ([U("u"), A("a"), A("b")], "turns 1 and 2 are both the assistant's"),
    "system in the middle": ([U("u"), A("a"), S("s"), U("v"), A("b")], "turn 2 is a system turn in the middle"),
    "no question": ([S("s"), A("a")], "it has no user turn"),
    "no answer": ([U("u")], "it has no assistant turn"),
}


def test_awkward_chats_are_mended_and_those_without_a_clear_meaning_refused():
    for messages, words, mapped in MENDED.values():
        chat = repaired(messages).answered()
        assert ([turn["content"] for turn in chat.messages], list(chat.mapped)) == (words.split(" "), mapped)
    for messages, text in REFUSED.values():
        with pytest.raises(Refused, match=f"^{re.escape(text)}$"):
            repaired(messages).answered()


def test_rows_are_mapped_refused_and_counted(tmp_path):
    rows = [{"messages": messages} for messages, *_ in [*MENDED.values(), *REFUSED.values()]] + [{"other": 1}]
    path = write_lines(tmp_path / "awkward.jsonl", rows)
    examples, report = tokenize_rows(read_rows(path), tokenizer_with(CHATML), 64)
    found = listed(examples)
    assert len(found) == report.examples == report.kept == len(MENDED)
    assert (report.rows, report.refused) == (len(rows), len(REFUSED) + 1)
    named = [f"awkward.jsonl row {len(MENDED) + place}: {text}" for place, (_, text) in enumerate(REFUSED.values())]
    assert report.refusals == named[:5]
    assert report.mapped["leading assistant turn dropped"] == 2
    assert sum(report.mapped.values()) == sum(len(mapped) for *_, mapped in MENDED.values())
    assert report.tokens == sum(len(row["input_ids"]) for row in found)
    assert report.labels == sum(label != IGNORED for row in found for label in row["labels"])
    assert str(report).splitlines()[0].startswith("19 rows read, 8 kept (2 leading assistant turn dropped, ")
    assert str(report).splitlines()[1].startswith("11 rows refused: awkward.jsonl row 8: it has no turns, awkward")
    assert json.loads(json.dumps(vars(report)))["rows"] == 19


def test_counts_are_the_same_when_tokens_come_from_the_cache(chats, monkeypatch):
    tokenizer = tokenizer_with(CHATML)
    first = tokenize_rows(read_rows(chats), tokenizer, 64)
    monkeypatch.setattr("hf_drafthead.training.templates.ChatEncoder.encode", None)
    again = tokenize_rows(read_rows(chats), tokenizer_with(CHATML), 64)
    assert listed(again[0]) == listed(first[0]) and again[1] == first[1]
    with pytest.raises(TypeError):  # another template is not in the cache
        tokenize_rows(read_rows(chats), tokenizer_with(STYLES["vicuna"].template), 64)


def test_chats_are_cut_and_texts_are_split(tmp_path):
    tokenizer = tokenizer_with(CHATML, "metaspace")
    text = "the cat sat on the mat. " * 10
    rows = [{"text": text}, {"messages": turns("the cat", "sat " * 60)}, {"messages": turns("why " * 99, "a")}]
    examples, report = tokenize_rows(read_rows(write_lines(tmp_path / "x.jsonl", rows)), tokenizer, 40)
    *pieces, chat = listed(examples)
    plain = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert [piece["input_ids"][0] for piece in pieces] == [tokenizer.bos_token_id] * len(pieces)
    assert [token for piece in pieces for token in piece["input_ids"][1:]] == plain
    assert [token for piece in pieces for token in piece["labels"][1:]] == plain
    full = tokenizer.apply_chat_template(rows[1]["messages"], return_dict=True)["input_ids"]
    assert chat["input_ids"] == full[:40] and len(full) > 40
    assert (report.rows, report.kept, report.mapped) == (3, 2, {"cut": 1, "split": 1})
    assert report.refusals == ["x.jsonl row 2: no answer within the first 40 tokens"]


def test_what_is_given_of_a_text_is_not_learnt(tmp_path):
    rows = read_rows(write_lines(tmp_path / "x.jsonl", [{"text": "the cat sat", "given": 4}, {"text": "abc"}]))
    tokenizer = tokenizer_with(None)  # texts need no template
    given, whole = tokenize_rows(rows, tokenizer)[0]
    assert given["labels"] == [IGNORED] * 4 + tokenizer("cat sat")["input_ids"]
    assert whole["labels"] == whole["input_ids"] == tokenizer("abc")["input_ids"]


def test_batches_are_padded_on_the_right():
    rows = [{"input_ids": [5, 6, 7], "labels": [IGNORED, 6, 7]}, {"input_ids": [8], "labels": [8]}]
    batch = collate(rows)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 0, 0]]
    assert batch["labels"].tolist() == [[IGNORED, 6, 7], [8, IGNORED, IGNORED]]
    assert batch["label_positions"].tolist() == [1, 2] and "attention_mask" not in batch
    assert {tensor.dtype for tensor in batch.values()} == {torch.long}


BAD_SETTINGS = [
    ({"max_length": 1}, "max_length is 1: expected at least 2 tokens"),
    ({"max_length": 65, "positions": 64}, "max_length is 65, but the base has 64 positions: give at most that many."),
    ({"positions": 60}, "chats.jsonl row 0 has 92 tokens, but the base has 60 positions: set max_length to cut such"),
]


@pytest.mark.parametrize("settings, text", BAD_SETTINGS, ids=["short", "long", "row"])
def test_lengths_that_do_not_fit_are_refused(tmp_path, settings, text):
    path = write_lines(tmp_path / "chats.jsonl", [{"messages": turns("q" * 40, "a" * 31)}])
    with pytest.raises(ValueError) as error:
        tokenize_rows(read_rows(path), tokenizer_with(CHATML), **settings)
    assert text in str(error.value)


def test_data_of_which_nothing_is_left_is_refused(tmp_path):
    rows = [{"messages": [U("u")]}, {"messages": [U("u"), OWL("x")]}, {"text": ""}]
    rows = read_rows(write_lines(tmp_path / "x.jsonl", rows))
    with pytest.raises(ValueError) as error:
        tokenize_rows(rows, tokenizer_with(CHATML), 64)
    assert str(error.value) == (
        "no row of the data can be trained on: 3 of 3 rows were refused (x.jsonl row 0: it has no assistant turn; "
        "x.jsonl row 1: turn 1 has the unknown role 'owl'; x.jsonl row 2: it has no token to train on). "
        "Give chats with answers of the assistant, or text."
    )


FUNCTION = {"name": "add", "parameters": {}}
TOOL_CALL = {"function": {"name": "add", "arguments": '{"a": 1}'}}
WITH_TOOLS = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": None, "tool_calls": [TOOL_CALL]},
    {"role": "tool", "content": "2", "name": "add"},
    {"role": "tool", "content": ""},
    {"role": "assistant", "content": "Two."},
]
OF_SHAREGPT = [
    {"from": "human", "value": "1+1?"},
    {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
    {"from": "observation", "value": "2"},
    {"from": "observation", "value": ""},
    {"from": "gpt", "value": "Two."},
]
AS_OBJECT = {"type": "function", "function": FUNCTION}
CALLED = ['<call>{"name": "add", "arguments": {"a": 1}}', "Two."]
BESIDE = {
    "system": ({"conversations": sharegpt("hi", "Arr!"), "system": "Be a pirate."}, ["Arr!"], "system\nBe a pirate."),
    "system twice": (
        {"messages": [S("B"), U("hi"), A("!")], "system": "B"},
        ["!"],
        "system\nB<|im_end|>\n<|im_start|>",
    ),
    "tools": ({"messages": turns("hi", "Arr!"), "tools": json.dumps([FUNCTION])}, ["Arr!"], '[{"type": "function", '),
    "tools as objects": ({"messages": turns("hi", "!"), "tools": [AS_OBJECT]}, ["!"], '[{"type": "function", "fun'),
    "calls": ({"messages": WITH_TOOLS}, CALLED, "<|im_start|>tool\n2<"),
    "calls as ShareGPT has them": ({"conversations": OF_SHAREGPT}, CALLED, "<|im_start|>tool\n2<"),
    "thoughts of a turn": ({"messages": [U("2+2?"), {**A("4"), "reasoning": "hm"}]}, ["<think>hm</think>4"], ""),
    "thoughts beside the chat": ({"messages": turns("?", "4"), "reasoning_content": "hm"}, ["<think>hm</think>4"], ""),
}


@pytest.mark.parametrize("form", ["lines", "data set"])
@pytest.mark.parametrize("name", BESIDE)
def test_what_stands_beside_a_chat_reaches_the_template(tmp_path, name, form):
    record, answers, shown = BESIDE[name]
    path = write_lines(tmp_path / "x.jsonl", [record])
    rows = datasets.Dataset.from_list([record]) if form == "data set" else read_rows(path)
    tokenizer = tokenizer_with(TOOL_TEMPLATE)
    rows, report = tokenize_rows(rows, tokenizer)
    (row,) = rows
    said = tokenizer.decode([label for label in row["labels"] if label != IGNORED])
    assert said == "".join(f"{answer}<|im_end|>" for answer in answers)  # the assistant's tokens alone are learnt
    assert shown in tokenizer.decode(row["input_ids"])
    assert not report.unused and not report.refused and not any("left out" in kind for kind in report.mapped)


def test_what_is_not_used_is_named(tmp_path):
    rows = [
        {"messages": [U("u"), {**A("a"), "weight": 1}], "prompt": "u", "id": "x", "tools": "no list"},
        {"messages": [U("u"), {**A("a"), "reasoning_content": "hm"}, U("v"), A("b")], "tools": [FUNCTION]},
        {"messages": WITH_TOOLS},
        {"text": "to", "label": None, "url": "y"},
    ]
    path = write_lines(tmp_path / "x.jsonl", rows)
    _, report = tokenize_rows(read_rows(path), tokenizer_with(CHATML))
    assert report.unused == {"prompt": 1, "id": 1, "tools": 1, "messages.weight": 1, "url": 1}
    assert report.mapped == {f"{what} left out by the chat template": 1 for what in ("tools", "thoughts")}
    (refusal,) = report.refusals
    assert refusal.endswith("row 2: the chat template does not show calls of tools and their answers: set another")
    assert str(report).splitlines()[-1].startswith("not used: prompt (1 rows), id (1 rows), tools (1 rows)")
    _, report = tokenize_rows(read_rows(path), tokenizer_with(TOOL_TEMPLATE))  # which drops earlier thoughts
    assert report.mapped == {"thoughts left out by the chat template": 1}
