"""Reads checkpoints of google-research/bert: ``bert_config.json``, ``bert_model.ckpt.*`` and ``vocab.txt``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bert.config import ModelConfig
from bert.config.model import Activation
from bert.errors import Log, UserError, WarningText, log_message, shorten
from bert.files import read_json_object
from bert.interchange.bundle import ModelBundle
from bert.interchange.families import GOOGLE_NAMES
from bert.interchange.names import ARCHITECTURES_WITH_LABELS, check_layers
from bert.interchange.readers.tf_checkpoint import Bundle
from bert.model import names
from bert.model.parameters import Params
from bert.tokenizer.vocabulary import load_tokenizer, require_embedding_rows

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CONFIG = "bert_config.json"
CHECKPOINT = "bert_model.ckpt"

OPTIMIZER = re.compile(
    r".+/(adam_[mv]|lamb_[mv]|(\w+Optimizer|Ada\w+|Momentum|RMSProp|Ftrl|Lion|ExponentialMovingAverage)(_\d+)?)"
    r"|global_step|beta[12]_power|(current_)?loss_scale|(num_)?(good|bad)_steps|signal_early_stopping/STOP"
)
"""Names of training variables, which are skipped.

They belong to the optimizer (optimization.py of google-research/bert, lamb_optimizer.py of albert), mixed precision,
moving averages and early stopping.
"""

WEIGHT = re.compile("(bert|cls)/.*|output_(weights|bias)")
"""Names of model weights."""

HEADS = {"BertForSequenceClassification": "output_weights", "BertForQuestionAnswering": "cls/squad/output_weights"}
"""Architectures of Google's run_classifier.py and run_squad.py, and the tensor that identifies each."""

ACTIVATIONS: dict[str, Activation] = {"gelu": "gelu_tanh", "relu": "relu", "tanh": "tanh"}
"""Maps ``hidden_act`` as in modeling.py's ``get_activation``, whose gelu is the tanh approximation."""

_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
    "type_vocab_size",
)
_RATES = ("hidden_dropout_prob", "attention_probs_dropout_prob", "initializer_range")
# The multilingual and Chinese configurations describe a pooler that modeling.py does not build.
_WITHOUT_EFFECT = ("directionality", "pooler_")


def is_google(folder: Path) -> bool:
    """Whether a folder looks like a Google checkpoint, complete or not."""
    return (folder / CONFIG).is_file() or any(folder.glob(f"{CHECKPOINT}.*"))


def read_google_model(folder: Path, log: Log = log_message) -> ModelBundle:
    """Reads model and vocabulary. Classifier labels are numbered, because these files do not name them."""
    config, params = read_params(folder, log)
    tokenizer = read_tokenizer(folder, config, log)
    make = partial(ModelBundle, config=config, params=params, tokenizer=tokenizer, pair_truncation="google")
    if names.CLASSIFIER in params:
        labels = tuple(f"LABEL_{label}" for label in range(len(params[names.CLASSIFIER]["bias"])))
        return make(architecture="BertForSequenceClassification", labels=labels)
    if names.QA_OUTPUTS in params:
        return make(architecture="BertForQuestionAnswering")
    return make(architecture=names.pretraining_architecture(set(params), config))


def read_params(folder: Path, log: Log = log_message) -> tuple[ModelConfig, Params]:
    """Reads the encoder, and the heads in the checkpoint.

    Returns:
        The configuration, and a nested dict of float32 arrays: ``bert``, and the heads of the
        checkpoint: ``predictions``, ``seq_relationship``, ``classifier``, ``qa_outputs``.

    Raises:
        UserError: a file is missing, damaged or malformed; a tensor is missing, unknown or has the wrong shape.
    """
    from flax import traverse_util  # imported here because JAX is slow to import

    from bert.interchange.shapes import expected_shapes

    config = read_config(folder / CONFIG, log)
    bundle = Bundle(_checkpoint(folder))
    name = f"{bundle.prefix}.index"
    entries = {key: entry for key, entry in bundle.entries.items() if not _is_of_training(key, entry.shape)}
    if any("/.ATTRIBUTES/" in key for key in entries):
        raise UserError(
            f"{name} is an object graph of TensorFlow 2, not a checkpoint of google-research/bert: use a folder with a "
            "checkpoint that holds bert/embeddings/word_embeddings and similar names"
        )
    architecture = next((head for head, sign in HEADS.items() if sign in entries), "BertForPreTraining")
    check_layers(config.num_hidden_layers, len(entries), name, CONFIG)
    table = GOOGLE_NAMES.tensors(config.num_hidden_layers, architecture)
    parts = {tensor.part for tensor in table if tensor.name in entries} | {names.ENCODER, names.POOLER}
    table = [tensor for tensor in table if tensor.part in parts]
    _raise_if_any(name, "lacks", (tensor.name for tensor in table if tensor.name not in entries))
    _raise_if_any(name, "holds unknown tensors,", entries.keys() - {tensor.name for tensor in table})
    labels = (entries["output_bias"].shape or (1,))[0] if architecture in ARCHITECTURES_WITH_LABELS else 0
    shapes = expected_shapes(config, architecture, labels)
    wrong = []
    for tensor in table:
        expected = shapes[tensor.paths[0]][:: -1 if tensor.transposed else 1]
        if (shape := entries[tensor.name].shape) != expected:
            wrong.append(f"{tensor.name} {list(shape)} instead of {list(expected)}")
    _raise_if_any(name, "has shapes that differ from the configuration,", wrong)

    arrays: dict[str, np.ndarray] = {}
    for tensor in table:
        array = bundle.read(tensor.name)
        if array.dtype.kind == "i":
            raise UserError(f"{name}: {tensor.name} holds whole numbers, not weights: use a checkpoint of BERT")
        arrays |= tensor.split(array)
    params = traverse_util.unflatten_dict(arrays, sep="/")
    count = sum(array.size for array in arrays.values())
    log(f"read {bundle.prefix}: {', '.join(params)} ({len(arrays)} tensors, {count:,} parameters)")
    if slots := len(bundle.entries) - len(entries):
        log(f"not loaded from {bundle.prefix}: {slots} tensors of the training program, such as the optimizer's")
    return config, params


