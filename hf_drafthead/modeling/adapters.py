"""PEFT adapters (LoRA and others) of the base: found, loaded, saved with the heads, and merged into its weights.

They lie in the layers of the base, as transformers has them, and are part of what it computes.
"""

import copy
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.utils import ADAPTER_CONFIG_NAME, logging

from hf_drafthead.modeling.checkpoint import fetch_file, refuse_damage
from hf_drafthead.modeling.config import DraftHeadConfig
from hf_drafthead.modeling.files import edit_json, open_tensors, read_json

logger = logging.get_logger(__name__)

ADAPTER_WEIGHTS, ADAPTER_PICKLE = "adapter_model.safetensors", "adapter_model.bin"
TOKEN_ADAPTER = "token_adapter"  # the name that PEFT gives a layer in which some tokens are trained
ADAPTER_FOLDER = "adapter"  # of a checkpoint, in which the adapter of its base lies
PREFIX = "base_model.model."  # of every name in a file of PEFT's
# How PEFT names the tensors of an adapter that was made for a model with draft heads, and not for its base.
OF_A_WHOLE_MODEL = re.compile(r"base_model\.model\.(base|drafter)\.")


def find_adapter(path: str, hub: Mapping[str, Any], inside: str | None = None) -> str | None:
    """The folder, here, of an adapter at a path or Hub id, or in the folder `inside` there; None if there is none.

    Raises:
        OSError: its config or weights cannot be read, or the weights are no safetensors.
    """
    if inside:
        hub = {**hub, "subfolder": os.path.join(hub.get("subfolder") or "", inside)}
    config = fetch_file(path, ADAPTER_CONFIG_NAME, hub)
    if config is None:
        return None
    read_json(config)
    weights = fetch_file(path, ADAPTER_WEIGHTS, hub)
    if weights is None:
        raise OSError(
            f"{path!r} holds an adapter without {ADAPTER_WEIGHTS}: {ADAPTER_PICKLE}, a pickle, is never opened, for it "
            "can run code; save the adapter as safetensors, or remove it."
        )
    with open_tensors(weights):
        return str(Path(config).parent)


def adapter_base(folder: str) -> tuple[str, str | None]:
    """Name and revision of the base that an adapter was made for; a ValueError if its config names none."""
    config = read_json(Path(folder) / ADAPTER_CONFIG_NAME)
    name = config.get("base_model_name_or_path")
    if not name:
        raise ValueError(
            f"the adapter in {folder!r} does not say which base it is for: load base and adapter yourself."
        )
    return str(name), config.get("revision")


def is_of_a_whole_model(folder: str) -> bool:
    """Whether an adapter was made for a model with draft heads, base and all."""
    with open_tensors(Path(folder) / ADAPTER_WEIGHTS) as tensors:
        return any(OF_A_WHOLE_MODEL.match(name) for name in tensors.keys())


def add_adapter(model: Any, config: Any, name: str = "default") -> None:
    """Put a new adapter of a PEFT config on a model, by PEFT itself: transformers 5.24 asks for a PEFT that is to come.

    Raises:
        ValueError: the model has an adapter of this name.
    """
    if name in getattr(model, "peft_config", ()):
        raise ValueError(f"the model has an adapter {name!r} already: give the new one another name.")
    import_module("peft").inject_adapter_in_model(config, model, name)
    model._hf_peft_config_loaded = True


def load_adapter(model: Any, folder: str, name: str = "default") -> None:
    """Put a trained adapter on a model.

    Raises:
        ValueError: the model has an adapter of this name, or this one was made for another model.
    """
    peft = import_module("peft")  # nowhere else needed
    config = peft.PeftConfig.from_pretrained(folder)
    config.inference_mode = True
    training = model.training
    add_adapter(model, config, name)
    model.train(training)  # what was put in is in training mode
    with open_tensors(Path(folder) / ADAPTER_WEIGHTS) as file:
        tensors = {key.removeprefix(PREFIX): file.get_tensor(key) for key in file.keys()}
    report = peft.set_peft_model_state_dict(model, tensors, adapter_name=name)
    of_adapter = {key for key in report.missing_keys if f".{name}" in key}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    loaded = {id(parameter) for key, parameter in parameters.items() if key not in of_adapter}
    # PEFT stores once what is tied, and calls its other name missing
    missing = {key for key in of_adapter if id(parameters.get(key)) not in loaded}
    refuse_damage(folder, {"missing_keys": missing, "unexpected_keys": set(report.unexpected_keys)})


def adapt(base: Any, path: str | None, config: DraftHeadConfig, hub: Mapping[str, Any], live: bool) -> None:
    """Put the adapter that heads were trained with on their base, if they were trained with one.

    Args:
        base: without adapters.
        path: of the heads; None if they lie nowhere.
        config: of the heads.
        hub: keyword arguments of every download of the heads.
        live: whether the user gave the base as a loaded model, which stays as it is.
    """
    name = config.adapter_name_or_path
    if name is None:
        return
    if live:
        logger.warning_once(
            f"these heads were trained on a base with the adapter {name!r}, and the base given has none: fewer guesses "
            "may be accepted; load the adapter with model.load_adapter(...)."
        )
        return
    folder = find_adapter(path, hub, ADAPTER_FOLDER) if path else None
    if folder is None and name != ADAPTER_FOLDER:
        fetch = {key: value for key, value in hub.items() if key not in ("revision", "subfolder")}
        folder = find_adapter(name, {**fetch, "revision": config.adapter_revision or "main"})
    if folder is None:
        raise OSError(f"the adapter {name!r} of the base of {path!r} was not found: copy or download the heads again.")
    load_adapter(base, folder)


