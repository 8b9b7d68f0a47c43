"""A card as sections, so that it can be rebuilt around what a person wrote.

A section starts at a heading of level 2 and ends before the next; the text before the first heading has the heading "".
A section that contains the line REBUILT is generated and is written again; all others were written by people and are
kept, also in place of a generated section with the same heading.
"""

from dataclasses import dataclass

REBUILT = '<!-- rebuilt by "hf-drafthead card": delete this line to keep a text of your own in this section -->'
FENCES = ("```", "~~~")


@dataclass(frozen=True)
class Section:
    """heading: with its marks, "" at the start of the card; text: all of it, the heading included."""

    heading: str
    text: str

    @property
    def ours(self) -> bool:
        """Whether it is generated, and may be written again."""
        return REBUILT in self.text.splitlines()


def sections_of(text: str) -> list[Section]:
    """The sections of a card's text, in order, without the blank lines between them."""
    parts: list[tuple[str, list[str]]] = [("", [])]
    fence = ""
    for line in text.splitlines():
        start = line.lstrip()[:3]
        if fence:
            fence = "" if start == fence else fence
        elif start in FENCES:
            fence = start
        elif line.startswith("## "):
            parts.append((line.strip(), []))
        parts[-1][1].append(line.rstrip())
    sections = [Section(heading, "\n".join(lines).strip("\n")) for heading, lines in parts]
    return [section for section in sections if section.text]


def merge(old: str, new: str) -> str:
    """The new card's text, whose sections are all generated, with every section of the old one that people wrote."""
    fresh = sections_of(new)
    places = {section.heading for section in fresh}
    of_people: dict[str, list[Section]] = {}  # what stays, by the heading that it comes after or takes the place of
    after = ""
    for section in sections_of(old):
        if section.heading in places:
            after = section.heading
        if not section.ours:
            of_people.setdefault(after, []).append(section)
    result: list[str] = []
    for section in fresh:
        stay = of_people.get(section.heading, [])
        if not any(other.heading == section.heading for other in stay):
            result.append(section.text)
        result.extend(other.text for other in stay)
    return "\n\n".join(result) + "\n"
