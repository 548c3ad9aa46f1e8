"""`bert evaluate --cross_validate`: folds, planted wrong labels, and errors."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from bert.commands import main
from bert.errors import UserError
from bert.metrics.confident_learning import find_doubtful_labels
from bert.training.finetuning.cross_validation import fold_rows
from tests.helpers import results_of, run

ROWS, WRONG = 160, 16


def test_folds_are_stratified_and_keep_equal_texts_together() -> None:
    labels, texts = np.array([0, 1] * 20 + [1] * 20), [f"text {row % 50}" for row in range(60)]
    folds = [set(fold.tolist()) for fold in fold_rows(labels, texts, 4, 0, ["a", "b"])]
    assert sorted(row for fold in folds for row in fold) == list(range(60))
    assert all({row, row + 50} <= fold or not {row, row + 50} & fold for fold in folds for row in range(10))
    assert all(4 <= sum(labels[row] == 0 for row in fold) <= 6 for fold in folds)
    same, other = ([fold.tolist() for fold in fold_rows(labels, texts, 4, seed, ["a", "b"])] for seed in (0, 1))
    assert [sorted(fold) for fold in same] == [sorted(fold) for fold in folds] != [sorted(fold) for fold in other]


def test_a_label_without_rows_needs_none_in_a_fold() -> None:
    labels = np.array([0, 0, 1, 1, 0, 1])
    assert len(list(fold_rows(labels, list("abcdef"), 2, 0, ["a", "b", "unused"]))) == 2
    found = find_doubtful_labels(np.tile([0.2, 0.1, 0.7], (6, 1)), labels)
    assert 2 not in found.suggested


@pytest.mark.parametrize(("folds", "words"), [(1, "is 1"), (99, "is 99"), (3, "label 'rare' has 1 rows")])
def test_folds_that_cannot_be_made_are_an_error(folds: int, words: str) -> None:
    with pytest.raises(UserError, match=words):
        list(fold_rows(np.array([0] * 9 + [1]), list("abcdefghij"), folds, 0, ["usual", "rare"]))


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, set[int]]:
    """A file in which a word decides the label, with ten percent wrong labels, and the lines of these."""
    folder, random = tmp_path_factory.mktemp("planted"), np.random.default_rng(0)
    wrong = set(random.choice(ROWS, WRONG, replace=False).tolist())
    rows = []
    for row in range(ROWS):
        word, label = (("ba", "calm"), ("ko", "loud"))[row % 2]
        more = " ".join(random.choice(["ri", "tu"], 4))
        given = {"calm": "loud", "loud": "calm"}[label] if row in wrong else label
        rows.append(json.dumps({"text": f"{word} {more} {word} {row % 7 * 'tu '}{word}", "label": given}))
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n")
    return folder / "rows.jsonl", {row + 1 for row in wrong}


@pytest.fixture(scope="module")
def trained(pretrained: Path, planted: tuple[Path, set[int]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    arguments = [f"--init={pretrained}", f"--data.train={planted[0]}", f"--data.dev={planted[0]}"]
    learning = ["--optimizer.learning_rate=3e-3", "--training.epochs=12", "--training.eval_every=1000"]
    assert run(folder, planted[0].parent, *arguments, *learning, config="classification") == 0
    return folder


def test_planted_labels_are_found(trained: Path, planted: tuple[Path, set[int]], tmp_path: Path, capsys) -> None:
    file, wrong = planted
    before = sorted(path.name for path in trained.rglob("*"))
    assert main(["evaluate", str(trained), str(file), "--cross_validate", "3", f"--output_dir={tmp_path}"]) == 0
    out = capsys.readouterr().out
    header, *lines = [line.split("\t") for line in (tmp_path / "doubtful_labels.tsv").read_text().splitlines()]
    assert header == ["line", "label", "suggested_label", "probability", "suggested_probability", "text"]
    found = {int(line[0]) for line in lines}
    assert len(found & wrong) >= 0.9 * WRONG and len(found - wrong) <= 0.1 * len(found)
    shares = [float(line[3]) for line in lines]
    assert shares == sorted(shares)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for line, label, suggested, *_, text in lines:
        assert (label, text.split()) == (rows[int(line) - 1]["label"], rows[int(line) - 1]["text"].split())
        assert suggested != label
    results = results_of(tmp_path)
    assert (results["folds"], results["doubtful_labels"], results["rows"]) == (3, len(lines), ROWS)
    assert f"{len(lines)} doubtful labels" in out and "predicted in 3 folds" in out
    assert sorted(path.name for path in trained.rglob("*")) == before


def test_a_model_without_a_task_is_the_initial_model(pretrained: Path, planted, tmp_path: Path, capsys) -> None:
    """The recipe is classification, with two folds of eight rows."""
    lines = planted[0].read_text().splitlines()[:8]
    (tmp_path / "few.csv").write_text(
        "review,mood\n" + "\n".join(",".join(json.loads(line).values()) for line in lines)
    )
    names = ["--data.columns.text_a=review", "--data.columns.label=mood"]
    assert main(["evaluate", str(pretrained), str(tmp_path / "few.csv"), "--cross_validate=2", *names]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"8 rows of {tmp_path / 'few.csv'}, predicted in 2 folds") and "accuracy" in out
    assert Counter(out.split())["calm"] >= 2


def test_options_that_do_not_fit_are_an_error(finetuned: Path, tmp_path: Path, capsys) -> None:
    for option in ("--compare=x", "--batch_size=4", "--adapter=x"):
        assert main(["evaluate", str(finetuned), "dev", "--cross_validate=3", option]) == 2
        assert option.partition("=")[0] in capsys.readouterr().err
    assert main(["evaluate", str(finetuned), "dev", "--cross_validate=1"]) == 2
