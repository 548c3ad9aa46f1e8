"""Encoder-decoder folders: format, shared weights, generation settings, and rejected settings."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import bert
from bert.commands.export import main as export
from bert.config import Decoding
from bert.errors import UserError
from bert.files import read_json
from bert.tokenizer.vocabulary import load_tokenizer
from tests.interchange.hf_folders import CONFIG, assert_same, edit, rewrite

ARCHITECTURE = "BertForSequenceToSequence"
SIZES = dataclasses.replace(CONFIG, decoder_layers=1)


@pytest.fixture
def folder(made, tmp_path: Path) -> Path:
    made(ARCHITECTURE, SIZES).save(tmp_path / "model")
    return tmp_path / "model"


def edit_side(folder: Path, side: str, **values) -> None:
    """Sets keys of the encoder's or the decoder's settings, or removes those given as None."""
    content = {**read_json(folder / "config.json")[side], **values}
    edit(folder, **{side: {key: value for key, value in content.items() if value is not None}})


def without_pooler(params: dict) -> dict:
    return {**params, "bert": {name: tree for name, tree in params["bert"].items() if name != "pooler"}}


@pytest.mark.medium
def test_names_and_settings_are_those_of_two_berts(folder: Path) -> None:
    tensors, content = load_file(folder / "model.safetensors"), read_json(folder / "config.json")
    layer = ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense",
             "attention.output.LayerNorm", "intermediate.dense", "output.dense", "output.LayerNorm")  # fmt: skip
    cross = [f"cross{name}" for name in layer[:5]]
    tables = [f"embeddings.{name}_embeddings.weight" for name in ("word", "position", "token_type")]
    modules = {f"encoder.encoder.layer.{number}.{name}" for number in range(2) for name in layer}
    modules |= {f"decoder.bert.encoder.layer.0.{name}" for name in (*layer, *cross)}
    modules |= {"encoder.embeddings.LayerNorm", "decoder.bert.embeddings.LayerNorm", "encoder.pooler.dense"}
    modules |= {f"decoder.cls.predictions.transform.{name}" for name in ("dense", "LayerNorm")}
    arrays = {f"{name}.{end}" for name in modules for end in ("weight", "bias")} | {"decoder.cls.predictions.bias"}
    assert set(tensors) == arrays | {f"{side}.{name}" for side in ("encoder", "decoder.bert") for name in tables}
    assert not tensors["encoder.pooler.dense.weight"].any(), "transformers' encoder always has one"

    assert (content["model_type"], content["architectures"]) == ("encoder-decoder", ["EncoderDecoderModel"])
    ids = {key: content[key] for key in ("decoder_start_token_id", "eos_token_id", "pad_token_id")}
    assert ids == {"decoder_start_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}
    assert (content["encoder"]["num_hidden_layers"], content["decoder"]["num_hidden_layers"]) == (2, 1)
    assert content["decoder"]["is_decoder"] and content["decoder"]["add_cross_attention"]
    assert "is_decoder" not in content["encoder"]


@pytest.mark.medium
@pytest.mark.parametrize(
    "config",
    [
        SIZES,
        dataclasses.replace(CONFIG, tie_word_embeddings=False),
        dataclasses.replace(SIZES, share_decoder="embeddings"),
        dataclasses.replace(CONFIG, share_decoder="all"),
    ],
    ids=lambda config: config.share_decoder,
)
def test_round_trips_are_bit_identical(config, made, tmp_path: Path) -> None:
    """Equal copies are shared again."""
    model = made(ARCHITECTURE, config)
    said: list[str] = []
    model.save(tmp_path / "one", log=said.append)
    assert "tensors read back identical" in said[0]
    again = bert.load(tmp_path / "one", said.append)
    assert (again.architecture, again.config) == (ARCHITECTURE, config)
    assert_same(without_pooler(again.params), model.params)
    again.save(tmp_path / "two")
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    if config.share_decoder == "all":
        rewrite(tmp_path / "two", lambda tensors: {**tensors, WORD: tensors[WORD] + 1})
        assert bert.load(tmp_path / "two").config.share_decoder == "none", "copies of layers alone are not shared"


WORD = "decoder.bert.embeddings.word_embeddings.weight"


@pytest.mark.medium
def test_a_target_vocabulary_of_its_own(made, vocabulary: Path, tmp_path: Path) -> None:
    tokens = vocabulary.read_text().split()
    (tmp_path / "vocab.txt").write_text("\n".join([*tokens[:5], *reversed(tokens[5:]), "x", "y"]))
    config = dataclasses.replace(CONFIG, decoder_vocab_size=25)
    model = made(ARCHITECTURE, config, target_tokenizer=load_tokenizer(tmp_path / "vocab.txt"))
    model.save(tmp_path / "model")
    assert load_file(tmp_path / "model" / "model.safetensors")[WORD].shape == (25, 12)
    again = bert.load(tmp_path / "model")
    assert again.config == config
    assert again.tokenizer.encode("a b").ids == model.tokenizer.encode("a b").ids
    assert again.target_tokenizer.encode("a y").ids == model.target_tokenizer.encode("a y").ids != [2, 1, 1, 3]

    shutil.rmtree(tmp_path / "model" / "target_tokenizer")
    with pytest.raises(UserError, match=r"target_tokenizer does not exist.* 25 tokens"):
        bert.load(tmp_path / "model")


DECODINGS = {
    "greedy": Decoding(max_tokens=9),
    "beams": Decoding(max_tokens=20, beams=4, length_penalty=0.6, early_stopping=True, num_samples=2),
    "samples": Decoding(temperature=0.7, top_p=0.9, num_samples=3),
    "samples of the best": Decoding(temperature=1.0, top_k=7),
    "controls": Decoding(repetition_penalty=1.5, no_repeat_ngram_size=3, min_tokens=2, stop=["x y", "."]),
}


@pytest.mark.parametrize("name", DECODINGS)
def test_settings_of_generation_go_out_and_in(name: str, made, tmp_path: Path) -> None:
    made(ARCHITECTURE, SIZES, decoding=DECODINGS[name]).save(tmp_path / "model")
    assert bert.load(tmp_path / "model").decoding == DECODINGS[name]
    content = read_json(tmp_path / "model" / "generation_config.json")
    assert content["max_length"] == DECODINGS[name].max_tokens + 1, "transformers counts the start token"
    assert ("num_beams" in content, content.get("do_sample", False)) == (name == "beams", "samples" in name)


def test_without_a_length_generation_has_transformers_default(made, tmp_path: Path) -> None:
    made(ARCHITECTURE, SIZES).save(tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text("{}")
    assert bert.load(tmp_path / "model").decoding == Decoding(max_tokens=20)


def test_another_norm_of_the_length_is_reported(made, tmp_path: Path) -> None:
    said: list[str] = []
    decoding = Decoding(beams=4, length_norm="gnmt", length_penalty=0.6)
    made(ARCHITECTURE, SIZES, decoding=decoding).save(tmp_path / "model", log=said.append)
    assert any("generation_config.json cannot express decoding.length_norm gnmt" in line for line in said)


def test_older_folders_have_settings_of_generation_in_their_configuration(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    edit(
        folder,
        num_beams=4,
        max_length=142,
        length_penalty=2.0,
        early_stopping=True,
        no_repeat_ngram_size=3,
        min_length=4,
    )
    edit(folder, encoder_no_repeat_ngram_size=2, min_new_tokens=1, min_p=0.3, typical_p=1.0)
    said: list[str] = []
    expected = Decoding(141, 4, length_penalty=2.0, early_stopping=True, no_repeat_ngram_size=3, min_tokens=3)
    assert bert.load(folder, said.append).decoding == expected
    keys = ("encoder_no_repeat_ngram_size 2", "min_p 0.3")
    ignored = {f"{folder / 'config.json'}: {key} is not applied" for key in keys}
    assert {line for line in said if line.endswith("is not applied")} == ignored


BAD_GENERATION = {
    "num_beams": ("four", r"generation_config.json: num_beams is 'four': pass a whole number"),
    "no_repeat_ngram_size": (-1, r"generation_config.json: no_repeat_ngram_size is -1"),
    "min_new_tokens": ("four", r"generation_config.json: min_new_tokens is 'four'"),
    "repetition_penalty": (0.0, r"generation_config.json: repetition_penalty is 0.0"),
    "stop_strings": ([""], r"generation_config.json: stop_strings is \[''\]"),
    "max_length": (1, "max_length is 1: .*at least 2"),
    "max_new_tokens": (True, "max_new_tokens is True: .*at least 1"),
    "decoder_start_token_id": (0, r"decoder_start_token_id is 0, .*\[CLS\] \(2\)"),
    "eos_token_id": ([3, 4], r"eos_token_id is \[3, 4\], .*\[SEP\] \(3\)"),
}


@pytest.mark.parametrize("key", BAD_GENERATION)
def test_settings_of_generation_that_cannot_work_are_refused(key: str, folder: Path) -> None:
    value, message = BAD_GENERATION[key]
    (folder / "generation_config.json").write_text(json.dumps({key: value}))
    with pytest.raises(UserError, match=message):
        bert.load(folder)


BAD_SIDES = {
    "another decoder": ("decoder", {"model_type": "gpt2"}, "decoder.model_type is 'gpt2', and only 'bert'"),
    "another encoder": ("encoder", {"model_type": "roberta"}, "encoder.model_type is 'roberta', and only 'bert'"),
    "no cross-attention": ("decoder", {"add_cross_attention": False}, "decoder.add_cross_attention is False"),
    "an encoder as decoder": ("decoder", {"is_decoder": None}, "decoder.is_decoder is None, and only True"),
    "a decoder as encoder": ("encoder", {"is_decoder": True}, "is_decoder is True, and only False"),
    "another width": ("decoder", {"hidden_size": 24}, r"decoder.hidden_size is 24 .*enc_to_dec_proj"),
    "another epsilon": ("decoder", {"layer_norm_eps": 1e-5}, "layer_norm_eps is 1e-05 and encoder.layer_norm_eps is"),
    "no number of layers": ("decoder", {"num_hidden_layers": None}, "the decoder lacks num_hidden_layers"),
    "more layers": ("decoder", {"num_hidden_layers": 2}, "lacks decoder.bert.encoder.layer.1.attention.self.query"),
    "millions of layers": ("decoder", {"num_hidden_layers": 10**7}, "too few for the 10,000,000 layers"),
    "layers in words": ("decoder", {"num_hidden_layers": "two"}, "decoder_layers is 'two'"),
    "more tokens": ("decoder", {"vocab_size": 24}, "target_tokenizer does not exist.* 24 tokens"),
}  # fmt: skip


@pytest.mark.medium
@pytest.mark.parametrize("name", BAD_SIDES)
def test_sides_that_are_not_expressed_are_refused(name: str, folder: Path) -> None:
    side, values, message = BAD_SIDES[name]
    edit_side(folder, side, **values)
    with pytest.raises(UserError, match=message):
        bert.load(folder)


@pytest.mark.medium
def test_fixed_positions_and_absent_segments_are_written_as_tables(made, tmp_path: Path) -> None:
    config = dataclasses.replace(SIZES, position_embedding_type="sinusoidal", type_vocab_size=0, prediction_bias=False)
    model = made(ARCHITECTURE, config)
    model.save(tmp_path / "out")
    again = bert.load(tmp_path / "out")
    for side in ("bert", "decoder"):
        tables = again.params[side]["embeddings"]
        assert tables["position"]["embedding"].any() and not tables["segment"]["embedding"].any()
    assert (again.config.type_vocab_size, again.config.prediction_bias) == (1, True)


@pytest.mark.medium
def test_the_encoder_of_a_folder_reads_texts(folder: Path, made) -> None:
    texts = ["a b c", "d"]
    own_model, again = made(ARCHITECTURE, SIZES), bert.load(folder)
    np.testing.assert_array_equal(own_model.embed(texts), again.embed(texts))


@pytest.mark.medium
def test_a_folder_writes_targets(folder: Path) -> None:
    model = bert.load(folder)
    [answer] = model.predict(["a b"])
    assert answer.target == model.generate("a b")


def test_the_command(folder: Path, tmp_path: Path, capsys) -> None:
    assert export([str(folder), str(tmp_path / "out")]) == 0
    assert "tensors read back identical" in capsys.readouterr().out
    card = (tmp_path / "out" / "README.md").read_text()
    assert "2 layers of the encoder and 1 of the decoder, of width 12" in card
    assert "\ntokenizer.batch_decode(targets, skip_special_tokens=True)\n" in card
