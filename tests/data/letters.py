"""A vocabulary in which every letter is a piece."""

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers


def letter_tokenizer(words: list[str]) -> Tokenizer:
    built = Tokenizer(models.WordPiece({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    built.normalizer = normalizers.BertNormalizer()
    built.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return built
