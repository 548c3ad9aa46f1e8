"""Exports models to other formats, and compares int8 graphs with float graphs."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from bert.config import FinetuneConfig
from bert.config.run_file import load_run_config
from bert.config.yaml_io import load_config
from bert.data.inputs import as_filled_texts
from bert.data.records import read_texts
from bert.data.rows import Rows
from bert.errors import (
    Log,
    UserError,
    WarningText,
    log_message,
    renamed_argument,
    require,
    system_errors_as_user_errors,
)
from bert.interchange import ExportError, hub
from bert.interchange.readers import hf
from bert.metrics import retrieval
from bert.model.names import ARCHITECTURES, PROJECTIONS
from bert.remote import writable
from bert.tasks.base import Task
from bert.tasks.splits import read_splits, require_dev

TOLERANCE = 0.01
"""Default of the maximum relative loss of score by int8."""


@dataclass(frozen=True)
class Int8Check:
    """Compares a float graph with its int8 version.

    Attributes:
        task: task that computes the score on dev; None for the cosine similarity of embeddings.
        examples: dev examples; texts if there is no task.
        features: rows of the examples; None if there is no task.
    """

    source: str
    task: Task | None
    examples: Any
    features: Rows | None
    tolerance: float

    @classmethod
    def from_model(cls, model: Any, dev: Any, tolerance: float) -> Self:
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
            raise UserError(f"{model.source} is not a run and has no score to compare: export it without quantize")
        examples = _dev_examples(model, task, dev)
        if not examples.labelled:
            raise UserError(f"the rows of dev for {model.source} have no labels: pass labelled ones")
        return cls(model.source, task, examples, task.features(model.tokenizer, examples, model.data), tolerance)

    def __call__(self, float_model: Any, int8_model: Any) -> str:
        """Compares two `bert.Pretrained` with a graph, and returns a Markdown table.

        Raises:
            ExportError: the int8 graph loses more than the tolerance.
        """
        outputs, speeds = zip(*map(self._measure, (float_model, int8_model)), strict=True)
        if self.task is None:
            name, scores = "cosine with the float model", [1.0, _mean_cosine(*outputs)]
        else:
            name = self.task.main_metric
            predictions = (
                self.task.predict(each, require(self.features, "the rows"), self.examples) for each in outputs
            )
            scores = [self.task.score(each, self.examples)[name] for each in predictions]
        self._require_kept(name, *scores)
        sizes = [
            sum(
                file.stat().st_size for file in model.graph.parent.glob(f"{model.graph.name}*")
            )  # with external weights
            for model in (float_model, int8_model)
        ]
        rows = [
            ("", "float", "int8"),
            ("---", "---", "---"),
            (name, *(f"{score:.4f}" for score in scores)),
            ("megabytes", *(f"{size / 1e6:.1f}" for size in sizes)),
            ("rows per second", *(f"{speed:.1f}" for speed in speeds)),
        ]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)

    def _measure(self, model: Any) -> tuple[Any, float]:
        """Returns the embeddings, or the outputs of the head, and the rows per second."""
        inputs = self.examples if self.task is None else require(self.features, "the rows")
        run = model.embed if self.task is None else model.outputs
        run(inputs)  # warm-up
        start = time.perf_counter()
        outputs = run(inputs)
        return outputs, len(inputs) / (time.perf_counter() - start)

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
    examples = read_splits(task, config).examples
    require_dev(examples, model.source)
    return examples["dev"]


def _texts(model: Any, dev: Any) -> list[Any]:
    """Returns the texts for the comparison of embeddings. Raises UserError."""
    if model.architecture != "Bert":
        raise UserError(
            f"{model.source} has no task and no embeddings to compare ({model.architecture}): export it without "
            "quantize"
        )
    if dev is None:
        raise UserError(f"{model.source} has no dev rows: pass typical texts as dev, or a file with one text per line")
    texts = as_filled_texts("text", read_texts(Path(dev), "text") if isinstance(dev, str | os.PathLike) else dev)
    if not texts:
        raise UserError("dev has no texts: pass at least one")
    return texts


def _mean_cosine(first: Any, second: Any) -> float:
    if isinstance(first, list):  # vectors of tokens
        first, second = np.concatenate(first), np.concatenate(second)
    return float(np.mean(np.sum(retrieval.normalized(first) * retrieval.normalized(second), axis=1)))


@renamed_argument("say", "log")
@system_errors_as_user_errors()
def save(
    model: Any,
    out: str | Path,
    format: str = "hf",
    log: Log = log_message,
    *,
    length: int | None = None,
    dynamic_length: bool = False,
    quantize: str | None = None,
    dev: Any = None,
    tolerance: float = TOLERANCE,
    base: str | None = None,
) -> None:
    """Writes the model in another format atomically, and compares the outputs of the written model.

    Args:
        out: a new or empty folder, or the URL of a new folder.
        format: the format to write.

            - ``hf``: a folder for Hugging Face transformers.
            - ``stablehlo``: a function that needs only JAX.
            - ``onnx``: a graph for ONNX Runtime and others, for any number of rows and tokens.
            - ``peft``: the adapters of a run with ``lora.rank``, without the weights of the base model.
        log: called with what was written and compared. By default, the logger ``bert`` warns about settings that the
            format cannot express.
        length: number of tokens T of a ``stablehlo`` function's inputs; None for the model's maximum.
        dynamic_length: leave T of a ``stablehlo`` function variable, up to the model's maximum.
        quantize: ``int8`` writes the weights of an ``onnx`` graph in 8 bits (dynamic quantization), and compares its
            score on dev with the float graph's. For an embedding model without a task, the score is the mean cosine
            similarity between the embeddings of both graphs.
        dev: data for that score: None for the dev rows of a run, or one of the following.

            - Labelled rows or a file, as in `score`.
            - The folder of a task that reads its own files.
            - For an embedding model without a task, texts or a file with one text per line.
        tolerance: maximum relative loss of score by int8.
        base: hub name or folder of the base model that the files of ``peft`` name; None for the ``init`` of the run.

    Raises:
        ExportError: the outputs differ, or the int8 graph loses more.
        UserError: the format is unknown, the head has no equivalent in other libraries, an option belongs to another
            format, a library is not installed, or ``out`` exists and is not an empty folder.
    """
    from bert.interchange.writers import hf as hf_writer  # slow imports
    from bert.interchange.writers import onnx, peft, stablehlo

    writers: dict[str, Callable[..., None]] = {
        "hf": hf_writer.export,
        "stablehlo": stablehlo.export,
        "onnx": onnx.export,
        "peft": peft.export,
    }
    if format not in writers:
        raise UserError(f"format is {format!r}: choose one of {', '.join(writers)}")
    check_head(model)
    if model.task_adapters and format != "hf":
        warning = f"the adapters of {', '.join(model.task_adapters)} are left out: save the model of for_task(TASK)"
        log(WarningText(warning))
    if format != "hf" and model.config.is_static:
        raise UserError(f"{model.source} is a table of static embeddings, which {format} does not hold: use hf")
    if format != "hf" and model.query_model is not None:
        raise UserError(
            f"{model.source} has a separate model for queries, which {format} does not hold: use hf, or save "
            "model.for_role('query') and model.replace(query_model=None)"
        )
    temperature = getattr(model.task, "temperature", 1.0)
    if temperature != 1.0:  # an export needs no temperature, if the head has it
        params, task = _with_scaled_head(model.params, temperature), dataclasses.replace(model.task, calibration=None)
        model = dataclasses.replace(model, params=params, task=task)
    options: dict[str, Any] = {}
    if format == "stablehlo":
        options = {"length": length, "dynamic_length": dynamic_length}
    elif length is not None or dynamic_length:
        raise UserError(f"length and dynamic_length are for stablehlo: leave them out for {format}")
    if format == "peft":
        options = {"adapters": _adapters(model, base, temperature)}
    elif base is not None:
        raise UserError(f"base is for peft: leave it out for {format}")
    if quantize not in (None, "int8"):
        raise UserError(f"quantize is {quantize!r}: pass int8, or None for none")
    if quantize is not None and format != "onnx":
        raise UserError(f"quantize is for onnx: leave it out for {format}")
    if quantize is None and dev is not None:
        raise UserError("dev has an effect only with quantize: pass quantize as well, or leave out dev")
    if quantize is not None:
        onnx.check_exportable(model)
        check = Int8Check.from_model(model, dev, tolerance)
        options["accept"] = lambda *graphs: check(*(dataclasses.replace(model, graph=graph) for graph in graphs))
    with writable(out) as folder:
        # The folder of a URL is temporary.
        writers[format](model, folder, lambda text: log(type(text)(text.replace(str(folder), str(out)))), **options)


def _with_scaled_head(params: dict[str, Any], temperature: float) -> dict[str, Any]:
    """Returns the parameters of a classifier whose logits are divided by the temperature."""
    head = {name: (array / np.float32(temperature)).astype(array.dtype) for name, array in params["classifier"].items()}
    return {**params, "classifier": head}


def _adapters(model: Any, base: str | None, temperature: float) -> Any:
    """Returns the adapters of a run. Raises UserError if it has none, or if its base model has no name."""
    # Imported here because they import JAX.
    from bert.interchange.writers.peft import Adapters
    from bert.model.linear import FrozenWeights
    from bert.runs.checkpoint import Checkpointer
    from bert.runs.orbax_io import read_frozen_weights

    if model.step is None:
        raise UserError(f"{model.source} is not a run: peft is for runs with adapters (lora.rank)")
    path = Path(model.source)
    config = load_run_config(path)
    if not isinstance(config, FinetuneConfig) or config.lora.rank is None:
        raise UserError(f"{path} has no adapters (lora.rank is null), which peft needs: export it as hf")
    name = base or require(config.init, "init")
    if (base is None and not (hf.is_hf_folder(Path(name)) or hub.is_hub_name(name))) or (
        Path(name) / "config.yaml"
    ).is_file():
        raise UserError(
            f"{path} began with {name}, which is not a model of Hugging Face: write it with bert export {name} OUT, "
            "and pass OUT as base"
        )
    with Checkpointer(path / "checkpoints", config.training.max_to_keep, lambda text: None) as checkpoints:
        restored = checkpoints.restore_params(model.step)
    _, trained = require(restored, f"the checkpoint of step {model.step}")
    trained.pop(PROJECTIONS, None)
    trained = trained if temperature == 1.0 else _with_scaled_head(trained, temperature)
    frozen = FrozenWeights(read_frozen_weights(path, config.lora.checksum), config.lora.scale)
    return Adapters(frozen, trained, config.lora.rank, config.lora.alpha, name)


def check_head(model: Any) -> None:
    """Raises UserError if no format can express the model's head."""
    if model.architecture not in ARCHITECTURES:
        raise UserError(
            f"{model.source} has the head {model.architecture}, which has no names in other libraries: add them as "
            "described in CONTRIBUTING.md"
        )
    if model.num_feature_layers is not None:
        raise UserError(
            f"{model.source} has a head over {model.num_feature_layers} layers of a frozen encoder, which no export "
            "format supports: fine-tune without num_feature_layers"
        )


def push_to_hub(model: Any, name: str, *, private: bool = False, message: str = "Add a model of bert-jax") -> str:
    """Writes the model with `save` in the format ``hf``, and uploads it to the Hugging Face hub as one commit.

    Args:
        name: repository, ``organisation/name``, which is created if necessary.
        private: whether a new repository is private.
        message: commit message.

    Returns:
        The URL of the commit.

    Raises:
        UserError: see `save`; also if the repository cannot be written (name, access or network).
    """
    return hub.upload(model.save, name, private, message)
