"""Losses of a corpus in a vocabulary are measured in characters, and reported."""

import pytest

from bert.commands.corpus import examples_command as examples
from bert.commands.corpus import tokenizer_command as tokenizer
from bert.config import DataConfig, TokenizerConfig
from bert.data.corpus.vocabulary import measure_losses, sample_texts
from bert.tokenizer.vocabulary import train_tokenizer
from tests.languages import PARAGRAPHS, training_texts

LONG = "ก" * 150
WORDS = " ".join(["กข", "คง", "จฉ"] * 9)


def test_a_long_word_counts_by_its_characters():
    made = train_tokenizer([WORDS] * 9, TokenizerConfig(vocab_size=99))
    losses = measure_losses(made, [f"{WORDS} {LONG}"])
    assert losses.unknown == losses.too_long == pytest.approx(150 / (54 + 150))
    [warning] = losses.warnings("[UNK]")
    assert "73.5% of the characters" in warning and "unigram or byte_level" in warning
    for kind in ("unigram", "byte_level"):
        other = train_tokenizer([WORDS] * 9, TokenizerConfig(kind, None, 300))
        assert measure_losses(other, [f"{WORDS} {LONG}"]) == (0, 0, 0, "")


def test_unknown_characters_of_short_words_need_another_vocabulary():
    made = train_tokenizer([WORDS] * 9, TokenizerConfig(vocab_size=99))
    losses = measure_losses(made, [PARAGRAPHS["hi"]])
    assert losses.unknown > 0.8 and losses.too_long == 0
    assert "language and script" in losses.warnings("[UNK]")[0]


def test_removed_characters_are_named():
    made = train_tokenizer(training_texts("vi"), TokenizerConfig(vocab_size=300))
    losses = measure_losses(made, [PARAGRAPHS["vi"]])
    assert losses.removed > 0.3 and "\u0302" in losses.removed_characters
    assert "U+0302" in (warning := losses.warnings("[UNK]")[0]) and "tokenizer.strip_accents false" in warning
    assert measure_losses(made, ["Full-width ＡＢＣ and ﬁ, ΟΔΟΣ"]).removed == 0


@pytest.mark.medium
def test_a_sample_has_lines_of_all_files(tmp_path):
    for number in range(50):
        (tmp_path / f"{number:02d}.txt").write_text(f"document {number}\n\n" + "x\n" * 9000)
    (tmp_path / "50.txt").write_text("")
    for streaming in (False, True):
        data = DataConfig(train=[str(tmp_path / "*.txt")], streaming=streaming)
        texts = list(sample_texts(data))
        assert len({line for line in texts if "document" in line}) >= 16
        assert sum(map(len, texts)) < 250_000


@pytest.mark.medium
@pytest.mark.parametrize("marks", ["european", "null"])
def test_the_commands_report_what_is_lost(marks, tmp_path, capsys):
    (tmp_path / "th.txt").write_text("\n\n".join(training_texts("th")), encoding="utf-8")
    keys = ["--data.train", str(tmp_path / "th.txt"), "--tokenizer.vocab_size", "500", "--data.language", "th"]
    keys += ["--tokenizer.strip_accents", marks]
    lost = marks == "null"
    assert tokenizer([*keys, "--output", str(tmp_path / "made")]) == 0
    assert ("normalizer removes 22." in capsys.readouterr().err) == lost
    arguments = ["--data.cache_dir", str(tmp_path / "cache"), "--data.num_workers", "1", "--statistics"]
    assert examples(["--config", "tiny", "--phases", "null", *keys, *arguments]) == 0
    output = capsys.readouterr()
    assert ("normalizer removes 22." in output.err) == lost
    assert ("removed marks" in output.out) and ("0.000% of the characters of a sample" in output.out)


def test_a_vocabulary_far_smaller_than_asked_for_is_reported(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("some words\n\nother words\n" * 9)
    keys = ["--data.train", str(tmp_path / "a.txt"), "--tokenizer.min_frequency", "1", "--output"]
    for kind, size in (("wordpiece", 2_000_000), ("unigram", 3000), ("byte_level", 3000)):
        asked = ["--tokenizer.kind", kind, "--tokenizer.vocab_size", str(size)]
        assert tokenizer([*keys, str(tmp_path / kind), *asked]) == 0
        assert f"tokenizer.vocab_size is {size:,}" in capsys.readouterr().err
    small = ["--tokenizer.vocab_size", "32"]
    assert tokenizer([*keys, str(tmp_path / "small"), *small]) == 0
    assert "vocab_size" not in capsys.readouterr().err
