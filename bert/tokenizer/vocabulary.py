"""Trains, loads, saves and inspects vocabularies of all kinds."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from bert.config import TokenizerConfig
from bert.config.tokenizer import StripAccents
from bert.errors import Log, UserError, WarningText, convert, log_message
from bert.files import require_content, require_text, write_atomic
from bert.remote import fetch
from bert.tokenizer.byte_level import SPACES, byte_level_steps, parse_byte_level, train_byte_level
from bert.tokenizer.hf_settings import SETTINGS, TokenizerSettings, read_settings, set_truncation_side, truncation_side
from bert.tokenizer.library import (
    ESM_TOKENS,
    MPNET_TOKENS,
    SPECIAL_TOKENS,
    check_post_processor,
    decode,
    is_wordpiece,
    keeps_spaces,
    library_errors,
    special_ids,
    special_tokens,
    vocabulary_kind,
)
from bert.tokenizer.sentencepiece import FILES as SENTENCEPIECE_FILES
from bert.tokenizer.sentencepiece import build_sentencepiece
from bert.tokenizer.unigram import WORD_START, train_unigram, unigram_word_steps, without_special_pieces
from bert.tokenizer.wordpiece import (
    UNUSED,
    WordCounts,
    WordSteps,
    build_residues,
    build_wordpiece,
    has_wordpiece_steps,
    train_wordpiece,
    wordpiece_steps,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_FEW = 0.01
"""Share of tokens with marks up to which they are ignored: published vocabularies without marks have a few."""

COPY_ALL = "copy all tokenizer files from one source"

MAX_VOCABULARY = 2**24
"""Maximum number of rows of an embedding; a larger id indicates damage."""


def train_tokenizer(texts: Iterable[str] | WordCounts, config: TokenizerConfig) -> Tokenizer:
    """Trains a vocabulary of ``config.kind`` on lines or paragraphs, or on the counts of their words.

    Raises UserError if there is no text or vocab_size is too small.
    """
    trainers = {"wordpiece": train_wordpiece, "byte_level": train_byte_level, "unigram": train_unigram}
    return trainers[config.kind](texts, config)


def word_steps(config: TokenizerConfig) -> WordSteps:
    """Returns the steps that split texts into words for a vocabulary of ``config.kind``."""
    if config.kind == "byte_level":
        return byte_level_steps()
    steps = wordpiece_steps if config.kind == "wordpiece" else unigram_word_steps
    return steps(config.lowercase, config.strip_accents)


def load_tokenizer(
    path: str | Path,
    config: TokenizerConfig | None = None,
    log: Log = log_message,
    detect_casing: bool = False,
    settings: TokenizerSettings | None = None,
) -> Tokenizer:
    """Reads tokenizer.json, vocab.txt, RoBERTa's vocab.json with merges.txt, or a SentencePiece file (.model).

    A bare vocab.txt does not define the normalization. A ``tokenizer_config.json`` next to it does, and also overrides
    a tokenizer.json, as in transformers. Otherwise ``config`` defines it; ``strip_accents: european`` then means BERT's
    steps. Tokens in added_tokens.json and tokenizer_config.json are added. Padding and truncation stored in a
    tokenizer.json are turned off, except for the side of truncation.

    Args:
      config: normalization if no file defines it. None: use the defaults.
      detect_casing: derive lower-casing from a folder's name or the tokens instead of ``config``.
      settings: result of `read_settings` for the folder; None: read them here.

    Raises:
      UserError: the file does not exist, is not a WordPiece, byte-level or Unigram vocabulary, or has no special token;
        or files next to it are malformed or contradict it.
    """
    config = config or TokenizerConfig()
    file = _vocabulary_file(Path(fetch(path)))
    settings = read_settings(file.parent) if settings is None else settings
    if file.name == "vocab.json":
        tokenizer = _parse_byte_level(_read_utf8(file), file)
    elif file.suffix == ".json":
        tokenizer = _parse_tokenizer(_read_utf8(file), file)
    elif file.suffix == ".model":
        with library_errors(f"{file} is not a complete SentencePiece file", COPY_ALL):
            tokenizer = build_sentencepiece(_read_bytes(file), file, settings)
    else:
        text = _read_utf8(file)
        vocab = _parse_vocab(text, file, log)
        tokenizer = _build_words(vocab, file, config, settings, detect_casing, log)
    with library_errors(f"{file.parent}: the files next to the vocabulary do not fit it", COPY_ALL):
        settings.apply(tokenizer, file.parent)
    check_post_processor(tokenizer, file)
    if file.suffix not in (".json", ".model"):
        _check_normalization(file, tokenizer, settings, detect_casing, log)
    lacks_unknown = is_wordpiece(tokenizer) and tokenizer.token_to_id(tokenizer.model.unk_token) is None
    if lacks_unknown or not special_ids(tokenizer).all:
        _require_special_tokens(tokenizer.get_vocab(), file)
    return tokenizer


def _build_words(
    vocab: dict[str, int],
    file: Path,
    config: TokenizerConfig,
    settings: TokenizerSettings,
    detect_casing: bool,
    log: Log,
) -> Tokenizer:
    """Returns the tokenizer of a vocab.txt: of amino acids if it has ESM's special tokens, WordPiece otherwise."""
    if set(special_tokens(vocab).values()) == set(ESM_TOKENS.values()):
        return build_residues(vocab)
    settings.require_wordpiece(file.parent)
    _require_special_tokens(vocab, file)
    if detect_casing and settings.do_lower_case is None:
        config = dataclasses.replace(config, lowercase=_detect_casing(file, vocab, log))
    strip_accents = None if config.strip_accents == "european" else config.strip_accents
    return build_wordpiece(vocab, config.lowercase, strip_accents)


