"""transformers' own server, with the classes of draft heads made known to it."""

import asyncio
import functools
import itertools
import json
import queue
import re
import sys
import time
from contextvars import ContextVar
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from hf_drafthead.generation.lookup import ANSWERS, LONGEST_GRAM, TextIndex
from hf_drafthead.generation.mixin import DraftHeadGenerationMixin
from hf_drafthead.modeling.checkpoint import fetch_file, read_heads_config
from hf_drafthead.modeling.families import BY_MODEL_TYPE

OF_PAGES = "--cb-"  # how these options begin; they describe a cache of pages, and rows with heads have none
MOST_WAITING = 1024  # requests that wait where nothing else is said
MOST_TOKENS = 1 << 24  # of a folder of texts, half a gigabyte of memory
CLIENT: ContextVar[Any] = ContextVar("CLIENT")  # what the client of a request says
FAULTS_OF_CLIENTS = re.compile(r"^CB generation failed for \S+: (Value|Type|Key|Overflow)Error: ")
# Of a generation config, what makes an answer something else than one text, which is all that the server takes.
ONE_TEXT: dict[str, Any] = {"num_return_sequences": 1, "return_dict_in_generate": False}
ONE_TEXT |= dict.fromkeys(("output_scores", "output_logits", "output_attentions", "output_hidden_states"), False)
NEEDED = ("fastapi", "uvicorn", "openai", "pydantic", "starlette")  # of transformers[serving]


def serve(
    model: str,
    arguments: list[str],
    *,
    lookup_texts: Path | None = None,
    lookup_answers: bool = True,
    slots: int | None = None,
    max_queue_size: int | None = None,
) -> None:
    """Run `transformers serve` on a model with draft heads until it is interrupted.

    Args:
        model: folder of a draft-head checkpoint, or its id on the Hub, with `@revision` if another one is meant.
        arguments: options of `transformers serve`, such as `--host`, `--port`, `--device`, `--dtype`.
        lookup_texts: folder of text files to copy guesses from.
        lookup_answers: copy guesses from what was answered before, too.
        slots, max_queue_size: requests that are decoded at once, and that may wait beside them, with
            `--continuous-batching`.

    Raises:
        OSError: packages for serving are missing, or the model or a text cannot be read.
        ValueError: the model has no draft heads or no tokenizer, or an option is unknown or of no use with heads.
    """
    if lacking := [name for name in NEEDED if find_spec(name) is None]:
        raise OSError(f"to serve a model {', '.join(lacking)} must be installed: pip install 'transformers[serving]'.")
    if pages := [argument for argument in arguments if argument.startswith(OF_PAGES)]:
        raise ValueError(f"{pages[0].partition('=')[0]} describes pages, which are not used with heads: leave it out.")
    of_many = {"--slots": slots, "--max-queue-size": max_queue_size}
    if "--continuous-batching" not in arguments and (
        misplaced := [name for name in of_many if of_many[name] is not None]
    ):
        raise ValueError(
            f"{misplaced[0]} is of many requests at once: give --continuous-batching too, or leave it out."
        )
    check_servable(model)
    check_options(model, arguments)
    texts = texts_of(model, lookup_texts, ANSWERS if lookup_answers else 0)
    introduce()
    from transformers.cli.serving.model_manager import ModelManager
    from transformers.cli.transformers import app

    # `/v1/models` names the model that is served: by itself the server lists what lies in the Hub's cache
    entry = {"id": model, "object": "model", "created": int(time.time()), "owned_by": "hf-drafthead"}
    ModelManager.get_gen_models = staticmethod(lambda cache_dir=None: [entry])
    share_by_request(
        slots=slots,
        max_queue_size=MOST_WAITING if max_queue_size is None else max_queue_size,
        lookup_texts=texts,
        lookup_answers=lookup_answers,
    )
    if texts is not None:
        copy_from(texts, lookup_answers)
    words = ["serve", model, *arguments]
    sys.argv = ["transformers", *words]
    app(args=words, prog_name="transformers", standalone_mode=False)


