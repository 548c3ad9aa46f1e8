"""What `bert inspect` tells of a run or a model: its parts, its vocabulary, where it came from, how it was trained."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from flax import traverse_util
from tokenizers import Tokenizer

from bert import metrics
from bert.analysis.flops import ATTENTION, FEED_FORWARD, FORMULA, POOLER, PREDICTIONS, forward_flops, training_flops
from bert.config import FinetuneConfig, ModelConfig, PretrainConfig
from bert.config.yaml_io import load_config as load_config
from bert.data.pretraining.objectives import OBJECTIVES
from bert.errors import UserError
from bert.inference.loading import load
from bert.interchange import names
from bert.interchange.shapes import expected_shapes
from bert.model.heads import HEADS
from bert.runs.checkpoint import Checkpointer
from bert.runs.folder import KINDS, config_class_of_run
from bert.runs.metrics_log import read_metrics, scored_splits
from bert.tasks import make_task
from bert.tokenizer.wordpiece import (
    CONTINUATION,
    SPECIAL_TOKENS,
    embedding_rows,
    load_tokenizer,
    special_tokens,
    tokenizer_fingerprint,
)

Facts = dict[str, Any]
Shapes = dict[tuple[str, ...], tuple[int, ...]]
RunConfig = PretrainConfig | FinetuneConfig

DEFAULT_MASKED_LM_PROB = 0.15
"""Share of tokens that the MLM head decodes where no run says it (Devlin et al. 2018, section 3.1)."""

PUBLISHED_LENGTH = 128
"""Tokens a row that operations are counted for where no run says it: those of the paper's first phase."""

PART_ORDER = (
    *(f"embeddings/{table}" for table in ("word", "position", "segment", "norm")),
    *(ATTENTION, FEED_FORWARD, "layers/norm", POOLER, PREDICTIONS),
)
"""The parts as data passes them; further heads come last."""

TOKEN_HEADS = ("BertForTokenClassification", "BertForQuestionAnswering")
"""Architectures whose head reads every token, not the first one of a row."""


def summarize(source: str | Path, length: int | None = None) -> Facts:
    """Facts of a run, or of anything else that `bert.load` takes, as values that JSON has.

    Args:
        source: folder of a run or of a model, or a name on the hub.
        length: tokens T a row to count operations for; None for the run's own.

    Raises:
        UserError: nothing to read there, or a file of it is damaged; ``length`` is none that the model reads.
    """
    path = Path(source)
    config = load_config(config_class_of_run(path), path / "config.yaml") if (path / "config.yaml").is_file() else None
    read: list[str] = []
    if (
        config is not None
        and not Checkpointer(path / "checkpoints", 1, read.append).steps()
        and _is_single_seed(config)
    ):
        model, step = config.model, None
        if model.vocab_size is None:
            raise UserError(f"{path} has neither a checkpoint nor a vocabulary yet: let the run get that far")
        architecture, shapes = _expected_parameters(config)
        tokenizer, task = load_tokenizer(path), config.task if isinstance(config, FinetuneConfig) else None
        read.append("no checkpoint yet: sizes are those of config.yaml")
    else:
        found = load(source, read.append)
        model, step, architecture, tokenizer = found.config, found.step, found.architecture, found.tokenizer
        shapes = {name: leaf.shape for name, leaf in traverse_util.flatten_dict(found.params).items()}
        task = None if found.task is None else found.task.name
    parts = _parts(model, shapes, architecture, config, length)
    facts = {
        "source": str(source),
        "kind": "published model" if config is None else f"{KINDS[type(config)]} run",
        "architecture": architecture,
        "task": task,
        "step": step,
        "model": dataclasses.asdict(model),
        **parts,
        "vocabulary": _vocabulary(tokenizer, model),
        "read": read,
    }
    if config is not None:
        facts |= {"origin": _origin(path), **_history(path, config)}
    return facts


def _is_single_seed(config: RunConfig) -> bool:
    return not isinstance(config, FinetuneConfig) or config.seeds == 1


