"""Writes Hugging Face transformers folders, and verifies them by reading them back."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from flax import traverse_util
from tokenizers import Tokenizer

from bert.config import ModelConfig
from bert.config.model import BIASES, IN_ATTENTION
from bert.data.encoding import tokenize
from bert.errors import Log, UserError, WarningText, first_line
from bert.files import atomic_directory
from bert.interchange import ExportError
from bert.interchange.bundle import ModelBundle
from bert.interchange.families import Family, family_of
from bert.interchange.families.base import Limit
from bert.interchange.generation_files import (
    EOS,
    GENERATION_CONFIG,
    generation_config,
    unexpressed_decoding,
)
from bert.interchange.readers import hf
from bert.interchange.sentence_transformers.reader import lower_case
from bert.interchange.sentence_transformers.routes import QUERY_FOLDER, write_router
from bert.interchange.sentence_transformers.writer import write_pooling_files, write_static
from bert.interchange.shapes import expected_shapes
from bert.interchange.task_adapters import declared_tasks, write_task_adapters
from bert.interchange.tensor_files import write_tensors
from bert.interchange.writers.averaging import with_averaging_layer
from bert.interchange.writers.hf_files import (
    ACTIVATIONS,
    model_card,
    published_config,
    published_tokenizer,
    published_tokenizers,
    save_published_tokenizer,
)
from bert.interchange.writers.signature import make_forward, parameters, signature
from bert.model import names
from bert.model.positions import sinusoidal_position_table
from bert.tokenizer.library import special_ids

TOLERANCE = 1e-4
"""Maximum difference between our logits and transformers'."""

SCALED = ("kernel", "scale")
"""Names of parameters that may have a bias."""

SAMPLES = (
    "Don't stop: it's 3.14, e.g. at café Müller's!",
    "CamelCase_and under_scores\t[MASK] <mask> naïve ﬁne ½",
    "中文 and 日本語のテキスト, ελληνικά, кириллица, العربية",
    "",
)
"""Texts that expose differences between tokenizers."""


def export(model: ModelBundle, out: Path, log: Log) -> None:
    """Writes ``out`` atomically: config.json, model.safetensors, tokenizer files and a model card.

    A model for queries is written to a subfolder, and the modules of both become the routes of a Router. The folder is
    read back, and compared by tensors and, if transformers is installed, by logits.

    Raises:
        UserError: ``out`` exists and is not an empty folder, its parent is not writable, or transformers' class of the
            family does not support the model.
        ExportError: the tensors that were read back or the logits differ.
    """
    with atomic_directory(out) as draft:
        log(_write_verified(model, draft))
        if model.query_model is not None:
            log(_write_query_model(model, model.query_model, draft))
    if (text := unexpressed_decoding(model.decoding)) is not None:
        log(WarningText(text))
    log(f"{out} holds {', '.join(sorted(path.name for path in out.iterdir()))}")


def _write_verified(model: ModelBundle, folder: Path) -> str:
    """Writes the files of a model and returns a sentence on their comparison with it. Raises UserError, ExportError."""
    if model.config.is_static:
        write_static(model, folder)
        return _verify_static(model, folder)
    model = _lower_cased(to_transformers_compatible(model))
    _write(model, folder)
    return _verify(model, folder)


def _lower_cased(model: ModelBundle) -> ModelBundle:
    """Returns the model with a tokenizer that lower-cases, if it lower-cases texts."""
    pooling, tokenizer = lower_case(model.pooling, model.tokenizer)
    return dataclasses.replace(model, pooling=pooling, tokenizer=tokenizer)


