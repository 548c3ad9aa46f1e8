"""Chooses the next token: the most likely one, or a sample after top-k and top-p filtering.

Shapes as in `bert.model.encoder`; logits [B, V] are the next token's logits in each row.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Bool, Float, Int, UInt32

from bert.config import Decoding
from bert.model.array_types import Array

ALL_TOKENS = 2**31 - 1
"""Value of ``top_k`` that keeps every token."""

BLOCK = 256
"""Tokens per block. The sampler first draws a block, then a token within the block."""


class DecodingArrays(struct.PyTreeNode):
    """`Decoding` as scalar arrays, and the ids of the end tokens, [E]."""

    __no_type_check__ = True  # jax.tree.map may put any object into a field

    end: Array
    temperature: Array
    top_k: Array
    top_p: Array
    seed: Array
    length_penalty: Array
    gnmt: Array
    early_stopping: Array
    repetition_penalty: Array
    no_repeat_ngram_size: Array
    min_tokens: Array

    @classmethod
    def make(cls, decoding: Decoding, *end: int) -> DecodingArrays:
        """Converts the settings. ``end`` are the ids of the end tokens."""
        return cls(
            end=jnp.asarray(end, jnp.int32),
            temperature=jnp.asarray(decoding.temperature, jnp.float32),
            top_k=jnp.asarray(min(decoding.top_k or ALL_TOKENS, ALL_TOKENS), jnp.int32),
            top_p=jnp.asarray(decoding.top_p, jnp.float32),
            seed=jnp.asarray(decoding.seed, jnp.uint32),
            length_penalty=jnp.asarray(decoding.length_penalty, jnp.float32),
            gnmt=jnp.asarray(decoding.length_norm == "gnmt"),
            early_stopping=jnp.asarray(decoding.early_stopping),
            repetition_penalty=jnp.asarray(decoding.repetition_penalty, jnp.float32),
            no_repeat_ngram_size=jnp.asarray(decoding.no_repeat_ngram_size, jnp.int32),
            min_tokens=jnp.asarray(decoding.min_tokens, jnp.int32),
        )

    def is_end(self, tokens: Int[Array, "..."]) -> Bool[Array, "..."]:
        """Returns which tokens are end tokens."""
        return (tokens[..., None] == self.end).any(-1)


def control_logits(
    logits: Float[Array, "B V"],
    tokens: Int[Array, "B S"],
    is_token: Bool[Array, "B S"],
    position: Int[Array, ""],
    decoding: DecodingArrays,
) -> Float[Array, "B V"]:
    """Applies the repetition penalty, and -inf to tokens that repeat n-grams or end a text too early.

    The order matches transformers' logits processors.

    Args:
        logits: logits of the next token, or log-probabilities.
        tokens: prompt and continuation so far. The last token is at the last true entry of ``is_token``.
        is_token: false for padding and unused positions.
    """
    rows = jnp.arange(len(logits))[:, None]
    vocabulary = jnp.zeros(logits.shape, bool)

    def penalize(logits: Array) -> Array:
        seen = vocabulary.at[rows, tokens].max(is_token)
        penalty = decoding.repetition_penalty
        return jnp.where(seen, jnp.where(logits < 0, logits * penalty, logits / penalty), logits)

    def without_repeats(logits: Array) -> Array:
        positions = jnp.arange(tokens.shape[1])
        last = jnp.max(jnp.where(is_token, positions, -1), axis=1)[:, None]

        def matches(distance: Array, repeats: Array) -> Array:
            """Whether the tokens ``distance`` before each position and before the next new token are equal."""
            before, recent = positions - distance, last + 1 - distance
            known = (before >= 0) & (recent >= 0) & is_token[:, jnp.maximum(before, 0)]
            known &= jnp.take_along_axis(is_token, jnp.maximum(recent, 0), axis=1)
            equal = tokens[:, jnp.maximum(before, 0)] == jnp.take_along_axis(tokens, jnp.maximum(recent, 0), axis=1)
            return repeats & known & equal

        repeats = jax.lax.fori_loop(1, decoding.no_repeat_ngram_size, matches, is_token)
        return jnp.where(vocabulary.at[rows, tokens].max(repeats), -jnp.inf, logits)

    logits = jax.lax.cond(decoding.repetition_penalty != 1, penalize, lambda x: x, logits)
    logits = jax.lax.cond(decoding.no_repeat_ngram_size > 0, without_repeats, lambda x: x, logits)
    is_early = (position < decoding.min_tokens) & decoding.is_end(jnp.arange(logits.shape[-1]))
    return jnp.where(is_early, -jnp.inf, logits)


def choose_tokens(
    logits: Float[Array, "B V"], numbers: Int[Array, "B 2"], position: Int[Array, ""], decoding: DecodingArrays
) -> Int[Array, "B"]:
    """Returns the most likely tokens, or samples that depend only on (seed, text, sample, position)."""

    def sample(logits: Float[Array, "B V"]) -> Int[Array, "B"]:
        scaled = (logits - logits.max(-1, keepdims=True)) / decoding.temperature
        filters = (decoding.top_k < logits.shape[-1]) | (decoding.top_p < 1)
        scaled = jax.lax.cond(filters, lambda x: filter_logits(x, decoding.top_k, decoding.top_p), lambda x: x, scaled)
        return jax.vmap(draw)(numbers, scaled)

    def draw(number: Int[Array, "2"], logits: Float[Array, "V"]) -> Int[Array, ""]:
        key = jax.random.key(decoding.seed)
        for part in (number[0], number[1], position):
            key = jax.random.fold_in(key, part)
        return _draw_token(key, logits).astype(jnp.int32)

    return jax.lax.cond(decoding.temperature > 0, sample, lambda x: jnp.argmax(x, axis=-1).astype(jnp.int32), logits)


def _draw_token(key: Array, logits: Float[Array, "V"]) -> Int[Array, ""]:
    """Samples a token from its logits.

    Two draws of a few hundred random numbers each are faster than one random number per token of the vocabulary.
    """
    of_block, of_token = jax.random.split(key)
    blocks = jnp.pad(logits, (0, -len(logits) % BLOCK), constant_values=-jnp.inf).reshape(-1, BLOCK)
    block = jax.random.categorical(of_block, jax.nn.logsumexp(blocks, axis=-1))
    return block * BLOCK + jax.random.categorical(of_token, blocks[block])


def filter_logits(
    logits: Float[Array, "B V"], top_k: Int[Array, ""] | int, top_p: Float[Array, ""] | float
) -> Float[Array, "B V"]:
    """Keeps the ``top_k`` most likely tokens, and among them the smallest set with total probability ``top_p``.

    The logits of all other tokens become -inf.

    As in transformers, ``top_k`` also keeps ties with the last token, and ``top_p`` prefers higher ids among ties.
    Binary search replaces sorting, which takes a CPU longer than a step of a small model.
    """
    size = logits.shape[-1]
    order = _ordered(logits)
    count = jnp.clip(top_k, 1, size)
    threshold = _largest(lambda t: jnp.sum(order >= t[:, None], axis=-1) >= count, logits.shape[0])
    among_k = order >= threshold[:, None]
    kept = jax.lax.cond(
        jnp.asarray(top_p) < 1, lambda: among_k & _most_likely(logits, order, among_k, top_p), lambda: among_k
    )
    return jnp.where(kept, logits, -jnp.inf)


def _most_likely(
    logits: Float[Array, "B V"], order: UInt32[Array, "B V"], among: Array, top_p: Float[Array, ""] | float
) -> Array:
    """Returns a mask of the most likely tokens with total probability ``top_p``, at least one."""
    probabilities = jax.nn.softmax(jnp.where(among, logits, -jnp.inf), axis=-1)

    def below(limit: Array) -> Array:
        return jnp.sum(jnp.where(order < limit[:, None], probabilities, 0), axis=-1)

    rows, rest = len(logits), 1 - top_p
    threshold = jnp.minimum(_largest(lambda t: below(t) <= rest, rows), order.max(-1))  # the last token to keep
    equal = order == threshold[:, None]
    share = jnp.max(jnp.where(equal, probabilities, 0), axis=-1)
    dropped = jnp.clip(jnp.floor((rest - below(threshold)) / share), 0, equal.sum(-1) - 1)
    ids = jnp.arange(logits.shape[-1], dtype=jnp.uint32)
    first = _largest(lambda t: jnp.sum(equal & (ids < t[:, None]), axis=-1) <= dropped, rows)
    return (order > threshold[:, None]) | (equal & (ids >= first[:, None]))


def _ordered(x: Float[Array, "B V"]) -> UInt32[Array, "B V"]:
    """Maps floats to integers in the same order."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x.astype(jnp.float32)), jnp.uint32)  # maps -0.0 to 0.0
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _largest(holds: Callable[[Array], Array], rows: int) -> UInt32[Array, "B"]:
    """Returns the largest integer per row that satisfies a monotone condition, by binary search."""

    def with_bit(number: Array, largest: Array) -> Array:
        candidate = largest | (jnp.uint32(1) << (31 - number).astype(jnp.uint32))
        return jnp.where(holds(candidate), candidate, largest)

    return jax.lax.fori_loop(0, 32, with_bit, jnp.zeros(rows, jnp.uint32))
