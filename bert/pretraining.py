"""A pretraining run from corpus to results: puts the rooms together."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from bert import hosts, metrics, report
from bert.config import PretrainConfig, UserError
from bert.data.examples import ExampleSet, build_examples, open_rows
from bert.data.loader import PretrainingLoader, held_out_batches, masking_of
from bert.data.objectives import OBJECTIVES, RowObjective
from bert.data.vocabulary import corpus_vocabulary
from bert.heads import BertForMaskedLM, BertForPreTraining
from bert.losses import pretraining_objective
from bert.model import Execution
from bert.optimizer import describe_decay, learning_rate_schedule, make_optimizer
from bert.parallel import Parallel, parallel_of
from bert.pretrained import Pretrained, load
from bert.run import RunFolder
from bert.start import Params, sizes_of_source, sizes_of_vocabulary, starting_state
from bert.tokenizer import load_tokenizer, save_tokenizer, special_ids, vocabulary_size
from bert.train import (
    TrainState,
    Work,
    add_sums,
    count_parameters,
    divide,
    fit,
    make_eval_step,
    make_train_step,
    steps_of,
)

Say = Callable[[str], None]


def pretrain(run: RunFolder[PretrainConfig], say: Say = print) -> dict[str, Any]:
    """Runs, or goes on with, a pretraining run and returns what stands in its results.json.

    Raises:
        UserError: the corpus, the vocabulary or a checkpoint cannot be used.
        Interrupted: a signal came; the state is saved.
    """
    began = time.perf_counter()
    say = hosts.spoken(say)
    config = _with_defaults(run.config)
    parallel = parallel_of(config.training, config.model)
    parallel.check_batch("training.batch_size", config.training.batch_size, config.training.gradient_accumulation_steps)
    parallel.check_batch("training.eval_batch_size", config.training.eval_batch_size)
    source = None if config.init is None else load(config.init, say)
    if source is not None:
        config = dataclasses.replace(config, model=sizes_of_source(config.model, source.config, source.source))
    if config.model.type_vocab_size < 2 and OBJECTIVES[config.data.objective].label:
        raise UserError(
            f"model.type_vocab_size is {config.model.type_vocab_size}, and data.objective {config.data.objective} "
            "reads pairs of segments: start from a model with two, or set data.objective to full_sentences"
        )
    run = run.resolve(config)

    with hosts.first_goes_first():
        tokenizer = _tokenizer(run, source, say)
        if source is None:
            config = dataclasses.replace(config, model=sizes_of_vocabulary(config.model, vocabulary_size(tokenizer)))
        special = special_ids(tokenizer)
        masking = masking_of(config.data, tokenizer)
        examples = build_examples(config.data, tokenizer, progress=report.progress_lines(say))
        run.check_data(examples.folder.name)
        if run.writes:
            save_tokenizer(tokenizer, run.path)
    run = run.resolve(config)
    loader = PretrainingLoader(
        open_rows(examples.train),
        masking,
        config.training.batch_size,
        config.seed,
        parallel.process,
        frozen_masks=config.data.frozen_masks,
    )
    held_out = open_rows(examples.eval)

    def held_out_pass(process: tuple[int, int] = (0, 1)) -> Iterator[dict[str, np.ndarray]]:
        return held_out_batches(held_out, masking, config.training.eval_batch_size, process)

    rows = OBJECTIVES[config.data.objective]
    heads = BertForPreTraining if rows.label else BertForMaskedLM
    model = heads(config.model, jnp.dtype(config.training.dtype), Execution.of(config.training))
    objective = pretraining_objective(model.apply, rows.label, rows.metric)
    total_steps = steps_of(config.training, len(loader.rows))
    optimizer = make_optimizer(config.optimizer, total_steps)
    eval_step = parallel.compile(make_eval_step(objective, parallel.axis))

    with hosts.checkpoints_of(run, say) as checkpoints, hosts.stop_request() as stop:

        def evaluate(params: Any) -> dict[str, float]:
            def sums() -> Iterator[Any]:
                for batch in held_out_pass(parallel.process):
                    stop.check()
                    yield eval_step(params, parallel.place(batch))

            means = divide(add_sums(sums(), parallel))
            return {**means, "perplexity": metrics.perplexity(means["mlm_loss"])}

        weights = None if source is None else (source.origin, source.params)
        parts = ("bert", "predictions", "seq_relationship") if rows.label else ("bert", "predictions")
        prepare = partial(_with_output_bias, config.output_bias, _predictable_counts(examples, special.all))
        state = starting_state(
            model, optimizer, objective.metrics, config.seed, checkpoints, weights, parts, say, prepare
        )
        if run.writes:
            _introduce(state, config, parallel, total_steps, examples, len(loader.rows))
        work = Work(
            total_steps=total_steps,
            eval_every=int(config.training.eval_every),
            batch=loader.batch,
            train_step=make_train_step(objective, optimizer, config.seed, config.training.dropout_rng, parallel.axis),
            learning_rate=learning_rate_schedule(config.optimizer, total_steps),
            evaluate=evaluate,
        )
        with hosts.report_of(run, total_steps, int(state.step)) as listener:
            params = fit(work, state, config.training, parallel, checkpoints, listener, stop)
        checkpoints.wait()

    trained = Pretrained(config.model, parallel.fetch(params), tokenizer, None, total_steps, str(run.path))

    def results() -> dict[str, Any]:
        found = {
            "steps": total_steps,
            "eval": _last_evaluation(run.path),
            "baselines": _baselines(examples, rows, special.all, held_out_pass()),
            "filled_masks": _filled_masks(trained, held_out),
            "seconds": round(time.perf_counter() - began, 1),
        }
        report.write_results(run.path, found)
        return report.plain(found)

    return hosts.from_first(results)


def _with_defaults(config: PretrainConfig) -> PretrainConfig:
    training = config.training
    training = dataclasses.replace(
        training,
        eval_every=training.eval_every or training.checkpoint_every,
        eval_batch_size=training.eval_batch_size or training.batch_size,
    )
    return dataclasses.replace(config, training=training)


def _tokenizer(run: RunFolder[PretrainConfig], source: Pretrained | None, say: Say) -> Tokenizer:
    """The run's own vocabulary if it has one, else that of ``init``, else the one named, else one trained."""
    config = run.config
    if (run.path / "tokenizer.json").is_file():
        return load_tokenizer(run.path)
    if source is not None:
        return source.tokenizer
    if config.tokenizer.path is not None:
        return load_tokenizer(config.tokenizer.path, config.tokenizer)
    return corpus_vocabulary(config.data, config.tokenizer, say)


