"""The base answers by itself; nothing is lost, and nothing depends on batches or interruptions."""

import contextlib
import copy
import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from datasets import Dataset

from hf_drafthead.data.chats import repaired
from hf_drafthead.data.sources import read_rows
from hf_drafthead.modeling import MedusaForCausalLM
from hf_drafthead.training.answers import ONE_TEXT, RowDraws
from hf_drafthead.training.collect import DistillReport
from hf_drafthead.training.data import tokenize_rows
from hf_drafthead.training.distill import distill
from hf_drafthead.training.heads_loss import IGNORED
from hf_drafthead.training.templates import ChatEncoder
from tests.bases import tiny_base
from tests.callers.table import SETTINGS as OF_GENERATE
from tests.training.chat_templates import CHATML, STYLES, VICUNA, tokenizer_with

WORDS = ["why", "what is it", "who are you then", "a", "is that so", "when", "how", "but where"]
CHATS = [
    {"messages": [{"role": "user", "content": WORDS[(3 * row + turn) % 8]} for turn in range(1 + row % 3)]}
    for row in range(7)
]
for chat in CHATS:  # each question with an answer that nobody is to see
    chat["messages"] = [turn for one in chat["messages"] for turn in (one, {"role": "assistant", "content": "NEVER"})]
SETTINGS = {"max_new_tokens": 12, "batch_size": 3}
SAMPLED = {"temperature": 1.1, "top_p": 0.9, "seed": 3}


def letters_base(tokenizer, **overrides):
    """A random base that writes letters, spaces and its ends, and nothing that is no text."""
    base = tiny_base("llama", vocab_size=len(tokenizer), **overrides)
    allowed = set(tokenizer("abcdefghijklmnop ")["input_ids"]) | {tokenizer.eos_token_id}
    base.generation_config.suppress_tokens = sorted(set(range(len(tokenizer))) - allowed)
    return base


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_with(VICUNA)


@pytest.fixture(scope="module")
def base(tokenizer):
    return letters_base(tokenizer)


