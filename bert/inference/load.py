"""`bert.load`, which reads runs and published models."""

from __future__ import annotations

import dataclasses
import numbers
import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from bert.config import FinetuneConfig, PretrainConfig, TaskDataConfig
from bert.config.pretraining import phase_of_step
from bert.config.run_file import check_vocabulary, load_run_config
from bert.data.long_texts import LongTexts
from bert.errors import (
    Log,
    UserError,
    WarningText,
    log_message,
    renamed_argument,
    require,
    shorten,
    system_errors_as_user_errors,
)
from bert.files import path_text, read_json_object
from bert.inference.export import check_head
from bert.inference.pretrained import Pretrained
from bert.interchange import hub
from bert.interchange.bundle import PAIR_CLASSIFIERS
from bert.interchange.names import ARCHITECTURES_WITH_LABELS, SIGNATURE_FILE, TASKS
from bert.interchange.readers import google, hf
from bert.interchange.readers.peft import is_adapter, tokenizer_folder
from bert.interchange.sentence_transformers.reader import IDENTITY, encoder_folder, find_router, is_static
from bert.interchange.sentence_transformers.routes import DOCUMENT
from bert.interchange.stored_params import StoredParams
from bert.interchange.tensor_files import weight_files
from bert.interchange.weights_records import WeightsRecord, content_key, read_record, write_record
from bert.model.late_interaction import Role
from bert.model.names import ARCHITECTURE_OF_KIND, ENCODER_DECODER, PROJECTION, PROJECTIONS, pretraining_architecture
from bert.model.parameters import Params
from bert.model.pooling import PooledDense, find_activation
from bert.parallel.devices import require_no_fork
from bert.remote import fetch, is_url
from bert.runs.checkpoint_directory import CheckpointDirectory
from bert.runs.folder import FROZEN_WEIGHTS, TARGET_TOKENIZER, run_and_step
from bert.runs.metrics_log import read_results
from bert.runtime.compilation_cache import use_compilation_cache
from bert.tasks import make_task
from bert.tasks.base import Task
from bert.tasks.embedding import make_pooling
from bert.tasks.registry import published_task
from bert.tasks.sequence_to_sequence import SequenceToSequenceTask
from bert.tokenizer.vocabulary import load_tokenizer, require_embedding_rows

KIND_OF_ARCHITECTURE = {name: kind for kind, name in ARCHITECTURE_OF_KIND.items()}
"""The task kind of each architecture that `Pretrained.predict` supports."""

ENGINES = {"jax": ("float32", "bfloat16"), "onnxruntime": ("float32", "int8")}
"""Engines that run a model, with the types of the computation that each supports."""

DEFAULT_QA_LENGTH = 384
"""Row length of published question answering models, which split long texts into windows as in SQuAD training."""


