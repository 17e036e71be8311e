"""The command `tokenwright`. Importing this module loads next to nothing, so that Ctrl-C ends the process at once."""

import gc
import os
import signal


def main() -> None:
    """Run the command line, and end the process without Python's own end, which waits for threads that import torch."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a process that ignores it goes on to
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from tokenwright.importing import uncollected_imports

    with uncollected_imports():
        from tokenwright.cli import main as run

        gc.freeze()  # no later collection looks at imports

    try:
        run()
    except SystemExit as end:
        os._exit(end.code if isinstance(end.code, int) else 0)


if __name__ == "__main__":
    main()