def texts_of(model: str, folder: Path | None, more: int) -> TextIndex | None:
    """The text files of a folder, its own folders included, with room for further tokens; None for neither.

    Raises:
        ValueError: there is no such folder, or no text in it, or too much.
    """
    if folder is None:
        return TextIndex.of(None, more=more)
    texts: list[str] = []
    for path in sorted(folder.rglob("*")) if folder.is_dir() else ():
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts):
            try:
                texts.append(path.read_text(encoding="utf-8"))
            except UnicodeDecodeError:  # no text
                continue
    if not texts:
        there = "is no folder" if not folder.is_dir() else "has no file of text (UTF-8)"
        raise ValueError(f"--lookup-texts: {str(folder)!r} {there}: name a folder of text files to copy guesses from.")
    name, _, revision = model.partition("@")
    tokenizer = AutoTokenizer.from_pretrained(name, revision=revision or "main")
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    if (count := sum(map(len, ids))) > MOST_TOKENS:
        raise ValueError(
            f"--lookup-texts: the files of {str(folder)!r} have {count:,} tokens: name a folder of {MOST_TOKENS:,} at "
            "most."
        )
    return TextIndex.of(ids, more=more)


def copy_from(texts: TextIndex, answers: bool) -> None:
    """Let requests that are decoded one by one copy guesses from texts, and where `answers`, be added to them."""
    from transformers.cli.serving.utils import GenerateManager

    class Copying:
        """A model whose `generate` copies."""

        def __init__(self, model: Any):
            self.model = model

        def __getattr__(self, name: str) -> Any:
            return getattr(self.model, name)

        def generate(self, *args: Any, **named: Any) -> Any:
            output = self.model.generate(*args, lookup_texts=texts, **named)
            if answers:
                prompt = named["input_ids"].shape[-1]
                texts.put(output[0, max(prompt - LONGEST_GRAM, 0) :].tolist())
            return output

    def copying(function: Any) -> Any:
        @functools.wraps(function)
        def run(self: Any, model: Any, *args: Any, **named: Any) -> Any:
            return function(
                self, Copying(model) if isinstance(model, DraftHeadGenerationMixin) else model, *args, **named
            )

        return run

    GenerateManager.generate_streaming = copying(GenerateManager.generate_streaming)
    GenerateManager.generate_non_streaming = copying(GenerateManager.generate_non_streaming)


class Clients:
    """What lets an answer that is not streamed know that its client has gone: how the server hears of it."""

    def __init__(self, app: Any):
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        CLIENT.set(receive)
        await self.app(scope, receive, send)


