"""`hf-drafthead card`: writes the card and tells what it lacks."""

import json

from tests.cards.checkpoints import write_checkpoint


def test_it_writes_the_card_and_says_what_it_lacks(command, tmp_path):
    folder = write_checkpoint(tmp_path / "heads")
    code, out, err = command("card", folder, "--json", tmp_path / "out.json")
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == str(folder / "README.md")
    assert out.splitlines()[1].startswith("still missing: license: run `hf-drafthead card")
    told = json.loads((tmp_path / "out.json").read_text())
    assert told["card"] == str(folder / "README.md")
    assert len(told["missing"]) == 1
    for license in (("--license", "apache-2.0"), ()):  # which stays
        assert command("card", folder, *license)[1] == f"{folder / 'README.md'}\n"
    assert "\nlicense: apache-2.0\n" in (folder / "README.md").read_text()
