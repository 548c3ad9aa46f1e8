"""The standard streams of the process."""

from __future__ import annotations

import io
import os
import sys


def prepare_streams() -> None:
    """Opens the null device for each standard stream that the shell has closed (`<&-`, `>&-`, `2>&-`).

    Otherwise the stream is None, messages for a closed stderr go to stdout, and the next file that is opened becomes
    the stream. Names of files that are not UTF-8 are printed with backslash escapes where Python would raise.
    """
    for descriptor, (name, mode) in enumerate({"stdin": "r", "stdout": "w", "stderr": "w"}.items()):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8", errors="backslashreplace"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def is_stdout_closed() -> bool:
    """Whether the shell has closed standard output, so that what is printed is lost."""
    return getattr(sys.stdout, "name", "") == os.devnull  # as `prepare_streams` opens it; a shell gives a number
