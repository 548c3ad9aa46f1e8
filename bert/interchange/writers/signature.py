"""Named inputs and outputs of an exported graph, shared by all formats, and the README.md that describes them.

Names match Hugging Face transformers' models, so that the output of its tokenizers can be passed unchanged.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from bert.config import ModelConfig
from bert.data.late_interaction import expansion_id, skipped_ids
from bert.errors import UserError
from bert.files import write_atomic
from bert.interchange import ExportError
from bert.interchange.bundle import ModelBundle
from bert.interchange.generation_files import generation_config
from bert.interchange.modules import build_module
from bert.interchange.names import EMBEDDING, SIGNATURE_FILE, TOKEN_EMBEDDINGS, TOKEN_MASK
from bert.interchange.writers.hf_files import describe_labels, published_tokenizers, save_published_tokenizer
from bert.interchange.writers.long_texts import long_text_rule
from bert.model import names
from bert.model.late_interaction import MEAN_MAX_SIM, Role
from bert.model.pooling import Pooling
from bert.tokenizer.hf_settings import truncation_side
from bert.tokenizer.library import special_ids

BATCH, CHOICES, LENGTH, TARGET_LENGTH = "batch_size", "num_choices", "sequence_length", "target_length"
"""Names of the free dimensions B, C and T, and of the T of an encoder-decoder's target."""

TOLERANCE = 1e-4
"""Maximum difference between an output of the graph and of the model."""

Arrays = dict[str, Any]
Shape = tuple[int | str, ...]


Size = TypeVar("Size")


class Signature(NamedTuple):
    """Names and shapes of a graph's inputs (integers) and outputs (float32), in order. Free dimensions have names."""

    inputs: dict[str, Shape]
    outputs: dict[str, Shape]


def signature(model: ModelBundle, length: int | None = None) -> Signature:
    """Returns inputs [B, T], or [B, C, T] for choices, and the outputs of the architecture. T is free if not given.

    A graph with fewer than two segments has no input for them. An encoder-decoder reads a source and the beginning of a
    target.
    """
    config, tokens, target = model.config, (BATCH, length or LENGTH), (BATCH, length or TARGET_LENGTH)
    rows: Shape = (BATCH, CHOICES, tokens[1]) if model.architecture == "BertForMultipleChoice" else tokens
    inputs = dict.fromkeys(("input_ids", "attention_mask", "token_type_ids"), rows)
    if config.type_vocab_size < 2:
        del inputs["token_type_ids"]
    if names.has_decoder(model.architecture):
        inputs = {"input_ids": tokens, "attention_mask": tokens, "decoder_input_ids": target}
    labels = len(model.labels)
    outputs: dict[str, dict[str, Shape]] = {
        "Bert": {"last_hidden_state": (*tokens, config.hidden_size), "pooler_output": (BATCH, config.hidden_size)},
        "BertForPreTraining": {
            "prediction_logits": (*tokens, config.known_vocab_size),
            "seq_relationship_logits": (BATCH, 2),
        },
        "BertForMaskedLM": {"logits": (*tokens, config.known_vocab_size)},
        "BertForCausalLM": {"logits": (*tokens, config.known_vocab_size)},
        "BertForNextSentencePrediction": {"logits": (BATCH, 2)},
        "BertForReplacedTokenDetection": {"logits": tokens},
        "BertForSequenceClassification": {"logits": (BATCH, labels)},
        "BertForTokenClassification": {"logits": (*tokens, labels)},
        "BertForQuestionAnswering": {"start_logits": tokens, "end_logits": tokens},
        "BertForMultipleChoice": {"logits": (BATCH, CHOICES)},
        "BertForSequenceToSequence": {"logits": (*target, config.decoder.known_vocab_size)},
    }
    named = outputs[model.architecture]
    if "pooler" not in model.params["bert"]:
        named.pop("pooler_output", None)
    if (pooling := model.graph_pooling) is not None and pooling.has_token_vectors:
        named |= {TOKEN_EMBEDDINGS: (*tokens, model.embedding_size), TOKEN_MASK: tokens}
    elif pooling is not None:
        named[EMBEDDING] = (BATCH, model.embedding_size)
    return Signature(inputs, named)


def resolve_shape(shape: Shape, sizes: Mapping[str, Size]) -> tuple[int | Size, ...]:
    """Replaces the free dimensions of a shape by sizes."""
    return tuple(sizes[dim] if isinstance(dim, str) else dim for dim in shape)


