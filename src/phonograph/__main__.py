"""`phonograph` and `python -m phonograph`: the command line, which a Ctrl-C ends quietly from the first import on."""

import os
import signal
import sys


def run() -> int:
    """Import the commands and run one; returns the exit status."""
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_default:
        # Imports take seconds, and some libraries make errors of their own of an interrupt. Nothing has begun yet that
        # would have to be ended.
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
