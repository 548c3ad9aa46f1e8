"""Small vocabularies in the files of each family of transformers, trained on the README."""

import json
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from bert.config import TokenizerConfig
from bert.tokenizer.unigram import TRAINED_SPECIAL_TOKENS
from bert.tokenizer.vocabulary import load_tokenizer, train_tokenizer
from tests.helpers import REPOSITORY, english

transformers = pytest.importorskip("transformers", reason="needs the extra `torch`")

PIECES = 1013
GPT2_PIECES = 700
END_OF_TEXT = "<|endoftext|>"
GPT2_END = GPT2_PIECES - 1
MODERNBERT_SPECIAL = ["<|padding|>", END_OF_TEXT, "[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"]
MODERNBERT_ADDED = ["   ", "  ", "|||IP_ADDRESS|||"]
UNIGRAM = {
    "albert": ("AlbertTokenizer", ["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"], []),
    "camembert": (
        "CamembertTokenizer",
        ["<s>NOTUSED", "<pad>", "</s>NOTUSED", "<unk>", "<unk>NOTUSED", "<s>", "</s>"],
        ["<mask>"],
    ),
    "xlm-roberta": ("XLMRobertaTokenizer", ["<s>", "<pad>", "</s>", "<unk>"], ["<mask>"]),
    "xlnet": (
        "XLNetTokenizer",
        ["<unk>", "<s>", "</s>", "<cls>", "<sep>", "<pad>", "<mask>", "<eod>", "<eop>"],
        [],
    ),
    **dict.fromkeys(
        ("gte", "jina_embeddings_v3", "xlm-roberta-xl"),
        ("XLMRobertaTokenizer", ["<s>", "<pad>", "</s>", "<unk>"], ["<mask>"]),
    ),
    "deberta-v2": ("DebertaV2Tokenizer", ["[PAD]", "[CLS]", "[SEP]", "[UNK]"], ["[MASK]"]),
}
"""The tokenizer class of a family with a Unigram vocabulary, its first tokens and its last ones."""


def readme() -> list[str]:
    return (REPOSITORY / "README.md").read_text(encoding="utf-8").splitlines()


def train_merges(vocab_size: int, special_tokens: Sequence[str] = (), lines: Sequence[str] = ()) -> Tokenizer:
    """Trains a byte-level vocabulary, on the README by default."""
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words.train_from_iterator(lines or readme(), trainer)
    return words


@cache
def unigram_pieces() -> tuple[tuple[str, float], ...]:
    trained = train_tokenizer(readme(), TokenizerConfig(kind="unigram", vocab_size=500, lowercase=False))
    pairs = json.loads(trained.to_str())["model"]["vocab"]
    return tuple((token, score) for token, score in pairs if token not in TRAINED_SPECIAL_TOKENS)


def write_lines(folder: Path, tokens: Sequence[str]) -> None:
    (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in tokens), encoding="utf-8")


def write_wordpiece(folder: Path) -> None:
    write_lines(folder, english(PIECES))


def write_mpnet(folder: Path) -> None:
    write_lines(folder, ["<s>", "<pad>", "</s>", "<unk>", *english(PIECES - 5), "<mask>"])


def write_roformer(folder: Path) -> None:
    """Names BERT's tokenizer, because RoFormer's needs the package rjieba."""
    write_wordpiece(folder)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')


@cache
def roberta_merges() -> Tokenizer:
    return train_merges(PIECES, ["<s>", "<pad>", "</s>", "<unk>", "<mask>"])


def write_roberta(folder: Path) -> None:
    """Writes tokenizer.json only."""
    words = roberta_merges()
    words.model.save(str(folder))
    load_tokenizer(folder).save(str(folder / "tokenizer.json"))
    for name in ("vocab.json", "merges.txt"):
        (folder / name).unlink()
    assert json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"] == words.get_vocab()


@cache
def deberta_merges() -> Tokenizer:
    return train_merges(PIECES, ["[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]"])


def write_deberta(folder: Path) -> None:
    words = json.loads(deberta_merges().to_str())["model"]
    merges = [tuple(pair) for pair in words["merges"]]
    transformers.DebertaTokenizer(vocab=words["vocab"], merges=merges).save_pretrained(folder)


def write_unigram(family: str, folder: Path) -> None:
    name, first, last = UNIGRAM[family]
    scored = lambda tokens: [(token, 0.0) for token in tokens]  # noqa: E731
    tokenizer = getattr(transformers, name)(vocab=[*scored(first), *unigram_pieces(), *scored(last)])
    tokenizer.save_pretrained(folder)


@cache
def modernbert_words() -> Tokenizer:
    """Trains a vocabulary of the published form: NFC, bytes, BERT's special tokens, runs of spaces as added tokens."""
    words = train_merges(GPT2_PIECES, MODERNBERT_SPECIAL)
    words.normalizer, words.decoder = normalizers.NFC(), decoders.ByteLevel()
    words.add_tokens(MODERNBERT_ADDED)
    ends = [(name, words.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=ends
    )
    return words


def write_modernbert(folder: Path) -> None:
    names = {f"{role}_token": f"[{role.upper()}]" for role in ("cls", "sep", "pad", "mask", "unk")}
    inputs = ["input_ids", "attention_mask"]
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=modernbert_words(), model_input_names=inputs, **names
    )
    tokenizer.save_pretrained(folder)


