"""User errors and messages: the exception type, formatting helpers, and the logger ``bert``.

The logger's messages are printed unless an application routes them elsewhere.
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
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, cast
from urllib.parse import unquote

UTF8_HINT = (
    "convert the file with iconv -f ENCODING -t UTF-8, where ENCODING is its own encoding, such as GB18030, SHIFT_JIS "
    "or WINDOWS-1252"
)
"""The fix for text that is not UTF-8."""

UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
"""UTF-16 byte order marks."""

UTF32_MARKS = (b"\xff\xfe\0\0", b"\0\0\xfe\xff")
"""UTF-32 byte order marks. One of them starts with a UTF-16 mark."""


def convert(content: bytes) -> str:
    """Returns the fix for a file that is not UTF-8, given its first bytes."""
    if not content.startswith((*UTF16_MARKS, *UTF32_MARKS)):
        return UTF8_HINT
    encoding = "UTF-32" if content.startswith(UTF32_MARKS) else "UTF-16"
    return f"convert the file, for example with iconv -f {encoding} -t UTF-8"


LISTED_CHARACTERS = 200
"""Maximum length of a list of names in a message, unless the first name is longer."""

NAME_CHARACTERS = 60
"""Maximum length of a single name."""

Value = TypeVar("Value")
Function = TypeVar("Function", bound=Callable[..., Any])

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that control terminals, including direction marks, and lone surrogates."""


MAX_MESSAGE = 1_000
"""Maximum length of a `UserError` message, because values in damaged files can be megabytes long."""


class UserError(Exception):
    """A mistake that the user can fix. The message is one sentence: what, where, and the fix. Programs exit with 2.

    Messages may contain hostile file names and contents. Control characters, which a terminal would execute, and lone
    surrogates, which UTF-8 cannot encode, are escaped. Messages over `MAX_MESSAGE` characters are shortened in the
    middle. Credentials in URLs are removed (`redact`).
    """

    def __init__(self, *arguments: object) -> None:
        super().__init__(*(_printable(text) if isinstance(text, str) else text for text in arguments))


def _printable(text: str) -> str:
    text, half = escape_controls(redact(text)), MAX_MESSAGE // 2
    return text if len(text) <= MAX_MESSAGE else f"{text[:half]} ... {text[-half:]}"


def escape_controls(text: str) -> str:
    """Escapes control characters, except line ends and tabs, and lone surrogates with backslashes."""
    return _CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


REDACTED = "REDACTED"
"""Replacement for credentials in URLs."""

_SECRET_WORDS = {
    *("token", "tokens", "password", "passwd", "passphrase", "pwd", "secret", "signature", "sig", "auth", "credential"),
    *("credentials", "authorization", "apikey", "jwt", "hmac", "session", "sessionid", "hdnts", "hdnea"),
    *("pass", "passcode", "bearer", "sas", "ticket"),
}
"""Last words in names of credentials, such as ``access_token`` and ``X-Amz-Signature``."""

_SIGNING = re.compile(
    r"x-(amz|goog|ms|oss|cos)-.*|(aws|oss)?accesskeyid|googleaccessid|key-pair-id|policy|expires"
    r"|(api|access|account|secret|private|subscription)?[-_.]?key",
    re.IGNORECASE,
)
"""Names of further parameters of signed URLs."""

_SHARED_ACCESS = {"sv", "ss", "srt", "sp", "se", "st", "spr", "sip", "sr", "skoid", "sktid", "skt", "ske", "sks", "skv"}
"""Parameters of a shared access signature besides ``sig``. They change when it is renewed."""

_KEYS = {"api", "access", "secret", "private", "account", "encryption", "license"}
"""Words before ``key`` in names of credentials, such as ``secret_access_key``."""

_SCHEME = r"[A-Za-z][A-Za-z0-9+.-]{0,30}://"
_URL = re.compile(rf"{_SCHEME}(?:[^\s/?#@]*:[^\s/?#@]*@)?(?:(?!{_SCHEME})[^\s'\"<>])+")
"""A URL, up to the next one in lists such as ``[URL,URL]``. Quotes end it, except inside a password."""


