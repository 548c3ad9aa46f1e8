"""The nine tasks of GLUE in their original layouts, and the lexical baseline: reading, scoring, writing and errors."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from bert.errors import UserError
from bert.tasks import TASKS
from bert.tasks.sequence_classification import ClassificationPredictions, Examples, Label, Score, glue, lexical_baseline
from tests.helpers import LAYOUTS
from tests.messages import has_all


def made(folder: Path, name: str, **changed: str) -> Path:
    """The files of a task; ``changed`` replaces some by the stem of their names."""
    for file, (content, *_) in LAYOUTS[name].items():
        (folder / file).write_text(changed.get(file.removesuffix(".tsv"), content), encoding="utf-8")
    return folder


def error_of(folder: Path, name: str, split: str = "train") -> str:
    with pytest.raises(UserError) as caught:
        TASKS[name].read(folder, split)
    return str(caught.value)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_split_of_the_original_layout_is_read(tmp_path: Path, name: str) -> None:
    task = TASKS[name]
    splits = task.splits(made(tmp_path, name))
    assert len(splits) == len(LAYOUTS[name])
    for split, (_, texts_a, texts_b, last) in zip(splits, LAYOUTS[name].values(), strict=True):
        examples = task.read(tmp_path, split)
        assert (examples.texts_a, examples.texts_b) == (texts_a, texts_b)
        assert examples.labelled == (split not in task.submissions)
        assert (examples.labels.tolist() if examples.labelled else examples.ids) == last
        assert list(examples.sentences()) == texts_a + (texts_b or [])


def test_all_nine_are_there_and_eleven_files_are_handed_in() -> None:
    assert set(LAYOUTS) == {task.name for task in glue.TASKS}
    assert set(glue.SUBMISSIONS) == {
        "CoLA.tsv", "SST-2.tsv", "MRPC.tsv", "STS-B.tsv", "QQP.tsv", "MNLI-m.tsv", "MNLI-mm.tsv", "QNLI.tsv",
        "RTE.tsv", "WNLI.tsv", "AX.tsv",
    }  # fmt: skip


def test_train_and_dev_are_needed_and_the_rest_is_taken_where_it_is(tmp_path: Path) -> None:
    made(tmp_path, "mnli")
    for name in ("dev_mismatched", "test_matched", "AX", "dev_matched"):
        (tmp_path / f"{name}.tsv").unlink()
    assert TASKS["mnli"].splits(tmp_path) == ["train", "dev", "test_mismatched"]
    assert "has no dev_matched.tsv: set data.dir" in error_of(tmp_path, "mnli", "dev")


@pytest.mark.parametrize("place", ["AX/AX.tsv", "diagnostic/diagnostic.tsv"])
def test_the_diagnostic_set_lies_beside_mnli(tmp_path: Path, place: str) -> None:
    (tmp_path / "MNLI").mkdir()
    made(tmp_path / "MNLI", "mnli")
    (tmp_path / place).parent.mkdir()
    (tmp_path / "MNLI" / "AX.tsv").rename(tmp_path / place)
    for folder in (tmp_path, tmp_path / "MNLI"):
        assert TASKS["mnli"].read(folder, "diagnostic").texts_b == ["l"]


def test_cola_with_a_header_is_read_too(tmp_path: Path) -> None:
    made(tmp_path, "cola", train="sentence\tlabel\nThey ran.\t1\n")
    assert TASKS["cola"].read(tmp_path, "train").texts_a == ["They ran."]


def test_short_rows_of_qqp_are_left_out_and_told_but_not_in_test(tmp_path: Path) -> None:
    train = LAYOUTS["qqp"]["train.tsv"][0] + "7\t1\t2\thalf a question\n8\t3\t4\tx\ty\t0\n"
    examples = TASKS["qqp"].read(made(tmp_path, "qqp", train=train), "train")
    assert (examples.texts_a, examples.labels.tolist()) == (["a", "x"], [1, 0])
    assert examples.notes == (f"{tmp_path / 'train.tsv'}: 1 row of too few columns left out (line 3)",)
    made(tmp_path, "qqp", test="id\tquestion1\tquestion2\n0\te\n")
    assert has_all(error_of(tmp_path, "qqp", "test"), "test.tsv, line 2: 2 columns", "header has 3")
    made(tmp_path, "rte", train=LAYOUTS["rte"]["train.tsv"][0] + "1\tx\n")
    assert has_all(error_of(tmp_path, "rte"), "train.tsv, line 3: 2 columns", "header has 4")


def test_empty_lines_within_questions_of_qqp_are_short_rows(tmp_path: Path) -> None:
    """A question with line feeds is a short row, empty lines, and a short row."""
    header, row = LAYOUTS["qqp"]["train.tsv"][0].splitlines()
    broken = "7\t1\t2\ta\n\n\r\nb\tc\t1\n"
    made(tmp_path, "qqp", train=f"{header}\n{row}\n{broken}8\t3\t4\tx\ty\t0\n\n\n")
    examples = TASKS["qqp"].read(tmp_path, "train")
    assert (examples.texts_a, examples.labels.tolist()) == (["a", "x"], [1, 0])
    assert examples.notes == (f"{tmp_path / 'train.tsv'}: 4 rows of too few columns left out (line 3, 4, 5, 6)",)
    made(tmp_path, "qqp", train=f"\n{header}\n{row}\n")
    assert "train.tsv, line 1: the line is empty" in error_of(tmp_path, "qqp")
    made(tmp_path, "qqp", test="id\tquestion1\tquestion2\n0\te\tf\n\n1\tg\th\n")
    assert "test.tsv, line 3: the line is empty" in error_of(tmp_path, "qqp", "test")
    made(tmp_path, "rte", train=LAYOUTS["rte"]["train.tsv"][0] + "\n1\tx\ty\tentailment\n")
    assert "train.tsv, line 3: the line is empty" in error_of(tmp_path, "rte")


@pytest.mark.parametrize(
    ("name", "old", "new", "words"),
    [
        ("cola", "\t0\t*", "\t2\t*", "train.tsv, line 2: label is '2', but the labels are '0', '1': fix it"),
        ("cola", "\t*\tThem", "\tThem", "train.tsv, line 2: 3 columns where the original has 4"),
        (
            "stsb",
            "3.800",
            "5.001",
            "train.tsv, line 2: score is '5.001': out of range, but stsb has scores from 0 to 5",
        ),
        ("stsb", "3.800", "-0.1", "score is '-0.1': out of range"),
        ("stsb", "3.800", "nan", "score is 'nan': out of range"),
        ("stsb", "3.800", "high", "score is 'high': not a number, but stsb has scores from 0 to 5"),
        ("mnli", "neutral\n", "-\n", "gold_label is '-', but the labels are 'entailment', 'neutral', 'contradiction'"),
        ("rte", "not_entailment", "1", "label is '1', but the labels are 'entailment', 'not_entailment'"),
        ("rte", "\ta\tb\t", "\t\tb\t", "train.tsv, line 2: sentence1 is empty: write it or remove the line"),
        ("rte", "\ta\tb\t", "\ta\t \t", "train.tsv, line 2: sentence2 is empty"),
        ("qnli", "q?", "", "train.tsv, line 2: question is empty"),
        ("qnli", "question", "query", "train.tsv, line 1: no 'question' among 'index', 'query'"),
    ],
)
def test_what_is_wrong_is_one_sentence_with_file_and_line(tmp_path: Path, name, old, new, words) -> None:
    message = error_of(made(tmp_path, name, train=LAYOUTS[name]["train.tsv"][0].replace(old, new)), name)
    assert words in message
    assert message.startswith(str(tmp_path))
    assert "\n" not in message


def test_ids_that_are_there_twice_are_refused(tmp_path: Path) -> None:
    made(tmp_path, "wnli", test=LAYOUTS["wnli"]["test.tsv"][0] + "1\tx\ty\n0\tx\ty\n")
    assert "test.tsv, line 4: index '0' is on line 2 already" in error_of(tmp_path, "wnli", "test")


@pytest.mark.parametrize(
    ("name", "more", "words"),
    [
        ("rte", "5\tx\ty\tentailment\n5\tx\ty\tentailment\n", "dev.tsv, line 4: index '5' is on line 3 already: "),
        ("qqp", "5\t1\t2\tx\ty\t0\n5\t3\t4\tv\tw\t1\n", "dev.tsv, line 4: id '5' is on line 3 already: "),
    ],
)
def test_ids_of_labelled_rows_that_are_there_twice_are_refused(tmp_path: Path, name, more, words) -> None:
    message = error_of(made(tmp_path, name, dev=LAYOUTS[name]["dev.tsv"][0] + more), name, "dev")
    assert words + "give each row its own id, or copy the file again" in message


def test_labelled_files_without_ids_are_read(tmp_path: Path) -> None:
    made(tmp_path, "rte", dev="sentence1\tsentence2\tlabel\na\tb\tentailment\na\tb\tentailment\n")
    assert TASKS["rte"].read(tmp_path, "dev").ids == ["0", "1"]
    # MRPC's original has the same sentence, with its number, in several pairs.
    made(tmp_path, "mrpc", dev=LAYOUTS["mrpc"]["dev.tsv"][0] + "1\t9\t8\te\td\n")
    assert TASKS["mrpc"].read(tmp_path, "dev").texts_b == ["d", "d"]


def test_empty_questions_of_qqp_are_the_originals_own(tmp_path: Path) -> None:
    train = LAYOUTS["qqp"]["train.tsv"][0] + "7\t1\t2\tHow?\t\t0\n"
    assert TASKS["qqp"].read(made(tmp_path, "qqp", train=train), "train").texts_b == ["b", ""]
    made(tmp_path, "rte", test="index\tsentence1\tsentence2\n0\te\tf\n1\t\tf\n")
    assert "test.tsv, line 3: sentence1 is empty" in error_of(tmp_path, "rte", "test")


def test_words_and_numbers_of_the_official_files(tmp_path: Path) -> None:
    unlabelled = Examples(["x", "y", "z"], ["x", "y", "z"], None, ["4", "5", "6"])
    chosen = ClassificationPredictions(np.array([2, 0, 1]), np.eye(3)[[2, 0, 1]])
    for split, name in (("test", "MNLI-m.tsv"), ("test_mismatched", "MNLI-mm.tsv"), ("diagnostic", "AX.tsv")):
        path, _ = TASKS["mnli"].write_predictions(tmp_path, split, chosen, unlabelled)
        assert path == tmp_path / name
        assert path.read_bytes() == b"index\tprediction\n4\tcontradiction\n5\tentailment\n6\tneutral\n"
    [path] = TASKS["stsb"].write_predictions(tmp_path, "test", np.array([5.25, -0.5, 2.5]), unlabelled)
    assert path.name == "STS-B.tsv"
    assert path.read_bytes() == b"index\tprediction\n4\t5.000000\n5\t0.000000\n6\t2.500000\n"
    labelled = Examples(["x"], ["x"], np.array([3.8], np.float32), ["0"])
    [path] = TASKS["stsb"].write_predictions(tmp_path, "dev", np.array([5.25]), labelled)
    assert path.read_bytes() == b"index\tprediction\tscore\n0\t5.250000\t3.8\n"
    with pytest.raises(ValueError, match="1 rows, 2 predictions"):
        TASKS["stsb"].write_predictions(tmp_path, "dev", np.zeros(2), labelled)


def test_outputs_become_predictions_scores_and_answers() -> None:
    examples = Examples(["x", "y"], ["x", "y"], np.array([1.0, 3.0], np.float32), ["0", "1"])
    scores = TASKS["stsb"].predict([np.array([2.0]), np.array([7.0])], None, examples)
    assert TASKS["stsb"].score(scores, examples) == {"pearson": pytest.approx(1), "spearman": pytest.approx(1)}
    assert TASKS["stsb"].format_predictions(scores, examples) == [Score(2.0), Score(5.0)]
    assert TASKS["stsb"].baseline_scores(examples) == {"pearson": 0, "spearman": 0}
    classified = TASKS["cola"].predict([np.log([3.0, 1.0]), np.log([0.5, 0.5])], None, examples)
    assert classified.labels.tolist() == [0, 0]
    assert TASKS["cola"].format_predictions(classified, examples)[0] == Label(
        "unacceptable", {"unacceptable": pytest.approx(0.75), "acceptable": pytest.approx(0.25)}
    )


def test_scores_that_differ_are_not_written_alike(tmp_path: Path) -> None:
    """Ties change Spearman's correlation, which the leaderboard takes of the file."""
    scores = np.linspace(2.5, 2.501, 100, dtype=np.float32)
    rows = Examples(["x"] * 100, ["y"] * 100, None, [str(row) for row in range(100)])
    [path] = TASKS["stsb"].write_predictions(tmp_path, "test", scores, rows)
    written = [float(line.split("\t")[1]) for line in path.read_text().splitlines()[1:]]
    assert len(set(written)) == 100
    np.testing.assert_allclose(written, scores, atol=1e-6)