@pytest.fixture(scope="module")
def heads(tokenizer):
    return MedusaForCausalLM.from_base(letters_base(tokenizer), num_draft_heads=3).eval()


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def by_hand(base, tokenizer, questions: list[str], max_new_tokens: int) -> list[dict]:
    """A chat, one generate() per turn, nothing else in the batch."""
    messages = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        how = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
        prompt = tokenizer.apply_chat_template(messages, **how)
        ids = base.generate(**prompt, max_new_tokens=max_new_tokens, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        ended = ids[-1] == tokenizer.eos_token_id
        answer = tokenizer.decode(ids, skip_special_tokens=True).removeprefix(" ")
        if not answer.strip():
            messages.pop()
            break
        written = {"role": "assistant", "content": answer, "ids": ids.tolist()}
        messages.append(written if ended else written | {"cut": True})
        if not ended:
            break
    return messages


def test_an_answer_is_what_generate_says_to_the_chat_so_far(base, tokenizer, tmp_path):
    report = distill(base, tokenizer, iter(CHATS), tmp_path / "out.jsonl", **SETTINGS)
    rows = read(tmp_path / "out.jsonl")
    expected = {}
    for number, chat in enumerate(CHATS):
        questions = [turn["content"] for turn in chat["messages"] if turn["role"] == "user"]
        expected[number] = by_hand(base, tokenizer, questions, 12)
    assert {row["row"]: row["messages"] for row in rows} == {row: said for row, said in expected.items() if said}
    assert any(len(row["messages"]) > 2 for row in rows) and "NEVER" not in (tmp_path / "out.jsonl").read_text()
    assert (report.rows, report.written, report.found, report.refused) == (7, len(rows), 0, 7 - len(rows))
    assert report.refusals == [f"row {row}: the answer is empty" for row, said in expected.items() if not said]
    assert report.cut == sum(turn.get("cut", False) for row in rows for turn in row["messages"])


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_rows_depend_neither_on_heads_nor_on_the_batch(base, heads, tokenizer, tmp_path, sampling):
    reports = []
    for model, size in ((base, 1), (base, 8), (heads, 3)):
        how = {"max_new_tokens": 12, "batch_size": size, **sampling}
        reports.append(distill(model, tokenizer, CHATS, tmp_path / f"{size}.jsonl", **how))
    assert len({file.read_text() for file in tmp_path.glob("?.jsonl")}) == 1
    plain, _, fast = reports
    assert plain.tokens_per_step is None and fast.tokens_per_step >= 1
    assert (plain.answers, plain.cut, plain.tokens) == (fast.answers, fast.cut, fast.tokens)


def test_seeds_and_rows_differ(base, tokenizer, tmp_path):
    same = [{"messages": [{"role": "user", "content": "why"}]}] * 8
    answers = []
    for seed in (0, 1):
        distill(base, tokenizer, same, tmp_path / f"{seed}.jsonl", max_new_tokens=12, temperature=4.0, seed=seed)
        answers += [json.dumps(row["messages"]) for row in read(tmp_path / f"{seed}.jsonl")]
    assert len(set(answers)) > 9  # some are alike for being short


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_draws_are_from_the_distribution(top_p):
    chances = torch.tensor([0.5, 0.3, 0.15, 0.05])
    draws = 4000
    draw = RowDraws([f"0/{row}/0" for row in range(draws)], 1, 9, [2.0] * draws, top_p)
    tokens = draw(torch.zeros(draws, 5, dtype=torch.long), 2 * chances.log().expand(draws, -1)).argmax(-1)
    kept = torch.where(torch.tensor([True, True, top_p == 1, top_p == 1]), chances, torch.zeros(4))
    expected = kept / kept.sum()
    found = torch.tensor([Counter(tokens.tolist())[token] / draws for token in range(4)])
    assert (found - expected).abs().max() < 0.025  # three standard deviations
    assert ((expected > 0) | (found == 0)).all()


def test_the_draws_of_some_rows_are_theirs():
    keys, scores = ["a", "b", "c"], torch.zeros(3, 50)
    prefix = torch.zeros(3, 4, dtype=torch.long)
    draw = RowDraws(keys, 2, 5, [1.0, 1.0, 0.7], 1.0)
    assert torch.equal(draw.for_rows([2, 0])(prefix[:2], scores[:2]), draw(prefix, scores)[[2, 0]])
    assert not torch.equal(draw(prefix[:, :3], scores), draw(prefix, scores))
    longer = RowDraws(keys, 3, 5, [1.0, 1.0, 0.7], 1.0)
    assert torch.equal(draw(prefix, scores), longer(prefix[:, [0, *range(4)]], scores))


def test_rows_without_a_temperature_stay_greedy_and_what_is_impossible_is_never_drawn():
    scores = torch.tensor([[0.0, 3.0, -torch.inf, 1.0, -torch.inf]]).expand(200, -1)
    draw = RowDraws([str(row) for row in range(200)], 1, 1, [0.0, 9.0] * 100, 1.0)
    draw.uniforms[1] = 1.0  # rounded up
    tokens = draw(torch.zeros(200, 1, dtype=torch.long), scores).argmax(-1)
    assert set(tokens[::2].tolist()) == {1} and set(tokens[1::2].tolist()) == {0, 1, 3} and tokens[1] == 3


class Killed(Exception):
    pass


def killer(after: int):
    """A bar that ends a run at a step."""
    left = iter(range(after))

    def step() -> None:
        if next(left, None) is None:
            raise Killed

    return lambda count: contextlib.nullcontext(lambda part: step)


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_a_run_that_was_killed_goes_on_where_it_stopped(base, tokenizer, tmp_path, sampling):
    whole, output, rows = tmp_path / "whole.jsonl", tmp_path / "out.jsonl", CHATS * 2
    distill(base, tokenizer, rows, whole, **SETTINGS, **sampling)
    answered = len(read(whole))
    found = []
    for after in (2, 7):
        with pytest.raises(Killed):
            distill(base, tokenizer, rows, output, **SETTINGS | {"batch_size": 2}, **sampling, bar=killer(after))
        found.append(len(output.read_bytes().splitlines()))
        with open(output, "ab") as part:
            part.write(b'{"row": 6, "messages": [{"ro')
    assert 0 < found[0] < found[1] < answered
    report = distill(base, tokenizer, rows, output, **SETTINGS, **sampling)
    assert (report.found, report.written) == (found[1], answered - found[1])
    assert output.read_text() == whole.read_text()
    again = distill(base, tokenizer, rows, output, **SETTINGS, **sampling)
    assert (again.found, again.written) == (answered, 0)
    assert sorted(path.name for path in tmp_path.glob("out*")) == ["out.jsonl", "out.jsonl.settings.json"]
    assert output.read_text() == whole.read_text()


@pytest.mark.parametrize(
    "change, text",
    [
        ({"seed": 4}, "was started with seed=3, but now seed=4: use the same setting, or give another output."),
        ({"temperature": 0.5}, "was started with temperature=1.1, but now temperature=0.5"),
        ({"max_new_tokens": 3}, "was started with max_new_tokens=12, but now max_new_tokens=3"),
        ({"rows": CHATS[1:]}, "was started with data='"),
    ],
    ids=["seed", "temperature", "length", "data"],
)
def test_an_output_is_not_mixed_from_two_settings(base, tokenizer, tmp_path, change, text):
    asked = {"rows": CHATS[:2], **SETTINGS, **SAMPLED}
    distill(base, tokenizer, output=tmp_path / "out.jsonl", **asked)
    before = (tmp_path / "out.jsonl").read_bytes()
    with pytest.raises(ValueError) as error:
        distill(base, tokenizer, output=tmp_path / "out.jsonl", **asked | change)
    assert text in str(error.value)
    other = copy.deepcopy(base)  # of the same name
    with torch.no_grad():
        other.get_input_embeddings().weight.mul_(1.5)
    with pytest.raises(ValueError, match="was started with weights='[0-9a-f]{16}', but now weights="):
        distill(other, tokenizer, output=tmp_path / "out.jsonl", **asked)
    assert (tmp_path / "out.jsonl").read_bytes() == before


def test_another_file_is_not_overwritten(base, tokenizer, tmp_path):
    output = tmp_path / "out.jsonl"
    output.write_text("mine")
    with pytest.raises(OSError, match="exists and was not written by this command: move it away, or give another"):
        distill(base, tokenizer, CHATS, output)
    assert output.read_text() == "mine"
    output.unlink()
    distill(base, tokenizer, CHATS[:2], output, **SETTINGS)
    output.write_text("{}\n")
    with pytest.raises(ValueError, match="out.jsonl line 1 is not a valid row: correct it, or move the file away"):
        distill(base, tokenizer, CHATS[:2], output, **SETTINGS)


def test_texts_are_continued_from_their_beginning(base, tokenizer, tmp_path):
    texts = [{"text": "the cat sat on the mat"}, {"text": "hm"}, {"text": "a 🙂 b"}]
    distill(base, tokenizer, texts, tmp_path / "out.jsonl", max_new_tokens=9, prompt_tokens=4)
    rows = read(tmp_path / "out.jsonl")
    assert [row["text"][: row["given"]] for row in rows] == ["the ", "hm", "a "]  # the fourth token is half a smile
    for row in rows:
        prompt = tokenizer(row["text"][: row["given"]], return_tensors="pt")
        ids = base.generate(**prompt, max_new_tokens=9, do_sample=False)
        assert row["text"] == tokenizer.decode(ids[0], skip_special_tokens=True)


def test_a_data_set_with_a_format_for_another_library_is_asked_as_without_it(base, tokenizer, tmp_path):
    rows = Dataset.from_list([{"messages": [{"role": "user", "content": "the cat"}]}])
    for name, data in (("plain", rows), ("formatted", rows.with_format("numpy"))):
        distill(base, tokenizer, data, tmp_path / f"{name}.jsonl", **SETTINGS)
    assert read(tmp_path / "plain.jsonl") == read(tmp_path / "formatted.jsonl")


def test_a_chat_ends_where_it_has_no_more_room(base, tokenizer, tmp_path):
    lengths = []
    for chat in CHATS:
        text = tokenizer.apply_chat_template(chat["messages"][:1], add_generation_prompt=True, tokenize=False)
        lengths.append(len(tokenizer(text)["input_ids"]))
    limit = sorted(lengths)[3] + 5
    report = distill(base, tokenizer, CHATS, tmp_path / "out.jsonl", max_length=limit, **SETTINGS)
    free = tmp_path / "free.jsonl"
    distill(base, tokenizer, CHATS, free, **SETTINGS)
    full = {row["row"]: row["messages"] for row in read(free)}
    rows = {row["row"]: row["messages"] for row in read(tmp_path / "out.jsonl")}
    assert set(rows) == {row for row, length in enumerate(lengths) if length < limit and row in full}
    assert report.refused == 7 - len(rows) > 0
    assert any("leaves no room for an answer in" in reason for reason in report.refusals)
    for row, messages in rows.items():
        text = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, tokenize=False) + " "
        answer = messages[1]["content"]
        assert len(tokenizer(text + answer)["input_ids"]) <= limit + 1  # the template's space is not the base's
        assert full[row][1]["content"].startswith(answer)