@renamed_argument("say", "log")
@system_errors_as_user_errors()
def load(
    source: str | os.PathLike[str] | Pretrained,
    log: Log = log_message,
    *,
    step: int | None = None,
    revision: str | None = None,
    dtype: str = "float32",
    adapter: str | os.PathLike[str] | None = None,
    engine: str = "jax",
) -> Pretrained:
    """Loads a model: the newest valid pretraining checkpoint, the best fine-tuning checkpoint, or a published model.

    Enables JAX's compilation cache (`bert.runtime.compilation_cache`), so that later processes do not recompile.

    Args:
        source: one of the following. ``RUN@STEP`` and ``organisation/name@revision`` select a checkpoint or a revision.

            - the folder of a run, or a `bert.Run`;
            - a folder written by transformers, sentence-transformers or google-research/bert;
            - the URL of such a folder;
            - a hub name (``organisation/name``), which is downloaded if no such path exists;
            - with ``adapter``, also a loaded model, whose arrays the result shares, except the adapted ones.
        log: called with messages about loaded parts, ignored settings, randomly initialized parts and skipped damaged
            checkpoints. By default, the logger ``bert`` warns about ignored settings and damaged checkpoints.
        step: step of a run's checkpoint.
        revision: branch, tag or commit of a hub model.
        dtype: type of the computation: ``float32``, ``bfloat16`` with JAX, or ``int8`` with ONNX Runtime (dynamic
            quantization of the weights). Results are float32.
        adapter: folder, URL or hub name of a LoRA adapter in PEFT's format, which is added to the model's weights.
        engine: ``jax``, or ``onnxruntime`` for a model's encoder and task head on a CPU (extra ``onnx``). Its graph is
            written to the user's cache folder and compared with the model on first use. Later, neither JAX is imported
            nor are the weights read, except by methods that need them, such as `generate`.

    Raises:
        UserError: there is no model, no valid checkpoint, or the requested one does not exist.
    """
    if engine not in ENGINES:
        raise UserError(f"engine is {engine!r}: use {' or '.join(ENGINES)}")
    if dtype not in ENGINES[engine]:
        raise UserError(f"dtype is {dtype!r}: use {' or '.join(ENGINES[engine])} with the engine {engine}")
    require_no_fork()
    if isinstance(source, Pretrained):
        if adapter is None:
            raise UserError("source is a loaded model: pass adapter as well, or the name of a model")
        loaded = load(source.source, log, step=step, revision=revision, dtype=dtype, adapter=adapter, engine=engine)
        return share_arrays(loaded, source)
    source = path_text(source)
    if step is not None and (isinstance(step, bool) or not isinstance(step, numbers.Integral)):
        raise UserError(f"step is {shorten(step)}: pass a whole number")
    if revision is not None and not isinstance(revision, str):
        raise UserError(f"revision is {shorten(revision)}: pass a branch, a tag or a commit as a string")
    if revision is not None and not hub.is_hub_name(source):
        raise UserError(f"{source} is not a model on the hub: remove revision")
    use_compilation_cache()
    name = source if revision is None else f"{source}@{revision}"
    folder, own_step = _find(name, weights=True)
    step = own_step if step is None else int(step)
    if step is not None and not _is_run(folder):
        raise UserError(f"{source} is not a run: remove step")
    if adapter is not None:
        model = _load_published(folder, name, log, adapter=_find_adapter(adapter, folder))
        if engine == "onnxruntime":
            _check_graph(model)
    elif engine == "onnxruntime":
        model = _load_for_graph(folder, name, step, log)
    else:
        model = _load_run(folder, step, log) if _is_run(folder) else _load_published(folder, name, log)
    model = model.replace(dtype=dtype, engine=engine)
    return model if _is_run(folder) else _with_query_model(model, folder, log)


def _with_query_model(model: Pretrained, folder: Path, log: Log) -> Pretrained:
    """Adds the model of queries, if the folder has one.

    Raises:
        UserError: its embeddings have another width.
    """
    router = find_router(folder)
    if router is None:
        return model
    if model.engine == "onnxruntime":
        query_model = _load_for_graph(folder, model.source, None, log, "query")
    else:
        query_model = _load_published(folder, model.source, log, route="query")
    widths = (query_model.embedding_size, model.embedding_size)
    if widths[0] != widths[1]:
        raise UserError(
            f"{router.file}: the embeddings of queries have {widths[0]} features, and the embeddings of documents "
            f"{widths[1]}: use a model with equal numbers"
        )
    query_model = query_model.replace(dtype=model.dtype, engine=model.engine)
    if model.engine == "jax" and encoder_folder(folder, "query") == encoder_folder(folder):
        params = model._device_params  # one copy on the device for both models
        model, query_model = model.replace(params=params), query_model.replace(params=params)
    return model.replace(query_model=query_model, default_route=router.default)


def load_for_training(source: str | os.PathLike[str], log: Log) -> Pretrained:
    """Loads a model to train, or whose sizes to use. Logs a warning about a model for queries, or adapters of tasks.

    Raises:
        UserError: see `load`; also if the model is a table without layers.
    """
    model = load(source, log)
    if model.config.is_static:
        raise UserError(f"{model.source} is a table of static embeddings, which is not trained: use an encoder")
    if model.query_model is not None:
        log(WarningText(f"not loaded from {model.source}: the model of queries; the one of documents is used"))
    if model.task_adapters:
        log(WarningText(f"not loaded from {model.source}: the adapters of {', '.join(model.task_adapters)}"))
    return model.replace(query_model=None)