@pytest.mark.parametrize("worst", [np.nan, np.inf, -np.inf])
def test_a_run_that_has_diverged_answers_numbers(tmp_path: Path, worst: float) -> None:
    """JSON and the leaderboard do not support nan."""
    stsb, cola = TASKS["stsb"], TASKS["cola"]
    rows = Examples(["x", "y"], ["x", "y"], None, ["0", "1"])
    scores = stsb.predict([np.array([worst], np.float32), np.array([2.0], np.float32)], None, rows)
    assert np.isfinite(scores).all()
    assert scores[1] == 2
    [path] = stsb.write_predictions(tmp_path, "test", scores, rows)
    assert path.read_text().splitlines()[1:] == [f"0\t{5 if worst == np.inf else 0}.000000", "1\t2.000000"]
    single = Examples(["x", "y"], None, None, ["0", "1"])
    predictions = cola.predict([np.array([worst, worst], np.float32), np.log([1.0, 3.0])], None, single)
    np.testing.assert_allclose(predictions.probabilities, [[0.5, 0.5], [0.25, 0.75]])
    predictions = cola.predict([np.array([worst, 0], np.float32)], None, single)
    np.testing.assert_allclose(predictions.probabilities.sum(-1), 1)
    assert json.dumps(
        [stsb.format_predictions(scores, rows), cola.format_predictions(predictions, single)], allow_nan=False
    )


