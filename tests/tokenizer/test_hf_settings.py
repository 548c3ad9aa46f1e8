"""Tokenizer settings next to a vocabulary: its text steps and added tokens."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from bert.data.encoding import tokenize
from bert.errors import UserError
from bert.tokenizer.hf_settings import ADDED, SETTINGS, read_settings
from bert.tokenizer.vocabulary import load_tokenizer, save_tokenizer
from tests.letters import byte_level_tokenizer

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "A", "中", "##中", "a中"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "vocab.txt").write_text("\n".join(PIECES) + "\n", encoding="utf-8")
    return tmp_path


def tokens(folder: Path, text: str) -> list[str]:
    return load_tokenizer(folder).encode(text, add_special_tokens=False).tokens


@pytest.mark.parametrize("whole", [False, True], ids=["vocab.txt", "tokenizer.json"])
def test_text_steps_are_what_the_settings_say(folder: Path, whole: bool) -> None:
    """Beside a tokenizer.json as well, as transformers has it."""
    if whole:
        load_tokenizer(folder).save(str(folder / "tokenizer.json"))
    assert tokens(folder, "A a中") == ["a", "a", "中"]
    (folder / SETTINGS).write_text('{"do_lower_case": false, "tokenize_chinese_chars": false, "strip_accents": true}')
    assert tokens(folder, "A á a中") == ["A", "a", "a中"]


def test_rows_are_cut_at_the_declared_side(folder: Path, tmp_path: Path) -> None:
    """Includes a tokenizer.json, and the same file after it is saved again."""

    def cut(place: Path) -> list[int]:
        return tokenize(load_tokenizer(place), ["a b b b"], 4).ids.tolist()

    assert cut(folder) == [2, 5, 6, 3]
    (folder / SETTINGS).write_text('{"truncation_side": "left"}')
    assert cut(folder) == [2, 6, 6, 3]
    assert len(load_tokenizer(folder).encode("a b b b").ids) == 6, "rows alone are cut"
    save_tokenizer(load_tokenizer(folder), tmp_path / "again")
    assert cut(tmp_path / "again") == [2, 6, 6, 3]
    (tmp_path / "again" / SETTINGS).write_text('{"truncation_side": "right"}')
    assert cut(tmp_path / "again") == [2, 5, 6, 3]
    (folder / SETTINGS).write_text('{"truncation_side": "both"}')
    with pytest.raises(UserError, match="truncation_side is 'both'"):
        load_tokenizer(folder)


def test_added_tokens_are_read_whole(folder: Path) -> None:
    """Old folders number them in a file of their own, later ones in the settings, with flags."""
    assert tokens(folder, "a [ENT] b") == ["a", "[UNK]", "[UNK]", "[UNK]", "b"]
    (folder / ADDED).write_text('{"[ENT]": 11}')
    assert load_tokenizer(folder).encode("a [ENT] b", add_special_tokens=False).ids == [5, 11, 6]
    flags = {"lstrip": True, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    decoder = {"12": {"content": "[REL]", **flags}, "4": {"content": "[MASK]", **flags}}
    (folder / SETTINGS).write_text(json.dumps({"added_tokens_decoder": decoder}))
    assert load_tokenizer(folder).encode("a [REL] [ENT] b", add_special_tokens=False).ids == [5, 12, 11, 6]


def test_the_first_word_of_a_byte_level_text_is_read_as_declared(tmp_path: Path) -> None:
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    options = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=290, special_tokens=special, **options)
    words.train_from_iterator(["ba ba ba ba"], trainer)
    words.model.save(str(tmp_path))
    assert tokens(tmp_path, "ba ba") == ["ba", "Ġba"]
    (tmp_path / SETTINGS).write_text('{"add_prefix_space": true}')
    assert tokens(tmp_path, "ba ba") == ["Ġba", "Ġba"]


def test_a_declared_prefix_space_is_in_no_offset(tmp_path: Path) -> None:
    """An answer that begins with its context's first character has that character."""
    byte_level_tokenizer().save(str(tmp_path / "tokenizer.json"))
    for declared in (True, False):
        (tmp_path / SETTINGS).write_text(json.dumps({"add_prefix_space": declared}))
        encoding = load_tokenizer(tmp_path).encode("ab c", "ab c")
        assert encoding.tokens[1:4] == ["Ġa" if declared else "a", "b", "Ġc"]
        assert encoding.offsets == [(0, 0), (0, 1), (1, 2), (3, 4), (0, 0), (0, 0), (0, 1), (1, 2), (3, 4), (0, 0)]


