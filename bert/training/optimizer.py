"""Optimizers (BERT's AdamW, LAMB, Lion, Adafactor, Muon, StableAdamW) and learning rates, as one optax chain."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from flax import traverse_util

from bert.config import OptimizerConfig
from bert.errors import require
from bert.model.names import PROJECTIONS
from bert.training.spikes import detect_spikes

ParameterPath = tuple[Any, ...]
"""Names from the outermost module to the parameter. They are strings, which Flax does not guarantee."""


class ScaleByBertAdamState(NamedTuple):
    """Step count and the two moments."""

    count: jax.Array  # type: ignore[assignment]  # optax' name, which a tuple has for a method
    mu: optax.Updates
    nu: optax.Updates


def scale_by_bert_adam(
    beta1: float = 0.9, beta2: float = 0.999, epsilon: float = 1e-6, bias_correction: bool = False
) -> optax.GradientTransformation:
    """Returns Adam's direction m / (sqrt(v) + epsilon), by default without bias correction.

    google-research/bert optimization.py (AdamWeightDecayOptimizer) has no bias correction. With it, this is Kingma & Ba
    2015, algorithm 1.
    """

    def init(params: optax.Params) -> ScaleByBertAdamState:
        mu, nu = (jax.tree.map(jnp.zeros_like, params) for _ in range(2))  # separate, since a step donates both
        return ScaleByBertAdamState(jnp.zeros([], jnp.int32), mu, nu)

    def update(
        grads: optax.Updates, state: ScaleByBertAdamState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, ScaleByBertAdamState]:
        del params
        count = state.count + 1
        mu = jax.tree.map(lambda m, g: beta1 * m + (1 - beta1) * g, state.mu, grads)
        nu = jax.tree.map(lambda v, g: beta2 * v + (1 - beta2) * jnp.square(g), state.nu, grads)
        first: float | jax.Array = 1.0
        second: float | jax.Array = 1.0
        if bias_correction:
            # 1 - beta**count; the direct formula loses four of float32's seven digits at the first steps.
            first, second = (-jnp.expm1(count * math.log(beta)) if beta else 1.0 for beta in (beta1, beta2))
        updates = jax.tree.map(lambda m, v: (m / first) / (jnp.sqrt(v / second) + epsilon), mu, nu)
        return updates, ScaleByBertAdamState(count, mu, nu)

    return optax.GradientTransformation(init, update)


def scale_by_stable_adam(
    beta1: float, beta2: float, epsilon: float, weight_decay: float
) -> optax.GradientTransformation:
    """Returns StableAdamW's direction with weight decay (Wortsman et al. 2023, algorithm 2).

    The learning rate of each tensor is divided by max(1, RMS) with RMS = sqrt(mean(g^2 / max(v, epsilon^2))). This also
    scales its weight decay. The paper's debiased betas are Adam's bias correction.
    """
    adam = scale_by_bert_adam(beta1, beta2, epsilon, bias_correction=True)
    decay = optax.add_decayed_weights(weight_decay, decay_mask)

    def update(
        grads: optax.Updates, state: ScaleByBertAdamState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, ScaleByBertAdamState]:
        direction, after = adam.update(grads, state)
        decayed, _ = decay.update(direction, decay.init(require(params, "the parameters")), params)
        correction = -jnp.expm1(after.count * math.log(beta2)) if beta2 else 1.0

        def clip(update: jax.Array, grad: jax.Array, nu: jax.Array) -> jax.Array:
            second = jnp.maximum(nu / correction, epsilon**2)
            return update / jnp.maximum(1.0, jnp.sqrt(jnp.mean(jnp.square(grad) / second)))

        return jax.tree.map(clip, decayed, grads, after.nu), after

    return optax.GradientTransformation(adam.init, update)


MUON_RMS = 0.2
"""Root mean square of Muon's updates, equal to AdamW's (Liu et al. 2025, section 2.2)."""


def is_matrix_of_layer(path: ParameterPath) -> bool:
    """Returns whether Muon applies to a parameter.

    It applies to the matrices of layers, but not to embeddings, pooler, heads and projections to a teacher's width.
    """
    in_layer = any(re.fullmatch(r"layer_\d+", str(name)) for name in path)
    return in_layer and path[-1] == "kernel" and path[0] != PROJECTIONS


def scale_by_muon(others: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns Muon's direction (Jordan et al. 2024) for the matrices of layers: orthogonalized Nesterov momentum.

    Args:
        others: the transformation of all other parameters.
    """

    def mask(of_layers: bool) -> Callable[[Any], Any]:
        return lambda tree: traverse_util.path_aware_map(lambda path, _: is_matrix_of_layer(path) == of_layers, tree)

    def as_matrices(tree: Any) -> Any:
        return jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(), tree)

    def scale(updates: Any, params: Any) -> Any:
        return jax.tree.map(lambda update: update * MUON_RMS * math.sqrt(max(update.shape)), updates)

    orthogonal = optax.chain(optax.contrib.scale_by_muon(weight_dimension_numbers=as_matrices), optax.stateless(scale))
    return optax.chain(optax.masked(orthogonal, mask(True)), optax.masked(others, mask(False)))


