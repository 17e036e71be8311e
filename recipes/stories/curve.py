"""A chart of a run's losses: training mix and held-out documents over the tokens seen."""

import json
from pathlib import Path

from matplotlib.figure import Figure

from recipes.stories.data import MIX_CHANGE
from recipes.stories.train import COOL_DOWN

NAMES = {
    "tiny": ("held out: TinyStories", "#0072B2"), "picture": ("held out: picture books", "#009E73"),
    "books": ("held out: books", "#D55E00"),
}  # fmt: skip


def draw(log: Path, target: Path) -> None:
    """Draw one line per source. If a resumed run repeats a step of the log, the later entry counts."""
    read = [json.loads(line) for line in log.read_text().splitlines()]
    entries = sorted({entry["step"]: entry for entry in read}.values(), key=lambda entry: entry["step"])
    tokens = [entry["tokens"] / 1e6 for entry in entries]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(tokens, [entry["train"] for entry in entries], color="#777777", label="training mix")
    for name, (label, colour) in NAMES.items():
        axes.plot(tokens, [entry["held"].get(name) for entry in entries], color=colour, label=label)
    for bound, label in ((COOL_DOWN, "cool-down"), (MIX_CHANGE, "last mix")):
        reached = [place for place, entry in zip(tokens, entries, strict=True) if entry["progress"] >= bound]
        if reached:
            axes.axvline(reached[0], color="#bbbbbb", linestyle=":")
            axes.annotate(label, (reached[0], axes.get_ylim()[1]), rotation=90, va="top", ha="right", fontsize=8)
    axes.set_xlabel("million tokens")
    axes.set_ylabel("loss, nats per token")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, metadata={"Date": None} if target.suffix == ".svg" else None)