def _load_for_graph(folder: Path, name: str, step: int | None, log: Log, route: Role = DOCUMENT) -> Pretrained:
    """Loads a model for ONNX Runtime. Its weights are read on first use if there is a record of them."""
    is_run = _is_run(folder)

    def weights_of(step: int | None) -> tuple[int | None, str | None]:
        step, files = _run_weights(folder, step) if is_run else (None, _published_weights(folder, route))
        return step, content_key(files)

    step_found, key = weights_of(step)
    known = None if key is None else read_record(key)
    if is_run:
        model = _load_run(folder, step if known is None else step_found, log, known)
    else:
        model = _load_published(folder, name, log, known, route=route)
    if known is None:
        _check_graph(model)
        if key is not None and weights_of(model.step)[1] == key:  # nothing was written while the weights were read
            write_record(key, WeightsRecord.from_model(model))
    return model


def _check_graph(model: Pretrained) -> None:
    """Raises UserError if a model has no graph and needs one, or if the extra ``onnx`` is not installed."""
    if model.config.is_static:
        return
    from bert.interchange.writers.onnx import check_exportable  # imported here because it is slow

    check_head(model)
    check_exportable(model)


def _published_weights(folder: Path, route: Role) -> list[Path]:
    """Returns the files on which the parameters of a Hugging Face folder depend; [] for tables and other folders.

    Of a model with adapters of tasks it returns [], because adapters are added to weights that were read.
    """
    if not hf.is_hf_folder(folder) or is_adapter(folder) or is_static(folder, route):
        return []
    encoder = encoder_folder(folder, route)
    file = encoder / "config.json"
    files = [] if file.is_file() and TASKS in read_json_object(file) else weight_files(encoder)
    return [file, *files] if files else []


def _run_weights(folder: Path, step: int | None) -> tuple[int | None, list[Path]]:
    """Returns the step that `_load_run` reads from an undamaged run, and the files on which its parameters depend."""
    directory = CheckpointDirectory(folder / "checkpoints")
    if step is None and isinstance(load_run_config(folder), FinetuneConfig):
        step = directory.best
    if step is None:
        step = max(directory.steps(), default=None)
    checkpoint = directory.find().get(-1 if step is None else step)
    if checkpoint is None:
        return step, []
    frozen = [file for file in [folder / FROZEN_WEIGHTS] if file.is_file()]
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    return step, [folder / "config.yaml", *frozen, *files]


def _find_adapter(adapter: str | os.PathLike[str], base: Path) -> Path:
    """Returns the folder of an adapter, downloaded if necessary. Raises UserError."""
    if _is_run(base) or not hf.is_hf_folder(base) or is_adapter(base):
        raise UserError(
            f"{base} is not a folder of Hugging Face, to which adapters are added: export it with bert export"
        )
    if find_router(base) is not None:
        raise UserError(f"{base} has separate models for queries and documents, to which no adapter is added: leave it")
    name = path_text(adapter)
    folder = Path(fetch(name))
    if not folder.exists() and hub.is_hub_name(name):
        folder = hub.download(name, weights=True)
    if not is_adapter(folder):
        raise UserError(f"{name} holds no adapter of PEFT (adapter_config.json): name the folder of one")
    return folder


def share_arrays(model: Pretrained, base: Pretrained) -> Pretrained:
    """Returns the model with the arrays of ``base`` wherever they are equal.

    Arrays on the device are shared only if both models compute in the same type.
    """
    from flax import traverse_util

    from bert.inference.compiled import put_params

    own, others = (traverse_util.flatten_dict(each.params) for each in (model, base))
    equal = {path for path, array in own.items() if path in others and np.array_equal(array, others[path])}
    shared = dataclasses.replace(
        model,
        params=traverse_util.unflatten_dict({path: others[path] if path in equal else own[path] for path in own}),
    )
    if model._jax_dtype == base._jax_dtype:
        on_device = traverse_util.flatten_dict(base._device_params)
        placed = {path: on_device[path] if path in equal else own[path] for path in own}
        shared.__dict__["_device_params"] = put_params(traverse_util.unflatten_dict(placed), base._jax_dtype)
    return shared


def load_vocabulary(source: str | Path, log: Log = log_message) -> Tokenizer:
    """Loads only the tokenizer of a source for `load`. Raises UserError."""
    folder, _ = _find(source, weights=False)
    if google.is_google(folder) and not hf.is_hf_folder(folder):
        return google.read_tokenizer(folder, google.read_config(folder / google.CONFIG, log), log)
    return load_tokenizer(folder if _is_run(folder) else tokenizer_folder(encoder_folder(folder)), log=log)


