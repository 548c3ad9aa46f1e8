"""Keys of an encoder-decoder: the sizes they give, and values that cannot work."""

import dataclasses
from typing import Any

import pytest

from bert.config import (
    DataConfig,
    Decoding,
    FinetuneConfig,
    ModelConfig,
    PretrainConfig,
    TaskDataConfig,
    TokenizerConfig,
    UserError,
)
from bert.config.training import TrainingConfig

MODEL = ModelConfig(vocab_size=100, num_hidden_layers=4)
DATA = TaskDataConfig(dir="data")


def config_with(**changes: Any) -> FinetuneConfig:
    return FinetuneConfig(init="none", data=DATA, training=TrainingConfig(steps=1), **changes)


def test_the_decoder_is_as_the_encoder_unless_keys_differ() -> None:
    assert MODEL.decoder == MODEL.without_decoder == MODEL
    other = dataclasses.replace(MODEL, decoder_layers=2, decoder_vocab_size=50)
    assert other.decoder == dataclasses.replace(MODEL, vocab_size=50, num_hidden_layers=2)
    assert other.without_decoder == MODEL
    convolved = dataclasses.replace(MODEL, conv_kernel_size=3)
    assert convolved.decoder == MODEL and convolved.without_decoder == convolved


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"decoder_layers": 2, "share_decoder": "all"}, "model.decoder_layers is 2, but model.share_decoder is all"),
        ({"decoder_vocab_size": 7, "share_decoder": "embeddings"}, "decoder_vocab_size is 7, but model.share_decoder"),
        ({"decoder_layers": 0}, r"model.decoder_layers is 0.*least 1"),
    ],
)
def test_decoders_that_cannot_be_built_are_refused(changes: dict[str, Any], wrong: str) -> None:
    with pytest.raises(UserError, match=wrong):
        dataclasses.replace(MODEL, **changes).check()


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"decoding": Decoding(beams=4, num_samples=2)}, r"decoding.num_samples is 2"),
        ({"decoding": Decoding(beams=0)}, "decoding.beams is 0"),
        (
            {"model": ModelConfig(layer_groups=1, halting=0.5)},
            "model.halting is 0.5, but fine-tuning does not add this cost",
        ),
        (
            {"target_tokenizer": TokenizerConfig(kind="byte_level", vocab_size=100)},
            "target_tokenizer.vocab_size is 100",
        ),
        (
            {"target_tokenizer": TokenizerConfig(vocab_size=50), "model": ModelConfig(share_decoder="embeddings")},
            "target_tokenizer is set, but model.share_decoder is embeddings",
        ),
        (
            {"target_tokenizer": TokenizerConfig(path="vocab.txt"), "init": "runs/x"},
            "target_tokenizer is set, but decoder_init is encoder",
        ),
        (
            {"data": dataclasses.replace(DATA, source="de")},
            r"data.source is de, but data.target is null",
        ),
        (
            {"data": dataclasses.replace(DATA, max_target_length=1)},
            r"data.max_target_length is 1.*least 2",
        ),
    ],
)
def test_settings_of_a_decoder_that_cannot_work_are_refused(changes: dict[str, Any], wrong: str) -> None:
    with pytest.raises(UserError, match=wrong):
        dataclasses.replace(config_with(), **changes).check()


def test_permuted_tokens_have_no_convolution() -> None:
    with pytest.raises(UserError, match=r"model\.conv_kernel_size is 3, but training\.objective is plm: remove"):
        PretrainConfig(
            model=ModelConfig(conv_kernel_size=3),
            data=DataConfig(train="corpus.txt", input_format="full_sentences"),
            training=TrainingConfig(steps=1, objective="plm"),
        ).check()


def test_pretraining_has_no_decoder() -> None:
    with pytest.raises(UserError, match=r"model\.decoder_layers is 2"):
        PretrainConfig(
            model=ModelConfig(decoder_layers=2), data=DataConfig(train="corpus.txt"), training=TrainingConfig(steps=1)
        ).check()
