"""Errors and messages for users: the error type for their mistakes, helpers for its texts, and the logger ``bert``.

The messages of the logger are printed, unless an application routes them elsewhere.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import re
import reprlib
import sys
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar
from urllib.parse import unquote

UTF8_HINT = (
    "convert the file with iconv -f ENCODING -t UTF-8, where ENCODING is its own encoding, such as GB18030, SHIFT_JIS "
    "or WINDOWS-1252"
)
"""How to fix a text that is not UTF-8."""

UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
"""Byte order marks that begin a file in UTF-16."""

UTF32_MARKS = (b"\xff\xfe\0\0", b"\0\0\xfe\xff")
"""Byte order marks that begin a file in UTF-32; one of them also begins with a mark of UTF-16."""


def convert(content: bytes) -> str:
    """The fix for a file that is not UTF-8, by its first bytes."""
    if not content.startswith((*UTF16_MARKS, *UTF32_MARKS)):
        return UTF8_HINT
    encoding = "UTF-32" if content.startswith(UTF32_MARKS) else "UTF-16"
    return f"convert the file, for example with iconv -f {encoding} -t UTF-8"


LISTED_CHARACTERS = 200
"""Maximum length of a list of names in a message, except for a first name that is longer."""

NAME_CHARACTERS = 60
"""Maximum length of one of the names."""

Value = TypeVar("Value")

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that change how a terminal shows a text, marks of direction included, and halves of surrogate pairs."""


MAX_MESSAGE = 1_000
"""Longest text of a `UserError`, in characters: a value of a damaged file can be megabytes long."""


class UserError(Exception):
    """A mistake the user can fix. Its text is one sentence: what, where, and the fix. Programs exit with 2.

    File names and contents in the text may be hostile. Control characters, which a terminal would execute, and lone
    surrogates, which UTF-8 cannot encode, are escaped. A text of more than `MAX_MESSAGE` characters is shortened in
    the middle. URLs lose their credentials (`redact`).
    """

    def __init__(self, *arguments: object) -> None:
        super().__init__(*(_printable(text) if isinstance(text, str) else text for text in arguments))


def _printable(text: str) -> str:
    text, half = escape_controls(redact(text)), MAX_MESSAGE // 2
    return text if len(text) <= MAX_MESSAGE else f"{text[:half]} ... {text[-half:]}"


def escape_controls(text: str) -> str:
    """The text with control characters except line ends and tabs, and lone surrogates, as backslash escapes."""
    return _CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


REDACTED = "REDACTED"
"""Text that takes the place of credentials in URLs."""

_SECRET_WORDS = {
    *("token", "tokens", "password", "passwd", "passphrase", "pwd", "secret", "signature", "sig", "auth", "credential"),
    *("credentials", "authorization", "apikey", "jwt", "hmac", "session", "sessionid", "hdnts", "hdnea"),
    *("pass", "passcode", "bearer", "sas", "ticket"),
}
"""Last words of names of credentials: ``access_token``, ``X-Amz-Signature``."""

_SIGNING = re.compile(
    r"x-(amz|goog|ms|oss|cos)-.*|(aws|oss)?accesskeyid|googleaccessid|key-pair-id|policy|expires"
    r"|(api|access|account|secret|private|subscription)?[-_.]?key",
    re.IGNORECASE,
)
"""Names of further parameters of signed URLs."""

_SHARED_ACCESS = {"sv", "ss", "srt", "sp", "se", "st", "spr", "sip", "sr", "skoid", "sktid", "skt", "ske", "sks", "skv"}
"""Parameters next to ``sig`` in a shared access signature, which change when it is renewed."""

_KEYS = {"api", "access", "secret", "private", "account", "encryption", "license"}
"""Words before ``key`` in names of credentials: ``secret_access_key``."""

_SCHEME = r"[A-Za-z][A-Za-z0-9+.-]{0,30}://"
_URL = re.compile(rf"{_SCHEME}(?:[^\s/?#@]*:[^\s/?#@]*@)?(?:(?!{_SCHEME})[^\s'\"<>])+")
"""A URL, up to the next one in lists such as ``[URL,URL]``. Quotes end it, except in a password."""