def _expected_parameters(config: RunConfig) -> tuple[str, Shapes]:
    """Architecture and shapes that a run without a checkpoint is going to have."""
    labels, feature_layers = 0, None
    if isinstance(config, PretrainConfig):
        labelled = OBJECTIVES[config.data.objective].label
        architecture = "BertForPreTraining" if labelled else "BertForMaskedLM"
    else:
        task, feature_layers = make_task(config), config.feature_layers
        architecture, labels = HEADS[task.head].__name__, task.num_labels
    # Of a head that is not in the table of names nothing is known before there is a checkpoint.
    known = architecture if architecture in names.ARCHITECTURES else "Bert"
    shapes = expected_shapes(config.model, known, labels)
    parts = names.ARCHITECTURES[known]
    if feature_layers is not None:
        shapes = {**shapes, "classifier/kernel": (feature_layers * config.model.hidden_size, labels)}
    kept = {}
    for name, shape in shapes.items():
        part = names.POOLER if name.startswith(f"{names.POOLER}/") else name.split("/")[0]
        if part == names.ENCODER or part in parts:
            kept[tuple(name.split("/"))] = tuple(shape)
    return architecture, kept


def _part_of(path: tuple[str, ...]) -> str:
    """The line of the table that a parameter belongs to."""
    if path[:2] == ("bert", "embeddings"):
        return f"embeddings/{path[2]}"
    if path[:2] == ("bert", "encoder"):
        return "layers/norm" if path[3].endswith("_norm") else ATTENTION if path[3] == "attention" else FEED_FORWARD
    return path[1] if path[0] == "bert" else path[0]


def _place(part: str) -> tuple[int, str]:
    return (PART_ORDER.index(part) if part in PART_ORDER else len(PART_ORDER)), part


def _parts(
    model: ModelConfig, shapes: Shapes, architecture: str, config: RunConfig | None, length: int | None
) -> Facts:
    """Parameters and operations, part by part and in all."""
    parameters: dict[str, int] = {}
    for path, shape in shapes.items():
        part = _part_of(path)
        parameters[part] = parameters.get(part, 0) + math.prod(shape)
    tokens, predictions = _row(model, config, length)
    outputs = {
        path[0]: (math.prod(shape), architecture in TOKEN_HEADS)
        for path, shape in shapes.items()
        if path[0] not in ("bert", PREDICTIONS) and path[-1] == "kernel"
    }
    forward = forward_flops(model, tokens, parameters, predictions, outputs)
    frozen_layers = 0
    frozen: tuple[str, ...] = ()
    if isinstance(config, FinetuneConfig):
        frozen_layers = config.frozen_layers or 0
        if config.feature_layers is not None:
            frozen_layers, frozen = model.num_hidden_layers, (POOLER,)
    return {
        "parameters": sum(parameters.values()),
        "parts": [
            {"part": part, "parameters": count, "flops_per_token": forward.get(part, 0.0)}
            for part, count in sorted(parameters.items(), key=lambda item: _place(item[0]))
        ],
        "flops_per_token": {
            "sequence_length": tokens,
            "predictions": predictions if PREDICTIONS in parameters else 0,
            "forward": sum(forward.values()),
            "training": training_flops(forward, model.num_hidden_layers, frozen_layers, frozen),
            "formula": {part: text for part, text in FORMULA.items() if part in parameters},
        },
    }


def _row(model: ModelConfig, config: RunConfig | None, length: int | None) -> tuple[int, int]:
    """Tokens T a row, and predictions P."""
    if length is not None and not 1 <= length <= model.max_position_embeddings:
        raise UserError(
            f"length is {length}, and the model reads 1 to {model.max_position_embeddings} tokens: choose one of these"
        )
    if isinstance(config, PretrainConfig):
        most, share, own = config.data.max_predictions_per_sequence, config.data.masked_lm_prob, config.data
        tokens = length or own.sequence_length
        return tokens, max(1, min(most, round(share * tokens)))
    own_length = PUBLISHED_LENGTH if config is None else config.data.max_length
    tokens = length or min(own_length, model.max_position_embeddings)
    return tokens, max(1, round(DEFAULT_MASKED_LM_PROB * tokens))


def _vocabulary(tokenizer: Tokenizer, model: ModelConfig) -> Facts:
    pieces = tokenizer.get_vocab()
    special = special_tokens(pieces)
    kind = "WordPiece" if special == SPECIAL_TOKENS else "byte-level BPE"
    facts = {
        "kind": kind,
        "pieces": len(pieces),
        "rows": model.vocab_size,
        "special": {token: pieces[token] for token in special},
        "fingerprint": tokenizer_fingerprint(tokenizer),
    }
    if kind == "WordPiece":
        lowercase = getattr(tokenizer.normalizer, "lowercase", None)
        accents = getattr(tokenizer.normalizer, "strip_accents", None)
        facts |= {
            "lowercase": lowercase,
            "strip_accents": lowercase if accents is None else accents,
            "continuing": sum(piece.startswith(CONTINUATION) and piece != CONTINUATION for piece in pieces),
            "characters": sum(len(piece.removeprefix(CONTINUATION)) == 1 for piece in pieces),
            "unused": sum(piece.startswith("[unused") for piece in pieces),
        }
    return {**facts, "spare_rows": max(0, (model.vocab_size or 0) - embedding_rows(tokenizer))}


