"""What a run starts from, decided in one place for every kind of training."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import traverse_util

from bert.config import ModelConfig
from bert.config.model import MODEL_KEYS_KEPT_WITH_INIT
from bert.errors import UserError, listed
from bert.interchange.names import POOLER, output_layer
from bert.interchange.shapes import ARCHITECTURES_WITH_LABELS
from bert.metrics import unigram_log_probabilities
from bert.runs.checkpoint import Checkpointer
from bert.training.step import TrainState

Params = dict[str, Any]
ParameterPath = tuple[str, ...]
Log = Callable[[str], None]
LabelRows = Mapping[str, Sequence[int | None]]
"""Output layer -> for each label, its row in the source's layer; None for a label that the source lacks."""


class CheckpointReader(Protocol):
    """Where the run's own states are: `Checkpointer`, or `MultihostCheckpointer`."""

    def restore(self, like: Any = None) -> tuple[int, Any] | None: ...


@dataclass(frozen=True)
class BranchedCheckpoints:
    """The checkpoints of a run that continues the state of another one.

    Attributes:
        own: checkpoints of the run, which are read first.
        source: folder of the other run.
        step: its checkpoint.
    """

    own: CheckpointReader
    source: Path
    step: int
    say: Log

    def restore(self, like: Any = None) -> tuple[int, Any] | None:
        """Returns step and state. Raises UserError if the state does not fit."""
        if (restored := self.own.restore(like)) is not None:
            return restored
        with Checkpointer(self.source / "checkpoints", None, self.say) as checkpoints:
            try:
                return checkpoints.restore(like, self.step)
            except UserError as error:
                raise UserError(
                    f"init_state is true, and the training state of {self.source} cannot be continued ({error}): keep "
                    "what the run is trained with (optimizer.name, optimizer.max_grad_norm, data.objective, "
                    "data.prediction), or remove init_state to take the weights alone"
                ) from None


class Initializable(Protocol):
    """A Flax module, or anything else that draws parameters."""

    def init(self, key: Any, input_ids: Any, /) -> Any: ...


def initialize_state(
    model: Initializable,
    optimizer: optax.GradientTransformation,
    metrics: Sequence[str],
    seed: int,
    checkpoints: CheckpointReader,
    source: tuple[str, Params] | None,
    modules: Sequence[str],
    say: Log,
    prepare: Callable[[Params], Params] = lambda params: params,
    input_shape: Sequence[int] = (1, 8),
    trained: Callable[[Params], Params] = lambda params: params,
    rows: LabelRows = MappingProxyType({}),
) -> TrainState:
    """Returns the run's newest good checkpoint; without one, random weights overwritten with those of ``source``.

    Args:
        source: name and parameters of another run, or None.
        modules: modules to copy from the source if it has them, such as ``bert`` (with its pooler) and the heads.
        say: logs what came from where.
        prepare: what is done to random weights before those of ``source`` take their place.
        input_shape: of token ids that the model can read.
        trained: parameters of the model, or their shapes -> those of the state.
        rows: output layers among ``modules`` that are copied label by label; see `match_head`.

    Returns:
        The state as NumPy arrays: the devices are left to the loop.

    Raises:
        UserError: a checkpoint or the source does not fit the model.
    """

    def init(key: jax.Array) -> Params:
        return model.init(key, jnp.zeros(tuple(input_shape), jnp.int32))["params"]

    expected = jax.eval_shape(init, jax.random.key(0))
    like = jax.eval_shape(lambda params: TrainState.create(trained(params), optimizer, metrics), expected)
    restored = checkpoints.restore(like)
    if restored is not None:
        say(f"resumes at step {restored[0]:,}")
        return restored[1]
    shapes = traverse_util.flatten_dict(_split_pooler(expected))
    moved: set[ParameterPath] = set()
    if source is not None:
        given = _split_source(source[1], expected)
        taken = _shared_modules(_split_pooler(expected), given, modules)
        whole = {module for module in taken if None not in rows.get(module, ())}
        moved = {path for path in traverse_util.flatten_dict(given) if path[0] in whole}

    def fresh(key: jax.Array) -> dict[ParameterPath, jax.Array]:
        flat = traverse_util.flatten_dict(_split_pooler(init(key)))
        return {path: leaf for path, leaf in flat.items() if path not in moved}

    # Weights that are copied are not drawn: with a small head and a large encoder that saves nearly all of the time.
    drawn = jax.device_get(jax.jit(fresh)(jax.random.key(seed)))
    if source is None:
        say("starts from random weights")
    params = prepare(_merge_pooler(traverse_util.unflatten_dict({**shapes, **drawn})))
    if source is not None:
        params = load_pretrained_params(params, source[1], source[0], modules, say, rows)
    return jax.tree.map(np.asarray, TrainState.create(trained(params), optimizer, metrics))


