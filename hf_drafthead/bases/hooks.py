"""Hooks and forwards that users have put into a base: what they replace, and which errors come of them."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_drafthead.bases.errors import out_of_memory
from hf_drafthead.bases.releases import COMPUTES_WITHOUT_KEYS

LIBRARIES = ("transformers.", "accelerate.", "peft.")  # whose hooks treat every position alike


def parts(module: nn.Module) -> Iterator[nn.Module]:
    """A module and all that it holds, each once. `modules()` puts a name together for each, which takes longer."""
    waiting, seen = [module], set()
    while waiting:
        if (part := waiting.pop()) not in seen:
            seen.add(part)
            waiting.extend(child for child in part._modules.values() if child is not None)
            yield part


def changed_by_training(module: nn.Module) -> str | None:
    """What makes a model in training mode compute something else than in eval mode; None if nothing does.

    A base without dropout computes the same, and rollouts of reinforcement learning leave it in training mode.
    """
    for part in parts(module) if isinstance(module, nn.Module) else ():
        if not part.training:
            continue
        if isinstance(part, (nn.modules.batchnorm._NormBase, nn.RReLU)) or getattr(
            part, "gradient_checkpointing", False
        ):
            return f"{type(part).__name__} in training mode"
        rates = {name: value for name, value in vars(part).items() if "drop" in name or "jitter" in name}
        rates |= {"p": part.p} if isinstance(part, nn.modules.dropout._DropoutNd) else {}
        for name, rate in rates.items():
            if isinstance(rate, (int, float)) and not isinstance(rate, bool) and rate > 0:
                return f"{name}={rate:g} of {type(part).__name__}"
    return None


def circumstances(base: PreTrainedModel) -> tuple[tuple[Hashable, ...], bool]:
    """What the answer of `probe` depends on and a user may change between two calls: of every module what runs when it
    is called, but for what libraries have put there, and whether it is trained; and what torch computes by where no
    guard of a compiler looks at it. And whether hooks or forwards of the user's own may do something else next time."""
    device, backends, every_module = input_device(base).type, torch.backends.cuda, torch.nn.modules.module
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    attention = (backends.flash_sdp_enabled(), backends.mem_efficient_sdp_enabled(), backends.math_sdp_enabled())
    computed = (base.dtype, autocast, attention, backends.cudnn_sdp_enabled(), torch.get_float32_matmul_precision())
    seen: list[Hashable] = [base.config._attn_implementation, base.config._experts_implementation, *computed]
    everywhere = (*every_module._global_forward_hooks.values(), *every_module._global_forward_pre_hooks.values())
    seen += (*everywhere, None)
    hooked = bool(everywhere)
    for module in parts(base):
        forward = module.__dict__.get("forward")
        if forward is None or hasattr(forward, "is_traced_once"):
            forward = type(module).forward
        else:
            hooked = hooked or not hasattr(module, "_hf_hook")
        seen.append(forward)
        if module.training:  # a part alone, such as a dropout that is kept on
            seen.append(module)
        if "layer_idx" in module.__dict__:  # functions that have a tree form, which may be replaced in a mixer's module
            place, names = names_in_forward(module)
            seen += (getattr(place[name], "plain", place[name]) for name in sorted(names & COMPUTES_WITHOUT_KEYS))
        if module._forward_hooks or module._forward_pre_hooks:
            numbered = (*module._forward_hooks.items(), *module._forward_pre_hooks.items())  # never twice the same
            hooks = [pair for pair in numbered if not getattr(pair[1], "__module__", "").startswith(LIBRARIES)]
            hooked = hooked or bool(hooks)
            seen += hooks
    return tuple(seen), hooked


def names_in_forward(module: nn.Module) -> tuple[dict[str, Any], set[str]]:
    """Where the forward of a module's class finds what it calls by name, and these names."""
    forward = inspect.unwrap(type(module).forward)
    return (forward.__globals__, set(forward.__code__.co_names)) if inspect.isfunction(forward) else ({}, set())


def is_hooked(base: PreTrainedModel) -> bool:
    """Whether hooks or forwards of the user's own may do something else today than when the base was probed."""
    return circumstances(base)[1]


def of_a_hook(error: Exception, base: PreTrainedModel, run: Callable[..., Any], *arguments: Any) -> bool:
    """Whether an error of a function that runs the base came of a hook of the user's: called again it raises none.

    One that is raised again is raised in the base's own decoding, too, or comes of the tree.
    """
    with contextlib.suppress(Exception):
        if is_hooked(base) and not out_of_memory(error):
            run(*arguments)
            return True
    return False


def watched(base: PreTrainedModel, decoder: nn.Module | None = None) -> bool:
    """Whether hooks or a forward of the user's own would be passed by where the base's decoder is run alone."""
    decoder = base.get_decoder() if decoder is None else decoder
    for _, module in base.named_modules():  # a module comes before those that it holds
        if module is decoder:
            return False
        replaced = "forward" in module.__dict__ and not hasattr(module, "_hf_hook")  # accelerate replaces it as well
        if replaced or module._forward_hooks or module._forward_pre_hooks:
            return True
    return False


def input_device(base: PreTrainedModel) -> torch.device:
    """Where the base reads tokens; where it is offloaded its hooks take them from anywhere."""
    device = base.get_input_embeddings().weight.device
    return torch.device("cpu") if device.type == "meta" else device