def _write_query_model(model: ModelBundle, query_model: ModelBundle, folder: Path) -> str:
    """Adds the model of queries to the folder of ``model``, and makes both the routes of a Router."""
    sides = [_lower_cased(each) for each in (model, query_model)]
    settings = [
        (
            each.config,
            each.architecture,
            each.params_checksum,
            each.tokenizer.to_str(),
            each.pooling_or_default.max_length,
        )
        for each in sides
    ]
    shares_encoder, place, pooling = settings[0] == settings[1], folder / QUERY_FOLDER, sides[1].pooling_or_default
    if shares_encoder:
        write_pooling_files(pooling, query_model.config, place)
        text = "queries share the encoder"
    else:
        place.mkdir()
        text = f"queries: {_write_verified(query_model, place)}"
    write_router(folder, model.default_route, shares_encoder)
    with (folder / "README.md").open("a", encoding="utf-8") as card:
        card.write(
            f"\nThis is the model of documents. `{QUERY_FOLDER}` has the model of queries. sentence-transformers reads "
            "both: call `encode_query` and `encode_document`.\n"
        )
    if hf.read_hf_model(folder, lambda text: None, route="query").pooling != pooling:
        raise ExportError(f"{model.source}: the model of queries does not read back as it was: not exported")
    return text


def _verify_static(model: ModelBundle, folder: Path) -> str:
    """Reads a table back and returns a sentence on the comparison. Raises ExportError for any difference."""
    again = hf.read_hf_model(folder, lambda text: None)
    parts = [(m.config, m.params_checksum, m.pooling, m.tokenizer.to_str()) for m in (model, again)]
    if parts[0] != parts[1]:
        raise ExportError(f"{model.source}: its export does not read back as it was: not exported")
    return "verified: the table and the tokenizer read back identical"


def to_transformers_compatible(model: ModelBundle) -> ModelBundle:
    """Returns an equivalent model with the parts of transformers' classes.

    Fixed positions become a position table. Positions, segments and biases that the model lacks become zeros.
    Parameters that a decoder shares with its encoder are duplicated.

    A classifier over the mean of the tokens gets a further layer that averages them (`with_averaging_layer`).

    The generator of replaced-token detection is omitted, because it is a separate model (`Pretrained.generator`).

    Raises:
        UserError: transformers has no equivalent.
    """
    if model.config.pooler_type == "norm" and model.architecture == "BertForSequenceClassification":
        model = with_averaging_layer(model)
    config, family = model.config, family_of(model)
    if model.architecture not in family.classes:
        two_parts = names.SEQ_RELATIONSHIP in names.ARCHITECTURES[model.architecture]
        raise UserError(
            f"{model.source} is a {model.architecture} of {family.title}'s form, which transformers does not have: "
            f"{_other_formats(model)}" + (", or pretrain with data.input_format full_sentences" if two_parts else "")
        )
    has_head = names.PREDICTIONS in names.ARCHITECTURES[model.architecture]
    segments = "bert/embeddings/segment" in family.names.modules and not family.may_lack_segments
    bias = "prediction_bias" in family.limits and family.limits["prediction_bias"].value
    # Settings that transformers lacks, and that would not be read back.
    absent = [] if "pooler" in model.params["bert"] else ["pooler_act", "pooler_type", "pooler_input"]
    absent += [] if has_head else ["prediction_transform", "prediction_bias", "prediction_softcap"]
    absent += ["use_bias", "norm_bias"]
    plain = config.without_aliases
    use_bias = family.limits["use_bias"].value if "use_bias" in family.limits else config.use_bias
    if use_bias:  # biases that the model lacks become zeros
        absent += [key for key in BIASES if key in family.limits and family.limits[key].value is None]
    values = {
        **{key: getattr(plain, key) for key in ("num_key_value_heads", "attention_head_size")},
        **{key: None if config.has_bias(key) == use_bias else config.has_bias(key) for key in BIASES},
        "embedding_size": None if config.embedding_width == config.hidden_size else config.embedding_width,
        "position_embedding_type": kind if (kind := config.position_embedding_type) in IN_ATTENTION else "learned",
        "type_vocab_size": config.type_vocab_size or int(segments),
        "prediction_bias": config.prediction_bias or bias,
        **{key: family.limits[key].value for key in absent if key in family.limits},
        **family.initial,
    }
    if kind != "rotary":
        values |= {key: getattr(ModelConfig, key) for key in vars(config) if key.startswith("rotary_")}
    trees = {name: tree for name, tree in model.params.items() if name != "generator"}
    params = traverse_util.flatten_dict(trees, sep="/")
    sides = {names.ENCODER, names.part_of(names.word_embeddings(model.architecture))}
    for side in sides:
        if model.config.position_embedding_type == "sinusoidal":
            params[f"{side}/embeddings/position/embedding"] = np.asarray(sinusoidal_position_table(model.config))
        elif model.config.position_embedding_type == "none":
            rows = config.position_offset + config.max_position_embeddings
            params[f"{side}/embeddings/position/embedding"] = np.zeros((rows, config.embedding_width), np.float32)
    padding = special_ids(model.tokenizer).find("pad") or 0
    config, params = family.separate(dataclasses.replace(config, **values), params, padding)
    _check_expressible(model, config, family)
    for side in sides:
        if segments and not model.config.type_vocab_size:
            params[f"{side}/embeddings/segment/embedding"] = np.zeros((1, config.embedding_width), np.float32)
    for path, shape in expected_shapes(config, model.architecture, len(model.labels)).items():
        if path.endswith("/bias") and not params.keys().isdisjoint(path.replace("/bias", f"/{x}") for x in SCALED):
            params.setdefault(path, np.zeros(shape, np.float32))
    if has_head and bias:
        params.setdefault("predictions/bias", np.zeros(config.decoder.known_vocab_size, np.float32))
    params = traverse_util.unflatten_dict(params, sep="/")
    return dataclasses.replace(model, config=config, params=params, tokenizer=published_tokenizer(model))


