"""Compiled decoding loops: greedy decoding, sampling and beam search. A function computes the next token's logits.

Shapes as in `bert.model.encoder`; T is the length of the prompts and S of the cache, M the maximum number of new
tokens, K beams, C candidates. All settings except shapes are arrays, so changing them does not recompile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Bool, Float, Int

from bert.inference.sampling import DecodingArrays, choose_tokens, control_logits
from bert.model.array_types import Array
from bert.model.attention import LayerCache
from bert.model.mask import Mask

Cache = tuple[LayerCache, ...]
Step = Callable[[Array, Array, Mask, Cache], tuple[Array, Cache]]
"""Maps (tokens [B, T], position ids [B, T], mask over the cache's S keys, cache) to (logits [B, T, V], cache).

The new cache includes the keys and values of the tokens from the mask's ``start`` on. For an encoder-decoder, the
function closes over the memory.
"""


Stop = Callable[[Any, Any, Any, Any], Any]
"""Maps (tokens of the prompts [B, T], their mask, new tokens [B, n, M], their number) to [B, n]: whether a text ends
with the last token. Not compiled."""


class Prompts(struct.PyTreeNode):
    """Texts to continue, with at least one token each, padded on the left.

    Attributes:
        tokens: [B, T] int32.
        mask: [B, T], 1 for tokens and 0 for padding.
        limits: [B] int32, maximum number of new tokens of each row; 0 for rows that only fill the batch.
        numbers: [B, 2] int32, indices of the text and of its sample, which seed the sampler.
    """

    __no_type_check__ = True  # jax.tree.map may put any object into a field

    tokens: Array
    mask: Array
    limits: Array
    numbers: Array


class Decoded(NamedTuple):
    """New tokens: K results per row, best first. K is 1 except in beam search.

    Attributes:
        tokens: [B, K, M] int32. Values after a result's length are undefined.
        lengths: [B, K] int32, including the end token; 0 for a missing result.
        scores: [B, K] float32, sum of the tokens' log-probabilities. Beam search divides it by the length norm.
    """

    tokens: Array
    lengths: Array
    scores: Array


class _Context(NamedTuple):
    """Inputs of every step.

    The mask of keys; each prompt's last token with its position id and offset in the cache; the prompts' tokens [B, T]
    and their mask.
    """

    keys: Array
    last: Array
    position_ids: Array
    place: int
    tokens: Array
    mask: Array

    def step(self, step: Step, cache: Cache, tokens: Array, position: Array) -> tuple[Array, Cache]:
        """Returns the logits [B, V] of the new token with index ``position``, given the previous tokens [B]."""
        mask = Mask(keys=self.keys, start=self.place + position, causal=True)
        logits, cache = step(tokens[:, None], self.position_ids + position, mask, cache)
        return logits[:, 0], cache

    def repeat(self, times: int) -> _Context:
        """Repeats each row, with the copies next to each other."""
        arrays = (self.keys, self.last, self.position_ids, self.tokens, self.mask)
        keys, last, position_ids, tokens, mask = (jnp.repeat(x, times, axis=0) for x in arrays)
        return _Context(keys, last, position_ids, self.place, tokens, mask)

    def control(
        self, logits: Array, new: Array, position: Array, decoding: DecodingArrays, total: Array | None = None
    ) -> Array:
        """Applies the settings to the logits [B, V] after the new tokens [B, M].

        With ``total`` [B], applies them to the log-probabilities, which are the logits minus ``total``.
        """

        def controlled(logits: Array) -> Array:
            filled = jnp.broadcast_to(jnp.arange(new.shape[1]) < position, new.shape)
            tokens, is_token = jnp.concatenate([self.tokens, new], 1), jnp.concatenate([self.mask, filled], 1)
            shift = jnp.zeros((len(logits), 1)) if total is None else total[:, None]
            return control_logits(logits - shift, tokens, is_token, position, decoding) + shift

        is_free = (decoding.repetition_penalty == 1) & (decoding.no_repeat_ngram_size == 0)
        return jax.lax.cond(is_free & (position >= decoding.min_tokens), lambda x: x, controlled, logits)


class _Sampled(NamedTuple):
    position: Array  # new tokens so far
    last: Array  # [B]
    tokens: Array  # [B, M]
    lengths: Array  # [B]
    scores: Array  # [B]
    done: Array  # [B]
    cache: Cache


def sample(
    step: Step, cache: Cache, prompts: Prompts, decoding: DecodingArrays, max_tokens: int, stop: Stop | None = None
) -> Decoded:
    """Decodes greedily, or samples with a temperature, until every row has ended.

    Args:
        cache: empty cache with B rows and at least T + ``max_tokens`` - 1 positions.
        max_tokens: M, at least the largest limit of the prompts.
        stop: detects texts that end without the end token; None for none.
    """
    context, cache = _read_prompts(step, cache, prompts)

    def advance(state: _Sampled) -> _Sampled:
        logits, cache = context.step(step, state.cache, state.last, state.position)
        controlled = context.control(logits, state.tokens, state.position, decoding)
        tokens = choose_tokens(controlled, prompts.numbers, state.position, decoding)
        written = jax.lax.dynamic_update_slice_in_dim(state.tokens, tokens[:, None], state.position, axis=1)
        chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0] - jax.nn.logsumexp(logits, axis=-1)
        lengths = state.lengths + ~state.done
        return _Sampled(
            position=state.position + 1,
            last=tokens,
            tokens=written,
            lengths=lengths,
            scores=jnp.where(state.done, state.scores, state.scores + chosen),
            done=state.done
            | decoding.is_end(tokens)
            | (lengths >= prompts.limits)
            | _stopped(stop, prompts, written[:, None], state.position + 1)[:, 0],
            cache=cache,
        )

    rows = len(prompts.tokens)
    zeros = jnp.zeros(rows, jnp.int32)
    tokens = jnp.zeros((rows, max_tokens), jnp.int32)
    scores = jnp.zeros(rows, jnp.float32)
    start = _Sampled(jnp.int32(0), context.last, tokens, zeros, scores, jnp.asarray(prompts.limits) < 1, cache)
    end = jax.lax.while_loop(lambda state: ~state.done.all(), advance, start)
    return Decoded(end.tokens[:, None], end.lengths[:, None], end.scores[:, None])


class _Beams(NamedTuple):
    position: Array  # new tokens so far
    live: Array  # [B, K, M], unfinished hypotheses
    sums: Array  # [B, K], their log-probabilities
    ended: Decoded  # the best finished hypotheses, -inf for free slots
    open: Array  # [B], whether a better hypothesis may still finish
    cache: Cache


def beam_search(
    step: Step,
    cache: Cache,
    prompts: Prompts,
    decoding: DecodingArrays,
    max_tokens: int,
    beams: int,
    stop: Stop | None = None,
) -> Decoded:
    """Returns the ``beams`` best continuations found by beam search, equal to transformers' ``generate``.

    Of the C best candidates, the K best that do not end are continued. With E end tokens, C is max(2, 1 + E) K.
    Candidates among the K best that end, or reach the limit, compete with the finished hypotheses. A row is done when
    its best unfinished hypothesis is no better than the worst finished one at the same length. With early stopping, it
    is done when K hypotheses are finished.

    Args:
        step: function that computes logits, for B rows of prompts, and then for B * K rows, with the hypotheses of a
            prompt next to each other.
    """
    context, cache = _read_prompts(step, cache, prompts)
    rows = len(prompts.tokens)
    context = context.repeat(beams)
    row = jnp.arange(rows)[:, None]
    cache = _reorder(cache, jnp.repeat(row[:, 0], beams), rows)
    limits = jnp.asarray(prompts.limits)
    candidates = max(2, 1 + len(decoding.end)) * beams

    def advance(state: _Beams) -> _Beams:
        before = jax.lax.dynamic_slice_in_dim(state.live, jnp.maximum(state.position - 1, 0), 1, axis=2).reshape(-1)
        logits, cache = context.step(
            step, state.cache, jnp.where(state.position > 0, before, context.last), state.position
        )
        total = jax.nn.logsumexp(logits, axis=-1)
        logits = context.control(logits, state.live.reshape(-1, max_tokens), state.position, decoding, total)
        sums, beam, token = _best_candidates(state.sums, logits, total, candidates)
        live = _write(state.live[row, beam], token, state.position)
        count = state.position + 1
        at_limit = (count >= limits)[:, None]
        ends = decoding.is_end(token) | at_limit | _stopped(stop, prompts, live, count)
        kept, continuing = jax.lax.top_k(jnp.where(ends, -jnp.inf, sums), beams)
        norm = _length_norm(count, decoding)
        ending = ends & (jnp.arange(candidates) < beams) & state.open[:, None]
        ended = _best_ended(state.ended, live, count, jnp.where(ending, sums / norm, -jnp.inf))
        full = jnp.isfinite(ended.scores).all(1)
        better = kept[:, 0] / norm > ended.scores.min(1)
        return _Beams(
            position=count,
            live=live[row, continuing],
            sums=kept,
            ended=ended,
            open=state.open & better & ~(full & decoding.early_stopping) & ~at_limit[:, 0],
            cache=_reorder(cache, (row * beams + beam[row, continuing]).reshape(-1), rows * beams),
        )

    tokens = jnp.zeros((rows, beams, max_tokens), jnp.int32)
    none = jnp.full((rows, beams), -jnp.inf)
    start = _Beams(
        position=jnp.int32(0),
        live=tokens,
        sums=none.at[:, 0].set(0.0),  # all beams of a row are equal at the start, so only one counts
        ended=Decoded(tokens, jnp.zeros((rows, beams), jnp.int32), none),
        open=limits > 0,
        cache=cache,
    )
    return jax.lax.while_loop(lambda state: state.open.any(), advance, start).ended


def _read_prompts(step: Step, cache: Cache, prompts: Prompts) -> tuple[_Context, Cache]:
    """Fills the cache with the prompts' tokens, except the last token, which the first step reads."""
    rows, length = prompts.tokens.shape
    after = cache[0].own.num_positions - length
    keys = jnp.concatenate([jnp.asarray(prompts.mask, bool), jnp.ones((rows, after), bool)], axis=1)
    position_ids = jnp.maximum(jnp.cumsum(jnp.asarray(prompts.mask, jnp.int32), axis=1) - 1, 0)
    if length > 1:
        _, cache = step(prompts.tokens[:, :-1], position_ids[:, :-1], Mask(keys=keys, start=0, causal=True), cache)
    tokens, mask = jnp.asarray(prompts.tokens), jnp.asarray(prompts.mask, bool)
    return _Context(keys, tokens[:, -1], position_ids[:, -1:], length - 1, tokens, mask), cache


def _stopped(
    stop: Stop | None, prompts: Prompts, tokens: Int[Array, "B C M"], count: Int[Array, ""]
) -> Bool[Array, "B C"]:
    """Returns whether each hypothesis ends with a stop text."""
    shape = jax.ShapeDtypeStruct(tokens.shape[:2], jnp.bool_)
    if stop is None:
        return jnp.zeros(shape.shape, bool)
    return jax.pure_callback(stop, shape, prompts.tokens, prompts.mask, tokens, count)


def _best_candidates(
    sums: Float[Array, "B K"], logits: Float[Array, "R V"], total: Float[Array, "R"], number: int
) -> tuple[Float[Array, "B C"], Int[Array, "B C"], Int[Array, "B C"]]:
    """Returns the C = ``number`` best continuations of each row: sums of log-probabilities, hypotheses and tokens.

    Log-probabilities are logits minus ``total``.
    """
    rows, beams = sums.shape
    best, tokens = jax.lax.top_k(logits, min(number, logits.shape[-1]))  # per beam first, so that less is sorted
    best = (best - total[:, None]).reshape(rows, beams, -1) + sums[:, :, None]
    width = best.shape[-1]
    best, candidates = jax.lax.top_k(best.reshape(rows, -1), number)
    tokens = jnp.take_along_axis(tokens.reshape(rows, -1), candidates, axis=1)
    return best, candidates // width, tokens


def _length_norm(count: Int[Array, ""], decoding: DecodingArrays) -> Float[Array, ""]:
    length = count.astype(jnp.float32)
    return jnp.where(decoding.gnmt, (5 + length) / 6, length) ** decoding.length_penalty


def _best_ended(ended: Decoded, live: Array, count: Array, scores: Float[Array, "B C"]) -> Decoded:
    """Returns the K best of the finished hypotheses and the hypotheses that end now."""
    best, which = jax.lax.top_k(jnp.concatenate([ended.scores, scores], axis=1), ended.scores.shape[1])
    row = jnp.arange(len(which))[:, None]
    lengths = jnp.concatenate([ended.lengths, jnp.where(jnp.isfinite(scores), count, 0)], axis=1)
    return Decoded(jnp.concatenate([ended.tokens, live], axis=1)[row, which], lengths[row, which], best)


def _write(tokens: Int[Array, "B C M"], new: Int[Array, "B C"], count: Int[Array, ""]) -> Int[Array, "B C M"]:
    return jax.lax.dynamic_update_slice_in_dim(tokens, new[:, :, None], count, axis=2)


def _reorder(cache: Cache, rows: Int[Array, "rows"], num_rows: int) -> Cache:
    """Selects rows of the self-attention cache. All hypotheses of a text share the cross-attention cache."""
    return tuple(layer.replace(own=layer.own.take_rows(rows, num_rows)) for layer in cache)
