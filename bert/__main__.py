"""Entry point of the program ``bert``, which is also ``python -m bert``."""

from __future__ import annotations

import signal
import sys

from bert.runtime.process import prepare_streams, reexec_with_huge_pages


def main(argv: list[str] | None = None) -> int:
    """Runs the command line of this process, or ``argv``, and returns the exit status."""
    prepare_streams()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the command runs, Ctrl-C ends the process at once
    reexec_with_huge_pages()
    from bert import commands  # importing it earlier would load it twice

    return commands.main(argv)


if __name__ == "__main__":
    sys.exit(main())
