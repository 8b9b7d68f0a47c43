"""What a base makes of its decoder's last hidden state; and the tokens by which a base is tried."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_drafthead.bases.errors import out_of_memory
from hf_drafthead.bases.hooks import input_device, of_a_hook, watched


class OutputLayer:
    """What a base makes of its decoder's last hidden state (..., W): logits (..., V); found out by running it.

    Most bases apply their lm_head and nothing else. Where others scale or cap, their own `forward` is run, on a decoder
    that hands on the states that it is given.

    Attributes:
        head: the base's lm_head.
        logits: what makes logits of states: the lm_head, or the base's own forward behind its decoder.
        decoder: the part of the base that gives the states; that around its decoder where this reads some tokens, such
            as those of images, in a way of its own.
        known: whether it was found; if not, the lm_head alone is taken for it.
        width: W; None where the decoder cannot be run.
    """

    def __init__(self, base: PreTrainedModel):
        self.base, self.head = base, base.get_output_embeddings()
        self.logits: Callable[[torch.Tensor], torch.Tensor] = self.head
        self._behind: nn.Module | None = None  # a copy of the base, its parts shared, whose lm_head hands on, too
        self.decoder: Any = None
        self.width: int | None = None
        training = [module for module in base.modules() if module.training]
        base.eval()  # dropout would hide it
        try:
            self.known = self._find()
        except Exception as error:  # its decoder is none, it has no memory yet, or it needs what is not there
            if out_of_memory(error) or of_a_hook(error, base, self._find):
                raise
            self.known = False
        finally:
            for module in training:
                module.training = True

    @torch.no_grad()
    def _find(self) -> bool:
        """Compare the base's logits with what comes of its decoder's states."""
        tokens = probe_tokens(self.base)[None, :4]
        logits = self.base(tokens, use_cache=False).logits
        self.decoder = self.base.get_decoder()
        states = self.decoder(tokens, use_cache=False).last_hidden_state
        self.width = states.shape[-1]
        for around in _without_decoder(self.base):
            try:
                close = _close(self._of_forward(around, states), logits)
            except Exception as error:  # another place of the decoder may do
                if out_of_memory(error) or of_a_hook(error, self.base, self._of_forward, around, states):
                    raise
                continue
            if close:
                # what cannot be seen in the states of a few tokens shows in others: a cap only in large logits
                wide = torch.linspace(-1, 1, states.shape[-1]).to(states) * states.new_tensor([[1.0], [100.0]])
                whole, alone = self._of_forward(around, wide[None]), self.head(wide[None])
                if whole.dtype != alone.dtype or not torch.equal(whole, alone):
                    path = next(name for name, module in around.named_modules() if module is self.head)
                    self.logits = functools.partial(self._of_forward, around)
                    self._behind = with_part(around, path.split("."), _Passed)
                return self._find_decoder()
        return _close(self.head(states), logits) and self._find_decoder()

    def _find_decoder(self) -> bool:
        """Take the decoder, or the part around it, with which the tokens that have a meaning for the base agree."""
        tokens = special_tokens(self.base)
        if not len(tokens):
            return True
        try:
            logits = self.base(tokens[None], use_cache=False).logits
        except Exception as error:  # it does not read them without an image
            if out_of_memory(error) or of_a_hook(error, self.base, self.base, tokens[None]):
                raise
            return True
        for part in (self.decoder, self.base.base_model):
            if _close(self.logits(part(tokens[None], use_cache=False).last_hidden_state), logits):
                self.decoder = part
                return True
        return False

    @property
    def is_head(self) -> bool:
        """Whether the logits are what the lm_head makes of the states, and nothing else."""
        return self.logits is self.head

    def behind(self, products: torch.Tensor) -> torch.Tensor:
        """Logits (..., D) from products of a lm_head (..., D), which may have rows of some tokens alone."""
        return products if self._behind is None else self._of_forward(self._behind, products)

    @torch.no_grad()
    def scale(self) -> float:
        """By what the lm_head's own products are best multiplied to be nearest to the base's logits, on its states."""
        if self.is_head:
            return 1.0
        states = self.base.get_decoder()(probe_tokens(self.base)[None], use_cache=False).last_hidden_state
        products, logits = self.head(states).double(), self.logits(states).double()
        finite = logits.isfinite()
        return float((products * logits)[finite].sum() / (products * products)[finite].sum())

    def _of_forward(self, around: nn.Module, states: torch.Tensor) -> torch.Tensor:
        texts = states.reshape(1, -1, states.shape[-1]) if states.dim() != 3 else states
        logits = type(self.base).forward(around, inputs_embeds=texts, use_cache=False, return_dict=True).logits
        return logits.reshape(*states.shape[:-1], logits.shape[-1])


class _Passed(nn.Module):
    """In the place of another module: it hands on what it is given, and has what that one has."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.__dict__["replaced"] = module  # past nn.Module's bookkeeping

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["replaced"], name)

    def forward(self, states: torch.Tensor, *args, **kwargs) -> Any:
        return states


