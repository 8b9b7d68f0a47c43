"""What several families share: residual blocks, and output projections.

Shapes: B rows, A newly verified positions, K heads, H hidden, V vocabulary.
"""

from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers import LlamaConfig
from transformers.configuration_utils import PreTrainedConfig

DRAWS = {"normal_", "uniform_", "kaiming_uniform_", "trunc_normal_"}  # of tensors and torch.nn.init
WRITES = {"zero_", "fill_"}


class Undrawn(TorchFunctionMode):
    """Parameters made in this thread get no values: others are about to take their place."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")  # transformers puts functions of its own there
        unset = name in WRITES and any(isinstance(tensor, nn.Parameter) for tensor in (args[0], args[0]._base))
        if unset or name in DRAWS:
            return args[0] if args else kwargs["tensor"]
        return (torch.empty if function is torch.randn else function)(*args, **(kwargs or {}))


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b), with W = 0 at the start (Medusa, section 2.1.1; b as in the published code)."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class ParallelBlocks(nn.Module):
    """One residual block per head, all heads in one batched product: weight (K, H, H), bias (K, H)."""

    def __init__(self, heads: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(heads, hidden_size, hidden_size))
        self.bias = nn.Parameter(torch.empty(heads, hidden_size))
        bound = hidden_size**-0.5
        nn.init.uniform_(self.bias, -bound, bound)  # what torch gives a linear layer's bias

    def forward(self, x: Tensor) -> Tensor:
        """Head i's block on x[i]; x is (K, N, H)."""
        return x + F.silu(torch.baddbmm(self.bias.unsqueeze(1), x, self.weight.transpose(1, 2)))


def output_projections(config: Any, choices: int, bias: bool = False) -> nn.ModuleDict:
    """From each head's state to logits (`up`); none where the base's lm_head is used."""
    heads = 0 if config.share_lm_head else config.num_draft_heads
    return nn.ModuleDict({"up": nn.ModuleList(nn.Linear(config.width, choices, bias=bias) for _ in range(heads))})


