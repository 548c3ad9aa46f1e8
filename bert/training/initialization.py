"""Initial parameters and state of a run: its newest checkpoint, the weights of ``init``, or random weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import traverse_util

from bert.config import ModelConfig
from bert.config.model import MODEL_KEYS_KEPT_WITH_INIT
from bert.errors import Log, UserError
from bert.model.names import POOLER
from bert.model.parameters import Params
from bert.training.step import TrainState

ParameterPath = tuple[str, ...]
LabelRows = Mapping[str, Sequence[int | None]]
"""Output layer -> for each label, its row in the source's layer; None for a label that the source lacks."""


class Initializable(Protocol):
    """A Flax module, or another object that draws parameters."""

    def init(self, key: Any, input_ids: Any, /) -> Any: ...


def initialize_state(
    model: Initializable,
    optimizer: optax.GradientTransformation,
    metrics: Sequence[str],
    seed: int,
    restore: Callable[[Any], tuple[int, Any] | None],
    source: tuple[str, Params] | None,
    modules: Sequence[str],
    log: Log,
    prepare: Callable[[Params], Params] = lambda params: params,
    input_shape: Sequence[int] = (1, 8),
    trained: Callable[[Params], Params] = lambda params: params,
    rows: LabelRows = MappingProxyType({}),
    memory_shape: Sequence[int] | None = None,
) -> TrainState:
    """Returns the run's newest good checkpoint; without one, random weights overwritten with the weights of ``source``.

    Args:
        restore: shapes of a state -> step and state of the newest good checkpoint, or None.
        source: name and parameters of another run, or None.
        modules: modules to copy from the source if it has them, such as ``bert`` (with its pooler) and the heads.
        log: receives a line for each part that is loaded, drawn or skipped.
        prepare: changes the random weights before the weights of ``source`` replace them.
        input_shape: a shape of token ids that the model accepts.
        trained: maps the model's parameters, or their shapes, to the state's parameters.
        rows: output layers among ``modules`` that are copied label by label; see `match_head`.
        memory_shape: shape of `TrainState.memory`; None without a memory.

    Returns:
        The state as NumPy arrays; the loop puts it onto the devices.

    Raises:
        UserError: a checkpoint or the source does not fit the model.
    """

    def init(key: jax.Array) -> Params:
        return model.init(key, jnp.zeros(tuple(input_shape), jnp.int32))["params"]

    expected = jax.eval_shape(init, jax.random.key(0))

    def create(params: Params) -> TrainState:
        return TrainState.create(trained(params), optimizer, metrics, memory_shape)

    like = jax.eval_shape(create, expected)
    restored = restore(like)
    if restored is not None:
        log(f"resumes at step {restored[0]:,}")
        return restored[1]
    shapes = traverse_util.flatten_dict(_split_pooler(expected))
    moved: set[ParameterPath] = set()
    if source is not None:
        loaded = _split_source(source[1], expected)
        taken = _shared_modules(_split_pooler(expected), loaded, modules)
        whole = {module for module in taken if None not in rows.get(module, ())}
        moved = {path for path in traverse_util.flatten_dict(loaded) if path[0] in whole}

    def fresh(key: jax.Array) -> dict[ParameterPath, jax.Array]:
        flat = traverse_util.flatten_dict(_split_pooler(init(key)))
        return {path: leaf for path, leaf in flat.items() if path not in moved}

    # Copied weights are not drawn, which saves almost all of the time for a small head on a large encoder.
    drawn = jax.device_get(jax.jit(fresh)(jax.random.key(seed)))
    if source is None:
        log("starts from random weights")
    params = prepare(_merge_pooler(traverse_util.unflatten_dict({**shapes, **drawn})))
    if source is not None:
        params = load_pretrained_params(params, source[1], source[0], modules, log, rows)
    return jax.tree.map(np.asarray, create(params))


def load_pretrained_params(
    params: Params, source: Params, name: str, modules: Sequence[str], log: Log, rows: LabelRows = MappingProxyType({})
) -> Params:
    """Returns ``params`` with the ``modules`` of ``source`` copied into it, and logs the origin of each module.

    Arrays of ``params`` that are overwritten completely may be shapes.

    Raises:
        UserError: the encoder is missing, or a module differs in a name or a shape.
    """
    # The pooler is handled as a separate module because models with an output per token have none.
    params, source = _split_pooler(params), _split_source(source, params)
    taken = _shared_modules(params, source, modules)
    copied = {module: _copy_rows(params[module], source[module], rows[module]) for module in taken if module in rows}
    source = {**source, **copied}
    if "bert" not in taken:
        raise UserError(f"{name} has no encoder to start from: name another model or run")
    expected, loaded = (
        traverse_util.flatten_dict({module: tree[module] for module in taken}) for tree in (params, source)
    )
    loaded = {path: leaf for path, leaf in loaded.items() if path in expected or not is_cross_attention(path)}
    wrong = sorted(path for path in set(expected) ^ set(loaded) if not is_cross_attention(path))
    wrong += [key for key in expected if key in loaded and expected[key].shape != loaded[key].shape]
    if wrong:
        shown = ", ".join(map("/".join, wrong[:5]))
        raise UserError(f"{name} does not fit the model: {shown} differ ({len(wrong)} in all): name another")
    size = sum(array.size for array in loaded.values())
    names = ", ".join(module for module in taken if module != POOLER)
    log(f"from {name}: {names} ({len(loaded)} tensors, {size:,} parameters)")
    fresh, unused = sorted(set(params) - set(taken)), sorted(set(source) - set(taken))
    if set(expected) - set(loaded):
        fresh.append("cross-attention")
    if fresh:
        log(f"randomly initialized: {', '.join(fresh)}")
    if unused:
        log(f"not loaded: {', '.join(unused)}")
    return _merge_pooler({**params, **traverse_util.unflatten_dict({**expected, **loaded})})


