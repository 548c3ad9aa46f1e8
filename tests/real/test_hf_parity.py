"""Models that transformers drew at random and wrote, read by us; ours written, and read by transformers."""

import jax
import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

import bert
from bert.interchange.hf_export import module_of, published_tensors
from bert.interchange.names import ARCHITECTURES, published_name
from bert.model import Bert

pytestmark = pytest.mark.real

torch = pytest.importorskip("torch", reason="needs the extra `torch`")
transformers = pytest.importorskip("transformers", reason="needs the extra `torch`")

PIECES = 1013
WORDS = [f"w{number}" for number in range(PIECES - 5)]
AUTO = {
    "Bert": "AutoModel",
    "BertForPreTraining": "AutoModelForPreTraining",
    "BertForMaskedLM": "AutoModelForMaskedLM",
    "BertForNextSentencePrediction": "AutoModelForNextSentencePrediction",
    "BertForSequenceClassification": "AutoModelForSequenceClassification",
    "BertForTokenClassification": "AutoModelForTokenClassification",
    "BertForQuestionAnswering": "AutoModelForQuestionAnswering",
    "BertForMultipleChoice": "AutoModelForMultipleChoice",
}
LABELS = ("wrong", "right", "neither")


def drawn(folder, architecture: str, family: str = "bert", **settings):
    """A model of odd sizes with every parameter random, saved to the folder by transformers."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": PIECES,
        "hidden_size": 96,
        "num_hidden_layers": 5,
        "num_attention_heads": 3,
        "intermediate_size": 200,
        "max_position_embeddings": 40,
        "type_vocab_size": 3,
        "initializer_range": 0.1,
    }
    if architecture in ("BertForSequenceClassification", "BertForTokenClassification"):
        sizes["id2label"] = dict(enumerate(LABELS))
        sizes["label2id"] = {label: number for number, label in enumerate(LABELS)}
    config_class = {"bert": transformers.BertConfig, "roberta": transformers.RobertaConfig}[family]
    config = config_class(**{**sizes, **settings})
    model = getattr(transformers, published_name(architecture, family))(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and LayerNorm as well: fresh ones are zeros and ones
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    if family == "bert":
        pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
        (folder / "vocab.txt").write_text("".join(f"{piece}\n" for piece in pieces))
    return model


def inputs(architecture: str, padded: bool, segments: int = 3, first: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    shape = (2, 3, 33) if architecture == "BertForMultipleChoice" else (4, 33)
    mask = np.ones(shape, int)
    if padded:
        mask[1, ..., 20:] = mask[-1, ..., 5:] = 0
    ids = random.integers(first, PIECES, shape)
    ids[mask == 0] = max(first - 1, 0)
    return {"input_ids": ids, "token_type_ids": random.integers(0, segments, shape), "attention_mask": mask}


def answers(reference, batch: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Every hidden state, then the outputs, of transformers' model."""
    with torch.no_grad():
        output = reference(
            **{name: torch.tensor(array) for name, array in batch.items()},
            output_hidden_states=True,
        )
    names = ("pooler_output", "prediction_logits", "seq_relationship_logits", "logits", "start_logits", "end_logits")
    found = [getattr(output, name, None) for name in names]
    return [array.numpy() for array in (*output.hidden_states, *(a for a in found if a is not None))]


def our_answers(model: bert.Pretrained, batch: dict[str, np.ndarray]) -> list[np.ndarray]:
    args = [batch["input_ids"], batch["token_type_ids"], batch["attention_mask"]]
    flat = [array.reshape(-1, array.shape[-1]) for array in args]
    encoder = Bert(model.config, add_pooling_layer="pooler" in model.params["bert"])
    encoded = jax.jit(lambda *args: encoder.apply({"params": model.params["bert"]}, *args, intermediates=True))(*flat)
    if model.architecture == "Bert":
        heads = [] if encoded.pooled_output is None else [encoded.pooled_output]
    else:
        output = jax.jit(lambda *args: module_of(model).apply({"params": model.params}, *args))(*args)
        heads = jax.tree.leaves(output)
        if model.architecture == "BertForQuestionAnswering":
            heads = [output[..., 0], output[..., 1]]
    return [*encoded.hidden_states, *heads]


def assert_alike(ours: list, theirs: list, mask: np.ndarray) -> None:
    assert len(ours) == len(theirs)
    flat = mask.reshape(-1, mask.shape[-1]).astype(bool)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.shape == other.shape
        if mine.shape[:2] == flat.shape:  # nothing is promised about padding
            mine, other = mine[flat], other[flat]
        np.testing.assert_allclose(mine, other, atol=1e-4)


@pytest.mark.parametrize("act", ["gelu", "gelu_new", "relu"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_in_and_out(architecture: str, act: str, tmp_path) -> None:
    reference = drawn(tmp_path / "theirs", architecture, hidden_act=act)
    model = bert.load(tmp_path / "theirs")
    assert model.architecture == architecture
    for padded in (False, True):
        batch = inputs(architecture, padded)
        assert_alike(our_answers(model, batch), answers(reference, batch), batch["attention_mask"])
    if act == "gelu_new":
        return
    said: list[str] = []
    model.save(tmp_path / "ours", say=said.append)
    assert "logits within" in said[0]
    again = getattr(transformers, AUTO[architecture]).from_pretrained(tmp_path / "ours").eval()
    assert type(again) is type(reference)
    for name, tensor in reference.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    if model.labels:
        assert model.labels == LABELS
        assert again.config.id2label == dict(enumerate(LABELS))
    written = published_tensors(model)
    saved = reference.state_dict()
    assert all(np.array_equal(array, saved[name].numpy()) for name, array in written.items())
