"""Reads Unigram vocabularies in SentencePiece files, as published with ALBERT, XLM-RoBERTa, DeBERTa-v3 and XLNet.

A file (Kudo and Richardson 2018) is a protocol buffer with the field numbers of google/sentencepiece's
sentencepiece_model.proto. Ids are SentencePiece's ids, shifted as in the model's family.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from bert.errors import UserError, require
from bert.protobuf import Fields, last_value, parse_message, values
from bert.tokenizer.hf_settings import SETTINGS, TokenizerSettings, read_object
from bert.tokenizer.library import ALBERT_TOKENS, BERT_TOKENS, ROBERTA_TOKENS, XLNET_TOKENS, bert_rows, xlnet_rows
from bert.tokenizer.unigram import WORD_START

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.normalizers import Normalizer

UNIGRAM = 1

MODELS = {UNIGRAM: "Unigram", 2: "BPE", 3: "word", 4: "character"}

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4


FILES = ("spm.model", "spiece.model", "sentencepiece.bpe.model")
"""File names in published folders. XLM-RoBERTa's file, the last one, is a Unigram model despite its name."""

_NEVER = 1e4
"""Distance below the lowest score of tokens that no text may become: special tokens, bytes, unused tokens."""

_ALWAYS = 100.0
"""Score per character of a user-defined piece, which SentencePiece matches before all others."""

_DIGITS = 6
"""Decimal digits of a score: with more, the last one would change when a vocabulary is saved and read."""

_TRAINED_HEAD = ["<unk>", "<s>", "</s>"]

_XLM_ROBERTA_HEAD = ["<s>", "<pad>", "</s>", "<unk>"]

_CAMEMBERT_HEAD = ["<s>NOTUSED", "<pad>", "</s>NOTUSED", "<unk>", "<unk>NOTUSED"]


class Piece(NamedTuple):
    """A token, its logarithmic probability and its kind (NORMAL, ...)."""

    text: str
    score: float
    kind: int


class Content(NamedTuple):
    """The parsed content of a file.

    Attributes:
        pieces: the tokens in the order of their ids.
        model: a key of MODELS.
        splits: pieces do not contain a space between words.
        suffix: the space after a word, not the one before it, is part of the word.
        byte_fallback: unknown characters are split into bytes.
        charsmap: the character map, or empty.
        rule: name of the map, such as nmt_nfkc.
        prefix: a space is added before the first word.
        trims: spaces at both ends and repeated spaces are removed.
        escapes: spaces are marked.
    """

    pieces: list[Piece]
    model: int
    splits: int
    suffix: int
    byte_fallback: int
    charsmap: bytes
    rule: bytes
    prefix: int
    trims: int
    escapes: int


def parse_sentencepiece(data: bytes, file: Path) -> Content:
    """Parses the content of a file. Raises UserError if it is damaged or of another kind."""
    try:
        return _parse(data)
    except (ValueError, LookupError, struct.error):
        raise UserError(f"{file} is not a complete SentencePiece file: copy it again") from None


def _parse(data: bytes) -> Content:
    model = parse_message(data)
    trainer, steps = (parse_message(values(model, number, bytes)[-1]) for number in (2, 3))  # the last parts of a file
    if charsmap := last_value(steps, 2, b""):
        _require_whole_map(charsmap)
    return Content(
        pieces=[_piece(parse_message(piece)) for piece in values(model, 1, bytes)],
        model=last_value(trainer, 3, UNIGRAM),
        splits=last_value(trainer, 22, 1),
        suffix=last_value(trainer, 24, 0),
        byte_fallback=last_value(trainer, 35, 0),
        charsmap=charsmap,
        rule=last_value(steps, 1, b""),
        prefix=last_value(steps, 3, 1),
        trims=last_value(steps, 4, 1),
        escapes=last_value(steps, 5, 1),
    )


def _piece(fields: Fields) -> Piece:
    text, (score,) = last_value(fields, 1, b"").decode(), struct.unpack("<f", last_value(fields, 2, bytes(4)))
    if not text or not math.isfinite(score):
        raise ValueError("a piece without a text or a score")
    return Piece(text, score, last_value(fields, 3, NORMAL))


