"""`generate()` of a model with draft heads: decide whether the tree can go, let the base prepare everything, decode."""

from __future__ import annotations

import contextlib
import copy
import functools
import reprlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.utils import logging

from hf_drafthead.bases.errors import Unsupported
from hf_drafthead.bases.hooks import changed_by_training, circumstances
from hf_drafthead.bases.output_layer import probe_tokens
from hf_drafthead.bases.probe import probe, try_tree
from hf_drafthead.bases.reader import BaseReader
from hf_drafthead.bases.releases import CACHE, GenerateDecoderOnlyOutput, GenerationMixin, with_cache
from hf_drafthead.generation.batch import Batch, with_room
from hf_drafthead.generation.entry import Asked, CallConfig, NothingPays, begin
from hf_drafthead.generation.lookup import TextIndex, accepted_copies
from hf_drafthead.generation.noise import NOTHING_DRAWN, RandomNumbers
from hf_drafthead.generation.runner import Execution
from hf_drafthead.generation.settings import DraftSettings, Plans
from hf_drafthead.generation.state import DecodingState, DraftHeadGenerateOutput, Member, StepRecord
from hf_drafthead.generation.step import now
from hf_drafthead.generation.tree import LOOKUP, DraftTree, DynamicTree, LookupTree

logger = logging.get_logger(__name__)