def test_collapsed_runs_are_known_by_one_label_or_a_score_no_better_than_the_majority_class() -> None:
    def collapsed(name: str, predicted: list[int], labels: list[int]) -> bool:
        examples = Examples(["x"] * len(labels), None, np.array(labels, np.int32), [])
        return TASKS[name].is_degenerate(ClassificationPredictions(np.array(predicted), np.eye(2)[predicted]), examples)

    labels = [1, 1, 1, 0]
    assert collapsed("cola", [1, 1, 1, 1], labels)
    assert collapsed("rte", [0, 0, 0, 0], labels)
    assert collapsed("mrpc", [1, 1, 0, 1], labels)  # F1 2/3, below the majority class's 6/7
    assert not collapsed("mrpc", [1, 1, 1, 0], labels)
    assert not collapsed("rte", [1, 1], [1, 1])  # nothing else can be right
    assert not collapsed("mrpc", [0, 0], [0, 0])
    # As many rows as MRPC's dev set: accuracy 0.750 against 0.684, and F1 0.8118 against 0.8123.
    better = [1] * 220 + [0] * 59 + [1] * 43 + [0] * 86
    assert not collapsed("mrpc", better, [1] * 279 + [0] * 129)
    assert collapsed("mrpc", [0, *[1] * 407], [1] * 279 + [0] * 129)
    flat = Examples(["x"] * 3, None, np.array([0, 1, 2], np.float32), [])
    assert TASKS["stsb"].is_degenerate(np.full(3, 2.5), flat)
    assert TASKS["stsb"].is_degenerate(np.array([2.0, 1.0, 0.0]), flat)
    assert not TASKS["stsb"].is_degenerate(np.array([0.0, 1.0, 1.0]), flat)


