"""Decoding over a small model without layers: its logits depend on every token before, through a cache."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert.config import Decoding
from bert.errors import UserError
from bert.inference.decoding import Decoded, Prompts, beam_search, sample
from bert.inference.sampling import DecodingArrays, choose_tokens, control_logits, filter_logits
from bert.model.attention import KeysValues, LayerCache
from bert.model.mask import Mask

V, WIDTH, END = 5, 6, 4
GREEDY = Decoding()
RANDOM = np.random.default_rng(14)
TABLE, POSITIONS, HEAD = (RANDOM.normal(size=size) for size in ((V, WIDTH), (64, WIDTH), (WIDTH, V)))


def step(tokens, position_ids, mask: Mask, cache):
    """Logits of the sum of what all tokens put into the cache."""
    values = jnp.asarray(TABLE, jnp.float32)[tokens] * jnp.asarray(POSITIONS, jnp.float32)[position_ids]
    new = KeysValues.from_heads(values[:, :, None], values[:, :, None])
    own = cache[0].own.write(new, mask.start)
    seen = mask.booleans(tokens.shape[1], own.num_positions)[:, 0].astype(jnp.float32)
    states = jnp.tanh(jnp.einsum("BTS,BSH->BTH", seen, own.values))
    return states @ jnp.asarray(HEAD, jnp.float32), (LayerCache(own),)


def empty(rows: int, positions: int):
    zeros = jnp.zeros((rows, positions, 1, WIDTH))
    return (LayerCache(KeysValues.from_heads(zeros, zeros)),)


@jax.jit
def in_one_call(ids):
    length = ids.shape[1]
    logits, _ = step(ids, jnp.arange(length)[None], Mask(start=0, causal=True), empty(1, length))
    return jax.nn.log_softmax(logits[0])


@functools.cache
def uncached(*tokens: int) -> np.ndarray:
    """Log-probabilities [V] of the token after some; no position sees the padding on its right."""
    padded = np.zeros((1, 16), np.int32)
    padded[0, : len(tokens)] = tokens
    return np.asarray(in_one_call(padded))[len(tokens) - 1]


def prompts(*texts: list[int], limits: int | list[int] = 8, length: int = 0) -> Prompts:
    length = length or max(map(len, texts))
    tokens = np.array([[0] * (length - len(text)) + text for text in texts], np.int32)
    mask = np.array([[0] * (length - len(text)) + [1] * len(text) for text in texts], np.int32)
    numbers = np.stack([np.arange(len(texts)), np.zeros(len(texts))], 1).astype(np.int32)
    return Prompts(tokens, mask, np.broadcast_to(np.int32(limits), len(texts)), numbers)


def decode(inputs: Prompts, decoding: Decoding = GREEDY, end: int = END, most: int = 8) -> Decoded:
    rows, length = inputs.tokens.shape
    arrays, cache = DecodingArrays.make(decoding, end), empty(rows, length + most)
    if decoding.beams == 1:
        return jax.device_get(SAMPLE(cache, inputs, arrays, most))
    return jax.device_get(BEAMS(cache, inputs, arrays, most, decoding.beams))


SAMPLE = jax.jit(lambda *given: sample(step, *given), static_argnums=3)
BEAMS = jax.jit(lambda *given: beam_search(step, *given), static_argnums=(3, 4))
FILTER, CHOOSE = jax.jit(filter_logits), jax.jit(choose_tokens)


def results(decoded: Decoded) -> list[list[list[int]]]:
    return [
        [list(tokens[:length]) for tokens, length in zip(*row, strict=True)]
        for row in zip(decoded.tokens, decoded.lengths, strict=True)
    ]


def greedy(text: list[int], limit: int = 8) -> tuple[list[int], float]:
    """By hand and without a cache."""
    new: list[int] = []
    score = 0.0
    while len(new) < limit and END not in new:
        logp = uncached(*text, *new)
        new.append(int(logp.argmax()))
        score += logp.max()
    return new, score


TEXTS = [[0], [1, 2, 3], [3, 3], [2, 0, 1, 1, 3], [1]]


@pytest.mark.medium
def test_greedy_with_cache_and_padding_is_the_argmax_of_every_text_alone() -> None:
    decoded = decode(prompts(*TEXTS, length=7))
    expected = [greedy(text) for text in TEXTS]
    assert [new for [new] in results(decoded)] == [new for new, _ in expected]
    np.testing.assert_allclose(decoded.scores[:, 0], [score for _, score in expected], atol=1e-5)
    assert len({len(new) for new, _ in expected}) > 2  # rows end at different lengths
    for text, (new, _) in zip(TEXTS, expected, strict=True):
        assert results(decode(prompts(text)))[0] == [new]


@pytest.mark.medium
def test_rows_end_at_their_own_limits() -> None:
    limits = [1, 3, 0, 2, 5]
    decoded = decode(prompts(*TEXTS, limits=limits), end=V)
    assert list(decoded.lengths[:, 0]) == limits
    longer = results(decode(prompts(*TEXTS), end=V))
    assert results(decoded) == [[new[:limit]] for [new], limit in zip(longer, limits, strict=True)]
    beams = decode(prompts(*TEXTS, limits=limits), Decoding(beams=3), end=V)
    assert [set(lengths) for lengths in beams.lengths.tolist()] == [{limit} for limit in limits]


def all_ends(text: list[int], most: int, alpha: float, gnmt: bool) -> list[tuple[float, list[int]]]:
    """Every continuation that ends, or has the full length, best first."""
    result = []
    for length in range(1, most + 1):
        for new in itertools.product(range(V), repeat=length):
            if END in new[:-1] or (new[-1] != END and length < most):
                continue
            score = sum(uncached(*text, *new[:i])[token] for i, token in enumerate(new))
            result.append((score / ((5 + length) / 6 if gnmt else length) ** alpha, list(new)))
    return sorted(result, reverse=True)


@pytest.mark.medium
@pytest.mark.parametrize(("alpha", "norm"), [(0.0, "length"), (1.0, "length"), (2.0, "length"), (0.6, "gnmt")])
def test_with_enough_beams_it_is_the_best_of_all_sequences(alpha: float, norm: str) -> None:
    every = all_ends([1, 2], 4, alpha, norm == "gnmt")
    decoding = Decoding(beams=400, length_penalty=alpha, length_norm=norm)
    decoded = decode(prompts([1, 2], limits=4), decoding, most=4)
    result = int(np.isfinite(decoded.scores[0]).sum())
    assert result == len(every) == 341
    np.testing.assert_allclose(decoded.scores[0, :result], [score for score, _ in every], atol=1e-5)
    assert results(decoded)[0][:5] == [new for _, new in every[:5]]


@pytest.mark.medium
def test_beams_of_a_row_depend_on_neither_padding_nor_other_rows() -> None:
    decoding = Decoding(beams=3, early_stopping=True)
    together = decode(prompts(*TEXTS, length=7), decoding)
    for row, text in enumerate(TEXTS):
        alone = decode(prompts(text), decoding)
        assert results(alone)[0] == results(together)[row]
        np.testing.assert_allclose(alone.scores[0], together.scores[row], atol=1e-5)
    for row, hypotheses in enumerate(results(together)):
        for new, score in zip(hypotheses, together.scores[row], strict=True):
            total = sum(uncached(*TEXTS[row], *new[:i])[token] for i, token in enumerate(new))
            assert score == pytest.approx(total / len(new), abs=1e-5)
        assert list(together.scores[row]) == sorted(together.scores[row], reverse=True)


@pytest.mark.medium
def test_one_beam_is_greedy() -> None:
    prompt_ids, arrays = prompts(*TEXTS), DecodingArrays.make(Decoding(), END)
    beams = jax.device_get(BEAMS(empty(len(TEXTS), 16), prompt_ids, arrays, 8, 1))
    assert results(beams) == results(decode(prompt_ids))


@pytest.mark.medium
def test_early_stopping_ends_with_as_many_hypotheses_as_beams() -> None:
    prompt_ids = prompts(*TEXTS)
    early, late = (
        decode(prompt_ids, Decoding(beams=4, early_stopping=stop, length_penalty=2.0)) for stop in (True, False)
    )
    assert (late.scores[:, 0] >= early.scores[:, 0] - 1e-6).all()
    assert (late.scores[:, 0] > early.scores[:, 0] + 1e-3).any()


SAMPLING = Decoding(temperature=1.3, seed=7)


@pytest.mark.medium
def test_a_sample_depends_on_seed_text_and_sample_and_not_on_the_batch() -> None:
    whole = results(decode(prompts(*TEXTS, length=7), SAMPLING))
    prompt_ids = prompts(*TEXTS)
    for row in range(len(TEXTS)):
        one = jax.tree.map(lambda x, row=row: x[row : row + 1], prompt_ids)
        assert results(decode(one, SAMPLING))[0] == whole[row]
    twice = prompts([0], [0], [0])
    first, second, third = results(decode(twice, SAMPLING))
    assert first != second or second != third  # equal texts, other numbers
    samples = dataclasses.replace(twice, numbers=np.array([[0, 0], [0, 1], [0, 0]], np.int32))
    first, second, third = results(decode(samples, SAMPLING))
    assert first == third and first != second
    assert results(decode(twice, dataclasses.replace(SAMPLING, seed=8))) != results(decode(twice, SAMPLING))


@pytest.mark.medium
def test_samples_have_the_probabilities_of_the_tokens_that_are_kept() -> None:
    logits = np.log(np.array([0.4, 0.3, 0.15, 0.1, 0.05], np.float32))
    count = 4000
    numbers = np.stack([np.arange(count), np.zeros(count)], 1).astype(np.int32)

    def shares(**settings: float) -> np.ndarray:
        arrays = DecodingArrays.make(Decoding(**settings), END)
        drawn = CHOOSE(jnp.broadcast_to(logits, (count, V)), numbers, jnp.int32(3), arrays)
        return np.bincount(np.asarray(drawn), minlength=V) / count

    np.testing.assert_allclose(shares(temperature=1.0), np.exp(logits), atol=0.03)
    heated = np.exp(logits / 0.5) / np.exp(logits / 0.5).sum()
    np.testing.assert_allclose(shares(temperature=0.5), heated, atol=0.03)
    np.testing.assert_allclose(shares(temperature=1.0, top_k=2), [4 / 7, 3 / 7, 0, 0, 0], atol=0.03)
    np.testing.assert_allclose(shares(temperature=1.0, top_p=0.8), [8 / 17, 6 / 17, 3 / 17, 0, 0], atol=0.03)
    assert list(shares(temperature=1e-30)) == [1, 0, 0, 0, 0]
    assert list(shares()) == [1, 0, 0, 0, 0]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (5, 1.0, "01234"),
        (9, 1.0, "01234"),
        (2, 1.0, "02"),
        (3, 1.0, "0234"),  # 3 and 4 are equally likely
        (1, 1e-9, "0"),
        (5, 0.39, "0"),
        (5, 0.41, "02"),
        (5, 0.69, "02"),
        (5, 0.71, "024"),  # of equal ones the last
        (5, 0.96, "01234"),
        (2, 0.5, "0"),  # 4/7 of what top_k keeps
        (2, 0.6, "02"),
    ],
)
def test_filters_keep_the_most_likely_tokens(top_k: int, top_p: float, kept: str) -> None:
    logits = jnp.log(jnp.array([[0.4, 0.05, 0.3, 0.125, 0.125]]))
    filtered = np.asarray(FILTER(logits, top_k, top_p))[0]
    assert "".join(map(str, np.flatnonzero(np.isfinite(filtered)))) == kept
    np.testing.assert_array_equal(filtered[np.isfinite(filtered)], np.asarray(logits)[0][np.isfinite(filtered)])


@pytest.mark.medium
def test_filters_agree_with_sorting() -> None:
    logits = np.random.default_rng(2).integers(-4, 5, (60, 33)).astype(np.float32) * 0.7
    for top_k in (1, 2, 7, 20, 33):
        for top_p in (1e-9, 0.2, 0.55, 0.9, 0.999, 1.0):
            kept = np.isfinite(np.asarray(FILTER(logits, top_k, top_p)))
            for row, actual in zip(logits, kept, strict=True):
                order = np.argsort(row, kind="stable")
                among = row[order] >= row[order[-top_k]]
                odds = np.where(among, np.exp(row[order].astype(np.float64)), 0)
                below = np.cumsum(odds / odds.sum())
                expected = among & ((below > 1 - top_p + 1e-6) | (np.arange(33) == 32) | (top_p == 1))
                doubtful = abs(below - (1 - top_p)) < 1e-6
                assert ((actual[order] == expected) | (doubtful & (top_p < 1))).all()


@pytest.mark.medium
def test_samples_of_a_large_vocabulary_have_their_probabilities() -> None:
    size, count = 1000, 20_000
    logits = np.full(size, -np.inf, np.float32)
    logits[[0, 255, 256, 700, 999]] = np.log([0.1, 0.2, 0.3, 0.15, 0.25])
    numbers = np.stack([np.zeros(count), np.arange(count)], 1).astype(np.int32)
    arrays = DecodingArrays.make(Decoding(temperature=1.0), END)
    drawn = CHOOSE(jnp.broadcast_to(logits, (count, size)), numbers, jnp.int32(0), arrays)
    result = np.bincount(np.asarray(drawn), minlength=size) / count
    np.testing.assert_allclose(result, np.exp(logits), atol=0.012)


@pytest.mark.medium
def test_settings_compile_no_program_of_their_own() -> None:
    SAMPLE.clear_cache(), BEAMS.clear_cache()
    for settings in (
        {},
        {"temperature": 0.7},
        {"temperature": 2.0, "top_k": 2, "seed": 5},
        {"temperature": 1, "top_p": 0.5},
    ):
        for limits in (3, 8):
            decode(prompts(*TEXTS, limits=limits), Decoding(**settings))
    for settings in ({}, {"length_penalty": 0.3}, {"length_norm": "gnmt"}, {"early_stopping": True}):
        decode(prompts(*TEXTS), Decoding(beams=2, **settings), end=3)
    assert (SAMPLE._cache_size(), BEAMS._cache_size()) == (1, 1)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": 2.5}, "max_tokens is 2.5: pass a whole number"),
        ({"beams": True}, "beams is True"),
        ({"early_stopping": 1}, "early_stopping is 1: pass true or false"),
        ({"length_norm": "words"}, "length_norm is 'words'"),
        ({"length_penalty": float("nan")}, "length_penalty is nan"),
        ({"temperature": -1}, "temperature is -1"),
        ({"temperature": "1"}, "temperature is '1': pass a number"),
        ({"top_k": 0, "temperature": 1}, "top_k is 0"),
        ({"top_p": 0, "temperature": 1}, "top_p is 0: it must be above 0"),
        ({"top_k": 5}, "top_k is 5, but temperature is 0.0: set"),
        ({"top_p": 0.5}, "top_p is 0.5, but temperature is 0"),
        ({"beams": 2, "temperature": 0.5}, "beams is 2, but temperature is 0.5"),
        ({"num_samples": 2}, "num_samples is 2, but beams is 1"),
        ({"num_samples": 3, "beams": 2}, "num_samples is 3, but beams is 2"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_settings_that_cannot_work_are_one_sentence(settings: dict, words: str) -> None:
    with pytest.raises(UserError) as error:
        Decoding(**settings).check()
    assert words in str(error.value)


def test_settings_that_work_are_accepted() -> None:
    Decoding().check()
    Decoding(temperature=np.float32(0.5), top_k=np.int64(3), top_p=1, num_samples=4, length_penalty=-1).check()
    Decoding(beams=3, num_samples=3, early_stopping=True, length_norm="gnmt").check()


TOKENS = np.array([[0, 0, 1, 2, 3, 1, 2, 0], [2, 2, 2, 2, 2, 2, 0, 0]])
IS_TOKEN = np.array([[0, 0, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1, 0, 0]], bool)
LOGITS = np.array([[1.0, 2, -2, 4, 0], [1.0, 2, -2, 4, 0]], np.float32)
BANNED = -np.inf


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, LOGITS),
        ({"repetition_penalty": 2.0}, [[1, 1, -4, 2, 0], [1, 2, -4, 4, 0]]),
        ({"no_repeat_ngram_size": 1}, [[1, BANNED, BANNED, BANNED, 0], [1, 2, BANNED, 4, 0]]),
        ({"no_repeat_ngram_size": 2}, [[1, 2, -2, BANNED, 0], [1, 2, BANNED, 4, 0]]),
        ({"no_repeat_ngram_size": 3}, [[1, 2, -2, BANNED, 0], [1, 2, BANNED, 4, 0]]),
        ({"no_repeat_ngram_size": 4}, [[1, 2, -2, 4, 0], [1, 2, BANNED, 4, 0]]),
        ({"no_repeat_ngram_size": 7}, LOGITS),
        ({"min_tokens": 3}, LOGITS),
        ({"min_tokens": 4}, [[1, 2, -2, 4, BANNED]] * 2),
    ],
)
def test_controls_change_the_logits_of_the_next_token(settings, expected) -> None:
    """The first row has [1, 2, 3, 1, 2] behind two tokens of padding and three new ones; the second six times a 2."""
    arrays = DecodingArrays.make(dataclasses.replace(GREEDY, **settings), END)
    actual = control_logits(jnp.asarray(LOGITS), jnp.asarray(TOKENS), jnp.asarray(IS_TOKEN), jnp.int32(3), arrays)
    np.testing.assert_array_equal(actual, np.array(expected, np.float32))


@pytest.mark.parametrize(
    "settings",
    [{"repetition_penalty": 0.0}, {"no_repeat_ngram_size": -1}, {"min_tokens": 65}, {"stop": "x"}, {"stop": [""]}],
)
def test_a_control_that_cannot_work_is_an_error(settings) -> None:
    with pytest.raises(UserError, match=next(iter(settings))):
        Decoding(**settings).check()
