"""Special tokens of a vocabulary by role, calls to ``tokenizers`` that convert its errors, and detokenization."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bert.config.tokenizer import VocabularyKind
from bert.errors import UserError, cut_at_word, shorten

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer
    from tokenizers.processors import PostProcessor

BERT_TOKENS = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
ROBERTA_TOKENS = {
    **{"pad": "<pad>", "unk": "<unk>", "cls": "<s>", "sep": "</s>", "mask": "<mask>"},
    **{"bos": "<s>", "eos": "</s>"},
}
MPNET_TOKENS = {**ROBERTA_TOKENS, "unk": "[UNK]"}
ALBERT_TOKENS = {"pad": "<pad>", "unk": "<unk>", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
GEMMA_TOKENS = {
    **{"pad": "<pad>", "unk": "<unk>", "cls": "<bos>", "sep": "<eos>", "mask": "<mask>"},
    **{"bos": "<bos>", "eos": "<eos>"},
}
GPT2_TOKENS = {"bos": "<|endoftext|>", "eos": "<|endoftext|>", "pad": "<pad>"}
XLNET_TOKENS = {
    **{"pad": "<pad>", "unk": "<unk>", "cls": "<cls>", "sep": "<sep>", "mask": "<mask>"},
    **{"bos": "<s>", "eos": "</s>"},
}
ESM_TOKENS = {
    **{"pad": "<pad>", "unk": "<unk>", "cls": "<cls>", "sep": "<eos>", "mask": "<mask>"},
    "eos": "<eos>",
}
EUROBERT_TOKENS = {
    **{"bos": "<|begin_of_text|>", "eos": "<|end_of_text|>", "mask": "<|mask|>"},
    **{"cls": "<|begin_of_text|>", "sep": "<|end_of_text|>"},
}

TOKEN_SETS: tuple[Mapping[str, str], ...] = (
    *(GEMMA_TOKENS, MPNET_TOKENS, ROBERTA_TOKENS, BERT_TOKENS, ALBERT_TOKENS, GPT2_TOKENS, EUROBERT_TOKENS),
    *(XLNET_TOKENS, ESM_TOKENS),
)
"""Names by role. A vocabulary belongs to the set with which it shares the most tokens, or to the first of equal sets.
"""

HIDDEN = " "
"""Prefix that hides a special token from texts: no token of a text contains a space."""

SPECIAL_TOKENS = tuple(BERT_TOKENS.values())
"""The first tokens of a trained WordPiece vocabulary."""


ROLES = ("pad", "unk", "cls", "sep", "mask", "bos", "eos")


@dataclass(frozen=True)
class SpecialTokenIds:
    """Ids of special tokens by role. The attributes raise UserError if the vocabulary has no such token.

    Attributes:
        pad: pads rows.
        unk: replaces text that has no other token.
        cls: begins the row of a classifier.
        sep: ends a text.
        mask: replaces a token that is to be predicted.
        bos: begins a generated text.
        eos: ends a generated text, and separates documents.
    """

    by_role: Mapping[str, int]

    def __getattr__(self, role: str) -> int:
        if role not in ROLES:
            raise AttributeError(role)
        if role not in self.by_role:
            names = dict.fromkeys(tokens[role] for tokens in TOKEN_SETS if role in tokens)
            raise UserError(f"the vocabulary has no {role} token ({' or '.join(names)}): use a vocabulary that has one")
        return self.by_role[role]

    @property
    def end(self) -> int:
        """Separates documents: eos or, without one, sep."""
        return self.eos if "eos" in self.by_role else self.sep

    @property
    def padding(self) -> int:
        """Pads rows: pad or, in a vocabulary without one such as GPT-2's, the end token."""
        return self.pad if "pad" in self.by_role else self.end

    @property
    def all(self) -> tuple[int, ...]:
        """Every special id once."""
        return tuple(dict.fromkeys(self.by_role.values()))

    def find(self, role: str) -> int | None:
        """Returns the id of a role; None if the vocabulary has no token for it."""
        return self.by_role.get(role)


