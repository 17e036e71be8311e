"""Make the README's pictures from real runs: the terminal as SVG, and the chart of a race.

.venv/bin/python docs/pictures/make.py

The commands run as they are shown, in a process of their own; what they write is put on a recorded console.
"""

import io
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

from race_chart import Line, chart
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

HERE = Path(__file__).parent
WIDTH = 100
STORY = 'tokenwright generate "Once upon a time" -n 70 --temperature 0.7 --seed 4'
COLOURS = {"cached": "#0072B2", "naive": "#D55E00", "prefix": "#009E73"}
RACE = 'tokenwright race "Once upon a time" -n 300'
# Fonts are the reader's own: the picture loads nothing from elsewhere.
FORMAT = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)


def run(command: str, *more: str) -> subprocess.CompletedProcess[str]:
    """Run a `tokenwright` command line with this Python, in the folder of the pictures."""
    arguments = [sys.executable, "-m", *shlex.split(command), *more]
    return subprocess.run(arguments, capture_output=True, text=True, check=True, cwd=HERE)


def main() -> None:
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    prompt = Text("$ ", style="bold green")

    story = run(STORY)
    console.print(prompt + Text(STORY, style="bold"))
    console.print(Text.assemble((shlex.split(STORY)[2], "dim"), story.stdout.rstrip("\n")))
    console.print(Text(story.stderr.rstrip("\n"), style="dim"))
    console.print()

    race = run(RACE)
    told = json.loads(run(RACE, "--json").stdout)
    lines = [
        Line(lane, f"{told[lane]['total_s']:.2f} s in all", colour, [1000 * step for step in told[lane]["step_s"]])
        for lane, colour in COLOURS.items()
    ]
    subtitle = f"{len(told['token_ids'])} tokens · naive takes {told['ratio']:.1f}x as long"
    (HERE / "race.svg").write_text(chart("The same text with the KV cache and without it", subtitle, lines))
    console.print(prompt + Text(RACE, style="bold"))
    console.print(Text(race.stdout.rstrip("\n")))
    console.save_svg(str(HERE / "terminal.svg"), title="tokenwright", code_format=FORMAT)


main()
