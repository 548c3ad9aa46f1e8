"""Exports models to other formats, and compares int8 graphs with float graphs."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import numpy as np

from bert.config import FinetuneConfig
from bert.config.yaml_io import load_config
from bert.data.inputs import as_filled_texts
from bert.data.records import read_texts
from bert.data.rows import Rows
from bert.errors import UserError, require
from bert.interchange import ExportError
from bert.metrics import retrieval
from bert.model.names import ARCHITECTURES
from bert.remote import writable
from bert.tasks.base import Outputs, Task
from bert.tasks.splits import read_splits

TOLERANCE = 0.01
"""Default of the maximum relative loss of score by int8."""


class Model(Protocol):
    """The attributes of `bert.Pretrained` that scoring uses."""

    @property
    def graph(self) -> Path | None:
        """File of the ONNX graph."""

    def outputs(self, features: Rows, batch_size: int = 32) -> Outputs:
        """Returns the outputs of the head, one array per row."""

    def embed(self, texts: Sequence[str], batch_size: int = 32) -> np.ndarray:
        """Returns the embeddings of texts."""


class GraphResult(NamedTuple):
    """Score, file size and speed of a graph on the dev set."""

    score: float
    num_bytes: int
    rows_per_second: float


@dataclass(frozen=True)
class Int8Check:
    """Compares a float graph with its int8 version.

    Attributes:
        source: source of the model, for messages.
        task: task that computes the score on dev; None for the cosine similarity of embeddings.
        examples: dev examples; texts if there is no task.
        features: rows of the examples; None if there is no task.
        tolerance: maximum relative loss of score.
    """

    source: str
    task: Task | None
    examples: Any
    features: Rows | None
    tolerance: float

    @classmethod
    def of(cls, model: Any, dev: Any, tolerance: float) -> Self:
        """Creates the check of a `bert.Pretrained`; see `Pretrained.save` for ``dev``.

        Raises:
            UserError: the model has no score, there are no dev rows, or the tolerance is invalid.
        """
        if not 0 <= tolerance < 1:
            raise UserError(f"tolerance is {tolerance}: pass a share of the score from 0 to less than 1")
        task: Task | None = model.task
        if task is None:
            return cls(model.source, None, _texts(model, dev), None, tolerance)
        if not task.main_metric:
            raise UserError(
                f"{model.source} is not a run, and has no score that int8 could lose: export it without quantize"
            )
        examples = _dev_examples(model, task, dev)
        if not examples.labelled:
            raise UserError(f"the rows of dev for {model.source} have no labels: pass labelled ones")
        return cls(model.source, task, examples, task.features(model.tokenizer, examples, model.data), tolerance)

    def __call__(self, float_model: Model, int8_model: Model) -> str:
        """Returns a table of both graphs. Raises ExportError if the int8 graph loses too much."""
        if self.task is None:
            (vectors, float_speed), (others, int8_speed) = (self._embed(model) for model in (float_model, int8_model))
            name, scores = "cosine with the float model", (1.0, _mean_cosine(vectors, others))
        else:
            name = self.task.main_metric
            (float_score, float_speed), (int8_score, int8_speed) = (
                self._scored(self.task, model) for model in (float_model, int8_model)
            )
            scores = (float_score, int8_score)
        sizes = (_num_bytes(require(model.graph, "the graph")) for model in (float_model, int8_model))
        results = [GraphResult(*parts) for parts in zip(scores, sizes, (float_speed, int8_speed), strict=True)]
        self._require_kept(name, *scores)
        return _table(name, *results)

    def _embed(self, model: Model) -> tuple[np.ndarray, float]:
        model.embed(self.examples)  # warm-up
        start = time.perf_counter()
        vectors = model.embed(self.examples)
        return vectors, len(self.examples) / (time.perf_counter() - start)

    def _scored(self, task: Task, model: Model) -> tuple[float, float]:
        features = require(self.features, "the rows")
        model.outputs(features)  # warm-up
        start = time.perf_counter()
        outputs = model.outputs(features)
        speed = len(features) / (time.perf_counter() - start)
        predictions = task.predict(outputs, features, self.examples)
        return task.score(predictions, self.examples)[task.main_metric], speed

    def _require_kept(self, name: str, float_score: float, int8_score: float) -> None:
        higher = self.task is None or self.task.higher_main_is_better
        loss = float_score - int8_score if higher else int8_score - float_score
        if not loss <= self.tolerance * abs(float_score):  # also catches NaN
            raise ExportError(
                f"{self.source}: int8 changes the {name} from {float_score:.6g} to {int8_score:.6g}, more than the "
                f"tolerance of {self.tolerance:g} allows: pass a larger tolerance, or export it without quantize"
            )


def _dev_examples(model: Any, task: Task, dev: Any) -> Any:
    """Returns the dev examples of a run, or the rows in ``dev``. Raises UserError."""
    is_folder = isinstance(dev, str | os.PathLike) and Path(dev).is_dir()
    if dev is not None and not is_folder:
        if "score" not in task.calls:
            raise UserError(f"{task.name} reads its own files: pass their folder as dev, or leave dev out")
        return task.labelled_examples(dev)
    if model.step is None:
        raise UserError(f"{model.source} is not a run and has no dev rows: pass labelled rows as dev")
    config = load_config(FinetuneConfig, Path(model.source) / "config.yaml")
    if dev is not None:
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, dir=os.fspath(dev)))
    return read_splits(task, config).examples["dev"]


def _texts(model: Any, dev: Any) -> list[Any]:
    """Returns the texts for the comparison of embeddings. Raises UserError."""
    if model.architecture != "Bert":
        raise UserError(
            f"{model.source} has no task and gives no embeddings ({model.architecture}), and so no score that int8 "
            "could lose: export it without quantize"
        )
    if dev is None:
        raise UserError(
            f"{model.source} has no dev rows: pass as dev some texts, or a file with one a line, such as it will read"
        )
    texts = as_filled_texts("text", read_texts(Path(dev), "text") if isinstance(dev, str | os.PathLike) else dev)
    if not texts:
        raise UserError("dev has no texts: pass at least one")
    return texts


def _num_bytes(graph: Path) -> int:
    """Returns the size in bytes of a graph's file and its external weights."""
    return sum(file.stat().st_size for file in graph.parent.glob(f"{graph.name}*"))


