"""A run as a page: what `tokenwright.llm.run_page` returns, for a notebook to display and for a file."""

from dataclasses import dataclass
from pathlib import Path

from tokenwright.checks import check_whole
from tokenwright.errors import RequestError
from tokenwright.llm.run import Run
from tokenwright.llm.web_page import HEIGHT, alone, framed


@dataclass(frozen=True, repr=False)
class RunPage:
    """A run in the explorer's page, which plays it without a server. html: the whole page, about 0.8 MB.

    height: CSS pixels of the frame in which a notebook shows it.
    """

    html: str
    height: int

    def __repr__(self) -> str:
        return f"<RunPage of {len(self.html):,} characters; a notebook displays it, save(path) writes it>"

    def _repr_html_(self) -> str:
        return framed(self.html, self.height)

    def save(self, path: str | Path) -> Path:
        """Write the page to a file that any browser opens. Raises RequestError where that fails."""
        target = Path(path).expanduser()
        try:
            target.write_text(self.html, encoding="utf-8")
        except OSError as error:
            raise RequestError(f"the page cannot be written to {target}: {error.strerror}") from error
        return target


def show(run: Run, *, height: int = HEIGHT) -> RunPage:
    """The steps of a run so far, in the explorer's page; a notebook displays what is returned.

    height: CSS pixels of its frame, from 200 on. Raises RequestError where the page was not built, and for anything but
    a run of `LLM.run`.
    """
    if not isinstance(run, Run):
        raise RequestError(f"show takes a run of LLM.run, not {type(run).__name__}")
    check_whole("height", height, 200)
    return RunPage(alone(run.trace()), height)
