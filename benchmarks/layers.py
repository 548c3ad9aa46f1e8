"""Probes each layer of encoders with a linear model: scores on dev, compared with random weights of the first model.

    PYTHONPATH=. python benchmarks/layers.py MODEL [MODEL ...] --glue GLUE

GLUE has the folders of `transfer.py`. The features of a row are the mean of a layer's states over its tokens,
standardized. Two texts are one row, as for a classifier. Logistic regression, or ridge regression for scores, is fitted
on the first training rows. Layer 0 is the embeddings, without any context.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from transfer import TASKS, splits_of

import bert
from bert.data.inputs import Text
from bert.interchange.bundle import ModelBundle
from bert.model.encoder import Bert
from bert.model.pooling import Pooling
from bert.tasks.sequence_classification import ClassificationPredictions, RegressionTask

NAMES = ("sst2", "cola", "mrpc", "stsb", "rte")
LENGTH, ROWS_AT_ONCE = 128, 32
RANDOM = "random"


def main() -> None:
    """Prints a table with a row per task and model, and a column per layer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--glue", type=Path, required=True)
    parser.add_argument("--tasks", nargs="+", default=NAMES, choices=NAMES)
    parser.add_argument("--rows", type=int, default=5_000, help="training rows at most, the first ones")
    given = parser.parse_args()
    models: dict[str, ModelBundle] = {Path(name).name: bert.load(name) for name in given.models}
    models[RANDOM] = with_random_weights(next(iter(models.values())))
    layers = 1 + max(model.config.num_hidden_layers for model in models.values())
    print("| task | encoder | " + " | ".join(map(str, range(layers))) + " |\n" + "|---" * (layers + 2) + "|")
    for name in given.tasks:
        splits = splits_of(name, given.glue / TASKS[name].folder)
        train, dev = splits.examples["train"], splits.examples["dev"]
        train = train.take(range(min(given.rows, len(train))))
        for model_name, model in models.items():
            states = zip(layer_means(model, train.texts), layer_means(model, dev.texts), strict=True)
            scores = [score(splits.task, *pair, train, dev) for pair in states]
            cells = [f"{value:.3f}" for value in scores] + [""] * (layers - len(scores))
            print(f"| {name}, {splits.task.main_metric} | {model_name} | {' | '.join(cells)} |", flush=True)


def with_random_weights(model: ModelBundle) -> ModelBundle:
    """Returns an encoder with the same configuration and random weights."""
    params = jax.jit(Bert(model.config).init)(jax.random.key(0), np.zeros((1, 8), np.int32))["params"]
    return dataclasses.replace(model, params={"bert": params})


def layer_means(model: Any, texts: Sequence[Text]) -> list[np.ndarray]:
    """Returns the mean state of each row, [N, D], for each layer, embeddings first."""
    encoder: Any = Bert(model.config, add_pooling_layer="pooler" in model.params["bert"])
    encode = jax.jit(lambda batch: encoder.apply({"params": model.params["bert"]}, **batch, intermediates=True))
    rows, batches = model.tokenize(list(texts), LENGTH), []
    for start in range(0, len(texts), ROWS_AT_ONCE):
        batch = {name: array[start : start + ROWS_AT_ONCE] for name, array in rows.items()}
        states = jax.device_get(encode(batch).hidden_states)
        batches.append([Pooling()(layer, batch["attention_mask"]) for layer in states])
    return [np.concatenate(states) for states in zip(*batches, strict=True)]


def score(task: Any, states: np.ndarray, dev_states: np.ndarray, train: Any, dev: Any) -> float:
    """Returns the task's main metric on dev for a linear model."""
    linear = Ridge(100.0) if isinstance(task, RegressionTask) else LogisticRegression(C=0.1, max_iter=1000)
    model = make_pipeline(StandardScaler(), linear).fit(states, train.known_labels)
    predictions: Any = model.predict(dev_states)
    if not isinstance(task, RegressionTask):
        predictions = ClassificationPredictions(predictions, model.predict_proba(dev_states))
    return float(task.score(predictions, dev)[task.main_metric])


if __name__ == "__main__":
    main()