def load_pretrained_params(
    params: Params,
    source: Params,
    name: str,
    modules: Sequence[str],
    say: Log,
    rows: LabelRows = MappingProxyType({}),
) -> Params:
    """Returns ``params`` with the ``modules`` of ``source`` copied into it, and logs what came from where.

    Arrays of ``params`` that are overwritten as a whole may be shapes.

    Raises:
        UserError: the encoder is missing, or a module differs in a name or a shape.
    """
    # The pooler is a module of its own here: models that answer for every token have none.
    params, source = _split_pooler(params), _split_source(source, params)
    taken = _shared_modules(params, source, modules)
    copied = {module: _copy_rows(params[module], source[module], rows[module]) for module in taken if module in rows}
    source = {**source, **copied}
    if "bert" not in taken:
        raise UserError(f"{name} has no encoder to start from: name another model or run")
    expected, given = (
        traverse_util.flatten_dict({module: tree[module] for module in taken}) for tree in (params, source)
    )
    given = {path: leaf for path, leaf in given.items() if path in expected or not is_cross_attention(path)}
    wrong = sorted(path for path in set(expected) ^ set(given) if not is_cross_attention(path))
    wrong += [key for key in expected if key in given and expected[key].shape != given[key].shape]
    if wrong:
        shown = ", ".join(map("/".join, wrong[:5]))
        raise UserError(f"{name} does not fit the model: {shown} differ ({len(wrong)} in all): name another")
    size = sum(array.size for array in given.values())
    names = ", ".join(module for module in taken if module != POOLER)
    say(f"from {name}: {names} ({len(given)} tensors, {size:,} parameters)")
    fresh, unused = sorted(set(params) - set(taken)), sorted(set(source) - set(taken))
    if set(expected) - set(given):
        fresh.append("cross-attention")
    if fresh:
        say(f"randomly initialized: {', '.join(fresh)}")
    if unused:
        say(f"not loaded: {', '.join(unused)}")
    return _merge_pooler({**params, **traverse_util.unflatten_dict({**expected, **given})})


def _copy_rows(own: Params, given: Params, rows: Sequence[int | None]) -> Params:
    """An output layer whose last axis has the given rows in this order; a row that is None is the layer's own."""
    kept = [label for label, row in enumerate(rows) if row is not None]
    taken = [row for row in rows if row is not None]

    def copy(own: Any, given: Any) -> Any:
        if len(kept) == len(rows):
            return np.take(given, taken, axis=-1)
        layer = np.array(own)
        layer[..., kept] = np.take(given, taken, axis=-1)
        return layer

    return {name: copy(own[name], leaf) if name in own else leaf for name, leaf in given.items()}