def _mean_cosine(first: np.ndarray, second: np.ndarray) -> float:
    return float(np.mean(np.sum(retrieval.normalized(first) * retrieval.normalized(second), axis=1)))


def _table(name: str, of_float: GraphResult, of_int8: GraphResult) -> str:
    """Formats both results as a Markdown table."""
    rows = [
        ("", "float", "int8"),
        ("---", "---", "---"),
        (name, *(f"{result.score:.4f}" for result in (of_float, of_int8))),
        ("megabytes", *(f"{result.num_bytes / 1e6:.1f}" for result in (of_float, of_int8))),
        ("rows per second", *(f"{result.rows_per_second:.1f}" for result in (of_float, of_int8))),
    ]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def save_model(
    model: Any,
    out: str | Path,
    format: str,
    log: Callable[[str], None],
    length: int | None,
    dynamic_length: bool,
    quantize: str | None,
    dev: Any,
    tolerance: float,
) -> None:
    """Writes a `bert.Pretrained` in another format; see its method `save`."""
    from bert.interchange.writers import hf, onnx, stablehlo  # slow imports

    writers = {"hf": hf.export, "stablehlo": stablehlo.export, "onnx": onnx.export}
    if format not in writers:
        raise UserError(f"format is {format!r}: choose one of {', '.join(writers)}")
    if model.architecture not in ARCHITECTURES:
        raise UserError(
            f"{model.source} has the head {model.architecture}, which has no names outside of this toolkit: give it "
            "some as CONTRIBUTING.md tells"
        )
    if model.num_feature_layers is not None:
        raise UserError(
            f"{model.source} has a head over {model.num_feature_layers} layers of a frozen encoder, which no export "
            "format has: fine-tune without num_feature_layers"
        )
    if format == "stablehlo":
        options: dict[str, Any] = {"length": length, "dynamic_length": dynamic_length}
    elif length is None and not dynamic_length:
        options = {}
    else:
        raise UserError(f"length and dynamic_length are for stablehlo: leave them out for {format}")
    if quantize not in (None, "int8"):
        raise UserError(f"quantize is {quantize!r}: pass int8, or None for none")
    if quantize is not None and format != "onnx":
        raise UserError(f"quantize is for onnx: leave it out for {format}")
    if quantize is None and dev is not None:
        raise UserError("dev is what an int8 graph is scored on: pass quantize as well, or leave it out")
    if quantize is not None:
        onnx.check_exportable(model)
        check = Int8Check.of(model, dev, tolerance)
        options["accept"] = lambda *graphs: check(*(dataclasses.replace(model, graph=graph) for graph in graphs))
    with writable(out) as folder:
        writers[format](model, folder, lambda text: log(_with_path(text, folder, out)), **options)


def _with_path(text: str, folder: Path, out: str | Path) -> str:
    """Replaces the temporary ``folder`` in a message by ``out``."""
    return type(text)(text.replace(str(folder), str(out)))