def test_lines_of_new_inputs() -> None:
    assert TASKS["cola"].parse_line("a\tb") == "a\tb"
    assert TASKS["rte"].parse_line("a\tb") == ("a", "b")
    assert TASKS["rte"].input_fields(("a", "b")) == {"text_a": "a", "text_b": "b"}
    with pytest.raises(ValueError, match=r"1 column\(s\).*task needs 2: write text_a, text_b"):
        TASKS["rte"].parse_line("a")
    with pytest.raises(ValueError, match="empty"):
        TASKS["rte"].parse_line("a\t ")
    with pytest.raises(UserError, match=r"input 2 is .a."):
        TASKS["rte"].examples_from_inputs([("a", "b"), "a"])


TEXTS = ["red rose", "red wine", "blue sky", "blue sea"] * 5


def examples(labels: list[float], dtype: type, pairs: bool = False) -> Examples:
    rows = [str(row) for row in range(len(TEXTS))]
    return Examples(TEXTS, TEXTS if pairs else None, np.array(labels * 5, dtype), rows)


def test_classification_reads_words() -> None:
    train = examples([0, 0, 1, 1], np.int32)
    name, scores = lexical_baseline(TASKS["sst2"], train, train)
    assert (name, scores["accuracy"]) == ("tf_idf_logistic_regression", 1.0)


def test_regression_reads_words_of_pairs() -> None:
    train = examples([0.0, 1.0, 4.0, 5.0], np.float32, pairs=True)
    name, scores = lexical_baseline(TASKS["stsb"], train, train)
    assert name == "tf_idf_ridge_regression"
    assert scores["pearson"] == pytest.approx(1.0, abs=0.05)


def test_pairs_are_compared_word_by_word() -> None:
    """The score is the number of words that two texts share, whichever they are."""
    rng = np.random.default_rng(0)
    drawn = [rng.permutation([f"word{number}" for number in range(200)])[:12] for _ in range(200)]
    shared = rng.integers(0, 7, 200)
    firsts = [" ".join(words[:6]) for words in drawn]
    seconds = [" ".join([*words[:n], *words[6 : 12 - n]]) for words, n in zip(drawn, shared, strict=True)]
    rows = Examples(firsts, seconds, shared.astype(np.float32), [str(row) for row in range(200)])
    scores = lexical_baseline(TASKS["stsb"], rows.take(range(150)), rows.take(range(150, 200)))[1]
    assert scores["spearman"] > 0.9


def test_other_tasks_have_none() -> None:
    assert lexical_baseline(TASKS["squad2"], None, None) is None


def test_without_words_or_with_one_label_there_is_none() -> None:
    train = examples([0, 0, 1, 1], np.int32)
    letters = dataclasses.replace(train, texts_a=["M K T A"] * len(TEXTS))
    assert lexical_baseline(TASKS["sst2"], letters, letters) is None
    assert lexical_baseline(TASKS["sst2"], examples([1, 1, 1, 1], np.int32), train) is None
