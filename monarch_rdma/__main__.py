"""Where the command `monarch-rdma` begins and ends: Ctrl-C meets no traceback of imports, nor of what runs at exit."""

import signal
import sys

__all__ = ["main"]


def main() -> int:
    """The command; see cli.py. Where Ctrl-C is ignored, as in the background of a shell, it stays ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until there is someone to catch it
    from .cli import main

    try:
        return main()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # nothing is left to be done but to tidy up


if __name__ == "__main__":
    sys.exit(main())
