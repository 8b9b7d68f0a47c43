"""A card is rebuilt around what a person wrote."""

import pytest

from hf_drafthead.cards.sections import REBUILT, merge, sections_of

NEW = f"# Title\n{REBUILT}\n\nnew\n\n## Use\n{REBUILT}\n\nnew use\n\n## Limits\n{REBUILT}\n\nnew limits\n"


def test_without_an_old_card_the_new_one_is_taken():
    assert merge("", NEW) == NEW
    assert merge(NEW, NEW) == NEW


@pytest.mark.parametrize(
    "old, expected",
    [
        ("## Thanks\n\nTo all.\n", "# Title\n{0}\n\nnew\n\n## Thanks\n\nTo all.\n\n## Use\n{0}\n\nnew use"),
        ("## Use\n{0}\n\nold\n\n## Thanks\n\nTo all.", "## Use\n{0}\n\nnew use\n\n## Thanks\n\nTo all.\n\n## Limits"),
        ("## Use\n\nBy hand.\n", "new\n\n## Use\n\nBy hand.\n\n## Limits"),
        ("# By hand\n\nMine.\n", "# By hand\n\nMine.\n\n## Use"),
        ("## Limits\n{0}\n\nold\n\n## A\n\na\n\n## B\n\nb\n", "new limits\n\n## A\n\na\n\n## B\n\nb\n"),
    ],
    ids=["at-the-start", "in-the-middle", "in-place-of-ours", "the-beginning", "at-the-end"],
)
def test_sections_of_others_stay_where_they_were(old, expected):
    merged = merge(old.format(REBUILT), NEW)
    assert expected.format(REBUILT) in merged
    assert merge(merged, NEW) == merged


def test_a_section_of_ours_that_is_no_longer_written_goes():
    assert merge(f"{NEW}\n## Gone\n{REBUILT}\n\nold\n", NEW) == NEW


def test_a_heading_inside_a_code_block_is_code():
    text = "## Use\n\n```bash\n## not a heading\n```\n\n## Next\n\n~~~\n```\n## nor this\n~~~\n"
    assert [section.heading for section in sections_of(text)] == ["## Use", "## Next"]


def test_line_ends_of_another_system_do_not_matter():
    assert merge(NEW.replace("\n", "\r\n"), NEW) == NEW