def redact(value: Any) -> Any:
    """Replaces the credentials in the URLs of a value by `REDACTED`.

    Credentials are user and password before the host, and parameters that sign a URL.

    Args:
        value: text, or dictionaries and lists of texts. Other values are returned unchanged.
    """
    if isinstance(value, str):
        return _URL.sub(_redact_url, value) if "://" in value else value
    if isinstance(value, dict):
        return {key: redact(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(redact, value)) if type(value) in (list, tuple) else value
    return value


def is_redacted(url: str) -> bool:
    """Whether the credentials of a URL were replaced by `REDACTED`."""
    return re.search(rf"://{REDACTED}@|[?&;#][^=&;#]*={REDACTED}(?:[&;#]|$)", url) is not None


def is_secret_name(name: str) -> bool:
    """Whether a name denotes a password, token or other secret, judging by its last word."""
    words = re.findall(r"[^-_.\[\]]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "-", name).lower()) or [""]
    return words[-1] in _SECRET_WORDS or (words[-1] == "key" and not _KEYS.isdisjoint(words[-2:-1]))


def _redact_url(match: re.Match[str]) -> str:
    scheme, _, rest = match[0].partition("://")
    # A password may contain a slash; a host and port cannot.
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
    """Formats names for a message: quoted and shortened, with the number of omitted names."""
    return listed(map(repr, names))


def listed(words: Iterable[str]) -> str:
    """Formats words for a message: shortened, with the number of omitted words."""
    shown: list[str] = []
    words = list(words)
    for number, word in enumerate(words):
        word = word if len(word) <= NAME_CHARACTERS else f"{word[: NAME_CHARACTERS - 4]}...{word[-1]}"
        if shown and len(", ".join([*shown, word])) > LISTED_CHARACTERS:
            return f"{', '.join(shown)} and {len(words) - number:,} more"
        shown.append(word)
    return ", ".join(shown)


def cut_at_word(text: str) -> str:
    """Formats another program's text for a message: on one line, and cut after a word if it is long."""
    return textwrap.shorten(text, LISTED_CHARACTERS, placeholder=" ...")


def first_line(error: Exception) -> str:
    """Returns the first line of another library's error, or the name of its class."""
    return cut_at_word((str(error).strip().splitlines() or [type(error).__name__])[0])


def on_one_line(text: str) -> str:
    """Like `escape_controls`, but also escapes line ends and tabs."""
    return re.sub(
        r"[\n\t\u2028\u2029]", lambda match: match[0].encode("unicode_escape").decode(), escape_controls(text)
    )


def without_surrogates(text: str) -> str:
    """Replaces lone surrogates by ``?``. JSON can represent them, but UTF-8 and tokenizers cannot."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def shorten(value: object) -> str:
    """Formats a value for a message, on one line of at most about 100 characters."""
    return " ".join(reprlib.repr(value).split())


def require(value: Value | None, name: str) -> Value:
    """Returns `value`; raises ValueError if it is None."""
    if value is None:
        raise ValueError(f"{name} is not known yet")
    return value


def unreadable(path: object, error: OSError) -> UserError:
    """Returns the error for a file that cannot be read."""
    if isinstance(error, FileNotFoundError):
        return UserError(f"{path} has disappeared: put it back or leave it out")
    return UserError(f"{path} cannot be read ({error.strerror}): fix its permissions or leave it out")


def damaged(path: object, where: str, error: Exception) -> UserError:
    """Returns the error for an incomplete file. ``where`` describes how much of it was read."""
    reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
    return UserError(f"{path} is cut short or damaged{where} ({reason}): copy it again")


LOGGER = logging.getLogger("bert")


def _redact_record(record: logging.LogRecord) -> bool:
    """Removes credentials in URLs from a record, for all handlers."""
    text = record.getMessage()
    if (redacted := redact(text)) != text:
        record.msg, record.args = redacted, None
    return True


if _redact_record not in LOGGER.filters:
    LOGGER.addFilter(_redact_record)


class WarningText(str):
    """A message to be logged as a warning, for functions with a ``log`` argument."""


def format_number(value: float, digits: int, separator: str = "") -> str:
    """Formats a number with ``digits`` decimals. Very large numbers, such as a diverged perplexity, become 1.0e+304."""
    return f"{value:.{digits}e}" if 1e7 <= abs(value) < math.inf else f"{value:{separator}.{digits}f}"


def log_message(text: str) -> None:
    """Default for ``log`` arguments. Logs a `WarningText` at level WARNING and other messages at level DEBUG."""
    LOGGER.log(logging.WARNING if isinstance(text, WarningText) else logging.DEBUG, "%s", text)


Log = Callable[[str], None]
"""A function that logs a message, such as `log_info`."""


def log_info(text: str) -> None:
    """Logs a `WarningText` at level WARNING and other messages at level INFO."""
    LOGGER.log(logging.WARNING if isinstance(text, WarningText) else logging.INFO, "%s", text)


class PrintHandler(logging.Handler):
    """Prints messages to stdout and warnings to stderr. Looks up both streams on each call, since tests replace them.

    Attributes:
        console: rich console of the progress bar. Messages are printed above the bar.
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
    """Whether messages are printed to the terminal."""
    return PRINT_HANDLER in LOGGER.handlers and LOGGER.isEnabledFor(logging.INFO)


@functools.lru_cache(maxsize=1024)
def warn_once(text: str) -> None:
    """Logs a warning only once, because a corpus is read several times."""
    LOGGER.warning(text)


def renamed_argument(old: str, new: str) -> Callable[[Function], Function]:
    """Makes a function accept the earlier name of a keyword argument, with one warning."""

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            if old in named and new not in named:
                warn_once(f"{function.__name__}: the argument {old} is now {new}: pass {new}")
                named[new] = named.pop(old)
            return function(*arguments, **named)

        return cast(Function, call)

    return decorate


if not LOGGER.handlers and LOGGER.level == logging.NOTSET:  # otherwise an application has configured it
    LOGGER.addHandler(PRINT_HANDLER)
    LOGGER.setLevel(logging.INFO)
    LOGGER.propagate = False  # a root handler would print messages twice


OUT_OF_MEMORY = (
    "the memory of a device is used up: raise --training.gradient_accumulation_steps (the same result), set "
    "--training.remat dots or full, or shard the model with --training.mesh; for pretraining, bert plan with the same "
    "arguments reports what fits"
)


@contextlib.contextmanager
def system_errors_as_user_errors() -> Iterator[None]:
    """Converts OS errors, such as a full disk or missing permissions, and exhausted device memory to UserError.

    BrokenPipeError is not converted.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.strerror is None:  # not raised by the operating system
            raise
        where = f"{error.filename}: " if error.filename else ""
        raise UserError(f"{where}{error.strerror}: fix that and run the same command again") from error
    except RuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):  # XLA's status for exhausted device memory
            raise
        raise UserError(OUT_OF_MEMORY) from error
