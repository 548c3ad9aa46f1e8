"""Reads the checkpoints of google-research/bert: ``bert_config.json``, ``bert_model.ckpt.*``, ``vocab.txt``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from bert.config import ModelConfig, TokenizerConfig, UserError
from bert.interchange.tf_bundle import Bundle
from bert.tokenizer import load_tokenizer, vocabulary_size

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Params = dict[str, Any]
Say = Callable[[str], None]

CONFIG = "bert_config.json"
CHECKPOINT = "bert_model.ckpt"


class Row(NamedTuple):
    """One parameter, or with ``{layer}`` in its names one of every layer.

    Attributes:
        ours: its path in our tree.
        google: its name in Google's checkpoints.
        shape: its shape in our tree, in the letters of `_sizes`.
        transposed: whether Google stores it the other way round.
    """

    ours: str
    google: str
    shape: str
    transposed: bool = False


def _dense(ours: str, google: str, inputs: str, outputs: str) -> tuple[Row, ...]:
    return (
        Row(f"{ours}/kernel", f"{google}/kernel", f"{inputs} {outputs}"),
        Row(f"{ours}/bias", f"{google}/bias", outputs),
    )


def _norm(ours: str, google: str) -> tuple[Row, ...]:
    return Row(f"{ours}/scale", f"{google}/gamma", "D"), Row(f"{ours}/bias", f"{google}/beta", "D")


def _output(ours: str, google: str, outputs: str) -> tuple[Row, ...]:
    """The last dense layer of a head, which Google's scripts write as a bare matrix [outputs, D]."""
    return (
        Row(f"{ours}/kernel", f"{google}output_weights", f"D {outputs}", transposed=True),
        Row(f"{ours}/bias", f"{google}output_bias", outputs),
    )


_EMBEDDINGS, _LAYER = "bert/embeddings", "bert/encoder/layer_{layer}"

GOOGLE_NAMES: tuple[Row, ...] = (
    Row(f"{_EMBEDDINGS}/word/embedding", f"{_EMBEDDINGS}/word_embeddings", "V D"),
    Row(f"{_EMBEDDINGS}/position/embedding", f"{_EMBEDDINGS}/position_embeddings", "positions D"),
    Row(f"{_EMBEDDINGS}/segment/embedding", f"{_EMBEDDINGS}/token_type_embeddings", "segments D"),
    *_norm(f"{_EMBEDDINGS}/norm", f"{_EMBEDDINGS}/LayerNorm"),
    *_dense(f"{_LAYER}/attention/query", f"{_LAYER}/attention/self/query", "D", "D"),
    *_dense(f"{_LAYER}/attention/key", f"{_LAYER}/attention/self/key", "D", "D"),
    *_dense(f"{_LAYER}/attention/value", f"{_LAYER}/attention/self/value", "D", "D"),
    *_dense(f"{_LAYER}/attention/output", f"{_LAYER}/attention/output/dense", "D", "D"),
    *_norm(f"{_LAYER}/attention_norm", f"{_LAYER}/attention/output/LayerNorm"),
    *_dense(f"{_LAYER}/intermediate", f"{_LAYER}/intermediate/dense", "D", "F"),
    *_dense(f"{_LAYER}/output", f"{_LAYER}/output/dense", "F", "D"),
    *_norm(f"{_LAYER}/output_norm", f"{_LAYER}/output/LayerNorm"),
    *_dense("bert/pooler", "bert/pooler/dense", "D", "D"),
    *_dense("predictions/transform", "cls/predictions/transform/dense", "D", "D"),
    *_norm("predictions/norm", "cls/predictions/transform/LayerNorm"),
    Row("predictions/bias", "cls/predictions/output_bias", "V"),
    *_output("seq_relationship", "cls/seq_relationship/", "2"),
    *_output("classifier", "", "L"),  # run_classifier.py
    *_output("qa_outputs", "cls/squad/", "2"),  # run_squad.py: start, end
)
"""The encoder and all heads; a checkpoint has some of the heads."""

OPTIMIZER = re.compile(
    r".+/(adam_[mv]|lamb_[mv]|(AdamWeightDecay|LAMB)Optimizer(_1)?|Adam(_1)?)|global_step|beta[12]_power"
)
"""Names of what belongs to the optimizer (optimization.py of google-research/bert, lamb_optimizer.py of albert)."""

ACTIVATIONS = {"gelu": "gelu_tanh", "relu": "relu", "tanh": "tanh"}
"""``hidden_act`` as modeling.py's ``get_activation`` reads it -> ours: its gelu is the tanh form."""

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
# The configurations of the multilingual and the Chinese model say these of a pooler that modeling.py does not build.
_WITHOUT_EFFECT = ("directionality", "pooler_")


