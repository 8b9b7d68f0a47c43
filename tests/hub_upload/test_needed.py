"""What of a few modules is needed: by name, from a few definitions on."""

import pytest

from hf_drafthead.hub_upload.bundle import MODELS, NEEDED_BY_SOME, build_bundle
from hf_drafthead.hub_upload.needed import needed

TEXT = '''"""A module."""

# of the first
ONE = 1
ONE += 2
TWO = "unused"


def first():
    """What is needed.

    In detail.
    """
    return ONE + Kind().used()


def second():
    return TWO


class Kind(dict):
    """A class."""

    def used(self):
        """Empty."""

    def unused(self):
        return second()

    def update(self, *given):
        return super().update(*given)


for name in ("used",):
    setattr(Kind, name, None)
for name in ("unused",):
    print(second, name)
'''
LEFT = """# of the first
ONE = 1
ONE += 2

def first():
    return ONE + Kind().used()

class Kind(dict):
    def used(self):
        ...
    def update(self, *given):
        return super().update(*given)
for name in ("used",):
    setattr(Kind, name, None)"""


def test_what_nothing_needs_is_left_out(monkeypatch):
    monkeypatch.setattr("hf_drafthead.hub_upload.needed.foreign_names", lambda module, name: set(dir(dict)))
    texts, used = needed({"module": TEXT, "other": "def second():\n    pass\n"}, {"first"})
    assert texts == {"module": LEFT}
    assert {"ONE", "Kind", ".used"} <= used and "TWO" not in used


@pytest.mark.parametrize(
    "name, body, left",
    [
        ("first", "return 1", "def first(*given, **named):\n    return 1"),
        ("Kind", "four = 4\nfive = 5", "class Kind:\n    four = 4\n    five = 5"),
    ],
)
def test_a_function_or_class_may_have_another_body(name, body, left, monkeypatch):
    monkeypatch.setattr("hf_drafthead.hub_upload.needed.foreign_names", lambda module, name: set())
    text = TEXT.partition("\n\nfor ")[0]
    assert needed({"module": text}, {name}, {name: body})[0]["module"] == left


def test_an_assignment_that_several_modules_have_stands_once():
    texts, _ = needed({"one": "ONE = 1\nA = ONE", "two": "ONE = 1\nB = ONE"}, {"A", "B"})
    assert texts == {"one": "ONE = 1\nA = ONE", "two": "B = ONE"}


def test_a_variable_does_not_keep_a_method_of_its_name_nor_an_attribute_a_function(monkeypatch):
    monkeypatch.setattr("hf_drafthead.hub_upload.needed.foreign_names", lambda module, name: set())
    text = "def begin(used, it):\n    return Kind(), used, it.second\n\n\n" + TEXT.partition("for name")[0]
    (left,) = needed({"module": text}, {"begin"})[0].values()
    assert "def used" not in left and "def second" not in left and "class Kind(dict):" in left


def test_the_code_of_a_checkpoint_holds_nothing_of_training_formats_and_calibration():
    for family in MODELS:
        text = build_bundle(family)
        assert len(text.splitlines()) <= 5000
        for name in ("head_states", "over_chains", "choose_vocabulary", "FOREIGN"):
            assert name not in text, f"{name} in the code of {family}"
    assert len(build_bundle("eagle3", frozenset(NEEDED_BY_SOME)).splitlines()) <= 6136
