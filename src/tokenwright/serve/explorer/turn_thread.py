"""Drives a run, or a batch, in a thread of its own (explorer/player.py)."""

import threading

from tokenwright.explorer.player import Driven, Turn


def in_thread(turn: Turn, name: str) -> Driven:
    woken = threading.Event()

    def drive() -> None:
        while (rest := turn()) is not None:
            if rest > 0:
                woken.wait(rest)
                woken.clear()  # a command that comes from now on wakes it again: those before are in the next turn

    thread = threading.Thread(target=drive, name=name, daemon=True)
    thread.start()
    return Driven(woken.set, thread.join)