def _require_whole_map(charsmap: bytes) -> None:
    """Raises ValueError if a lookup could leave the map: the size of a double array, its units of 32 bits, and texts.

    A unit has a label and the offset to its successors; a unit that ends a key (bit 8) has the offset of its text.
    """
    size = int.from_bytes(charsmap[:4], "little")
    units, texts = np.frombuffer(charsmap[4 : 4 + size], "<u4").astype(np.int64), charsmap[4 + size :]
    inner = units < 1 << 31
    following = (np.arange(len(units)) ^ (units >> 10 << ((units & 1 << 9) >> 6)))[inner]
    if not len(following) or (following | 0xFF).max() >= len(units):
        raise ValueError("a unit without followers")
    offsets = units[following[units[inner] & 1 << 8 != 0]] & (1 << 31) - 1
    texts.decode()
    if any(offset >= len(texts) or texts[offset] & 0xC0 == 0x80 for offset in offsets.tolist()):
        raise ValueError("a key without a text")


def build_sentencepiece(data: bytes, file: Path, settings: TokenizerSettings) -> Tokenizer:
    """Returns the tokenizer of a file's content, with the rows of the model's family.

    A file with [CLS] and [SEP] keeps its ids. A file that begins with <unk>, <s> and </s>, without <pad>, gets the ids
    of XLM-RoBERTa, or of CamemBERT if the files next to it name it. A missing mask token is appended.
    Differences from SentencePiece: several accents on one letter, an accent on a full-width letter, user-defined pieces
    that the character map changes, and the order of equally probable pieces.

    Args:
        settings: case and accents of ALBERT and DeBERTa, which are not in the file.

    Raises:
        UserError: the file is incomplete, its model is not Unigram, or it has other special tokens.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    content = parse_sentencepiece(data, file)
    _require_supported(content, file, settings)
    family = settings.tokenizer_class or read_object(file.parent / "config.json").get("model_type")
    pieces, names = _number(content.pieces, str(family).lower().startswith("camembert"), file)
    unknown = [number for number, piece in enumerate(pieces) if piece.kind == UNKNOWN]
    if len(unknown) != 1 or len({piece.text for piece in pieces}) < len(pieces):
        raise UserError(f"{file} has a piece twice, or not one unknown piece: copy it again")
    vocab = _with_scores(pieces, names in (ALBERT_TOKENS, XLNET_TOKENS))
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=unknown[0], byte_fallback=bool(content.byte_fallback)))
    tokenizer.normalizer = _normalizer(content, names, settings)
    prefix: Literal["always", "never"] = "always" if content.prefix else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(WORD_START, prepend_scheme=prefix, split=bool(content.splits))
    spaces = decoders.Metaspace(WORD_START, prepend_scheme=prefix)
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), spaces]) if content.byte_fallback else spaces
    special = [piece.text for piece in pieces if piece.kind in (UNKNOWN, CONTROL) or piece.text in names.values()]
    wide_mask = None if names is BERT_TOKENS else names["mask"]  # the space before the mask belongs to it
    tokenizer.add_special_tokens([AddedToken(text, lstrip=text == wide_mask) for text in special])
    first, end = names["cls"], names["sep"]
    ids = {text: require(tokenizer.token_to_id(text), text) for text in (first, end)}
    single = f"{first}:0 $A:0 {end}:0"
    if names is XLNET_TOKENS:
        tokenizer.post_processor = xlnet_rows(ids)
    elif names is ROBERTA_TOKENS:
        pair = f"{single} {end}:0 $B:0 {end}:0"
        tokenizer.post_processor = processors.TemplateProcessing(single, pair, list(ids.items()))
    else:
        tokenizer.post_processor = bert_rows(first, end, ids)
    return tokenizer


def _require_supported(content: Content, file: Path, settings: TokenizerSettings) -> None:
    other = "put the tokenizer.json of the same model next to it"
    if not content.pieces:
        raise UserError(f"{file} holds no pieces: name a SentencePiece file of a model")
    if content.model != UNIGRAM:
        kind = MODELS.get(content.model, "other")
        raise UserError(f"{file} holds a SentencePiece model of kind {kind}, but only Unigram is read: {other}")
    if content.suffix or not content.escapes:
        raise UserError(f"{file} does not mark spaces at the beginning of words, but only such files are read: {other}")
    if settings.split_by_punct:
        raise UserError(f"{file.parent / SETTINGS}: split_by_punct is true, but only false is supported: {other}")


def _number(pieces: list[Piece], camembert: bool, file: Path) -> tuple[list[Piece], dict[str, str]]:
    """Returns the pieces in the order of the model's ids, and its special tokens by role."""
    texts = {piece.text for piece in pieces}
    if [piece.text for piece in pieces[:3]] == _TRAINED_HEAD and "<pad>" not in texts:
        head, taken = (_CAMEMBERT_HEAD, 1) if camembert else (_XLM_ROBERTA_HEAD, 3)
        kinds = [UNKNOWN if text == "<unk>" else CONTROL for text in head]
        start = [Piece(text, 0.0, kind) for text, kind in zip(head, kinds, strict=True)]
        return [*start, *pieces[taken:], Piece(ROBERTA_TOKENS["mask"], 0.0, CONTROL)], ROBERTA_TOKENS
    for names in (BERT_TOKENS, ALBERT_TOKENS, XLNET_TOKENS, ROBERTA_TOKENS):
        if not (missing := set(names.values()) - texts):
            return pieces, names
        if missing == {names["mask"]}:
            return [*pieces, Piece(names["mask"], 0.0, CONTROL)], names
    fix = "put the tokenizer.json of the same model next to it"
    raise UserError(f"{file} has the special tokens of none of ALBERT, DeBERTa, XLM-RoBERTa and XLNet: {fix}")


