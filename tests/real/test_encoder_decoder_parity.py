"""The encoder-decoder against transformers' EncoderDecoderModel of two BERTs: folders both ways, logits, token ids, and
generation token for token.

Fresh models hardly ever end a text, so that a test of theirs would prove nothing: here the end token is made likely.
"""

import dataclasses
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from safetensors.numpy import load_file

import bert
from bert.config import Decoding
from bert.interchange.modules import build_module
from tests.helpers import english
from tests.interchange.hf_folders import assert_same

pytestmark = pytest.mark.real

torch = pytest.importorskip("torch", reason="needs the extra `torch`")
transformers = pytest.importorskip("transformers", reason="needs the extra `torch`")

TOKENS, TARGET_TOKENS, LONGEST = 613, 401, 48
START, END, PAD = 2, 3, 0
MOST, TEXTS = 15, 40
END_BIAS = 0.75
SIZES = {
    "hidden_size": 48, "num_attention_heads": 3, "intermediate_size": 100, "max_position_embeddings": LONGEST,
    "type_vocab_size": 2, "initializer_range": 0.1,
}  # fmt: skip


class Drawn(NamedTuple):
    """A random model of transformers, its folder, and the same model as we read it."""

    reference: "transformers.EncoderDecoderModel"
    folder: Path
    model: bert.Pretrained


CASES = {
    "BERT2BERT": {"num_hidden_layers": 2},
    "BERTShare": {"num_hidden_layers": 3},
    "two vocabularies": {"num_hidden_layers": 1, "vocab_size": TARGET_TOKENS},
    "a matrix of its own": {"num_hidden_layers": 2, "tie_word_embeddings": False, "hidden_act": "gelu_new"},
}


def draw(folder: Path, name: str, deviation: float = 0.05) -> Drawn:
    torch.manual_seed(3)
    settings = {**SIZES, **{key: value for key, value in CASES[name].items() if key == "hidden_act"}}
    encoder = transformers.BertConfig(vocab_size=TOKENS, num_hidden_layers=3, **settings)
    sizes = {**settings, "vocab_size": TOKENS, **CASES[name]}
    decoder = transformers.BertConfig(**sizes, is_decoder=True, add_cross_attention=True)
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    reference = transformers.EncoderDecoderModel(config).eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(deviation * torch.randn_like(parameter))
        reference.decoder.bert.embeddings.position_embeddings.weight *= 2  # else texts repeat one token
        reference.get_output_embeddings().bias[END] += END_BIAS
        if name == "BERTShare":
            reference.decoder.bert.load_state_dict(reference.encoder.state_dict(), strict=False)
    reference.save_pretrained(folder)
    tokens = english(TOKENS)
    write_vocabulary(folder, tokens)
    if name == "two vocabularies":
        write_vocabulary(folder / "target_tokenizer", [*tokens[:5], *reversed(tokens[-TARGET_TOKENS + 5 :])])
    return Drawn(reference, folder, bert.load(folder))


def write_vocabulary(folder: Path, tokens: list[str]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in tokens), encoding="utf-8")


@pytest.fixture(scope="module")
def drawn(tmp_path_factory) -> Drawn:
    return draw(tmp_path_factory.mktemp("drawn"), "a matrix of its own", deviation=0.1)


def sources() -> list[str]:
    """Texts of different lengths."""
    words = [token for token in english(TOKENS)[5:] if token.isalpha()]
    random = np.random.default_rng(0)
    return [" ".join(random.choice(words, random.integers(1, 12))) for _ in range(TEXTS)]


