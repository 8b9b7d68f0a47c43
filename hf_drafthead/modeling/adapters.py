"""PEFT adapters (LoRA and others) of the base: found, put on it, and saved beside the heads.

They lie in the layers of the base, as transformers has them, and are part of what it computes.
"""

import os
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import nn
from transformers.utils import ADAPTER_CONFIG_NAME

from hf_drafthead.modeling.config import DraftHeadConfig
from hf_drafthead.modeling.files import edit_json, fetch_file, is_local, open_tensors, read_json, refusing

ADAPTER_WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."  # of every name in a file of PEFT's
BASE = "base."  # what follows it in adapters that were put on a model with heads


def find_adapter(path: str, hub: Mapping[str, Any], inside: str = "") -> str | None:
    """The folder, here, of an adapter at a path or Hub id, or in the folder `inside` there; None if there is none."""
    if inside:
        hub = {**hub, "subfolder": os.path.join(hub.get("subfolder") or "", inside)}
    config = fetch_file(path, ADAPTER_CONFIG_NAME, hub)
    if config is None:
        return None
    read_json(config)
    if fetch_file(path, ADAPTER_WEIGHTS, hub) is None:
        what = "a pickle is never opened, for it can run code: save the adapter as safetensors, or remove it"
        raise OSError(f"{path!r} holds an adapter without {ADAPTER_WEIGHTS}; {what}.")
    return str(Path(config).parent)


def add_adapter(model: Any, config: Any, name: str = "default", tensors: Mapping[str, Any] | None = None) -> None:
    """Put a new adapter of a PEFT config on a model, by PEFT: transformers 5.24 asks for one that is to come."""
    if name in getattr(model, "peft_config", ()):
        raise ValueError(f"the model has an adapter {name!r} already: give the new one another name.")
    by_name = None if getattr(config, "target_parameters", None) else tensors  # their names are in it
    import_module("peft").inject_adapter_in_model(config, model, name, state_dict=by_name)
    model._hf_peft_config_loaded = True


def load_adapter(model: Any, folder: str | Path, name: str = "default", trainable: bool = False) -> None:
    """Put a trained adapter on a base, or its tensors into the adapter of this name that the base has."""
    peft = import_module("peft")  # nowhere else needed
    with open_tensors(Path(folder) / ADAPTER_WEIGHTS) as file:
        prefix = PREFIX + BASE * any(key.startswith(PREFIX + BASE) for key in file.keys())
        tensors = {key.removeprefix(prefix): file.get_tensor(key) for key in file.keys()}
    if name not in getattr(model, "peft_config", ()):
        config = peft.PeftConfig.from_pretrained(str(folder))
        config.inference_mode = not trainable
        training = model.training
        add_adapter(model, config, name, tensors)
        model.train(training)  # what was put in is in training mode
    with refusing(ValueError, f"the adapter in {str(folder)!r} cannot be put on this base"):
        unexpected = peft.set_peft_model_state_dict(model, tensors, adapter_name=name).unexpected_keys
        stored = peft.get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
        if wrong := sorted({*stored.keys() - tensors.keys(), *unexpected}):
            raise ValueError(f"its {wrong[0]!r} is of another model")


def unwrapped(base: Any) -> Any:
    """The model inside what PEFT or torch.compile put around it, with its adapters as transformers has them."""
    base = getattr(base, "_orig_mod", base)
    if not (hasattr(base, "peft_config") and hasattr(base, "get_base_model")):
        return base
    if any(config.is_prompt_learning for config in base.peft_config.values()):
        kinds = ", ".join(sorted(config.peft_type.value for config in base.peft_config.values()))
        what = f"the base has an adapter of the type {kinds}, which is a part of the prompt"
        raise ValueError(f"{what}: draft heads need one that is a part of the layers, such as LoRA.")
    inner = base.get_base_model()
    inner.peft_config, inner._hf_peft_config_loaded = base.peft_config, True
    return inner


