"""A server inside this process, for examples that talk to one: in earnest, run `tokenwright serve` beside them."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def server(*options: str) -> Iterator[str]:
    """Start `tokenwright serve` with the model inside, on a free port; yields its address, and ends it."""
    command = [sys.executable, "-m", "tokenwright", "serve", "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            found = (re.search(r"http://[\w.:]+", line) for line in process.stdout)
            yield next(match[0] for match in found if match)
        finally:
            process.terminate()