def _find(source: str | Path, weights: bool) -> tuple[Path, int | None]:
    """Returns the folder of a run or model, downloaded if necessary, and the step of ``RUN@STEP``.

    Raises:
        UserError: there is neither a run nor a model.
    """
    path, step = fetch_model(source)
    if not path.exists():
        if not hub.is_hub_name(source):
            raise UserError(f"{path} does not exist: name the folder of a run or of a model")
        path = hub.download(str(source), weights)
    if path.is_file():
        raise UserError(f"{path} is a file: name the folder of a run or of a model")
    if weights and (path / SIGNATURE_FILE).is_file():
        raise UserError(
            f"{source} is an export to ONNX or StableHLO, which its README.md shows how to run: name a run, or an "
            "export in the format hf"
        )
    if not _is_run(path) and not hf.is_hf_folder(path) and not google.is_google(path):
        raise UserError(
            f"{source} holds neither a run (config.yaml) nor a model of Hugging Face (config.json) or Google "
            "(bert_config.json): use another folder"
        )
    return path, step


def fetch_model(source: str | Path) -> tuple[Path, int | None]:
    """Returns the folder and step of ``RUN@STEP``, or the path and None. URLs are copied to a local folder first."""
    folder, _, step = str(source).rpartition("@")
    if is_url(source) and step.isascii() and step.isdigit():
        return Path(fetch(folder)), int(step)
    return run_and_step(fetch(source))


def _is_run(folder: Path) -> bool:
    return (folder / "config.yaml").is_file()


def _load_published(
    folder: Path,
    name: str,
    log: Log,
    known: WeightsRecord | None = None,
    adapter: Path | None = None,
    route: Role = DOCUMENT,
) -> Pretrained:
    if hf.is_hf_folder(folder):
        read = hf.read_hf_model(folder, log, adapter, known, route)
    else:
        read = google.read_google_model(folder, log)
    task = published_task(
        KIND_OF_ARCHITECTURE.get(read.architecture),
        name,
        read.labels,
        read.problem_type,
        read.null_score_diff_threshold,
        read.label_thresholds,
        read.texts_per_input,
        read.clitics,
        find_activation(read.score_activation),
    )
    if read.architecture == ENCODER_DECODER:
        task = SequenceToSequenceTask(name=name, metrics=(), target_tokenizer=read.target_tokenizer)
    positions = read.config.max_position_embeddings
    length = min(DEFAULT_QA_LENGTH, positions) if task is not None and task.windows else positions
    own = read.long_texts or LongTexts(length)
    length = min(own.max_length, length)
    data = TaskDataConfig(
        max_length=length,
        max_query_length=min(TaskDataConfig.max_query_length, length // 2),
        pair_truncation=read.pair_truncation,
        long_texts=own.mode,
        doc_stride=own.stride,
    )
    return Pretrained(**{**vars(read), "source": name}, task=task, data=data)


def _load_run(path: Path, step: int | None, log: Log, known: WeightsRecord | None = None) -> Pretrained:
    config = load_run_config(path)
    if isinstance(config, FinetuneConfig) and config.num_seeds > 1:
        raise UserError(
            f"{path} holds the runs of {config.num_seeds} seeds: name one of them, for example "
            f"{path / f'seed-{config.seed}'} (results.json names the best one)"
        )
    if isinstance(config, FinetuneConfig) and config.embedding.has_token_vectors:
        known = None  # the projection is part of the pooling
    params: Any
    if known is None:
        step, params = _read_run_params(path, step, config, log)
        parts = frozenset(params)
    else:
        read = partial(_read_run_params, path, step, config, lambda text: None)
        params, parts = StoredParams(str(path), known.checksum, lambda: read()[1]), known.parts
    if isinstance(config, PretrainConfig):
        config = phase_of_step(config, require(step, "the step of the checkpoint"))
    task: Task | None = None
    settings: dict[str, Any] = {}
    if isinstance(config, FinetuneConfig):
        tuned = (read_results(path) or {}).get("tuned", {})
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, **tuned))
        task, settings = _task_of_run(path, config)
        if PROJECTION in parts:
            layer = PooledDense(np.asarray(params.pop(PROJECTION)["kernel"], np.float32), None, IDENTITY)
            settings["pooling"] = dataclasses.replace(settings["pooling"], dense=(layer,))
    architecture = pretraining_architecture(parts, config.model) if task is None else architecture_of(task)
    return Pretrained(
        config=config.model,
        params=params,
        tokenizer=load_run_tokenizer(path, config),
        task=task,
        step=step,
        source=str(path),
        architecture=architecture,
        labels=task.output_names if task is not None and architecture in ARCHITECTURES_WITH_LABELS else (),
        problem_type=None if task is None else task.problem_type,
        pair_truncation=config.data.pair_truncation if isinstance(config, FinetuneConfig) else "google",
        long_texts=_long_texts_of_run(config, task),
        **({} if task is None else task.bundle_fields),
        **settings,
    )


