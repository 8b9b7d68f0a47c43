"""What `hf-drafthead serve` refuses before it starts, and which models it serves."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from transformers import AutoModelForCausalLM

from hf_drafthead import serving
from hf_drafthead.cli import main
from tests.checkpoints import byte_tokenizer
from tests.families import FAMILIES
from tests.serving.conftest import post
from tests.serving.running import in_process

SAID = {"prompt": "abc", "max_tokens": 12}
ANSWER = "defghijklmno"


@pytest.mark.few(1)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_heads_of_every_family_are_served_and_answer_two_at_a_time(family, folder, tmp_path):
    base = AutoModelForCausalLM.from_pretrained(folder.parent / "base")
    family.build(base).save_pretrained(tmp_path / "heads")
    byte_tokenizer().save_pretrained(tmp_path / "heads")
    with in_process(tmp_path / "heads") as client:

        def ask(start: str) -> str:
            return post(client, "completions", prompt=start, max_tokens=8)["choices"][0]["text"]

        with ThreadPoolExecutor(2) as pool:
            assert [*pool.map(ask, ["abc", "f"])] == ["defghijk", "ghijklmn"]


def test_a_base_without_heads_is_served_and_copies_its_guesses(folder, tmp_path):
    AutoModelForCausalLM.from_pretrained(folder.parent / "base").save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    with in_process(tmp_path) as client:
        assert post(client, "completions", **SAID)["choices"][0]["text"] == ANSWER
        assert client.served.model.drafter.copies


@pytest.mark.slow
def test_answers_are_one_text_whatever_the_generation_config_says(folder, tmp_path):
    form = {"return_dict_in_generate": True, "output_scores": True, "num_return_sequences": 2, "do_sample": True}
    base = AutoModelForCausalLM.from_pretrained(folder.parent / "base")
    base.generation_config.update(**form, top_k=1, stop_strings="n")
    base.save_pretrained(tmp_path / "base")
    FAMILIES[0].build(AutoModelForCausalLM.from_pretrained(tmp_path / "base")).save_pretrained(tmp_path / "heads")
    byte_tokenizer().save_pretrained(tmp_path / "heads")
    with in_process(tmp_path / "heads") as client:
        assert post(client, "completions", **SAID)["choices"][0]["text"] == ANSWER[:-2]
        assert '"error"' not in client.post("/v1/completions", json=SAID | {"stream": True}).text


@pytest.mark.parametrize("answers", [True, False], ids=["answers are copied", "no answer is copied"])
def test_answers_of_others_are_copied_where_the_operator_says_so(answers, folder):
    """The second answer then takes fewer steps, and has the same text; by default it takes as many."""
    with in_process(folder, context=1000, **({"lookup_answers": True} if answers else {})) as client:
        steps, model = [], client.served.model
        model.base.model.layers[0].register_forward_hook(lambda *given: steps.append(1))
        counts = []
        for _ in range(3):
            steps.clear()
            assert post(client, "completions", prompt="abc", max_tokens=20)["choices"][0]["text"].startswith("defgh")
            counts.append(len(steps))
    assert counts[2] < counts[0] / 2 if answers else counts[2] == counts[1] > 10, counts


@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize("call", ["chat/completions", "completions"])
def test_heads_learn_from_requests_that_say_so(call, learns, folder):
    said = {"completions": {"prompt": "abc"}, "chat/completions": {"messages": [{"role": "user", "content": "abc"}]}}
    body = {**said[call], "max_tokens": 8}
    with in_process(folder, context=1000, learn=learns) as client:
        post(client, call, **body)
        refused = client.post(f"/v1/{call}", json=body | {"store": True})
        learner = client.served.manager.learner
        assert refused.status_code == (200 if learns else 400)
        assert learner.texts.seen == 1 if learns else "`serve --learn`" in refused.text and learner is None
        assert ("hf_drafthead_learning_rounds_total 0" in client.get("/metrics").text) == learns


@pytest.mark.parametrize("missing", [["uvicorn"], ["fastapi", "uvicorn"]])
def test_missing_packages_are_named(folder, monkeypatch, missing):
    monkeypatch.setattr(serving, "find_spec", lambda name: None if name in missing else object())
    with pytest.raises(OSError) as refused:
        serving.serve(str(folder))
    names = [name for name in serving.NEEDED if name in missing]
    assert str(refused.value) == (
        f"to serve a model {', '.join(names)} must be installed: pip install 'hf-drafthead[serving]'."
    )


@pytest.mark.parametrize(
    "model, options, line",
    [
        ("heads", ["--prot", "3"], "unrecognized arguments: --prot 3: see `hf-drafthead serve --help`."),
        ("heads", ["--port", "x"], "argument --port: invalid int value: 'x': see `hf"),
        ("heads", ["--port", "65536"], "--port is 65536: expected a number from 0 to 65535."),
        ("heads", {"slots": 0}, "--slots is 0: expected a number from 1 to 4096."),
        ("heads", ["--stop-within", "nan"], "--stop-within is nan: expected a number from 0 to 86400."),
        ("heads", {"no_such": 2}, "unknown options ['no_such']: see `hf"),
        ("nowhere", [], "'...nowhere' is no folder, id or file of weights: give one."),
    ],
)
def test_what_cannot_be_served_is_refused_before_the_server_starts(folder, model, options, line):
    given = (options, {}) if isinstance(options, list) else ([], options)
    with pytest.raises((OSError, ValueError)) as refused:
        serving.serve(str(folder.parent / model), given[0], **given[1])
    assert str(refused.value).replace(str(folder.parent) + "/", "...").startswith(line)


def test_help_names_the_options(capsys):
    with pytest.raises(SystemExit) as end:
        main(["serve", "--help"])
    said = capsys.readouterr().out
    assert end.value.code == 0 and said.startswith("usage: hf-drafthead serve")
    assert all(option in said for option in ("--port", "--slots", "--lookup-answers", "--stop-within", "--context"))