class _GivenStates(_Passed):
    """In the place of a decoder, whose output is what it is given as embeddings."""

    def forward(self, *args, **kwargs) -> _DecoderOutput:
        return _DecoderOutput(kwargs["inputs_embeds"])


class _DecoderOutput:
    """The last hidden state, whatever it is asked by; every other field is None."""

    def __init__(self, states: torch.Tensor):
        self.last_hidden_state = states

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        return None

    def __getitem__(self, key: Any) -> torch.Tensor | None:
        return self.last_hidden_state if key in (0, "last_hidden_state") else None


def _without_decoder(base: PreTrainedModel) -> list[nn.Module]:
    """Copies of a base that share all its parts but the decoder: in them its part that holds the embeddings hands on
    what it is given, or only the decoder within that part does."""
    embeddings, decoder = base.get_input_embeddings(), base.get_decoder()
    paths = []
    for inner in (embeddings, decoder):
        name = next((name for name, module in base.named_modules() if module is inner), "")
        if name:
            paths.append(name.split(".")[:1] if inner is embeddings else name.split("."))

    return [with_part(base, path, _GivenStates) for path in paths]


def with_part(module: nn.Module, path: list[str], kind: Callable[[Any], nn.Module]) -> nn.Module:
    """A copy of a module that shares all its parts but the one at the path, which `kind` makes of the module's own."""
    if not path:
        return kind(module)
    shared = copy.copy(module)
    shared.__dict__ = {**module.__dict__, "_modules": dict(module._modules)}
    shared._modules[path[0]] = with_part(module._modules[path[0]], path[1:], kind)  # type: ignore[arg-type]
    return shared


def splits(base: PreTrainedModel, output: OutputLayer) -> bool:
    """Whether `output` makes the base's logits of the decoder's last hidden state; no if it is `watched`."""
    return output.known and not watched(base, output.decoder)


def _close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    smallest = 1e-5 * expected.abs().max().item()
    return actual.shape == expected.shape and torch.allclose(actual.to(expected), expected, rtol=1e-3, atol=smallest)


def probe_tokens(base: PreTrainedModel) -> torch.Tensor:
    """16 different tokens where the base reads them."""
    vocabulary = base.config.get_text_config(decoder=True).vocab_size
    return torch.arange(3, 3 + 16, device=input_device(base)).remainder(vocabulary)


def special_tokens(base: PreTrainedModel) -> torch.Tensor:
    """The tokens that stand for what is no text, of a base that reads more than that."""
    config, text = base.config, base.config.get_text_config(decoder=True)
    fields = vars(config).items() if config is not text else ()
    ids = {value for name, value in fields if name.endswith(("_token_id", "_token_index")) and type(value) is int}
    return torch.tensor([value for value in sorted(ids) if 0 <= value < text.vocab_size], device=input_device(base))
