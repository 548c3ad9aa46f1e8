"""Messages for people, through the logger ``bert``. They are printed, unless an application routes them elsewhere."""

from __future__ import annotations

import functools
import logging
import math
import sys
from typing import Any

from bert.errors import redact

LOGGER = logging.getLogger("bert")


def _redact_record(record: logging.LogRecord) -> bool:
    """A filter that removes the credentials of URLs from a message, for every handler."""
    text = record.getMessage()
    if (redacted := redact(text)) != text:
        record.msg, record.args = redacted, None
    return True


if _redact_record not in LOGGER.filters:
    LOGGER.addFilter(_redact_record)


class WarningText(str):
    """A message about something that is declared but not applied, or is not as it should be.

    Functions that report through a ``say`` argument pass it like any other text.
    """


def format_number(value: float, digits: int, separator: str = "") -> str:
    """Formats a number with ``digits`` decimals; a very large one, such as a diverged perplexity, as 1.0e+304."""
    return f"{value:.{digits}e}" if 1e7 <= abs(value) < math.inf else f"{value:{separator}.{digits}f}"


def log_message(text: str) -> None:
    """Logs a message of a ``say`` argument that nobody passed: a `WarningText` as a warning, others for debugging."""
    LOGGER.log(logging.WARNING if isinstance(text, WarningText) else logging.DEBUG, "%s", text)


def log_info(text: str) -> None:
    """Logs a message of a run: a `WarningText` as a warning, others for information."""
    LOGGER.log(logging.WARNING if isinstance(text, WarningText) else logging.INFO, "%s", text)


class PrintHandler(logging.Handler):
    """Prints messages to stdout, and warnings to stderr, as these are at that time: notebooks and tests replace them.

    Attributes:
        console: rich's console of the progress bar that is on the terminal, above which messages are printed.
    """

    console: Any = None

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        if self.console is not None:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=sys.stdout if record.levelno < logging.WARNING else sys.stderr, flush=True)


PRINT_HANDLER = PrintHandler()


def are_printed() -> bool:
    """Whether messages go to the terminal."""
    return PRINT_HANDLER in LOGGER.handlers and LOGGER.isEnabledFor(logging.INFO)


@functools.lru_cache(maxsize=1024)
def warn_once(text: str) -> None:
    """Logs a warning, but not the same one again: a corpus is read several times."""
    LOGGER.warning(text)


if not LOGGER.handlers and LOGGER.level == logging.NOTSET:  # else an application has configured it
    LOGGER.addHandler(PRINT_HANDLER)
    LOGGER.setLevel(logging.INFO)
    LOGGER.propagate = False  # a handler of the root logger would print messages a second time
