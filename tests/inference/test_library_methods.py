"""Library methods besides predictions: `bert.load` options, rows, outputs, similarity and scores."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bert
from bert.analysis.inspection import summarize
from bert.config import FinetuneConfig
from bert.config.yaml_io import load_config
from bert.errors import warn_once
from bert.model.pretraining import BertForPreTraining
from bert.runs.checkpoint import Checkpointer
from bert.tasks.sequence_classification import CustomClassification
from tests.helpers import REPOSITORY
from tests.tiny_models import CONFIG, model_of


def encode(module, **rows):
    """The encoder's outputs, for ``apply``."""
    return module.bert(**rows)


TEXTS = ["ba ko", "ri", ("ba", "tu ko ri")]


def test_a_step_of_a_run_is_loaded_by_number_or_by_name(pretrained: Path, finetuned: Path) -> None:
    with Checkpointer(pretrained / "checkpoints", None, print) as checkpoints:
        steps = checkpoints.steps()
    model = bert.load(pretrained, step=steps[0])
    assert (model.step, model.source) == (steps[0], str(pretrained))
    assert bert.load(f"{pretrained}@{steps[0]}").step == steps[0]
    step = bert.load(pretrained, step=np.int64(steps[0])).step  # as in a table of metrics
    assert step == steps[0] and type(step) is int
    with pytest.raises(bert.UserError, match="step is 'first': pass a whole number"):
        bert.load(model, adapter="adapter", step="first")
    with pytest.raises(bert.UserError, match="has no checkpoint of step 5"):
        bert.load(f"{pretrained}@5")
    with pytest.raises(bert.UserError, match="5000x does not exist: name the folder"):
        bert.load(f"{pretrained}@5000x")


def test_a_run_that_began_from_a_step_says_so(pretrained: Path, finetuned: Path, tmp_path: Path) -> None:
    config = load_config(FinetuneConfig, finetuned / "config.yaml")
    shutil.copytree(finetuned, tmp_path / "run")
    lines = (finetuned / "config.yaml").read_text().splitlines()
    changed = [f"init: {pretrained}@6" if line.startswith("init:") else line for line in lines]
    (tmp_path / "run" / "config.yaml").write_text("\n".join(changed) + "\n")
    assert config.init == str(pretrained)
    assert f"{pretrained}@6 (pretraining run)" in str(summarize(tmp_path / "run"))


@pytest.mark.medium
def test_bfloat16_computes_nearly_the_same(finetuned: Path) -> None:
    exact, rounded = bert.load(finetuned), bert.load(finetuned, dtype="bfloat16")
    embeddings = [model.embed(TEXTS) for model in (exact, rounded)]
    assert all(result.dtype == np.float32 for result in embeddings)
    assert 0 < np.abs(embeddings[0] - embeddings[1]).max() < 0.05
    answers = [model.predict(["ba ko", "ri"]) for model in (exact, rounded)]
    likely = [[max(answer.probabilities.values()) for answer in result] for result in answers]
    np.testing.assert_allclose(*likely, atol=0.02)
    encoded = [model.apply(**model.tokenize(TEXTS), method=encode) for model in (exact, rounded)]
    assert [result.pooled_output.dtype for result in encoded] == [jnp.float32, jnp.bfloat16]
    unrounded = bert.load(finetuned, dtype="bfloat16")
    unrounded.__dict__["_device_params"] = jax.device_put(unrounded.params)
    np.testing.assert_array_equal(unrounded.embed(TEXTS), embeddings[1])
    assert unrounded.predict(["ba ko", "ri"]) == answers[1]
    with pytest.raises(bert.UserError, match="dtype is 'float64': use float32 or bfloat16"):
        bert.load(finetuned, dtype="float64")


