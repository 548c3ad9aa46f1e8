"""`bert tokenizer`, vocabularies that grow, and models that grow with them."""

import json
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

import bert
from bert.commands.corpus import tokenizer_command as main
from bert.commands.pretrain import main as pretrain
from bert.config import TokenizerConfig
from bert.errors import UserError
from bert.tokenizer.extension import add_words, decompose_new_tokens, select_new_words
from bert.tokenizer.library import SPECIAL_TOKENS
from bert.tokenizer.vocabulary import load_tokenizer, train_tokenizer
from bert.tokenizer.wordpiece import WordSteps, count_words
from bert.training.pretraining import run as pretraining_run
from bert.training.pretraining.initialization import extend_embeddings
from bert.training.step import TrainState
from tests.conftest import SMALL_RUN
from tests.letters import byte_level_tokenizer
from tests.messages import has_all

TEXTS = ["the cat sat on the mat", "the cardiomyopathy of the cat", "cardiomyopathy, stent and Stent"] * 5
LETTERS = [*"abcdefghijklmnopqrstuvwxyz,", *(f"##{c}" for c in "acdeihmnoprstuvy")]
PIECES = [*SPECIAL_TOKENS, "[unused0]", "[unused1]", *LETTERS]


@pytest.fixture
def vocabulary(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join([*PIECES, "the", "on"]))
    return tmp_path / "vocab.txt"


def test_unused_slots_and_alphabet() -> None:
    tokenizer = train_tokenizer(TEXTS, TokenizerConfig(vocab_size=90, num_unused_tokens=3, limit_alphabet=6))
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    assert tokens[:8] == [*SPECIAL_TOKENS, "[unused0]", "[unused1]", "[unused2]"]
    letters = {token for token in tokens if len(token) == 1}
    assert len(letters) == 6
    assert "t" in letters
    assert len(tokens) <= 90
    assert not any(token.startswith("[unused") for token in tokenizer.encode("an [unused0] slot").tokens)
    with pytest.raises(UserError, match=r"tokenizer\.num_unused_tokens is 70, but tokenizer\.vocab_size is 100"):
        TokenizerConfig(vocab_size=100, num_unused_tokens=70).check()


def test_the_words_that_save_most_come_first(vocabulary) -> None:
    tokenizer = load_tokenizer(vocabulary)
    counts = count_words(TEXTS, WordSteps(tokenizer.normalizer, tokenizer.pre_tokenizer))
    words = select_new_words(tokenizer, counts, 4)
    assert [(new.word, new.count) for new in words] == [("cardiomyopathy", 10), ("stent", 10), ("cat", 10), ("and", 5)]
    assert words[0].tokens_saved == 10 * 13
    assert select_new_words(tokenizer, counts, 9, min_frequency=6) == words[:3]


def test_single_characters_that_are_unknown_are_added(vocabulary) -> None:
    """A text with emoji and Chinese, in which each character is a word."""
    tokenizer = load_tokenizer(vocabulary)
    texts = ["the 嘅 😂", "on 😂 the mat", "係嘢 😂 ☃"] * 5 + ["嚿 a"]
    counts = count_words(texts, WordSteps(tokenizer.normalizer, tokenizer.pre_tokenizer))
    words = select_new_words(tokenizer, counts, 9)
    assert [(new.word, new.is_unknown) for new in words][:2] == [("😂", True), ("mat", False)]
    assert {new.word for new in words} == {"😂", "mat", "係", "嘅", "嘢", "☃"}
    read = add_words(tokenizer, [new.word for new in words]).encode(" ".join(texts[:3]), add_special_tokens=False)
    assert "[UNK]" not in read.tokens


