"""Writing files that are never half there."""

from __future__ import annotations

import os
from pathlib import Path


def write_durably(file: Path, data: bytes) -> None:
    """Writes a file that is either whole, also after a loss of power, or not there."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    with open(temporary, "wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())
    os.replace(temporary, file)
