"""A server that answers by OpenAI's protocol: a manager of many requests behind FastAPI."""

import argparse
import json
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, NoReturn

NEEDED = ("fastapi", "uvicorn")
LIMITS = {"port": (0, 65535), "slots": (1, 4096), "max_queue_size": (1, 1 << 20), "context": (2, 1 << 30)}
LIMITS["stop_within"] = (0, 86400)


class Parser(argparse.ArgumentParser):
    """Options, whose faults are one line."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}: see `hf-drafthead serve --help`.")


def parser() -> Parser:
    """The options of `hf-drafthead serve`."""
    options = Parser("hf-drafthead serve", description="Serve a model by OpenAI's protocol.", allow_abbrev=False)
    add = options.add_argument
    add("model", metavar="MODEL", help="folder of a checkpoint with draft heads, or its Hub id, with @revision")
    add("--host", default="localhost", help="address to listen at (%(default)s)")
    add("--port", type=int, default=8000, help="port to listen at (%(default)s)")
    add("--device", default="auto", help="where the model runs: auto, cpu, cuda:1, ...")
    add("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    add("--exact", action="store_true", help="the same bits, drafted or not, alone or among others, in any dtype")
    add("--trust-remote-code", action="store_true", help="run the code of a base that brings its own")
    add("--slots", type=int, metavar="N", help="requests that are decoded at once")
    add("--max-queue-size", type=int, default=1024, metavar="N", help="requests that may wait (%(default)s), else 503")
    add("--context", type=int, metavar="N", help="tokens of a prompt and its answer, by default the base's positions")
    add("--chat-template-kwargs", type=json.loads, default={}, metavar="JSON", help="of all chats")
    add("--learn", action="store_true", help='let the heads learn from requests that say "store": true')
    add("--lookup-answers", action="store_true", help="copy guesses from answers to other clients, too")
    add("--stop-within", type=float, default=10.0, metavar="SECONDS", help="that running answers have at the end")
    add("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    add("--continuous-batching", action="store_true", help="as always: transformers' own server needs it")
    return options


def options_of(model: str, arguments: Sequence[str] = (), **settings: Any) -> argparse.Namespace:
    """What `serve` is asked for, checked."""
    options = parser().parse_args([model, *arguments])
    if unknown := settings.keys() - vars(options).keys():
        raise ValueError(f"unknown options {sorted(unknown)}: see `hf-drafthead serve --help`.")
    vars(options).update(settings)
    if not isinstance(options.chat_template_kwargs, dict):
        raise ValueError(f"--chat-template-kwargs is {options.chat_template_kwargs!r}: expected a JSON object.")
    for name, (least, most) in LIMITS.items():
        if (value := getattr(options, name)) is not None and not least <= value <= most:
            raise ValueError(f"--{name.replace('_', '-')} is {value}: expected a number from {least} to {most}.")
    return options


def serve(model: str, arguments: Sequence[str] = (), **settings: Any) -> None:
    """Answer requests until the process is interrupted.

    Args:
        model: heads, a drafter, or a base, which drafts by itself: folder or id on the Hub, `@revision` behind it.
        arguments: options as on the command line; settings: the same by name, such as `slots=8`.

    Raises:
        OSError: packages for serving are missing, or the model cannot be read.
        ValueError: an option is unknown, or does not fit.
    """
    if lacking := [name for name in NEEDED if find_spec(name) is None]:
        raise OSError(f"to serve a model {', '.join(lacking)} must be installed: pip install 'hf-drafthead[serving]'.")
    options = options_of(model, arguments, **settings)
    from hf_drafthead.serving.app import Server

    server = Server(options)
    try:
        server.run()
    finally:
        server.served.stop()
