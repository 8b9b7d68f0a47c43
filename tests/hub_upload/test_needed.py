"""What of a few modules is needed: by name, from a few definitions on."""

from hf_drafthead.hub_upload.bundle import MODELS, build_bundle
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
    assert {"ONE", "Kind", "used"} <= used and "TWO" not in used


def test_a_function_may_have_another_body(monkeypatch):
    monkeypatch.setattr("hf_drafthead.hub_upload.needed.foreign_names", lambda module, name: set())
    texts, used = needed({"module": TEXT}, {"first"}, {"first": "return 1"})
    assert texts["module"] == "def first(*given, **named):\n    return 1"


def test_the_code_of_a_checkpoint_holds_nothing_of_training_formats_and_calibration():
    for family in MODELS:
        text = build_bundle(family)
        # 80 of these hand the base's keys to drafters that read them
        assert len(text.splitlines()) <= 6800
        for name in ("head_states", "over_chains", "choose_vocabulary", "FOREIGN"):
            assert name not in text, f"{name} in the code of {family}"
