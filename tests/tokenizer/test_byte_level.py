"""Byte-level vocabularies: trained alike everywhere, lossless, and used by every command as WordPiece's are."""

import dataclasses
import hashlib
import itertools
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

import bert
from bert.commands.corpus import examples_command as examples
from bert.commands.corpus import tokenizer_command as train
from bert.commands.export import main as export
from bert.commands.pretrain import main as pretrain
from bert.config import DataConfig, PretrainConfig, TokenizerConfig
from bert.config.yaml_io import load_config
from bert.data.corpus.documents import corpus_fingerprint
from bert.data.corpus.vocabulary import corpus_vocabulary
from bert.data.encoding import row_template
from bert.data.pretraining.loader import make_masking
from bert.errors import UserError
from bert.files import read_json
from bert.interchange.writers import hf
from bert.tasks.question_answering import span_features
from bert.tasks.token_classification import conll, word_features
from bert.tokenizer.byte_level import TRAINED_SPECIAL_TOKENS
from bert.tokenizer.library import special_ids
from bert.tokenizer.vocabulary import literal_tokenizer, load_tokenizer, save_tokenizer, subword_ids, train_tokenizer
from tests.conftest import SMALL_RUN

TEXTS = ["The lowest of the low, and the newest.", "Élan vital; naïve façade: 東京 😀", "lower lower newest"] * 5
HARD = (
    "a\x00b\x7f\u200b\ufeff\ufffd\u2028 \u00a0\u3000\r\n\t  👩‍👩‍👧‍👦 e\u0301 İ ẞ ﬁ \ud7ff\ue000\U0010ffff العَرَبِيَّة "
    "<mask> </s> Ġ Ċ ##ing"
)
BYTE_LEVEL = ["--tokenizer.kind=byte_level", "--tokenizer.vocab_size=330"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(iter(TEXTS), TokenizerConfig(kind="byte_level", vocab_size=330))


def test_special_tokens_and_bytes_come_first(tokenizer: Tokenizer) -> None:
    assert [tokenizer.id_to_token(i) for i in range(5)] == list(TRAINED_SPECIAL_TOKENS)
    special = special_ids(tokenizer)
    assert (special.cls, special.pad, special.sep, special.unk, special.mask) == (0, 1, 2, 3, 4)
    assert tokenizer.get_vocab_size() <= 330
    assert "Ġlow" in tokenizer.get_vocab()
    smallest = train_tokenizer(iter(TEXTS), TokenizerConfig(kind="byte_level", vocab_size=261))
    assert len(literal_tokenizer(smallest).encode(HARD, add_special_tokens=False).ids) == len(HARD.encode())


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_every_text_is_read_without_loss(text: str) -> None:
    literal = literal_tokenizer(_TRAINED)
    ids = literal.encode(text, add_special_tokens=False).ids
    assert literal.decode(ids, skip_special_tokens=False) == text
    assert 3 not in ids


_TRAINED = train_tokenizer(iter(TEXTS), TokenizerConfig(kind="byte_level", vocab_size=330))


def test_a_hostile_text_is_read_without_loss(tokenizer: Tokenizer) -> None:
    literal = literal_tokenizer(tokenizer)
    assert literal.decode(literal.encode(HARD, add_special_tokens=False).ids, skip_special_tokens=False) == HARD


def test_rows_are_those_of_roberta(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("low").tokens[0] == "<s>"
    pair = tokenizer.encode("a", "b")
    assert (pair.tokens, pair.type_ids) == (["<s>", "a", "</s>", "</s>", "b", "</s>"], [0] * 6)
    assert row_template(tokenizer, pair=True).separator == (2, 2)
    vocab = tokenizer.get_vocab()
    assert tokenizer.encode("a <mask>.").ids == [0, vocab["a"], 4, vocab["."], 2], "the mask holds its space"


def test_saved_and_loaded_is_the_same(tokenizer: Tokenizer, tmp_path: Path) -> None:
    save_tokenizer(tokenizer, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]
    assert load_tokenizer(tmp_path).to_str() == tokenizer.to_str()


def test_tokens_without_a_space_continue_a_word(tokenizer: Tokenizer) -> None:
    continuing = {tokenizer.id_to_token(i) for i in subword_ids(tokenizer)}
    assert {"a", ",", "§ade"} <= continuing
    assert not continuing & {*TRAINED_SPECIAL_TOKENS, "Ġlow", "Ġ", "Ċ"}


def test_what_cannot_be_trained_is_one_sentence() -> None:
    with pytest.raises(UserError, match="holds no text"):
        train_tokenizer(iter(["", " \n"]), TokenizerConfig(kind="byte_level"))
    for key, value in {"strip_accents": True, "num_unused_tokens": 3, "limit_alphabet": 9}.items():
        with pytest.raises(UserError, match=rf"(?i)tokenizer\.{key} is {value}, but tokenizer.kind byte_level"):
            TokenizerConfig(kind="byte_level", **{key: value}).check()
    with pytest.raises(UserError, match=r"tokenizer\.vocab_size is 260.*least 261"):
        TokenizerConfig(kind="byte_level", vocab_size=260).check()


def test_tagged_words_and_spans_are_found_by_their_characters(tokenizer: Tokenizer) -> None:
    """Each word has the space in front of it, which is in no offset of its token."""
    words = [["The", "low", "façade", "."]]
    rows = word_features.tokenize(tokenizer, conll.Sentences(words, [["O"] * 4]), ("O",), 32)
    assert tokenizer.decode(rows.ids.tolist()) == " The low façade ."
    assert len(np.flatnonzero(rows.words >= 0)) == 4
    context = " The  naïve façade, the lowest."
    for answer in ("naïve", "façade", "lowest", "The"):
        asked = span_features.Example("1", "low", context, (span_features.Answer(answer, context.index(answer)),))
        features = span_features.make_qa_features(tokenizer, [asked], max_length=64, max_query_length=8)
        assert features.labels is not None
        start, end = features.labels[0]
        assert context[features.char_starts[start] : features.char_ends[end]] == answer


def test_the_command_writes_a_vocabulary(corpus: Path, tmp_path: Path, capsys, fails) -> None:
    assert train([f"--data.train={corpus}", *BYTE_LEVEL, f"--output={tmp_path / 'vocabulary'}"]) == 0
    assert "holds tokenizer.json with 330 tokens" in capsys.readouterr().out
    assert load_tokenizer(tmp_path / "vocabulary").get_vocab_size() == 330
    assert "use one of wordpiece, byte_level" in fails(
        train, f"--data.train={corpus}", "--tokenizer.kind=bytes", f"--output={tmp_path / 'other'}"
    )


@pytest.fixture(scope="module")
def run(corpus: Path, tmp_path_factory) -> tuple[Path, list[str]]:
    """A run of ten steps with whole words masked, and its arguments."""
    folder = tmp_path_factory.mktemp("byte-level") / "run"
    arguments = [f"--data.train={corpus}", *SMALL_RUN, *BYTE_LEVEL, "--data.whole_word_masking=true"]
    arguments += ["--data.input_format=full_sentences", "--training.steps=10", "--training.checkpoint_every=5"]
    assert pretrain([*arguments, f"--output_dir={folder}"]) == 0
    return folder, arguments


@pytest.mark.medium
def test_a_run_reads_and_answers_as_text(run, capsys) -> None:
    model = bert.load(run[0])
    assert model.tokenizer.get_vocab_size() == 330
    assert model.config.vocab_size == 330
    assert not (run[0] / "vocab.txt").exists()
    [guesses] = model.fill_mask("ba ko <mask> ri tu", top_k=5)
    assert all("Ġ" not in guess.token for guess in guesses)
    assert [guess.token for guess in guesses] == [model.tokenizer.decode([guess.token_id], False) for guess in guesses]
    encoded = model.encode(["ba ko", HARD])
    assert np.isfinite(encoded.last_hidden_state).all()
    for sample in read_json(run[0] / "results.json")["filled_masks"]:
        assert sample["truth"].isalpha() and "Ġ" not in json.dumps(sample, ensure_ascii=False)
    capsys.readouterr()
    assert examples([*run[1], f"--output_dir={run[0]}", "--statistics", "--show=1"]) == 0
    assert "0.000% of the training tokens" in capsys.readouterr().out


@pytest.mark.medium
def test_a_run_resumes_exactly(run, tmp_path: Path) -> None:
    again = tmp_path / "run"
    shutil.copytree(run[0], again)
    shutil.rmtree(again / "checkpoints" / "10")
    assert pretrain([f"--config={again / 'config.yaml'}", f"--output_dir={again}"]) == 0
    actual, expected = bert.load(again).params, bert.load(run[0]).params
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.medium
def test_a_run_masks_whole_words(run) -> None:
    config = load_config(PretrainConfig, run[0] / "config.yaml")
    tokenizer = load_tokenizer(run[0])
    masking = make_masking(config.data, tokenizer)
    continuing = set(subword_ids(tokenizer))
    text = tokenizer.encode("ba kori tunelo sami bako riri lolo").ids
    ids = np.array([text] * 200)
    words = np.random.default_rng(0).integers(0, 2**64, (200, masking.uint64s_per_row(len(text))), np.uint64)
    masked = masking(ids, words)
    assert masked["masked_lm_weights"].any()
    starts = [i for i, token in enumerate(text) if token not in continuing or i == 1]
    for row in range(len(ids)):
        chosen = set(masked["masked_lm_positions"][row][masked["masked_lm_weights"][row] > 0].tolist())
        for start, end in itertools.pairwise(starts[1:]):
            word = set(range(start, end))
            assert not chosen & word or word <= chosen


@pytest.mark.medium
def test_a_run_is_exported_with_the_files_of_roberta(run, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(hf, "logits_difference", lambda model, folder: None)
    assert export([str(run[0]), str(tmp_path / "out")]) == 0
    assert {"vocab.json", "merges.txt", "tokenizer.json"} <= {path.name for path in (tmp_path / "out").iterdir()}
    assert read_json(tmp_path / "out" / "tokenizer_config.json")["tokenizer_class"] == "RobertaTokenizer"
    assert read_json(tmp_path / "out" / "config.json")["pad_token_id"] == 1
    of_run = load_tokenizer(run[0])
    (tmp_path / "out" / "tokenizer.json").unlink()
    assert load_tokenizer(tmp_path / "out").to_str() == of_run.to_str(), "vocab.json and merges.txt alone say as much"


def test_folders_of_trained_vocabularies_keep_their_names(corpus: Path, tmp_path: Path) -> None:
    """A WordPiece vocabulary trained before there were kinds is found again."""
    data = DataConfig(train=str(corpus), cache_dir=str(tmp_path))
    corpus_vocabulary(data, TokenizerConfig(vocab_size=100), lambda text: None)
    keys = dataclasses.asdict(TokenizerConfig(vocab_size=100))
    del keys["kind"]
    settings = json.dumps([corpus_fingerprint(data.train, tmp_path), keys])
    [folder] = [path for path in (tmp_path / "vocabularies").iterdir() if path.is_dir()]
    assert folder.name == hashlib.sha256(settings.encode()).hexdigest()[:32]