def test_an_answer_ends_at_the_end_of_turn_that_only_the_template_knows(tmp_path):
    tokenizer = tokenizer_with(CHATML)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    base = letters_base(tokenizer)
    base.generation_config.suppress_tokens = None
    base.generation_config.forced_eos_token_id = None
    base.generation_config.sequence_bias = {(end,): 1000.0}
    rows = [*CHATS[:1], {"text": "the cat sat"}]
    report = distill(base, tokenizer, rows, tmp_path / "end.jsonl", max_new_tokens=5)
    assert (report.tokens, report.cut, report.refusals) == (2, 0, ["row 0: the answer is empty"])
    assert [row["ids"] for row in read(tmp_path / "end.jsonl")] == [[end]]


@pytest.mark.parametrize("name", ["vicuna", "chatml", "stripping", "without end of turn"])
def test_what_was_written_is_learnt_as_it_was_written(tmp_path, name):
    tokenizer = tokenizer_with(STYLES[name].template)
    base = letters_base(tokenizer)
    distill(base, tokenizer, CHATS, tmp_path / "out.jsonl", **SETTINGS, **SAMPLED)
    encoder, learnt = ChatEncoder(tokenizer), 0
    for row in read(tmp_path / "out.jsonl"):
        answers = [turn["content"] for turn in row["messages"] if turn["role"] == "assistant"]
        if answers:
            chat = repaired(row["messages"]).answered()
            text, spans = encoder.spans(chat)
            found = [text[begin:end] for begin, end in spans]
            said = STYLES[name].said(answers)
            if chat.cut:
                said[-1] = said[-1].removesuffix(encoder.end_of_turn)
            assert found == said
            learnt += len(found)
    assert learnt > 4


