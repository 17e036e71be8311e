"""The command `tokenwright`, also as `python -m tokenwright`.

Importing this module loads next to nothing: a Ctrl-C during the imports of the command line ends the process at once.
"""

import signal


def main() -> None:
    """Run the command line. Until a command's own work begins, Ctrl-C ends the process as the system does it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a process that ignores it goes on to
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from tokenwright.cli import main as run

    run()


if __name__ == "__main__":
    main()