@cache
def gpt2_merges() -> Tokenizer:
    """Trains a vocabulary with one special token, the last."""
    words = train_merges(GPT2_PIECES - 1)
    words.add_special_tokens([END_OF_TEXT])
    return words


def write_gpt2(folder: Path) -> None:
    """Writes vocab.json with the special token, merges.txt, and transformers' tokenizer.json."""
    words = gpt2_merges()
    files = words.model.save(str(folder))
    assert sorted(Path(file).name for file in files) == ["merges.txt", "vocab.json"]
    (folder / "vocab.json").write_text(json.dumps(words.get_vocab()), encoding="utf-8")
    transformers.GPT2Tokenizer.from_pretrained(folder).save_pretrained(folder)


EUROBERT_SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", "<|mask|>"]
QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@cache
def eurobert_words() -> Tokenizer:
    """Trains a vocabulary of the published form: bytes, with a start and an end around a text, which also pads."""
    words = train_merges(GPT2_PIECES, EUROBERT_SPECIAL)
    words.decoder = decoders.ByteLevel()
    start, end = EUROBERT_SPECIAL[:2]
    words.post_processor = processors.TemplateProcessing(
        single=f"{start} $A {end}", pair=f"{start} $A {end} $B {end}", special_tokens=[(start, 0), (end, 1)]
    )
    return words


def write_eurobert(folder: Path) -> None:
    names = dict(zip(("bos_token", "eos_token", "mask_token"), EUROBERT_SPECIAL, strict=True))
    inputs, end = ["input_ids", "attention_mask"], EUROBERT_SPECIAL[1]
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=eurobert_words(), model_input_names=inputs, pad_token=end, **names
    )
    tokenizer.save_pretrained(folder)


@cache
def qwen_words() -> Tokenizer:
    """Trains a vocabulary of the published form, whose rows end with the end of a text, as in the embedders."""
    words = train_merges(GPT2_PIECES - 1)
    words.normalizer, words.decoder = normalizers.NFC(), decoders.ByteLevel()
    words.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    words.add_special_tokens([END_OF_TEXT])
    template = processors.TemplateProcessing(
        single=f"$A {END_OF_TEXT}", pair=f"$A {END_OF_TEXT} $B {END_OF_TEXT}", special_tokens=[(END_OF_TEXT, GPT2_END)]
    )
    words.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return words


def write_qwen(folder: Path) -> None:
    names = dict.fromkeys(("eos_token", "pad_token"), END_OF_TEXT)
    transformers.PreTrainedTokenizerFast(tokenizer_object=qwen_words(), **names).save_pretrained(folder)
    settings = folder / "tokenizer_config.json"
    settings.write_text(settings.read_text().replace("TokenizersBackend", "Qwen2Tokenizer"))


ESM_VOCABULARY = ["<cls>", "<pad>", "<eos>", "<unk>", *"LAGVSERTIDPKQNFYWMHCXBUZO.-", "<null_1>", "<mask>"]


def write_esm(folder: Path) -> None:
    write_lines(folder, ESM_VOCABULARY)
    transformers.EsmTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)


GEMMA_SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]


@cache
def gemma_words() -> Tokenizer:
    """Trains a vocabulary of the published form: merges of characters, and bytes for other characters."""
    words = Tokenizer(models.BPE())
    words.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(vocab_size=GPT2_PIECES - 256 - len(GEMMA_SPECIAL), show_progress=False)
    words.train_from_iterator(readme(), trainer)
    content = json.loads(words.to_str())["model"]
    tokens = [*GEMMA_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *content["vocab"]]
    words.model = models.BPE(
        {token: number for number, token in enumerate(tokens)},
        [tuple(pair) for pair in content["merges"]],
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    words.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    words.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    words.add_special_tokens(GEMMA_SPECIAL)
    words.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", pair="<bos> $A <eos> $B <eos>", special_tokens=[("<bos>", 2), ("<eos>", 1)]
    )
    return words


def write_gemma(folder: Path) -> None:
    names = {f"{role}_token": f"<{role}>" for role in ("pad", "eos", "bos", "unk", "mask")}
    inputs = ["input_ids", "attention_mask"]
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=gemma_words(), model_input_names=inputs, **names
    ).save_pretrained(folder)


VOCABULARIES = {
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), write_gemma),
    "esm": write_esm,
    "eurobert": write_eurobert,
    "llama": write_gpt2,
    **dict.fromkeys(("qwen2", "qwen3"), write_qwen),
    "deberta": write_deberta,
    "roberta": write_roberta,
    "longformer": write_roberta,
    "roberta-prelayernorm": write_roberta,
    "mpnet": write_mpnet,
    "roformer": write_roformer,
    "modernbert": write_modernbert,
    "gpt2": write_gpt2,
    **{family: partial(write_unigram, family) for family in UNIGRAM},
}
"""Writes the files of a family's vocabulary to a folder. Other families have vocab.txt."""