def _with_scores(pieces: list[Piece], albert: bool) -> list[tuple[str, float]]:
    """Returns the pieces and their logarithmic probabilities; splits a number from a comma like ALBERT's code."""
    normal = [piece.score for piece in pieces if piece.kind == NORMAL]
    lowest = min(normal, default=0.0)

    def score(piece: Piece) -> float:
        if piece.kind == USER_DEFINED:
            return len(piece.text) * _ALWAYS - 0.1  # one longer piece before two shorter ones
        number_and_comma = piece.text.endswith(",") and piece.text[-2:-1].isdigit()
        taken = piece.kind == NORMAL and not (albert and number_and_comma)
        return piece.score if taken else lowest - _NEVER

    return [(piece.text, round(score(piece), _DIGITS)) for piece in pieces]


def _normalizer(content: Content, names: dict[str, str], settings: TokenizerSettings) -> Normalizer:
    """Returns ALBERT's and DeBERTa's steps, then SentencePiece's: the character map and the spaces.

    NFC comes before a map of NFKC, because the library looks up a letter only together with all of its accents.
    """
    from tokenizers import Regex, normalizers

    albert = names is ALBERT_TOKENS
    steps: list[Normalizer] = []
    if albert or names is XLNET_TOKENS:
        steps += [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
        if not settings.keep_accents:
            steps += [normalizers.NFKD(), normalizers.StripAccents()]
    lower = albert if settings.do_lower_case is None else settings.do_lower_case
    if lower and names is not ROBERTA_TOKENS:
        steps.append(normalizers.Lowercase())
    if content.charsmap:
        steps += [normalizers.NFC()] if b"nfkc" in content.rule else []
        steps.append(normalizers.Precompiled(content.charsmap))
    if content.trims:
        steps.append(normalizers.Replace(Regex(rf"\A +| +(?= )|[ {WORD_START}]+\z"), ""))
    if content.prefix:  # the pre-tokenizer adds one if there is none
        steps.append(normalizers.Replace(Regex(rf"\A[ {WORD_START}]"), 2 * WORD_START))
    return normalizers.Sequence(steps)
