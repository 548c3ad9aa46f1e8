import json
import os
import subprocess
import sys

import pytest
from tokenizers import Tokenizer, models

from bert.config import TokenizerConfig
from bert.errors import UserError
from bert.tokenizer.library import SPECIAL_TOKENS, special_ids
from bert.tokenizer.vocabulary import (
    embedding_rows,
    literal_tokenizer,
    load_tokenizer,
    save_tokenizer,
    subword_ids,
    tokenizer_fingerprint,
    train_tokenizer,
)

TEXTS = [
    "The lowest of the low and the newest of the new.",
    "Lower, slower, newer: the widest of all.",
    "Élan vital; naïve façade.",
    "A newer widest low tower",
] * 5

TRAIN = """
import argparse, sys, tarfile, _pydecimal
from bert.config import TokenizerConfig
from bert.tokenizer.vocabulary import tokenizer_fingerprint, train_tokenizer
modules = (argparse, tarfile, _pydecimal)
texts = (line for module in modules for line in open(module.__file__, encoding="utf-8"))
print(tokenizer_fingerprint(train_tokenizer(texts, TokenizerConfig(sys.argv[1], vocab_size=1500))))
"""


def tokens(tokenizer):
    vocab = tokenizer.get_vocab()
    return sorted(vocab, key=vocab.get)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(iter(TEXTS), TokenizerConfig(vocab_size=120))


def test_vocabulary_starts_with_the_special_tokens_and_holds_the_words(tokenizer):
    assert tokens(tokenizer)[:5] == list(SPECIAL_TOKENS)
    assert special_ids(tokenizer).all == (0, 1, 2, 3, 4)
    assert tokenizer.get_vocab_size() <= 120
    assert {"the", "low", "newest", "a", "##a"} <= set(tokens(tokenizer))
    assert special_ids(tokenizer).unk not in tokenizer.encode(" ".join(TEXTS)).ids


@pytest.mark.medium
@pytest.mark.parametrize("kind", ["wordpiece", "byte_level"])
def test_training_gives_the_same_ids_in_every_process(kind):
    """The library alone trains a different WordPiece in each process: its ties follow the order of a hash table."""
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", TRAIN, kind],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONHASHSEED": seed, "RAYON_NUM_THREADS": threads},
        )
        for seed, threads in (("1", "1"), ("2", "3"))
    ]
    outputs = {run.communicate()[0] for run in runs}
    assert len(outputs) == 1
    assert len(outputs.pop().strip()) == 64


def test_tokens_that_continue_a_word(tokenizer):
    continuing = {tokens(tokenizer)[i] for i in subword_ids(tokenizer)}
    assert continuing == {token for token in tokens(tokenizer) if token.startswith("##") and token != "##"}
    assert "##a" in continuing


def test_a_pair_becomes_cls_a_sep_b_sep(tokenizer):
    encoding = tokenizer.encode("the low", "new")
    first, second = (encoding.type_ids.count(number) for number in (0, 1))
    assert encoding.tokens[0] == "[CLS]"
    assert [i for i, token in enumerate(encoding.tokens) if token == "[SEP]"] == [first - 1, first + second - 1]
    assert encoding.type_ids == [0] * first + [1] * second
    assert tokenizer.decode(encoding.ids) == "the low new"


def test_lowercase_and_accents():
    lower = train_tokenizer(TEXTS, TokenizerConfig(vocab_size=120))
    cased = train_tokenizer(TEXTS, TokenizerConfig(vocab_size=120, lowercase=False))
    kept = train_tokenizer(TEXTS, TokenizerConfig(vocab_size=120, strip_accents=False))
    assert "é" not in tokens(lower)
    assert "É" in tokens(cased)
    assert "é" in tokens(kept)


def test_a_token_has_to_stand_as_often_as_asked():
    texts = ["ab ab ab ab ab ab cd cd"]
    assert {"ab", "cd"} <= set(tokens(train_tokenizer(texts, TokenizerConfig(vocab_size=120, min_frequency=1))))
    often = tokens(train_tokenizer(texts, TokenizerConfig(vocab_size=120, min_frequency=6)))
    assert "ab" in often
    assert "cd" not in often


