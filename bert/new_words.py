"""Extending a published vocabulary by the most useful new words of a corpus."""

from __future__ import annotations

import collections
import json
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from bert.config import UserError
from bert.tokenizer import MAX_INPUT_CHARS_PER_WORD, special_ids

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class NewWord(NamedTuple):
    """A word that a vocabulary lacks: how often it stands in the corpus, and the pieces it is read as now."""

    word: str
    count: int
    pieces: tuple[str, ...]

    @property
    def saved(self) -> int:
        """Pieces that the corpus is shorter by with the word; one that cannot be read at all counts its characters."""
        return self.count * ((len(self.word) if "[UNK]" in self.pieces else len(self.pieces)) - 1)


def useful_words(tokenizer: Tokenizer, texts: Iterable[str], number: int, min_frequency: int = 2) -> list[NewWord]:
    """The words that save most pieces, most first and of equals in order of the alphabet. Memory: the distinct words.

    Args:
      tokenizer: the vocabulary they are new to.
      texts: lines or paragraphs of the corpus.
      number: most words.
      min_frequency: rarest word taken.
    """
    counts: collections.Counter[str] = collections.Counter()
    for text in texts:
        clean = tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer else text
        counts.update(word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(clean))
    vocab, found = tokenizer.get_vocab(), []
    for word, count in counts.items():
        if count >= min_frequency and word not in vocab and 1 < len(word) <= MAX_INPUT_CHARS_PER_WORD:
            pieces = tuple(piece.value for piece in tokenizer.model.tokenize(word))
            found.append(NewWord(word, count, pieces))
    return sorted(found, key=lambda new: (-new.saved, new.word))[:number]


def with_words(tokenizer: Tokenizer, words: list[str]) -> Tokenizer:
    """A copy that knows the words as pieces of their own.

    They take the [unused] slots first, in the order of the slots, so that a published model's embedding keeps its size;
    the rest stand at the end. All other pieces keep their ids.

    Raises:
      UserError: no vocabulary of BERT's.
    """
    from tokenizers import Tokenizer

    special_ids(tokenizer)
    content = json.loads(tokenizer.to_str())
    vocab: dict[str, int] = content["model"]["vocab"]
    taken = {token["content"] for token in content["added_tokens"]}
    slots = [piece for piece in vocab if re.fullmatch(r"\[unused\d+\]", piece) and piece not in taken]
    slots.sort(key=vocab.get)
    following = max(tokenizer.get_vocab().values()) + 1
    for number, word in enumerate(words):
        if number < len(slots):
            vocab[word] = vocab.pop(slots[number])
        else:
            vocab[word] = following
            following += 1
    content["model"]["vocab"] = dict(sorted(vocab.items(), key=lambda item: item[1]))
    try:
        return Tokenizer.from_str(json.dumps(content, ensure_ascii=False))
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"the vocabulary cannot be extended ({error}): name a BERT vocabulary") from None