@pytest.mark.parametrize(
    ("settings", "config", "name"),
    [
        ({"word_tokenizer_type": "mecab"}, {"tokenizer_class": "BertJapaneseTokenizer"}, "BertJapaneseTokenizer"),
        ({"tokenizer_class": "BertweetTokenizer"}, {}, "BertweetTokenizer"),
        ({"tokenizer_class": "DistilBertJapaneseTokenizer"}, {}, "DistilBertJapaneseTokenizer"),
        ({"tokenizer_class": "BertTokenizer", "auto_map": {"AutoTokenizer": ["own.Tokenizer", None]}}, {}, "own.Tok"),
        ({"tokenizer_class": "BertTokenizerFast"}, {"tokenizer_class": "BertJapaneseTokenizer"}, None),
        ({}, {"model_type": "bert"}, None),
    ],
)
def test_a_vocabulary_of_another_class_is_refused(folder: Path, settings: dict, config: dict, name: str | None) -> None:
    """Which tokenizer_config.json names, or in older folders config.json."""
    (folder / SETTINGS).write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps(config))
    if name is None:
        assert tokens(folder, "a b") == ["a", "b"]
    else:
        with pytest.raises(UserError, match=rf"{name}.*, which reads vocab.txt"):
            load_tokenizer(folder)


def test_byte_pairs_that_are_not_of_bytes_are_refused(tmp_path: Path) -> None:
    """HerBERT's files have the same names but are not byte-level."""
    (tmp_path / "vocab.json").write_text(json.dumps({"<s>": 0, "</s>": 1, "<unk>": 2, "a</w>": 3, "a": 4, "l": 5}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na l</w>\n")
    with pytest.raises(UserError, match=r"are not a byte-level vocabulary \(254 bytes have no token\)"):
        load_tokenizer(tmp_path)


def test_a_sentencepiece_file_is_numbered_by_the_class_of_transformers(folder: Path) -> None:
    """Custom code in the folder does not number the tokens. A damaged config.json is an error only for the model."""
    (folder / SETTINGS).write_text('{"tokenizer_class": "CamembertTokenizer", "auto_map": {"AutoTokenizer": "my.Own"}}')
    (folder / "config.json").write_text("{")
    settings = read_settings(folder)
    assert (settings.tokenizer_class, settings.reader) == ("CamembertTokenizer", "my.Own")
    (folder / SETTINGS).unlink()
    assert tokens(folder, "a b") == ["a", "b"]


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("key", ["additional_special_tokens", "extra_special_tokens"])
def test_special_tokens_of_the_settings_are_read_whole(folder: Path, file: str, key: str) -> None:
    (folder / "vocab.txt").write_text("\n".join([*PIECES, "[E1]", "[E2]"]) + "\n", encoding="utf-8")
    assert tokens(folder, "a [E1] b") != ["a", "[E1]", "b"]
    (folder / file).write_text(json.dumps({key: ["[E1]", {"content": "[E2]", "lstrip": False}, "[NONE]"]}))
    assert tokens(folder, "a [E1] b [E2]") == ["a", "[E1]", "b", "[E2]"]
    assert load_tokenizer(folder).token_to_id("[NONE]") is None, "the model has no row for it"


def test_declared_flags_replace_those_of_the_vocabulary(folder: Path) -> None:
    load_tokenizer(folder).save(str(folder / "tokenizer.json"))
    flags = {"lstrip": True, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    (folder / SETTINGS).write_text(json.dumps({"added_tokens_decoder": {"4": {"content": "[MASK]", **flags}}}))
    assert load_tokenizer(folder).encode("a [MASK]", add_special_tokens=False).offsets[1] == (1, 8)


def test_the_class_without_a_model_takes_the_steps_of_tokenizer_json(folder: Path) -> None:
    load_tokenizer(folder).save(str(folder / "tokenizer.json"))  # lower-cases
    (folder / SETTINGS).write_text('{"do_lower_case": false, "tokenizer_class": "PreTrainedTokenizerFast"}')
    assert tokens(folder, "A") == ["a"]


@pytest.mark.parametrize(
    ("settings", "has_types"),
    [
        ({"tokenizer_class": "DistilBertTokenizer"}, False),
        ({"tokenizer_class": "BertTokenizer"}, True),
        ({"tokenizer_class": "MPNetTokenizerFast", "model_input_names": ["input_ids", "token_type_ids"]}, True),
        ({}, True),
    ],
)
def test_the_class_says_whether_there_are_token_types(folder: Path, settings: dict, has_types: bool) -> None:
    (folder / SETTINGS).write_text(json.dumps(settings))
    assert read_settings(folder).has_token_types == has_types
