"""Runs pretraining end to end: data, model, training loop, evaluation, results.json."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from bert import metrics
from bert.config import PretrainConfig
from bert.config.pretraining import Phase, phase_configs, phases_of
from bert.data.corpus.vocabulary import corpus_vocabulary
from bert.data.pretraining.builder import PretrainingDataset, build_examples, open_rows
from bert.data.pretraining.loader import Batch, PretrainingLoader, RowSource, held_out_batches, make_masking
from bert.data.pretraining.objectives import OBJECTIVES, PretrainingObjective
from bert.errors import UserError, require
from bert.inference.loading import load
from bert.inference.pretrained import Pretrained
from bert.model.execution import LayerExecution
from bert.model.heads import BertForMaskedLM, BertForPreTraining
from bert.parallel import multihost
from bert.parallel.backends import Parallelism, make_parallelism
from bert.runs import metrics_log, progress, shared_run
from bert.runs.curves import Subject, plot_curves
from bert.runs.folder import RunFolder
from bert.runtime.interrupts import InterruptHandler
from bert.runtime.profiling import profiler
from bert.tokenizer.extension import decompose_new_tokens
from bert.tokenizer.wordpiece import embedding_rows, load_tokenizer, require_embedding_rows, save_tokenizer, special_ids
from bert.training.initialization import (
    Params,
    extend_embeddings,
    initialize_state,
    model_config_from_source,
    with_vocab_size,
)
from bert.training.loop import (
    LoopHooks,
    accumulate_sums,
    compute_means,
    count_parameters,
    fit,
    num_train_steps,
    time_step,
)
from bert.training.losses import pretraining_objective
from bert.training.optimizer import describe_decay, learning_rate_schedule, make_optimizer
from bert.training.step import TrainState, make_eval_step, make_train_step
from bert.training.timing import Timed, timed

Log = Callable[[str], None]

KEPT = 3
"""Checkpoints that stay if training.max_to_keep is null."""

UNK_RATE_WARNING = 0.05
"""Share of unknown pieces from which on a run says so: BERT's own vocabulary has under 0.1% of them in English."""


