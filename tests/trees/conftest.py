"""What the tests of trees share with those of generation and batching."""

import pytest

from tests.batching.conftest import managed as managed
from tests.generation.conftest import every_warning_is_shown_anew as every_warning_is_shown_anew
from tests.generation.conftest import fallbacks as fallbacks
from tests.generation.conftest import notices as notices

pytest.register_assert_rewrite("tests.drafters", "tests.generation.agreement")
