"""`data.calibration` from a fine-tuning run to its exports, and answers with a minimum confidence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from scipy.special import softmax
from sklearn.metrics import log_loss

import bert
from bert.commands.predictions import predict_command
from bert.config import FinetuneConfig, TaskDataConfig
from bert.errors import UserError
from bert.metrics.calibration import TEMPERATURES
from bert.tasks import find_task, make_task
from tests.helpers import results_of, run

TEXTS = ["ba ri tu", "ko ri", "ba ba ko", "tu ri ko", "ri"]


def copied(finetuned: Path, folder: Path) -> Path:
    shutil.copytree(finetuned, folder)
    return folder


def logits_and_labels(model: bert.Pretrained, data: Path) -> tuple[np.ndarray, np.ndarray]:
    task = model.require_task()
    dev = task.read(data, "dev")
    return np.array(model.outputs(task.features(model.tokenizer, dev, model.data))), dev.known_labels


def of_label(answers: list) -> np.ndarray:
    return np.array([list(answer.probabilities.values()) for answer in answers])


@pytest.fixture(scope="module")
def calibrated(finetuned: Path, sst2: Path, pretrained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The finished run, repeated with ``data.calibration``, which fits the temperature and trains no step."""
    folder = copied(finetuned, tmp_path_factory.mktemp("calibrated") / "run")
    arguments = ["--data.max_length=32", "--data.buckets=32", "--training.batch_size=8"]
    assert run(folder, sst2, f"--init={pretrained}", *arguments, "--data.calibration=temperature") == 0
    return folder


def test_the_temperature_is_fitted_on_dev_and_changes_no_label(calibrated: Path, finetuned: Path, sst2: Path) -> None:
    results, before = results_of(calibrated), results_of(finetuned)
    temperature = results["tuned"]["calibration"]
    assert results["dev"] == before["dev"] and results["steps"] == before["steps"]
    assert (calibrated / "predictions" / "reliability.png").is_file()
    model = bert.load(calibrated)
    logits, labels = logits_and_labels(model, sst2)

    def loss(divisor: float) -> float:
        return float(log_loss(labels, softmax(logits.astype(np.float64) / divisor, axis=1)))

    near = np.clip(temperature * np.array([0.98, 1.02]), *TEMPERATURES)
    assert temperature != 1 and loss(temperature) <= min(map(loss, (1, *near))) + 1e-6
    written = [line.split("\t") for line in (calibrated / "predictions" / "dev.tsv").read_text().splitlines()[1:]]
    shares = softmax(logits / temperature, axis=1).max(axis=1)
    assert [float(line[-1]) for line in written] == pytest.approx(shares, abs=2e-6)
    details, scored = results["details"]["dev"], model.evaluate("dev")
    assert scored.calibration is not None and details["calibration"]["ece"] == scored.calibration.ece
    assert details["confusion_matrix"] == before["details"]["dev"]["confusion_matrix"]


def test_exports_have_the_probabilities_of_the_run(calibrated: Path, finetuned: Path, tmp_path: Path) -> None:
    model = bert.load(calibrated)
    model.save(tmp_path / "hf")
    expected = of_label(model.predict(TEXTS))
    exported = bert.load(tmp_path / "hf")
    np.testing.assert_allclose(of_label(exported.predict(TEXTS)), expected, rtol=1e-5)
    assert np.abs(of_label(bert.load(finetuned).predict(TEXTS)) - expected).max() > 1e-4
    again = bert.load(calibrated).save  # the loaded model itself stays as it is
    again(tmp_path / "twice")
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("hf", "twice")]
    assert weights[0] == weights[1]


def test_the_model_abstains_below_the_minimum_confidence(finetuned: Path, tmp_path: Path, capsys) -> None:
    model = bert.load(finetuned)
    answers = model.predict(TEXTS)
    shares = of_label(answers).max(axis=1)
    least = float(np.sort(shares)[2])
    sure = model.predict(TEXTS, min_confidence=least)
    assert [answer.label for answer in sure] == [
        answer.label if share >= least else None for answer, share in zip(answers, shares, strict=True)
    ]
    assert [answer.probabilities for answer in sure] == [answer.probabilities for answer in answers]
    assert model.predict(TEXTS[0], min_confidence=1.0).label is None
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS) + "\n")
    capsys.readouterr()
    assert predict_command([str(finetuned), str(tmp_path / "texts.txt"), "--min_confidence", str(least)]) == 0
    out, error = capsys.readouterr()
    lines = [json.loads(line) for line in out.splitlines()]
    answered_count = sum(answer.label is not None for answer in sure)
    assert f"{answered_count} of {len(TEXTS)} inputs" in error and "bert evaluate --min_confidence" in error
    assert [line["label"] for line in lines] == [answer.label for answer in sure]
    rows = [{"text": text, "label": answer.label} for text, answer in zip(TEXTS, answers, strict=True)]
    rows[0]["label"] = "negative" if rows[0]["label"] == "positive" else "positive"
    scored = model.evaluate(rows, min_confidence=least)
    answered = shares >= least
    assert scored.answered is not None
    assert scored.answered.coverage == answered.mean()
    assert scored.answered.accuracy == pytest.approx(1 - answered[0] / answered.sum())
    assert f"probability of at least {least:g}: {answered.mean():.1%} of the rows, with accuracy" in str(scored)


@pytest.mark.parametrize("value", [1.5, -0.1, True, "0.8"])
def test_a_confidence_that_is_no_probability_is_an_error(finetuned: Path, value: object) -> None:
    with pytest.raises(UserError, match=r"min_confidence.*from 0 to 1"):
        bert.load(finetuned).predict(TEXTS, min_confidence=value)  # type: ignore[arg-type]


@pytest.mark.parametrize("task", ["regression", "ner", "squad"])
def test_other_tasks_neither_calibrate_nor_abstain(task: str) -> None:
    config = FinetuneConfig(task=task, data=TaskDataConfig(dir="data", calibration="temperature"))
    with pytest.raises(UserError, match=rf"data\.calibration is temperature.*{task}"):
        make_task(config)
    with pytest.raises(UserError, match="min_confidence"):
        find_task(task).with_answer_settings({"min_confidence": 0.5})


def test_a_temperature_that_is_not_positive_is_an_error() -> None:
    with pytest.raises(UserError, match=r"data\.calibration is 0"):
        TaskDataConfig(dir="data", calibration=0.0).check()
