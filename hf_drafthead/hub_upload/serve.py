"""transformers' own server, with the classes of draft heads made known to it."""

import os
import sys
from importlib.util import find_spec

import transformers

from hf_drafthead.modeling.families import BY_MODEL_TYPE

NEEDED = ("fastapi", "uvicorn", "openai", "pydantic", "starlette")  # of transformers[serving]


def serve(model: str, arguments: list[str]) -> None:
    """Run `transformers serve` on a model with draft heads until it is interrupted.

    Args:
        model: folder of a draft-head checkpoint, or its id on the Hub, with `@revision` if another one is meant.
        arguments: options of `transformers serve`, such as `--host`, `--port`, `--device`, `--dtype`.

    Raises:
        OSError: packages for serving are missing, or the model cannot be read.
        ValueError: the model has no draft heads or no tokenizer, or an option asks for what heads cannot do.
    """
    lacking = [name for name in NEEDED if find_spec(name) is None]
    if lacking:
        raise OSError(f"to serve a model {', '.join(lacking)} must be installed: pip install 'transformers[serving]'.")
    if any(argument.startswith(("--continuous-batching", "--cb-")) for argument in arguments):
        raise ValueError("continuous batching decodes without draft heads: serve the base with `transformers serve`.")
    check_servable(model)
    introduce()
    run([model, *arguments])


def introduce() -> None:
    """Set our model classes on the `transformers` module, where its server looks a checkpoint's class up by name."""
    for one in BY_MODEL_TYPE.values():
        setattr(transformers, one.__name__, one)


def check_servable(model: str) -> None:
    """Refuse what the server would only fail on with a traceback.

    Raises:
        OSError: the model cannot be read.
        ValueError: it has no draft heads, or no tokenizer.
    """
    name, _, revision = model.partition("@")
    hub = {"revision": revision or "main"}
    if os.path.sep in name and name.startswith((".", "/", "~")) and not os.path.isdir(name):
        raise OSError(f"there is no folder {name!r}: give the folder of a draft-head checkpoint, or its id on the Hub.")
    config, _ = transformers.PreTrainedConfig.get_config_dict(name, **hub)
    if config.get("model_type") not in BY_MODEL_TYPE:
        raise ValueError(
            f"{name!r} holds a {config.get('model_type')!r} model without draft heads: give a draft-head checkpoint, "
            "or use `transformers serve`."
        )
    if transformers.utils.cached_file(
        name, "tokenizer_config.json", _raise_exceptions_for_missing_entries=False, **hub
    ):
        return
    raise ValueError(f"{name!r} has no tokenizer: save the base's there, tokenizer.save_pretrained({name!r}).")


def run(words: list[str]) -> None:
    """`transformers serve` with these words, in this process."""
    from transformers.cli.transformers import app

    sys.argv = ["transformers", "serve", *words]
    app(args=["serve", *words], prog_name="transformers", standalone_mode=False)
