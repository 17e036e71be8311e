"""A run as a file for other programs: the page's trace, and a Chrome trace."""

from collections.abc import Generator

from tokenwright.explorer.answers import Download
from tokenwright.explorer.explorer import Explorer


def trace(explorer: Explorer, identity: str, halves: bool = False) -> Generator[Download | None, None, None]:
    from tokenwright.explorer.views.run_halves import run_halves  # with NumPy

    player, found = explorer.player(identity), None
    player.renew()
    if halves:
        with explorer.runs.guests([player.run]):  # the lane that goes the other way needs as much again
            for part in run_halves(player.run):
                found = part
                yield None
    yield Download(explorer.trace(player, found or ()), f"trace-{identity}.json")


def perfetto(explorer: Explorer, identity: str) -> Download:
    from tokenwright.explorer.views.chrome_trace import chrome_trace

    player = explorer.player(identity)
    return Download(chrome_trace(player.card, list(player.run.frames)), f"perfetto-{identity}.json")
