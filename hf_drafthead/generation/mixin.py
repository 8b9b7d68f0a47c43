"""`generate()` of a model with draft heads: decide whether the tree can go, then let the base prepare everything."""

from __future__ import annotations

import copy
import functools
import reprlib
import types
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from transformers import GenerationConfig, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMixin, GenerationMode, StopStringCriteria
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module
from transformers.utils import logging

from hf_drafthead.bases.errors import Unsupported
from hf_drafthead.bases.hooks import changed_by_training, is_hooked
from hf_drafthead.bases.limits import check_length
from hf_drafthead.bases.ordinary_caches import can_load, rows_of
from hf_drafthead.bases.output_layer import probe_tokens
from hf_drafthead.bases.probe import circumstances, probe, try_tree
from hf_drafthead.bases.reader import BaseReader
from hf_drafthead.bases.releases import CACHE, mask_length, with_cache
from hf_drafthead.generation.decoding import decode, may_draw
from hf_drafthead.generation.lookup import TextIndex
from hf_drafthead.generation.noise import RandomNumbers
from hf_drafthead.generation.rules import ROW_BY_ROW, Rules
from hf_drafthead.generation.runner import Execution
from hf_drafthead.generation.settings import AUTO, DraftPlan, DraftSettings
from hf_drafthead.generation.state import DraftHeadGenerateOutput, StepRecord, draft_vocabulary
from hf_drafthead.generation.tree import COPIES, LOOKUP, DraftTree, DynamicTree

logger = logging.get_logger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

MOST_READERS = 16  # that are kept of one base, whose hooks and forwards may change between calls
FRAME_WORDS = 1 << 15  # of 8 bytes; a frame of so many gets a block of twice as many: the rest is for those below it


