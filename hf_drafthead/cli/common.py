"""What the commands share: the application, options, checks, printing."""

import functools
import inspect
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from hf_drafthead.data.texts import read_text

app = typer.Typer(
    name="hf-drafthead",
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},  # commands inherit it
    pretty_exceptions_enable=False,
)

# values of the types that settings of `generate` have, where their default is of none or of another
UNSET: dict[str, Any] = {"max_new_tokens": 0, "min_new_tokens": 0, "pad_token_id": 0, "prompt_lookup_num_tokens": 0}
UNSET |= {"min_p": 0.0, "top_h": 0.0, "max_time": 0.0, "posterior_threshold": 0.0, "posterior_alpha": 0.0}
UNSET |= {"renormalize_logits": False, "watermarking_config": {}, "early_stopping": None}  # which is text as well
KINDS = {float: "a number", int: "a whole number", bool: "true or false", dict: "a JSON object"}
LOG_SECONDS = 5.0  # that lie at least between two lines of progress
# by the depth of the guess; the base's own tokens stay plain
COLOURS = ("green", "cyan", "blue", "magenta", "red", "yellow")
COPY_COLOUR = "bright_yellow underline"  # of what was copied from the text


def count(help: str, least: int = 1) -> Any:
    return typer.Option(metavar="N", min=least, max=2**32 - 1, help=help)  # the greatest seed of numpy


def amount(help: str, *, least: float = 0.0, metavar: str = "X") -> Any:
    """An option that is a number, not below 0."""
    return typer.Option(metavar=metavar, min=least, help=help)


def string(help: str, metavar: str | None = None, *names: str) -> Any:
    return typer.Option(*names, metavar=metavar, help=help)


def flag(name: str, help: str) -> Any:
    return typer.Option(name, help=help)


def new_file(help: str, metavar: str, *names: str) -> Any:
    return typer.Option(*names, metavar=metavar, help=help, callback=check_writable)


