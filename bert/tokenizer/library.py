"""Calls of the ``tokenizers`` library, whose errors and Rust panics become `UserError` here and nowhere else."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from bert.errors import UserError, cut_at_word, shorten

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer


@contextlib.contextmanager
def library_errors(what: str, fix: str) -> Iterator[None]:
    """Turns an error of the library into a UserError, ``WHAT (reason): FIX``.

    A panic in Rust is a BaseException of a class that cannot be imported. Interrupts and other errors that are no
    `Exception` pass through.
    """
    try:
        yield
    except (UserError, MemoryError):
        raise
    except BaseException as error:  # the library raises bare Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = cut_at_word(str(error)) or type(error).__name__
        raise UserError(f"{what} ({reason}): {fix}") from None


def encode_batch(
    tokenizer: Tokenizer, texts: Sequence[Any], add_special_tokens: bool = True, offsets: bool = False
) -> list[Encoding]:
    """Encodes texts, or pairs of texts.

    Args:
        offsets: whether the encodings have the characters of each token, which takes longer.

    Raises:
        UserError: the tokenizer fails on a text, which the message quotes.
    """
    encode = tokenizer.encode_batch if offsets else tokenizer.encode_batch_fast
    try:
        with library_errors("", ""):
            return encode(list(texts), add_special_tokens=add_special_tokens)
    except UserError:
        for text in texts:
            with _failure_on(text):
                encode([text], add_special_tokens=add_special_tokens)
        raise


def decode(tokenizer: Tokenizer, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
    """The text of token ids. Raises UserError if the tokenizer fails."""
    with library_errors(f"the tokenizer cannot decode {shorten(list(ids))}", "fix or replace its tokenizer.json"):
        return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


def check_post_processor(tokenizer: Tokenizer, source: object) -> None:
    """Raises UserError for a post-processor that makes no rows of text A, or of texts A and B.

    Such a row has each text once and in order, special tokens of the vocabulary, and token types 0, then 1.

    Args:
        source: the tokenizer's file, for the message.
    """
    from tokenizers import Tokenizer, models

    if tokenizer.post_processor is None:
        return
    fix = "copy the tokenizer from where the model is from"
    with library_errors(f"{source}: its post_processor fails", fix):
        probe = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
        probe.post_processor = tokenizer.post_processor
        rows = [probe.encode("a"), probe.encode("a", "a")]
        for number, row in enumerate(rows):
            owners = [owner for owner in row.sequence_ids if owner is not None]
            ids = [token for token, owner in zip(row.ids, row.sequence_ids, strict=True) if owner is None]
            unknown = [token for token in ids if tokenizer.id_to_token(token) is None]
            if owners != [0, 1][: number + 1] or row.special_tokens_mask.count(0) != number + 1:
                problem = f"does not place {'each text' if number else 'the text'} exactly once"
            elif unknown:
                problem = f"adds the id {unknown[0]}, which the vocabulary lacks"
            elif set(row.type_ids) - {0, 1} or row.type_ids != sorted(row.type_ids):
                problem = f"gives the token types {shorten(row.type_ids)}, and a row has 0s, then 1s"
            else:
                continue
            raise UserError(f"{source}: its post_processor {problem}: {fix}")


def _failure_on(text: Any) -> contextlib.AbstractContextManager[None]:
    return library_errors(f"the tokenizer fails on {shorten(text)}", "remove that text, or replace tokenizer.json")
