"""`phonograph` and `python -m phonograph`: the command line; Ctrl-C exits without a traceback, even during imports."""

import os
import signal
import sys


def run() -> int:
    """Import the commands and run one; returns the exit status."""
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_default:
        # Imports take seconds, and some libraries turn an interrupt into errors of their own. Nothing has started yet
        # that would need cleanup.
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(130))
    from phonograph.cli.main import main

    if is_default:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        status = main()
    except KeyboardInterrupt:
        status = 130
    # Python notes that an interrupt went through code of a string, as that of a dataclass, and then dies by the signal,
    # though it was caught. The next such code begins anew.
    exec("")
    return status


if __name__ == "__main__":
    sys.exit(run())