def _other_formats(model: ModelBundle) -> str:
    """Returns the end of an error message for a model that transformers does not support."""
    return "export it as stablehlo" + ("" if names.has_decoder(model.architecture) else " or onnx")


def _check_expressible(model: ModelBundle, config: ModelConfig, family: Family) -> None:
    """Raises UserError for the first setting of ``config`` that the family does not support in transformers."""
    limits = dict(family.limits)
    if names.PREDICTIONS in model.params and family.prediction_act is not None:
        limits["hidden_act"] = Limit(family.prediction_act, f"its MLM head has {family.prediction_act}")
    if config.hidden_act not in ACTIVATIONS:
        raise UserError(
            f"{model.source} has model.hidden_act {config.hidden_act}, which transformers does not have: "
            f"{_other_formats(model)}"
        )
    for key, limit in limits.items():
        if (value := getattr(config, key)) != limit.value:
            raise UserError(
                f"{model.source} has model.{key} {str(value).lower()}, which transformers' {family.title} cannot "
                f"express, as {limit.reason}: {_other_formats(model)}"
            )
    offset, padding = config.position_offset, special_ids(model.tokenizer).find("pad")
    if offset and padding != offset - 1:
        raise UserError(
            f"{model.source} has model.position_offset {offset}, and transformers' {family.title} counts positions "
            f"from the padding id, which is {padding}: {_other_formats(model)}"
        )


def published_tensors(model: ModelBundle) -> dict[str, np.ndarray]:
    """Returns all parameters with transformers' names and layout. Raises UserError if one has no name."""
    config, family = model.config, family_of(model)
    arrays = traverse_util.flatten_dict(model.params, sep="/")
    table = family.names.tensors(config.num_distinct_layers, model.architecture, config.decoder.num_distinct_layers)
    tensors = {tensor.name: tensor.join(arrays) for tensor in table if arrays.keys() >= set(tensor.paths)}
    if nameless := sorted(set(arrays) - {path for tensor in table for path in tensor.paths}):
        raise UserError(
            f"{model.source}: {', '.join(nameless[:4])} have no name in Hugging Face's models: {_other_formats(model)}"
        )
    if family.decoder_bias and not config.tie_word_embeddings and names.PREDICTIONS in model.params:
        tensors[family.decoder_bias] = np.asarray(model.params[names.PREDICTIONS]["bias"])
    tensors = family.to_files(config, tensors)
    if model.architecture == "Bert":  # a bare encoder is written without the prefix
        prefix = f"{family.prefix}."
        tensors = {name.removeprefix(prefix): array for name, array in tensors.items()}
    return tensors


