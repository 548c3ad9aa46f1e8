"""A fine-tuning run from labelled files to predictions: puts the rooms together."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from bert import metrics, report
from bert.checkpoint import Checkpointer
from bert.config import FinetuneConfig, ModelConfig, UserError
from bert.data.batches import bucket, epoch_batches, evaluation_batches
from bert.data.features import Features
from bert.data.tasks import find_task
from bert.data.tasks.glue import ClassificationTask, Examples, read_split, tokenize, write_predictions
from bert.heads import BertForSequenceClassification
from bert.losses import classification_objective
from bert.optimizer import describe_decay, learning_rate_schedule, make_optimizer
from bert.parallel import DataParallel
from bert.pretrained import Params, load
from bert.run import RunFolder
from bert.start import sizes_of_source, sizes_of_vocabulary, starting_state
from bert.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer, vocabulary_size
from bert.train import StopRequest, Work, count_parameters, fit, make_train_step, steps_of

Say = Callable[[str], None]


class Split(NamedTuple):
    """One split of a task, as text and as tokens."""

    examples: Examples
    features: Features


class Origin(NamedTuple):
    """What the encoder starts as: sizes, vocabulary, and weights (None for random ones)."""

    config: ModelConfig
    tokenizer: Tokenizer
    params: Params | None
    name: str


def finetune(run: RunFolder[FinetuneConfig], say: Say = print) -> dict[str, Any]:
    """Runs, or goes on with, a fine-tuning run and returns what stands in its results.json.

    Raises:
        UserError: the data, the start or a checkpoint cannot be used.
        Interrupted: a signal came; the state is saved.
    """
    began = time.perf_counter()
    task = find_task(run.config.task)
    folder = Path(run.config.data.dir)
    texts = {
        "train": read_split(task, folder, "train", run.config.data.max_train_rows),
        "dev": read_split(task, folder, "dev"),
    }
    if has_split(task, folder, "test"):
        texts["test"] = read_split(task, folder, "test")

    origin = _origin(run, texts["train"], say)
    config = _resolved(run.config, origin.config, len(texts["train"].ids))
    if config.data.max_length > config.model.max_position_embeddings:
        raise UserError(
            f"data.max_length ({config.data.max_length}) is over the model's position table "
            f"({config.model.max_position_embeddings}): shorten it"
        )
    parallel = DataParallel()
    parallel.check_batch("training.batch_size", config.training.batch_size, config.training.gradient_accumulation_steps)
    parallel.check_batch("training.eval_batch_size", config.training.eval_batch_size)
    splits = {
        name: Split(examples, tokenize(origin.tokenizer, examples, config.data.max_length))
        for name, examples in texts.items()
    }
    train = splits["train"].features
    run.check_data(_digest(train))
    save_tokenizer(origin.tokenizer, run.path)
    run = run.resolve(config)
    model = BertForSequenceClassification(
        config.model, len(task.labels), config.classifier_dropout, jnp.dtype(config.training.dtype)
    )
    objective = classification_objective(model.apply)
    total_steps = steps_of(config.training, len(train))
    optimizer = make_optimizer(config.optimizer, total_steps)
    logits_of = _Classifier(model, parallel, config)

    with Checkpointer(run.checkpoints, config.training.keep_checkpoints, say) as checkpoints, StopRequest() as stop:

        def evaluate(params: Any) -> dict[str, float]:
            logits = logits_of(params, splits["dev"].features, stop.check)
            labels = splits["dev"].examples.labels
            scores = metrics.classification(task.metrics, logits.argmax(-1), labels)
            return {"loss": _cross_entropy(logits, labels), **scores}

        weights = None if origin.params is None else (origin.name, origin.params)
        state = starting_state(model, optimizer, objective.metrics, config.seed, checkpoints, weights, ("bert",), say)
        batch, length = config.training.batch_size, config.data.max_length
        report.startup_table(
            [
                ("task", f"{task.folder_name}: {len(train):,} training rows, {len(splits['dev'].features):,} dev"),
                ("parameters", f"{count_parameters(state.params):,}"),
                ("devices", parallel.describe()),
                ("tokens per step", f"up to {batch * length:,} ({batch} x {length}, padded to buckets)"),
                ("steps", f"{total_steps:,} ({total_steps * batch / len(train):.1f} epochs)"),
                ("optimizer", describe_decay(state.params, config.optimizer)),
            ]
        )
        with report.RunReport(run.path, total_steps, int(state.step), int(config.training.log_every)) as listener:

            def is_best(step: int, scores: dict[str, float]) -> bool:
                past = [line for line in evaluations(run.path) if line["step"] < step]
                return all(scores[task.main_metric] > line[task.main_metric] for line in past)

            work = Work(
                total_steps=total_steps,
                eval_every=int(config.training.eval_every),
                batch=_batches(train, config),
                train_step=make_train_step(objective, optimizer, config.seed, config.training.dropout_rng),
                learning_rate=learning_rate_schedule(config.optimizer, total_steps),
                evaluate=evaluate,
                evaluated=is_best,
                keep=checkpoints.protect,
            )
            fit(work, state, config.training, parallel, checkpoints, listener, stop)
        checkpoints.wait()
        best_step, best = checkpoints.restore_best_params()

    best = parallel.replicate(best)
    for name in ("dev", "test"):
        if name in splits:
            logits = logits_of(best, splits[name].features)
            shares = np.asarray(jax.nn.softmax(logits, axis=-1))
            write_predictions(task, run.path / "predictions", name, splits[name].examples, logits.argmax(-1), shares)
    results = {
        "task": task.name,
        "init": config.init,
        "seed": config.seed,
        "steps": total_steps,
        "best_step": best_step,
        "dev": next(_scores(line) for line in evaluations(run.path) if line["step"] == best_step),
        "last": _scores(evaluations(run.path)[-1]),
        "majority_class": metrics.majority_class(task.metrics, splits["dev"].examples.labels),
        "main_metric": task.main_metric,
        "seconds": round(time.perf_counter() - began, 1),
    }
    report.write_results(run.path, results)
    return results


def has_split(task: ClassificationTask, folder: Path, split: str) -> bool:
    """Whether the folder holds the file of a split."""
    return any((place / task.files[split]).is_file() for place in (folder, folder / task.folder_name))


def evaluations(folder: Path) -> list[dict[str, Any]]:
    """The evaluation lines of a run's metrics.jsonl, in order."""
    return [line for line in report.read_metrics(folder) if line["split"] == "eval"]


