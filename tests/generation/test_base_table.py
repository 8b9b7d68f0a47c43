"""The table of bases in the documentation says what happens when each of them is tried, built as it is published."""

import re

import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_drafthead.modeling.families import fresh_heads
from tests.base_table import (
    BEGIN,
    DOCS,
    END,
    FAMILIES,
    IMAGES,
    PER_LAYER,
    TEXT,
    checkpoint,
    generic,
    line,
    published,
    row,
    tiny,
)
from tests.bases import EARLIER

# Earlier releases hand the kinds of all tokens to each step.
KINDS_OF_ALL = "the model input mm_token_type_ids depends on the step, and the nodes of a tree are of several"
IN_EARLIER_VERSIONS = dict.fromkeys(("qwen2_5_vl", "qwen3_vl", "qwen3_5"), ("yes", "no", "its own", KINDS_OF_ALL))
SCALES = re.compile("multiplier|(?<!_variance_)scal|softcap")  # of what a forward computes
# Of Gemma, small enough to be felt in a tiny base; and what there are layers enough to show.
FELT = {"query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"}


@pytest.fixture(scope="module")
def written() -> dict[str, str]:
    """The lines of the table, by base."""
    lines = DOCS.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].strip().splitlines()[2:]
    return {line.split("`")[1]: line for line in lines}


def unlike_its_checkpoint(kind: str, base: PreTrainedModel) -> dict[str, tuple]:
    """What a tiny base has otherwise than the published text model: kinds of layers, a window at all, scales."""
    config, model = base.config.get_text_config(decoder=True), published(kind)
    pairs = {name: (set(getattr(config, name, None) or ()), set(model.get(name) or ())) for name in PER_LAYER}
    pairs["sliding_window"] = bool(getattr(config, "sliding_window", None)), bool(model.get("sliding_window"))
    for name, value in vars(config).items():
        follows = getattr(type(config), name, 0) is None  # from other fields, where nobody gives it
        if SCALES.search(name) and name not in FELT and not follows and isinstance(value, (int, float)):
            pairs[name] = value, model.get(name)
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


@pytest.mark.parametrize("kind", [*TEXT, *IMAGES])
def test_the_table_says_what_happens(kind, written):
    found = row(kind)
    if EARLIER and kind in IN_EARLIER_VERSIONS:
        assert found == IN_EARLIER_VERSIONS[kind]
    else:
        assert EARLIER or written[kind] == line(kind, found)


@pytest.mark.skipif(EARLIER, reason="the table is of a later version")
@pytest.mark.parametrize("kind", [*TEXT, *IMAGES])
def test_a_row_is_built_as_the_checkpoint_that_it_names(kind, written):
    text, fields = IMAGES[kind][:2] if kind in IMAGES else (kind, {})
    unlike = unlike_its_checkpoint(text, tiny(kind))
    if fields.get("sliding_window", 0) is None:  # the text model of a base with vision may have no window
        assert unlike.pop("sliding_window") == (False, True)
    assert unlike == {}
    assert written[kind].split(" | ")[1] == checkpoint(kind)


def test_every_line_is_tried(written):
    known = [*TEXT, *IMAGES]
    assert list(written)[: len(known)] == known
    assert EARLIER or set(list(written)[len(known) :]) <= set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


@pytest.mark.parametrize("kind", sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(TEXT)))
def test_every_other_base_drafts_or_says_before_training_why_not(kind, written):
    base = generic(kind)
    if base is None:
        pytest.skip("cannot be built tiny from fields of general names")
    assert EARLIER or kind in written
    if not EARLIER and kind not in IMAGES:
        assert unlike_its_checkpoint(kind, base) == {}
    ids = torch.tensor([[5, 6, 7, 8, 9], [7, 8, 9, 10, 11]])
    call = {"max_new_tokens": 6, "do_sample": False}
    expected = base.generate(ids, **call)
    for family, fields in FAMILIES.items():
        try:
            model = fresh_heads(family, base, **fields)
        except ValueError as refused:
            assert "draft heads need" in str(refused) or "give layer_config= of a model" in str(refused), refused
            continue
        output = model.generate(ids, **call, return_dict_in_generate=True)
        assert torch.equal(output.sequences, expected)
        drafted = getattr(output, "accepted_lengths", None) is not None
        assert drafted == (model.why_no_drafts() is None)
        assert EARLIER or written[kind].split(" | ")[2] == ("yes" if drafted else "no")
        text = torch.randint(3, 60, (1, 16))
        assert model.train()(input_ids=text, labels=text).loss.isfinite()  # heads can be trained on it, drafts or not
        model.eval()
