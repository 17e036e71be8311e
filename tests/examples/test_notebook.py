"""The notebook runs from top to bottom, and what it asserts and draws is there."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "examples" / "tour.ipynb"
PICTURES = 7


def pictures(notebook: nbformat.NotebookNode) -> list[str]:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return [output.data["image/png"] for output in outputs if "image/png" in output.get("data", {})]


def texts(notebook: nbformat.NotebookNode) -> list[str]:
    """What each cell writes to stdout, without figures that a clock measured."""
    printed = [
        "".join(output.text for output in cell.get("outputs", []) if output.output_type == "stream")
        for cell in notebook.cells
    ]
    return [text for text in printed if " s\n" not in text]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of jupyter_client and its event loop
def test_the_tour_runs_and_draws() -> None:
    stored = nbformat.read(NOTEBOOK, as_version=4)  # with the outputs that GitHub shows
    run = nbformat.read(NOTEBOOK, as_version=4)
    client = NotebookClient(run, timeout=None, kernel_name="python3", coalesce_streams=True)
    client.execute(cwd=str(NOTEBOOK.parent))  # raises if a cell does
    assert len(pictures(run)) == len(pictures(stored)) == PICTURES
    assert all(len(picture) > 5_000 for picture in pictures(run))
    assert [bool(text) for text in texts(run)] == [bool(text) for text in texts(stored)]
    assert any("True" in text for text in texts(run)), "the plan of the third part fits"