def _write(model: ModelBundle, folder: Path) -> None:
    file = folder / "model.safetensors"
    write_tensors(file, published_tensors(model))
    files = {"config.json": published_config(model) | declared_tasks(model.task_adapters)}
    if names.has_decoder(model.architecture):
        files[GENERATION_CONFIG] = generation_config(model)
    elif model.end_ids:
        files[GENERATION_CONFIG] = {EOS: list(model.end_ids)}
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    write_task_adapters(model.task_adapters, folder)
    if model.pooling is not None:
        write_pooling_files(model.pooling, model.config, folder)
    for tokenizer, place in published_tokenizers(model, folder):
        segments = model.config.type_vocab_size > 1  # with a single segment, the model class makes the ids
        save_published_tokenizer(tokenizer, place, model.row_length, segments)
    architecture = family_of(model).classes[model.architecture]
    (folder / "README.md").write_text(model_card(model, architecture), encoding="utf-8")
    shutil.copymode(folder / "README.md", file)  # the library restricts its file to the owner


def _verify(model: ModelBundle, folder: Path) -> str:
    """Reads the folder back and returns a sentence on the comparison. Raises ExportError for any difference."""
    parts = {names.part_of(path) for path in traverse_util.flatten_dict(model.params, sep="/")}
    needed = set(names.parts_of(model.architecture, model.config))
    if model.architecture != "Bert" and (missing := needed - parts):
        raise ExportError(f"{model.source} has no {', '.join(sorted(missing))}, which {model.architecture} needs")
    try:
        again = to_transformers_compatible(hf.read_hf_model(folder, lambda text: None))
    except UserError as error:
        raise ExportError(f"{model.source}: its export does not read back ({error}): not exported") from None
    written, read = (traverse_util.flatten_dict(m.params, sep="/") for m in (model, again))
    wrong = sorted(set(written) ^ set(read))
    wrong += [key for key in set(written) & set(read) if not np.array_equal(written[key], read[key])]
    settings = [
        (
            m.labels,
            m.problem_type,
            m.label_thresholds,
            m.texts_per_input,
            m.classifier_dropout,
            m.score_activation,
            m.pooling,
            declared_tasks(m.task_adapters),
        )
        for m in (model, again)
    ]
    # pooler_dropout has no key in config.json and only affects training.
    configs = [dataclasses.replace(m.config.resolved, pooler_dropout=None) for m in (model, again)]
    if wrong or configs[0] != configs[1] or settings[0] != settings[1]:
        what = ", ".join(wrong[:5]) or "settings"
        raise ExportError(f"{model.source}: its export does not read back as it was, {what} differ: not exported")
    verified = f"verified: {len(jax.tree.leaves(again.params))} tensors read back identical"
    try:
        difference = logits_difference(model, folder)
    except Exception as error:  # the library raises various exceptions
        raise ExportError(f"{model.source}: transformers does not run its export ({first_line(error)})") from error
    if difference is None:
        return f"{verified}; transformers is not installed, so its logits were not compared"
    if not difference <= TOLERANCE:  # also catches NaN
        raise ExportError(f"{model.source}: transformers' logits differ by {difference:.2g}: not exported")
    for tokenizer, place in published_tokenizers(model, folder):
        if (text := find_tokenizer_mismatch(tokenizer, place, model.config.max_position_embeddings)) is not None:
            raise ExportError(f"{model.source}: transformers' tokenizer returns other ids for {text!r}: not exported")
    if model.config.type_vocab_size > 1 and not has_equal_types(published_tokenizer(model), folder):
        raise ExportError(f"{model.source}: transformers' tokenizer returns other token types: not exported")
    return f"{verified}, logits within {difference:.1g} of transformers', token ids equal"


