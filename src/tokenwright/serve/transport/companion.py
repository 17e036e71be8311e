"""A process beside the server that acts when the server's interpreter hangs. It runs this file, without packages.

A regular expression or an extension may hold the interpreter's lock for ever, and then only SIGKILL ends the server.
faulthandler, which needs no lock, writes each signal to a pipe; GRACE_S after the second one the companion kills the
server. It also tells systemd whether GET /health answers.
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
from contextlib import contextmanager, suppress

SIGNALS = (signal.SIGTERM, signal.SIGINT)
GRACE_S = 4.0  # after the second signal
LOOK_S = 1.0
MARK = b"Stack (most recent call first)"


class Companion:
    def __init__(self, address: tuple[str, int]) -> None:
        from subprocess import Popen

        reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)  # a signal handler never waits
        host, port = address[:2]
        command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), host, str(port)]
        self._process = Popen(command, stdin=reading, start_new_session=True)
        os.close(reading)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count signals in this block, in which nothing else may set their handlers."""
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
    def __init__(self) -> None:
        self.count = 0
        self._rest = b""

    def add(self, part: bytes) -> None:
        text = self._rest + part
        self.count += text.count(MARK)
        self._rest = text[1 - len(MARK) :]


def _notify(state: bytes) -> None:
    place = os.environ.get("NOTIFY_SOCKET", "")
    if place:
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sending:
            sending.settimeout(LOOK_S)  # a reader that hangs must not block this process
            sending.connect(place.replace("@", "\0", 1) if place.startswith("@") else place)
            sending.send(state)


def _well(address: tuple[str, int], wait_s: float) -> bool:
    try:
        with socket.create_connection(address, wait_s) as asking:
            asking.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            return asking.recv(64).split(b" ")[1:2] == [b"200"]
    except OSError:
        return False


def _beat(address: tuple[str, int]) -> None:
    """Notify systemd when the server is ready, then three times in each watchdog interval."""
    wait_s = int(os.environ.get("WATCHDOG_USEC", "3000000")) / 3e6
    state = b"READY=1"
    while True:
        if _well(address, wait_s):
            _notify(state)
            state = b"WATCHDOG=1"
        time.sleep(wait_s)


def main(parent: int, address: tuple[str, int]) -> None:
    for number in (*SIGNALS, signal.SIGHUP):  # systemd sends them to all processes of a service
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