def check_writable(option: typer.CallbackParam, path: Path | None) -> Path | None:
    """Refuse a place where no file can be written, before any work is done for it."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        reason = "is a folder" if path.is_dir() else f"lies in {str(path.parent)!r}, which does not exist"
        raise OSError(f"{option.opts[0]} {str(path)!r} {reason}: give the path of a file in a folder that exists.")
    return path


ModelName = Annotated[str, typer.Argument(metavar="MODEL", help="Heads, a drafter or a base: folder or Hub id.")]
ModelNames = Annotated[list[str], typer.Argument(metavar="MODEL...", help="As MODEL; several are set side by side.")]
Template = Annotated[Path | None, string("Jinja file to use as template, or `vicuna`.", "FILE", "--chat-template")]
TemplateValues = Annotated[
    str | None, string('Of the chat template, as {"enable_thinking": false}.', "JSON", "--chat-template-kwargs")
]
TREE_HELP = "Draft tree: a published one's name, rank paths as JSON, a JSON file, dynamic, auto, or lookup."
TreeOptions = Annotated[
    list[str] | None,
    typer.Option("--tree", "--draft-tree", metavar="TREE", help=f"{TREE_HELP} Several are measured one by one."),
]
Settings = Annotated[list[str] | None, string("Setting of `generate` (may be repeated).", "NAME=VALUE", "--set")]
Json = Annotated[Path | None, new_file("Write the figures there as JSON.", "PATH", "--json")]


@dataclass(frozen=True)
class Loading:
    """The options of every command that loads a model: how it is loaded."""

    chat_template: Template = None
    chat_template_kwargs: TemplateValues = None
    device: Annotated[str | None, string("cpu, cuda, cuda:1, mps, auto (all GPUs); by default all GPUs.", "NAME")] = (
        None
    )
    dtype: Annotated[str, string("Type of the weights: auto, float32, bfloat16, float16.", "NAME")] = "auto"
    base_model: Annotated[str | None, string("Folder or id of the base, not the one the config names.", "MODEL")] = None
    trust_remote_code: Annotated[bool, flag("--trust-remote-code", "Run the base's own code, if it has any.")] = False
    exact: Annotated[bool, flag("--exact", "The same bits, drafted or not, alone or in a batch, in any dtype.")] = False

    def checked(self) -> Callable[[str], tuple[Any, Any]]:
        """What loads a model, in eval mode, and its tokenizer, from a folder or id, once the options are checked."""
        from hf_drafthead.evaluation.loading import load, load_arguments

        template, values = read_template(self.chat_template), self.chat_template_kwargs
        arguments = load_arguments(self.dtype, self.device, self.base_model, self.trust_remote_code)
        arguments |= {"exact": True} if self.exact else {}

        def load_model(name: str) -> tuple[Any, Any]:
            model, tokenizer = load(name, **arguments)
            tokenizer.chat_template = with_values(template or tokenizer.chat_template, values)
            return model.eval(), tokenizer

        return load_model

    def load(self, name: str) -> tuple[Any, Any]:
        return self.checked()(name)


def options_of_groups(function: Callable[..., None]) -> Callable[..., None]:
    """A command whose parameters of a dataclass, such as `loading: Loading`, typer sees as the options it holds."""
    groups: dict[str, tuple[Any, list[str]]] = {}
    plain, options = [], []
    for parameter in inspect.signature(function).parameters.values():
        if is_dataclass(parameter.annotation):
            group: Any = parameter.annotation
            members = list(inspect.signature(group).parameters.values())
            groups[parameter.name] = group, [member.name for member in members]
            options += members
        else:
            plain.append(parameter)

    @functools.wraps(function)
    def command(**values: Any) -> None:
        for name, (group, names) in groups.items():
            values[name] = group(**{member: values.pop(member) for member in names})
        function(**values)

    parameters = sorted([*plain, *options], key=lambda parameter: parameter.default is not inspect.Parameter.empty)
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


def parse_tree(text: str) -> Any:
    """A draft tree: rank paths or a file of them, a published tree's name, "dynamic" or its sizes, "auto", "lookup"."""
    from hf_drafthead.generation.settings import AUTO
    from hf_drafthead.generation.tree import DraftTree, resolve

    if text in ("dynamic", AUTO, "lookup"):
        return text
    if isinstance(sizes := json_or_text(text), dict):
        resolve(sizes, None, 2**31)
        return sizes
    if text.lstrip().startswith(("[", "{")):
        return DraftTree.from_json(text)
    if text.endswith(".json"):
        if not Path(text).is_file():
            raise OSError(f"there is no tree file {text!r}: give a file of rank paths such as [[0], [1], [0, 0]].")
        return DraftTree.from_json(read_text(text))
    return DraftTree.from_name(text)


def parse_options(pairs: list[str]) -> dict[str, Any]:
    """NAME=VALUE pairs; values are read as JSON if they are valid JSON, else as text."""
    options = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not (name and equals):
            raise ValueError(f"--set {pair!r} is no NAME=VALUE: give for example --set learning_rate=1e-3.")
        options[name] = json_or_text(value)
    return options


def json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def parse_settings(pairs: list[str] | None) -> dict[str, Any]:
    """Settings of `generate` from NAME=VALUE pairs; a whole number where transformers asks for a float becomes one, and
    a value of another type than the setting is refused."""
    from transformers import GenerationConfig, GenerationMixin

    settings = parse_options(pairs or [])
    usual = GenerationConfig()._get_default_generation_params() | UNSET
    for name, value in settings.items():
        kind = type(usual.get(name))
        if name in inspect.signature(GenerationMixin.generate).parameters:
            raise ValueError(f"--set {name}={value}: expected a setting of a GenerationConfig.")
        if kind is float and type(value) is int:
            settings[name] = float(value)
        elif kind in KINDS and type(value) not in (kind, type(None)):
            raise ValueError(f"--set {name}={value}: expected {KINDS[kind]}.")
    return settings


def parse_numbers(option: str, text: str | None, kind: Callable[[str], Any], *, zero: bool = False) -> list[Any]:
    """Numbers above 0 with commas between them; `zero` allows 0 as well."""
    try:
        numbers = [] if text is None else [kind(word) for word in text.split(",")]
    except ValueError:
        numbers = [-1]
    if not all((0 < number or (zero and number == 0)) and number < float("inf") for number in numbers):
        expected = "whole numbers" if kind is int else "numbers"
        least = "from 0" if zero else "above 0"
        raise ValueError(f"{option} {text!r}: expected {expected} {least} with commas between them.")
    return numbers


