"""Errors of the operating system and of the devices as sentences that say what to do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from bert.errors import UserError

OUT_OF_MEMORY = (
    "the memory of a device is used up: raise --training.gradient_accumulation_steps (the same result), set "
    "--training.remat dots or full, or shard the model with --training.mesh; for pretraining, bert plan with the same "
    "arguments reports what fits"
)


@contextlib.contextmanager
def system_errors_as_user_errors() -> Iterator[None]:
    """Raises UserError for an error of the operating system (a full disk, a missing permission), and for exhausted
    device memory. A closed pipe stays what it is."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.strerror is None:  # not from the operating system
            raise
        where = f"{error.filename}: " if error.filename else ""
        raise UserError(f"{where}{error.strerror}: fix that and run the same command again") from error
    except RuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):  # XLA's word for exhausted device memory
            raise
        raise UserError(OUT_OF_MEMORY) from error
