"""`bert tokenizer`, and vocabularies that grow."""

import pytest

from bert.commands.tokenizer import main
from bert.config import TokenizerConfig, UserError
from bert.new_words import useful_words, with_words
from bert.tokenizer import SPECIAL_TOKENS, load_tokenizer, train_tokenizer

TEXTS = ["the cat sat on the mat", "the cardiomyopathy of the cat", "cardiomyopathy, stent and Stent"] * 5
PIECES = [
    *SPECIAL_TOKENS,
    "[unused0]",
    "[unused1]",
    *"abcdefghijklmnopqrstuvwxyz,",
    *(f"##{c}" for c in "acdeihmnoprstuvy"),
]


@pytest.fixture
def vocabulary(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join([*PIECES, "the", "on"]))
    return tmp_path / "vocab.txt"


def test_unused_slots_and_alphabet() -> None:
    tokenizer = train_tokenizer(TEXTS, TokenizerConfig(vocab_size=90, unused=3, alphabet=6))
    pieces = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    assert pieces[:8] == [*SPECIAL_TOKENS, "[unused0]", "[unused1]", "[unused2]"]
    letters = {piece for piece in pieces if len(piece) == 1}
    assert len(letters) == 6
    assert "t" in letters
    assert len(pieces) <= 90
    assert not any(piece.startswith("[unused") for piece in tokenizer.encode("an [unused0] slot").tokens)
    with pytest.raises(UserError, match=r"tokenizer\.unused is 70: .* leaves no room"):
        TokenizerConfig(vocab_size=100, unused=70).check()


def test_the_words_that_save_most_come_first(vocabulary) -> None:
    found = useful_words(load_tokenizer(vocabulary), TEXTS, 4)
    assert [(new.word, new.count) for new in found] == [("cardiomyopathy", 10), ("stent", 10), ("cat", 10), ("and", 5)]
    assert found[0].saved == 10 * 13
    assert useful_words(load_tokenizer(vocabulary), TEXTS, 9, min_frequency=6) == found[:3]


def test_new_words_take_unused_slots_then_the_end_and_all_else_stays(vocabulary) -> None:
    before = load_tokenizer(vocabulary)
    after = with_words(before, ["cardiomyopathy", "stent", "cat"])
    old, new = before.get_vocab(), after.get_vocab()
    assert new["cardiomyopathy"] == old["[unused0]"]
    assert new["stent"] == old["[unused1]"]
    assert new["cat"] == len(old)
    assert {piece: i for piece, i in new.items() if piece in old} == {
        piece: i for piece, i in old.items() if "unused" not in piece
    }
    assert after.encode("The Stent", add_special_tokens=False).tokens == ["the", "stent"]


def test_the_command_trains_and_extends(vocabulary, tmp_path, capsys, fails) -> None:
    (tmp_path / "corpus.txt").write_text("\n\n".join(TEXTS))
    corpus = f"--data.train={tmp_path / 'corpus.txt'}"
    out = tmp_path / "trained"
    assert main([corpus, f"--output={out}", "--tokenizer.vocab_size=80", "--tokenizer.unused=2"]) == 0
    assert (out / "vocab.txt").read_text().splitlines()[5:7] == ["[unused0]", "[unused1]"]
    assert "use it with --tokenizer.path" in capsys.readouterr().out
    longer = tmp_path / "longer"
    assert main([corpus, f"--output={longer}", f"--tokenizer.path={vocabulary}", "--extend", "3"]) == 0
    assert "10 x cardiomyopathy" in capsys.readouterr().out
    assert load_tokenizer(longer).encode("cardiomyopathy", add_special_tokens=False).tokens == ["cardiomyopathy"]
    assert (longer / "vocab.txt").read_text().splitlines()[5] == "cardiomyopathy"
    assert "--output is missing" in fails(main, corpus)
    assert "exists already" in fails(main, corpus, f"--output={longer}")
    assert "nothing to train" in fails(main, corpus, f"--output={tmp_path / 'x'}", f"--tokenizer.path={vocabulary}")
    assert "--extend none is no number" in fails(main, corpus, f"--output={tmp_path / 'x'}", "--extend=none")
    assert "tokenizer.path is not set" in fails(main, corpus, f"--output={tmp_path / 'x'}", "--extend=5")