def is_google(folder: Path) -> bool:
    """Whether this looks like one of Google's folders, be it a whole one or not."""
    return (folder / CONFIG).is_file() or any(folder.glob(f"{CHECKPOINT}.*"))


def google_names(config: ModelConfig) -> dict[str, tuple[str, bool]]:
    """Our path of every parameter, all heads included -> its name in Google's checkpoints, and whether transposed."""
    return {row.ours: (row.google, row.transposed) for row in _rows(config)}


def read(folder: Path, say: Say = lambda text: None) -> tuple[ModelConfig, Params]:
    """The encoder, and those heads that the checkpoint has.

    Args:
        folder: with ``bert_config.json`` and one checkpoint.
        say: told what was read and what was left out.

    Returns:
        The sizes, and a nested dict of float32 arrays: ``bert``, and of ``predictions``, ``seq_relationship``,
        ``classifier``, ``qa_outputs`` what there is.

    Raises:
        UserError: a file is missing, damaged or malformed; a tensor is missing, unknown or of another shape.
    """
    config = read_config(folder / CONFIG, say)
    bundle = Bundle(_checkpoint(folder))
    name = f"{bundle.prefix}.index"
    entries = {key: entry for key, entry in bundle.entries.items() if not OPTIMIZER.fullmatch(key)}
    if any("/.ATTRIBUTES/" in key for key in entries):
        raise UserError(
            f"{name} is one of TensorFlow 2's object graphs, not a checkpoint of google-research/bert: name a folder "
            f"whose checkpoint holds {GOOGLE_NAMES[0].google} and its like"
        )
    parts = {row.ours.split("/")[0] for row in _rows(config) if row.google in entries} | {"bert"}
    rows = [row for row in _rows(config) if row.ours.split("/")[0] in parts]
    _complain(name, "lacks", (row.google for row in rows if row.google not in entries))
    _complain(name, "holds unknown tensors,", entries.keys() - {row.google for row in rows})
    sizes = _sizes(config)
    if "output_bias" in entries:
        sizes["L"] = entries["output_bias"].shape[0] if entries["output_bias"].shape else 1
    wrong = []
    for row in rows:
        shape = tuple(sizes[letter] for letter in row.shape.split())
        if entries[row.google].shape != (expected := shape[::-1] if row.transposed else shape):
            wrong.append(f"{row.google} {list(entries[row.google].shape)} instead of {list(expected)}")
    _complain(name, "has other shapes than the configuration says,", wrong)

    params: Params = {}
    for row in rows:
        *path, leaf = row.ours.split("/")
        place = params
        for key in path:
            place = place.setdefault(key, {})
        array = bundle.read(row.google)
        if array.dtype.kind == "i":
            raise UserError(f"{name}: {row.google} holds whole numbers, not weights: name a checkpoint of BERT")
        place[leaf] = np.ascontiguousarray(array.T if row.transposed else array, np.float32)
    count = sum(int(np.prod(entries[row.google].shape)) for row in rows)
    say(f"from {bundle.prefix}: {', '.join(params)} ({len(rows)} tensors, {count:,} parameters)")
    if slots := len(bundle.entries) - len(entries):
        say(f"not taken over: {slots} tensors of the optimizer")
    return config, params


def read_config(file: Path, say: Say = lambda text: None) -> ModelConfig:
    """``bert_config.json`` as our sizes; rates and activation may be left out there, and are then Google's defaults.

    Keys that google-research/bert does not know have no effect there, and none here: they are said.

    Raises:
        UserError: the file is missing or malformed, a size is missing, or a value cannot be built.
    """
    try:
        given = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{file} does not exist: copy it from where the checkpoint came from") from None
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}): mend its permissions or copy it again") from None
    except ValueError:
        raise UserError(f"{file} is not valid JSON: copy it again from where the checkpoint came from") from None
    if not isinstance(given, dict):
        raise UserError(f"{file} is not a JSON object: copy it again from where the checkpoint came from")
    _complain(str(file), "lacks", (key for key in _SIZES if key not in given))
    unknown = sorted(given.keys() - {*_SIZES, *_RATES, "hidden_act"})
    if others := [key for key in unknown if not key.startswith(_WITHOUT_EFFECT)]:
        say(f"not taken over from {file}: {', '.join(others)}")
    for key in (*_SIZES, *_RATES):
        whole = key in _SIZES
        value = given.get(key, 0.0)
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
            raise UserError(f"{file}: {key} is {value!r}, which is not a {'whole ' if whole else ''}number: mend it")
    _complain(str(file), "has sizes below 1,", (key for key in _SIZES if given[key] < 1))
    act = given.get("hidden_act", "gelu")
    if not isinstance(act, str) or act.lower() not in ACTIVATIONS:
        raise UserError(f"{file}: hidden_act is {act!r}, which is not one of {', '.join(ACTIVATIONS)}: mend it")
    config = ModelConfig(
        hidden_act=ACTIVATIONS[act.lower()], **{key: given[key] for key in (*_SIZES, *_RATES) if key in given}
    )
    try:
        config.check()
    except UserError as error:
        raise UserError(f"{file}: {error}") from None
    return config