def inputs(target_tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sources, their masks, and targets."""
    random = np.random.default_rng(1)
    mask = (np.arange(20) < random.integers(1, 21, (6, 1))).astype(int)
    return (
        np.where(mask == 1, random.integers(5, TOKENS, (6, 20)), PAD),
        mask,
        random.integers(5, target_tokens, (6, 9)),
    )


def logits_of(reference, source: np.ndarray, mask: np.ndarray, target: np.ndarray) -> np.ndarray:
    names = ("input_ids", "attention_mask", "decoder_input_ids")
    with torch.no_grad():
        given = {name: torch.tensor(array) for name, array in zip(names, (source, mask, target), strict=True)}
        return reference(**given).logits.numpy()


@pytest.mark.parametrize("name", CASES)
def test_folders_both_ways(name: str, tmp_path: Path) -> None:
    reference, folder, model = draw(tmp_path / "theirs", name)
    assert model.architecture == "BertForSequenceToSequence"
    assert model.config.share_decoder == ("all" if name == "BERTShare" else "none")
    source, mask, target = inputs(model.config.decoder.vocab_size)
    expected = logits_of(reference, source, mask, target)
    found = build_module(model).apply({"params": model.params}, source, target, mask)
    print(f"{name}: logits within {np.abs(found - expected).max():.1e} of {np.abs(expected).max():.1f}")
    np.testing.assert_allclose(found, expected, atol=2e-5)

    said: list[str] = []
    model.save(tmp_path / "ours", log=said.append)
    assert "logits within" in said[0] and "token ids equal" in said[0]
    ours, theirs = (load_file(place / "model.safetensors") for place in (tmp_path / "ours", folder))
    unused = {"decoder.cls.predictions.bias"} if name == "a matrix of its own" else set()  # next to the decoder's own
    assert ours.keys() == theirs.keys()
    for key in ours.keys() - unused:
        np.testing.assert_array_equal(ours[key], theirs[key])
    again = transformers.EncoderDecoderModel.from_pretrained(tmp_path / "ours").eval()
    np.testing.assert_array_equal(logits_of(again, source, mask, target), expected)
    assert_same(bert.load(tmp_path / "ours").params, model.params)

    hostile = ["", "Don't stop: it's 3.14!", "naïve ﬁne ½ 中文 [MASK] [SEP]", *sources()[:5]]
    for ours, place in ((model.tokenizer, ""), (model.target_tokenizer, "target_tokenizer")):
        if ours is not None:
            theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours" / place)
            assert [ours.encode(text).ids for text in hostile] == theirs(hostile)["input_ids"]


@pytest.mark.parametrize(
    "settings",
    [
        {"beams": 1},
        {"beams": 2, "length_penalty": 0.0},
        {"beams": 4, "length_penalty": 1.0},
        {"beams": 4, "length_penalty": 2.0, "early_stopping": True},
        {"beams": 5, "length_penalty": 0.6, "early_stopping": False},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_generation_token_for_token(settings: dict, drawn: Drawn) -> None:
    count, names = settings["beams"], {"beams": "num_beams"}
    out = generate(
        drawn, drawn.reference, max_new_tokens=MOST, do_sample=False, num_return_sequences=count,
        decoder_start_token_id=START, eos_token_id=END, pad_token_id=PAD, return_dict_in_generate=True,
        output_scores=True, **{names.get(key, key): value for key, value in settings.items()},
    )  # fmt: skip
    found = drawn.model.generate(sources(), details=True, max_tokens=MOST, num_samples=count, **settings)
    answers = [answer for of_text in found for answer in of_text] if count > 1 else found
    lengths = np.bincount([len(answer.token_ids) for answer in answers], minlength=MOST)
    print(f"{len(answers)} texts; of each length {lengths.tolist()}")
    assert (lengths > 0).sum() >= 4, "texts of one length prove little"
    different = differences(answers, out.sequences.numpy()[:, 1:])
    if count > 1:
        scores, theirs = np.array([answer.score for answer in answers]), out.sequences_scores.numpy()
        np.testing.assert_allclose(scores, theirs, rtol=1e-6)  # float32 sums of at most 15 terms
    # One text has two hypotheses whose scores differ by 1e-7 of their size, so that rounding decides which comes first.
    assert len(different) <= (2 if count > 1 else 0), different


def generate(drawn: Drawn, reference, **settings):
    """transformers' own, of the texts as its tokenizer reads them."""
    rows = transformers.AutoTokenizer.from_pretrained(drawn.folder)(sources(), padding=True, return_tensors="pt")
    with torch.no_grad():
        return reference.generate(rows["input_ids"], attention_mask=rows["attention_mask"], **settings)


def differences(answers: list, expected: np.ndarray) -> list[int]:
    """The indices of the continuations whose tokens are not the expected ones."""
    different = []
    for number, (answer, theirs) in enumerate(zip(answers, expected, strict=True)):
        ids = [*answer.token_ids, *([END] if answer.ended else [])]
        # transformers fills with the end token where padding is 0
        if ids != theirs[: len(ids)].tolist() or not set(theirs[len(ids) :]) <= {PAD, END}:
            different.append(number)
    return different


def test_settings_of_generation_are_the_defaults_on_both_sides(drawn: Drawn, tmp_path: Path) -> None:
    model = dataclasses.replace(drawn.model, decoding=Decoding(12, 3, 0.8, early_stopping=True))
    model.save(tmp_path / "ours")
    again = bert.load(tmp_path / "ours")
    assert again.decoding == model.decoding
    reference = transformers.EncoderDecoderModel.from_pretrained(tmp_path / "ours").eval()
    assert not differences(again.generate(sources(), details=True), generate(drawn, reference).numpy()[:, 1:])
    assert [answer.target for answer in again.predict(sources()[:2])] == again.generate(sources()[:2])
