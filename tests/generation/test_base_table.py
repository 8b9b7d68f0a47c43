"""The table of bases in the documentation says what happens when each of them is tried."""

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_drafthead.modeling.families import fresh_heads
from tests.base_table import BEGIN, DOCS, END, FAMILIES, IMAGES, TEXT, generic, row
from tests.bases import EARLIER

# Their rotary embeddings take no positions of two dimensions there, so that heads have other decoder layers.
IN_EARLIER_VERSIONS = dict.fromkeys(("qwen2_5_vl", "qwen3_vl"), ("yes", "a LLaMA's", ""))


@pytest.fixture(scope="module")
def written() -> dict[str, str]:
    """The lines of the table, by base."""
    lines = DOCS.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].strip().splitlines()[2:]
    return {line.split("`")[1]: line for line in lines}


@pytest.mark.few(24)
@pytest.mark.parametrize("kind", [*TEXT, *IMAGES])
def test_the_table_says_what_happens(kind, written):
    found = row(kind)
    if EARLIER and kind in IN_EARLIER_VERSIONS:
        assert found == IN_EARLIER_VERSIONS[kind]
    else:
        assert written[kind] == f"| `{kind}` | {' | '.join(found)} |"


def test_every_line_is_tried(written):
    known = [*TEXT, *IMAGES]
    assert list(written)[: len(known)] == known
    assert EARLIER or set(list(written)[len(known) :]) <= set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


@pytest.mark.few(24)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(TEXT)))
def test_every_other_base_drafts_or_says_before_training_why_not(kind, family, written):
    base = generic(kind)
    if base is None:
        pytest.skip("cannot be built tiny from fields of general names")
    assert EARLIER or kind in written
    ids = torch.tensor([[5, 6, 7, 8, 9], [7, 8, 9, 10, 11]])
    call = {"max_new_tokens": 6, "do_sample": False}
    expected = base.generate(ids, **call)
    try:
        model = fresh_heads(family, base, **FAMILIES[family])
    except ValueError as refused:
        assert "draft heads need" in str(refused) or "give layer_config= of a model" in str(refused), refused
        return
    output = model.generate(ids, **call, return_dict_in_generate=True)
    assert torch.equal(output.sequences, expected)
    drafted = getattr(output, "accepted_lengths", None) is not None
    assert drafted == (model.why_no_drafts() is None)
    assert EARLIER or written[kind].split(" | ")[1] == ("yes" if drafted else "no")
    text = torch.randint(3, 60, (1, 16))
    assert model.train()(input_ids=text, labels=text).loss.isfinite()  # heads can be trained on it, drafts or not