def share_by_request(**settings: Any) -> None:
    """Let the server's continuous batching give each request its own settings, seed and stop strings, and one text.

    Args:
        settings: of the manager.

    The server hands over the settings of its first request, and the number of tokens and the end of every other one: a
    sampler that all share is all that transformers' manager has. `/metrics` says what the manager counts.
    """
    from starlette.responses import JSONResponse
    from transformers.cli.serving import server, utils

    kind, build_config = utils.CBGenerateManager, utils.BaseHandler._build_generation_config
    streaming, whole, build_server = kind.generate_streaming, kind.generate_non_streaming, server.build_server

    def with_seed(self: Any, body: dict[str, Any], *args: Any, use_cb: bool = False, **named: Any) -> Any:
        # the server would seed the process, from which other requests draw
        config = build_config(self, {**body, "seed": None} if use_cb else body, *args, use_cb=use_cb, **named)
        if body.get("seed") is not None:
            config.seed = body["seed"]
        for name, value in ONE_TEXT.items():
            setattr(config, name, value)
        return config

    def init_cb(self: Any, model: Any, config: Any) -> None:
        if self._cb is None:
            more = settings if isinstance(model, DraftHeadGenerationMixin) else {}
            both = {"generation_config": config, "continuous_batching_config": self._cb_config}
            self._cb = model.init_continuous_batching(**both, **more)
            self._cb.start()

    numbers = itertools.count()

    def take(manager: Any, processor: Any, config: Any) -> None:
        config.stop_strings = config.stop_strings or None
        if manager._cb is not None:
            manager._cb.generation_config = config
            manager._cb.tokenizer = getattr(processor, "tokenizer", processor)

    @functools.wraps(streaming)
    def generate_streaming(self, model, processor, inputs, gen_config, request_id, *args, **named):
        take(self, processor, gen_config)
        unique_id = f"{request_id}/{next(numbers)}"  # a client may give several requests the same
        return streaming(self, model, processor, inputs, gen_config, unique_id, *args, **named)

    @functools.wraps(whole)
    async def generate_non_streaming(self, model, processor, inputs, gen_config, request_id):
        unique_id = f"{request_id}/{next(numbers)}"

        async def answered():
            take(self, processor, gen_config)  # nothing else runs until the request was added
            return await whole(self, model, processor, inputs, gen_config, unique_id)

        answer = asyncio.ensure_future(answered())
        gone = asyncio.ensure_future(CLIENT.get()())  # of a request that was read its client says no more
        try:
            await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                self._cb.cancel_request(unique_id)
            return await answer
        finally:
            gone.cancel()

    @functools.wraps(build_server)
    def with_metrics(*args: Any, **named: Any) -> Any:
        app, state = build_server(*args, **named), named["generation_state"]

        app.add_middleware(Clients)

        @app.exception_handler(queue.Full)
        async def full(_request: Any, error: queue.Full) -> Any:
            return JSONResponse({"error": str(error)}, status_code=503, headers={"Retry-After": "1"})

        async def refused(_request: Any, error: Exception) -> Any:
            line = f"{type(error).__name__}: {error}".removeprefix("RuntimeError: ")
            ours = isinstance(error, RuntimeError) and not FAULTS_OF_CLIENTS.search(line)
            return JSONResponse({"error": line}, status_code=500 if ours else 400)

        for kind_of_error in (ValueError, TypeError, LookupError, OverflowError, RuntimeError):
            app.add_exception_handler(kind_of_error, refused)

        @app.get("/metrics")
        def metrics() -> dict[str, float]:
            manager = getattr(state._cb_manager, "_cb", None)
            return {} if manager is None else manager.metrics()

        return app

    class StreamedError(utils._StreamError):
        """The server puts it between quotes."""

        def __init__(self, msg: str):
            super().__init__(json.dumps(msg)[1:-1])

    utils._StreamError = StreamedError
    utils.BaseHandler._build_generation_config = with_seed
    kind.init_cb = init_cb
    kind.generate_streaming, kind.generate_non_streaming = generate_streaming, generate_non_streaming
    server.build_server = with_metrics


def options() -> list[tuple[str, str]]:
    """The options of `transformers serve` that make sense with draft heads, each with its help."""
    shown = []
    for option in server_command().params:
        name = option.opts[0]
        if name.startswith("--") and not (getattr(option, "hidden", False) or name.startswith(OF_PAGES)):
            shown.append((", ".join([*option.opts, *option.secondary_opts]), " ".join((option.help or "").split())))
    return shown


def check_options(model: str, arguments: list[str]) -> None:
    """Refuse options that the server does not know in one line, before it starts."""
    try:
        server_command().make_context("transformers serve", [model, *arguments])
    except Exception as error:
        if not hasattr(error, "format_message"):  # what every usage error of a command line has
            raise
        problem = " ".join(error.format_message().split()).rstrip(".")
        raise ValueError(f"{problem}: see `hf-drafthead serve --help`.") from None


def server_command() -> Any:
    """The command `transformers serve`."""
    from transformers.cli.transformers import app

    if not hasattr(app, "commands"):  # a typer application, as it was before huggingface_hub had its own
        from typer.main import get_command

        app = get_command(app)
    return app.commands["serve"]


def introduce() -> None:
    """Set our model classes on the module object in which transformers' server looks a checkpoint's class up by name.

    It is the server's own: the first import of `transformers.processing_utils` puts a second object for `transformers`
    into `sys.modules`, so that modules imported before and after it hold different ones.
    """
    from transformers.cli.serving import model_manager

    for model_class in BY_MODEL_TYPE.values():
        setattr(model_manager.transformers, model_class.__name__, model_class)


def check_servable(model: str) -> None:
    """Refuse what the server would only fail on with a traceback: a model without draft heads or tokenizer."""
    name, _, revision = model.partition("@")
    hub = {"revision": revision or "main"}
    read_heads_config(name, hub)
    if fetch_file(name, "tokenizer_config.json", hub) is None:
        raise ValueError(f"{name!r} has no tokenizer: save the base's there, tokenizer.save_pretrained({name!r}).")