def _copy_rows(own: Params, source: Params, rows: Sequence[int | None]) -> Params:
    """Returns an output layer with these rows of the source on its last axis; rows that are None keep their values."""
    kept = [label for label, row in enumerate(rows) if row is not None]
    taken = [row for row in rows if row is not None]

    def copy(own: Any, source: Any) -> Any:
        if len(kept) == len(rows):
            return np.take(source, taken, axis=-1)
        layer = np.array(own)
        layer[..., kept] = np.take(source, taken, axis=-1)
        return layer

    return {name: copy(own[name], leaf) if name in own else leaf for name, leaf in source.items()}


def is_cross_attention(path: ParameterPath) -> bool:
    """Returns whether a parameter belongs to cross-attention, which encoders do not have."""
    return not {"cross_attention", "cross_norm"}.isdisjoint(path)


def _shared_modules(params: Params, source: Params, modules: Sequence[str]) -> list[str]:
    """Returns the modules that both trees have."""
    requested = (*modules, *([POOLER] if "bert" in modules else []))
    return [module for module in requested if module in params and module in source]


def _split_pooler(params: Params) -> Params:
    bert = dict(params.get("bert", {}))
    pooler = bert.pop("pooler", None)
    apart = {**params, **({"bert": bert} if bert else {})}
    return apart if pooler is None else {**apart, POOLER: pooler}


def _split_source(source: Params, params: Params) -> Params:
    """Applies `_split_pooler` to the initial weights.

    If the source has no pooler, a pooler with the form of the MLM head starts from that head's transform, as in
    ModernBERT.
    """
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


def model_config_from_source(
    requested: ModelConfig, source: ModelConfig, name: str, replaced: Collection[str] = ()
) -> ModelConfig:
    """Returns the source's sizes with the run's own dropout.

    Args:
        replaced: keys that change no weights, which pretraining may set to other values than the source's.

    Raises:
        UserError: a requested size differs from the source's.
    """
    defaults, source = ModelConfig(), source.resolved
    for field in dataclasses.fields(ModelConfig):
        value, source_value = getattr(requested, field.name), getattr(source, field.name)
        is_default = value == getattr(defaults, field.name)
        if field.name in replaced and not is_default:
            source = dataclasses.replace(source, **{field.name: value})
        elif field.name not in MODEL_KEYS_KEPT_WITH_INIT and not is_default and value != source_value:
            raise UserError(
                f"model.{field.name} is {value}, but {name} was trained with {source_value}: "
                "leave it out, sizes come with the weights"
            )
    kept = {key: getattr(requested, key) for key in MODEL_KEYS_KEPT_WITH_INIT}
    return dataclasses.replace(source, **kept)


def taken_layers(layers: int, of: int) -> list[int]:
    """Returns the layers that initialize a model with fewer layers, evenly spaced (DistilBERT), counted from 0."""
    return np.linspace(0, of - 1, layers).round().astype(int).tolist() if layers > 1 else [0]


def with_fewer_layers(config: ModelConfig, params: Params, layers: int, name: str) -> tuple[ModelConfig, Params]:
    """Returns sizes and parameters of a model that has only the `taken_layers` of another one.

    Raises:
        UserError: the model has fewer layers, or its layers are not interchangeable.
    """
    reasons = {"model.layer_groups": config.layer_groups, "model.global_attention_every": config.global_attention_every}
    if reason := next((key for key, value in reasons.items() if value is not None), None):
        raise UserError(
            f"num_init_layers is {layers}, but {name} has {reason} {reasons[reason]}, so that its layers depend on "
            "their position: remove num_init_layers"
        )
    if layers > config.num_hidden_layers:
        raise UserError(
            f"num_init_layers is {layers}, but {name} has {config.num_hidden_layers} layers: use at most as many"
        )
    stack = params["bert"]["encoder"]
    taken = taken_layers(layers, config.num_hidden_layers)
    others = {part: tree for part, tree in stack.items() if not part.startswith("layer_")}
    kept = {f"layer_{layer}": stack[f"layer_{source}"] for layer, source in enumerate(taken)}
    encoder = {**params["bert"], "encoder": {**others, **kept}}
    return dataclasses.replace(config, num_hidden_layers=layers), {**params, "bert": encoder}


def with_vocab_size(requested: ModelConfig, vocab_size: int) -> ModelConfig:
    """Returns the requested sizes with the size of the vocabulary filled in.

    Raises:
        UserError: the embedding would be smaller than the vocabulary.
    """
    if requested.vocab_size is not None and requested.vocab_size < vocab_size:
        raise UserError(
            f"model.vocab_size ({requested.vocab_size}) is smaller than the vocabulary ({vocab_size} tokens): "
            "leave it out, or enlarge it"
        )
    return dataclasses.replace(requested, vocab_size=requested.vocab_size or vocab_size)