class Head(NamedTuple):
    """The head of a fine-tuned model or of a task.

    Attributes:
        architecture: the name of our module, a key of `bert.interchange.names.ARCHITECTURES`.
        problem_type: the meaning of several outputs or of one, as in Hugging Face's config.json.
        names: the names of the outputs in their order; () for outputs without names.
        words: the names that the data has for the same outputs.
        num_feature_layers: the number of layers that the head reads, in a run that trains the head alone.
    """

    architecture: str
    problem_type: str | None = None
    names: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    num_feature_layers: int | None = None

    @property
    def output_layer(self) -> str | None:
        """The module whose last axis has the outputs; None for an encoder, a decoder or a pretraining head."""
        return output_layer(self.architecture)

    @property
    def kind(self) -> str | None:
        """The problem type of a sequence classifier, with the default filled in; None for other heads."""
        if self.architecture != "BertForSequenceClassification":
            return None
        return self.problem_type or ("single_label_classification" if len(self.names) > 1 else "regression")

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels that the outputs belong to; () for a score, for start and end, and for the score of a choice."""
        has_labels = self.architecture in ARCHITECTURES_WITH_LABELS and self.kind != "regression"
        return self.names if has_labels else ()


class HeadStart(NamedTuple):
    """The weights that a task's head starts from.

    Attributes:
        modules: modules to copy from the source.
        rows: the rows of those that are copied label by label.
        message: what is copied and what is not, for the log; "" for nothing to report.
        incomplete: whether the source has trained weights of a head that are not copied.
    """

    modules: tuple[str, ...] = ()
    rows: LabelRows = MappingProxyType({})
    message: str = ""
    incomplete: bool = False


def match_head(task: Head, source: Head, name: str) -> HeadStart:
    """Finds the weights that a task's head can copy from the source's.

    Outputs that belong to labels are matched by the names of the labels, since the order of the labels may differ.
    Other outputs are copied if their number is the same.

    Args:
        task: the head of the task to train.
        source: the head of the model to start from.
        name: the source, for the message.
    """
    module = source.output_layer
    if module is None:
        return HeadStart()
    if difference := _difference(task, source):
        return HeadStart((), {}, f"the head of {name} is not loaded: {difference}", True)
    if not task.labels:
        return HeadStart((module,))
    rows = _label_rows(task, source.names)
    if all(row is None for row in rows):
        fix = "name them in id2label of its config.json" if _are_numbered(source.names) else "give them the same names"
        difference = f"its labels are {listed(source.names)}, and none of them is among {listed(task.names)}"
        return HeadStart((), {}, f"the head of {name} is not loaded: {difference}; if they are the same, {fix}", True)
    used = set(rows)
    parts = {
        "kept": [label for label, row in zip(task.names, rows, strict=True) if row is not None],
        "randomly initialized": [label for label, row in zip(task.names, rows, strict=True) if row is None],
        "not loaded": [label for row, label in enumerate(source.names) if row not in used],
    }
    message = "; ".join(f"{what}: {listed(labels)}" for what, labels in parts.items() if labels)
    return HeadStart((module,), {module: rows}, f"labels of {name}: {message}", bool(parts["not loaded"]))


def _difference(task: Head, source: Head) -> str | None:
    """Why a source's head is none that the task could use; None if it may be."""
    if task.architecture != source.architecture:
        return f"it is the head of {source.architecture}, and the task trains {task.architecture}"
    if task.num_feature_layers != source.num_feature_layers:
        layers = [head.num_feature_layers or "null" for head in (source, task)]
        return f"num_feature_layers was {layers[0]}, and is {layers[1]}"
    if task.labels and source.kind != task.kind:
        return f"it was trained for {source.kind}, and the task is {task.kind}"
    if not task.labels and len(source.names) > 1:
        return f"it has {len(source.names)} outputs, and the task has one"
    return None


def _label_rows(task: Head, given: Sequence[str]) -> tuple[int | None, ...]:
    """The row of each of the task's labels among the labels of a source, or None.

    The same spelling wins over another case, and a label's name over the word that the data has for it. Labels that the
    source only numbers (LABEL_0, LABEL_1) are the data's if these are the same numbers.
    """
    words = task.words or task.names
    numbered = {str(row): row for row in range(len(given))}
    if _are_numbered(given) and set(words) == set(numbered):
        return tuple(numbered[word] for word in words)
    rows: dict[int, int] = {}
    used: set[int] = set()
    for spelling in (str, str.casefold):
        for labels in (task.names, words):
            theirs = _unique(map(spelling, given))
            for spelled, label in _unique(map(spelling, labels)).items():
                row = theirs.get(spelled)
                if row is not None and label not in rows and row not in used:
                    rows[label] = row
                    used.add(row)
    return tuple(rows.get(label) for label in range(len(task.names)))


def _unique(labels: Iterable[str]) -> dict[str, int]:
    """The numbers of the labels that occur once."""
    labels = list(labels)
    counts = Counter(labels)
    return {label: number for number, label in enumerate(labels) if counts[label] == 1}


def _are_numbered(labels: Sequence[str]) -> bool:
    """Whether a model has numbers in place of the names of its labels."""
    return list(labels) == [f"LABEL_{number}" for number in range(len(labels))]


def is_cross_attention(path: ParameterPath) -> bool:
    """Whether a parameter is one of a decoder that encoders lack."""
    return not {"cross_attention", "cross_norm"}.isdisjoint(path)


def _shared_modules(params: Params, source: Params, modules: Sequence[str]) -> list[str]:
    """Those of the modules that both have."""
    requested = (*modules, *([POOLER] if "bert" in modules else []))
    return [module for module in requested if module in params and module in source]


def _split_pooler(params: Params) -> Params:
    bert = dict(params.get("bert", {}))
    pooler = bert.pop("pooler", None)
    apart = {**params, **({"bert": bert} if bert else {})}
    return apart if pooler is None else {**apart, POOLER: pooler}


