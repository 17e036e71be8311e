"""Fuzz servers of each kind for as long as you like, or send a request of an earlier run once more.

python -m tests.fuzz --minutes 60                            # exit status 1 if a violation was found
python -m tests.fuzz --kinds one --seed 7 --plant sleeps
python -m tests.fuzz --replay build/fuzz/one-7-0.json
"""

import argparse
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.fuzz.fuzzer import Fuzzer, Violation, replayed
from tests.fuzz.served import KINDS, PLANTS
from tests.serve.talking import make_talker


def fuzz(folder: Path, minutes: float, seed: str, kinds: str = ",".join(KINDS), without: str = "") -> list[Violation]:
    """Fuzz servers of these kinds in turn, and print what was sent and seen. The first kind gets half of the time."""
    found, names = list[Violation](), kinds.split(",")
    for at, kind in enumerate(names):
        share = 1.0 if len(names) == 1 else 0.5 if at == 0 else 0.5 / (len(names) - 1)
        fuzzer = Fuzzer(kind, folder, seed, without=without)
        try:
            found += fuzzer.run(60 * minutes * share)
        finally:  # also for Ctrl-C
            print(fuzzer.summary(), flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", default=str(time.time_ns() % 10**6))
    parser.add_argument("--kinds", default=",".join(KINDS), help="of servers, with commas between them")
    parser.add_argument("--without", default="", help="a pattern of the names of fields that get no hard values")
    parser.add_argument("--plant", default="", choices=("", *PLANTS), help="a fault that the server is given")
    parser.add_argument("--replay", type=Path, help="the file of a violation")
    given = parser.parse_args()
    with TemporaryDirectory() as place:
        folder = make_talker(Path(place))
        if given.replay:
            kind, what = replayed(given.replay, folder)
            print(f"{kind or 'nothing is wrong'}\n{what}")
            return bool(kind)
        if given.plant:
            return not Fuzzer(given.kinds, folder, given.seed, given.plant).run(60 * given.minutes, first=True)
        return bool(fuzz(folder, given.minutes, given.seed, given.kinds, given.without))


if __name__ == "__main__":
    sys.exit(main())