def parameters(model: ModelBundle) -> dict[str, np.ndarray]:
    """Returns the float32 arrays that the graph reads, by path (``bert/encoder/layer_0/...``).

    Raises:
        UserError: the model has no weights for the architecture's head.
    """
    parts = {names.ENCODER, *names.parts_of(model.architecture, model.config)}
    flat = traverse_util.flatten_dict(model.params, sep="/")
    arrays = {path: array for path, array in flat.items() if names.part_of(path) in parts}
    missing = parts - set(map(names.part_of, arrays)) - ({names.POOLER} if model.architecture == "Bert" else set())
    if missing:
        raise UserError(f"{model.source} has no weights of {', '.join(sorted(missing))}: fine-tune it first")
    return {path: np.asarray(array, np.float32) for path, array in arrays.items()}


def make_forward(model: ModelBundle) -> Callable[[Arrays, Arrays], Arrays]:
    """Returns a function that maps `parameters` and inputs by name to outputs by name."""
    module, architecture, pooling = build_module(model), model.architecture, model.graph_pooling
    outputs, is_scored = tuple(signature(model).outputs), scored_ids(model)

    def call(params: Arrays, inputs: Arrays) -> Arrays:
        tree = traverse_util.unflatten_dict(params, sep="/")
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        second = inputs.get("decoder_input_ids" if names.has_decoder(architecture) else "token_type_ids")
        output = module.apply({"params": tree["bert"] if architecture == "Bert" else tree}, ids, second, mask)
        if architecture == "Bert":
            named = {"last_hidden_state": output.last_hidden_state, "pooler_output": output.pooled_output}
            if pooling is not None and pooling.has_token_vectors:
                states = output.last_hidden_state
                vectors = pooling.finish([states.reshape(-1, states.shape[-1])])
                named[TOKEN_EMBEDDINGS] = vectors.reshape(*states.shape[:2], -1)
                named[TOKEN_MASK] = mask * jnp.asarray(is_scored)[ids]
            elif pooling is not None:
                named[EMBEDDING] = pooling(output.last_hidden_state, mask)
            values = tuple(named[name] for name in outputs)
        elif architecture == "BertForPreTraining":
            values = (output.prediction_logits, output.seq_relationship_logits)
        elif architecture == "BertForQuestionAnswering":
            values = (output[..., 0], output[..., 1])
        elif pooling is not None:
            values = (output, pooling(output, mask))
        else:
            values = (output,)
        return dict(zip(outputs, values, strict=True))

    return call


def scored_ids(model: ModelBundle) -> np.ndarray:
    """Returns 1 for the ids of tokens that have a vector in documents, and 0 for others, [V] float32."""
    is_scored = np.ones(model.config.known_vocab_size, np.float32)
    is_scored[skipped_ids(model.tokenizer, model.pooling_or_default.interaction)] = 0
    return is_scored