MOST_READERS = 16  # that are kept of one base, whose hooks and forwards may change between calls


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
            draft_tree: a published tree's name, rank paths, a `DraftTree`; "dynamic", {"dynamic": {"nodes": 32}} or a
                `DynamicTree`, whose shape follows the guesses; "auto", the calibrated tree as long as drafting pays;
                by default the one calibrated for this call, else what costs little here, see docs/trees.md.
            acceptance: "exact" (the base's own text; under sampling its distribution and, with the same seed, its
                tokens), or "typical" (Medusa's lossy rule: under sampling it keeps any guess that is likely enough, so
                the text is NOT a sample of the base). Greedy decoding is exact with both.
            posterior_threshold, posterior_alpha: epsilon and delta of typical acceptance, both from 0 to 1.
            prompt_lookup_num_tokens, max_matching_ngram_size: as in transformers, but together with the heads, at every
                batch size: what followed where the last tokens (at most 8 by default) occurred before takes the place
                of the tree's least valuable nodes; `draft_tree="lookup"` guesses these copies alone.
            lookup_texts: other texts to copy from, strings (with `tokenizer=`) or token ids, or a `TextIndex`, which is
                made once for many calls. 10 tokens are copied where `prompt_lookup_num_tokens` is not given.
            use_mtp: with a base's own modules for multi-token prediction as heads, what is done anyway; with other
                heads the base decodes by itself, as for an assistant model.
            on_step: is given a `StepRecord` after the prefill and after every step; the stages are timed for it.

        Returns:
            (B, length) token ids; with `return_dict_in_generate` an output that also holds `accepted_lengths`.

        Raises:
            TypeError, ValueError: a setting that does not fit, or an empty prompt.
        """
        prompt = kwargs.get("input_ids") if inputs is None else inputs
        if prompt is not None and kwargs.get("inputs_embeds") is None and prompt.shape[-1] == 0:
            raise ValueError("the prompt is empty (0 tokens): give at least one token, such as the beginning of text.")
        if generation_config is not None and not isinstance(generation_config, GenerationConfig):
            return self.base.generate(inputs, generation_config, **kwargs)  # which refuses it
        typical = {"posterior_threshold": posterior_threshold, "posterior_alpha": posterior_alpha}
        config, settings, kwargs = self._merged_config(
            generation_config, with_cache(CACHE, kwargs), draft_tree=draft_tree, acceptance=acceptance, **typical
        )
        looks_up = config.prompt_lookup_num_tokens is not None and assistant_model is None
        copies = config.prompt_lookup_num_tokens if looks_up else None
        texts = None if lookup_texts is None else TextIndex.of(lookup_texts, kwargs.get("tokenizer"))
        plans = Plans(self, config, settings, draft_tree, copies, texts)
        copies_alone = isinstance(draft_tree, (str, list, tuple)) and draft_tree in (LOOKUP, [], ())
        if copies_alone or self.drafter.copies is not None:
            self._check_copies(plans)
        drafting = config.without("prompt_lookup_num_tokens") if looks_up else config
        call = {
            "logits_processor": logits_processor,
            "stopping_criteria": stopping_criteria,
            "prefix_allowed_tokens_fn": prefix_allowed_tokens_fn,
            "synced_gpus": synced_gpus,
            "assistant_model": assistant_model,
            "negative_prompt_ids": negative_prompt_ids,
            "negative_prompt_attention_mask": negative_prompt_attention_mask,
            **kwargs,
        }
        random = RandomNumbers() if config.do_sample else NOTHING_DRAWN
        asked = Asked(plans.plan, plans.choose, streamer=streamer, random=random, timed=on_step is not None)
        try:
            if custom_generate is not None:
                raise Unsupported("custom_generate is given")
            decoded = functools.partial(decode, model=self, execution=plans.execution, on_step=on_step)
            return begin(self, inputs, drafting, asked, decoded, **call)
        except Unsupported as reason:
            asked.random.undo()
            if not isinstance(reason, NothingPays):  # of which `choose` has told
                logger.warning_once(f"Draft heads are not used, the base decodes by itself: {reason}.")
        finally:
            if config.do_sample:
                asked.random.close()
        call |= {"generation_config": config, "streamer": streamer, "custom_generate": custom_generate}
        output = self.base.generate(inputs, **call)
        return DraftHeadGenerateOutput(**output) if type(output) is GenerateDecoderOnlyOutput else output

    def _merged_config(
        self, generation_config: GenerationConfig | None, kwargs: dict[str, Any], **drafting: Any
    ) -> tuple[CallConfig, DraftSettings, dict[str, Any]]:
        """The call's generation config with the model's for a default; its settings of drafting, those that are given
        before; and the arguments that are not part of it."""
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
        settings = DraftSettings.from_config(config, **drafting)
        config.__dict__.pop("calibration", None)  # the base would copy it
        return config, settings, rest

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """A manager of requests that join and leave while others are decoded, see `batching.Manager`."""
        return _batching().Manager(self, *args, **kwargs)

    def continuous_batching_context_manager(self, *args: Any, **kwargs: Any) -> Any:
        """A context in which such a manager runs, see `batching.running_manager`."""
        return _batching().running_manager(self, *args, **kwargs)

    def generate_batch(self, inputs: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        """Generate for many prompts of any lengths, some at a time, see `batching.generate_batch`."""
        return _batching().generate_batch(self, inputs, *args, **kwargs)

    def _check_copies(self, plans: Any) -> None:
        """Refuse a tree of heads where there are none, and copies alone where none are asked for."""
        tree = plans.settings.draft_tree
        if self.drafter.copies is not None and plans.named is not None and plans.named.tree.num_nodes > 1:
            raise ValueError(
                f"draft_tree is {reprlib.repr(tree)}, but this model has no heads and guesses copies of "
                "the text alone: leave it out, or put heads on the base."
            )
        if plans.copies is None:
            raise ValueError(
                f"draft_tree is {tree!r}, which guesses copies of the text alone: give "
                "prompt_lookup_num_tokens, or lookup_texts, too."
            )

    def why_no_drafts(self) -> str | None:
        """Why no call of `generate` can draft on this base, found out by a short one; None if calls can."""
        short = {"max_new_tokens": 2, "min_new_tokens": None, "stop_strings": None, "disable_compile": True}
        greedy = {"do_sample": False, "num_return_sequences": 1}
        tree = [[0]] if self.drafter.copies is None else LOOKUP
        try:
            self._base_reader()
            config, settings, _ = self._merged_config(None, {**short, **greedy}, draft_tree=tree)
            plans = Plans(self, config := config.without("max_length"), settings, tree)
            decoded = functools.partial(decode, model=self, execution=plans.execution)
            begin(self, probe_tokens(self.base)[None, :4], config, Asked(plans.plan, plans.choose), decoded)
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
        seen, hooked = circumstances(base)
        key = (self.drafter.reads, *seen)
        reader: BaseReader | str | None = readers.get(key)
        if reader is None:
            written = [(weight, weight._version) for weight in base.parameters() if not weight.is_inference()]
            try:
                reader = probe(base, self.drafter.reads)
            except Unsupported as reason:
                if not reason.lasting or hooked or any(weight._version != then for weight, then in written):
                    raise
                reader = str(reason)  # not the exception, whose traceback would keep the probe's tensors alive
            readers[key] = reader
            while len(readers) > MOST_READERS:
                readers.pop(next(iter(readers)), None)
        elif isinstance(reader, BaseReader) and hooked:
            try_tree(reader)  # a hook may do something else in every call
        if isinstance(reader, str):
            raise Unsupported(reader)
        self.drafter.prepare()
        return reader


def _batching() -> Any:
    """The room that holds the manager, imported when it is asked for."""
    from hf_drafthead import batching

    return batching


@torch.no_grad()
def decode(
    member: Member, model: Any, execution: Execution, on_step: Callable[[StepRecord], None] | None = None
) -> DraftHeadGenerateOutput | torch.Tensor:
    """Generate behind a prompt that was read, by a batch of this call alone, until every row has ended: what the base's
    `generate` would return, in its form."""
    of_member = member.reader, member.plan, execution, member
    with contextlib.closing(Batch(model, *of_member, timed=on_step is not None)) as batch:
        state = batch.state
        assert state is not None
        tell = (lambda record: None) if on_step is None else _told(on_step, member, state)
        while not member.has_ended(state):
            for record in batch.step():
                tell(record)
        if member.error is not None:
            raise member.error
        rules = member.rules
        length = max(end for end in state.ends if end is not None)
        if rules.samples:
            rules.random.chosen(length - rules.prompt_length)
        if member.stream is not None:
            member.stream.end()
        sequences = state.rows.sequences[:, :length].to(rules.device, copy=True)
        if rules.config.return_dict_in_generate or getattr(member.given[0], "_is_user_defined", False):
            _unload(member, state, length)
        return _output(member, sequences) if rules.config.return_dict_in_generate else sequences


def _told(on_step: Callable[[StepRecord], None], member: Member, state: DecodingState) -> Callable[[StepRecord], None]:
    """Tell `on_step` of the prefill: what tells it of a step, with the seconds since the last one was told."""
    plan, device, last = member.plan, state.rows.sequences.device, 0.0

    def tell(record: StepRecord) -> None:
        nonlocal last
        start, last = last, now(device)
        record.seconds["step"] = last - start
        if isinstance(plan.tree, LookupTree):
            of_step = plan.tree, plan.texts_on(device), state.rows.sequences, [*state.lengths], record.tokens
            record = replace(record, copied=functools.partial(accepted_copies, *of_step))
        on_step(record)

    last = now(device)
    roots = state.rows.sequences.gather(1, state.rows.lengths[:, None] - 1)[..., None].tolist()
    on_step(StepRecord(0, roots, [], [1] * len(roots), 0, {"prefill": member.prefilled_in}, plan=plan))
    return tell


def _unload(member: Member, state: DecodingState, length: int) -> None:
    """Give the ordinary cache of a call what the base's own decoding would leave in it."""
    rows, cache, (ordinary_cache, cached_length) = state.rows, state.rows.cache, member.given
    if (first := min(state.lengths) - 1) < length - 1:  # the base has read the padding behind a row's end, too
        if cache.recurrent:  # what grows must not be a program's
            cache = cache.twin()
            cache.fixed, cache.extent = False, int(cache.lengths.max())
        text, start = rows.sequences[:, first : length - 1], first + state.past_shift
        member.reader.rewrite(text, cache, start, rows.position_shift, rows.visible)
    cache.unload(ordinary_cache, cached_length, length - 1 + state.past_shift)


def _output(member: Member, sequences: torch.Tensor) -> DraftHeadGenerateOutput:
    """The output of a call that asked for more than token ids."""
    rules, (rows, length) = member.rules, sequences.shape
    steps = torch.tensor(member.counted, dtype=torch.long, device=sequences.device)
    new = length - rules.prompt_length
    return DraftHeadGenerateOutput(
        sequences=sequences,
        scores=tuple(rules.scores[:new]) if rules.keeps_scores else None,
        logits=tuple(rules.logits[:new]) if rules.keeps_logits else None,
        accepted_lengths=steps.reshape(-1, rows).T,
        **{CACHE: member.given[0]},
    )
