"""Greedy decoding, beam search and filters against transformers' ``generate``, token for token, on random GPT-2 models.

Fresh models hardly ever end a text, so that a test of theirs would prove nothing: here the end token is made likely.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

import bert
from bert.inference.sampling import filter_logits
from tests.language_models import END, TOKENIZER, language_model
from tests.real.hf_models import draw_weights

pytestmark = pytest.mark.real

torch = pytest.importorskip("torch", reason="needs the extra `torch`")
transformers = pytest.importorskip("transformers", reason="needs the extra `torch`")

MOST = 14
BOS = TOKENIZER.token_to_id("x")
PROMPTS = [
    "the",
    "a dog ran to the cat",
    "",
    "“hats”",
    "mats and",
    "x",
    "cats cats cats",
    "the cat sat on the mat",
    "on",
]
PROMPTS += [f"{first} {second}" for first in ("the cat", "dogs", "a mat ran") for second in ("", "sat", "to the", "zz")]


def make_pair(end_bias: float, folder: Path):
    """Returns a model of transformers with random weights, and the same one as `bert.load` reads it."""
    torch.manual_seed(1)
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), END)
    sizes = {"n_positions": 64, "n_embd": 48, "n_layer": 3, "n_head": 3, "initializer_range": 0.3}
    config = transformers.GPT2Config(vocab_size=TOKENIZER.get_vocab_size(), **sizes, **ids)
    model = draw_weights(transformers.GPT2LMHeadModel(config), 0.1)
    with torch.no_grad():
        words, norm = model.transformer.wte.weight, model.transformer.ln_f
        norm.bias += end_bias * words[END] / words[END].square().sum()  # adds end_bias to the end token's logit
    model.save_pretrained(folder)
    TOKENIZER.save(str(folder / "tokenizer.json"))
    return model, bert.load(folder)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory):
    """Makes each pair once, which keeps the programs that it has compiled."""
    return functools.cache(lambda end_bias: make_pair(end_bias, tmp_path_factory.mktemp("gpt2")))


@pytest.fixture(params=[2.0, 5.0, 9.0])
def both(request: pytest.FixtureRequest, pairs):
    return pairs(request.param)


def theirs(model, **settings):
    """Token ids of each prompt's continuations, without padding, and their scores if there are beams."""
    ids = [TOKENIZER.encode(text, add_special_tokens=False).ids or [END] for text in PROMPTS]
    longest = max(map(len, ids))
    tokens = torch.tensor([[END] * (longest - len(row)) + row for row in ids])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in ids])
    out = model.generate(
        tokens, attention_mask=mask, max_new_tokens=MOST, do_sample=False, return_dict_in_generate=True,
        output_scores=True, **settings,
    )  # fmt: skip
    new = [row[longest:].tolist() for row in out.sequences]
    scores = out.sequences_scores.numpy() if "num_beams" in settings else None
    return [row[: row.index(END) + 1] if END in row else row for row in new], scores


def ours(model: bert.Pretrained, **settings):
    answers = model.generate(PROMPTS, max_tokens=MOST, details=True, batch_size=64, **settings)
    flat = [one for answer in answers for one in (answer if isinstance(answer, list) else [answer])]
    return [[*one.token_ids, *([END] if one.ended else [])] for one in flat], np.array([one.score for one in flat])


def test_greedy_is_theirs_token_for_token(both) -> None:
    expected, _ = theirs(both[0])
    assert ours(both[1])[0] == expected


def test_rows_end_at_different_lengths(pairs) -> None:
    lengths = {len(row) for bias in (2.0, 5.0, 9.0) for row in ours(pairs(bias)[1])[0]}
    assert {1, MOST} < lengths and len(lengths) > 5


@pytest.mark.parametrize("early_stopping", [False, True])
@pytest.mark.parametrize(("beams", "length_penalty"), [(4, 1.0), (2, 0.0), (3, 0.6), (5, 2.0)])
def test_beams_are_theirs_token_for_token(both, beams: int, length_penalty: float, early_stopping: bool) -> None:
    common = {"length_penalty": length_penalty, "early_stopping": early_stopping}
    expected, scores = theirs(both[0], num_beams=beams, num_return_sequences=2, **common)
    found, our_scores = ours(both[1], beams=beams, num_samples=2, **common)
    assert found == expected
    np.testing.assert_allclose(our_scores, scores, atol=3e-4)


