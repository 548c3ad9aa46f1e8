"""Texts of errors, and messages of the logger ``bert``: printed, unless an application routes or silences them."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from bert.errors import LOGGER, PRINT_HANDLER, are_printed, cut_at_word, format_number, quoted
from bert.runs.report import Progress


def test_lists_in_messages_end_after_a_whole_name():
    assert quoted(["a", 1]) == "'a', 1"
    shown, more = quoted(f"label {number}" for number in range(50)).split(" and ")
    assert shown.endswith("'") and len(shown) <= 200
    assert more == f"{50 - shown.count('label')} more"
    assert quoted(["x" * 100, "b"]) == "'" + "x" * 55 + "...', 'b'"


def test_texts_of_other_programs_are_cut_after_a_word():
    text = cut_at_word("no connection to the hub\n" * 20)
    assert text.endswith("hub ...") or text.split(" ...")[0].split()[-1] in ("no", "connection", "to", "the")
    assert len(text) <= 200


@pytest.fixture
def restored():
    """Restores the logger after a test."""
    handlers, level = list(LOGGER.handlers), LOGGER.level
    yield
    LOGGER.handlers[:] = handlers
    LOGGER.setLevel(level)


class Kept(logging.Handler):
    """An application's handler."""

    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append((record.levelname, record.getMessage()))


def test_messages_are_printed_as_they_are(capsys):
    assert are_printed()
    LOGGER.info("100 % [MASK]")
    LOGGER.warning("a warning")
    assert capsys.readouterr() == ("100 % [MASK]\n", "a warning\n")


def test_messages_can_be_silenced(restored, capsys):
    LOGGER.setLevel(logging.WARNING)
    with Progress(10) as progress:
        progress.update(10, {"loss": 1.0})
    LOGGER.info("a message")
    assert capsys.readouterr() == ("", "")


def test_messages_can_be_routed_and_then_there_is_no_bar(restored, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    LOGGER.removeHandler(PRINT_HANDLER)
    LOGGER.addHandler(kept := Kept())
    with Progress(10) as progress:
        progress.update(10, {"loss": 1.0})
    assert kept.texts == [("INFO", "step 10/10 (100%)  loss 1.000")]
    assert capsys.readouterr().out == ""


CONFIGURED = """
import logging.config
logging.config.dictConfig({
    "version": 1,
    "formatters": {"plain": {"format": "%(name)s %(levelname)s: %(message)s"}},
    "handlers": {"mine": {"class": "logging.StreamHandler", "stream": "ext://sys.stdout", "formatter": "plain"}},
    "loggers": {"bert": {"handlers": ["mine"], "level": "INFO"}},
})
from bert.errors import LOGGER
LOGGER.info("a message")
"""


def test_a_logger_that_is_configured_before_the_import_stays_so():
    command, root = [sys.executable, "-c", CONFIGURED], Path(__file__).parents[1]
    assert subprocess.run(command, cwd=root, capture_output=True, text=True).stdout == "bert INFO: a message\n"


def test_a_very_large_number_keeps_a_few_digits() -> None:
    numbers = {49.66: "49.7", 1234.5: "1234.5", 1e304: "1.0e+304", -1e9: "-1.0e+09"}
    assert {value: format_number(value, 1) for value in numbers} == numbers
    assert [format_number(float(value), 3) for value in ("nan", "inf")] == ["nan", "inf"]