class VocabularyRows:
    """The rows of a model's output projection for some of its tokens: gathered once, and again when it has changed."""

    def __init__(self) -> None:
        self._key: Any = None
        self._rows: tuple[Tensor, Tensor | None] | None = None

    @property
    def gathered(self) -> bool:
        """Whether there are some."""
        return self._rows is not None

    def __call__(self, head: Any, tokens: Tensor, like: Tensor) -> tuple[Tensor, Tensor | None]:
        """Weight (D, H) and bias (D,) or None of an output projection, which may be quantized or offloaded.

        like: where the rows are wanted; of a quantized projection also in which type.
        """
        weight = head.weight
        if weight.requires_grad and torch.is_grad_enabled():  # it learns through its rows
            return self._gathered(head, tokens, like)
        if torch.compiler.is_compiling():
            return self._gathered(head, tokens, like) if self._rows is None else self._rows
        versions = [None if tensor.is_inference() else tensor._version for tensor in (weight, tokens)]
        key = (id(head), weight.data_ptr(), weight.dtype, tokens.data_ptr(), like.device, *versions)
        if self._rows is None or key != self._key:
            with torch.no_grad():
                rows = self._gathered(head, tokens, like)
            if type(rows[0]) is not Tensor:  # of a trial run without data
                return rows
            self._key, self._rows = key, rows
        return self._rows

    def apply(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Move or convert what was gathered; what was converted is gathered anew, in the type of the projection."""
        if self._rows is not None:
            weight, bias = self._rows
            self._rows = fn(weight), None if bias is None else fn(bias)
            if self._rows[0].dtype != weight.dtype:
                self._key = None

    @staticmethod
    def _gathered(head: Any, tokens: Tensor, like: Tensor) -> tuple[Tensor, Tensor | None]:
        weight, bias = head.weight, getattr(head, "bias", None)
        if type(head) is not nn.Linear or weight.dtype.itemsize < 2 or weight.is_meta != like.is_meta:
            weight = weight_of(head, like)  # all of it: there may be more than a product in it
        tokens = tokens.to(weight.device)
        bias = None if bias is None or bias.is_meta != like.is_meta else bias[tokens.to(bias.device)].to(like.device)
        return weight[tokens].to(like.device), bias


def weight_of(linear: Any, like: Tensor) -> Tensor:
    """The weight (out, in) of a linear layer, also of one that is quantized or offloaded, where `like` is."""
    weight = whole(linear.weight)
    if weight.is_floating_point() and weight.dtype.itemsize >= 2 and (like.is_meta or not weight.is_meta):
        return weight.to(like)
    size = linear.in_features
    unit_vectors = torch.zeros(1 + size, size, dtype=like.dtype, device=like.device)
    unit_vectors[1:].fill_diagonal_(1.0)
    out = linear(unit_vectors).to(like)
    return (out[1:] - out[0]).T  # the first row, of zeros, gave the bias


def copy_if_as_wide(target: Tensor, source: Tensor) -> None:
    """Start from weights of the base that fit; others stay random."""
    if source.shape == target.shape and source.is_floating_point() and source.dtype.itemsize > 1 and not source.is_meta:
        with torch.no_grad():
            target.copy_(whole(source))


def whole(weight: Any) -> Any:
    """A weight that is divided among processes, put together in each of them; any other as it is."""
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight


def share_start(module: nn.Module, base: nn.Module) -> None:
    """Give each process that has a part of the base the random values of the first one."""
    divided: Any = next((weight for weight in base.parameters() if hasattr(weight, "full_tensor")), None)
    for tensor in module.state_dict().values() if divided is not None else ():
        torch.distributed.broadcast(tensor, group=divided.device_mesh.get_group(-1), group_src=0)


def is_rms_norm(module: Any) -> TypeGuard[nn.RMSNorm]:
    """Whether a module is a norm that divides by the root of the mean square, and multiplies by its weight."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 1 or weight.is_meta or not weight.is_floating_point():
        return False
    with torch.no_grad():
        x = torch.linspace(0.5, 1.5, len(weight)).to(weight)
        return torch.allclose(module(x).float(), F.rms_norm(x, x.shape, weight).float(), rtol=0.05, atol=1e-3)


def copy_layer(target: nn.Module, source: nn.Module) -> bool:
    """Start a decoder layer as one of the base, if that has the same parts, as wide, with plain RMS norms; whether."""
    parts, of_base = (dict(layer.named_children()) for layer in (target, source))
    norms = [name for name in parts if name.endswith("norm")]
    fits = parts.keys() == of_base.keys() and all(is_rms_norm(of_base[name]) for name in norms)
    if not fits or any(parts[name].weight.shape != of_base[name].weight.shape for name in norms):
        return False
    weights = dict(source.named_parameters())
    for name, weight in target.named_parameters():
        if name in weights:
            copy_if_as_wide(weight, weights[name])
    return True


def llama_like(
    text: PreTrainedConfig, layers: int, width: int | None = None, kind: type[PreTrainedConfig] = LlamaConfig
) -> Any:
    """The config of a LLaMA, or of another such model, of the sizes that a base's text config gives, or of a width."""

    def field(name: str) -> Any:
        """What the config says, of the first layer where it says it of each."""
        try:
            value = getattr(text, name, None)
        except Exception:  # some configs raise for what differs between layers
            return None
        return next(iter(value), None) if isinstance(value, (list, tuple)) else value

    width = width or text.hidden_size
    heads = field("num_attention_heads") or max(width // 128, 1)
    head_dim = field("head_dim") or width // heads
    special = {name: getattr(text, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return kind(
        vocab_size=text.vocab_size,
        hidden_size=width,
        intermediate_size=field("intermediate_size") or 4 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=field("num_key_value_heads") or heads,
        head_dim=head_dim + head_dim % 2,  # rotary positions turn pairs, which a base without them need not have
        rms_norm_eps=field("rms_norm_eps") or 1e-6,
        max_position_embeddings=field("max_position_embeddings") or 2048,
        # Scaled frequencies are for texts longer than is trained on; some change with the length of the text.
        rope_parameters={
            "rope_type": "default",
            "rope_theta": (getattr(text, "rope_parameters", None) or {}).get("rope_theta") or 10000.0,
        },
        tie_word_embeddings=bool(getattr(text, "tie_word_embeddings", False)),
        **special,
    )
