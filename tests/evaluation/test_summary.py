"""A checkpoint on the Hub whose weights cannot be read is refused in one line."""

import pytest
from huggingface_hub.errors import NotASafetensorsRepoError, SafetensorsParsingError

from hf_drafthead.cards import facts
from hf_drafthead.modeling.files import HTTP_ERROR


@pytest.mark.parametrize(
    "error, text",
    [
        (NotASafetensorsRepoError("no such file"), "'org/heads' holds no weights as safetensors: a pickle is never"),
        (SafetensorsParsingError("no\nheader."), "the weights of 'org/heads' cannot be read (SafetensorsParsingError:"),
        (HTTP_ERROR("reset"), "the weights of 'org/heads' cannot be read (HTTPError: reset): try again."),
    ],
    ids=["pickle", "damaged", "network"],
)
def test_weights_that_cannot_be_read_are_refused(monkeypatch, error, text):
    def failing(name):
        raise error

    monkeypatch.setattr(facts, "get_safetensors_metadata", failing)
    with pytest.raises(OSError) as refused:
        facts.tensor_headers("org/heads")
    assert text in str(refused.value) and "\n" not in str(refused.value)
