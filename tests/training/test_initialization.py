"""The weights that a run starts from: the pooler of ModernBERT's form, and the head of a fine-tuned model."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert.config import ModelConfig
from bert.model.heads import BertForMaskedLM, BertForSequenceClassification
from bert.training.finetuning.initialization import Head, match_head
from bert.training.initialization import load_pretrained_params

CONFIG = ModelConfig(23, 16, 1, 2, 32, max_position_embeddings=8, pooler_type="transform")
IDS = jnp.zeros((1, 4), jnp.int32)


def drawn(module, seed: int) -> dict:
    return jax.jit(module.init)(jax.random.key(seed), IDS)["params"]


@pytest.mark.medium
def test_a_pooler_of_the_mlm_heads_form_starts_as_its_transform() -> None:
    said: list[str] = []
    source = drawn(BertForMaskedLM(CONFIG), 0)
    fresh = drawn(BertForSequenceClassification(CONFIG, 2), 1)
    params = load_pretrained_params(fresh, source, "mlm", ("bert",), said.append)
    pooler = params["bert"]["pooler"]
    np.testing.assert_array_equal(pooler["dense"]["kernel"], source["predictions"]["transform"]["kernel"])
    np.testing.assert_array_equal(pooler["norm"]["scale"], source["predictions"]["norm"]["scale"])
    assert "randomly initialized: classifier" in said


@pytest.mark.medium
def test_another_pooler_starts_at_random() -> None:
    narrow = dataclasses.replace(CONFIG, embedding_size=8)
    for config in (dataclasses.replace(CONFIG, pooler_type="dense"), narrow):
        said: list[str] = []
        source = drawn(BertForMaskedLM(config), 0)
        fresh = drawn(BertForSequenceClassification(config, 2), 1)
        params = load_pretrained_params(fresh, source, "mlm", ("bert",), said.append)
        jax.tree.map(np.testing.assert_array_equal, params["bert"]["pooler"], fresh["bert"]["pooler"])
        assert "randomly initialized: bert/pooler, classifier" in said


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


def test_rows_move_with_their_bias_and_new_ones_stay_as_drawn() -> None:
    encoder = {"bert": {"embeddings": {}}}
    kernel = np.arange(6, dtype=np.float32).reshape(2, 3)
    source = {**encoder, "classifier": {"kernel": kernel, "bias": np.array([5, 6, 7], np.float32)}}
    fresh = {**encoder, "classifier": {"kernel": np.full((2, 2), -1.0), "bias": np.zeros(2)}}
    given = {"classifier": (2, None)}
    params = load_pretrained_params(fresh, source, "X", ("bert", "classifier"), lambda text: None, given)
    np.testing.assert_array_equal(params["classifier"]["kernel"], [[2, -1], [5, -1]])
    np.testing.assert_array_equal(params["classifier"]["bias"], [7, 0])
