"""First parameters of fine-tuning: the head's rows by label, and the parts of an encoder-decoder."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from flax import traverse_util

from bert.config import FinetuneConfig, ModelConfig
from bert.errors import UserError
from bert.interchange.shapes import expected_shapes
from bert.runs.folder import open_run
from bert.training.finetuning.initialization import SHARES, Head, decoder_source, match_head
from bert.training.finetuning.setup import task_model_config
from bert.training.initialization import with_fewer_layers

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


def taken(share: str, inputs: ModelConfig, **settings) -> dict:
    config = task_model_config(
        FinetuneConfig(task="translation", model=ModelConfig(share_decoder=share)), inputs, "theirs"
    )
    params = decoder_source(FinetuneConfig(model=config, **settings), source(inputs), "theirs")
    return traverse_util.flatten_dict(params, sep="/")


@pytest.mark.medium
@pytest.mark.parametrize("shared", SHARES)
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("halting", [None, 0.01])
def test_what_is_shared_no_more_is_there_twice(share: str, shared: str, halting: float | None) -> None:
    config = dataclasses.replace(CONFIG, share_decoder=shared, halting=halting)
    if SHARES.index(share) > SHARES.index(shared):
        with pytest.raises(UserError, match=rf"share_decoder is {share}, but .* \({shared}\): set it to {shared}"):
            taken(share, config)
        return
    result, params = taken(share, config), traverse_util.flatten_dict(source(config), sep="/")
    expected = shapes_of(dataclasses.replace(config, share_decoder=share))
    assert set(result) == {path for path in expected if not path.startswith("bert/pooler")}
    for path, array in result.items():
        own = params.get(path)
        np.testing.assert_array_equal(array, params[path.replace("decoder/", "bert/", 1)] if own is None else own)


@pytest.mark.medium
def test_the_decoder_of_the_source_has_its_own_depth() -> None:
    config = dataclasses.replace(CONFIG, decoder_layers=1)
    params = taken("none", config)
    assert (
        "decoder/encoder/layer_0/cross_norm/scale" in params
        and "decoder/encoder/layer_1/cross_norm/scale" not in params
    )


@pytest.mark.medium
@pytest.mark.parametrize("share", ["none", "embeddings"])
def test_a_decoder_starts_from_an_encoder_without_its_convolution(share: str) -> None:
    inputs = dataclasses.replace(CONFIG, conv_kernel_size=3)
    task = FinetuneConfig(task="translation", model=ModelConfig(share_decoder=share))
    config = task_model_config(task, inputs, "theirs")
    params = {part: tree for part, tree in source(inputs).items() if part != "decoder"}
    started = traverse_util.flatten_dict(decoder_source(FinetuneConfig(model=config), params, "theirs"), sep="/")
    missing = shapes_of(config).keys() - started.keys()
    assert {path for path in missing if "cross_" not in path and "pooler" not in path} == set()
    assert started.keys() <= shapes_of(config).keys()
    assert "bert/encoder/convolution/kernel" in started


@pytest.mark.parametrize(
    ("inputs", "decoder", "wrong"),
    [
        ({"conv_kernel_size": 3}, {"share_decoder": "all"}, "conv_kernel_size is 3, but model.share_decoder is all"),
        ({"layer_groups": 2}, {"decoder_layers": 1}, r"layer_groups is 2, which .* model.decoder_layers \(1\)"),
    ],
)
def test_a_decoder_that_does_not_fit_its_encoder_is_refused(inputs: dict, decoder: dict, wrong: str) -> None:
    task = FinetuneConfig(task="translation", model=ModelConfig(**decoder))
    task.model.check()
    config = task_model_config(task, dataclasses.replace(CONFIG, **inputs), "theirs")
    with pytest.raises(UserError, match=wrong):
        dataclasses.replace(task, model=config).check_model()


@pytest.mark.medium
def test_another_vocabulary_is_refused() -> None:
    with pytest.raises(UserError, match=r"decoder_vocab_size is 11.*theirs has 9: set decoder_init"):
        taken("none", dataclasses.replace(CONFIG, decoder_vocab_size=9))


@pytest.mark.parametrize("shared", SHARES)
@pytest.mark.parametrize("halting", [None, 0.01])
def test_the_encoder_alone_is_taken_without_cross_attention(shared: str, halting: float | None) -> None:
    config = dataclasses.replace(CONFIG, share_decoder=shared, halting=halting)
    params = taken("none", config, decoder_init="none")
    assert not [path for path in params if "cross" in path or not path.startswith("bert/")]


def test_the_depth_of_a_decoder_comes_along_for_tasks_that_have_one(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, decoder_layers=1)
    for task, layers in (("translation", 1), ("sst2", None)):
        asked = FinetuneConfig(task=task, init="theirs", output_dir=str(tmp_path / task))
        model = task_model_config(asked, config, "theirs")
        assert model.decoder_layers == layers
        with open_run(asked) as run:
            run.save_config(dataclasses.replace(asked, model=model))
            (run.checkpoints / "1").mkdir(parents=True)
        with open_run(asked) as run:
            assert run.resumed


SEQUENCES, TOKENS = "BertForSequenceClassification", "BertForTokenClassification"
SINGLE = Head(SEQUENCES, None, ("neg", "neutral", "pos"))


def rows(labels: tuple[str, ...], source: tuple[str, ...], words: tuple[str, ...] = ()) -> tuple[int | None, ...]:
    start = match_head(Head(SEQUENCES, None, labels, words), Head(SEQUENCES, None, source), "X")
    return start.rows.get("classifier", ())


@pytest.mark.parametrize(
    ("labels", "source", "expected"),
    [
        (("neg", "pos"), ("pos", "neg"), (1, 0)),
        (("a", "new", "c"), ("c", "b", "a"), (2, None, 0)),
        (("negative", "positive"), ("NEGATIVE", "POSITIVE"), (0, 1)),
        (("us", "US", "uk"), ("uk", "Us", "US"), (None, 2, 0)),
        (("0", "1"), ("1", "0"), (1, 0)),
        (("1", "0"), ("LABEL_0", "LABEL_1"), (1, 0)),
        (("LABEL_1", "LABEL_0"), ("LABEL_0", "LABEL_1"), (1, 0)),
        (("0", "1"), ("LABEL_0", "LABEL_1", "LABEL_2"), ()),
        (("1", "2"), ("LABEL_0", "LABEL_1"), ()),
        (("neg", "pos"), ("LABEL_0", "LABEL_1"), ()),
        (("yes", "no"), ("pos", "neg"), ()),
    ],
)
def test_rows_belong_to_labels_of_the_same_name(labels, source, expected) -> None:
    assert rows(labels, source) == expected


def test_numbers_in_the_files_are_the_numbers_of_a_source_without_names() -> None:
    assert rows(("negative", "positive"), ("LABEL_0", "LABEL_1"), ("0", "1")) == (0, 1)
    assert rows(("contradiction", "neutral"), ("0", "1"), ("1", "0")) == (1, 0)


def test_a_label_that_is_dropped_is_reported_and_a_new_one_too() -> None:
    start = match_head(SINGLE, Head(SEQUENCES, None, ("pos", "mixed", "neg")), "X")
    assert start.message == "labels of X: kept: neg, pos; randomly initialized: neutral; not loaded: mixed"
    assert start.incomplete
    same = match_head(SINGLE, SINGLE, "X")
    assert (same.message, same.incomplete) == ("labels of X: kept: neg, neutral, pos", False)
    many = tuple(f"intent {number}" for number in range(151))
    start = match_head(Head(SEQUENCES, None, many), Head(SEQUENCES, None, many), "X")
    assert start.message.endswith(" and 132 more")


@pytest.mark.parametrize(
    ("task", "source", "modules"),
    [
        (Head(SEQUENCES, "regression", ("LABEL_0",)), Head(SEQUENCES, None, ("score",)), ("classifier",)),
        (Head(SEQUENCES, "regression", ("LABEL_0",)), Head(SEQUENCES, "regression", ("LABEL_0",)), ("classifier",)),
        (Head("BertForQuestionAnswering"), Head("BertForQuestionAnswering"), ("qa_outputs",)),
        (Head("BertForMultipleChoice"), Head("BertForMultipleChoice"), ("classifier",)),
        (SINGLE, Head(SEQUENCES, "single_label_classification", SINGLE.names), ("classifier",)),
        (SINGLE, Head("BertForPreTraining"), ()),
        (Head("Bert"), Head("BertForPreTraining"), ()),
    ],
)
def test_a_head_of_the_same_kind_is_kept(task: Head, source: Head, modules: tuple[str, ...]) -> None:
    start = match_head(task, source, "X")
    assert (start.modules, start.incomplete) == (modules, False)


@pytest.mark.parametrize(
    ("task", "source", "reason"),
    [
        (Head(TOKENS, None, SINGLE.names), SINGLE, "BertForTokenClassification"),
        (Head(SEQUENCES, "multi_label_classification", SINGLE.names), SINGLE, "multi_label_classification"),
        (Head(SEQUENCES, "regression", ("LABEL_0",)), SINGLE, "3 outputs"),
        (SINGLE, Head(SEQUENCES, None, ("LABEL_0",)), "regression"),
        (Head("Bert"), SINGLE, "the task trains Bert"),
        (SINGLE._replace(num_feature_layers=2), SINGLE, "num_feature_layers"),
        (SINGLE, Head(SEQUENCES, None, ("LABEL_0", "LABEL_1", "LABEL_2")), "id2label"),
        (SINGLE, Head(SEQUENCES, None, ("joy", "anger")), "give them the same names"),
    ],
)
def test_another_head_is_not_loaded_and_the_reason_is_given(task: Head, source: Head, reason: str) -> None:
    start = match_head(task, source, "X")
    assert (start.modules, start.incomplete) == ((), True)
    assert "the head of X is not loaded" in start.message
    assert reason in start.message


def test_fewer_layers_are_taken_evenly_and_keep_all_other_parameters() -> None:
    params = {
        "bert": {
            **{"embeddings": 0, "pooler": 1},
            "encoder": {"norm": 2, "convolution": 4, **{f"layer_{n}": f"L{n}" for n in range(6)}},
        },
        "classifier": 3,
    }
    config = dataclasses.replace(CONFIG, num_hidden_layers=6)
    sizes, fewer = with_fewer_layers(config, params, 3, "X")
    assert sizes == dataclasses.replace(config, num_hidden_layers=3)
    layers = {"layer_0": "L0", "layer_1": "L2", "layer_2": "L5"}
    assert fewer["bert"]["encoder"] == {"norm": 2, "convolution": 4, **layers}
    assert (fewer["bert"]["embeddings"], fewer["bert"]["pooler"], fewer["classifier"]) == (0, 1, 3)
    assert with_fewer_layers(config, params, 6, "X") == (config, params)
    with pytest.raises(UserError, match=r"num_init_layers is 7.*X has 6 layers"):
        with_fewer_layers(config, params, 7, "X")
    for name in ("layer_groups", "global_attention_every"):
        with pytest.raises(UserError, match=f"num_init_layers.*model.{name} 2"):
            with_fewer_layers(dataclasses.replace(config, **{name: 2}), params, 3, "X")
