"""The explorer's page inside another one: a run as one file of HTML, in an iframe; it needs no server."""

import tempfile
from pathlib import Path

import tokenwright

with tokenwright.LLM("stories", trace=True) as llm, tempfile.TemporaryDirectory() as folder:
    run = llm.run("Once upon a time", max_tokens=8, seed=1)
    while not run.ended:
        run.step()
    page = Path(folder) / "page.html"
    tokenwright.show(run).save(str(Path(folder) / "run.html"))
    page.write_text('<h1>How a story is written</h1><iframe src="run.html" width="100%" height="760"></iframe>')
    print(f"{page.name} shows {len(run.frames)} steps: {(Path(folder) / 'run.html').stat().st_size / 1e6:.1f} MB")