@dataclass(frozen=True)
class _PhaseData:
    """A phase with what it reads.

    Attributes:
        phase: its steps and its configuration.
        examples: of its length.
        loader: of its training batches.
        held_out: its held-out rows.
    """

    phase: Phase
    examples: PretrainingDataset
    loader: PretrainingLoader
    held_out: RowSource

    def eval_batches(self, process: tuple[int, int] = (0, 1)) -> Iterator[Batch]:
        """Every held-out row once, or this host's share of each batch; masked as always."""
        training = self.phase.config.training
        size = training.eval_batch_size or training.batch_size
        return held_out_batches(self.held_out, self.loader.masking, size, process)

    @property
    def held_out_batches(self) -> int:
        """Batches of a `held_out_pass`."""
        training = self.phase.config.training
        return -(-len(self.held_out) // (training.eval_batch_size or training.batch_size))


def pretrain(run: RunFolder[PretrainConfig], say: Log = print) -> dict[str, Any]:
    """Runs, or goes on with, a pretraining run and returns what stands in its results.json.

    Raises:
        UserError: the corpus, the vocabulary or a checkpoint cannot be used.
        Interrupted: a signal came; the state is saved.
    """
    began = time.perf_counter()
    say = multihost.main_process_only(say)
    config = _resolve_defaults(run.config)
    parallel = make_parallelism(config.training, config.model)
    LayerExecution.from_config(config.training)  # what these devices cannot do is said first
    _check_batches(parallel, config)
    source = None if config.init is None else _load_init_model(run, say)
    if source is not None:
        config = dataclasses.replace(config, model=model_config_from_source(config.model, source.config, source.source))
        config.check()  # rows may be too long for the source
    if config.model.type_vocab_size < 2 and OBJECTIVES[config.data.objective].label:
        raise UserError(
            f"model.type_vocab_size is {config.model.type_vocab_size}, and data.objective {config.data.objective} "
            "reads pairs of segments: start from a model with two, or set data.objective to full_sentences"
        )
    execution = LayerExecution.from_config(config.training, config.model.head_size)
    run = run.save_config(config)

    with multihost.main_process_first():
        tokenizer = _tokenizer(run, source, say)
        if source is None:
            config = dataclasses.replace(config, model=with_vocab_size(config.model, embedding_rows(tokenizer)))
        else:
            require_embedding_rows(tokenizer, config.model.known_vocab_size, run.config.tokenizer.path or source.source)
        special = special_ids(tokenizer)
        tell = progress.progress_lines(say)
        sets = [build_examples(one.data, tokenizer, progress=tell) for one in phase_configs(config)]
        run.check_data(" ".join(dict.fromkeys(examples.folder.name for examples in sets)))
        unknown = sets[0].unknown_rate(special)
        if unknown > UNK_RATE_WARNING:
            say(
                f"warning: {unknown:.1%} of the training pieces are {tokenizer.id_to_token(special.unk)}, which is "
                "never predicted: take a vocabulary of the corpus' language and script, or train one"
            )
        if run.is_writer:
            save_tokenizer(tokenizer, run.path)
    run = run.save_config(config)
    parts = _parts(config, tokenizer, sets, parallel.process)
    total_steps = parts[-1].phase.end

    rows = OBJECTIVES[config.data.objective]
    heads = BertForPreTraining if rows.label else BertForMaskedLM
    model = heads(config.model, jnp.dtype(config.training.dtype), execution)
    objective = pretraining_objective(model.apply, rows.label, rows.metric)
    optimizers = [make_optimizer(part.phase.config.optimizer, total_steps) for part in parts]
    eval_step = parallel.compile(make_eval_step(objective, parallel.axis))

    with (
        shared_run.make_checkpointer(run, say) as checkpoints,
        InterruptHandler() as stop,
        profiler(config.profile and run.is_writer, run.path, say) as profiled,
    ):

        def evaluate(part: _PhaseData, params: Any) -> dict[str, float]:
            def sums() -> Iterator[Any]:
                for batch in part.eval_batches(parallel.process):
                    stop.check()
                    yield eval_step(params, parallel.shard_batch(batch))

            means = compute_means(accumulate_sums(sums(), parallel))
            return {**means, "perplexity": metrics.perplexity(means["mlm_loss"])}

        weights = None if source is None else (source.origin, source.params)
        modules = ("bert", "predictions", "seq_relationship") if rows.label else ("bert", "predictions")
        prepare = partial(_init_mlm_bias, config.mlm_bias_init, _predictable_counts(parts[0].examples, special.all))
        state = initialize_state(
            model, optimizers[0], objective.metrics, config.seed, checkpoints, weights, modules, say, prepare
        )
        if run.is_writer:
            _print_summary(state, config, parallel, parts)
        works = [
            LoopHooks(
                total_steps=part.phase.end,
                eval_every=int(require(config.training.eval_every, "training.eval_every")),
                batch=part.loader.batch,
                rows=part.loader.numbers,
                train_step=profiled(
                    parallel.compile(
                        make_train_step(objective, optimizer, config.seed, config.training.dropout_rng, parallel.axis),
                        donate=(0,),
                    )
                ),
                learning_rate=learning_rate_schedule(part.phase.config.optimizer, total_steps),
                evaluate=partial(evaluate, part),
                pace=partial(_pace_of_a_phase, part, eval_step, parallel),
            )
            for part, optimizer in zip(parts, optimizers, strict=True)
        ]
        pace = None
        if len(parts) > 1:
            pace = _with_evaluations(
                _measure_step_times(parts, works, state, parallel), parts, eval_step, state, parallel
            )
        with shared_run.make_report(run, total_steps, int(state.step), pace, _subject(config)) as listener:
            for part, work in zip(parts, works, strict=True):
                # Also enter a phase that ended exactly at the restored step: its evaluation may still be missing.
                if state.step <= part.phase.end:
                    if len(parts) > 1:
                        length = part.phase.config.data.sequence_length
                        listener.set_phase({"phase": part.phase.number, "sequence_length": length})
                    fitted = fit(work, state, part.phase.config.training, parallel, checkpoints, listener, stop)
                    state = parallel.to_host(fitted)
        checkpoints.wait()

    trained = Pretrained(
        config=config.model, params=state.params, tokenizer=tokenizer, step=total_steps, source=str(run.path)
    )

    def results() -> dict[str, Any]:
        found: dict[str, Any] = {
            "steps": total_steps,
            "eval": _last_evaluation(run.path),
            "baselines": _baselines(parts[-1].examples, rows, special.all, parts[-1].eval_batches()),
            "filled_masks": _sample_predictions(trained, parts[-1].held_out),
            "seconds": round(time.perf_counter() - began, 1),
        }
        metrics_log.write_results(run.path, found)
        plot_curves(run.path, _subject(config, found["baselines"]))
        return metrics_log.to_jsonable(found)

    return multihost.broadcast_from_main(results)


def _resolve_defaults(config: PretrainConfig) -> PretrainConfig:
    training = config.training
    training = dataclasses.replace(
        training,
        eval_every=training.eval_every or training.checkpoint_every,
        max_to_keep=training.max_to_keep or KEPT,
    )
    if config.phases is None:  # each phase evaluates by its own batch
        training = dataclasses.replace(training, eval_batch_size=training.eval_batch_size or training.batch_size)
    return dataclasses.replace(config, training=training)


def _load_init_model(run: RunFolder[PretrainConfig], say: Log) -> Pretrained:
    """The model of ``init``, with rows for new words where ``tokenizer.path`` has its vocabulary extended by some."""
    config = run.config
    source = load(require(config.init, "init"), say)
    path = run.path if (run.path / "tokenizer.json").is_file() else config.tokenizer.path
    if path is None:
        return source
    tokenizer = load_tokenizer(path, config.tokenizer)
    rows = decompose_new_tokens(source.tokenizer, tokenizer, source.source, str(path))
    if not rows:
        return dataclasses.replace(source, tokenizer=tokenizer)
    size = max(source.config.known_vocab_size, embedding_rows(tokenizer))
    if not run.resumed:
        say(
            f"{len(rows):,} new rows seeded from the mean of their old pieces, "
            f"the first for {tokenizer.id_to_token(next(iter(rows)))!r}; the embedding has {size:,} rows"
        )
    return dataclasses.replace(
        source,
        config=dataclasses.replace(source.config, vocab_size=size),
        params=extend_embeddings(source.params, rows, size),
        tokenizer=tokenizer,
    )


def _check_batches(parallel: Parallelism, config: PretrainConfig) -> None:
    """Raises UserError where the devices cannot share the batches of a phase."""
    for number, one in enumerate(phase_configs(config), 1):
        name = "training.batch_size" if config.phases is None else f"phases.{number}.batch_size"
        parallel.check_batch(name, one.training.batch_size, one.training.gradient_accumulation_steps)
    if config.training.eval_batch_size is not None:
        parallel.check_batch("training.eval_batch_size", config.training.eval_batch_size)


def _parts(
    config: PretrainConfig, tokenizer: Tokenizer, sets: Sequence[PretrainingDataset], process: tuple[int, int]
) -> list[_PhaseData]:
    """The phases with their data. Phases that read the same examples read on where the one before has ended."""
    parts: list[_PhaseData] = []
    used: Counter[Path] = Counter()
    train = [open_rows(examples.train) for examples in sets]
    phases = phases_of(config, num_train_steps(config.training, len(train[0])))
    for phase, examples, rows in zip(phases, sets, train, strict=True):
        one = phase.config
        loader = PretrainingLoader(
            rows,
            make_masking(one.data, tokenizer),
            one.training.batch_size,
            one.seed,
            process,
            static_masking=one.data.static_masking,
            first_step=phase.first,
            first_row=used[examples.folder],
        )
        used[examples.folder] += (phase.end - phase.first) * one.training.batch_size
        parts.append(_PhaseData(phase, examples, loader, open_rows(examples.eval)))
    return parts


def _measure_step_times(
    parts: Sequence[_PhaseData], works: Sequence[LoopHooks], state: TrainState, parallel: Parallelism
) -> progress.StepCosts:
    """Times a step of each phase that is left, and so compiles all of them: one that does not fit into memory shows
    before the first has begun."""
    costs = []
    for part, work in zip(parts, works, strict=True):
        phase, seconds = part.phase, 0.0
        if state.step < phase.end:
            batch = part.loader.batch(max(phase.first, int(state.step)))
            placed = parallel.shard_batch(batch, phase.config.training.gradient_accumulation_steps)
            seconds = time_step(work.train_step, parallel.put_state(state), placed).call
        costs.append((phase.end, seconds))
    return progress.StepCosts(tuple(costs))


def _pace_of_a_phase(
    part: _PhaseData, eval_step: Callable[..., Any], parallel: Parallelism, state: TrainState, step: Timed
) -> progress.StepCosts:
    """The pace of a phase alone; `bert.runs.report.RunReport` scales that of all phases by it, if there are several."""
    pace = progress.StepCosts(((part.phase.end, step.call),))
    return _with_evaluations(pace, [part], eval_step, state, parallel)


def _with_evaluations(
    pace: progress.StepCosts,
    parts: Sequence[_PhaseData],
    eval_step: Callable[..., Any],
    state: TrainState,
    parallel: Parallelism,
) -> progress.StepCosts:
    """The pace with the evaluations of each phase that is left, after a batch of each has been timed."""
    params, evaluations = parallel.put_state(state.params), []
    for part in parts:
        every, seconds = int(require(part.phase.config.training.eval_every, "training.eval_every")), 0.0
        if state.step < part.phase.end:
            batch = parallel.shard_batch(next(part.eval_batches(parallel.process)))
            seconds = timed(partial(eval_step, params, batch)).call * part.held_out_batches
        evaluations.append((part.phase.end, every, seconds))
    return dataclasses.replace(pace, evaluations=tuple(evaluations))


def _tokenizer(run: RunFolder[PretrainConfig], source: Pretrained | None, say: Log) -> Tokenizer:
    """The run's own vocabulary if it has one, else that of ``init``, else the one named, else one trained."""
    config = run.config
    if (run.path / "tokenizer.json").is_file():
        return load_tokenizer(run.path)
    if source is not None:
        return source.tokenizer
    if config.tokenizer.path is not None:
        return load_tokenizer(config.tokenizer.path, config.tokenizer)
    return corpus_vocabulary(config.data, config.tokenizer, say)


def _print_summary(
    state: TrainState, config: PretrainConfig, parallel: Parallelism, parts: Sequence[_PhaseData]
) -> None:
    counts = parts[0].examples.counts
    progress.print_table(
        [
            ("parameters", f"{count_parameters(state.params):,}"),
            ("devices", parallel.describe()),
            ("vocabulary", f"{config.model.vocab_size:,} pieces"),
            (
                "documents",
                f"{counts['train_documents']:,} for training, {counts['eval_documents']:,} held out",
            ),
            *(line for part in parts for line in _phase_summary(part, len(parts))),
            ("optimizer", describe_decay(state.params, config.optimizer)),
        ]
    )


def _phase_summary(part: _PhaseData, count: int) -> list[tuple[str, str]]:
    """A phase in the table; alone it has no number."""
    phase, rows, held_out = part.phase, len(part.loader.rows), len(part.held_out)
    batch, length = part.loader.batch_size, phase.config.data.sequence_length
    steps = phase.end - phase.first
    of_rows, tokens = f"{rows:,} for training, {held_out:,} held out", f"{batch * length:,} ({batch} x {length})"
    of_steps = f"{steps:,} ({steps * batch / rows:.1f} epochs)"
    if count == 1:
        return [("rows", of_rows), ("tokens per step", tokens), ("steps", of_steps)]
    rate, predictions = phase.config.optimizer.learning_rate, part.loader.masking.max_predictions
    return [
        (f"phase {phase.number}", f"steps {phase.first + 1:,} to {phase.end:,}: {of_steps}"),
        ("  rows", of_rows),
        ("  tokens per step", f"{tokens}, up to {predictions} predicted a row, peak learning rate {rate:g}"),
    ]


def _last_evaluation(folder: Path) -> dict[str, float]:
    lines = [line for line in metrics_log.read_metrics(folder) if line["split"] == "eval"]
    return {name: value for name, value in lines[-1].items() if name not in ("step", "split")}


def _subject(config: PretrainConfig, baselines: Mapping[str, Any] | None = None) -> Subject:
    """What the curves are of, with the `_baselines` once these are known."""
    known_scores = dict(baselines or {})
    scores = {f"mlm_{name}": value for name, value in known_scores.pop("unigram", {}).items()}
    scores |= {name.replace("_majority", ""): value for name, value in known_scores.items()}
    objective = OBJECTIVES[config.data.objective]
    if objective.metric is None and "mlm_loss" in scores:
        scores["loss"] = scores["mlm_loss"]
    model = config.model
    title = f"pretraining ({config.data.objective}), {model.num_hidden_layers} layers of {model.hidden_size}"
    return Subject(title, baseline="word frequencies, majority class", baselines=scores, main_metric="mlm_accuracy")


def _baselines(
    examples: PretrainingDataset,
    rows: PretrainingObjective,
    special_ids: Sequence[int],
    batches: Iterator[dict[str, np.ndarray]],
) -> dict[str, Any]:
    """What a model would score that knows word frequencies, and the more frequent label of the rows, only."""
    pieces, labels = [], []
    for batch in batches:
        pieces.append(batch["masked_lm_ids"][batch["masked_lm_weights"] > 0])
        if rows.label:
            labels.append(batch[f"{rows.label}_labels"][batch[f"{rows.label}_weights"] > 0])
    predicted = np.concatenate(pieces)
    unigram = metrics.unigram_baseline(_predictable_counts(examples, special_ids), predicted) if len(predicted) else {}
    if not rows.label:
        return {"unigram": unigram}
    ones = float(np.mean(np.concatenate(labels)))
    return {"unigram": unigram, f"{rows.metric}_majority_accuracy": max(ones, 1 - ones)}


def _predictable_counts(examples: PretrainingDataset, special_ids: Sequence[int]) -> np.ndarray:
    """[V] occurrences of each piece in the training rows; 0 for the special ones, which are never predicted."""
    counts = examples.unigram_counts.copy()
    counts[list(special_ids)] = 0
    return counts


def _init_mlm_bias(how: str, counts: np.ndarray, params: Params) -> Params:
    """Random weights with the MLM head's output bias at the log frequencies of the pieces, if asked.

    A bias that starts at zero moves by no more than the learning rate a step, and is several nats from the mark.
    Meanwhile the encoder learns the frequencies instead: it turns all tokens into one vector, which the tied decoder
    reads, and a short run spends itself on the way back.
    """
    if how == "zeros":
        return params
    predictions = params["predictions"]
    bias = np.zeros(predictions["bias"].shape, np.float32)
    bias[: len(counts)] = metrics.unigram_log_probabilities(counts)
    bias[len(counts) :] = bias[: len(counts)].min()  # rows of the embedding beyond the vocabulary
    return {**params, "predictions": {**predictions, "bias": bias}}


def _sample_predictions(model: Pretrained, rows: Any, examples: int = 3) -> list[dict[str, Any]]:
    """Held-out texts with one whole word masked: the first suitable word after the middle of evenly spread rows."""
    special = special_ids(model.tokenizer)
    shown = []
    for number in np.unique(np.linspace(0, len(rows) - 1, 8 * examples).astype(int)):
        row = rows.take(np.array([number]))
        ids = [int(i) for i in row["input_ids"][0, 1 : row["segment_a_length"][0] - 1]][:40]
        pieces = [model.tokenizer.id_to_token(i) or "" for i in ids]
        for place in range(len(pieces) // 2, len(pieces) - 1):
            whole = pieces[place].isalpha() and not pieces[place + 1].startswith("##")
            if whole and len(pieces[place]) > 2 and len(pieces) >= 12:
                masked = [*ids[:place], special.mask, *ids[place + 1 :]]
                text = model.tokenizer.decode(masked, skip_special_tokens=False)
                if special.mask not in model.tokenizer.encode(text).ids[: model.config.max_position_embeddings - 1]:
                    continue  # the pieces read back as more than they were, and the mask would be cut off
                [filled] = model.fill_mask(text, top_k=3)
                guesses = [{"token": guess.token, "probability": guess.probability} for guess in filled]
                shown.append({"text": text, "truth": pieces[place], "guesses": guesses})
                break
        if len(shown) == examples:
            break
    return shown
