"""Multi-label classification: logits, probabilities and losses equal transformers and PyTorch."""

import jax.numpy as jnp
import numpy as np
import pytest

import bert
from bert.training.losses import LOSSES, with_class_weights
from tests.real.hf_models import LABELS, answers, assert_alike, drawn, inputs, our_answers

torch = pytest.importorskip("torch", reason="needs the extra `torch`")
transformers = pytest.importorskip("transformers", reason="needs the extra `torch`")

pytestmark = pytest.mark.real

ARCHITECTURE = "BertForSequenceClassification"
TEXTS = ["the house is small", "they said that it was there before", ""]
MULTI_LABEL = "multi_label_classification"
PRESENT = np.array([[1, 0, 1], [0, 0, 0], [0, 1, 0], [1, 1, 1]], np.int8)


def test_a_published_model_of_several_labels_answers_as_its_pipeline(tmp_path) -> None:
    reference = drawn(tmp_path / "theirs", ARCHITECTURE, problem_type=MULTI_LABEL)
    model = bert.load(tmp_path / "theirs")
    batch = inputs(ARCHITECTURE, padded=True)
    assert_alike(our_answers(model, batch), answers(reference, batch), batch["attention_mask"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    pipeline = transformers.pipeline("text-classification", model=reference, tokenizer=tokenizer, top_k=None)
    for ours, theirs in zip(model.predict(TEXTS), pipeline(TEXTS), strict=True):
        scores = {score["label"]: score["score"] for score in theirs}
        assert scores == pytest.approx(ours.probabilities, abs=1e-5)
        assert ours.labels == [label for label in LABELS if scores[label] >= 0.5]
    model.save(tmp_path / "ours")
    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "ours").eval()
    assert again.config.problem_type == MULTI_LABEL
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, reference.state_dict()[name]), name


def test_the_losses_are_those_of_transformers_and_pytorch(tmp_path) -> None:
    reference = drawn(tmp_path / "theirs", ARCHITECTURE, problem_type=MULTI_LABEL)
    batch = {name: array[: len(PRESENT)] for name, array in inputs(ARCHITECTURE, padded=True).items()}
    labels = torch.tensor(PRESENT, dtype=torch.float32)
    with torch.no_grad():
        theirs = reference(**{name: torch.tensor(array) for name, array in batch.items()}, labels=labels)
    logits, weights = theirs.logits.numpy(), (0.5, 3.0, 20.0)
    ours = {"labels": jnp.asarray(PRESENT), "weights": jnp.ones(len(PRESENT))}
    (total, weight), _ = LOSSES["multi_label_classification"].sums(logits, ours)
    np.testing.assert_allclose(total / weight, theirs.loss, rtol=1e-5)
    (total, weight), _ = with_class_weights(LOSSES["multi_label_classification"], weights).sums(logits, ours)
    expected = torch.nn.BCEWithLogitsLoss(pos_weight=torch.tensor(weights))(theirs.logits, labels)
    np.testing.assert_allclose(total / weight, expected, rtol=1e-5)
    single = np.array([2, 0, 1, 1], np.int32)
    (total, weight), _ = with_class_weights(LOSSES["sequence_classification"], weights).sums(
        logits, {**ours, "labels": single}
    )
    summed = torch.nn.CrossEntropyLoss(weight=torch.tensor(weights), reduction="sum")
    np.testing.assert_allclose(total, summed(theirs.logits, torch.tensor(single).long()), rtol=1e-5)
    assert weight == len(single)