def scale_by_adafactor() -> optax.GradientTransformation:
    """Returns Adafactor's direction without momentum, relative to each tensor's size.

    See Shazeer and Stern 2018, algorithm 4.
    """
    return optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0), optax.scale_by_param_block_rms())


def make_direction(config: OptimizerConfig) -> optax.GradientTransformation:
    """Returns the direction of ``config.name``, before learning rate and, except for stable_adamw, weight decay."""
    adam = scale_by_bert_adam(config.beta1, config.beta2, config.epsilon, config.bias_correction)
    directions = {
        "adamw": adam,
        "lamb": adam,
        "lion": optax.scale_by_lion(config.beta1, config.beta2),
        "adafactor": scale_by_adafactor(),
        "muon": scale_by_muon(adam),
        "stable_adamw": scale_by_stable_adam(config.beta1, config.beta2, config.epsilon, config.weight_decay),
    }
    return directions[config.name]


def is_decayed(path: ParameterPath) -> bool:
    """Returns whether weight decay (and LAMB's trust ratio) applies to a parameter: not to biases and LayerNorm."""
    return not str(path[-1]).endswith(("bias", "scale"))


def decay_mask(params: Any) -> Any:
    """Returns `is_decayed` for each leaf of a tree of parameters."""
    return traverse_util.path_aware_map(lambda path, _: is_decayed(path), params)


def describe_decay(params: Any, config: OptimizerConfig) -> str:
    """Returns a log line that lists the parameters with and without weight decay."""
    flat = traverse_util.flatten_dict(params)
    decayed = [leaf.size for path, leaf in flat.items() if is_decayed(path)]
    spared = [leaf.size for path, leaf in flat.items() if not is_decayed(path)]
    return (
        f"weight decay {config.weight_decay:g} on {len(decayed)} tensors ({sum(decayed):,} parameters), "
        f"none on {len(spared)} biases and LayerNorm tensors ({sum(spared):,})"
    )


def linear_decay(config: OptimizerConfig, warmup: int, steps: int) -> optax.Schedule:
    """Decays linearly from the peak to ``final_rate`` times the peak."""
    return optax.linear_schedule(config.learning_rate, config.learning_rate * config.final_rate, steps)


def cosine_decay(config: OptimizerConfig, warmup: int, steps: int) -> optax.Schedule:
    """Decays along a cosine to ``final_rate`` times the peak (Loshchilov and Hutter 2017, equation 5)."""
    return optax.cosine_decay_schedule(config.learning_rate, steps, config.final_rate)


def inverse_sqrt_decay(config: OptimizerConfig, warmup: int, steps: int) -> optax.Schedule:
    """Decays from the peak in proportion to 1 / sqrt(n), for any number of steps (Vaswani et al. 2017, equation 3).

    The paper's rate at update n with w warm-up steps, D^-0.5 min(n^-0.5, n w^-1.5), has its peak (D w)^-0.5 at w.
    """
    start = max(warmup, 1)
    # During the warm-up `count` is negative, and the result is not used.
    return lambda count: config.learning_rate * jnp.sqrt(start / (jnp.maximum(count, 0) + start))


def no_decay(config: OptimizerConfig, warmup: int, steps: int) -> optax.Schedule:
    """Keeps the peak."""
    return optax.constant_schedule(config.learning_rate)


def num_decay_steps(config: OptimizerConfig, warmup: int, total_steps: int) -> int:
    """Returns the number of steps in which the learning rate of ``warmup_stable_decay`` falls."""
    return min(max(round(config.decay_ratio * total_steps), 1), total_steps - warmup)


def stable_decay(config: OptimizerConfig, warmup: int, steps: int) -> optax.Schedule:
    """Keeps the peak, then decays linearly to ``final_rate`` times it in the last ``decay_ratio`` of the run.

    See Hu et al. 2024, section 4, and Haegele et al. 2024.
    """
    decay = num_decay_steps(config, warmup, warmup + steps)
    return optax.join_schedules([no_decay(config, warmup, steps), linear_decay(config, warmup, decay)], [steps - decay])


def one_minus_sqrt_decay(config: OptimizerConfig, warmup: int, steps: int) -> optax.Schedule:
    """Decays to ``final_rate`` times the peak as 1 - sqrt(n / steps) (Haegele et al. 2024, section 3.1)."""
    low, peak = config.final_rate, config.learning_rate

    def rate(count: jax.Array) -> jax.Array:
        return peak * (low + (1 - low) * (1 - jnp.sqrt(jnp.clip(count / steps, 0, 1))))

    return rate


DECAYS = {
    "linear": linear_decay,
    "cosine": cosine_decay,
    "inverse_sqrt": inverse_sqrt_decay,
    "constant": no_decay,
    "warmup_stable_decay": stable_decay,
    "one_minus_sqrt": one_minus_sqrt_decay,
}
"""Learning rate after the warm-up, by ``OptimizerConfig.schedule``: updates since the warm-up -> rate."""