def save_tokenizer(tokenizer: Tokenizer, folder: str | Path) -> None:
    """Writes tokenizer.json, and vocab.txt of a WordPiece vocabulary, each atomically."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if is_wordpiece(tokenizer):
        tokens = sorted((i, token) for token, i in tokenizer.get_vocab().items())
        write_atomic(folder / "vocab.txt", "".join(token + "\n" for _, token in tokens))
    write_atomic(folder / "tokenizer.json", tokenizer.to_str(pretty=True) + "\n")


def _detect_casing(file: Path, tokens: Iterable[str], log: Log) -> bool:
    """Returns whether to lower-case, by the name of the folder or the tokens."""
    name, capital = file.parent.resolve().name, _first_cased_token(tokens)
    if (sign := next((sign for sign in ("uncased", "cased") if sign in name.lower()), None)) is not None:
        lowercase, why = sign == "uncased", f'the folder\'s name contains "{sign}"'
    elif capital is None:
        lowercase, why = True, "no token of the vocabulary has an upper-case letter"
    else:
        lowercase, why = False, f"the vocabulary has upper-case letters, as in {capital!r}"
    log(f"text is {'lower-cased' if lowercase else 'not lower-cased'}: {why}")
    return lowercase


def _check_normalization(
    file: Path, tokenizer: Tokenizer, settings: TokenizerSettings, detected: bool, log: Log
) -> None:
    """Logs a warning about tokens of a bare vocab.txt that the normalization makes unreachable."""
    (lowercase, strip_accents), tokens = normalization(tokenizer), tokenizer.get_vocab()
    fix = 'if that is wrong, set tokenizer.{} to false or put {{"{}": false}} into ' + f"{SETTINGS} next to it"
    capital = _first_cased_token(sorted(tokens))
    if lowercase and capital is not None and settings.do_lower_case is None and not detected:
        cased = f"text is lower-cased, though the vocabulary has upper-case letters, as in {capital!r}"
        log(WarningText(f"{file}: {cased}; {fix.format('lowercase', 'do_lower_case')}"))
    marked = sorted(filter(_has_marks, tokens))
    if strip_accents and len(marked) > _FEW * len(tokens) and settings.strip_accents is None:
        kept = f"marks are removed from text, though {len(marked):,} tokens have some, as in {marked[0]!r}"
        log(WarningText(f"{file}: {kept}; {fix.format('strip_accents', 'strip_accents')}"))


def _first_cased_token(tokens: Iterable[str]) -> str | None:
    """Returns the first token, except for special ones, that lower-casing changes."""
    words = (token for token in tokens if not re.fullmatch(r"\[.*\]|<.*>", token))
    return next((token for token in words if token != token.lower()), None)


def _has_marks(token: str) -> bool:
    return not token.isascii() and any(unicodedata.category(c) == "Mn" for c in unicodedata.normalize("NFD", token))


def subword_ids(tokenizer: Tokenizer) -> list[int]:
    """Returns the ids of tokens that continue a word, ascending. Raises UserError if they are not marked."""
    if is_wordpiece(tokenizer) and not tokenizer.model.continuing_subword_prefix:
        raise UserError(
            "data.whole_word_masking needs a vocabulary that marks tokens that continue a word: leave it out"
        )
    special, vocab = special_ids(tokenizer).all, tokenizer.get_vocab()
    return sorted(i for token, i in vocab.items() if i not in special and continues_word(tokenizer, token))


def continues_word(tokenizer: Tokenizer, token: str) -> bool:
    """Returns whether a token that is not special continues the word before it.

    In a byte-level vocabulary a word begins with the space in front of it, and every token without one continues it, as
    in fairseq's ``mask_whole_words``; the first word of a text follows a special token. In a Unigram vocabulary a word
    begins with a mark.
    """
    if keeps_spaces(tokenizer):
        return token[:1] not in SPACES
    if not is_wordpiece(tokenizer):
        return not token.startswith(WORD_START)
    prefix = tokenizer.model.continuing_subword_prefix
    return bool(prefix) and token.startswith(prefix) and token != prefix


def normalization(tokenizer: Tokenizer) -> tuple[bool | None, StripAccents]:
    """Returns whether a WordPiece vocabulary lower-cases text, and which marks it removes; None for other steps."""
    content = json.loads(tokenizer.to_str())
    if not has_wordpiece_steps(content):
        return None, None
    if "lowercase" not in (steps := content["normalizer"]):
        return True, "european"
    return steps["lowercase"], steps["lowercase"] if steps["strip_accents"] is None else steps["strip_accents"]


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """Returns a token as text: with "##" in WordPiece, and with the space that it may begin with in other kinds."""
    if keeps_spaces(tokenizer):
        return decode(tokenizer, [token_id], skip_special_tokens=False)
    token = tokenizer.id_to_token(token_id) or ""
    return token if is_wordpiece(tokenizer) else token.replace(WORD_START, " ")


def after_space(text: str) -> str:
    """Returns the text with a space in front, as ``add_prefix_space`` adds it."""
    return text if text.startswith(" ") else " " + text


def embedding_rows(tokenizer: Tokenizer) -> int:
    """Returns the rows V that an embedding needs: the largest id plus one. Raises UserError for implausible ids."""
    rows = max(tokenizer.get_vocab().values()) + 1
    if rows > MAX_VOCABULARY:
        raise UserError(
            f"the vocabulary has the id {rows - 1}, but at most {MAX_VOCABULARY} tokens are supported: fix it"
        )
    return rows


def require_embedding_rows(tokenizer: Tokenizer, vocab_size: int, source: str | Path) -> None:
    """Raises UserError if a token of the vocabulary has no row in an embedding of ``vocab_size`` rows."""
    if (rows := embedding_rows(tokenizer)) > vocab_size:
        raise UserError(
            f"{source}: the vocabulary needs {rows} rows, but the model's embedding has {vocab_size} (vocab_size): "
            "use the vocabulary and the model of one source"
        )


def tokenizer_fingerprint(tokenizer: Tokenizer) -> str:
    """Returns a hash, 64 hexadecimal digits, of everything that determines the ids of a text."""
    content = json.loads(tokenizer.to_str())
    canonical = json.dumps(content, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("utf-8", "surrogatepass")).hexdigest()


def literal_tokenizer(tokenizer: Tokenizer) -> Tokenizer:
    """Returns a copy that reads "[MASK]" and other special tokens in a text as ordinary characters.

    In a user's input "[MASK]" means the mask. In a corpus it is prose about BERT, and must not become a special token.
    """
    from tokenizers import Tokenizer

    text = tokenizer.to_str()
    if vocabulary_kind(tokenizer) == "unigram":
        text = without_special_pieces(text)
    copy = Tokenizer.from_str(text)
    copy.encode_special_tokens = True
    return copy


def _vocabulary_file(path: Path) -> Path:
    fix = "set tokenizer.path to a vocab.txt, a tokenizer.json, a SentencePiece file or a folder that contains one"
    if path.is_dir():
        for name in ("tokenizer.json", "vocab.txt", "vocab.json", *SENTENCEPIECE_FILES):
            if (path / name).is_file():
                return path / name
        raise UserError(f"{path} holds neither tokenizer.json nor vocab.txt nor {SENTENCEPIECE_FILES[0]}: {fix}")
    if not path.exists():
        raise UserError(f"{path} does not exist: {fix}")
    return path


def _read_bytes(file: Path) -> bytes:
    try:
        data = file.read_bytes()
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}): fix its permissions or name another") from None
    require_content(file, data)
    return data


def _read_utf8(file: Path) -> str:
    data = _read_bytes(file)
    require_text(file, data)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"{file}, line {line}: not UTF-8: name another vocabulary, or {convert(data)}") from None


def _parse_tokenizer(text: str, file: Path) -> Tokenizer:
    from tokenizers import Tokenizer, models, pre_tokenizers

    with library_errors(f"{file} is not a complete tokenizer.json", "copy it again or name the vocab.txt"):
        tokenizer = Tokenizer.from_str(text)
    words = tokenizer.pre_tokenizer
    steps: list[Any] = list(cast(Any, words)) if isinstance(words, pre_tokenizers.Sequence) else [words]
    by_bytes = isinstance(steps[-1], pre_tokenizers.ByteLevel) or "<mask>" in tokenizer.get_vocab()
    model = tokenizer.model
    if not isinstance(model, models.WordPiece | models.Unigram) and not (isinstance(model, models.BPE) and by_bytes):
        kind = f"{file} holds a {type(model).__name__} vocabulary"
        raise UserError(f"{kind}, but only WordPiece, byte-level and Unigram are read: name another")
    set_truncation_side(tokenizer, truncation_side(tokenizer))
    tokenizer.no_padding()
    return tokenizer


def _parse_byte_level(text: str, file: Path) -> Tokenizer:
    fix = "copy both again, or name one of a kind that is read"
    with library_errors(f"{file} and its merges.txt are not a byte-level vocabulary", fix):
        return parse_byte_level(text, _read_utf8(file.parent / "merges.txt"))


def _parse_vocab(content: str, file: Path, log: Log) -> dict[str, int]:
    """Returns a mapping from token to id, its line number from 0. Only "\\n" ends a line, because some tokens are other
    separators.

    If lines are equal, the last one counts, as in transformers and in Google's ``load_vocab``. The other lines, which
    also have a row in the embedding, become unused tokens.
    """
    lines = content.split("\n")
    while lines and lines[-1] in ("", "\r"):
        lines.pop()
    if all(line.endswith("\r") for line in lines[:-1]) and len(lines) > 1:
        lines = [line.removesuffix("\r") for line in lines]
    vocab = {token: number for number, token in enumerate(lines)}
    if repeated := [number for number, token in enumerate(lines) if vocab[token] != number]:
        first = lines[repeated[0]]
        names = (name for name in map(UNUSED.format, itertools.count()) if name not in vocab)
        vocab |= dict(zip(itertools.islice(names, len(repeated)), repeated, strict=True))
        place = f"{file}, line {vocab[first] + 1}: {first!r} is on line {repeated[0] + 1} already"
        log(WarningText(f"{place}: the last line of a token counts ({len(repeated):,} lines have no effect)"))
    return vocab


def _require_special_tokens(vocab: dict[str, int], file: Path) -> None:
    missing = [] if special_tokens(vocab) == MPNET_TOKENS else [token for token in SPECIAL_TOKENS if token not in vocab]
    if missing:
        raise UserError(f"{file} lacks {', '.join(missing)}: name a BERT vocabulary, or none to train one")