@pytest.mark.parametrize("form", ["chats", "texts"])
def test_bytes_that_are_no_text_do_not_change_what_is_learnt(tmp_path, form):
    tokenizer = tokenizer_with(CHATML)
    base = tiny_base("llama", vocab_size=len(tokenizer))  # which writes any bytes
    data = CHATS if form == "chats" else [{"prompt": words} for words in WORDS]
    distill(base, tokenizer, data, tmp_path / "out.jsonl", **SETTINGS)
    assert "\N{REPLACEMENT CHARACTER}" in (tmp_path / "out.jsonl").read_text()
    examples, report = tokenize_rows(read_rows(tmp_path / "out.jsonl"), tokenizer)
    assert report.refused == 0
    agreed = labels = 0
    for example in examples:
        ids, learnt = torch.tensor(example["input_ids"]), torch.tensor(example["labels"])
        guessed = base(ids[None]).logits[0, :-1].argmax(-1)
        first = int((learnt != IGNORED).nonzero()[0])
        answer = slice(first, first + 12)  # the first one: later ones are asked for behind its text
        agreed += int((guessed[first - 1 : first + 11] == learnt[answer]).sum())
        labels += int((learnt[answer] != IGNORED).sum())
    assert agreed == labels > 50


def test_prompts_and_questions_are_asked(base, tokenizer, tmp_path):
    rows = [{"prompt": "what is it " * 9}, {"turns": ["why", "when"]}, {"prompt": ["why", "when"]}]
    distill(base, tokenizer, rows, tmp_path / "out.jsonl", **SETTINGS, prompt_tokens=4)
    prompt, *chats = read(tmp_path / "out.jsonl")
    assert prompt["text"][: prompt["given"]] == "what is it " * 9  # all of it, however many tokens of a text are given
    assert chats[0]["messages"] == chats[1]["messages"] == by_hand(base, tokenizer, ["why", "when"], 12)


BAD_SETTINGS = [
    ({"max_new_tokens": 0}, "max_new_tokens is 0: expected at least 1."),
    ({"batch_size": 0}, "batch_size is 0: expected at least 1."),
    ({"prompt_tokens": 0}, "prompt_tokens is 0: expected at least 1."),
    ({"temperature": -1.0}, "temperature is -1.0: expected 0 for greedy, or a number above it."),
    ({"top_p": 0.0}, "top_p is 0.0: expected a number above 0, at most 1."),
    ({"max_length": 513}, "max_length is 513, but the base has 512 positions: give at most that many."),
    ({"rows": []}, "there is nothing to ask in the data: 0 of 0 rows were refused."),
    (
        {"rows": [{"messages": []}]},
        "there is nothing to ask in the data: 1 of 1 rows were refused (row 0: it has no turns).",
    ),
]


