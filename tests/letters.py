"""Vocabularies in which every letter is a token."""

import string

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors


def letter_tokenizer(words: list[str]) -> Tokenizer:
    built = Tokenizer(models.WordPiece({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    built.normalizer = normalizers.BertNormalizer()
    built.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return built


def byte_level_tokenizer(add_prefix_space: bool = False) -> Tokenizer:
    """RoBERTa's form: every byte is a token, and so is every ASCII letter with the space before it."""
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    spaced = [f"Ġ{letter}" for letter in string.ascii_letters]
    words = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet()), *spaced]
    built = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, [tuple(word) for word in spaced]))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens(special)
    built.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=add_prefix_space)
    return built