def sample_inputs(
    config: ModelConfig, shapes: dict[str, Shape], batch: int, length: int, dtype: Any = np.int32
) -> dict[str, np.ndarray]:
    """Makes random inputs for B = ``batch`` and T = ``length``. The first row is full, the next ones are shorter."""
    random = np.random.default_rng(length)
    sizes = {BATCH: batch, CHOICES: 3, LENGTH: length, TARGET_LENGTH: length // 3 + 1}
    tops = {
        "input_ids": config.known_vocab_size,
        "token_type_ids": config.type_vocab_size,
        "decoder_input_ids": config.decoder.known_vocab_size,
    }
    inputs = {}
    for name, dims in shapes.items():
        shape = resolve_shape(dims, sizes)
        if name == "attention_mask":
            tokens = np.maximum(length - length // batch * np.arange(batch), 1)
            rows = tokens.reshape(batch, *[1] * (len(shape) - 1))
            inputs[name] = np.broadcast_to(np.arange(length) < rows, shape).astype(dtype)
        else:
            inputs[name] = random.integers(0, tops[name], shape).astype(dtype)
    return inputs


def verify_outputs(
    model: ModelBundle, samples: Iterator[dict[str, np.ndarray]], run: Callable[[Arrays], Arrays]
) -> str:
    """Runs a graph on sample inputs and returns a sentence on the difference from the model's outputs.

    Raises:
        ExportError: an output is missing, has another shape, or differs by more than `TOLERANCE`. A pooled sum may
            differ by as much for each token.
    """
    forward, params, largest = jax.jit(make_forward(model)), parameters(model), 0.0
    is_sum = model.graph_pooling is not None and model.graph_pooling.mode == "sum"
    per_token = {name: LENGTH in shape for name, shape in signature(model).outputs.items()}
    for inputs in samples:
        expected, outputs = jax.device_get(forward(params, inputs)), run(inputs)
        if {name: x.shape for name, x in outputs.items()} != {name: x.shape for name, x in expected.items()}:
            raise ExportError(
                f"{model.source}: names or shapes of the graph's outputs differ from the model's: not exported"
            )
        for name, array in expected.items():
            difference = np.abs(np.asarray(outputs[name]) - array)
            if per_token[name]:  # the outputs of padding have no meaning
                difference = difference[inputs["attention_mask"] > 0]
            difference = float(difference.max())
            num_terms = inputs["input_ids"].shape[-1] if name == EMBEDDING and is_sum else 1
            if not difference <= TOLERANCE * num_terms:  # also catches NaN
                raise ExportError(
                    f"{model.source}: its graph's {name} differs by {difference:.2g} from the model's: not exported"
                )
            largest = max(largest, difference)
    return f"verified: the outputs are within {largest:.1g} of the model's"


def text_usage(model: ModelBundle, dtype: str, call: str, length: int | None = None) -> list[str]:
    """Returns the paragraphs of README.md on calling a graph with texts, and on computing embeddings.

    Args:
        model: exported model, not for multiple choice and without a decoder.
        call: expression for the outputs by name, with the inputs by name as ``inputs``.
        length: tokens per row; None for the number of tokens of the longest text.
    """
    pooling = model.graph_pooling
    if pooling is not None and pooling.has_token_vectors:
        return _token_usage(model, dtype, call, length)
    padding = "" if length is None else f"length={length}"
    pad_id = special_ids(model.tokenizer).find("pad") or 0
    if pad_id:
        token = json.dumps(model.tokenizer.id_to_token(pad_id))
        padding = ", ".join(filter(None, [padding, f"pad_id={pad_id}", f"pad_token={token}"]))
    texts = '["one text", ("a pair", "of texts")]' if pooling is None else '["one text", "another text"]'
    lines = [
        "from tokenizers import Tokenizer",
        'tokenizer = Tokenizer.from_file("tokenizer.json")',
        f"tokenizer.enable_truncation({min(model.row_length, length or model.row_length)}{_direction(model)})",
        f"tokenizer.enable_padding({padding})",
        *([f"texts = [text.lower() for text in {texts}]"] if pooling is not None and pooling.lowercase else []),
        f"rows = tokenizer.encode_batch({'texts' if pooling is not None and pooling.lowercase else texts})",
        'fields = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}',
        f"inputs = {{name: np.array([getattr(row, fields[name]) for row in rows], np.{dtype}) for name in inputs}}",
        f"outputs = {call}",
    ]
    paragraphs = ["From text:", _code(lines)]
    if pooling is not None:
        prompts = {"queries": pooling.query_prompt, "documents": pooling.document_prompt}
        prompts["other kinds"] = pooling.default_prompt
        notes = [f"{kind} begin with {prompt!r}" for kind, prompt in prompts.items() if prompt]
        note = f" Texts of {' and '.join(notes)}." if notes else ""
        if pooling.similarity != "cosine":
            note += f" Embeddings are compared by {pooling.similarity}, not by the cosine."
        if not pooling.include_prompt:
            note += f" Tokens of a prompt are not pooled: {EMBEDDING} is for texts without one."
        paragraphs += [f"Embeddings of the texts:{note}", _code([f'embeddings = np.asarray(outputs["{EMBEDDING}"])'])]
    return paragraphs


def _token_usage(model: ModelBundle, dtype: str, call: str, length: int | None) -> list[str]:
    """Returns the paragraphs of README.md on computing vectors of tokens, and on comparing them."""
    pooling = model.pooling_or_default
    interaction, limit = pooling.interaction, length or model.longest_text
    attended = "lengths[row]" if interaction.attends_to_expansion else "len(texts[row].ids)"

    def arguments(role: Role, prompt: str) -> str:
        expanded = min(interaction.expanded_length or 0, limit) if role == "query" else 0
        skips = role in interaction.skipping_roles
        return f"{prompt!r}, {min(interaction.max_length(role) or limit, limit)}, {expanded}, {skips}"

    lines = [
        "from tokenizers import Tokenizer",
        'tokenizer = Tokenizer.from_file("tokenizer.json")',
        "names = list(inputs)",
        "",
        "def embed(texts, prompt, max_length, expanded_length, skips_tokens):",
        f"    tokenizer.enable_truncation(max_length{_direction(model)})",
        "    texts = tokenizer.encode_batch([prompt + text for text in texts])",
        "    lengths = [max(len(text.ids), expanded_length) for text in texts]",
        f"    shape = len(texts), {'max(lengths)' if length is None else length}",
        f"    inputs = {{name: np.zeros(shape, np.{dtype}) for name in names}}",
        "    for row, text in enumerate(texts):",
        f'        inputs["input_ids"][row, : lengths[row]] = {expansion_id(model.tokenizer, interaction)}',
        '        inputs["input_ids"][row, : len(text.ids)] = text.ids',
        f'        inputs["attention_mask"][row, : {attended}] = 1',
        '        if "token_type_ids" in names:',
        '            inputs["token_type_ids"][row, : len(text.ids)] = text.type_ids',
        f"    outputs = {call}",
        f'    vectors, mask = np.asarray(outputs["{TOKEN_EMBEDDINGS}"]), np.asarray(outputs["{TOKEN_MASK}"])',
        "    if not skips_tokens:",
        "        mask = np.arange(shape[1]) < np.array(lengths)[:, None]",
        "    return [vectors[row][mask[row] > 0] for row in range(len(texts))]",
        "",
        f'queries = embed(["one text"], {arguments("query", pooling.query_prompt)})',
        f'documents = embed(["another text"], {arguments("document", pooling.document_prompt)})',
        "scores = [[(query @ document.T).max(axis=1).sum() for document in documents] for query in queries]",
    ]
    mean = " The score is divided by the number of the query's vectors." if pooling.similarity == MEAN_MAX_SIM else ""
    return [f"Vectors of tokens, and the score of a query and a document:{mean}", _code(lines)]


def _code(lines: list[str]) -> str:
    return "\n".join(["```python", *lines, "```"])


def _direction(model: ModelBundle) -> str:
    """Returns the argument of a call that truncates texts at their start, if the tokenizer does so."""
    return "" if truncation_side(model.tokenizer) == "right" else ', direction="left"'


def _declared_pooling(pooling: Pooling) -> dict[str, Any]:
    """Returns the settings of `Pooling` without length and dense layers, which are stored elsewhere."""
    values = {field.name: getattr(pooling, field.name) for field in dataclasses.fields(pooling)}
    always = ("mode", "normalize", "lowercase", "query_prompt", "document_prompt")
    default = Pooling()
    del values["max_length"], values["dense"]
    declared = {name: value for name, value in values.items() if name in always or value != getattr(default, name)}
    if "interaction" in declared:
        declared["interaction"] = dataclasses.asdict(pooling.interaction)
    return declared


def write_metadata_files(model: ModelBundle, folder: Path, ports: Signature, dtype: str, text: list[str]) -> None:
    """Writes the files next to a graph: signature.json, the tokenizer files, and README.md with ``text``."""
    content: dict[str, Any] = {
        "architecture": model.architecture,
        "inputs": [{"name": name, "shape": list(shape), "dtype": dtype} for name, shape in ports.inputs.items()],
        "outputs": [{"name": name, "shape": list(shape), "dtype": "float32"} for name, shape in ports.outputs.items()],
        "max_length": model.row_length,
    }
    if model.labels:
        content["labels"] = list(model.labels)
    if model.problem_type is not None:
        content["problem_type"] = model.problem_type
    if model.label_thresholds:
        content["label_thresholds"] = list(model.label_thresholds)
    if model.score_activation is not None:
        content["score_activation"] = model.score_activation
    if model.pooling is not None:
        content["pooling"] = _declared_pooling(model.pooling)
    if names.has_decoder(model.architecture):
        content["generation"] = generation_config(model)
    write_atomic(folder / SIGNATURE_FILE, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    for tokenizer, place in published_tokenizers(model, folder):
        segments = model.config.type_vocab_size > 1
        save_published_tokenizer(tokenizer, place, model.row_length, segments)
    rows = [
        f"| `{port['name']}` | {kind.removesuffix('s')} | {port['dtype']} | {' x '.join(map(str, port['shape']))} |"
        for kind in ("inputs", "outputs")
        for port in content[kind]
    ]
    parts = [
        f"# {model.title}",
        f"{model.architecture}, exported by bert-jax.",
        *text,
        "\n".join(["| name | | type | shape |", "|---|---|---|---|", *rows]),
    ]
    parts += long_text_rule(model)
    if model.labels:
        parts.append(f"Labels, by number: {describe_labels(model)}.")
    if model.score_activation is not None:
        parts.append(f"The graph returns the logit of the score. Apply `{model.score_activation}` to it.")
    write_atomic(folder / "README.md", "\n\n".join(parts) + "\n")