def test_rare_characters_do_not_crowd_out_words():
    texts = [*TEXTS * 20, "".join(map(chr, range(0x4E00, 0x5200)))]
    vocab = tokens(train_tokenizer(texts, TokenizerConfig(vocab_size=400)))
    assert "the" in vocab
    assert not any(0x4E00 <= ord(token[0]) < 0x5200 for token in vocab)


@pytest.mark.parametrize("name", ["", "tokenizer.json"])
def test_saved_and_loaded_is_the_same(tokenizer, tmp_path, name):
    save_tokenizer(tokenizer, tmp_path / "run")
    assert sorted(file.name for file in (tmp_path / "run").iterdir()) == ["tokenizer.json", "vocab.txt"]
    assert tokenizer_fingerprint(load_tokenizer(tmp_path / "run" / name)) == tokenizer_fingerprint(tokenizer)


def test_bare_vocab_takes_its_casing_from_the_configuration_or_from_beside_it(tokenizer, tmp_path):
    save_tokenizer(tokenizer, tmp_path)
    assert tokenizer_fingerprint(load_tokenizer(tmp_path / "vocab.txt")) == tokenizer_fingerprint(tokenizer)
    cased = load_tokenizer(tmp_path / "vocab.txt", TokenizerConfig(lowercase=False))
    assert cased.encode("The").ids != tokenizer.encode("The").ids
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    configured = load_tokenizer(tmp_path / "vocab.txt")
    assert tokenizer_fingerprint(configured) == tokenizer_fingerprint(cased)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(UserError, match=r"tokenizer_config\.json is not valid JSON"):
        load_tokenizer(tmp_path / "vocab.txt")


def test_windows_line_ends_and_byte_order_mark(tokenizer, tmp_path):
    text = "\r\n".join(tokens(tokenizer)) + "\r\n"
    (tmp_path / "vocab.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert tokenizer_fingerprint(load_tokenizer(tmp_path)) == tokenizer_fingerprint(tokenizer)


def test_special_tokens_spelled_out_in_a_corpus_are_ordinary_text(tokenizer):
    special = special_ids(tokenizer)
    text = "the [MASK] and [SEP] low"
    assert special.mask in tokenizer.encode(text, add_special_tokens=False).ids
    plain = literal_tokenizer(tokenizer).encode(text, add_special_tokens=False).ids
    assert not {special.mask, special.sep} & set(plain)
    assert special.mask in tokenizer.encode(text).ids, "the original is left as it was"


def test_word_of_a_hundred_characters_is_read_and_a_longer_one_is_unknown(tokenizer):
    unk = special_ids(tokenizer).unk
    assert unk not in tokenizer.encode("a" * 100).ids
    assert tokenizer.encode("a" * 101, add_special_tokens=False).ids == [unk]


def test_fingerprint_follows_content(tokenizer):
    other = train_tokenizer(TEXTS, TokenizerConfig(vocab_size=60))
    cased = train_tokenizer(TEXTS, TokenizerConfig(vocab_size=120, lowercase=False))
    assert len({tokenizer_fingerprint(each) for each in (tokenizer, other, cased)}) == 3


BAD = {
    "no [MASK]": ("vocab.txt", b"[PAD]\n[UNK]\n[CLS]\n[SEP]\na\n", r"vocab\.txt lacks \[MASK\]"),
    "empty": ("vocab.txt", b"", r"vocab\.txt lacks \[PAD\], \[UNK\], \[CLS\], \[SEP\], \[MASK\]"),
    "Latin-1": ("vocab.txt", b"[PAD]\n\xe9\n", r"vocab\.txt, line 2: not UTF-8"),
    "broken JSON": ("tokenizer.json", b'{"model": ', r"tokenizer\.json is not a complete tokenizer\.json"),
    "no vocabulary": ("readme.md", b"hello", "holds neither tokenizer.json nor vocab.txt"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_named(tmp_path, case):
    name, content, message = BAD[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as raised:
        load_tokenizer(tmp_path)
    assert str(tmp_path) in str(raised.value)


def test_the_last_of_repeated_lines_counts_and_each_line_keeps_its_row(tmp_path, capsys):
    lines = [*SPECIAL_TOKENS, "a", "b", "[unused0]", "a", "c", "b", "b", "##c", "", ""]
    (tmp_path / "vocab.txt").write_text("\n".join([*lines, "d"]) + "\n")
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("a b c d bc", add_special_tokens=False).ids == [8, 11, 9, 15, 11, 12]
    assert embedding_rows(tokenizer) == 16
    assert "line 9: 'a' is on line 6 already" in capsys.readouterr().err
    save_tokenizer(tokenizer, tmp_path / "again")
    saved = (tmp_path / "again/vocab.txt").read_text().split("\n")
    assert saved.index("a") == 8 and len(saved) == 17
    assert load_tokenizer(tmp_path / "again/vocab.txt").get_vocab() == tokenizer.get_vocab()
    assert not capsys.readouterr().err


def test_a_cased_vocabulary_that_is_lower_cased_is_said(tmp_path, capsys):
    """Whether by tokenizer.path or in a published folder; a folder of Google's keeps the case."""
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, "Berlin", "berlin"]))
    assert load_tokenizer(tmp_path / "vocab.txt", TokenizerConfig()).encode("Berlin").tokens[1] == "berlin"
    assert "text is lower-cased, though" in (output := capsys.readouterr().err) and "'Berlin'" in output
    assert load_tokenizer(tmp_path, TokenizerConfig(lowercase=False)).encode("Berlin").tokens[1] == "Berlin"
    assert load_tokenizer(tmp_path, detect_casing=True).encode("Berlin").tokens[1] == "Berlin"
    capsys.readouterr()
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, "berlin"]))
    load_tokenizer(tmp_path, TokenizerConfig())
    assert not capsys.readouterr().err