def _read_run_params(
    path: Path, step: int | None, config: PretrainConfig | FinetuneConfig, log: Log
) -> tuple[int, Params]:
    """Reads the step and the parameters of a checkpoint: of ``step``, of the best or of the newest one."""
    # Imported here because they are slow and other sources do not need them.
    from bert.model.linear import FrozenWeights
    from bert.runs.checkpoint import Checkpointer
    from bert.runs.orbax_io import read_frozen_weights

    with Checkpointer(path / "checkpoints", config.training.max_to_keep, log) as checkpoints:
        is_best = step is None and isinstance(config, FinetuneConfig)
        restored = checkpoints.restore_best_params() if is_best else checkpoints.restore_params(step)
    if restored is None:
        raise UserError(f"{path} has no checkpoint yet: let the run reach its first one")
    step, params = restored
    if isinstance(config, FinetuneConfig) and config.lora.rank is not None:
        params = FrozenWeights(read_frozen_weights(path, config.lora.checksum), config.lora.scale).merge(params)
    params.pop(PROJECTIONS, None)
    return step, params


def _long_texts_of_run(config: PretrainConfig | FinetuneConfig, task: Task | None) -> LongTexts | None:
    """Returns how a run reads long texts, and the length of its rows; None for tasks that read neither."""
    if not isinstance(config, FinetuneConfig) or task is None:
        return None
    if "long_texts" in task.data_keys:
        return LongTexts.from_config(config.data)
    return LongTexts(config.data.max_length) if architecture_of(task) in PAIR_CLASSIFIERS else None


def load_run_tokenizer(path: Path, config: PretrainConfig | FinetuneConfig) -> Tokenizer:
    """Loads the vocabulary of a run. Raises UserError if it does not match the model."""
    tokenizer = load_tokenizer(path)
    require_embedding_rows(tokenizer, config.model.known_vocab_size, path)
    check_vocabulary(path)
    return tokenizer


def load_target_tokenizer(path: Path, config: PretrainConfig | FinetuneConfig) -> Tokenizer | None:
    """Loads the separate target vocabulary of a run; None if there is none. Raises UserError."""
    if not isinstance(config, FinetuneConfig) or not config.has_target_tokenizer:
        return None
    tokenizer = load_tokenizer(path / TARGET_TOKENIZER)
    require_embedding_rows(tokenizer, config.model.decoder.known_vocab_size, path / TARGET_TOKENIZER)
    return tokenizer


def _task_of_run(path: Path, config: FinetuneConfig) -> tuple[Task, dict[str, Any]]:
    """Returns the task of a run, and further attributes of `Pretrained` from its configuration."""
    task = make_task(config)
    settings = {key: getattr(config, key) for key in ("data", "num_feature_layers", "classifier_dropout")}
    if "generate" in task.calls:
        tokenizer = load_target_tokenizer(path, config)
        settings |= {"target_tokenizer": tokenizer, "decoding": config.decoding}
        task = task.with_target_tokenizer(tokenizer)
    if "embed" in task.calls:
        settings["pooling"] = make_pooling(config.embedding, config.data.max_length)
    return task, settings


def architecture_of(task: Task) -> str:
    """Returns the architecture with which a model of the task is exported."""
    if known := task.architecture or ARCHITECTURE_OF_KIND.get(task.kind):
        return known
    from bert.model.heads import HEADS  # has the kinds of other packages

    return HEADS[task.kind].__name__