def special_ids(tokenizer: Tokenizer) -> SpecialTokenIds:
    """Returns the ids of the special tokens of a vocabulary."""
    # Looked up one by one, because copying the whole vocabulary is slow.
    names = {name for tokens in TOKEN_SETS for name in tokens.values()}
    candidates = {name: [tokenizer.token_to_id(text) for text in (name, HIDDEN + name)] for name in names}
    known = {name: next(i for i in ids if i is not None) for name, ids in candidates.items() if set(ids) != {None}}
    return SpecialTokenIds({role: known[name] for role, name in special_tokens(known).items()})


def bert_rows(cls: str, sep: str, vocab: Mapping[str, int]) -> PostProcessor:
    """Returns the post-processor of BERT's rows, ``[CLS] A [SEP]`` and ``[CLS] A [SEP] B [SEP]``."""
    from tokenizers.processors import TemplateProcessing

    single = f"{cls}:0 $A:0 {sep}:0"
    return TemplateProcessing(single, f"{single} $B:1 {sep}:1", [(token, vocab[token]) for token in (cls, sep)])


def xlnet_rows(vocab: Mapping[str, int]) -> PostProcessor:
    """Returns the post-processor of XLNet's rows, ``A <sep> <cls>`` and ``A <sep> B <sep> <cls>``."""
    from tokenizers.processors import TemplateProcessing

    cls, sep = XLNET_TOKENS["cls"], XLNET_TOKENS["sep"]
    single, pair = f"$A:0 {sep}:0 {cls}:2", f"$A:0 {sep}:0 $B:1 {sep}:1 {cls}:2"
    return TemplateProcessing(single, pair, [(token, vocab[token]) for token in (cls, sep)])


def are_token_types(types: Sequence[int]) -> bool:
    """Whether the token types of a row are 0s, then 1s, and 2 only for its last token."""
    return list(types) == sorted(types) and not set(types) - {0, 1, 2} and 2 not in types[:-1]


def special_tokens(vocab: Container[str]) -> dict[str, str]:
    """Returns the special tokens of a vocabulary by role."""
    sets = [{role: name for role, name in tokens.items() if name in vocab} for tokens in TOKEN_SETS]
    return max(sets, key=lambda tokens: len(set(tokens.values())))


CLOSING = frozenset(".,!?;:%)]}’”»…、。，！？；：）」』】")
"""Marks without a space before them."""

OPENING = frozenset("([{¿¡$£“„‘«（「『【")
"""Marks without a space after them."""

JOINING = frozenset("-/_’'@\\")
"""Marks without spaces within a word, as in t-shirt."""

CLOSING_QUOTES = frozenset("”“»")
"""Closing quotes after a part of a compound, as in „Open“-Anzeige."""

QUOTES = frozenset("\"'`")
"""Quotes with the same form at the start and at the end."""

ENDINGS = frozenset(("s", "t", "m", "d", "re", "ve", "ll", "em", "n"))
"""Word parts after an apostrophe, as in don't."""


@contextlib.contextmanager
def library_errors(what: str, fix: str) -> Iterator[None]:
    """Converts an error of the library into a UserError, ``WHAT (reason): FIX``.

    A Rust panic is a BaseException of a class that cannot be imported. Interrupts are not converted.
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
        offsets: compute the characters of each token, which takes longer.

    Raises:
        UserError: the tokenizer fails on a text, which the message quotes.
    """
    encode = tokenizer.encode_batch if offsets else tokenizer.encode_batch_fast
    try:
        with library_errors("", ""):
            return encode(list(texts), add_special_tokens=add_special_tokens)
    except UserError:
        for text in texts:
            fix = "remove that text, or replace tokenizer.json"
            with library_errors(f"the tokenizer fails on {shorten(text)}", fix):
                encode([text], add_special_tokens=add_special_tokens)
        raise