def unwrapped(base: Any) -> Any:
    """The model that PEFT wraps, with its adapter as transformers has it; any other base as it is.

    Raises:
        ValueError: an adapter that is not a part of the layers, such as a learnt prompt.
    """
    if not (hasattr(base, "peft_config") and hasattr(base, "get_base_model")):
        return base
    if any(config.is_prompt_learning for config in base.peft_config.values()):
        kinds = ", ".join(sorted(config.peft_type.value for config in base.peft_config.values()))
        raise ValueError(
            f"the base has an adapter of the type {kinds}, which is a part of the prompt: draft heads need one that is "
            "a part of the layers, such as LoRA."
        )
    inner = base.get_base_model()
    inner.peft_config, inner._hf_peft_config_loaded = base.peft_config, True
    return inner


def active_adapter(base: Any) -> str | None:
    """The name of the adapter that takes part in what a base computes; None for none, a ValueError for several."""
    if not getattr(base, "_hf_peft_config_loaded", False):
        return None
    layers = [module for module in base.modules() if _is_adapted(module)]
    if all(layer.disable_adapters for layer in layers):
        return None
    active = list(layers[0].active_adapters)
    if len(active) > 1:
        raise ValueError(
            f"the base has {len(active)} active adapters ({', '.join(active)}), of which one can be saved with its "
            "heads: merge them into one, or choose one with model.base.set_adapter(name)."
        )
    return active[0] if active else None


def save_adapter(model: Any, folder: Path) -> None:
    """Write a model's active adapter into a folder, as PEFT reads it; which base it is for is said by the heads."""
    name = active_adapter(model)
    tensors = import_module("peft").get_peft_model_state_dict(model, adapter_name=name)
    folder.mkdir(parents=True, exist_ok=True)
    # copies, for safetensors takes no two tensors in the same memory
    save_file(
        {f"{PREFIX}{key}": tensor.detach().clone().contiguous() for key, tensor in tensors.items()},
        folder / ADAPTER_WEIGHTS,
        metadata={"format": "pt"},
    )
    model.peft_config[name].save_pretrained(folder)
    edit_json(folder / ADAPTER_CONFIG_NAME, base_model_name_or_path=None, revision=None)


def remove_earlier_adapter(folder: Path, whole: bool, of_base: bool) -> None:
    """Remove adapters that an earlier save of a model with draft heads left in a checkpoint's folder.

    Args:
        folder: of the checkpoint.
        whole: remove one of the whole model, which would be loaded; an adapter of another model stays.
        of_base: remove the one of the base, in a folder of its own.
    """
    with suppress(OSError):  # a damaged one, which loading refuses
        if whole and (folder / ADAPTER_WEIGHTS).is_file() and is_of_a_whole_model(str(folder)):
            (folder / ADAPTER_WEIGHTS).unlink()
            (folder / ADAPTER_CONFIG_NAME).unlink(missing_ok=True)
    if of_base:
        for name in (ADAPTER_CONFIG_NAME, ADAPTER_WEIGHTS):
            (folder / ADAPTER_FOLDER / name).unlink(missing_ok=True)
        with suppress(OSError):  # there is none, or it holds files of the user's own
            (folder / ADAPTER_FOLDER).rmdir()


def plain_state(model: nn.Module, merge: bool) -> dict[str, Tensor]:
    """The model's tensors without its adapters, or with these merged into them; the model itself stays as it is."""
    state = dict(model.state_dict())
    for name, module in model.named_modules():
        name = name.removesuffix(f".{TOKEN_ADAPTER}")  # PEFT wraps a layer with trainable tokens twice
        if not (_is_adapted(module) or _is_replaced(module)):
            continue
        for key in [key for key in state if key.startswith(f"{name}.")]:
            del state[key]
        if _is_replaced(module):
            active = module.active_adapter if isinstance(module.active_adapter, str) else module.active_adapter[0]
            plain = module.modules_to_save[active] if merge else module.original_module
        else:
            if merge and not module.disable_adapters:
                module = copy.deepcopy(module)
                module.merge()
            plain = module.get_base_layer()
        state |= {f"{name}.{key}": tensor for key, tensor in plain.state_dict().items()}
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    return state | {target: state[source] for target, source in tied.items() if source in state and target in state}


def check_merged_names(state: Mapping[str, Tensor], plain: nn.Module) -> None:
    """Refuse to save a state without adapters, taken out or merged, whose names are not those of a `plain` model."""
    expected = set(plain.state_dict())
    for kind, names in (("lack", expected - set(state)), ("have besides", set(state) - expected)):
        if names:
            raise ValueError(
                f"the base's adapter cannot be merged into its weights, which would {kind} {sorted(names)[0]!r}: merge "
                "it yourself (PEFT's merge_and_unload), or save the heads alone."
            )


def _is_adapted(module: Any) -> bool:
    """Whether a layer has an adapter in it; asked of what it can do, for PEFT may not be installed."""
    return hasattr(module, "get_base_layer") and hasattr(module, "merge") and hasattr(module, "disable_adapters")


def _is_replaced(module: Any) -> bool:
    """Whether an adapter brings a module of its own in the place of the base's."""
    return hasattr(module, "modules_to_save") and hasattr(module, "original_module")
