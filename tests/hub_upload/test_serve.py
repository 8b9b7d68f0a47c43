"""transformers' own server on a model with draft heads, asked as any OpenAI-compatible server is."""

import asyncio
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, GenerationConfig

from hf_drafthead.cli import main
from hf_drafthead.generation.lookup import TextIndex
from hf_drafthead.hub_upload import serve as serving
from tests.checkpoints import byte_tokenizer
from tests.families import FAMILIES
from tests.hub_upload.clients import environment
from tests.hub_upload.serving import running_server, served
from tests.hub_upload.test_push import command

SAID = {"prompt": "abc", "max_tokens": 12}
ANSWER = "defghijklmno"
ASKED = {"messages": [{"role": "user", "content": "ab"}, {"role": "user", "content": "c"}], "max_tokens": 12}


@pytest.fixture(scope="module")
def folder(models, tmp_path_factory) -> Path:
    """Heads with a chat template, which says the turns one behind the other."""
    folder = tmp_path_factory.mktemp("served")
    shutil.copytree(models / "base", folder / "base")
    shutil.copytree(models / "medusa", folder / "heads")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer.save_pretrained(folder / "heads")
    return folder / "heads"


@pytest.fixture(scope="module")
def server(folder) -> Iterator[tuple[str, str]]:
    """Address and model of a running `hf-drafthead serve`."""
    served()
    with running_server(folder, folder.parent / "log") as url:
        yield url, str(folder)


@pytest.fixture(scope="module")
def client(server):
    from openai import OpenAI

    return OpenAI(base_url=f"{server[0]}/v1", api_key="none", max_retries=0)


def test_completions(server, client):
    done = client.completions.create(model=server[1], **SAID)
    assert done.choices[0].text == ANSWER
    assert done.usage.completion_tokens == 12


def test_completions_as_a_stream(server, client):
    pieces = list(client.completions.create(model=server[1], stream=True, **SAID))
    assert "".join(piece.choices[0].text for piece in pieces) == ANSWER
    assert sum(1 for piece in pieces if piece.choices[0].text) == 12


def test_chat(server, client):
    done = client.chat.completions.create(model=server[1], **ASKED)
    assert done.choices[0].message.content == ANSWER


def test_chat_as_a_stream(server, client):
    pieces = list(client.chat.completions.create(model=server[1], stream=True, **ASKED))
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices) == ANSWER


def test_requests_at_once_do_not_disturb_each_other(server, client):
    def ask(start: str) -> str:
        if start < "e":
            return client.completions.create(model=server[1], prompt=start, max_tokens=8).choices[0].text
        stream = client.completions.create(model=server[1], prompt=start, max_tokens=8, stream=True)
        return "".join(piece.choices[0].text for piece in stream)

    letters = "abcdefghijklmnopqrstuvwxyz"
    starts = letters[:8]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, starts))
    assert answers == [letters[place + 1 : place + 9] for place in range(8)]


@pytest.mark.few(1)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_heads_of_every_family_are_served_and_answer_two_at_a_time(family, folder, tmp_path):
    from openai import OpenAI

    served()
    base = AutoModelForCausalLM.from_pretrained(folder.parent / "base")
    family.build(base).save_pretrained(tmp_path / "heads")

    with running_server(tmp_path / "heads", tmp_path / "log") as url:
        client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

        def ask(start: str) -> str:
            done = client.completions.create(model=str(tmp_path / "heads"), prompt=start, max_tokens=8)
            return done.choices[0].text

        with ThreadPoolExecutor(2) as pool:
            answers = list(pool.map(ask, ["abc", "f"]))
    assert answers == ["defghijk", "ghijklmn"]
    fallbacks = [line for line in (tmp_path / "log").read_text().splitlines() if "decodes by itself" in line]
    assert all("On this machine" in line for line in fallbacks), fallbacks  # where no step of so small a base pays


@pytest.mark.slow
def test_answers_are_one_text_whatever_the_generation_config_says(folder, tmp_path):
    from openai import OpenAI

    served()
    form = {"return_dict_in_generate": True, "output_scores": True, "num_return_sequences": 2, "do_sample": True}
    base = AutoModelForCausalLM.from_pretrained(folder.parent / "base")
    base.generation_config.update(**form, top_k=1)
    base.save_pretrained(tmp_path / "base")
    byte_tokenizer().save_pretrained(tmp_path / "base")
    FAMILIES[0].build(AutoModelForCausalLM.from_pretrained(tmp_path / "base")).save_pretrained(tmp_path / "heads")

    with running_server(tmp_path / "heads", tmp_path / "log") as url:
        client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        asked = {"model": str(tmp_path / "heads"), **SAID}
        assert client.completions.create(**asked).choices[0].text == ANSWER
        pieces = list(client.completions.create(**asked, stream=True))
    assert "".join(piece.choices[0].text for piece in pieces) == ANSWER


FINDS = """
import sys
from hf_drafthead.hub_upload import serve  # before anything of transformers that is imported late
from hf_drafthead.modeling.families import BY_MODEL_TYPE
import transformers.processing_utils
serve.introduce()
from transformers.cli.serving import model_manager
for model_class in BY_MODEL_TYPE.values():
    assert getattr(model_manager.transformers, model_class.__name__) is model_class
"""


