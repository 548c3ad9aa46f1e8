"""What a pretraining run prints at its start and writes at its end: table, baselines, sample predictions."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bert import metrics
from bert.config import PretrainConfig
from bert.data.pretraining.loader import Batch, RowSource
from bert.data.pretraining.objectives import OBJECTIVES, PretrainingObjective
from bert.inference.pretrained import Pretrained
from bert.parallel.backends import Parallelism
from bert.runs import metrics_log, progress
from bert.runs.curves import Subject, plot_curves
from bert.runs.folder import RunFolder
from bert.tokenizer.wordpiece import special_ids
from bert.training.evaluation import read_eval_metrics, scores_of_line
from bert.training.loop import count_parameters
from bert.training.optimizer import describe_decay
from bert.training.pretraining_data import PhaseData, PretrainingData, predictable_counts


def print_summary(params: Any, config: PretrainConfig, parallel: Parallelism, phases: Sequence[PhaseData]) -> None:
    """Prints the table of sizes before training."""
    counts = phases[0].examples.counts
    documents = f"{counts['train_documents']:,} for training, {counts['eval_documents']:,} held out"
    progress.print_table(
        [
            ("parameters", f"{count_parameters(params):,}"),
            ("devices", parallel.describe()),
            ("vocabulary", f"{config.model.vocab_size:,} pieces"),
            ("documents", documents),
            *(line for phase in phases for line in _describe_phase(phase, len(phases))),
            ("optimizer", describe_decay(params, config.optimizer)),
        ]
    )


def _describe_phase(data: PhaseData, num_phases: int) -> list[tuple[str, str]]:
    """A phase in the table; a single one has no number."""
    phase, num_rows = data.phase, len(data.loader.rows)
    batch_size, length = data.loader.batch_size, phase.config.data.sequence_length
    num_steps = phase.end - phase.first
    rows = f"{num_rows:,} for training, {len(data.eval_rows):,} held out"
    tokens = f"{batch_size * length:,} ({batch_size} x {length})"
    steps = f"{num_steps:,} ({num_steps * batch_size / num_rows:.1f} epochs)"
    if num_phases == 1:
        return [("rows", rows), ("tokens per step", tokens), ("steps", steps)]
    rate, predictions = phase.config.optimizer.learning_rate, data.loader.masking.max_predictions
    return [
        (f"phase {phase.number}", f"steps {phase.first + 1:,} to {phase.end:,}: {steps}"),
        ("  rows", rows),
        ("  tokens per step", f"{tokens}, up to {predictions} predicted a row, peak learning rate {rate:g}"),
    ]


def curves_subject(config: PretrainConfig, baselines: Mapping[str, Any] | None = None) -> Subject:
    """Title and baselines of the curves; the baselines are known at the end of a run."""
    rest = dict(baselines or {})
    scores = {f"mlm_{name}": value for name, value in rest.pop("unigram", {}).items()}
    scores |= {name.replace("_majority", ""): value for name, value in rest.items()}
    if OBJECTIVES[config.data.objective].metric is None and "mlm_loss" in scores:
        scores["loss"] = scores["mlm_loss"]
    model = config.model
    title = f"pretraining ({config.data.objective}), {model.num_hidden_layers} layers of {model.hidden_size}"
    return Subject(title, baseline="word frequencies, majority class", baselines=scores, main_metric="mlm_accuracy")


def write_results(
    run: RunFolder[PretrainConfig], data: PretrainingData, params: Any, start_time: float
) -> dict[str, Any]:
    """Writes results.json and the final curves.

    Args:
        params: the last ones, on the host.
        start_time: by `time.perf_counter`.

    Returns:
        The content of results.json.
    """
    model = Pretrained(
        config=run.config.model, params=params, tokenizer=data.tokenizer, step=data.total_steps, source=str(run.path)
    )
    results: dict[str, Any] = {
        "steps": data.total_steps,
        "eval": scores_of_line(read_eval_metrics(run.path)[-1]),
        "baselines": _compute_baselines(data, OBJECTIVES[run.config.data.objective]),
        "filled_masks": _sample_predictions(model, data.phases[-1].eval_rows),
        "seconds": round(time.perf_counter() - start_time, 1),
    }
    metrics_log.write_results(run.path, results)
    plot_curves(run.path, curves_subject(run.config, results["baselines"]))
    return dict(metrics_log.to_jsonable(results))


def _compute_baselines(data: PretrainingData, objective: PretrainingObjective) -> dict[str, Any]:
    """Scores of the last phase's held-out rows for a model that knows only word frequencies and the majority label."""
    last = data.phases[-1]
    tokens, labels = [], []
    for batch in last.eval_batches():
        tokens.append(batch["masked_lm_ids"][batch["masked_lm_weights"] > 0])
        if objective.label:
            labels.append(batch[f"{objective.label}_labels"][batch[f"{objective.label}_weights"] > 0])
    predicted = np.concatenate(tokens)
    counts = predictable_counts(last.examples, data.tokenizer)
    unigram = metrics.unigram_baseline(counts, predicted) if len(predicted) else {}
    if not objective.label:
        return {"unigram": unigram}
    share_of_ones = float(np.mean(np.concatenate(labels)))
    return {"unigram": unigram, f"{objective.metric}_majority_accuracy": max(share_of_ones, 1 - share_of_ones)}


def _sample_predictions(model: Pretrained, rows: RowSource, count: int = 3) -> list[dict[str, Any]]:
    """Held-out texts with one whole word masked: the first suitable word after the middle of evenly spread rows."""
    samples: list[dict[str, Any]] = []
    for index in np.unique(np.linspace(0, len(rows) - 1, 8 * count).astype(int)):
        samples += _predict_one_word(model, rows.take(np.array([index])))
        if len(samples) == count:
            break
    return samples


def _predict_one_word(model: Pretrained, row: Batch) -> list[dict[str, Any]]:
    """The text of a row with one word masked, and the model's guesses for it; empty if no word is suitable."""
    mask_id = special_ids(model.tokenizer).mask
    ids = [int(i) for i in row["input_ids"][0, 1 : row["segment_a_length"][0] - 1]][:40]
    tokens = [model.tokenizer.id_to_token(i) or "" for i in ids]
    if len(tokens) < 12:
        return []
    for position in range(len(tokens) // 2, len(tokens) - 1):
        word = tokens[position]
        if not word.isalpha() or len(word) <= 2 or tokens[position + 1].startswith("##"):
            continue
        masked = [*ids[:position], mask_id, *ids[position + 1 :]]
        text = model.tokenizer.decode(masked, skip_special_tokens=False)
        if mask_id not in model.tokenizer.encode(text).ids[: model.config.max_position_embeddings - 1]:
            continue  # the text has more tokens than the row had, and the mask would be cut off
        [candidates] = model.fill_mask(text, top_k=3)
        guesses = [{"token": guess.token, "probability": guess.probability} for guess in candidates]
        return [{"text": text, "truth": word, "guesses": guesses}]
    return []