def _scores(line: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in line.items() if name not in ("step", "split")}


def _resolved(config: FinetuneConfig, model: ModelConfig, train_rows: int) -> FinetuneConfig:
    training = config.training
    per_epoch = -(-train_rows // training.batch_size)
    training = dataclasses.replace(
        training,
        eval_every=training.eval_every or per_epoch,
        eval_batch_size=training.eval_batch_size or training.batch_size,
    )
    return dataclasses.replace(config, model=model, training=training)


def _origin(run: RunFolder[FinetuneConfig], train: Examples, say: Say) -> Origin:
    """Where sizes, vocabulary and weights come from: the run itself if begun, else ``init``, ``like``, config."""
    config = run.config
    begun = Checkpointer(run.checkpoints, config.training.keep_checkpoints, say).steps() if run.resumed else []
    if begun:
        return Origin(config.model, load_tokenizer(run.path), None, config.init)
    if config.init != "none":
        source = load(config.init, say)
        model = sizes_of_source(config.model, source.config, source.source)
        return Origin(model, source.tokenizer, source.params, source.origin)
    if config.like is not None:
        source = load(config.like, say)
        model = sizes_of_source(config.model, source.config, source.source)
        return Origin(model, source.tokenizer, None, "none")
    if config.tokenizer.path is not None:
        tokenizer = load_tokenizer(config.tokenizer.path, config.tokenizer)
    else:
        sentences = (text for texts in (train.texts_a, train.texts_b or []) for text in texts)
        tokenizer = train_tokenizer(sentences, config.tokenizer)
    return Origin(sizes_of_vocabulary(config.model, vocabulary_size(tokenizer)), tokenizer, None, "none")


def _digest(features: Features) -> str:
    """Of the training rows and their labels."""
    digest = hashlib.sha256()
    for array in (features.ids, features.offsets, features.segment_a_lengths, features.labels):
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _batches(features: Features, config: FinetuneConfig) -> Callable[[int], dict[str, np.ndarray]]:
    """Step -> its batch, padded to a bucket; the smaller batch at an epoch's end is filled with rows of no weight."""
    size = config.training.batch_size
    per_epoch = -(-len(features) // size)
    lengths = features.lengths

    @lru_cache(maxsize=2)
    def epoch(number: int) -> list[np.ndarray]:
        return epoch_batches(lengths, size, config.seed, number)

    def batch(step: int) -> dict[str, np.ndarray]:
        rows = epoch(step // per_epoch)[step % per_epoch]
        length = bucket(int(lengths[rows].max()), config.data.buckets, config.data.max_length)
        return {**features.batch(rows, length, size), "rows": np.arange(size, dtype=np.int32)}

    return batch


class _Classifier:
    """Logits of every row of a split, in its order, over all devices."""

    def __init__(self, model: BertForSequenceClassification, parallel: DataParallel, config: FinetuneConfig) -> None:
        self._parallel, self._config = parallel, config
        self._forward = parallel.compile(
            lambda params, batch: model.apply(
                {"params": params}, batch["input_ids"], batch["token_type_ids"], batch["attention_mask"]
            )
        )

    def __call__(self, params: Any, features: Features, between: Callable[[], None] = lambda: None) -> np.ndarray:
        """Replicated parameters, R rows -> [R, L] float32; ``between`` is called before each batch."""
        data, size = self._config.data, self._config.training.eval_batch_size
        parts, order = [], []
        for rows in evaluation_batches(features.lengths, size):
            between()
            length = bucket(int(features.lengths[rows].max()), data.buckets, data.max_length)
            logits = self._forward(params, self._parallel.place(features.batch(rows, length, size)))
            parts.append(self._parallel.gather(logits)[: len(rows)])
            order.append(rows)
        logits = np.concatenate(parts)
        return logits[np.argsort(np.concatenate(order))]


def _cross_entropy(logits: np.ndarray, labels: np.ndarray) -> float:
    logs = jax.nn.log_softmax(logits, axis=-1)
    return -float(np.mean(np.take_along_axis(np.asarray(logs), labels[:, None], axis=-1)))
