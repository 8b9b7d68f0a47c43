"""What the tests of generation share: every warning is shown anew, and what draft heads say when they are not used."""

import logging

import pytest
import transformers

from hf_drafthead.generation import programs

pytest.register_assert_rewrite("tests.drafters", "tests.generation.agreement")

FALLBACK = "Draft heads are not used"


class Lines(logging.Handler):
    """Collects what is logged; of lines that begin so, what stands behind the colon."""

    def __init__(self, begin: str = ""):
        super().__init__()
        self.begin, self.lines = begin, list[str]()

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the line."""
        message = record.getMessage()
        if message.startswith(self.begin):
            self.lines.append(message.split(": ", 1)[1] if self.begin else message)


def listening(begin: str = ""):
    """What is logged during a test."""
    handler, logger = Lines(begin), logging.getLogger("hf_drafthead")
    logger.addHandler(handler)
    yield handler.lines
    logger.removeHandler(handler)


@pytest.fixture(autouse=True)
def every_warning_is_shown_anew():
    """transformers shows the warnings of `warning_once` a single time in a process."""
    transformers.utils.logging.warning_once.cache_clear()


@pytest.fixture
def fallbacks():
    """The reasons of all fallbacks during the test."""
    yield from listening(FALLBACK)


@pytest.fixture
def notices():
    """All lines that are logged during the test."""
    yield from listening()


@pytest.fixture
def untraced(monkeypatch):
    """Steps of fixed shapes that no compiler has seen, where it does not matter, for tracing is slow."""
    monkeypatch.setattr(programs, "compiled", lambda function, config: function)