def test_new_words_take_unused_slots_then_the_end_and_all_else_stays(vocabulary) -> None:
    before = load_tokenizer(vocabulary)
    after = add_words(before, ["cardiomyopathy", "stent", "cat"])
    old, new = before.get_vocab(), after.get_vocab()
    assert new["cardiomyopathy"] == old["[unused0]"]
    assert new["stent"] == old["[unused1]"]
    assert new["cat"] == len(old)
    assert new.items() >= {token: i for token, i in old.items() if "unused" not in token}.items()
    assert not {"[unused0]", "[unused1]"} & new.keys()
    assert after.encode("The Stent", add_special_tokens=False).tokens == ["the", "stent"]


def test_the_command_trains_and_extends(vocabulary, tmp_path, capsys, fails) -> None:
    (tmp_path / "corpus.txt").write_text("\n\n".join(TEXTS))
    corpus = f"--data.train={tmp_path / 'corpus.txt'}"
    out = tmp_path / "trained"
    assert main([corpus, f"--output={out}", "--tokenizer.vocab_size=80", "--tokenizer.num_unused_tokens=2"]) == 0
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
    assert "--extend none is not a number" in fails(main, corpus, f"--output={tmp_path / 'x'}", "--extend=none")
    byte_level_tokenizer().save(str(tmp_path / "tokenizer.json"))
    assert "BPE, but only WordPiece can be extended" in fails(
        main, "--data.train=/no/such/file", f"--output={tmp_path / 'x'}", f"--tokenizer.path={tmp_path}", "--extend=3"
    )
    assert "tokenizer.path is not set" in fails(main, corpus, f"--output={tmp_path / 'x'}", "--extend=5")


def changed(tokenizer: Tokenizer, change) -> Tokenizer:
    content = json.loads(tokenizer.to_str())
    change(content)
    return Tokenizer.from_str(json.dumps(content))


def test_new_rows_are_the_means_of_the_old_tokens(vocabulary) -> None:
    before = load_tokenizer(vocabulary)
    words = ["stent", "cat", "onto", "##ty", "中"]
    extended = add_words(before, ["stent", "cat", "onto"])
    after = changed(extended, lambda content: content["model"]["vocab"].update({"##ty": 53, "中": 54}))
    assert after.token_to_id("onto") == len(PIECES) + 2
    rows = decompose_new_tokens(before, after, "old", "new")
    old, new = before.get_vocab(), after.get_vocab()
    assert [new[word] for word in words] == list(rows) == [5, 6, 52, 53, 54]
    assert rows[new["stent"]] == [old[token] for token in ("s", "##t", "##e", "##n", "##t")]
    assert rows[new["onto"]] == [old[token] for token in ("on", "##t", "##o")]
    assert rows[new["##ty"]] == [old["##t"], old["##y"]]
    assert rows[new["中"]] == [old["[UNK]"]]

    random = np.random.default_rng(0)
    size = len(old) + 2  # rows beyond the vocabulary, as published models have them
    word, bias = random.normal(size=(size, 6)).astype(np.float32), random.normal(size=size).astype(np.float32)
    params = {"bert": {"embeddings": {"word": {"embedding": word}}, "pooler": {}}, "predictions": {"bias": bias}}
    inputs = word.copy()
    grown = extend_embeddings(params, rows, 56)
    table, output = grown["bert"]["embeddings"]["word"]["embedding"], grown["predictions"]["bias"]
    assert (table.shape, output.shape, table.dtype, output.dtype) == ((56, 6), (56,), np.float32, np.float32)
    same = [row for row in range(size) if row not in rows]
    np.testing.assert_array_equal(table[same], word[same])
    np.testing.assert_array_equal(output[same], bias[same])
    for row, tokens in rows.items():
        np.testing.assert_array_equal(table[row], word[tokens].mean(axis=0))
        np.testing.assert_array_equal(output[row], bias[tokens].mean())
    np.testing.assert_array_equal(table[55], word.mean(axis=0))
    np.testing.assert_array_equal(word, inputs)