@pytest.mark.parametrize("settings, text", BAD_SETTINGS)
def test_bad_settings_are_refused_in_one_line(base, tokenizer, tmp_path, settings, text):
    with pytest.raises(ValueError) as error:
        distill(base, tokenizer, output=tmp_path / "out.jsonl", **{"rows": CHATS, **settings})
    assert str(error.value) == text
    assert not (tmp_path / "out.jsonl").exists()


def test_chats_need_a_template(base, tokenizer, tmp_path):
    with pytest.raises(ValueError, match="the tokenizer of '' has no chat template: give the one the base was"):
        distill(base, tokenizer_with(None), CHATS, tmp_path / "out.jsonl")
    report = distill(base, tokenizer, CHATS[:1], tmp_path / "out.jsonl", **SETTINGS)
    assert report.written == 1  # what no row depends on does not stand in the way
    # and texts need none that shows a lone question
    tokenizer = tokenizer_with("{% if messages|length < 2 %}{{ raise_exception('two at least') }}{% endif %}" + CHATML)
    report = distill(letters_base(tokenizer), tokenizer, [{"text": "the cat"}], tmp_path / "texts.jsonl", **SETTINGS)
    assert report.written == 1
    with pytest.raises(ValueError, match=r"cannot show a question .*: the chat template refuses it \(two at least\)"):
        distill(letters_base(tokenizer), tokenizer, CHATS[:1], tmp_path / "chats.jsonl", **SETTINGS)


def test_the_report_is_two_lines():
    report = DistillReport(9, 5, 3, 1, ["row 2: why"], 8, 2, 1000, 40, 100, 3.25)
    assert str(report) == (
        "5 rows written, 3 were there already: 8 answers of 1,000 tokens in 3.2 s, 2 cut, 2.50 tokens per step\n"
        "1 rows refused: row 2: why"
    )
    assert report.to_json()["refusals"] == ["row 2: why"]


FIELDS = {name: tried.call for name, tried in OF_GENERATE.items() if not isinstance(tried.call, str)}


@pytest.mark.parametrize("with_heads", [False, True], ids=["base", "heads"])
@pytest.mark.parametrize("name", FIELDS)
def test_any_field_of_the_bases_generation_config_may_be_set(name, with_heads, tokenizer, tmp_path):
    """Its rows are written, and what changes no text changes none of them."""
    plain = letters_base(tokenizer)
    fields = FIELDS[name] if isinstance(FIELDS[name], dict) else FIELDS[name](plain)
    base = letters_base(tokenizer)
    for field in fields.keys() & vars(base.generation_config).keys():
        setattr(base.generation_config, field, fields[field])
    if name.startswith("forced"):  # what is forced is not suppressed
        base.generation_config.suppress_tokens = plain.generation_config.suppress_tokens = None
    rows = [{"prompt": "the cat"}, {"text": "a dog on a mat"}]
    model = MedusaForCausalLM.from_base(base, num_draft_heads=2).eval() if with_heads else base
    distill(model, tokenizer, rows, tmp_path / "set.jsonl", max_new_tokens=6)
    written = read(tmp_path / "set.jsonl")
    if name in {*ONE_TEXT, "forced_eos_token_id"} - {"stop_strings"}:
        distill(plain, tokenizer, rows, tmp_path / "plain.jsonl", max_new_tokens=6)
        assert written == read(tmp_path / "plain.jsonl")


@pytest.mark.parametrize("with_heads", [False, True], ids=["base", "heads"])
def test_an_answer_ends_where_the_base_s_stop_string_does(tokenizer, tmp_path, with_heads):
    base = letters_base(tokenizer)
    model = MedusaForCausalLM.from_base(base, num_draft_heads=2).eval() if with_heads else base
    rows = [{"prompt": "the cat"}, {"prompt": "a dog"}]
    distill(model, tokenizer, rows, tmp_path / "whole.jsonl", max_new_tokens=12)
    whole = [row["text"][row["given"] :] for row in read(tmp_path / "whole.jsonl")]
    string = whole[0][3:5]
    base.generation_config.stop_strings = model.generation_config.stop_strings = [string]
    distill(model, tokenizer, rows, tmp_path / "ended.jsonl", max_new_tokens=12)
    for row, text in zip(read(tmp_path / "ended.jsonl"), whole, strict=True):
        assert row["text"][row["given"] :] == text.partition(string)[0] + (string if string in text else "")
        written = [token for token in row["ids"] if token != tokenizer.eos_token_id]
        assert tokenizer.decode(written) == row["text"][row["given"] :]