def _origin(path: Path) -> list[str]:
    """What the weights started from, and that from, back to the first: as far as the folders are still there."""
    chain: list[str] = []
    seen = {path.resolve()}
    while True:
        config: RunConfig = load_config(config_class_of_run(path), path / "config.yaml")
        if config.init is None or config.init == "none":
            like = getattr(config, "like", None)
            return [*chain, "random weights" + (f" of the sizes of {like}" if like else "")]
        source = Path(config.init)
        if not (source / "config.yaml").is_file():
            known = "a published model" if source.is_dir() else "not here any more, or a name on the hub"
            return [*chain, f"{config.init} ({known})"]
        chain.append(f"{config.init} ({KINDS[config_class_of_run(source)]} run)")
        if source.resolve() in seen:  # a run that was moved to where it had started from
            return chain
        seen.add(source.resolve())
        path = source


def _history(path: Path, config: RunConfig) -> Facts:
    """Checkpoints, metrics and scores of a run."""
    checkpoints = Checkpointer(path / "checkpoints", config.training.keep_checkpoints, lambda text: None)
    lines = read_metrics(path)
    results = _results(path)
    train = [line for line in lines if line.get("split") == "train"]
    rates = [line["tokens_per_second"] for line in train if line.get("tokens_per_second")]
    steps = config.training.steps
    direction = make_task(config).higher_is_better if isinstance(config, FinetuneConfig) else metrics.higher_is_better
    return {
        "checkpoints": {"steps": checkpoints.steps(), "kept_as_best": checkpoints.protected},
        "training": {
            "last_step": max((line["step"] for line in lines), default=0),
            "steps": None if steps is None else int(steps),
            "epochs": config.training.epochs,
            "seconds": results.get("seconds"),
            "tokens_per_second": float(np.median(rates)) if rates else None,
            "metrics": [
                _metric_history(lines, split, name, direction(name))
                for split in ("train", "eval")
                for name in _metric_names(lines, split)
                if name != "tokens_per_second"
            ],
        },
        "scores": _scores(results),
    }


def _metric_names(lines: list[dict[str, Any]], split: str) -> list[str]:
    held = (line for line in lines if line.get("split") == split)
    return list(dict.fromkeys(name for line in held for name in line if name not in ("step", "split")))


def _metric_history(lines: list[dict[str, Any]], split: str, name: str, higher: bool | None) -> Facts:
    """One metric's first, last and best value with their steps; best is None for a metric without a direction."""
    points = [(line["step"], line[name]) for line in lines if line.get("split") == split and name in line]
    numbers = [(step, value) for step, value in points if isinstance(value, (int, float))]
    best = None
    if higher is not None and numbers:
        best = (max if higher else min)(numbers, key=lambda point: point[1])
    return {
        "split": split,
        "name": name,
        **{
            key: None if point is None else {"step": point[0], "value": point[1]}
            for key, point in (("first", points[0]), ("last", points[-1]), ("best", best))
        },
    }


def _results(path: Path) -> Facts:
    """What results.json holds; nothing while the run has not ended."""
    file = path / "results.json"
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError):
        content = None
    if not isinstance(content, dict):
        raise UserError(f"{file} is damaged: remove it and run the same command again, which writes it again")
    return content


def _scores(results: Facts) -> dict[str, dict[str, float | None]]:
    """Final scores by split, and beside them what a baseline scores."""
    if "eval" in results:
        baselines = results.get("baselines", {})
        flat = {name: value for name, value in baselines.items() if not isinstance(value, dict)}
        nested = {name: value for name, value in baselines.items() if isinstance(value, dict)}
        return {"eval": results["eval"], **nested, **({"majority": flat} if flat else {})}
    baseline = results.get("baseline")
    return {
        **{split: results[split] for split in scored_splits(results)},
        **({baseline: results[baseline]} if baseline else {}),
    }