@pytest.mark.medium
def test_rows_and_outputs_are_those_of_encode(finetuned: Path) -> None:
    model = bert.load(finetuned)
    rows = model.tokenize(TEXTS)
    assert {name: rows[name].shape for name in rows} == dict.fromkeys(rows, rows["input_ids"].shape)
    assert [model.tokenizer.decode(ids[:2].tolist(), False)[:5] for ids in rows["input_ids"]] == ["[CLS]"] * 3
    np.testing.assert_array_equal(rows["attention_mask"], model.encode(TEXTS).attention_mask)
    logits = model.apply(**rows)
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    answers = [max(answer.probabilities.values()) for answer in model.predict(["ba ko", "ri"])]
    np.testing.assert_allclose(probabilities.max(axis=-1)[:2], answers, atol=1e-5)
    assert model.tokenize("ba ko ri tu", max_length=3)["input_ids"].shape == (1, 3)
    with pytest.raises(bert.UserError, match="max_length is 1, but a row has more special tokens"):
        model.tokenize("ba ko ri tu", max_length=1)
    encoder = model.apply(**rows, method=encode)
    np.testing.assert_allclose(encoder.pooled_output, model.encode(TEXTS).pooled_output, atol=1e-5)
    assert jnp.isfinite(encoder.last_hidden_state).all()
    alone = model.replace(architecture="Bert", task=None, params={"bert": model.params["bert"]})
    np.testing.assert_allclose(alone.apply(**rows).pooled_output, encoder.pooled_output, atol=1e-6)


@pytest.mark.medium
def test_similarity_is_the_cosine_of_all_pairs(pretrained: Path) -> None:
    model = bert.load(pretrained)
    result, vectors = model.similarity(["ba", "ko ri"], ["ko ri", "tu", "ba"]), model.embed(["ba", "ko ri", "tu"])
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    np.testing.assert_allclose(result, unit[:2] @ unit[[1, 2, 0]].T, atol=1e-6)
    assert model.similarity("ba", "ba").shape == (1, 1)
    assert model.similarity("ba", []).shape == (1, 0)


def test_labelled_rows_are_scored_as_dev_was(finetuned: Path, tmp_path: Path) -> None:
    loaded = bert.load(finetuned)
    scores = [loaded.score([{"text": "ba", "label": label}])["accuracy"] for label in ("1", "negative")]
    assert sorted(scores) == [0, 1]
    names = ("0", "1")
    model = dataclasses.replace(loaded, task=CustomClassification(labels=names, label_names=names))
    lines = (finetuned / "predictions" / "dev.tsv").read_text().splitlines()
    assert len(lines) > 2
    texts = ["ba ko", "ri tu", "ko ko", "tu"]
    answers = [answer.label for answer in model.predict(texts)]
    rows = [{"text": text, "label": answer} for text, answer in zip(texts, answers, strict=True)]
    assert model.score(rows)["accuracy"] == 1.0
    wrong = [{**rows[0], "label": str(1 - int(answers[0]))}, *rows[1:]]
    assert model.score(wrong)["accuracy"] == 0.75
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in wrong))
    assert model.score(tmp_path / "rows.jsonl") == model.score(wrong)
    with pytest.raises(bert.UserError, match="data has no rows"):
        model.score([])
    with pytest.raises(bert.UserError, match=r"^data has the labels .*'maybe', but the labels of \w+ are '0', '1'"):
        model.score([rows[0], {"text": "ba", "label": "maybe"}])
    with pytest.raises(bert.UserError, match="label"):
        model.score([{"text": "ba"}])


@pytest.mark.medium
def test_the_loop_of_the_guide_learns(pretrained: Path, tmp_path: Path, monkeypatch) -> None:
    page = (REPOSITORY / "docs" / "train_from_python.md").read_text(encoding="utf-8")
    [loop] = [block.split("```")[0] for block in page.split("```python\n") if "def train_step" in block]
    assert len(loop.splitlines()) <= 45
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for name, of_a_tiny_model in {"runs/mini": str(pretrained), "(20)": "(200)", "fine": "ba", "dull": "ko"}.items():
        loop = loop.replace(name, of_a_tiny_model)
    exec(loop, names)
    assert names["loss"] < 0.3
    assert (tmp_path / "classifier" / "model.safetensors").is_file()


@pytest.mark.medium
def test_the_earlier_name_of_log_is_accepted_with_one_warning(tmp_path: Path, caplog) -> None:
    warn_once.cache_clear()
    model = model_of(tmp_path, BertForPreTraining(CONFIG), None)
    said: list[str] = []
    with caplog.at_level("WARNING", "bert"):
        for name in ("one", "two"):
            model.save(tmp_path / name, **{"say": said.append})
        bert.load(tmp_path / "one", **{"say": said.append})
        model.mine_negatives([{"query": "ba", "positive": "ko"}], TEXTS[:2], num_negatives=1, **{"say": said.append})
    assert caplog.messages == [
        f"{name}: the argument say is now log: pass log" for name in ("save", "load", "mine_negatives")
    ]
    assert len(said) > 3
