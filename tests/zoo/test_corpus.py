"""The corpus: what is read, what is held out, and that both are the same everywhere."""

import pytest

from benchmarks.zoo_recipe.corpus import read_corpus


def write(folder, name, text="x = 1\n"):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_only_the_librarys_own_source_is_read(tmp_path):
    kept = ["abc.py", "email/charset.py", "zipfile.py"]
    skipped = ["test/test_abc.py", "unittest/test/test_case.py", "site-packages/torch/nn.py", "encodings/cp037.py"]
    skipped += ["idlelib/editor.py", "html/entities.py", "_sysconfigdata__linux_x86_64-linux-gnu.py", "LICENSE.txt"]
    skipped += ["config-3.11-x86_64-linux-gnu/python-config.py"]
    for name in [*kept, *skipped]:
        write(tmp_path, name)
    write(tmp_path, "xml/__init__.py", "\n")  # no text: no file
    assert [file.name for file in read_corpus(tmp_path)] == kept


def test_a_library_without_source_is_refused(tmp_path):
    with pytest.raises(OSError, match=r"no Python source in .*: expected a standard library, use an interpreter"):
        read_corpus(tmp_path)


def test_this_interpreters_library_has_enough_text():
    corpus = read_corpus()
    held_out = sum(file.held_out for file in corpus)
    assert sum(len(file.text) for file in corpus) > 5_000_000
    assert 0.02 < held_out / len(corpus) < 0.06
