"""A process beside the server, which acts where the server's own interpreter cannot.

A regular expression or an extension may hold the interpreter's lock for ever. Then no handler and no thread of Python
runs, and only SIGKILL could end the server. faulthandler's handler needs no lock: it writes the stack to a pipe and
passes the signal on. At the second SIGTERM the companion waits for GRACE_S and kills the server. It tells systemd that
GET /health answers. It runs this file with nothing but the standard library, and ends with the server.
"""

import faulthandler
import math
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGTERM, signal.SIGINT)
GRACE_S = 4.0  # from the second signal on
LOOK_S = 1.0  # between two looks at whether the server is there
MARK = b"Stack (most recent call first)"  # begins what faulthandler writes for a signal


class Companion:
    """The server's end of it. address: at which the server listens."""

    def __init__(self, address: tuple[str, int]) -> None:
        from subprocess import Popen  # here: the companion itself needs none

        reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)  # a signal handler never waits
        host, port = address[:2]
        command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), host, str(port)]
        self._process = Popen(command, stdin=reading, start_new_session=True)
        os.close(reading)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Tell it of signals. Within, no other handler of them may be set."""
        for number in SIGNALS:
            faulthandler.register(number, file=self._writing, all_threads=False, chain=True)
        try:
            yield
        finally:
            for number in SIGNALS:
                faulthandler.unregister(number)

    def close(self) -> None:
        os.close(self._writing)
        self._process.kill()
        self._process.wait()


class SignalCount:
    """Counts the signals in what faulthandler writes, in parts of any length."""

    def __init__(self) -> None:
        self.count = 0
        self._rest = b""

    def add(self, part: bytes) -> None:
        text = self._rest + part
        self.count += text.count(MARK)
        self._rest = text[1 - len(MARK) :]


def _notify(state: bytes) -> None:
    """Tell systemd, if it has started the server."""
    place = os.environ.get("NOTIFY_SOCKET", "")
    if place:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sending:
            sending.connect(place.replace("@", "\0", 1) if place.startswith("@") else place)
            sending.send(state)


def _well(address: tuple[str, int], wait_s: float) -> bool:
    """Whether GET /health says yes in time."""
    try:
        with socket.create_connection(address, wait_s) as asking:
            asking.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            return asking.recv(64).split(b" ")[1:2] == [b"200"]
    except OSError:
        return False


def _beat(address: tuple[str, int]) -> None:
    """Tell systemd when the server is ready, and then three times in the time that it waits for a sign of life."""
    wait_s = int(os.environ.get("WATCHDOG_USEC", "3000000")) / 3e6
    state = b"READY=1"
    while True:
        if _well(address, wait_s):
            _notify(state)
            state = b"WATCHDOG=1"
        time.sleep(wait_s)


def main(parent: int, address: tuple[str, int]) -> None:
    """Watch the server until it has ended."""
    for number in (*SIGNALS, signal.SIGHUP):  # of systemd, for all processes of the service
        signal.signal(number, signal.SIG_IGN)
    if os.environ.get("NOTIFY_SOCKET"):
        threading.Thread(target=_beat, args=(address,), daemon=True).start()
    signals, end = SignalCount(), math.inf
    while os.getppid() == parent:
        if select.select([0], [], [], min(LOOK_S, end - time.monotonic()))[0]:
            part = os.read(0, 2**16)
            if not part:
                return
            signals.add(part)
            if signals.count:
                _notify(b"STOPPING=1")
            if signals.count > 1:
                end = min(end, time.monotonic() + GRACE_S)
        if time.monotonic() >= end:
            os.kill(parent, signal.SIGKILL)
            return


if __name__ == "__main__":
    main(int(sys.argv[1]), (sys.argv[2], int(sys.argv[3])))
