"""The notebook of the docs runs from its first cell to its last, in a folder of its own."""

from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed: pip install 'hf-drafthead[docs]'")
nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed: pip install 'hf-drafthead[docs]'")

NOTEBOOK = Path(__file__).parents[1] / "docs" / "quickstart.ipynb"


def printed(cell) -> str:
    return "".join(output.get("text", "") for output in cell.get("outputs", []) if output.get("name") == "stdout")


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(tmp_path):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    told = {cell["id"]: printed(cell) for cell in notebook.cells}
    nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()  # raises where a cell does
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert (tmp_path / "my-heads" / "model.safetensors").is_file()
    assert "def read_json(path):" in printed(code[0])
    assert "tokens per step" in printed(code[1])
    # stored output shows the base's own text, whatever tree is stored with the heads
    assert told[code[0]["id"]] in ("", printed(code[0]))
