"""`--set NAME=VALUE` of a training: which are fields of the heads' config, which are training arguments."""

import dataclasses
import difflib
from collections.abc import Mapping
from types import NoneType
from typing import Any, get_args, get_type_hints

from hf_drafthead.modeling.families import find_family
from hf_drafthead.training.arguments import DraftHeadTrainingArguments


def sort_options(family: str, options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options by name into config fields of a family and training arguments.

    Raises:
        ValueError: an unknown family, or a name that is neither.
    """
    own = find_family(family).model_class.config_class.heads_fields()
    known = {field.name for field in dataclasses.fields(DraftHeadTrainingArguments)}
    if unknown := sorted(set(options) - own - known):
        near = difflib.get_close_matches(unknown[0], sorted(own | known), n=1)
        raise ValueError(
            f"{unknown[0]!r} is neither a config field of {family} ({', '.join(sorted(own))}) nor a training argument: "
            + (f"did you mean {near[0]}?" if near else "check its spelling.")
        )
    fields = {name: value for name, value in options.items() if name in own}
    arguments = {name: value for name, value in options.items() if name not in own}
    refuse_wrong_types(arguments)
    return fields, arguments


def refuse_wrong_types(arguments: Mapping[str, Any]) -> None:
    """Refuse values that are no numbers, or no yes or no, where the training arguments ask for such.

    Raises:
        ValueError: naming the argument and what it takes.
    """
    hints = get_type_hints(DraftHeadTrainingArguments)
    for name, value in arguments.items():
        hint = hints.get(name)
        kinds = set(get_args(hint)) or {hint}
        if value is None or not kinds - {NoneType} <= {int, float, bool}:
            continue  # text and objects are checked where they are used
        found = type(value)
        if found in kinds or (found is int and float in kinds):
            continue
        expected = "a number" if float in kinds else "a whole number" if int in kinds else "true or false"
        raise ValueError(f"{name} is {value!r}: expected {expected}.")
