"""transformers' own server, with the classes of draft heads made known to it."""

import functools
import sys
import time
from importlib.util import find_spec
from typing import Any

from hf_drafthead.modeling.checkpoint import fetch_file, read_heads_config
from hf_drafthead.modeling.families import BY_MODEL_TYPE

OF_PAGES = "--cb-"  # how these options begin; they describe a cache of pages, and rows with heads have none
NEEDED = ("fastapi", "uvicorn", "openai", "pydantic", "starlette")  # of transformers[serving]


def serve(model: str, arguments: list[str]) -> None:
    """Run `transformers serve` on a model with draft heads until it is interrupted.

    Args:
        model: folder of a draft-head checkpoint, or its id on the Hub, with `@revision` if another one is meant.
        arguments: options of `transformers serve`, such as `--host`, `--port`, `--device`, `--dtype`.

    Raises:
        OSError: packages for serving are missing, or the model cannot be read.
        ValueError: the model has no draft heads or no tokenizer, or an option is unknown or of no use with heads.
    """
    if lacking := [name for name in NEEDED if find_spec(name) is None]:
        raise OSError(f"to serve a model {', '.join(lacking)} must be installed: pip install 'transformers[serving]'.")
    if pages := [argument for argument in arguments if argument.startswith(OF_PAGES)]:
        raise ValueError(f"{pages[0].partition('=')[0]} describes pages, which are not used with heads: leave it out.")
    check_servable(model)
    check_options(model, arguments)
    introduce()
    from transformers.cli.serving.model_manager import ModelManager
    from transformers.cli.transformers import app

    # `/v1/models` names the model that is served: by itself the server lists what lies in the Hub's cache
    entry = {"id": model, "object": "model", "created": int(time.time()), "owned_by": "hf-drafthead"}
    ModelManager.get_gen_models = staticmethod(lambda cache_dir=None: [entry])
    share_by_request()
    words = ["serve", model, *arguments]
    sys.argv = ["transformers", *words]
    app(args=words, prog_name="transformers", standalone_mode=False)


def share_by_request() -> None:
    """Let the server's continuous batching give each request its own settings, seed and stop strings.

    The server hands over the settings of its first request, and the number of tokens and the end of every other one: a
    sampler that all share is all that transformers' manager has. `/metrics` says what the manager counts.
    """
    from transformers.cli.serving import server, utils

    kind, build_config = utils.CBGenerateManager, utils.BaseHandler._build_generation_config
    streaming, whole, build_server = kind.generate_streaming, kind.generate_non_streaming, server.build_server

    def with_seed(self: Any, body: dict[str, Any], *given: Any, **named: Any) -> Any:
        config = build_config(self, body, *given, **named)
        config.seed = body.get("seed")
        return config

    def take(manager: Any, processor: Any, config: Any) -> None:
        if manager._cb is not None:
            manager._cb.generation_config = config
            manager._cb.tokenizer = getattr(processor, "tokenizer", processor)

    @functools.wraps(streaming)
    def generate_streaming(self, model, processor, inputs, gen_config, *given, **named):
        take(self, processor, gen_config)
        return streaming(self, model, processor, inputs, gen_config, *given, **named)

    @functools.wraps(whole)
    async def generate_non_streaming(self, model, processor, inputs, gen_config, *given, **named):
        take(self, processor, gen_config)  # nothing else runs until the request was added
        return await whole(self, model, processor, inputs, gen_config, *given, **named)

    @functools.wraps(build_server)
    def with_metrics(*given: Any, **named: Any) -> Any:
        app, state = build_server(*given, **named), named["generation_state"]

        @app.get("/metrics")
        def metrics() -> dict[str, float]:
            manager = getattr(state._cb_manager, "_cb", None)
            return {} if manager is None else manager.metrics()

        return app

    utils.BaseHandler._build_generation_config = with_seed
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
        said = " ".join(error.format_message().split()).rstrip(".")
        raise ValueError(f"{said}: see `hf-drafthead serve --help`.") from None


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
