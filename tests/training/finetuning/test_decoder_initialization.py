"""What an encoder-decoder takes from an encoder-decoder, whatever the two share."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from flax import traverse_util

from bert.config import FinetuneConfig, ModelConfig
from bert.errors import UserError
from bert.interchange.shapes import expected_shapes
from bert.runs.folder import open_run
from bert.training.finetuning.initialization import SHARES, decoder_source
from bert.training.finetuning.setup import task_model_config

CONFIG = ModelConfig(
    vocab_size=11, hidden_size=4, num_hidden_layers=2, num_attention_heads=2, intermediate_size=4,
    max_position_embeddings=6,
)  # fmt: skip


def shapes_of(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    shapes = expected_shapes(config, "BertForSequenceToSequence", 0)
    return {path: shape for path, shape in shapes.items() if path.split("/")[0] in ("bert", "decoder", "predictions")}


def source(config: ModelConfig) -> dict:
    """Random parameters, with a pooler that nothing reads."""
    random = np.random.default_rng(0)
    params = {path: random.normal(size=shape) for path, shape in shapes_of(config).items()}
    return traverse_util.unflatten_dict(params, sep="/")


def taken(share: str, given: ModelConfig, **settings) -> dict:
    config = task_model_config(
        FinetuneConfig(task="translation", model=ModelConfig(share_decoder=share)), given, "theirs"
    )
    found = decoder_source(FinetuneConfig(model=config, **settings), source(given), "theirs")
    return traverse_util.flatten_dict(found, sep="/")


@pytest.mark.parametrize("shared", SHARES)
@pytest.mark.parametrize("share", SHARES)
def test_what_is_shared_no_more_is_there_twice(share: str, shared: str) -> None:
    given = dataclasses.replace(CONFIG, share_decoder=shared)
    if SHARES.index(share) > SHARES.index(shared):
        with pytest.raises(UserError, match=rf"share_decoder is {share}, but .* \({shared}\): set it to {shared}"):
            taken(share, given)
        return
    found, params = taken(share, given), traverse_util.flatten_dict(source(given), sep="/")
    wanted = shapes_of(dataclasses.replace(CONFIG, share_decoder=share))
    assert set(found) == {path for path in wanted if not path.startswith("bert/pooler")}
    for path, array in found.items():
        own = params.get(path)
        np.testing.assert_array_equal(array, params[path.replace("decoder/", "bert/", 1)] if own is None else own)


def test_the_decoder_of_the_source_has_its_own_depth() -> None:
    given = dataclasses.replace(CONFIG, decoder_layers=1)
    found = taken("none", given)
    assert (
        "decoder/encoder/layer_0/cross_norm/scale" in found and "decoder/encoder/layer_1/cross_norm/scale" not in found
    )


def test_another_vocabulary_is_refused() -> None:
    with pytest.raises(UserError, match="decoder_vocab_size is 11, but the decoder of theirs has 9: set decoder_init"):
        taken("none", dataclasses.replace(CONFIG, decoder_vocab_size=9))


@pytest.mark.parametrize("shared", SHARES)
def test_the_encoder_alone_is_taken_without_cross_attention(shared: str) -> None:
    found = taken("none", dataclasses.replace(CONFIG, share_decoder=shared), decoder_init="none")
    assert not [path for path in found if "cross" in path or not path.startswith("bert/")]


def test_the_depth_of_a_decoder_comes_along_for_tasks_that_have_one(tmp_path: Path) -> None:
    given = dataclasses.replace(CONFIG, decoder_layers=1)
    for task, layers in (("translation", 1), ("sst2", None)):
        asked = FinetuneConfig(task=task, init="theirs", output_dir=str(tmp_path / task))
        model = task_model_config(asked, given, "theirs")
        assert model.decoder_layers == layers
        with open_run(asked) as run:
            run.save_config(dataclasses.replace(asked, model=model))
            (run.checkpoints / "1").mkdir(parents=True)
        with open_run(asked) as run:
            assert run.resumed