def read_tokenizer(folder: Path, config: ModelConfig, say: Say = lambda text: None) -> Tokenizer:
    """The vocabulary, lower-casing where the folder's name or the pieces say so: Google's files do not say it.

    A ``tokenizer.json`` or ``tokenizer_config.json`` beside it, where somebody has put one, knows better.

    Args:
        folder: with ``vocab.txt``.
        config: whose ``vocab_size`` the vocabulary must fit.
        say: told whether text is lower-cased, and why.

    Raises:
        UserError: no vocabulary, a malformed one, or one with more pieces than the embedding has rows.
    """
    vocabulary = load_tokenizer(folder)
    lowercase, why = _casing(folder.resolve().name, vocabulary.get_vocab())
    tokenizer = load_tokenizer(folder, TokenizerConfig(lowercase=lowercase))
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        say(f"text is {'lower-cased' if lowercase else 'not lower-cased'}: {why}")
    if (pieces := vocabulary_size(tokenizer)) > config.vocab_size:
        raise UserError(
            f"{folder} has {pieces} pieces in its vocabulary, but vocab_size in {CONFIG} is {config.vocab_size}: "
            "take both files from one checkpoint"
        )
    return tokenizer


def _casing(name: str, pieces: dict[str, int]) -> tuple[bool, str]:
    """Whether to lower-case, and why."""
    for sign, lowercase in (("uncased", True), ("cased", False)):
        if sign in name.lower():
            return lowercase, f'the folder\'s name says "{sign}"'
    words = (piece for piece in pieces if not re.fullmatch(r"\[.*\]", piece))
    capital = next((piece for piece in words if piece != piece.lower()), None)
    if capital is None:
        return True, "no piece of the vocabulary has an upper-case letter"
    return False, f"the vocabulary has upper-case letters, as in {capital!r}"


def _checkpoint(folder: Path) -> Path:
    """The checkpoint's prefix: Google's name, else the only one there, else the one that TensorFlow noted as newest."""
    if (folder / CHECKPOINT).is_file() or any(folder.glob(f"{CHECKPOINT}.*")):
        return folder / CHECKPOINT
    found = sorted(folder / file.stem for file in folder.glob("*.index"))
    if len(found) > 1 and (folder / "checkpoint").is_file():
        state = (folder / "checkpoint").read_text(encoding="utf-8", errors="replace")
        newest = re.search(r'^model_checkpoint_path: "(?:.*/)?([^/"]+)"$', state, re.MULTILINE)
        found = [prefix for prefix in found if newest and prefix.name == newest[1]] or found
    if len(found) != 1:
        what = f"{len(found)} checkpoints" if found else "no checkpoint"
        raise UserError(f"{folder} holds {what}: a folder of Google's holds one, {CHECKPOINT}.index and its data files")
    return found[0]


def _rows(config: ModelConfig) -> Iterator[Row]:
    """The table with every layer written out."""
    for row in GOOGLE_NAMES:
        for layer in range(config.num_hidden_layers if "{layer}" in row.ours else 1):
            yield row._replace(ours=row.ours.format(layer=layer), google=row.google.format(layer=layer))


def _sizes(config: ModelConfig) -> dict[str, int]:
    """What the letters in the table's shapes stand for; L, the labels, is the checkpoint's own."""
    return {
        "V": config.vocab_size,
        "D": config.hidden_size,
        "F": config.intermediate_size,
        "positions": config.max_position_embeddings,
        "segments": config.type_vocab_size,
        "2": 2,
    }


def _complain(name: str, what: str, items: Iterator[str] | set[str] | list[str]) -> None:
    """Raises UserError where there are items: the first five, and how many."""
    items = sorted(items)
    if items:
        more = f" and {len(items) - 5} more" if len(items) > 5 else ""
        raise UserError(f"{name} {what} {', '.join(items[:5])}{more}: take all files from one checkpoint of BERT")
