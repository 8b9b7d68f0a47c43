"""The command line `hf-drafthead`: each command parses, calls one function and prints.

Exit codes: 0 success; 1 a check failed; 2 bad input, with one line that says what to do.
"""

import sys
from typing import Annotated, Any

import typer

from hf_drafthead.cli import demo, measure, models, publish, train, trees
from hf_drafthead.cli.common import app, complain
from hf_drafthead.version import __version__

# each adds its own to the application
COMMANDS = (demo, measure, models, publish, train, trees)
UsageError: Any = typer.BadParameter.__base__  # of click, which typer brings along without exporting this


def show_version(asked: bool) -> None:
    """Print the version and stop, if it was asked for."""
    if asked:
        print(f"hf-drafthead {__version__}")
        raise typer.Exit()


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Draft heads as ordinary Hugging Face models: the base's own text in fewer forward passes."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit; a user's mistake ends in one line on stderr and exit code 2.

    The arguments are the words after `hf-drafthead`, those of the process by default.
    """
    import gc

    alone = arguments is None  # this process is the command's: what was imported is never garbage
    words = sys.argv[1:] if arguments is None else arguments
    try:
        if words and not {"--help", "-h", "--version"} & set(words):
            prepare_libraries()
        if alone:
            gc.freeze()  # looking at all of it takes a second each time
        code = app(args=words or ["--help"], prog_name="hf-drafthead", standalone_mode=False)
        if code == 130:  # what typer makes of a KeyboardInterrupt
            raise KeyboardInterrupt
    except UsageError as error:
        asked = error.ctx.command_path if error.ctx else "hf-drafthead"
        complain(f"{error.format_message().rstrip('.')}: {_as_setting(error)}see `{asked} --help`.")
        code = 2
    except UnicodeError as error:
        complain(f"what was given is not UTF-8 text ({error}): convert it.")
        code = 2
    except (FloatingPointError, OSError, TypeError, ValueError) as error:
        complain(str(error))
        code = 2
    except (typer.Abort, KeyboardInterrupt):  # before the errors at run time, of which an Abort is one
        complain("interrupted.")
        code = 130
    except ImportError as error:  # of a package that only some of the work needs
        if (error.name or "").partition(".")[0] == "hf_drafthead":
            raise
        from hf_drafthead.data.texts import one_line

        complain(f"a package is missing or broken ({one_line(error)}): install it, then try again.")
        code = 2
    except (RuntimeError, MemoryError) as error:
        from hf_drafthead.bases.errors import out_of_memory

        if not out_of_memory(error):
            raise
        complain("there is not enough memory: use a smaller model, fewer new tokens, or half precision.")
        code = 2
    if alone:
        gc.freeze()  # the process ends: what is left need not be looked at
    sys.exit(code or 0)


def prepare_libraries() -> None:
    """Register the families and quieten the libraries; it takes seconds, so that what only prints help does without."""
    import logging as standard_logging

    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    from hf_drafthead import load_families

    standard_logging.getLogger("bitsandbytes").setLevel("ERROR")  # which tells of kernels that nobody asked for
    hub_logging.set_verbosity_error()  # an unreachable Hub is reported once, not at every retry
    logging.disable_progress_bar()
    load_families()


def _as_setting(error: UsageError) -> str:
    """How what is no option of a command may be given to it all the same."""
    option = getattr(error, "option_name", None)
    if option is None or error.ctx is None or not any("--set" in param.opts for param in error.ctx.command.params):
        return ""
    return f"a setting that has no option is given by --set {option.lstrip('-').replace('-', '_')}=VALUE; "