def learning_rate_schedule(config: OptimizerConfig, total_steps: int, first: int = 0) -> optax.Schedule:
    """Returns a function from the update number n (from 0) to the learning rate: warm-up, then decay (`DECAYS`).

    The warm-up is linear. Its first update has rate 0, as in google-research/bert and transformers. The decay starts at
    the peak, as in transformers; in google-research/bert it starts at update 0, and the warm-up replaces its first
    part.

    Args:
        total_steps: last step of the schedule.
        first: update at which the schedule starts, of a phase with its own schedule.
    """
    total_steps -= first
    warmup = config.num_warmup_steps(total_steps)
    decay = DECAYS[config.schedule](config, warmup, max(total_steps - warmup, 1))
    rise = optax.linear_schedule(0.0, config.learning_rate, max(warmup, 1))
    whole = optax.join_schedules([rise, decay], [warmup])
    # Skipped steps are no updates, so that the first updates of a phase may have smaller numbers.
    return whole if first == 0 else lambda count: whole(jnp.maximum(count - first, 0))


STACKS = ("bert", "decoder")
"""Modules that have layers."""


def layer_depth(path: tuple[str, ...]) -> int | None:
    """Returns the depth of a parameter of the encoder or the decoder.

    The depth is 0 in the embeddings and in parameters that all layers read, and i + 1 in layer i. The convolution is
    part of layer 0. The depth is None above the layers (pooler, heads).
    """
    if path[0] not in STACKS or path[1] == "embeddings" or "/".join(path[1:3]).startswith("encoder/relative_"):
        return 0 if path[0] in STACKS else None
    if path[1:3] == ("encoder", "convolution"):
        return 1
    layer = re.fullmatch(r"layer_(\d+)", path[2]) if path[1] == "encoder" else None
    return None if layer is None else int(layer[1]) + 1


def scale_by_layer_depth(decay: float) -> optax.GradientTransformation:
    """Scales learning rates by layer: 1 above the layers, and ``decay`` to the power i for the i-th layer from the top.

    The embeddings are the lowest layer, as in google-research/electra, optimization.py.
    """

    def scale(updates: optax.Updates, params: optax.Params | None = None) -> optax.Updates:
        del params
        tops = dict.fromkeys(STACKS, 1)
        for path in traverse_util.flatten_dict(updates):
            if below := layer_depth(path):
                tops[path[0]] = max(tops[path[0]], below + 1)

        def one(path: ParameterPath, update: jax.Array) -> jax.Array:
            below = layer_depth(path)
            return update if below is None else jax.tree.map(lambda u: u * decay ** (tops[path[0]] - below), update)

        return traverse_util.path_aware_map(one, updates)

    return optax.stateless(scale)


def make_frozen_predicate(
    num_frozen_layers: int | None, num_feature_layers: int | None
) -> Callable[[ParameterPath], bool] | None:
    """Returns a predicate for the parameters that are not trained; None if all are trained.

    Args:
        num_frozen_layers: number of lower layers that are frozen together with the embeddings; None freezes nothing.
        num_feature_layers: if not None, the whole encoder is frozen.
    """
    if num_feature_layers is not None:
        return lambda path: path[0] == "bert"
    if num_frozen_layers is not None:
        return lambda path: (
            path[0] == "bert" and (below := layer_depth(path)) is not None and below <= num_frozen_layers
        )
    return None


def make_optimizer(
    config: OptimizerConfig,
    total_steps: int,
    frozen: Callable[[ParameterPath], bool] | None = None,
    first_step: int = 0,
) -> optax.GradientTransformation:
    """Returns the chain: clip by global norm, direction, weight decay, trust ratio (LAMB), learning rate (by layer).

    Spike detection surrounds the chain, and measures the norm of the whole gradient.

    LAMB follows You et al. 2019 (algorithm 2): the trust ratio |w| / |update| of each tensor includes the weight decay.
    It does not apply to biases and LayerNorm, as in the authors' code; optax.lamb applies it to these as well.

    Args:
        frozen: path -> whether a parameter is not trained. Such a parameter has no moments and no decay, and is
            excluded from the norm. Its gradient has to be zero (`jax.lax.stop_gradient`).
        first_step: update at which the learning rate schedule starts.
    """
    chain = []
    is_stable = config.name == "stable_adamw"
    if config.max_grad_norm > 0 and not is_stable:
        chain.append(optax.clip_by_global_norm(config.max_grad_norm))
    chain.append(make_direction(config))
    if not is_stable:
        chain.append(optax.add_decayed_weights(config.weight_decay, decay_mask))
    if config.name == "lamb":
        chain.append(optax.masked(optax.scale_by_trust_ratio(), decay_mask))
    chain.append(optax.scale_by_learning_rate(learning_rate_schedule(config, total_steps, first_step)))
    if config.layerwise_lr_decay != 1:
        chain.append(scale_by_layer_depth(config.layerwise_lr_decay))
    whole = optax.chain(*chain)
    if frozen is not None:
        trained = partial(traverse_util.path_aware_map, lambda path, _: not frozen(path))
        whole = optax.masked(whole, trained)
    if config.spike_deviations is None:
        return whole
    return detect_spikes(whole, config.spike_deviations, config.skip_spikes)