CONTROLS = [
    {"repetition_penalty": 1.7},
    {"no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 3},
    {"min_tokens": 9},
    {"repetition_penalty": 0.8, "no_repeat_ngram_size": 2, "min_tokens": 5},
]


@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize("controls", CONTROLS)
def test_controls_are_theirs_token_for_token(both, controls, beams: int) -> None:
    """Each prompt alone: transformers applies them to the padding of other rows as well."""
    names = {"min_tokens": "min_new_tokens"}
    given = {names.get(name, name): value for name, value in controls.items()}
    given |= {"num_beams": beams, "num_return_sequences": beams // 2} if beams > 1 else {}
    expected = []
    for text in PROMPTS:
        tokens = torch.tensor([TOKENIZER.encode(text, add_special_tokens=False).ids or [END]])
        out = both[0].generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=MOST, do_sample=False, **given
        )
        rows = [row[tokens.shape[1] :].tolist() for row in out]
        expected += [row[: row.index(END) + 1] if END in row else row for row in rows]
    settings = {"beams": beams, "num_samples": beams // 2} if beams > 1 else {}
    assert ours(both[1], **controls, **settings)[0] == expected


@pytest.mark.parametrize("count", [1, None])
def test_stop_texts_end_where_theirs_do(count: int | None, pairs) -> None:
    """Stops at pairs of letters from our own texts: at one, and at all of them."""
    model, mine = pairs(2.0)
    free = mine.generate(PROMPTS, max_tokens=MOST)
    words = [text[place : place + 2] for text in free for place in range(2, len(text) - 1)]
    # transformers also ends a text at a stop that begins in its prompt
    begun = [text + after[:1] for text, after in zip(PROMPTS, free, strict=True)]
    stops = [one for one in words if one.isascii() and one.isalpha() and not any(one in text for text in begun)]
    stops = list(dict.fromkeys(stops))[:count]  # the bytes of random models are seldom letters
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=TOKENIZER)
    found = mine.generate(PROMPTS, max_tokens=MOST, stop=stops, details=True)
    for text, unstopped, answer in zip(PROMPTS, free, found, strict=True):
        tokens = torch.tensor([TOKENIZER.encode(text, add_special_tokens=False).ids or [END]])
        out = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=MOST, do_sample=False, stop_strings=stops,
            tokenizer=wrapped,
        )  # fmt: skip
        assert [*answer.token_ids, *([END] if answer.ended and not stopped(unstopped, stops) else [])] == (
            out[0][tokens.shape[1] :].tolist()
        )
        assert answer.text == min((unstopped[: unstopped.index(stop)] for stop in stops if stop in unstopped), key=len,
                                  default=unstopped)  # fmt: skip
    assert any(stopped(text, stops) for text in free)


TOGETHER = [{}, {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "min_tokens": 4}]


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("controls", TOGETHER)
def test_stop_texts_controls_and_beams_together(controls, beams: int, pairs) -> None:
    """Stops at pairs of letters from our own texts with the same settings."""
    model, mine = pairs(2.0)
    settings = {**controls, **({"beams": beams, "num_samples": 2} if beams > 1 else {})}
    free = [text for answer in mine.generate(PROMPTS, max_tokens=MOST, **settings) for text in listed(answer)]
    words = {text[place : place + 2] for text in free for place in range(1, len(text) - 1)}
    begun = [text[place:] for text in PROMPTS for place in range(len(text))]
    # transformers also ends a text at a stop that begins in its prompt
    stops = sorted(
        one for one in words if one.isascii() and one.isalpha() and not any(one[0] in text for text in begun)
    )
    assert stops
    names = {"min_tokens": "min_new_tokens"}
    given = {names.get(name, name): value for name, value in controls.items()}
    given |= {"num_beams": beams, "num_return_sequences": 2} if beams > 1 else {}
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=TOKENIZER)
    ended = 0
    for text in PROMPTS:
        tokens = torch.tensor([TOKENIZER.encode(text, add_special_tokens=False).ids or [END]])
        out = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=MOST, do_sample=False, stop_strings=stops,
            tokenizer=wrapped, **given,
        )  # fmt: skip
        answers = listed(mine.generate(text, max_tokens=MOST, stop=stops, details=True, **settings))
        for row, answer in zip(out, answers, strict=True):
            expected = row[tokens.shape[1] :].tolist()
            expected = expected[: expected.index(END)] if END in expected else expected
            assert list(answer.token_ids) == expected
            ended += answer.ended and len(expected) < MOST
    assert ended


def listed(answer) -> list:
    """The continuations of a prompt, of which there may be one."""
    return answer if isinstance(answer, list) else [answer]


def stopped(text: str, stops: list[str]) -> bool:
    return any(stop in text for stop in stops)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize(("top_k", "top_p"), [(40, 1.0), (200, 0.9), (7, 0.5), (1, 0.9), (200, 0.05), (200, 0.999)])