def find_tokenizer_mismatch(tokenizer: Tokenizer, folder: Path, max_length: int) -> str | None:
    """Returns the first test text for which transformers' tokenizer makes other ids; None if all ids are equal."""
    import transformers

    vocabulary = sorted(tokenizer.get_vocab())
    some = np.random.default_rng(0).choice(len(vocabulary), (4, 12))
    texts = [*SAMPLES, *(" ".join(vocabulary[i] for i in row) for row in some)]
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    tokens = tokenize(tokenizer, texts, max_length)
    expected = reference(texts, truncation=True, max_length=max_length)["input_ids"]
    rows = zip(texts, expected, tokens.offsets, tokens.offsets[1:], strict=False)
    return next((text for text, ids, start, end in rows if ids != tokens.ids[start:end].tolist()), None)


def has_equal_types(tokenizer: Tokenizer, folder: Path) -> bool:
    """Returns whether transformers' tokenizer gives the tokens of a pair the same types."""
    import transformers

    ours, pair = tokenizer.encode(*SAMPLES[:2]), transformers.AutoTokenizer.from_pretrained(folder)(*SAMPLES[:2])
    return bool(pair.get("token_type_ids", [0] * len(ours.ids)) == ours.type_ids)


@contextlib.contextmanager
def _without_notices() -> Iterator[None]:
    """Suppresses transformers' progress bar, and its report of parts that the export omits on purpose."""
    from transformers.utils import logging

    level, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if has_bars:
            logging.enable_progress_bar()


def logits_difference(model: ModelBundle, folder: Path) -> float | None:
    """Returns the maximum difference from transformers' outputs on random rows; None if it is not installed."""
    try:
        import torch
        import transformers
    except ImportError:
        return None
    model = dataclasses.replace(model, pooling=None)  # transformers returns no embeddings of texts
    config = model.config
    architecture = family_of(model).classes[model.architecture]
    with _without_notices():
        reference = getattr(transformers, architecture).from_pretrained(folder, attn_implementation="eager").eval()
    random = np.random.default_rng(0)
    length = min(24, config.max_position_embeddings)
    shape = (2, 2, length) if model.architecture == "BertForMultipleChoice" else (4, length)
    # transformers derives RoBERTa's positions and GPT-2's last token from the ids that are not padding.
    padding = reference.config.pad_token_id or 0
    ids = random.integers(config.position_offset, config.vocab_size, shape)
    ids[ids == padding] = (padding + 1) % config.known_vocab_size
    if (separator := config.global_attention_sep_id) is not None:  # transformers requires the three of a pair
        ids[ids == separator] = next(number for number in range(3) if number not in (padding, separator))
        ids[..., [length // 4, length // 4 + 1, length // 2 - 1]] = separator
    segments = random.integers(0, max(config.type_vocab_size, 1), shape)
    mask = np.ones(shape, int)
    mask[-1, ..., length // 2 :] = 0
    ids[mask == 0] = padding
    inputs = {"input_ids": ids, "token_type_ids": segments, "attention_mask": mask}
    if not config.type_vocab_size or names.has_decoder(model.architecture):
        del inputs["token_type_ids"]
    if names.has_decoder(model.architecture):
        inputs["decoder_input_ids"] = random.integers(0, config.decoder.known_vocab_size, shape)
    theirs = pad_left(inputs) if family_of(model).pads_left else inputs
    with torch.no_grad():
        expected = reference(**{name: torch.tensor(array) for name, array in theirs.items()}).to_tuple()
    outputs = jax.device_get(make_forward(model)(parameters(model), inputs))
    differences = []
    for name, reference_output in zip(signature(model).outputs, expected, strict=False):
        ours, other = outputs[name], reference_output.numpy()
        if ours.shape[: mask.ndim] == mask.shape:  # per token
            ours, other = ours[mask > 0], other[theirs["attention_mask"] > 0]
        differences.append(np.abs(ours - other).max())
    return float(np.max(differences))  # NaN if one of them is


def pad_left(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Moves the padding of rows [..., T] to their beginning."""
    order = np.argsort(inputs["attention_mask"], axis=-1, kind="stable")
    return {name: np.take_along_axis(array, order, axis=-1) for name, array in inputs.items()}
