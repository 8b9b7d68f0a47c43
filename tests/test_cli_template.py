"""Variables of a chat template, as a switch for thoughts, in every command that writes chats."""

import pytest

from hf_drafthead.cli.common import Loading, with_values
from tests.training.chat_templates import tokenizer_with

TEMPLATE = (
    "{% for turn in messages %}<{{ turn.role }}>{{ turn.content }}{% endfor %}{% if add_generation_prompt %}<assistant>"
    "{% if enable_thinking %}<think>{% else %}<think></think>{% endif %}{% endif %}"
)
TURNS = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize("value, end", [("true", "<think>"), ("false", "</think>"), ("null", "</think>")])
def test_a_template_reads_the_value_that_is_given_and_a_call_may_give_another(value, end):
    tokenizer = tokenizer_with(with_values(TEMPLATE, f'{{"enable_thinking": {value}}}'))
    how = {"tokenize": False, "add_generation_prompt": True}
    assert tokenizer.apply_chat_template(TURNS, **how).endswith(end)
    assert tokenizer.apply_chat_template(TURNS, **how, enable_thinking=True).endswith("<think>")
    assert tokenizer.apply_chat_template(TURNS, **how, enable_thinking=False).endswith("</think>")


@pytest.mark.parametrize("values, line", [
    ("{", "'{' is no JSON object"), ("[1]", "'[1]' is no JSON object"), ('{"a b": 1}', "is no JSON object"),
    ('{"enable_thoughts": 1}', "names 'enable_thoughts', but the chat template does not read it: leave it out."),
])  # fmt: skip
def test_what_a_template_does_not_read_is_refused_in_one_line(values, line):
    with pytest.raises(ValueError) as refused:
        with_values(TEMPLATE, values)
    assert line in str(refused.value) and "\n" not in str(refused.value)
    with pytest.raises(ValueError, match="but there is no chat template"):
        with_values(None, '{"x": 1}')


def test_every_command_that_loads_a_model_takes_them(monkeypatch, tmp_path):
    class Model:
        def eval(self):
            return self

    loaded = tokenizer_with(TEMPLATE)
    monkeypatch.setattr("hf_drafthead.evaluation.loading.load", lambda name, **how: (Model(), loaded))
    _, tokenizer = Loading(chat_template_kwargs='{"enable_thinking": true}').load("heads")
    how = {"tokenize": False, "add_generation_prompt": True}
    assert tokenizer.apply_chat_template(TURNS, **how).endswith("<assistant><think>")