def adapters_of(base: nn.Module) -> dict[str, bool]:
    """Every adapter in the layers of a base, by name, and whether it takes part in what the base computes; none if all
    are merged, for then that is in its weights."""
    layers: list[Any] = [module for module in base.modules() if is_adapted(module)] if "peft" in sys.modules else []
    parts = [getattr(layer, kind) for layer in layers for kind in layer.adapter_layer_names]
    names = {name for part in parts for name in getattr(part, "keys", list)()}
    merged = {name for layer in layers for name in layer.merged_adapters}
    if merged >= names:
        return {}
    if merged:
        what = f"of the base's adapters {min(merged)!r} is merged and {min(names - merged)!r} is not"
        raise ValueError(f"{what}: merge all of them, or none (unmerge_adapter).")
    active = [] if all(layer.disable_adapters for layer in layers) else layers[0].active_adapters
    return {name: name in active for name in [*active, *sorted(names.difference(active))]}


def activate(base: nn.Module, names: list[str]) -> None:
    """Let these adapters of a base take part in what it computes, and no others."""
    for module in base.modules():
        if is_adapted(module) or _is_replaced(module):
            layer: Any = module
            held = [name for name in names if name in getattr(layer, "_adapters", names)]
            layer.enable_adapters(bool(held))
            if held:
                layer.set_adapter(held, inference_mode=True)


def save_adapters(base: Any, folder: Path, stored: DraftHeadConfig) -> None:
    """Write each adapter of a base into a folder of its name, as PEFT reads it, with a name of the base that heads in
    the folder around it name, where others can read that."""
    peft, of, revision = import_module("peft"), stored.base_model_name_or_path, stored.base_model_revision
    if stored.base_included or is_local(of or "", folder.parent):
        of = revision = None
    for name in stored.base_adapters or ():
        place = folder / name
        place.mkdir(parents=True)
        with refusing(ValueError, f"the adapter {name!r} cannot be saved apart", "merge it (merge_and_unload)."):
            tensors = peft.get_peft_model_state_dict(base, adapter_name=name, save_embedding_layers=False)
        # copies, for safetensors takes no two tensors in the same memory
        copies = {f"{PREFIX}{key}": tensor.detach().clone().contiguous() for key, tensor in tensors.items()}
        save_file(copies, place / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        base.peft_config[name].save_pretrained(place)
        edit_json(place / ADAPTER_CONFIG_NAME, base_model_name_or_path=of, revision=revision)


def plain(module: Any) -> Any:
    """A module as it is without the adapters in its layers, of the same tensors; those that are merged are in them."""
    return _plain(module, not adapters_of(module)) if "peft" in sys.modules else module


def _plain(module: Any, merged: bool) -> Any:
    if is_adapted(module):
        return _plain(module.get_base_layer(), merged)
    if _is_replaced(module):
        kept = getattr(module, "modules_to_save", None) if merged and module.active_adapters else None
        return kept[module.active_adapters[0]] if kept else _plain(module.original_module, merged)
    children = {name: child and _plain(child, merged) for name, child in module._modules.items()}
    same = all(child is module._modules[name] for name, child in children.items())
    return module if same else altered(module, _modules=children)


def altered(module: Any, **attributes: Any) -> Any:
    """The same module, in all that it consists of, with other attributes."""
    other = object.__new__(type(module))
    other.__dict__.update(module.__dict__ | attributes)
    return other


def merge_adapters(module: nn.Module) -> None:
    """Merge the adapters in a module's layers and take the layers out of them."""
    for name, layer in list(module.named_modules()):
        if is_adapted(layer):
            layer.merge()  # type: ignore[operator]
            module.set_submodule(name, layer.get_base_layer())  # type: ignore[operator]


def is_adapted(module: Any) -> bool:
    """Whether a layer has an adapter in it; asked of what it can do, for PEFT may not be installed."""
    return hasattr(type(module), "get_base_layer") and hasattr(module, "merge") and hasattr(module, "disable_adapters")


def _is_replaced(module: Any) -> bool:
    """Whether an adapter brings a module of its own in the place of the base's, or trains some of its rows."""
    return "original_module" in module._modules or hasattr(type(module), "original_module")
