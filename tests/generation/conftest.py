"""What the tests of generation share: every warning is shown anew, and what draft heads say when they are not used."""

import logging

import pytest
import transformers

from hf_drafthead.generation import programs

pytest.register_assert_rewrite("tests.drafters", "tests.generation.agreement")

FALLBACK = "Draft heads are not used"


class Notices(logging.Handler):
    """Collects the reasons for which the base decoded by itself."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.reasons: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the record if it tells of a fallback."""
        message = record.getMessage()
        if message.startswith(FALLBACK):
            self.reasons.append(message.split(": ", 1)[1])


@pytest.fixture(autouse=True)
def every_warning_is_shown_anew():
    """transformers shows the warnings of `warning_once` a single time in a process."""
    transformers.utils.logging.warning_once.cache_clear()


@pytest.fixture
def fallbacks():
    """The reasons of all fallbacks during the test."""
    handler = Notices()
    logger = logging.getLogger("hf_drafthead")
    logger.addHandler(handler)
    yield handler.reasons
    logger.removeHandler(handler)


class Lines(logging.Handler):
    """Collects every line that is logged."""

    def __init__(self):
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the line."""
        self.lines.append(record.getMessage())


@pytest.fixture
def notices():
    """All lines that are logged during the test."""
    handler, logger = Lines(), logging.getLogger("hf_drafthead")
    logger.addHandler(handler)
    yield handler.lines
    logger.removeHandler(handler)


@pytest.fixture
def untraced(monkeypatch):
    """Steps of fixed shapes that no compiler has seen, where it does not matter, for tracing is slow."""
    monkeypatch.setattr(programs, "compiled", lambda function, config: function)