def _split_source(source: Params, params: Params) -> Params:
    """`_split_pooler` of what a model starts from. A pooler of the MLM head's form starts as that head's transform, as
    in ModernBERT, if the source has no pooler."""
    apart, pooler = _split_pooler(source), _split_pooler(params).get(POOLER, {})
    head = source.get("predictions", {})
    if POOLER in apart or "dense" not in pooler or "transform" not in head:
        return apart
    transform = {"dense": head["transform"], "norm": head["norm"]}
    fits = jax.tree.map(jnp.shape, transform) == jax.tree.map(jnp.shape, pooler)
    return {**apart, POOLER: transform} if fits else apart


def _merge_pooler(params: Params) -> Params:
    merged = dict(params)
    if (pooler := merged.pop(POOLER, None)) is not None:
        merged["bert"] = {**merged["bert"], "pooler": pooler}
    return merged


def model_config_from_source(requested: ModelConfig, source: ModelConfig, name: str) -> ModelConfig:
    """The source's sizes with the run's own dropout.

    Raises:
        UserError: a size was requested that the source does not have.
    """
    defaults = ModelConfig()
    for field in dataclasses.fields(ModelConfig):
        value, given = getattr(requested, field.name), getattr(source, field.name)
        if field.name not in MODEL_KEYS_KEPT_WITH_INIT and value not in (getattr(defaults, field.name), given):
            raise UserError(
                f"model.{field.name} is {value}, but {name} was trained with {given}: leave it out, sizes come with "
                "the weights"
            )
    kept = {key: getattr(requested, key) for key in MODEL_KEYS_KEPT_WITH_INIT}
    return dataclasses.replace(source, **kept)


def with_vocab_size(requested: ModelConfig, vocab_size: int) -> ModelConfig:
    """The requested sizes, with the vocabulary's filled in.

    Raises:
        UserError: the embedding would be smaller than the vocabulary.
    """
    if requested.vocab_size is not None and requested.vocab_size < vocab_size:
        raise UserError(
            f"model.vocab_size ({requested.vocab_size}) is smaller than the vocabulary ({vocab_size} tokens): "
            "leave it out, or enlarge it"
        )
    return dataclasses.replace(requested, vocab_size=requested.vocab_size or vocab_size)


VOCAB_PARAMS = (
    ("bert", "embeddings", "word", "embedding"),
    *((*head, name) for head in (("predictions",), ("generator", "predictions")) for name in ("decoder", "bias")),
)
"""Parameters [V, ...] with a row for each token; a model has some of them."""


def extend_embeddings(params: Params, rows: dict[int, list[int]], size: int) -> Params:
    """A model's parameters with V = ``size`` rows for tokens: the old ones, and means of the old ones.

    Args:
      params: nested dict of arrays.
      rows: new row -> the old rows whose mean it becomes, from `bert.tokenizer.extension.decompose_new_tokens`.
      size: rows afterwards, at least as many as now. A row without a token becomes the mean of all old rows.
    """
    params = _copy(params)
    for *path, name in VOCAB_PARAMS:
        module = params
        for step in path:
            module = module.get(step, {})
        if name in module:
            table = np.asarray(module[name])
            filling = np.repeat(table.mean(axis=0, keepdims=True), size - len(table), axis=0)
            module[name] = np.concatenate([table, filling])
            for row, token_ids in rows.items():
                module[name][row] = table[token_ids].mean(axis=0)
    return params


def _copy(params: Params) -> Params:
    return {name: _copy(value) if isinstance(value, dict) else value for name, value in params.items()}


def init_mlm_bias(method: str, counts: np.ndarray, head: Sequence[str], params: Params) -> Params:
    """The MLM head's output bias set to the log frequencies of the tokens.

    Unchanged for the method ``zeros``, and in a head without bias.

    A bias that starts at zero moves by at most the learning rate per step, and is several nats away. Meanwhile the
    encoder learns the frequencies instead: it turns all tokens into one vector, which the tied decoder reads, and a
    short run is spent on the way back.

    Args:
        method: ``unigram`` or ``zeros``.
        counts: [V] occurrences of each token in the training rows.
        head: path of the MLM head in ``params``.
    """
    flat, path = traverse_util.flatten_dict(params), (*head, "bias")
    if method == "zeros" or path not in flat:
        return params
    bias = np.zeros(flat[path].shape, np.float32)
    bias[: len(counts)] = unigram_log_probabilities(counts)
    bias[len(counts) :] = bias[: len(counts)].min()  # rows of the embedding beyond the vocabulary
    return traverse_util.unflatten_dict({**flat, path: bias})