def with_room(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function so that it and what it calls have 256 KiB for their frames in one block.

    CPython keeps frames in blocks of 16 KiB. A call whose frame does not fit into the rest of a block takes a new one
    from the operating system, and gives it back when it returns: where a block happens to end between the loop of
    decoding and the functions that it calls, up to 200 times in a step of the bundled Medusa, 26 in a captured one.

    >>> with_room(max)(1, 2)
    2
    """
    call = types.FunctionType(_apply.__code__.replace(co_stacksize=FRAME_WORDS), globals())

    @functools.wraps(function)
    def roomy(*args: P.args, **kwargs: P.kwargs) -> T:
        result: T = call(function, args, kwargs)
        return result

    return roomy


def _apply(function, args, kwargs):
    return function(*args, **kwargs)


class NothingPays(Unsupported):
    """No tree pays in a call, and the base is to decode by itself."""


class CallConfig(GenerationConfig):
    """The settings of one call, in which None is an answer: the base's own defaults do not fill it."""

    _settled: tuple[str, ...] = ()  # a public attribute would be an argument of `generate`

    def update(self, defaults_only: bool = False, allow_custom_entries: bool = False, **kwargs: Any) -> dict[str, Any]:
        if defaults_only:
            kwargs = {name: value for name, value in kwargs.items() if name not in self._settled}
        return super().update(defaults_only=defaults_only, allow_custom_entries=allow_custom_entries, **kwargs)

    def without(self, name: str) -> CallConfig:
        """A copy in which a setting is None for good."""
        config = copy.deepcopy(self)
        setattr(config, name, None)
        config._settled += (name,)
        return config


class DraftHeadGenerationMixin(GenerationMixin):
    """Gives a model with `base` and `drafter` a `generate` that returns what `base.generate` returns, sooner."""

    @with_room
    def generate(  # type: ignore[override]
        self,
        inputs: torch.Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        logits_processor=None,
        stopping_criteria=None,
        prefix_allowed_tokens_fn=None,
        synced_gpus: bool | None = None,
        assistant_model=None,
        streamer=None,
        negative_prompt_ids: torch.Tensor | None = None,
        negative_prompt_attention_mask: torch.Tensor | None = None,
        custom_generate=None,
        *,
        draft_tree: str | DraftTree | DynamicTree | list | dict | None = None,
        acceptance: str | None = None,
        posterior_threshold: float | None = None,
        posterior_alpha: float | None = None,
        lookup_texts: TextIndex | Iterable[Any] | None = None,
        on_step: Callable[[StepRecord], None] | None = None,
        **kwargs: Any,
    ) -> DraftHeadGenerateOutput | GenerateDecoderOnlyOutput | torch.Tensor:
        """Generate what the base's `generate` would with the same arguments, in fewer forward passes.

        Takes every argument of `GenerationMixin.generate`, in its order. What a tree of guesses cannot do (beam search,
        attentions, an assistant model, a cache that cannot be compacted, ...) is decoded by the base itself, with one
        warning; so is a call for which the calibration found that no tree pays. With `cache_implementation="static"` or
        `compile_config` the whole step is compiled once for a tree and a batch size, and kept for later calls.

        Args:
            inputs: (B, P) prompt token ids, left-padded where B > 1.
            generation_config: as in transformers; `model.generation_config` also holds the four settings below.
            draft_tree: name of a published tree, rank paths or a `DraftTree`; "dynamic", {"dynamic": {"nodes": 32,
                "depth": 6, "width": 8}} or a `DynamicTree`, whose shape follows the guesses; "auto", the calibrated
                tree as long as drafting pays on the text; by default the tree that was calibrated for this call, or for
                the nearest, else 8 nodes on a CPU, else the generation config's.
            acceptance: "exact" (the base's own text; under sampling its distribution and, with the same seed, its
                tokens), "rejection" (speculative sampling: the base's distribution, not its seed), or "typical"
                (Medusa's lossy rule: under sampling it keeps any guess that is likely enough, so the text is NOT a
                sample of the base). Greedy decoding is exact with all of them.
            posterior_threshold, posterior_alpha: epsilon and delta of typical acceptance, both from 0 to 1.
            prompt_lookup_num_tokens, max_matching_ngram_size: as in transformers, but together with the heads, at every
                batch size: where the last tokens of a row (at most 3 by default) occurred before in its text, the
                tokens that followed there take the place of the tree's least valuable nodes (`lookup`).
                `draft_tree="lookup"` guesses these copies alone. A call that names neither these nor a tree copies as
                many as were calibrated for it.
            lookup_texts: other texts to copy from, strings (with `tokenizer=`) or token ids, or a `TextIndex`, which is
                made once for many calls: where one agrees with more of the last tokens (2 to 4) than the row's own text
                does, the copy is taken there. 10 tokens are copied where `prompt_lookup_num_tokens` is not given.
            use_mtp: with a base's own modules for multi-token prediction as heads, what is done anyway; with other
                heads the base decodes by itself, as for an assistant model.
            on_step: is given a `StepRecord` after the prefill and after every step; the stages are timed for it.

        Returns:
            (B, length) token ids; with `return_dict_in_generate` an output that also holds `accepted_lengths`.

        Raises:
            TypeError, ValueError: a setting that does not fit, or an empty prompt.
        """
        _refuse_no_prompt(kwargs.get("input_ids") if inputs is None else inputs, kwargs.get("inputs_embeds"))
        if generation_config is not None and not isinstance(generation_config, GenerationConfig):
            return self.base.generate(inputs, generation_config, **kwargs)  # which refuses it
        config, kwargs = self._merged_config(generation_config, with_cache(CACHE, kwargs))
        asked: dict[str, Any] = {"draft_tree": draft_tree, "acceptance": acceptance}
        asked |= {"posterior_threshold": posterior_threshold, "posterior_alpha": posterior_alpha}
        looks_up = config.prompt_lookup_num_tokens is not None and assistant_model is None
        copies = config.prompt_lookup_num_tokens if looks_up else self.drafter.copies
        texts = TextIndex.of(lookup_texts, kwargs.get("tokenizer"))
        copies = COPIES if copies is None and texts is not None else copies
        if self.drafter.copies is not None and draft_tree == AUTO:  # copies alone are drafted while they pay anyway
            asked["draft_tree"] = LOOKUP
        settings = DraftSettings.from_config(config, **asked)
        plan = None if settings.draft_tree == AUTO else settings.plan(*self._guesses_among())  # always checked
        self._check_copies(settings, plan, draft_tree, copies)
        config.__dict__.pop("calibration", None)  # the base would copy it
        drafting = config.without("prompt_lookup_num_tokens") if looks_up else config
        call = {
            "generation_config": config,
            "logits_processor": logits_processor,
            "prefix_allowed_tokens_fn": prefix_allowed_tokens_fn,
            "synced_gpus": synced_gpus,
            "negative_prompt_ids": negative_prompt_ids,
            "negative_prompt_attention_mask": negative_prompt_attention_mask,
            **kwargs,
        }
        random = RandomNumbers()
        try:
            if custom_generate is not None:
                raise Unsupported("custom_generate is given")
            _check_call(self.base, drafting, assistant_model, synced_gpus)
            loop = self._loop(
                random=random,
                reader=self._base_reader(),
                plan=None if draft_tree in (None, AUTO) and self.drafter.copies is None else plan,
                settings=settings,
                copies=copies,
                texts=texts,
                execution=Execution.wanted(self, config),
                streamer=streamer,
                on_step=on_step,
            )
            call_of_loop = {**call, "generation_config": drafting}
            call_of_loop |= _stop_strings_as_criterion(drafting, stopping_criteria, kwargs)
            return self.base.generate(inputs, custom_generate=loop, **call_of_loop)
        except Unsupported as reason:
            random.undo()
            if not isinstance(reason, NothingPays):  # of which `choose` has told
                logger.warning_once(f"Draft heads are not used, the base decodes by itself: {reason}.")
        finally:
            random.close()
        output = self.base.generate(
            inputs,
            stopping_criteria=stopping_criteria,
            assistant_model=assistant_model,
            streamer=streamer,
            custom_generate=custom_generate,
            **call,
        )
        return DraftHeadGenerateOutput(**output) if type(output) is GenerateDecoderOnlyOutput else output

    def _merged_config(
        self, generation_config: GenerationConfig | None, kwargs: dict[str, Any]
    ) -> tuple[CallConfig, dict[str, Any]]:
        """The call's generation config with the model's for a default, and the arguments that are not part of it."""
        config = CallConfig()
        stored = vars(self.generation_config if generation_config is None else generation_config)
        # the entries of a calibration are long and are only read
        copied = copy.deepcopy({name: value for name, value in stored.items() if name != "calibration"})
        config.__dict__.update({**stored, **copied})
        if generation_config is not None:
            config.update(**self.generation_config.to_dict(), defaults_only=True, allow_custom_entries=True)
        lengths = ("max_length", "min_length")  # the base wants to know whether these are its defaults
        defaults = config._get_default_generation_params()
        fillers = {name: value for name, value in defaults.items() if name not in lengths}
        config.update(**fillers, defaults_only=True)
        rest = config.update(**kwargs)
        if (asked_by := getattr(self.drafter, "asked_by", None)) and getattr(config, asked_by, None):
            setattr(config, asked_by, None)  # it asks for what is done anyway
        config._settled = tuple(name for name, value in vars(config).items() if value is None and name not in lengths)
        return config, rest

    def _guesses_among(self) -> tuple[int | None, int]:
        """How deep the heads guess, None where there is no limit, and among how many tokens."""
        return self.drafter.max_depth, draft_vocabulary(self.base, self.drafter)

    def begin_shared(
        self,
        inputs: torch.Tensor,
        plan: DraftPlan,
        run: Callable[..., T],
        *,
        logits_processor=None,
        stopping_criteria=None,
        prefix_allowed_tokens_fn=None,
        streamer=None,
        random: RandomNumbers | None = None,
        generation_config: GenerationConfig | None = None,
        **kwargs: Any,
    ) -> T:
        """Let the base prepare a call as for `generate`, and hand it to `run` in the place of the decoding loop.

        Args:
            inputs: (1, P) prompt.
            plan: how the steps draft that are to follow.
            run: takes what `decode` takes.
            random: that the call draws.

        Raises:
            Unsupported: the call cannot draft; nothing of the user's was called with a token.
        """
        config, kwargs = self._merged_config(generation_config, with_cache(CACHE, kwargs))
        acceptance = DraftSettings.from_config(config).acceptance
        if acceptance != "exact" and config.do_sample:
            raise Unsupported(f"{acceptance} acceptance is of one call, and steps are shared here")
        config.__dict__.pop("calibration", None)
        config = config.without("prompt_lookup_num_tokens")
        _check_call(self.base, config, kwargs.get("assistant_model"), None)
        ours = {"plan": plan, "execution": Execution("eager"), "random": random or RandomNumbers(), "run": run}
        call = {"generation_config": config, "logits_processor": logits_processor, **kwargs}
        call |= _stop_strings_as_criterion(config, stopping_criteria, kwargs)
        loop = self._loop(reader=self._base_reader(), streamer=streamer, **ours)
        result: T = self.base.generate(
            inputs, custom_generate=loop, prefix_allowed_tokens_fn=prefix_allowed_tokens_fn, **call
        )
        return result

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """A manager of requests that join and leave while others are decoded, see `batching.Manager`."""
        return _batching().Manager.of(self, *args, **kwargs)

    def continuous_batching_context_manager(self, *args: Any, **kwargs: Any) -> Any:
        """A context in which such a manager runs, see `batching.running_manager`."""
        return _batching().running_manager(self, *args, **kwargs)

    def generate_batch(self, inputs: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        """Generate for many prompts of any lengths, some at a time, see `batching.generate_batch`."""
        return _batching().generate_batch(self, inputs, *args, **kwargs)

    def _check_copies(self, settings: DraftSettings, plan: DraftPlan | None, asked: Any, copies: int | None) -> None:
        """Refuse a tree of heads where there are none, and copies alone where none are asked for."""
        if self.drafter.copies is not None and plan is not None and plan.tree.num_nodes > 1:
            raise ValueError(
                f"draft_tree is {reprlib.repr(settings.draft_tree)}, but this model has no heads and guesses copies of "
                "the text alone: leave it out, or put heads on the base."
            )
        if copies is None and isinstance(asked, (str, list)) and asked in (LOOKUP, []):
            raise ValueError(
                f"draft_tree is {asked!r}, which guesses copies of the text alone: give prompt_lookup_num_tokens, or "
                "lookup_texts, too."
            )

    def why_no_drafts(self) -> str | None:
        """Why no call of `generate` can draft on this base, found out by a short one; None if calls can."""
        short = {"max_new_tokens": 2, "min_new_tokens": None, "stop_strings": None, "cache_implementation": None}
        greedy = {"do_sample": False, "num_return_sequences": 1}
        config = self._merged_config(None, {**short, **greedy})[0].without("max_length")
        config.__dict__.pop("calibration", None)
        try:
            reader = self._base_reader()
            _check_call(self.base, self._merged_config(None, {})[0], None, None)
            copies = self.drafter.copies
            plan = DraftPlan(DraftTree([(0,)]) if copies is None else DraftTree.root_alone())
            ours = {"plan": plan, "settings": DraftSettings(), "copies": copies, "random": RandomNumbers()}
            loop = self._loop(reader=reader, execution=Execution("eager"), **ours)
            self.base.generate(probe_tokens(self.base)[None, :4], generation_config=config, custom_generate=loop)
        except Unsupported as reason:
            return str(reason)
        except Exception as error:  # of heads that do not fit the base, or of the base itself
            return f"a call raises {type(error).__name__}: {error}".splitlines()[0].rstrip(".")
        return None

    def _base_reader(self) -> BaseReader:
        """How to run this base, probed once for each base and what its answers depend on."""
        base = self.base
        if changed := changed_by_training(base) or changed_by_training(self.drafter):
            raise Unsupported(f"the model is in training mode, which changes what it computes ({changed}): call eval()")
        probed, readers = self.__dict__.get("_readers", ((), {}))
        asked = (base, base.get_output_embeddings())  # an adapter may replace the second
        if [*map(id, probed)] != [*map(id, asked)]:  # by identity, which a copy of the whole model keeps
            readers = {}
            self.__dict__["_readers"] = (asked, readers)
        key = (self.drafter.reads, *circumstances(base))
        if key not in readers:
            while len(readers) >= MOST_READERS:
                readers.pop(next(iter(readers)), None)
            try:
                readers[key] = probe(base, self.drafter.reads)
            except Unsupported as reason:
                if not reason.lasting or is_hooked(base):
                    raise
                readers[key] = str(reason)  # not the exception, whose traceback would keep the probe's tensors alive
        elif isinstance(readers[key], BaseReader) and is_hooked(base):
            try_tree(readers[key])  # a hook may do something else in every call
        if isinstance(readers[key], str):
            raise Unsupported(readers[key])
        self.drafter.prepare()
        return readers[key]

    def _loop(self, **ours: Any) -> Callable[..., Any]:
        """`_decode` as the base's `custom_generate`, which shows none of `ours`: a call could set them by name."""
        decode = functools.partial(self._decode, **ours)
        return lambda *args, **model_kwargs: decode(*args, **model_kwargs)

    def _decode(
        self,
        base,
        input_ids,
        *,
        reader,
        execution,
        plan=None,
        settings=None,
        copies=None,
        texts=None,
        streamer=None,
        on_step=None,
        random=None,
        run=decode,
        **call,
    ):
        """The loop, as the base's `custom_generate`, after a look at what the base has prepared.

        Args:
            plan: of a call that names its tree; None where what was measured, and `settings`, choose one.
            copies: how many tokens of the text each step copies, where the call asks for that.
            texts: others to copy from.
            random: numbers of the call.
            run: what decodes, or takes over what was prepared for it.
        """
        processors, criteria = call.pop("logits_processor"), call.pop("stopping_criteria")
        config, text_config = call.pop("generation_config"), base.config.get_text_config(True)
        inputs = _of_text(base, with_cache(CACHE, {name: value for name, value in call.items() if value is not None}))
        past = inputs.get(CACHE)
        if past is None or not can_load(past):
            raise Unsupported(f"a cache of type {type(past).__name__} cannot be compacted")
        if (rows := rows_of(past)) not in (None, len(input_ids)):
            raise Unsupported(f"the cache holds {rows} row(s), and the call has {len(input_ids)}", lasting=False)
        # greedy decoding is exact with all of them
        acceptance = (plan or settings).acceptance if config.do_sample else "exact"
        if others := sorted({type(p).__name__ for p in processors if type(p) not in ROW_BY_ROW}):
            if acceptance != "exact":
                raise Unsupported(f"{acceptance} acceptance cannot show {', '.join(others)} all nodes at once")
        lookup: dict[str, Any] = {"copies": copies, "longest_match": config.max_matching_ngram_size, "texts": texts}
        if plan is None or copies is not None:
            plan = _trees().choose(self, reader, settings, len(input_ids), execution, named=plan, **lookup)
        if plan.base_decodes and on_step is None:
            raise NothingPays(plan.why)
        mask = inputs.get("attention_mask")  # as long as the prompt and the past together, also where it was dropped
        positions = mask_length(config, mask) or input_ids.shape[1]
        longest = positions + config.max_length - input_ids.shape[1] + plan.tree.max_depth
        check_length(text_config, longest, plan.tree.num_nodes)
        inputs.pop("cache_position", None)
        rules = Rules(
            processors,
            criteria,
            config,
            batch_size=len(input_ids),
            prompt_length=input_ids.shape[1],
            device=input_ids.device,
            samples=config.do_sample and acceptance != "typical",
            rejects=acceptance == "rejection",
            streams=may_draw(streamer),
            random=random,
        )
        returned = config.return_dict_in_generate or getattr(past, "_is_user_defined", False)
        if reader.mixers and rules.overruns and returned:
            raise Unsupported("rows go on behind their ends without padding, and a state cannot go back", lasting=False)
        return run(self, input_ids, rules, reader, plan, execution, streamer=streamer, on_step=on_step, **inputs)


def _refuse_no_prompt(prompt: torch.Tensor | None, embeddings: torch.Tensor | None) -> None:
    if prompt is not None and embeddings is None and prompt.shape[-1] == 0:
        raise ValueError(
            "the prompt is empty (0 tokens): give at least one token, such as the tokenizer's beginning of text."
        )


def _batching() -> Any:
    """The room that holds the manager, imported when it is asked for."""
    from hf_drafthead import batching

    return batching


def _trees() -> Any:
    """The room where a tree is chosen, by what was measured with this one's steps; imported when it is asked for."""
    from hf_drafthead import trees

    return trees


def _of_text(base, inputs: dict[str, Any]) -> dict[str, Any]:
    """The model inputs of a call, without what tells a base for images and text that there are no images."""
    if base.config.get_text_config(decoder=True) is base.config:
        return inputs
    if inputs.get("mm_encoder_outputs") == {}:
        del inputs["mm_encoder_outputs"]
    for name in ("token_type_ids", "mm_token_type_ids"):
        if name in inputs and not bool(inputs[name].any()):
            del inputs[name]
    positions = inputs.get("position_ids")
    if positions is not None and positions.dim() == 3 and bool((positions == positions[:1]).all()):
        inputs["position_ids"] = positions[0]  # a position of the text is the same on every axis
    return inputs


def _check_call(base, config: GenerationConfig, assistant_model, synced_gpus: bool | None) -> None:
    """Refuse, before anything runs, what the loop cannot do.

    Raises:
        Unsupported: with the reason.
    """
    mode = config.get_generation_mode(assistant_model)
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise Unsupported(f"the generation mode is {mode.value.replace('_', ' ')}")
    if not config.use_cache:
        raise Unsupported(f"use_cache is {config.use_cache}")
    if config.cache_implementation not in (None, "dynamic", "hybrid", "static"):
        raise Unsupported(f"cache_implementation is {config.cache_implementation!r}")
    if config.output_attentions or config.output_hidden_states:
        raise Unsupported("attentions or hidden states are asked for")
    if config.token_healing:
        raise Unsupported("token healing rewrites the prompt")
    sharded = is_deepspeed_zero3_enabled() or is_fsdp_managed_module(base)
    if synced_gpus or (synced_gpus is None and sharded and dist.is_initialized() and dist.get_world_size() > 1):
        raise Unsupported("several processes must stay in step")


def _stop_strings_as_criterion(config: CallConfig, stopping_criteria, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments that make `stop_strings` work: with a custom loop transformers loses the tokenizer on the way."""
    if config.stop_strings is None:
        return {"stopping_criteria": stopping_criteria}
    tokenizer = kwargs.get("tokenizer")
    if tokenizer is None:
        raise ValueError(
            f"stop_strings is {config.stop_strings!r}, but no tokenizer was given: pass tokenizer= to generate()."
        )
    criteria = StoppingCriteriaList(stopping_criteria or [])
    if not any(type(criterion) is StopStringCriteria for criterion in criteria):  # else the caller's replaces it
        criteria.insert(0, StopStringCriteria(tokenizer, config.stop_strings))
    return {"generation_config": config.without("stop_strings"), "stopping_criteria": criteria}
