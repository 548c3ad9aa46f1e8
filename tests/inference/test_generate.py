"""`Pretrained.generate` and `score` of a small language model: any input has an answer in order, or one sentence."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

import bert
from bert.config import ModelConfig, TokenizerConfig
from bert.inference import generators
from bert.inference.attention_maps import compute_attention_map
from bert.inference.pretrained import Pretrained
from bert.model.decoders import BertForCausalLM
from bert.model.pretraining import BertForMaskedLM
from bert.model.recurrence import COLLECTION, SegmentMemory, kept_memory, memory_variables
from bert.tokenizer.wordpiece import train_wordpiece
from tests import tiny_models
from tests.language_models import END, POSITIONS, TOKENIZER, WORDS, language_model


@pytest.fixture(scope="module")
def model() -> Pretrained:
    return language_model()


@pytest.fixture(scope="module")
def capped() -> Pretrained:
    return language_model(prediction_softcap=0.8)


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids or [END]


@functools.cache
def forward(config: ModelConfig) -> Callable[..., jax.Array]:
    module = BertForCausalLM(config)
    return jax.jit(lambda params, tokens: jax.nn.log_softmax(module.apply({"params": params}, tokens)[0]))


def log_probabilities(model: Pretrained, ids: list[int]) -> np.ndarray:
    """[T, V], of the token after each, without cache and padding; T is filled up so that one program serves."""
    tokens = np.array([ids + [0] * (POSITIONS - len(ids))])
    return np.asarray(forward(model.config)(model.params, tokens))[: len(ids)]


PROMPTS = ["the", "a dog ran", "", "“", "mats and dogs", "cat sat on"]


@pytest.mark.medium
def test_greedy_answers_are_the_argmax_of_each_prompt_alone(model: Pretrained) -> None:
    answers = model.generate(PROMPTS, max_tokens=9, details=True, batch_size=4)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids, score = ids_of(prompt), 0.0
        for token in [*answer.token_ids, *([END] if answer.ended else [])]:
            logp = log_probabilities(model, ids)[-1]
            assert token == logp.argmax()
            ids, score = [*ids, token], score + logp[token]
        assert answer.ended or len(answer.token_ids) == 9
        assert answer.text == TOKENIZER.decode(answer.token_ids, skip_special_tokens=False)
        assert answer.score == pytest.approx(score, abs=1e-4)
    assert len({len(answer.token_ids) for answer in answers}) > 2
    assert model.generate(PROMPTS, max_tokens=9) == [answer.text for answer in answers]
    assert [model.generate(prompt, max_tokens=9) for prompt in PROMPTS] == [answer.text for answer in answers]


@pytest.mark.medium
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"temperature": 1.5, "num_samples": 3, "seed": 4}, marks=pytest.mark.slow),
        pytest.param({"beams": 3, "num_samples": 2}, marks=pytest.mark.slow),
        {"temperature": 1.5, "num_samples": 2, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_tokens": 4},
    ],
)
def test_answers_depend_on_no_batch_size_and_no_other_prompt(model: Pretrained, settings: dict[str, Any]) -> None:
    answers = model.generate(PROMPTS, max_tokens=6, details=True, **settings)
    assert [len(answer) for answer in answers] == [settings["num_samples"]] * len(PROMPTS)
    for batch_size in (1, 3):
        others = model.generate(PROMPTS, max_tokens=6, details=True, batch_size=batch_size, **settings)
        assert [[one.text for one in answer] for answer in others] == [
            [one.text for one in answer] for answer in answers
        ]
    [alone] = model.generate(PROMPTS[4:5], max_tokens=6, numbers=[4], **settings)
    assert alone == [one.text for one in answers[4]]
    assert any(answer[0].text != answer[1].text for answer in answers)
    if "beams" in settings:
        assert all(answer[0].score >= answer[1].score for answer in answers)


@pytest.mark.medium
def test_fewer_samples_are_the_first_ones(model: Pretrained) -> None:
    settings = {"temperature": 1.0, "top_k": 50, "top_p": 0.95, "max_tokens": 5}
    three = model.generate(PROMPTS, num_samples=3, **settings)
    assert model.generate(PROMPTS, **settings) == [samples[0] for samples in three]


@pytest.mark.medium
def test_a_prompt_and_its_continuation_end_with_the_position_table() -> None:
    endless = language_model(end_bias=-100.0)
    prompt = "the cat sat on"
    for beams in (1, 2):
        answer = endless.generate(prompt, max_tokens=200, beams=beams, details=True)
        assert len(answer.token_ids) == POSITIONS - len(ids_of(prompt)) and not answer.ended
    longest_prompt = "e" * (POSITIONS - 1)
    assert len(endless.generate(longest_prompt, details=True).token_ids) == 1
    for count in (POSITIONS, POSITIONS + 1, 5000):
        with pytest.raises(bert.UserError, match=rf"{count}.*runs/lm reads fewer than 24"):
            endless.generate(["a", "e" * count])


@pytest.mark.medium
@pytest.mark.parametrize("memory_length", [5, 100])
def test_with_a_memory_a_continuation_exceeds_the_positions(memory_length: int) -> None:
    """Greedy texts equal one pass if the memory covers them, and rows of one token that continue each other if not.

    A memory of fewer tokens than a row is extended to a row.
    """
    sizes = {"position_embedding_type": "transformer_xl", "type_vocab_size": 0, "memory_length": memory_length}
    recurrent = language_model(end_bias=-100.0, **sizes)

    def logits_of(ids: np.ndarray) -> np.ndarray:
        if memory_length == 100:
            long = dataclasses.replace(recurrent.config, memory_length=None, max_position_embeddings=100)
            return np.asarray(BertForCausalLM(long).apply({"params": recurrent.params}, ids)[0])
        config = dataclasses.replace(recurrent.config, memory_length=POSITIONS - 1)
        module, memory, rows = BertForCausalLM(config), SegmentMemory.empty(config, 1), []
        apply = jax.jit(functools.partial(module.apply, mutable=[COLLECTION]))
        for token in ids[0]:
            read, kept = apply({"params": recurrent.params, **memory_variables(memory)}, token[None, None])
            memory = kept_memory(kept)
            rows.append(np.asarray(read[0, 0]))
        return np.stack(rows)

    for prompt in ("the cat sat", "the cat sat on mats and a dog ran " * 3):
        answer = recurrent.generate(prompt, max_tokens=POSITIONS + 9, details=True)
        assert len(answer.token_ids) == POSITIONS + 9
        logits = logits_of(np.array([[*ids_of(prompt), *answer.token_ids]]))
        assert logits.argmax(-1)[-len(answer.token_ids) - 1 : -1].tolist() == list(answer.token_ids)
    assert len(ids_of(prompt)) > POSITIONS
    beams = recurrent.generate("the cat sat", max_tokens=POSITIONS + 9, beams=2, details=True)
    assert len(beams.token_ids) == POSITIONS + 9


@pytest.mark.medium
def test_any_text_is_a_prompt_and_its_bytes_come_back(model: Pretrained) -> None:
    hostile = ["\0", "\r\n", " \n ", "a\u200d", "🙂", "a \ud83d b", "</s>", "<s>x", " two  spaces "]
    answers = model.generate(hostile, max_tokens=4, details=True)
    for text, answer in zip(hostile, answers, strict=True):
        whole = bert.errors.without_surrogates(text)
        assert TOKENIZER.decode(ids_of(whole), skip_special_tokens=False) == whole
        together = TOKENIZER.decode([*ids_of(whole), *answer.token_ids], skip_special_tokens=False)
        assert whole + answer.text == together


@pytest.mark.medium
@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        (None, "the inputs are None: pass a string or a list"),
        (3, "the inputs are 3: pass a string or a list"),
        ({"a": 1}, "the inputs are {'a': 1}: pass a string or a list"),
        (pa.table({"text": ["the"]}), "the inputs are a data frame: pass one of its columns"),
        (b"the", "the inputs are b'the': pass a string or a list"),
        (["the", None], "input 2 is None, but a text is needed: pass a string"),
        ([("a", "pair")], "input 1 is ('a', 'pair'), but a text is needed: pass a string"),
        ([1.5], "input 1 is 1.5, but a text is needed"),
    ],
)
def test_what_is_no_text_is_refused(model: Pretrained, prompts: Any, words: str) -> None:
    for method in (model.generate, model.score):
        with pytest.raises(bert.UserError) as error:
            method(prompts)
        assert words in str(error.value)


@pytest.mark.medium
def test_no_input_has_no_answer_and_a_tuple_or_array_is_a_list(model: Pretrained) -> None:
    assert model.generate([]) == model.score([]) == []
    expected = model.generate(["the", "a"], max_tokens=3)
    assert (
        model.generate(("the", ["a"]), max_tokens=3) == model.generate(np.array(["the", "a"]), max_tokens=3) == expected
    )


@pytest.mark.medium
def test_there_are_no_more_beams_than_continuations_and_numbers_are_a_seeds(model: Pretrained) -> None:
    result = model.generate("the cat", beams=300, num_samples=300, max_tokens=1, details=True)
    assert len(result) == len({answer.token_ids for answer in result}) <= model.config.vocab_size
    assert all(np.isfinite(answer.score) for answer in result)
    answers = model.generate(["a", "b"], numbers=(n for n in (3, 4)), temperature=1.0, max_tokens=2)
    assert answers == model.generate(["a", "b"], numbers=[3, 4], temperature=1.0, max_tokens=2)
    with pytest.raises(bert.UserError, match=r"numbers has an entry.*0"):
        model.generate(["a"], numbers=[2**40])


def test_settings_that_are_none_are_refused(model: Pretrained) -> None:
    for settings, words in (
        ({"max_length": 3}, "max_length is not a setting of generation: use one of max_tokens, beams, "),
        ({"beams": 0}, "beams is 0: it must be at least 1"),
        ({"batch_size": 0}, "batch_size is 0: pass a whole number of at least 1"),
        ({"batch_size": True}, "batch_size is True: pass a whole number of at least 1"),
        ({"top_k": 3}, "top_k is 3, but temperature is 0"),
        ({"numbers": [1, 2]}, "numbers has 2 entries for 1 prompts: pass one for each"),
    ):
        with pytest.raises(bert.UserError) as error:
            model.generate("the", **settings)
        assert words in str(error.value)


@pytest.mark.medium
def test_a_model_that_reads_both_ways_is_refused() -> None:
    config = ModelConfig(vocab_size=280, hidden_size=8, num_attention_heads=2, intermediate_size=8)
    params = jax.jit(BertForMaskedLM(config).init)(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))["params"]
    masked = Pretrained(
        config=config, params=params, tokenizer=TOKENIZER, architecture="BertForMaskedLM", source="runs/mlm"
    )
    for method in (masked.generate, masked.score):
        with pytest.raises(bert.UserError, match=r"^runs/mlm is not a left-to-right.*\(BertForMaskedLM\)"):
            method("the")


@pytest.mark.medium
def test_a_program_is_compiled_for_each_bucket_of_lengths(model: Pretrained) -> None:
    fresh = dataclasses.replace(model)
    for prompt in ("a", "the cat", "“hats”"):
        for settings in (
            {},
            {"temperature": 0.5, "seed": 3},
            {"temperature": 2, "top_k": 3},
            {"temperature": 1, "top_p": 0.3},
        ):
            fresh.generate(prompt, max_tokens=7 + len(prompt) % 3, **settings)
    assert fresh._text_generator.loop.compiled._cache_size() == 1
    fresh.generate(["a", "the"], max_tokens=8)
    fresh.generate("e" * 17, max_tokens=8)
    fresh.generate("a", max_tokens=20)
    fresh.generate("a", max_tokens=8, beams=2)
    fresh.generate("a", max_tokens=8, beams=2, length_penalty=0.5, early_stopping=True)
    assert fresh._text_generator.loop.compiled._cache_size() == 5


@pytest.mark.medium
def test_a_wordpiece_vocabulary_continues_words() -> None:
    tokenizer = train_wordpiece(WORDS, TokenizerConfig(vocab_size=120, min_frequency=1))
    model = language_model(tokenizer, end_bias=-50.0)
    for prompt, answer in zip(["the cat", "dog"], model.generate(["the cat", "dog"], details=True), strict=True):
        ids = tokenizer.encode(prompt, add_special_tokens=False).ids
        assert prompt + answer.text == tokenizer.decode([*ids, *answer.token_ids], skip_special_tokens=False)


@pytest.mark.medium
@pytest.mark.parametrize("settings", [{}, {"beams": 2}])
def test_stop_texts_are_found_in_the_text_that_is_returned(settings: dict[str, Any]) -> None:
    """The first new token has "##" or no space when it is decoded alone."""
    tokenizer = train_wordpiece(WORDS, TokenizerConfig(vocab_size=120, min_frequency=1))
    model = language_model(tokenizer, end_bias=-50.0)
    for token, stop, tokens, text in (("##t", "##", 8, "t" * 8), ("##t", "tt", 2, ""), ("s", " s", 1, "")):
        params = flatten_dict(model.params)
        bias = params["predictions", "bias"].copy()
        bias[tokenizer.token_to_id(token)] = 100.0
        sure = dataclasses.replace(model, params=unflatten_dict({**params, ("predictions", "bias"): bias}))
        prompts = ["the ca", "a dog in the ca"]
        for answer in sure.generate(prompts, max_tokens=8, details=True, stop=[stop], **settings):
            assert (len(answer.token_ids), answer.text, answer.ended) == (tokens, text, not text)


@pytest.mark.medium
def test_stop_texts_read_a_few_tokens_of_a_long_prompt(model: Pretrained, monkeypatch: pytest.MonkeyPatch) -> None:
    decode, lengths = generators.decode, []

    def counted(tokenizer: Any, ids: list[int], **settings: Any) -> str:
        lengths.append(len(ids))
        return decode(tokenizer, ids, **settings)

    monkeypatch.setattr(generators, "decode", counted)
    fresh = dataclasses.replace(model)
    assert fresh.generate("cat " * 18, max_tokens=3, stop=["zzz"]) == model.generate("cat " * 18, max_tokens=3)
    assert lengths and max(lengths) <= generators.CONTEXT + 3


@pytest.mark.medium
def test_the_score_is_the_sum_over_all_tokens(model: Pretrained) -> None:
    texts = ["the cat sat on", "", "a", "“hats” </s>"]
    for batch_size in (1, 8):
        for text, score in zip(texts, model.score(texts, batch_size=batch_size), strict=True):
            literal = bert.data.encoding.plain_ids(TOKENIZER, [text], literal=True)[0].tolist()
            logp = log_probabilities(model, [END, *literal])
            assert score.log_probability == pytest.approx(
                sum(logp[i, token] for i, token in enumerate(literal)), abs=1e-4
            )
            assert score.num_tokens == len(literal)
    assert model.score("a").perplexity == pytest.approx(math.exp(-model.score(["a"])[0].log_probability))
    assert math.isnan(model.score("").perplexity)


@pytest.mark.medium
@pytest.mark.parametrize("stride", [1, 7, 12, 23, 24])
def test_every_token_of_a_long_text_is_scored_once_with_the_context_that_the_stride_leaves(model, stride: int) -> None:
    text = " ".join(WORDS)
    ids = [END, *bert.data.encoding.plain_ids(TOKENIZER, [text])[0].tolist()]
    total, begin = 0.0, 0
    for place in range(1, len(ids)):
        if place - begin > POSITIONS:
            begin += stride
        total += log_probabilities(model, ids[begin:place])[-1, ids[place]]
    score = model.score(text, stride=stride)
    assert score.num_tokens == len(ids) - 1
    assert score.log_probability == pytest.approx(total, rel=1e-5)
    assert model.score([text, "a"], stride=stride, batch_size=2)[0].log_probability == pytest.approx(total, rel=1e-5)


@pytest.mark.medium
def test_capped_logits_are_generated_and_scored(capped: Pretrained, model: Pretrained) -> None:
    """A cap keeps the most likely token, so scores and samples show it."""
    [free], [answer] = (one.generate(["the"], max_tokens=5, details=True) for one in (model, capped))
    ids, score = ids_of("the"), 0.0
    for token in [*answer.token_ids, *([END] if answer.ended else [])]:
        logp = log_probabilities(capped, ids)[-1]
        assert np.ptp(logp) <= 2 * 0.8
        ids, score = [*ids, token], score + logp[token]
    assert answer.score == pytest.approx(score, abs=1e-4)
    assert answer.token_ids[:1] == free.token_ids[:1] and answer.score < free.score
    text = "a dog ran"
    literal = ids_of(text)
    logp = log_probabilities(capped, [END, *literal])
    expected = sum(logp[i, token] for i, token in enumerate(literal))
    assert capped.score(text).log_probability == pytest.approx(expected, abs=1e-4)


def test_strides_that_leave_tokens_out_are_refused(model: Pretrained) -> None:
    for stride in (0, 25, 1.5):
        with pytest.raises(bert.UserError, match=f"^stride is {stride}"):
            model.score("the", stride=stride)


@pytest.mark.medium
@pytest.mark.parametrize("settings", [{}, {"beams": 2}, {"temperature": 1.0}])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_language_model_that_is_not_finite_writes_and_scores_nothing(
    model: Pretrained, settings: dict[str, Any], value: float
) -> None:
    broken = dataclasses.replace(model, params=jax.tree.map(lambda leaf: np.full_like(leaf, value), model.params))
    with pytest.raises(bert.UserError, match=r"input \d: .*NaN"):
        broken.generate(["ba", "ko"], **settings)
    with pytest.raises(bert.UserError, match=r"input \d: .*NaN"):
        broken.score(["ba", "ko"])


@pytest.mark.medium
def test_an_encoder_decoder_that_is_not_finite_writes_nothing(tmp_path: Path) -> None:
    model = tiny_models.encoder_decoder(tmp_path)
    assert len(model.generate(["a b", "c"])) == 2
    broken = dataclasses.replace(model, params=jax.tree.map(lambda leaf: np.full_like(leaf, np.nan), model.params))
    for settings in ({}, {"beams": 2}):
        with pytest.raises(bert.UserError, match=r"input \d: .*NaN"):
            broken.generate(["a b", "c"], **settings)
    with pytest.raises(bert.UserError, match=r"input 1: .*NaN"):
        compute_attention_map(broken, "a b", "w x")


@pytest.mark.medium
@pytest.mark.parametrize("settings", [{}, {"beams": 3}, {"temperature": 1.0}])
def test_a_stop_text_ends_a_continuation(model: Pretrained, settings: dict[str, Any]) -> None:
    [whole] = model.generate(["the cat"], max_tokens=12, min_tokens=8, details=True, **settings)
    place = len(whole.text) // 2
    stop = whole.text[place : place + 2]
    [cut] = model.generate(
        ["the cat"], max_tokens=12, min_tokens=8, details=True, stop=[stop, "no such text"], **settings
    )
    assert stop not in cut.text and cut.ended
    assert len(cut.token_ids) < len(whole.token_ids)
    assert stop in TOKENIZER.decode(list(cut.token_ids), skip_special_tokens=False)
    assert stop not in TOKENIZER.decode(list(cut.token_ids[:-1]), skip_special_tokens=False)
    if "beams" not in settings:
        assert whole.text.startswith(cut.text)
    [other] = model.generate(["the cat"], max_tokens=12, min_tokens=8, details=True, stop=["no such text"], **settings)
    assert other == whole
