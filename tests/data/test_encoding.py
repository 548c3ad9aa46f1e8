"""Special tokens, token types and spaces of rows: RoBERTa's wherever rows are made, BERT's as ever."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, processors

from bert.config import DataConfig, TaskDataConfig
from bert.data.corpus.documents import split_sentences
from bert.data.encoding import RowTemplate, post_processor, row_template
from bert.data.pretraining import build, dataset
from bert.data.rows import TokenRows
from bert.errors import UserError
from bert.tasks import find_task, multiple_choice
from bert.tasks.question_answering import span_features
from bert.tasks.token_classification import conll, word_features
from bert.tokenizer.vocabulary import literal_tokenizer
from tests.letters import byte_level_tokenizer, letter_tokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *(f"##{letter}" for letter in LETTERS), "."]
TEXTS = ("a bc", " a", "ab  c ", "é 你好 x", "x\ty", "a.b", " ")


@pytest.fixture(scope="module")
def roberta() -> Tokenizer:
    return byte_level_tokenizer()


def rows_of(tokenizer: Tokenizer, features: TokenRows) -> list[str]:
    """The tokens of each row with spaces between."""
    rows = np.split(features.ids, features.offsets[1:-1])
    return [" ".join(tokenizer.id_to_token(int(number)) or "" for number in row) for row in rows]


def test_templates_are_those_of_the_post_processor(roberta) -> None:
    bert = letter_tokenizer(WORDS)
    assert row_template(bert) == RowTemplate((2,), (), (3,), (0, 0))
    assert row_template(bert, pair=True) == RowTemplate((2,), (3,), (3,), (0, 0, 1), 1)
    assert row_template(roberta) == RowTemplate((0,), (), (2,), (0, 0))
    assert row_template(roberta, pair=True) == RowTemplate((0,), (2, 2), (2,), (0, 0, 0, 0))
    assert row_template(roberta, pair=True).room(16) == 12


def test_without_a_post_processor_the_special_tokens_tell_whose_rows_they_are() -> None:
    content = json.loads(byte_level_tokenizer().to_str())
    content["post_processor"] = None
    bare = Tokenizer.from_str(json.dumps(content))
    assert row_template(bare, pair=True).separator == (2, 2)
    assert isinstance(post_processor(bare), processors.RobertaProcessing)
    assert isinstance(post_processor(letter_tokenizer(WORDS)), processors.BertProcessing)


@pytest.mark.parametrize("pair", ["$A:1 [SEP]:1 $B:0", "$A:0 $B:2", "$A:0 [SEP]:1 $B:0"])
def test_token_types_that_rows_cannot_have_are_refused(pair) -> None:
    tokenizer = letter_tokenizer(WORDS)
    tokenizer.post_processor = processors.TemplateProcessing("$A", pair, [("[SEP]", 3)])
    assert row_template(tokenizer).size == 0
    with pytest.raises(UserError, match="with BERT's or RoBERTa's"):
        row_template(tokenizer, pair=True)


@pytest.mark.parametrize("first", TEXTS)
@pytest.mark.parametrize("second", TEXTS)
def test_a_template_lays_out_what_the_tokenizer_does(roberta, first, second) -> None:
    for tokenizer in (roberta, letter_tokenizer(WORDS)):
        tokenizer.post_processor = post_processor(tokenizer)
        a, b = (tokenizer.encode(text, add_special_tokens=False).ids for text in (first, second))
        single, pair = tokenizer.encode(first), tokenizer.encode(first, second)
        assert row_template(tokenizer).row(a).tolist() == single.ids
        template = row_template(tokenizer, pair=True)
        assert template.row(a, b).tolist() == pair.ids
        assert template.segment_a_length(len(a), len(b)) == pair.type_ids.count(0)


def test_questions_have_both_separators_of_roberta(roberta) -> None:
    example = span_features.Example("1", "ab c", "a bc d", (span_features.Answer("bc", 2),))
    rows = span_features.make_qa_features(roberta, [example], max_length=16, max_query_length=4)
    assert rows_of(roberta, rows) == ["<s> a b Ġc </s> </s> a Ġb c Ġd </s>"]
    assert rows.ids.tolist() == roberta.encode("ab c", "a bc d").ids
    assert not rows.batch(np.array([0]), 16, 1)["token_type_ids"].any()
    assert rows.labels is not None
    assert rows.labels.tolist() == [[7, 8]]
    assert rows.char_starts.tolist() == [-1, -1, -1, -1, -1, -1, 0, 2, 3, 5, -1]


def test_windows_of_a_long_context_fit_with_both_separators(roberta) -> None:
    context = " ".join(LETTERS)
    rows = span_features.make_qa_features(
        roberta, [span_features.Example("1", "abc", context, ())], 16, doc_stride=4, max_query_length=3
    )
    assert max(rows.lengths) == 16
    assert all(row.startswith("<s> a b c </s> </s> ") for row in rows_of(roberta, rows))
    assert set(rows.char_starts[rows.char_starts >= 0].tolist()) == {*range(0, len(context), 2)}
    with pytest.raises(UserError, match=r"12 tokens.*16"):
        span_features.make_qa_features(roberta, [], 16, max_query_length=12)
    assert len(span_features.make_qa_features(roberta, [], 16, max_query_length=11)) == 0


@pytest.mark.parametrize("add_prefix_space", [False, True])
def test_tagged_words_keep_their_spaces(add_prefix_space) -> None:
    tokenizer = byte_level_tokenizer(add_prefix_space)
    words = [["the", "the", ".", " a", "é"]]
    rows = word_features.tokenize(tokenizer, conll.Sentences(words, [["O"] * 5]), ("O",), 32)
    assert rows_of(tokenizer, rows) == ["<s> Ġt h e Ġt h e Ġ . Ġa Ġ Ã © </s>"]
    as_transformers = byte_level_tokenizer(add_prefix_space=True)  # with is_split_into_words
    assert rows.ids.tolist() == as_transformers.encode(words[0], is_pretokenized=True).ids
    assert np.flatnonzero(rows.words >= 0).tolist() == [1, 4, 7, 9, 10]


def test_choices_are_pairs(roberta) -> None:
    asked = multiple_choice.Examples(["a bc"], [["ab", "c"]], [["0", "1"]], None, ["1"])
    rows = multiple_choice.tokenize(roberta, asked, 12)
    assert rows_of(roberta, rows.sequences) == ["<s> a Ġb c </s> </s> a b </s>", "<s> a Ġb c </s> </s> c </s>"]
    assert not rows.batch(np.array([0]), 12, 1)["token_type_ids"].any()


def test_sentences_keep_the_space_that_the_text_has() -> None:
    document = ["The cat sat.  The dog ran.The the. A b. ", "C d.", "  ", "\u3000E f."]
    assert split_sentences(document, "en", keep_space=True) == [
        "The cat sat.", " The dog ran.", "The the.", " A b.", " C d.", " E f.",
    ]  # fmt: skip
    assert split_sentences(["你好。我很好。"], "zh", keep_space=True) == ["你好。", "我很好。"]
    assert split_sentences([" One. Two. ", " ", "Three."], "en", True, keep_space=True) == ["One. Two.", " Three."]
    for text in document:
        spaced = split_sentences([text], "en", False, True)
        assert split_sentences([text], "en") == [sentence.strip() for sentence in spaced]


DOCUMENTS = [f"The {a} sat. A {b} ran.The {a} {b}.\nIt is {b}." for a, b in zip("abcdefgh", "ijklmnop", strict=True)]


def config_of(folder: Path, **settings) -> DataConfig:
    path = folder / "corpus.txt"
    path.write_text("\n\n".join(DOCUMENTS))
    return DataConfig(train=str(path), sequence_length=72, num_workers=1, eval_fraction=0.25, **settings)


def built(folder: Path, tokenizer: Tokenizer, **settings) -> dict[str, np.ndarray]:
    example_set = build.build_examples(config_of(folder, **settings), tokenizer, folder / "cache")
    rows = dataset.open_rows(example_set.train)
    return rows.take(np.arange(len(rows)))


@pytest.mark.parametrize("input_format", ["full_sentences", "doc_sentences"])
def test_pretraining_rows_read_as_the_text_does(roberta, tmp_path, input_format) -> None:
    rows = built(tmp_path, roberta, input_format=input_format)
    texts = [
        roberta.decode(ids[:length].tolist(), skip_special_tokens=False)
        for ids, length in zip(rows["input_ids"], rows["length"], strict=True)
    ]
    assert all(text.startswith("<s>The") or input_format == "full_sentences" for text in texts)
    read = [part for text in texts for part in text.removeprefix("<s>").split("</s>") if part]
    if input_format == "doc_sentences":
        assert set(read) <= {document.replace("\n", " ") for document in DOCUMENTS}
        assert rows["input_ids"][0, : rows["length"][0]].tolist() == roberta.encode(read[0]).ids
    else:
        assert all(part in " ".join(DOCUMENTS).replace("\n", " ") for part in read)


def test_pretraining_pairs_are_laid_out_as_the_tokenizer_does(roberta, tmp_path) -> None:
    rows = built(tmp_path, roberta, input_format="sop")
    for ids, length, segment_a in zip(rows["input_ids"], rows["length"], rows["segment_a_length"], strict=True):
        text = roberta.decode(ids[:length].tolist(), skip_special_tokens=False)
        first, second = text.removeprefix("<s>").removesuffix("</s>").split("</s></s>")
        assert roberta.encode(first, second).ids == ids[:length].tolist()
        assert segment_a == length, "RoBERTa's token types are all 0"
        assert (ids[length:] == 1).all()
    assert rows["length"].max() <= 72


def test_rows_of_another_layout_are_no_longer_found_in_the_cache(roberta, tmp_path) -> None:
    """WordFeatures without the spaces were kept under the hash of these settings alone."""
    config, cache = config_of(tmp_path, input_format="doc_sentences"), tmp_path / "cache"
    for tokenizer, same in ((roberta, False), (letter_tokenizer(WORDS), True)):
        folder, named = build._dataset_folder(config, tokenizer, cache, lambda *_: None)
        settings = {key: value for key, value in named.items() if key not in ("row_template", "spaces")}
        name = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:32]
        assert (folder.name == name) is same
        assert ("row_template" in named) is not same


def test_the_masked_rows_of_a_corpus_tokenizer_are_the_same(roberta) -> None:
    assert row_template(literal_tokenizer(roberta), True) == row_template(roberta, True)


def test_a_long_question_is_answered_within_the_row(roberta) -> None:
    task = find_task("squad")
    asked = task.examples_from_inputs([("who the", "the cat sat")])
    rows = task.features(roberta, asked, TaskDataConfig(max_length=32, max_query_length=8))
    assert rows_of(roberta, rows) == ["<s> w h o Ġt h e </s> </s> t h e Ġc a t Ġs a t </s>"]
