"""`bert evaluate` and `model.evaluate`: scores of runs and of published folders, files, and the comparison of two."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binomtest
from sklearn.metrics import accuracy_score, matthews_corrcoef

import bert
from bert.commands import main
from bert.commands.language_models import evaluate_command
from bert.errors import UserError
from bert.inference.evaluation import Evaluation
from bert.tasks.sequence_classification.custom import CustomClassification
from tests.helpers import results_of
from tests.messages import has_all


@pytest.fixture(scope="module")
def model(finetuned: Path) -> bert.Pretrained:
    return bert.load(finetuned)


@pytest.fixture(scope="module")
def rows(model: bert.Pretrained) -> list[dict[str, str]]:
    """Thirty rows; every fifth label differs from the prediction."""
    texts = [f"{'ba' if row % 2 else 'ko'} ri {'tu ' * (row % 4)}" for row in range(30)]
    right = [answer.label for answer in model.predict(texts)]
    other = {"negative": "Positive", "positive": "Negative"}
    labels = [other[label] if row % 5 == 0 else label for row, label in enumerate(right)]
    return [{"text": text, "label": label} for text, label in zip(texts, labels, strict=True)]


def test_a_split_has_the_scores_of_the_run(finetuned: Path, model, tmp_path: Path, capsys) -> None:
    capsys.readouterr()
    assert main(["evaluate", str(finetuned), "dev", f"--output_dir={tmp_path}"]) == 0
    out, results, run = capsys.readouterr().out, results_of(tmp_path), results_of(finetuned)
    assert results["metrics"] == {name: run["dev"][name] for name in results["metrics"]}
    assert {**results["details"], "calibration": results["calibration"]} == run["details"]["dev"]
    assert out.startswith("17 rows of dev\n")
    assert f"accuracy  {run['dev']['accuracy']:.4f}  {results['intervals']['accuracy'][0]:.4f} to" in out
    assert (tmp_path / "errors.tsv").read_bytes() == (finetuned / "predictions" / "errors.tsv").read_bytes()
    assert model.evaluate("dev").metrics == results["metrics"]


def test_scores_are_those_of_scikit_learn(model, rows) -> None:
    result = model.evaluate(rows)
    assert isinstance(result, Evaluation)
    answers = [answer.label for answer in model.predict([row["text"] for row in rows])]
    labels = [row["label"].lower() for row in rows]
    assert result.rows == 30
    assert result.metrics == {"accuracy": accuracy_score(labels, answers)}
    assert result.metrics["accuracy"] == 24 / 30
    assert result.intervals["accuracy"].low < 0.8 < result.intervals["accuracy"].high
    assert sum(map(sum, result.details["confusion_matrix"])) == 30
    assert result.calibration is not None and sum(result.calibration.counts) == 30
    assert model.score(rows) == result.metrics


def test_a_published_folder_scores_the_same_rows(model, rows, tmp_path: Path, capsys) -> None:
    model.save(tmp_path / "hf")
    (tmp_path / "rows.csv").write_text("text,label\n" + "".join(f"{row['text']},{row['label']}\n" for row in rows))
    published = bert.load(tmp_path / "hf")
    result = published.evaluate(tmp_path / "rows.csv")
    answers = [answer.label for answer in published.predict([row["text"] for row in rows])]
    labels = [row["label"].lower() for row in rows]
    assert result.metrics["matthews"] == pytest.approx(matthews_corrcoef(labels, answers))
    assert set(result.metrics) == set(result.intervals) == {"accuracy", "f1", "macro_f1", "matthews"}
    (tmp_path / "stars.csv").write_text("text,label\nba,5\nko,1\n")
    assert main(["evaluate", str(tmp_path / "hf"), str(tmp_path / "stars.csv")]) == 2
    error = capsys.readouterr().err
    assert "stars.csv has the labels '1', '5', but the labels of" in error and "'negative', 'positive'" in error


def test_a_column_is_named_as_in_fine_tuning(finetuned: Path, rows, tmp_path: Path, capsys, fails) -> None:
    lines = [f"{row['text']}\t{row['label']}\n" for row in rows]
    (tmp_path / "rows.tsv").write_text("review\tmood\n" + "".join(lines))
    command = [str(finetuned), str(tmp_path / "rows.tsv"), "--data.columns.text_a=review"]
    assert "data.columns.label" in fails(evaluate_command, *command)
    capsys.readouterr()
    assert evaluate_command([*command, "--data.columns.label", "mood"]) == 0
    assert "accuracy  0.8000" in capsys.readouterr().out


def test_labels_of_a_run_are_matched_in_any_case_if_that_is_clear(model, rows, tmp_path: Path) -> None:
    names = ("Negative", "positive")
    run = dataclasses.replace(model, task=CustomClassification(labels=names, label_names=names))
    expected = model.evaluate(rows).metrics["accuracy"]
    assert run.evaluate(rows).metrics["accuracy"] == expected
    (tmp_path / "rows.csv").write_text("text,label\nba,NEGATIVE\nko,Positive\n")
    assert run.evaluate(tmp_path / "rows.csv").rows == 2
    (tmp_path / "rows.csv").write_text("text,label\nba,neutral\nko,positive\n")
    with pytest.raises(UserError) as caught:
        run.evaluate(tmp_path / "rows.csv")
    assert has_all(str(caught.value), "rows.csv", "'neutral'", "'Negative', 'positive'")
    assert "data.labels" not in str(caught.value)
    names = ("no", "No")  # the exact spelling decides, and a third one is ambiguous
    run = dataclasses.replace(model, task=CustomClassification(labels=names, label_names=names))
    assert run.evaluate([{"text": "ba", "label": "No"}, {"text": "ko", "label": "no"}]).rows == 2
    with pytest.raises(UserError, match="'NO'"):
        run.evaluate([{"text": "ba", "label": "NO"}])


def test_two_models_are_compared_on_the_same_rows(model, rows, tmp_path: Path, capsys) -> None:
    params = {**model.params, "classifier": {**model.params["classifier"]}}
    params["classifier"] = {name: -value for name, value in params["classifier"].items()}
    reverse = dataclasses.replace(model, params=params, source="reverse")
    result = model.evaluate(rows, compare=reverse)
    found = result.comparison
    assert found is not None and found.mcnemar is not None
    assert found.metrics["accuracy"] == pytest.approx(6 / 30)
    assert found.differences["accuracy"] == pytest.approx(18 / 30)
    assert found.intervals["accuracy"].low > 0
    assert found.mcnemar == (24, 6, binomtest(6, 30).pvalue)
    assert "McNemar's exact p-value: 0.00143" in str(result)
    assert found.details == reverse.evaluate(rows).details and found.calibration == reverse.evaluate(rows).calibration
    first, second = str(result).split("\nreverse:\n")
    assert all(part.count("expected calibration error") == part.count("label \\ prediction") == 1
               for part in (first, second))  # fmt: skip
    assert json.loads(json.dumps(result.results()))["comparison"]["details"] == found.details
    same = model.evaluate(rows, compare=model).comparison
    assert same is not None and same.mcnemar == (0, 0, 1) and same.intervals["accuracy"] == (0, 0)
    # A model with the labels in another order scores the same.
    model = dataclasses.replace(model, task=dataclasses.replace(model.task, metrics=("accuracy", "f1")))
    task = CustomClassification(labels=("positive", "negative"), label_names=("positive", "negative"))
    flipped = {name: value[..., ::-1] for name, value in model.params["classifier"].items()}
    other = dataclasses.replace(model, params={**model.params, "classifier": flipped}, task=task)
    again = model.evaluate(rows, compare=other).comparison
    assert again is not None and again.mcnemar == (0, 0, 1)
    assert set(again.differences.values()) == {0.0} and set(again.intervals.values()) == {(0, 0)}
    # One with a third label has no F1 of the second.
    task = CustomClassification(labels=("positive", "neutral", "negative"), label_names=("+", "0", "-"))
    wider = {name: np.insert(value, 1, -99 * (name == "bias"), axis=-1) for name, value in flipped.items()}
    third = dataclasses.replace(model, params={**model.params, "classifier": wider}, task=task)
    compared = model.evaluate(rows, compare=third).comparison
    assert compared is not None and "f1" not in compared.metrics
    assert set(compared.differences.values()) == {0.0} and compared.mcnemar == (0, 0, 1)


def test_files_are_written_for_other_rows(model, rows, tmp_path: Path, drawn) -> None:
    paths = model.evaluate(rows).write(tmp_path)
    assert [path.name for path in paths][:2] == ["results.json", "errors.tsv"]
    assert len((tmp_path / "errors.tsv").read_text().splitlines()) == 7
    assert json.loads((tmp_path / "results.json").read_text())["rows"] == 30


def test_invalid_data_is_one_sentence(finetuned: Path, pretrained: Path, tmp_path: Path, fails) -> None:
    (tmp_path / "empty.csv").touch()
    (tmp_path / "a.txt").write_text("the\n")
    for arguments, message in (
        ((str(finetuned), "half"), "no split 'half': name a file, or one of train, dev, test"),
        ((str(finetuned), "test"), "the split test"),
        ((str(finetuned), str(tmp_path / "none.csv")), "none.csv"),
        ((str(finetuned), str(tmp_path / "empty.csv")), "empty.csv is empty"),
        ((str(finetuned), str(tmp_path / "a.txt")), "a.txt has no rows"),
        ((str(finetuned), "dev", "--stride=3"), "--stride is for language models"),
        ((str(finetuned), "dev", "--batch_size=0"), "--batch_size is 0"),
        ((str(finetuned), "dev", f"--output_dir={tmp_path / 'a.txt'}"), "is a file: name a folder"),
        ((str(pretrained), "dev"), "dev"),
    ):
        assert message in fails(evaluate_command, *arguments)
    with pytest.raises(bert.UserError, match="not fine-tuned for a task"):
        bert.load(pretrained).evaluate([{"text": "a", "label": "b"}])


def test_embeddings_are_scored_by_their_neighbours(pretrained: Path) -> None:
    from bert.model.pooling import Pooling

    model = dataclasses.replace(bert.load(pretrained), pooling=Pooling(), source="encoder")
    pairs = [{"query": f"ba {'ri ' * row}", "positive": f"ko {'tu ' * row}"} for row in range(1, 5)]
    assert set(model.evaluate(pairs).intervals) == {"ndcg_at_10", "mrr_at_10", "recall_at_10"}
    texts = [{"text": text, "label": label} for text, label in (("ba", "x"), ("ba", "x"), ("ko tu", "y"), ("ko", "y"))]
    assert 0 <= model.evaluate(texts).metrics["accuracy"] <= 1
    scored = [{"text_a": "ba", "text_b": f"{'ko ' * row}", "score": row} for row in range(1, 5)]
    vectors = model.embed(["ba", *(pair["text_b"] for pair in scored)])
    cosines = vectors[1:] @ vectors[0] / np.linalg.norm(vectors[1:], axis=1)
    expected = np.corrcoef(cosines, [1, 2, 3, 4])[0, 1]
    assert model.evaluate(scored).metrics["pearson"] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("similarity", ["dot", "euclidean", "manhattan"])
def test_embeddings_are_scored_by_the_declared_similarity(similarity: str, pretrained: Path) -> None:
    from bert.model.pooling import Pooling

    model = dataclasses.replace(bert.load(pretrained), pooling=Pooling(similarity=similarity), source="encoder")
    rows = [("ba", "ko tu"), ("ri ba", "tu"), ("ko", "ba ri ko"), ("tu ri", "ri")]
    queries, documents = map(list, zip(*rows, strict=True))
    first = model.search(queries, documents, top_k=4).indices
    places = [row.tolist().index(number) for number, row in enumerate(first)]
    found = model.evaluate([{"query": query, "positive": document} for query, document in rows]).metrics
    assert found["mrr_at_10"] == pytest.approx(np.mean([1 / (1 + place) for place in places]), abs=1e-6)
    expected = np.corrcoef(np.diagonal(model.similarity(queries, documents)), range(4))[0, 1]
    scored = [{"text_a": query, "text_b": document, "score": row} for row, (query, document) in enumerate(rows)]
    assert model.evaluate(scored).metrics["pearson"] == pytest.approx(expected, abs=1e-4)
    similarities = model.similarity(queries, queries)
    np.fill_diagonal(similarities, -np.inf)
    labels = ["x", "y", "x", "y"]
    hits = [labels[number] == label for number, label in zip(similarities.argmax(axis=1), labels, strict=True)]
    texts = [{"text": text, "label": label} for text, label in zip(queries, labels, strict=True)]
    assert model.evaluate(texts).metrics["accuracy"] == pytest.approx(np.mean(hits))
