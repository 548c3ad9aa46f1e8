"""SQuAD, tagging and multiple choice as tasks: files, features, answers from outputs given by hand, scores."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from bert.config import FinetuneConfig, TaskDataConfig
from bert.errors import UserError
from bert.tasks import find_task, make_task
from bert.tasks.question_answering import QuestionAnsweringTask
from bert.tasks.registry import published_task
from bert.tasks.token_classification import Tagged, TokenClassificationTask
from tests.letters import letter_tokenizer
from tests.messages import has_all

LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *(f"##{letter}" for letter in LETTERS), "."]
DATA = TaskDataConfig(max_length=16, max_query_length=4, doc_stride=4)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return letter_tokenizer(WORDS)


def paragraph(id: str, context: str, answer: str | None, start: int | None = None) -> dict[str, Any]:
    start = context.find(answer) if answer and start is None else start
    answers = [{"text": answer, "answer_start": start}] if answer else []
    question = {"id": id, "question": "q", "answers": answers, "is_impossible": answer is None}
    return {"context": context, "qas": [question]}


def write_squad(folder: Path, version: str, split: str, *paragraphs: dict[str, Any]) -> Path:
    path = folder / f"{split}-v{version}.json"
    path.write_text(json.dumps({"data": [{"paragraphs": list(paragraphs)}]}))
    return path


def outputs_for(rows: Any, places: list[tuple[int, int]], strength: float = 10.0) -> list[np.ndarray]:
    """Logits that name a start and an end in each row."""
    outputs = [np.zeros((length, 2), np.float32) for length in rows.lengths]
    for output, (start, end) in zip(outputs, places, strict=True):
        output[start, 0] = output[end, 1] = strength
    return outputs


@pytest.mark.parametrize("name", ["squad", "squad2"])
def test_the_original_names_are_found_and_copies_of_them(name, tmp_path):
    version = {"squad": "1.1", "squad2": "2.0"}[name]
    task = find_task(name)
    with pytest.raises(UserError, match=rf"has no train-v{version}.json: set data.dir"):
        task.read(tmp_path, "train")
    write_squad(tmp_path, version, "train", paragraph("a", "a b", "b")).rename(tmp_path / f"train-v{version}.part.json")
    assert [example.id for example in task.read(tmp_path, "train").examples] == ["a"]
    (tmp_path / f"train-v{version}.more.json").write_text("{}")
    with pytest.raises(UserError, match=rf"more.json, .*part.json.*train-v{version}.json"):
        task.read(tmp_path, "train")
    (tmp_path / "dev.json").write_text("{}")
    assert task.splits(tmp_path) == ["train", "dev"]


def test_squad_trains_on_what_has_a_place_and_scores_everything(tmp_path, tokenizer):
    task = find_task("squad")
    paragraphs = [paragraph("good", "a b c", "b"), paragraph("lost", "a b c", "b", 0)]
    for split in ("train", "dev"):
        write_squad(tmp_path, "1.1", split, *paragraphs)
    train, dev = task.read(tmp_path, "train"), task.read(tmp_path, "dev")
    assert [example.id for example in train.examples] == ["good"]
    assert has_all(train.notes[0], "1 question(s)", "1")
    assert len(dev) == 2
    rows = task.features(tokenizer, dev, DATA)
    assert rows.labels.tolist() == [[4, 4], [0, 0]]
    assert rows.batch(np.array([1, 0]), 16, 3)["weights"].tolist() == [0, 1, 0], "what is not known has no loss"
    predictions = task.predict(outputs_for(rows, [(4, 4), (4, 4)]), rows, dev)
    assert task.score(predictions, dev) == {"exact_match": 100, "f1": 100}
    assert not task.is_degenerate(predictions, dev)
    assert task.is_degenerate(task.predict(outputs_for(rows, [(3, 3), (5, 5)]), rows, dev), dev)
    strict = task.from_config(dataclasses.replace(DATA, misaligned_answers="error"))
    with pytest.raises(UserError, match="answer 'b' does not stand at character 0"):
        strict.read(tmp_path, "dev")
    assert list(dev.sentences()) == ["a b c", "q", "q"]


def test_the_threshold_of_squad2_is_found_on_dev_and_kept(tmp_path, tokenizer):
    """The likelier an answer, the lower its odds: the threshold parts the two right answers from the wrong one."""
    task = find_task("squad2")
    one, two, none = paragraph("one", "a b", "b"), paragraph("two", "c d", "d"), paragraph("none", "e f", None)
    write_squad(tmp_path, "2.0", "dev", one, two, none)
    dev = task.read(tmp_path, "dev")
    rows = task.features(tokenizer, dev, DATA)
    outputs = outputs_for(rows, [(4, 4)] * 3)
    for output, null in zip(outputs, (20.0, 23.0, 26.0), strict=True):
        output[0] = null / 2
    before = task.score(task.predict(outputs, rows, dev), dev)
    assert (before["f1"], before["best_f1"], before["HasAns_f1"], before["NoAns_f1"]) == (
        pytest.approx(200 / 3), 100, 50, 100)  # fmt: skip
    tuned = task.tune(outputs, rows, dev)
    assert before["best_f1_thresh"] == 3.0
    assert tuned.null_score_diff_threshold == 4.5, "half way to the question without an answer"
    predictions = tuned.predict(outputs, rows, dev)
    assert tuned.score(predictions, dev)["f1"] == 100
    assert tuned.to_config(DATA).null_score_diff_threshold == 4.5
    assert task.from_config(tuned.to_config(DATA)) == dataclasses.replace(
        tuned, n_best_size=DATA.n_best_size, max_answer_length=DATA.max_answer_length
    )
    inputs = task.from_config(dataclasses.replace(DATA, null_score_diff_threshold=-7.0))
    assert inputs.tune(outputs, rows, dev) is inputs, "what the user sets stays"
    assert [answer.answer for answer in tuned.format_predictions(predictions, dev)] == ["b", "d", ""]
    assert tuned.format_predictions(predictions, dev)[2][1:3] == (None, None)


def test_where_it_is_best_never_to_answer_the_threshold_says_so(tmp_path, tokenizer):
    """The official search would say 0, at which the model answers, and wrongly."""
    task = find_task("squad2")
    write_squad(tmp_path, "2.0", "dev", paragraph("none", "c d", None), paragraph("lost", "c d", "c"))
    dev = task.read(tmp_path, "dev")
    rows = task.features(tokenizer, dev, DATA)
    outputs = outputs_for(rows, [(4, 4)] * 2)
    tuned = task.tune(outputs, rows, dev)
    assert set(tuned.predict(outputs, rows, dev).texts.values()) == {""}
    assert tuned.is_degenerate(tuned.predict(outputs, rows, dev), dev)
    assert tuned.baseline_scores(dev)["f1"] == 50


def test_a_run_that_diverged_still_has_answers(tmp_path, tokenizer):
    task = find_task("squad2")
    write_squad(tmp_path, "2.0", "dev", paragraph("one", "a b", "b"))
    dev = task.read(tmp_path, "dev")
    rows = task.features(tokenizer, dev, DATA)
    predictions = task.predict([np.full((length, 2), np.nan, np.float32) for length in rows.lengths], rows, dev)
    [path] = [
        path
        for path in task.write_predictions(tmp_path / "out", "dev", predictions, dev)
        if path.name.startswith("nbest")
    ]
    json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(name))


def write_columns(folder: Path, split: str, *sentences: str) -> None:
    (folder / f"{split}.txt").write_text("\n\n".join(sentences) + "\n")


def test_labels_of_tagging_are_those_of_the_whole_training_file(tmp_path, tokenizer):
    write_columns(tmp_path, "train", "a O\nb B-X", "c B-Y\nd I-Y", "b B-X")
    write_columns(tmp_path, "dev", "b B-X\nc B-Y")
    write_columns(tmp_path, "test", "a\nb")
    task = find_task("ner")
    assert task.splits(tmp_path) == ["train", "dev", "test"]
    train = task.read(tmp_path, "train").take([0])
    assert len(train) == 1
    fitted = task.fit(train)
    assert fitted.labels == ("O", "B-X", "I-X", "B-Y", "I-Y")
    assert fitted.to_config(DATA).labels == ["O", "B-X", "I-X", "B-Y", "I-Y"]
    assert task.from_config(fitted.to_config(DATA)) == fitted
    assert task.from_config(dataclasses.replace(DATA, labels=["O", "B-X", "I-X"])).fit(train).num_labels == 3
    assert not task.read(tmp_path, "test").labelled
    write_columns(tmp_path, "test", "a O\nb B-X")
    assert task.read(tmp_path, "test").labelled, "as many columns as train"

    dev = task.read(tmp_path, "dev")
    rows = fitted.features(tokenizer, dev, DATA)
    [length] = rows.lengths
    output = np.zeros((length, 5), np.float32)
    output[1, 1] = output[2, 1] = 9
    predictions = fitted.predict([output], rows, dev)
    assert predictions.tags == [["B-X", "B-X"]]
    assert predictions.probabilities[0] == pytest.approx([1, 1], abs=1e-3)
    scores = fitted.score(predictions, dev)
    assert (scores["precision"], scores["recall"], scores["f1"]) == (0.5, 0.5, 0.5)
    assert (scores["f1_X"], scores["f1_Y"]) == (pytest.approx(2 / 3), 0)
    assert fitted.baseline_scores(dev)["f1"] == pytest.approx(2 / 3), "b is X in the one sentence of train, c is new"
    assert fitted.is_degenerate(predictions, dev)
    columns, types = fitted.write_predictions(tmp_path / "out", "dev", predictions, dev)
    assert columns.read_text() == "b B-X B-X\nc B-Y B-X\n\n"
    assert types.read_text().splitlines()[1].split("\t") == ["X", "0.5", "1", "0.666667", "1", "2", "1"]


def accuracy_of(path: Path) -> float:
    """Accuracy of the last column against the one before it, as in conlleval."""
    rows = [line.split()[-2:] for line in path.read_text().splitlines() if line]
    return sum(right == predicted for right, predicted in rows) / len(rows)


def logits_of(rows: Any, labels: tuple[str, ...], tags: str) -> list[np.ndarray]:
    """The outputs for one sentence, in one row, that make these tags the most likely."""
    output = np.zeros((rows.lengths[0], len(labels)), np.float32)
    output[np.flatnonzero(rows.words >= 0), [labels.index(tag) for tag in tags.split()]] = 9
    return [output]


@pytest.mark.parametrize(
    ("gold", "predicted", "expected"),
    [
        ("B-X O B-X I-X", "I-X O I-X I-X", 1),  # BIO
        ("I-X O I-X B-X", "I-X O I-X B-X", 1),  # IOB1
        ("I-X O I-X B-X", "B-X O B-X I-X", 0.75),
        ("O I-X O I-X B-X", "B-X B-X O I-X B-X", 0.6),  # in BIO four of five, in IOB1 the second is wrong as well
        ("B-X E-X S-X O", "I-X I-X B-X O", 1),  # BIOES
        ("S-X O S-X S-X", "B-X I-X B-X B-X", 0.5),  # in BIO three of four
    ],
)
def test_score_and_file_agree_on_the_accuracy(tmp_path, tokenizer, gold, predicted, expected):
    """A head may begin an entity with I-: it counts as one that is there, and its tag does as well."""
    write_columns(tmp_path, "dev", "\n".join(f"{word} {tag}" for word, tag in zip("abcde", gold.split(), strict=False)))
    task = dataclasses.replace(find_task("ner"), labels=("O", "B-X", "I-X"))
    dev = task.read(tmp_path, "dev")
    rows = task.features(tokenizer, dev, DATA)
    predictions = task.predict(logits_of(rows, task.labels, predicted), rows, dev)
    path = task.write_predictions(tmp_path / "out", "dev", predictions, dev)[0]
    assert task.score(predictions, dev)["accuracy"] == pytest.approx(accuracy_of(path)) == expected
    assert (task.score(predictions, dev)["f1"] == 1) == (expected == 1)


def test_predicted_sequences_are_sound(tmp_path, tokenizer):
    """Includes files without tags and predictions for inputs. One label everywhere is still a collapse."""
    write_columns(tmp_path, "train", "a B-X\nb I-X\nc O\nd B-Y\ne I-Y")
    write_columns(tmp_path, "test", "a\nb\nc\nd\ne")
    task = find_task("ner").fit(find_task("ner").read(tmp_path, "train"))
    test = task.read(tmp_path, "test")
    rows = task.features(tokenizer, test, DATA)
    predictions = task.predict(logits_of(rows, task.labels, "I-X I-Y O I-X I-X"), rows, test)
    assert predictions.tags == [["B-X", "B-Y", "O", "B-X", "I-X"]]
    assert (
        task.write_predictions(tmp_path, "test", predictions, test)[0].read_text()
        == "a B-X\nb B-Y\nc O\nd B-X\ne I-X\n\n"
    )
    asked = task.examples_from_inputs(["a b c d e"])
    [answer] = task.format_predictions(
        task.predict(logits_of(rows, task.labels, "I-X I-Y O I-X I-X"), rows, asked), asked
    )
    assert [entity["text"] for entity in answer.entities] == ["a", "b", "d e"]
    train = task.read(tmp_path, "train")
    assert task.is_degenerate(task.predict(logits_of(rows, task.labels, "I-X I-X I-X I-X I-X"), rows, train), train)
    half = task.predict(logits_of(rows, task.labels, "I-X I-X O O O"), rows, train)
    assert not task.is_degenerate(half, train)


def test_the_baseline_is_scored_as_a_model_is(tmp_path):
    """The most common tag of a word may be I-X, where it begins an entity, too."""
    write_columns(tmp_path, "dev", "b B-X\nc O")
    task = dataclasses.replace(find_task("ner"), labels=("O", "B-X", "I-X"), lexicon={"b": "I-X", "c": "O"})
    assert task.baseline_scores(task.read(tmp_path, "dev")) == pytest.approx(
        dict.fromkeys(("precision", "recall", "f1", "accuracy", "macro_f1", "weighted_f1", "f1_X"), 1.0)
    )


def test_plain_tags_are_scored_and_answered_word_by_word(tmp_path, tokenizer):
    for split in ("train", "dev"):
        write_columns(tmp_path, split, "a DT\nb NN", "c NN")
    task = find_task("ner").fit(find_task("ner").read(tmp_path, "train"))
    assert (task.labels, task.main_metric, task.types) == (("DT", "NN"), "accuracy", [])
    asked = task.examples_from_inputs(["a, b"])
    rows = task.features(tokenizer, asked, DATA)
    output = np.zeros((rows.lengths[0], 2), np.float32)
    output[3, 1] = 9
    [answer] = task.format_predictions(task.predict([output], rows, asked), asked)
    assert [(word["text"], word["tag"], word["start"], word["end"]) for word in answer.words] == [
        ("a", "DT", 0, 1), (",", "DT", 1, 2), ("b", "NN", 3, 4)]  # fmt: skip
    dev = task.read(tmp_path, "dev")
    assert task.baseline_scores(dev) == {"accuracy": 1.0}
    [only] = task.write_predictions(
        tmp_path, "dev", task.predict([output[:4], output[:3]], task.features(tokenizer, dev, DATA), dev), dev
    )
    assert only.name == "dev.conll"


def test_plain_tags_stay_what_they_are_in_a_file_whose_tags_look_like_spans(tmp_path):
    write_columns(tmp_path, "train", "a S\nb O\nc N")
    write_columns(tmp_path, "dev", "a S\nb O")
    task = find_task("ner").fit(find_task("ner").read(tmp_path, "train"))
    dev = task.read(tmp_path, "dev")
    assert (dev.tags, dev.scheme) == ([["S", "O"]], "plain")
    [path] = task.write_predictions(tmp_path, "dev", Tagged([["N", "O"]], [[1.0, 1.0]]), dev)
    assert path.read_text() == "a S N\nb O O\n\n"


def test_an_unknown_word_has_the_most_frequent_tag_of_all_words(tmp_path):
    write_columns(tmp_path, "train", "a DT\na DT\na DT\nb NN\nc NN")
    write_columns(tmp_path, "dev", "z DT")
    task = find_task("ner").fit(find_task("ner").read(tmp_path, "train"))
    assert task.baseline_scores(task.read(tmp_path, "dev")) == {"accuracy": 1.0}


def test_original_names_of_conll_2003_and_wnut_17(tmp_path):
    for names in (("eng.train", "eng.testa", "eng.testb"),
                  ("wnut17train.conll", "emerging.dev.conll", "emerging.test.annotated")):  # fmt: skip
        folder = tmp_path / names[0]
        folder.mkdir()
        for name in names:
            (folder / name).write_text("a\tO\n" if name.startswith(("wnut", "emer")) else "a NN I-NP O\n")
        task = find_task("conll2003")
        assert task.splits(folder) == ["train", "dev", "test"]
        assert all(task.read(folder, split).labelled for split in task.splits(folder))


def test_test_files_of_multiple_choice_may_have_the_answers(tmp_path):
    task = find_task("swag")
    header = "sent1,sent2,ending0,ending1"
    (tmp_path / "test.csv").write_text(f"{header}\na,b,c,d\n")
    assert not task.read(tmp_path, "test").labelled
    (tmp_path / "test.csv").write_text(f"{header},label\na,b,c,d,1\n")
    assert task.read(tmp_path, "test").labels.tolist() == [1]
    for inputs in ("one", ("q", "a"), ("q", "a", " "), ("q", ["a"])):
        with pytest.raises(UserError, match="input 1"):
            task.examples_from_inputs([inputs])
    assert (
        task.examples_from_inputs([("q", ["a", "b"])]).choices == task.examples_from_inputs([("q", "a", "b")]).choices
    )


def test_settings_reach_the_task_and_are_checked():
    data = dataclasses.replace(DATA, dir="x")
    answers, tags = TaskDataConfig(n_best_size=3, max_answer_length=7), TaskDataConfig(invalid_tags="count")
    task = make_task(FinetuneConfig(task="squad2", data=answers))
    assert (task.n_best_size, task.max_answer_length, task.null_score_diff_threshold) == (3, 7, None)
    assert make_task(FinetuneConfig(task="wnut17", data=tags)).may_be_broken
    with pytest.raises(UserError, match=r"data\.max_answer_length is set.*squad2"):
        make_task(FinetuneConfig(task="wnut17", data=answers))
    wrong = {"invalid_tags": "skip", "misaligned_answers": "no", "n_best_size": 0, "doc_stride": 0,
             "max_query_length": 0, "max_answer_length": 0, "null_score_diff_threshold": float("nan")}  # fmt: skip
    for name, value in wrong.items():
        with pytest.raises(UserError, match=f"data.{name} is"):
            dataclasses.replace(data, **{name: value}).check()


def test_published_models_are_asked_by_their_head():
    assert published_task("token_classification", "X", ("O", "B-PER"), None) == TokenClassificationTask(
        name="X", labels=("O", "B-PER")
    )
    assert published_task("question_answering", "X", (), None) == QuestionAnsweringTask(name="X", version="1.1")
    assert published_task("multiple_choice", "X", (), None).kind == "multiple_choice"
    assert published_task("sequence_classification", "X", ("a", "b"), None).output_names == ("a", "b")
    assert published_task(None, "X", (), None) is None


def test_the_training_words_tell_how_texts_are_split(tmp_path):
    write_columns(tmp_path, "train", "Ann B-X\n's O\ncat O")
    task = find_task("ner").fit(find_task("ner").read(tmp_path, "train"))
    data = task.to_config(TaskDataConfig())
    assert data.clitics == ["'s"]
    again = find_task("ner").from_config(data)
    assert again.examples_from_inputs(["Ann's cat"]).words == [["Ann", "'s", "cat"]]
    old = find_task("ner").from_config(TaskDataConfig(labels=["O", "B-X", "I-X"]))  # of a run without the setting
    old = old.fit(old.read(tmp_path, "train"))
    assert old.to_config(TaskDataConfig()).clitics == []
    assert old.examples_from_inputs(["Ann's cat"]).words == [["Ann's", "cat"]]
    assert published_task("token_classification", "x", ("O", "B-X"), None).examples_from_inputs(["Ann's"]).words == [
        ["Ann", "'s"]
    ]


def test_inputs_may_be_lists_of_words(tokenizer):
    task = dataclasses.replace(find_task("ner"), labels=("O", "B-X", "I-X"))
    asked = task.examples_from_inputs([["a b", "c"], "d e", ["\n", "f"], []])
    assert asked.words == [["a b", "c"], ["d", "e"], ["\n", "f"], []]
    assert (asked.texts[0], asked.spans[0]) == ("a b c", [(0, 3), (4, 5)])
    rows = task.features(tokenizer, asked, DATA)
    assert len(task.format_predictions(task.predict([np.zeros((9, 3), np.float32)] * 3, rows, asked), asked)) == 4
    for inputs in (["a", ""], ["a", 3], 3, None):
        with pytest.raises(UserError, match=r"input 1 is .* a list of words"):
            task.examples_from_inputs([inputs])


def test_types_that_are_never_predicted_are_named(tmp_path, tokenizer):
    write_columns(tmp_path, "train", "a B-X\nb I-X\nc O\nd B-Y\ne I-Y")
    task = find_task("ner").fit(find_task("ner").read(tmp_path, "train"))
    train = task.read(tmp_path, "train")
    rows = task.features(tokenizer, train, DATA)
    never, baseline = task.remarks(task.predict(logits_of(rows, task.labels, "I-X I-X O O O"), rows, train), train)
    assert never == "label 'Y' never predicted"
    assert baseline.startswith("no better than the baseline commonest tag: f1 0.6667 against 1.0000")


def test_neighbours_of_one_type_without_prefixes_are_an_entity() -> None:
    """Entities are grouped like aggregation_strategy "simple" of transformers' pipeline."""
    task = published_task("token_classification", "x", ("O", "PER", "CREATIVE-WORK"), None)
    sentences = task.examples_from_inputs(["Ada Lovelace reads Dune Dune"])
    tags = [["PER", "PER", "O", "CREATIVE-WORK", "CREATIVE-WORK"]]
    [answer] = task.format_predictions(Tagged(tags, [[0.5, 1.0, 1.0, 0.5, 0.5]]), sentences)
    assert [(entity["type"], entity["text"], entity["probability"]) for entity in answer.entities] == [
        ("PER", "Ada Lovelace", 0.75),
        ("CREATIVE-WORK", "Dune Dune", 0.5),
    ]
    speech = published_task("token_classification", "x", ("NOUN", "VERB"), None)
    [words] = speech.format_predictions(Tagged([["NOUN", "NOUN"]], [[1.0, 1.0]]), speech.examples_from_inputs(["a b"]))
    assert [word["tag"] for word in words.words] == ["NOUN", "NOUN"]


@pytest.mark.parametrize("labels", ["O U-X B-X I-X L-X", "O X", "X-B X-I O", "o b-X i-X"])
def test_published_labels_of_other_schemes_give_entities(tokenizer, labels):
    task = published_task("token_classification", "m", tuple(labels.split()), None)
    asked = task.examples_from_inputs(["a b"])
    rows = task.features(tokenizer, asked, DATA)
    predictions = task.predict(
        logits_of(rows, task.labels, f"{labels.split()[1]} {task.labels[task.tags.index('O')]}"), rows, asked
    )
    [answer] = task.format_predictions(predictions, asked)
    assert [(entity["type"], entity["text"]) for entity in answer.entities] == [("X", "a")]