def redact(value: Any) -> Any:
    """Returns a value with the credentials in its URLs replaced by `REDACTED`.

    These are the user and the password before the host, and the parameters that sign a URL.

    Args:
        value: text, or dictionaries and lists of texts; anything else stays as it is.
    """
    if isinstance(value, str):
        return _URL.sub(_redact_url, value) if "://" in value else value
    if isinstance(value, dict):
        return {key: redact(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(redact, value)) if type(value) in (list, tuple) else value
    return value


def is_redacted(url: str) -> bool:
    """Returns whether the credentials of a URL were replaced by `REDACTED`."""
    return re.search(rf"://{REDACTED}@|[?&;#][^=&;#]*={REDACTED}(?:[&;#]|$)", url) is not None


def is_secret_name(name: str) -> bool:
    """Returns whether a name is that of a password, a token or the like, by its last word."""
    words = re.findall(r"[^-_.\[\]]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "-", name).lower()) or [""]
    return words[-1] in _SECRET_WORDS or (words[-1] == "key" and not _KEYS.isdisjoint(words[-2:-1]))


def _redact_url(match: re.Match[str]) -> str:
    scheme, _, rest = match[0].partition("://")
    # A password may hold a slash, which a host and its port cannot.
    if user := re.match(r"[^/?#]*@|[^/?#@:]*:(?!\d*(?:[/?#]|$))[^@]*@", rest):
        rest = f"{REDACTED}@{rest[user.end() :]}"
    pieces = re.split(r"([?&;#])", rest)
    names = {index: pieces[index].partition("=")[0] for index in range(2, len(pieces), 2) if "=" in pieces[index]}
    plain = {index: unquote(name) for index, name in names.items()}
    shared = _SHARED_ACCESS if "sig" in plain.values() else set()
    for index, name in plain.items():
        if is_secret_name(name) or _SIGNING.fullmatch(name) or name in shared:
            pieces[index] = f"{names[index]}={REDACTED}"
    return f"{scheme}://{''.join(pieces)}"


def quoted(names: Iterable[object]) -> str:
    """Returns names for a message: each in quotes and cut if it is long, and how many more there are."""
    return listed(map(repr, names))


def listed(words: Iterable[str]) -> str:
    """Returns words for a message: each cut if it is long, and how many more there are."""
    shown: list[str] = []
    words = list(words)
    for number, word in enumerate(words):
        word = word if len(word) <= NAME_CHARACTERS else f"{word[: NAME_CHARACTERS - 4]}...{word[-1]}"
        if shown and len(", ".join([*shown, word])) > LISTED_CHARACTERS:
            return f"{', '.join(shown)} and {len(words) - number:,} more"
        shown.append(word)
    return ", ".join(shown)


def cut_at_word(text: str) -> str:
    """Returns a text of another program for a message: on one line, and cut after a word if it is long."""
    return textwrap.shorten(text, LISTED_CHARACTERS, placeholder=" ...")


def first_line(error: Exception) -> str:
    """Returns the first line of the text of another library's error for a message, or the name of its class."""
    return cut_at_word((str(error).strip().splitlines() or [type(error).__name__])[0])


def on_one_line(text: str) -> str:
    """The text as `escape_controls` has it, with line ends and tabs as backslash escapes too."""
    return re.sub(
        r"[\n\t\u2028\u2029]", lambda match: match[0].encode("unicode_escape").decode(), escape_controls(text)
    )


def without_surrogates(text: str) -> str:
    """The text with ``?`` for each half of a surrogate pair: JSON can spell one, UTF-8 and tokenizers cannot."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def shorten(value: object) -> str:
    """A value in an error, on one line of at most about 100 characters."""
    return " ".join(reprlib.repr(value).split())


def require(value: Value | None, name: str) -> Value:
    """Returns `value`; raises ValueError if it is None."""
    if value is None:
        raise ValueError(f"{name} is not known yet")
    return value


def unreadable(path: object, error: OSError) -> UserError:
    """The error for a file that the system cannot read."""
    if isinstance(error, FileNotFoundError):
        return UserError(f"{path} has disappeared: put it back or leave it out")
    return UserError(f"{path} cannot be read ({error.strerror}): fix its permissions or leave it out")


def damaged(path: object, where: str, error: Exception) -> UserError:
    """The error for a file that is not complete; ``where`` is how much of it was read."""
    reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
    return UserError(f"{path} is cut short or damaged{where} ({reason}): copy it again")


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
