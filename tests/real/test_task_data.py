"""SQuAD, WNUT-17 and CommonsenseQA as they were published: read, tokenized with BERT's vocabulary, and answered."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from bert import metrics
from bert.tasks import multiple_choice, question_answering
from bert.tasks.token_classification import conll, word_features
from bert.tokenizer.vocabulary import load_tokenizer

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def tokenizer(shared: Path) -> Tokenizer:
    return load_tokenizer(shared / "data" / "vocab" / "bert-base-uncased")


@pytest.mark.parametrize(
    ("name", "questions", "impossible", "least"),
    [("dev-v1.1", 10570, 0, 99.5), ("train-v1.1.head", 4370, 0, 99.0), ("dev-v2.0.half", 6078, 3168, 99.5)],
)
def test_right_places_give_right_answers(shared, tokenizer, name, questions, impossible, least):
    """Logits that name the first right answer's own tokens: what is lost are answers that are parts of a token ("8"
    of "18", "Japan" of "Japanese")."""
    began = time.perf_counter()
    dataset = question_answering.read(shared / "data" / "squad" / f"{name}.json")
    examples = dataset.examples
    assert len(examples) == questions
    assert sum(example.is_impossible for example in examples) == impossible
    assert dataset.misplaced == []
    read = time.perf_counter()
    windows = question_answering.make_qa_features(tokenizer, examples)
    tokenized = time.perf_counter()
    start, end = np.zeros((2, len(windows), 384), np.float32)
    start[np.arange(len(windows)), windows.labels[:, 0]] = 10
    end[np.arange(len(windows)), windows.labels[:, 1]] = 10
    threshold = 0.0 if impossible else None
    whole = question_answering.decode_answers(
        examples, windows, start, end, max_answer_length=64, null_score_diff_threshold=threshold
    )
    answered = time.perf_counter()

    placed = {examples[number].id for number in windows.examples[windows.labels[:, 0] > 0]}
    assert len(placed) == questions - impossible, "every answer is whole in some window"
    first = {example.id: [example.answer.text] for example in examples if example.id in placed}
    own = metrics.squad_metrics(whole.texts, first)
    scores = metrics.squad_metrics(whole.texts, question_answering.references(examples))
    print(
        f"\n{name}: {len(windows)} windows; first answer EM {own['exact_match']:.2f} F1 {own['f1']:.2f}; "
        f"official: {scores}; {read - began:.1f} s read, {tokenized - read:.1f} s windows, "
        f"{answered - tokenized:.1f} s answers"
    )
    assert own["exact_match"] >= least
    for id in placed:  # what is not the answer holds it: the whole of the tokens it shares
        assert first[id][0].strip() in whole.texts[id]
    if impossible:
        assert scores["NoAns_exact"] == 100
        assert (scores["HasAns_total"], scores["NoAns_total"]) == (questions - impossible, impossible)


def test_every_token_of_a_context_has_its_most_context_in_one_window(shared, tokenizer):
    examples = question_answering.read(shared / "data" / "squad" / "dev-v1.1.json").examples
    examples = list({example.context: example for example in examples}.values())
    for max_length, stride in [(384, 128), (96, 20)]:
        windows = question_answering.make_qa_features(tokenizer, examples, max_length, stride)
        of_token = np.repeat(windows.examples, windows.lengths)
        places = Counter(zip(of_token.tolist(), windows.char_starts.tolist(), strict=True))
        best = list(
            zip(
                of_token[windows.is_max_context].tolist(),
                windows.char_starts[windows.is_max_context].tolist(),
                strict=True,
            )
        )
        assert len(set(best)) == len(best) == sum(place >= 0 for _, place in places)


WNUT = {"train": (3394, 62730), "dev": (1009, 15733), "test": (1287, 23394)}


def test_every_word_of_wnut_17_is_labelled_once(shared, tokenizer):
    folder = shared / "data" / "ner" / "wnut17"
    labels = conll.label_names(conll.read(folder / "train.conll"))
    types = ["corporation", "creative-work", "group", "location", "person", "product"]
    assert labels == ("O", *(f"{prefix}-{type}" for type in types for prefix in "BI"))
    for split, (sentences, words) in WNUT.items():
        began = time.perf_counter()
        data = conll.read(folder / f"{split}.conll")
        assert (data.scheme, data.delimiter, data.broken) == ("BIO", "\t", [])
        assert len(data.words) == sentences
        assert sum(map(len, data.words)) == words
        for max_length in (128, 24):
            rows = word_features.tokenize(tokenizer, data, labels, max_length)
            assert np.array_equal(np.sort(rows.words[rows.words >= 0]), np.arange(words))
            batch = rows.batch(np.arange(len(rows)), max_length, len(rows))
            assert (batch["labels"] >= 0).sum() == words
            tags = word_features.decode_tags(data, rows, np.where(batch["labels"] >= 0, batch["labels"], -9), labels)
            assert tags == data.tags
        scores = metrics.entity_metrics(tags, data.tags)
        assert scores["f1"] == scores["accuracy"] == 1
        supports = {type: own["support"] for type, own in metrics.entities_by_type(tags, data.tags).items()}
        print(f"\n{split}: {len(rows)} rows of up to 24, {time.perf_counter() - began:.1f} s, entities {supports}")


def test_the_columns_of_wnut_17_come_back(shared, tmp_path):
    data = conll.read(shared / "data" / "ner" / "wnut17" / "dev.conll")
    path = conll.write_predictions(tmp_path / "dev.conll", data, data.tags)
    again = conll.read(path)
    assert (again.words, again.tags) == (data.words, data.tags)
    assert all(cells[-1] == cells[-2] for sentence in again.columns for cells in sentence)


def test_commonsenseqa(shared, tokenizer):
    folder = shared / "data" / "multiple_choice" / "commonsenseqa"
    for name, count in [("train", 9741), ("dev", 1221), ("test_nolabels", 1140)]:
        began = time.perf_counter()
        examples = multiple_choice.read(folder / f"{name}.jsonl", labelled="nolabels" not in name)
        assert len(examples.contexts) == len(set(examples.ids)) == count
        assert {len(choices) for choices in examples.choices} == {5}
        assert (examples.labels is None) == ("nolabels" in name)
        rows = multiple_choice.tokenize(tokenizer, examples, 64)
        assert len(rows) == count
        assert len(rows.sequences) == 5 * count
        seconds = time.perf_counter() - began
        print(f"\n{name}: {5 * count} rows in {seconds:.1f} s, the longest {rows.lengths.max()} tokens")
        if examples.labels is not None:
            shares = np.bincount(examples.labels, minlength=5) / count
            assert np.abs(shares - 0.2).max() < 0.02