def read_template(path: Path | None) -> str | None:
    """The text of a chat template: of a file, or one that comes with the package."""
    if path is None:
        return None
    shipped = resources.files("hf_drafthead.data") / "templates" / f"{path}.jinja"
    if not path.is_file() and not shipped.is_file():
        raise OSError(f"there is no chat template {str(path)!r}: give a Jinja file, or 'vicuna' for that of Vicuna.")
    return read_text(path) if path.is_file() else shipped.read_text(encoding="utf-8")


def template_values(text: str | None) -> dict[str, Any]:
    """The variables that `--chat-template-kwargs` gives a chat template."""
    values = json_or_text(text) if text else {}
    if not isinstance(values, dict) or not all(name.isidentifier() for name in values):
        raise ValueError(
            f'--chat-template-kwargs {str(text)[:40]!r} is no JSON object: give {{"enable_thinking": false}}.'
        )
    return values


def with_values(template: Any, text: str | None) -> Any:
    """A chat template in which variables have these values, where nobody gives them others.

    >>> with_values("{{ messages }}{{ x }}", '{"x": 1}')
    '{%- if x is not defined -%}{%- set x = 1 -%}{%- endif -%}{{ messages }}{{ x }}'
    """
    if not (values := template_values(text)):
        return template
    if isinstance(template, dict):
        return {name: with_values(each, text) for name, each in template.items()}
    for name, value in values.items():
        if not re.search(rf"\b{name}\b", template or ""):
            what = "the chat template does not read it" if template else "there is no chat template"
            raise ValueError(f"--chat-template-kwargs names {name!r}, but {what}: leave it out.")
        set_it = f"{{%- set {name} = {value!r} -%}}"
        template = f"{{%- if {name} is not defined -%}}{set_it}{{%- endif -%}}{template}"
    return template


def write_json(path: Path | None, figures: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(figures, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def complain(message: str) -> None:
    print(f"hf-drafthead: {printable(' '.join(message.split()))}", file=sys.stderr)


def printable(text: str) -> str:
    """Text of unknown origin that is safe to print: control characters and escape sequences are shown as text."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def output(color: bool = False) -> Console:
    """Standard output; coloured on a terminal, and elsewhere only if asked for; tables in a file are never cut."""
    console = Console(highlight=False, markup=False, force_terminal=True if color else None)
    if not console.is_terminal:
        console.width = 160
    return console


def say(*lines: str) -> None:
    console = output()
    for line in lines:
        console.print(Text(line), soft_wrap=True)


@contextmanager
def bar(total: int) -> Iterator[Callable[[str], Callable[[], None]]]:
    """The progress of `total` steps on stderr: a line for each part and for each tenth of the work, at most one in
    `LOG_SECONDS`. What it yields names a part of the work and returns what to call at each step."""
    start = last = time.perf_counter()
    done = 0

    def tell(part: str) -> None:
        nonlocal last
        now = time.perf_counter()
        if now - last >= LOG_SECONDS:
            last = now
            print(f"{part}: {done} of {total} done after {now - start:.0f} s", file=sys.stderr, flush=True)

    def begin(part: str) -> Callable[[], None]:
        tell(part)

        def step() -> None:
            nonlocal done
            done += 1
            if 10 * done // total > 10 * (done - 1) // total:
                tell(part)

        return step

    yield begin


def colour_of(depth: int) -> str:
    """The style of text by the depth at which it was accepted, below 0 that of copies."""
    return COPY_COLOUR if depth < 0 else COLOURS[(depth - 1) % len(COLOURS)] if depth else ""


def show_pace(written: Any) -> None:
    pace = "" if written.tokens_per_step is None else f", {written.tokens_per_step:.2f} per step"
    Console(stderr=True).print(f"{written.new_tokens} tokens in {written.seconds:.2f} s{pace}", style="dim")


def legend(pieces: list[tuple[str, int]]) -> Text:
    """Which colour is which depth, and how many pieces were accepted there."""
    line = Text("plain: the base's own token", style="dim")
    for depth in sorted({depth for _, depth in pieces} - {0}):
        count = sum(1 for _, other in pieces if other == depth)
        line.append(f"  {'copied' if depth < 0 else f'depth {depth}'}: {count}", style=colour_of(depth))
    return line