def _introduce(
    state: TrainState,
    config: PretrainConfig,
    parallel: Parallel,
    total_steps: int,
    examples: ExampleSet,
    train_rows: int,
) -> None:
    batch, length = config.training.batch_size, config.data.sequence_length
    counts = examples.counts
    report.startup_table(
        [
            ("parameters", f"{count_parameters(state.params):,}"),
            ("devices", parallel.describe()),
            ("vocabulary", f"{config.model.vocab_size:,} pieces"),
            (
                "documents",
                f"{counts['train_documents']:,} for training, {counts['eval_documents']:,} held out",
            ),
            ("rows", f"{train_rows:,} for training, {counts['eval_rows']:,} held out"),
            ("tokens per step", f"{batch * length:,} ({batch} x {length})"),
            ("steps", f"{total_steps:,} ({total_steps * batch / train_rows:.1f} epochs)"),
            ("optimizer", describe_decay(state.params, config.optimizer)),
        ]
    )


def _last_evaluation(folder: Path) -> dict[str, float]:
    lines = [line for line in report.read_metrics(folder) if line["split"] == "eval"]
    return {name: value for name, value in lines[-1].items() if name not in ("step", "split")}


def _baselines(
    examples: ExampleSet, rows: RowObjective, special_ids: Sequence[int], batches: Iterator[dict[str, np.ndarray]]
) -> dict[str, Any]:
    """What a model would score that knows word frequencies, and the more frequent label of the rows, only."""
    pieces, labels = [], []
    for batch in batches:
        pieces.append(batch["masked_lm_ids"][batch["masked_lm_weights"] > 0])
        if rows.label:
            labels.append(batch[f"{rows.label}_labels"][batch[f"{rows.label}_weights"] > 0])
    unigram = metrics.unigram_baseline(_predictable_counts(examples, special_ids), np.concatenate(pieces))
    if not rows.label:
        return {"unigram": unigram}
    ones = float(np.mean(np.concatenate(labels)))
    return {"unigram": unigram, f"{rows.metric}_majority_accuracy": max(ones, 1 - ones)}


def _predictable_counts(examples: ExampleSet, special_ids: Sequence[int]) -> np.ndarray:
    """[V] occurrences of each piece in the training rows; 0 for the special ones, which are never predicted."""
    counts = examples.unigram_counts.copy()
    counts[list(special_ids)] = 0
    return counts


def _with_output_bias(how: str, counts: np.ndarray, params: Params) -> Params:
    """Random weights with the MLM head's output bias at the log frequencies of the pieces, if asked.

    A bias that starts at zero moves by no more than the learning rate a step, and is several nats from the mark.
    Meanwhile the encoder learns the frequencies instead: it turns all tokens into one vector, which the tied decoder
    reads, and a short run spends itself on the way back.
    """
    if how == "zeros":
        return params
    predictions = params["predictions"]
    bias = np.zeros_like(predictions["bias"])
    bias[: len(counts)] = metrics.unigram_log_probabilities(counts)
    bias[len(counts) :] = bias[: len(counts)].min()  # rows of the embedding beyond the vocabulary
    return {**params, "predictions": {**predictions, "bias": bias}}


def _filled_masks(model: Pretrained, rows: Any, examples: int = 3) -> list[dict[str, Any]]:
    """Held-out texts with one whole word masked: the first suitable word after the middle of evenly spread rows."""
    special = special_ids(model.tokenizer)
    shown = []
    for number in np.unique(np.linspace(0, len(rows) - 1, 8 * examples).astype(int)):
        row = rows.take(np.array([number]))
        ids = [int(i) for i in row["input_ids"][0, 1 : row["segment_a_length"][0] - 1]][:40]
        pieces = [model.tokenizer.id_to_token(i) for i in ids]
        for place in range(len(pieces) // 2, len(pieces) - 1):
            whole = pieces[place].isalpha() and not pieces[place + 1].startswith("##")
            if whole and len(pieces[place]) > 2 and len(pieces) >= 12:
                masked = [*ids[:place], special.mask, *ids[place + 1 :]]
                text = model.tokenizer.decode(masked, skip_special_tokens=False)
                [filled] = model.fill_mask(text, top_k=3)
                guesses = [{"token": guess.token, "probability": guess.probability} for guess in filled]
                shown.append({"text": text, "truth": pieces[place], "guesses": guesses})
                break
        if len(shown) == examples:
            break
    return shown
