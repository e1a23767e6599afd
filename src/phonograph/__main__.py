"""`phonograph` and `python -m phonograph`: the command line; Ctrl-C exits without a traceback, even during imports."""

import sys

from phonograph import interrupts


def run() -> int:
    """Import the commands and run one; returns the exit status."""
    try:
        interrupts.install()
        from phonograph.cli.main import main

        status = main()
        interrupts.end_at_once_from_now_on()
    except KeyboardInterrupt:
        interrupts.end_at_once_from_now_on()
        status = interrupts.STATUS
    # Python notes that an interrupt went through code of a string, as that of a dataclass, and then dies by the signal,
    # though it was caught. The next such code begins anew.
    exec("")
    return status


if __name__ == "__main__":
    sys.exit(run())