def test_filters_keep_their_tokens(temperature: float, top_k: int, top_p: float) -> None:
    from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.from_numpy(np.random.default_rng(0).normal(size=(50, 200)).astype(np.float32) * 3)
    expected = TopKLogitsWarper(top_k)(None, TemperatureLogitsWarper(temperature)(None, logits))
    expected = TopPLogitsWarper(top_p)(None, expected).numpy()
    found = np.asarray(filter_logits(logits.numpy() / temperature, top_k, top_p))
    np.testing.assert_array_equal(np.isfinite(found), np.isfinite(expected))


def test_filters_treat_equal_logits_as_theirs() -> None:
    from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

    logits = torch.from_numpy(np.random.default_rng(1).integers(0, 4, (80, 12)).astype(np.float32))
    for top_k in (1, 3, 8):
        expected = TopKLogitsWarper(top_k)(None, logits).numpy()
        np.testing.assert_array_equal(np.isfinite(filter_logits(logits.numpy(), top_k, 1.0)), np.isfinite(expected))
    for top_p in (0.3, 0.61, 0.93):
        expected = TopPLogitsWarper(top_p)(None, logits).numpy()
        np.testing.assert_array_equal(np.isfinite(filter_logits(logits.numpy(), 12, top_p)), np.isfinite(expected))


def test_the_score_is_their_loss(both) -> None:
    text = "the cat sat on the mat and a dog ran to it"
    ids = [END, *TOKENIZER.encode(text, add_special_tokens=False).ids]
    with torch.no_grad():
        loss = both[0](torch.tensor([ids]), labels=torch.tensor([ids])).loss.item()
    score = both[1].score(text)
    assert -score.log_probability / score.num_tokens == pytest.approx(loss, abs=1e-4)


@pytest.mark.parametrize("beams", [1, 3])
def test_a_bos_token_and_several_end_tokens_are_theirs(beams: int, tmp_path: Path) -> None:
    """The tokenizer puts a token before each text, like Llama's, and generation_config.json lists four end tokens."""
    reference, plain = make_pair(2.0, tmp_path)
    tokenizer = Tokenizer.from_str(TOKENIZER.to_str())
    start = TOKENIZER.id_to_token(BOS)
    tokenizer.post_processor = TemplateProcessing(single=f"{start} $A", special_tokens=[(start, BOS)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    tokens = Counter(
        token for found in plain.generate(PROMPTS, max_tokens=MOST, details=True) for token in found.token_ids
    )
    ends = [END, *(token for token, _ in tokens.most_common(3))]
    reference.generation_config.eos_token_id = ends
    reference.generation_config.save_pretrained(tmp_path)
    model, many = bert.load(tmp_path), {"num_beams": beams, "num_return_sequences": beams} if beams > 1 else {}
    assert model.end_ids == tuple(ends)
    seen = set()
    for prompt in PROMPTS[:8]:
        ids = torch.tensor([tokenizer.encode(prompt).ids])
        out = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=MOST, do_sample=False, **many)
        ours = model.generate(prompt, max_tokens=MOST, details=True, beams=beams, num_samples=beams)
        for row, found in zip(out[:, ids.shape[1] :].tolist(), ours if beams > 1 else [ours], strict=True):
            end = next((place for place, token in enumerate(row) if token in ends), len(row))
            assert row[:end] == list(found.token_ids) and found.ended == (end < len(row))
            seen.add(row[end] if end < len(row) else None)
    assert len(seen) > 2
    with torch.no_grad():
        ids = torch.tensor([tokenizer.encode("the cat sat").ids])
        loss = reference(ids, labels=ids).loss.item()
    score = model.score("the cat sat")
    assert -score.log_probability / score.num_tokens == pytest.approx(loss, abs=1e-4)
    model.save(tmp_path / "ours")
    assert bert.load(tmp_path / "ours").end_ids == tuple(ends)


def test_the_export_of_a_run_continues_the_same_texts(tmp_path: Path) -> None:
    """Its tokenizer puts no special token behind a prompt."""
    gpt2 = {"embedding_norm": False, "prediction_transform": False, "prediction_bias": False}
    run = dataclasses.replace(language_model(**gpt2, residual_init="scaled"), step=1)
    run.save(tmp_path / "gpt2")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "gpt2").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "gpt2")
    for prompt in ("the cat", "a dog ran to", "“hats”"):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        out = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=END)[0, ids.shape[1] :].tolist()
        ours = run.generate(prompt, max_tokens=8, details=True)
        assert ids[0].tolist() == TOKENIZER.encode(prompt, add_special_tokens=False).ids
        assert [token for token in out if token != END] == list(ours.token_ids)
