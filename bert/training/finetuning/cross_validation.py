"""Cross-validation of a classifier: out-of-fold predictions for labelled rows, and their doubtful labels."""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bert.config import ColumnsConfig, FinetuneConfig, TaskDataConfig, recipe_folder
from bert.config.run_file import load_run_config
from bert.config.yaml_io import load_config
from bert.errors import Log, UserError, quoted, require
from bert.inference.evaluation import DoubtfulLabel, Evaluation, evaluation_of, labelled_data
from bert.inference.load import load
from bert.inference.pretrained import Pretrained
from bert.metrics.confident_learning import find_doubtful_labels
from bert.tasks.labelled import Labelled, read_with_new_labels
from bert.tasks.sequence_classification.classification import ClassificationPredictions
from bert.training.finetuning.setup import NEVER
from bert.training.launch import prepare_finetuning, start_or_resume


def cross_validate(
    model: Pretrained, data: Any, folds: int, log: Log, *, split: str = "dev", columns: Mapping[str, str] | None = None
) -> Evaluation:
    """Scores a recipe by cross-validation, and lists the labels that are doubtful by confident learning.

    Each of ``folds`` models is fine-tuned from the same initial model on all rows but one fold, and predicts that fold.
    Rows with equal texts are in the same fold. Folds are stratified by label and depend on the recipe's seed.

    Args:
        model: a fine-tuning run with one label per row, whose recipe and initial model are used; or the initial model,
            for the recipe classification.
        data: labelled rows, as in `bert.inference.evaluation.evaluate`.
        split: the split of a folder or data set.
        columns: names of columns by their key of ``data.columns``.

    Raises:
        UserError: the data cannot be read, the task has no labels of whole rows, or a label has too few rows.
    """
    config, labelled = _recipe_and_rows(model, data, split, columns or {})
    task: Any = labelled.task  # a classification task, if it has one label per row
    examples = labelled.examples
    if not task.one_label:
        raise UserError(f"{model.source} predicts {task.kind}: --cross_validate needs one label per row")
    labels, texts = examples.known_labels, list(examples.texts)
    probabilities = np.zeros((len(labels), task.num_labels))
    for number, held_out in enumerate(fold_rows(labels, texts, folds, config.seed, task.label_names), 1):
        log(f"fold {number} of {folds}: {len(labels) - len(held_out):,} training rows")
        with tempfile.TemporaryDirectory() as folder:
            probabilities[held_out] = _out_of_fold(config, task, examples, held_out, Path(folder))
    doubts = find_doubtful_labels(probabilities, labels)
    lines = require(examples.line_numbers, "the line numbers")
    doubtful = [
        DoubtfulLabel(
            lines[row],
            task.label_names[labels[row]],
            task.label_names[suggested],
            float(probabilities[row, labels[row]]),
            float(probabilities[row, suggested]),
            texts[row],
        )
        for row, suggested in zip(doubts.rows.tolist(), doubts.suggested.tolist(), strict=True)
    ]
    predictions = ClassificationPredictions(probabilities.argmax(axis=1), probabilities)
    name = str(data) if isinstance(data, str | Path) else "the rows"
    evaluation, _ = evaluation_of(str(model.source), name, labelled, predictions)
    return replace(evaluation, folds=folds, doubtful=tuple(doubtful))


def fold_rows(
    labels: np.ndarray, texts: Sequence[Any], folds: int, seed: int, names: Sequence[str]
) -> Iterator[np.ndarray]:
    """Yields the rows of each fold, stratified by label; rows with equal texts are in one fold.

    Raises:
        UserError: a label would be missing from the other folds.
    """
    from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold

    if not 2 <= folds <= len(labels):
        raise UserError(f"--cross_validate is {folds}: use a number from 2 to the number of rows, {len(labels):,}")
    numbers: dict[Any, int] = {}
    groups = [numbers.setdefault(text, len(numbers)) for text in texts]
    kind = StratifiedKFold if len(numbers) == len(texts) else StratifiedGroupKFold
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about labels with fewer rows than folds, which are checked below
        try:
            splits = list(kind(folds, shuffle=True, random_state=seed).split(labels, labels, groups))
        except ValueError:
            least = int(np.bincount(labels).max())
            raise UserError(
                f"--cross_validate is {folds}, but no label has more than {least} rows: use fewer"
            ) from None
    for train, held_out in splits:
        if len(missing := np.setdiff1d(labels, labels[train])):
            name = quoted([names[missing[0]]])
            raise UserError(
                f"the label {name} has {int((labels == missing[0]).sum())} rows, all in one fold: add rows with it or "
                "remove them"
            )
        yield held_out


def _recipe_and_rows(
    model: Pretrained, data: Any, split: str, columns: Mapping[str, str]
) -> tuple[FinetuneConfig, Labelled]:
    """Returns the configuration of the folds, without their data, and the labelled rows. Raises UserError."""
    config = None if model.step is None else load_run_config(Path(model.source))
    if not isinstance(config, FinetuneConfig):
        recipe = load_config(FinetuneConfig, recipe_folder() / "classification.yaml")
        rows = replace(recipe.data, max_length=min(recipe.data.max_length, model.longest_text))
        return replace(recipe, init=model.source, data=rows), read_with_new_labels(data, split, columns)
    labelled = labelled_data(model, data, split, columns)
    pooling = config.classifier_pooling
    if pooling == "init" and not labelled.task.pools_as_declared:
        pooling = "first"
    return replace(config, task="classification", classifier_pooling=pooling), labelled


def _out_of_fold(config: FinetuneConfig, task: Any, examples: Any, held_out: np.ndarray, folder: Path) -> np.ndarray:
    """Fine-tunes on the other rows, and returns the probabilities [rows, L] of the rows of a fold."""
    others = np.setdiff1d(np.arange(len(examples)), held_out)
    parts = {name: examples.take(rows.tolist()) for name, rows in (("train", others), ("dev", held_out))}
    for name, part in parts.items():
        _write_rows(folder / f"{name}.jsonl", part, task)
    pair = examples.texts_b is not None
    data = replace(
        TaskDataConfig(),
        **{name: getattr(config.data, name) for name in ("class_weights", *LENGTH_KEYS)},
        train=str(folder / "train.jsonl"),
        dev=str(folder / "dev.jsonl"),
        labels=list(task.label_names),
        columns=ColumnsConfig(text_a="text_a", text_b="text_b" if pair else None),
    )
    training = replace(config.training, eval_every=NEVER, checkpoint_every=NEVER)
    one = replace(config, output_dir=str(folder / "run"), data=data, training=training)
    start_or_resume(prepare_finetuning(replace(one, num_seeds=1, patience=None, loggers=[], profile=False)))
    model = load(folder / "run")
    own = model.require_task()
    features = own.features(model.tokenizer, replace(parts["dev"], labels=None), model.data)
    predictions = own.predict(model.outputs(features), features, parts["dev"])
    return np.asarray(predictions.probabilities)


LENGTH_KEYS = ("max_length", "buckets", "pair_truncation", "long_texts", "doc_stride", "max_train_windows")
"""Keys of ``data`` that a fold has from the recipe, besides the weights of the labels."""


def _write_rows(path: Path, examples: Any, task: Any) -> None:
    texts = [examples.texts_a] if examples.texts_b is None else [examples.texts_a, examples.texts_b]
    names = [task.label_names[label] for label in examples.known_labels]
    keys = ("text_a", "text_b")[: len(texts)]
    with path.open("w", encoding="utf-8") as file:
        for *row, label in zip(*texts, names, strict=True):
            file.write(json.dumps({**dict(zip(keys, row, strict=True)), "label": label}) + "\n")