def decode(tokenizer: Tokenizer, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
    """Returns the text of token ids. Raises UserError if the tokenizer fails."""
    with library_errors(f"the tokenizer cannot decode {shorten(list(ids))}", "fix or replace its tokenizer.json"):
        return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


def check_post_processor(tokenizer: Tokenizer, source: object) -> None:
    """Raises UserError for a post-processor with malformed rows.

    A row must have each text once and in order, special tokens of the vocabulary, and token types 0s, then 1s.
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
            elif not are_token_types(row.type_ids):
                problem = f"gives the token types {shorten(row.type_ids)}, but a row has 0s, then 1s"
            else:
                continue
            raise UserError(f"{source}: its post_processor {problem}: {fix}")


def is_wordpiece(tokenizer: Tokenizer) -> bool:
    """Returns whether a vocabulary is WordPiece, like BERT's."""
    return vocabulary_kind(tokenizer) == "wordpiece"


def vocabulary_kind(tokenizer: Tokenizer) -> VocabularyKind:
    """Returns the kind of a vocabulary, a value of ``TokenizerConfig.kind``."""
    from tokenizers import models

    if isinstance(tokenizer.model, models.Unigram):
        return "unigram"
    return "wordpiece" if isinstance(tokenizer.model, models.WordPiece) else "byte_level"


def keeps_spaces(tokenizer: Tokenizer) -> bool:
    """Returns whether tokens include the space before a word, as in byte-level vocabularies."""
    return vocabulary_kind(tokenizer) == "byte_level"


def detokenize(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Returns the text of token ids on one line, without special tokens.

    WordPiece does not preserve spaces, so spaces next to punctuation follow the rules of English.
    """
    special = set(special_ids(tokenizer).all)
    kept = [int(i) for i in ids if int(i) not in special]
    text = decode(tokenizer, kept)
    if not is_wordpiece(tokenizer):
        return " ".join(text.split())
    return join_words(_words(tokenizer, kept))


def lowercases(tokenizer: Tokenizer) -> bool:
    """Returns whether the vocabulary lower-cases text."""
    return tokenizer.normalizer is not None and tokenizer.normalizer.normalize_str("A").strip("▁ ") == "a"


def join_words(words: Sequence[str]) -> str:
    """Joins words and punctuation marks, as split by WordPiece, with spaces where a text has them."""
    text, quoted, glued = "", dict.fromkeys(QUOTES, False), True
    for index, word in enumerate(words):
        before = words[index - 1] if index else ""
        after = words[index + 1] if index + 1 < len(words) else ""
        if _joins(before, word, after):
            space, glued_after = False, True
        elif word in QUOTES:
            opens = not quoted[word] and not (word == "'" and before.endswith("s"))  # the boys' hats
            space, glued_after = opens, opens
            quoted[word] = opens
        elif word == "“" and "„" in words[:index]:  # a closing quote in German
            space, glued_after = False, after in JOINING
        else:
            in_number = word in ".,:" and before[-1:].isdigit() and after[:1].isdigit()  # as in 3.5
            space, glued_after = word not in CLOSING, word in OPENING or in_number
        text += word if glued or not space else f" {word}"
        glued = glued_after
    return text


def _joins(before: str, word: str, after: str) -> bool:
    """Returns whether a mark joins two parts of a word, like the hyphen of t-shirt."""
    if word not in JOINING or not ((_is_word(before) or before in CLOSING_QUOTES) and _is_word(after)):
        return False
    return word not in "'’" or after in ENDINGS or len(before) == 1


def _is_word(text: str) -> bool:
    return bool(text) and text[-1].isalnum()


def _words(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Returns the words of WordPiece tokens."""
    words: list[str] = []
    for token in (tokenizer.id_to_token(i) or "" for i in ids):
        if token.startswith("##") and words:
            words[-1] += token[2:]
        else:
            words.append(re.sub(r"^##", "", token))
    return words