@pytest.mark.slow
def test_the_server_finds_the_classes_wherever_transformers_was_imported_first():
    served()
    ended = subprocess.run([sys.executable, "-c", FINDS], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("answers", [True, False], ids=["answers are copied", "named texts alone"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_requests_that_are_decoded_one_by_one_copy_guesses(stream, answers, folder, monkeypatch):
    """From what was answered before, unless that is turned off; the text stays."""
    served()
    from transformers.cli.serving.utils import GenerateManager

    for name in ("generate_streaming", "generate_non_streaming"):
        monkeypatch.setattr(GenerateManager, name, getattr(GenerateManager, name))  # put back behind the test
    serving.copy_from(TextIndex(capacity=4096), answers)
    model, tokenizer, steps = AutoModelForCausalLM.from_pretrained(folder), byte_tokenizer(), []
    model.base.model.layers[0].register_forward_hook(lambda *given: steps.append(1))
    config = GenerationConfig(max_new_tokens=20, do_sample=False, draft_tree=[[rank] for rank in range(12)])
    model.generate(tokenizer("x", return_tensors="pt").input_ids, config, max_new_tokens=2)  # the base is probed once
    manager = GenerateManager()

    async def ask() -> str:
        inputs = dict(tokenizer("abc", return_tensors="pt", return_token_type_ids=False))
        if not stream:
            return (await manager.generate_non_streaming(model, tokenizer, inputs, config, "id"))[0]
        pieces, _ = manager.generate_streaming(model, tokenizer, inputs, config, "id")
        text = ""
        while isinstance(piece := await pieces.get(), str):
            text += piece
        assert piece is None, piece
        await manager.async_submit(int)  # the thread has noted the answer
        return text

    counts = []
    for _ in range(2):
        steps.clear()
        assert asyncio.run(ask()) == "defghijklmnopqrstuvw"
        counts.append(len(steps))
    assert counts[1] < counts[0] / 2 if answers else counts[1] == counts[0], counts


def test_the_model_that_is_served_is_listed(server, client):
    assert [model.id for model in client.models.list()] == [server[1]]


@pytest.mark.slow
def test_transformers_chat_talks_to_it(server, tmp_path):
    code = "from transformers.cli.transformers import app; app()"
    words = [sys.executable, "-c", code, "chat", server[1], server[0], "max_new_tokens=5", "do_sample=False"]
    environ = environment("http://127.0.0.1:9", tmp_path) | {"COLUMNS": "200"}
    said = subprocess.run(words, input="abc\n!exit\n", text=True, capture_output=True, env=environ, timeout=200)
    assert "defgh" in said.stdout, said.stdout + said.stderr


@pytest.mark.parametrize("missing", [["openai"], ["fastapi", "uvicorn"]])
def test_missing_packages_are_named(folder, monkeypatch, missing):
    monkeypatch.setattr(serving, "find_spec", lambda name: None if name in missing else object())
    with pytest.raises(OSError) as refused:
        serving.serve(str(folder), [])
    assert str(refused.value) == (
        f"to serve a model {', '.join(missing)} must be installed: pip install 'transformers[serving]'."
    )


@pytest.mark.parametrize(
    "model, options, line",
    [
        ("heads", ["--cb-num-blocks=3"], "--cb-num-blocks describes pages, which are not used with heads: leave it"),
        (
            "heads",
            ["--prot", "3"],
            "No such option '--prot'. (Did you mean one of: '--host', '--port'?): see `hf",
        ),
        (
            "heads",
            ["--port", "x"],
            "Invalid value for '--port': 'x' is not a valid integer: see `hf",
        ),
        (
            "heads",
            {"slots": 2},
            "--slots is of many requests at once: give --continuous-batching too, or leave it out.",
        ),
        (
            "heads",
            {"lookup_texts": Path("none")},
            "--lookup-texts: 'none' is no folder: name a folder of text files to",
        ),
        ("base", [], "'...base' holds a 'llama' model without draft heads: give the folder of a draft-head"),
        ("bare", [], "'...bare' has no tokenizer: save the base's there, tokenizer.save_pretrained('"),
        ("nowhere", [], "there is no folder '...nowhere': give the folder of a draft-head checkpoint, or its id"),
    ],
)
def test_what_cannot_be_served_is_refused_before_the_server_starts(folder, monkeypatch, model, options, line):
    monkeypatch.setattr(serving, "find_spec", lambda name: object())
    bare = folder.parent / "bare"
    if not bare.exists():
        shutil.copytree(folder, bare, ignore=shutil.ignore_patterns("tokenizer*", "chat_template*"))
    with pytest.raises((OSError, ValueError)) as refused:
        given = {"arguments": options} if isinstance(options, list) else {"arguments": [], **options}
        serving.serve(str(folder.parent / model), **given)
    assert str(refused.value).replace(str(folder.parent) + "/", "...").startswith(line)


def test_a_name_that_the_hub_does_not_have_is_refused(hub, clients):
    served()
    answer = command(clients, "serve", "org/nothing", token=None)
    assert answer.code == 2
    assert answer.err.startswith(
        "hf-drafthead: the heads 'org/nothing' cannot be fetched: the Hub has no such repository"
    )
    assert answer.err.count("\n") == 1


def test_help_names_the_options_of_the_server(capsys):
    with pytest.raises(SystemExit) as end:
        main(["serve", "--help"])
    said = capsys.readouterr().out
    assert end.value.code == 0
    assert "Usage: hf-drafthead serve" in said and "--port" in said and "Server listen port." in said
    assert "--cb-block-size" not in said and "--non-blocking" not in said and "--continuous-batching" in said