def read_config(file: Path, log: Log = log_message) -> ModelConfig:
    """Reads ``bert_config.json``. Rates and activation are optional and default to Google's values.

    Keys that google-research/bert does not read have no effect, and are logged.

    Raises:
        UserError: the file is missing or malformed, a size is missing, or a value is not supported.
    """
    if not file.exists():
        raise UserError(f"{file} does not exist: copy it from the source of the checkpoint")
    content = read_json_object(file)
    _raise_if_any(str(file), "lacks", (key for key in _SIZES if key not in content))
    unknown = sorted(content.keys() - {*_SIZES, *_RATES, "hidden_act"})
    if others := [key for key in unknown if not key.startswith(_WITHOUT_EFFECT)]:
        log(WarningText(f"not loaded from {file}: {', '.join(others)}"))
    for key in (*_SIZES, *_RATES):
        whole = key in _SIZES
        value = content.get(key, 0.0)
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
            raise UserError(
                f"{file}: {key} is {shorten(value)}, which is not a {'whole ' if whole else ''}number: correct it"
            )
    _raise_if_any(str(file), "has sizes below 1,", (key for key in _SIZES if content[key] < 1))
    act = content.get("hidden_act", "gelu")
    if not isinstance(act, str) or act.lower() not in ACTIVATIONS:
        raise UserError(
            f"{file}: hidden_act is {shorten(act)}, which is not one of {', '.join(ACTIVATIONS)}: correct it"
        )
    config = ModelConfig(
        hidden_act=ACTIVATIONS[act.lower()],
        pooler_dropout=False,
        **{key: content[key] for key in (*_SIZES, *_RATES) if key in content},
    )
    try:
        config.check()
    except UserError as error:
        raise UserError(f"{file}: {error}") from None
    return config


def read_tokenizer(folder: Path, config: ModelConfig, log: Log = log_message) -> Tokenizer:
    """Reads the vocabulary.

    Google's files do not state whether texts are lower-cased. This is read from ``tokenizer.json`` or
    ``tokenizer_config.json`` if present, and otherwise inferred from the folder's name or the tokens.

    Raises:
        UserError: the vocabulary is missing or malformed, or has more tokens than the embedding has rows.
    """
    tokenizer = load_tokenizer(folder, log=log, detect_casing=True)
    require_embedding_rows(tokenizer, config.known_vocab_size, folder)
    return tokenizer


def _is_of_training(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor belongs to the training program: by its name, or because it is a scalar."""
    return OPTIMIZER.fullmatch(name) is not None or (shape == () and WEIGHT.fullmatch(name) is None)


def _checkpoint(folder: Path) -> Path:
    """Returns the checkpoint prefix: Google's name, the only checkpoint, or the newest according to TensorFlow."""
    if (folder / CHECKPOINT).is_file() or any(folder.glob(f"{CHECKPOINT}.*")):
        return folder / CHECKPOINT
    prefixes = sorted(folder / file.stem for file in folder.glob("*.index"))
    if len(prefixes) > 1 and (folder / "checkpoint").is_file():
        state = (folder / "checkpoint").read_text(encoding="utf-8", errors="replace")
        newest = re.search(r'^model_checkpoint_path: "(?:.*/)?([^/"]+)"$', state, re.MULTILINE)
        prefixes = [prefix for prefix in prefixes if newest and prefix.name == newest[1]] or prefixes
    if len(prefixes) != 1:
        what = f"{len(prefixes)} checkpoints" if prefixes else "no checkpoint"
        raise UserError(f"{folder} holds {what}: use a folder with one, {CHECKPOINT}.index and its data files")
    return prefixes[0]


def _raise_if_any(name: str, what: str, items: Iterable[str]) -> None:
    """Raises UserError if there are items. The message shows the first five and their number."""
    items = sorted(items)
    if items:
        more = f" and {len(items) - 5} more" if len(items) > 5 else ""
        raise UserError(f"{name} {what} {', '.join(items[:5])}{more}: take all files from one checkpoint of BERT")