def test_what_is_no_extension_is_one_sentence(vocabulary) -> None:
    before = load_tokenizer(vocabulary)

    def error(change) -> str:
        with pytest.raises(UserError) as caught:
            decompose_new_tokens(before, changed(before, change), "old", "new")
        assert "\n" not in str(caught.value)
        return str(caught.value)

    def swap(content: dict) -> None:
        vocab = content["model"]["vocab"]
        vocab["the"], vocab["on"] = vocab["on"], vocab["the"]

    assert "token 50, 'the', has number 51 (2 such" in error(swap)
    assert "whose token 50, 'the', is missing (1 such" in error(lambda content: content["model"]["vocab"].pop("the"))
    assert "its normalizer differs" in error(lambda content: content["normalizer"].update(lowercase=False))
    assert decompose_new_tokens(before, before, "old", "new") == {}
    content = {"model": {"type": "BPE", "vocab": {"<pad>": 0}, "merges": []}, "added_tokens": []}
    bytes_ = Tokenizer.from_str(json.dumps(content))
    bytes_.add_special_tokens(["<unk>", "<s>", "</s>", "<mask>"])
    with pytest.raises(UserError, match="the vocabulary is BPE, but only WordPiece can be extended"):
        add_words(bytes_, ["new"])


@pytest.mark.slow
def test_a_run_goes_on_with_new_words(pretrained, corpus, tmp_path, capsys, monkeypatch, fails) -> None:
    """`bert tokenizer --extend`, then `pretrain --init`: what the model starts as, and a few steps."""
    text = corpus.read_text().replace(" ", " bakoritunelosami ", 200).replace(".", " misalonetu.", 100)
    (tmp_path / "corpus.txt").write_text(text)
    data, longer = f"--data.train={tmp_path / 'corpus.txt'}", tmp_path / "longer"
    assert main([data, f"--output={longer}", f"--tokenizer.path={pretrained}", "--extend=3"]) == 0
    begun = []
    original = pretraining_run.initialize_state

    def initialize(*args: Any, **options: Any) -> TrainState:
        begun.append(original(*args, **options))
        return begun[-1]

    monkeypatch.setattr(pretraining_run, "initialize_state", initialize)
    folder = f"--output_dir={tmp_path / 'a'}"
    arguments = [data, *SMALL_RUN, f"--init={pretrained}", f"--tokenizer.path={longer}", folder]
    capsys.readouterr()
    assert pretrain(arguments) == 0
    output = capsys.readouterr().out
    assert has_all(output, "2 new", "'bakoritunelosami'")
    source, run = bert.load(pretrained), bert.load(tmp_path / "a")
    old, new = source.config.vocab_size, run.config.vocab_size
    assert new == old + 2
    tables = (lambda x: x["bert"]["embeddings"]["word"]["embedding"], lambda x: x["predictions"]["bias"])
    tokens = source.tokenizer.encode("bakoritunelosami", add_special_tokens=False).ids
    assert len(tokens) > 1
    for table in tables:
        before, start, after = (np.asarray(table(params)) for params in (source.params, begun[0].params, run.params))
        np.testing.assert_array_equal(start[:old], before)
        np.testing.assert_array_equal(start[old], before[tokens].mean(axis=0))
        assert np.isfinite(after).all()
        assert (after[old] != start[old]).any(), "the new word is learned"
    assert run.tokenizer.encode("bakoritunelosami", add_special_tokens=False).ids == [old]

    assert pretrain(arguments) == 0
    again = capsys.readouterr().out
    assert "has ended before" in again and "seeded" not in again
    (tmp_path / "other.txt").write_text("\n".join([*PIECES, "the", "on"]))
    other = [data, *SMALL_RUN, f"--init={pretrained}", f"--tokenizer.path={tmp_path / 'other.txt'}"]
    assert "its tokenizer.path is" in fails(pretrain, *other, f"--output_dir={tmp_path / 'a'}")
    assert "does not extend the vocabulary of" in fails(pretrain, *other, f"--output_dir={tmp_path / 'b'}")