def test_a_vocabulary_with_marks_that_are_removed_is_said(tmp_path, capsys):
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, "straße", "für", "fur"]))
    assert load_tokenizer(tmp_path, TokenizerConfig()).encode("für").tokens[1] == "fur"
    assert "'für'" in capsys.readouterr().err
    assert load_tokenizer(tmp_path, TokenizerConfig(strip_accents=False)).encode("für").tokens[1] == "für"
    (tmp_path / "tokenizer_config.json").write_text('{"strip_accents": false}')
    assert load_tokenizer(tmp_path, TokenizerConfig()).encode("für").tokens[1] == "für"
    assert not capsys.readouterr().err


def test_missing_file_and_other_kinds_of_vocabulary(tokenizer, tmp_path):
    with pytest.raises(UserError, match=r"gone does not exist: set tokenizer\.path to"):
        load_tokenizer(tmp_path / "gone")
    content = json.loads(tokenizer.to_str())
    content["model"] = {"type": "BPE", "vocab": {"a": 0}, "merges": []}
    content["post_processor"], content["added_tokens"] = None, []
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"BPE.*only WordPiece"):
        load_tokenizer(tmp_path)


def test_a_vocabulary_without_a_token_for_unknown_words_is_refused(tmp_path):
    vocab = {"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, "[MASK]": 3, "a": 4}
    Tokenizer(models.WordPiece(vocab, unk_token="[UNK]")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match=r"tokenizer.json lacks \[UNK\]"):
        load_tokenizer(tmp_path)


def test_nothing_to_train_on():
    with pytest.raises(UserError, match="holds no text"):
        train_tokenizer(iter(["", "  "]), TokenizerConfig(vocab_size=100))
    with pytest.raises(UserError, match=r"tokenizer\.vocab_size is 7"):
        train_tokenizer(iter(TEXTS), TokenizerConfig(vocab_size=7))


def test_residues_are_found_anywhere_and_other_words_are_unknown(tmp_path):
    tokens = ["<cls>", "<pad>", "<eos>", "<unk>", *"LAG.-", "<mask>"]
    (tmp_path / "vocab.txt").write_text("\n".join(tokens))
    tokenizer = load_tokenizer(tmp_path)
    row = ["<cls>", "L", "A", "<unk>", "G", "<mask>", "-", "<unk>", "<unk>", "<eos>"]
    assert tokenizer.encode("LAxyzG<mask>-  la gé").tokens == row
    assert tokenizer.encode("L", "A").tokens == ["<cls>", "L", "<eos>", "A", "<eos>"]
    assert special_ids(tokenizer).mask == 9
