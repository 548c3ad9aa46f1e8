"""Models that transformers draws at random, and what they and ours answer to the same rows."""

import jax
import numpy as np
import pytest
from safetensors import safe_open

import bert
from bert.data.encoding import tokenize
from bert.interchange import families
from bert.interchange.bundle import build_module
from bert.model.encoder import Bert
from tests.helpers import english

torch = pytest.importorskip("torch", reason="needs the extra `torch`")
transformers = pytest.importorskip("transformers", reason="needs the extra `torch`")

PIECES = 1013
AUTO = {
    "Bert": "AutoModel",
    "BertForPreTraining": "AutoModelForPreTraining",
    "BertForMaskedLM": "AutoModelForMaskedLM",
    "BertForNextSentencePrediction": "AutoModelForNextSentencePrediction",
    "BertForReplacedTokenDetection": "AutoModelForPreTraining",
    "BertForSequenceClassification": "AutoModelForSequenceClassification",
    "BertForTokenClassification": "AutoModelForTokenClassification",
    "BertForQuestionAnswering": "AutoModelForQuestionAnswering",
    "BertForMultipleChoice": "AutoModelForMultipleChoice",
}
ARGUMENTS = ("input_ids", "token_type_ids", "attention_mask")
LABELS = ("wrong", "right", "neither")
HOSTILE = [
    "",
    " leading  and trailing ",
    "\n\n \t a\r\nb",
    "e\u0301cole E\u0301COLE n\u0303 \u0300 alone ẞtraße İstanbul",
    "東京は日本の首都です。 한국어 ไทย עברית العَرَبِيَّة हिन्दी",
    "a\x00b\x01c\x7fd\u200be\ufefff\ufffdg\u2028h\u00a0i\u3000j\x85k",
    "😀 👩‍👩‍👧‍👦 🇫🇷 text😀text ☃ ♥️ \U0010ffff",
    "x" * 300 + " " + "é" * 150,
    "a<|endoftext|>b <|endoftext|> <|end [MASK] <mask>",
    "it's don't U.S.A. 3,000.50 $5 <b>tag</b> a_b @user http://x.y/?z=1&w=2 ^~`|",
]


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
    config = transformers.AutoConfig.for_model(family, **{**sizes, **settings})
    model = getattr(transformers, families.family_of_type(family).classes[architecture])(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and LayerNorm as well: fresh ones are zeros and ones
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    model.path = folder / "model.safetensors"
    if family != "roberta":
        (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in english(PIECES)), encoding="utf-8")
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


def real_inputs(folder, model: bert.Pretrained, texts: list, architecture: str) -> dict[str, np.ndarray]:
    """Texts, or pairs of them, as our tokenizer makes them, which is as transformers' makes them."""
    longest = model.config.max_position_embeddings
    features = tokenize(model.tokenizer, texts, longest)
    batch = features.batch(np.arange(len(texts)), int(features.lengths.max()), len(texts))
    assert features.lengths.min() < features.lengths.max(), "some rows are padded"
    columns = (texts,) if isinstance(texts[0], str) else tuple(map(list, zip(*texts, strict=True)))
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    given = theirs(*columns, padding=True, truncation=True, max_length=longest)
    for name, expected in given.items():
        np.testing.assert_array_equal(batch[name], expected)
    shape = (2, len(texts) // 2, -1) if architecture == "BertForMultipleChoice" else (len(texts), -1)
    return {name: batch[name].reshape(shape) for name in ARGUMENTS}


def answers(reference, batch: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Every hidden state, then the outputs, of transformers' model."""
    with torch.no_grad():
        output = reference(
            **{name: torch.tensor(array) for name, array in batch.items()},
            output_hidden_states=True,
        )
    names = ("pooler_output", "prediction_logits", "seq_relationship_logits", "sop_logits", "logits")
    names += ("start_logits", "end_logits")
    found = [getattr(output, name, None) for name in names]
    return [array.numpy() for array in (*output.hidden_states, *(a for a in found if a is not None))]


def our_answers(model: bert.Pretrained, batch: dict[str, np.ndarray]) -> list[np.ndarray]:
    args = [batch[name] for name in ARGUMENTS]
    flat = [array.reshape(-1, array.shape[-1]) for array in args]
    encoder = Bert(model.config, add_pooling_layer="pooler" in model.params["bert"])
    encoded = encoder.apply({"params": model.params["bert"]}, *flat, intermediates=True)
    if model.architecture == "Bert":
        heads = [] if encoded.pooled_output is None else [encoded.pooled_output]
    else:
        output = build_module(model).apply({"params": model.params}, *args)
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


def assert_export(model: bert.Pretrained, reference, auto: str, folder) -> None:
    """The export loads in an Auto class of transformers as the model it came from, tensors and labels."""
    said: list[str] = []
    model.save(folder, log=said.append)
    assert "logits within" in said[0]
    again = getattr(transformers, auto).from_pretrained(folder).eval()
    assert type(again) is type(reference)
    expected = reference.state_dict()
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    if model.labels:
        assert model.labels == LABELS
        assert again.config.id2label == dict(enumerate(LABELS))
    with safe_open(folder / "model.safetensors", "np") as ours, safe_open(reference.path, "np") as theirs:
        assert sorted(ours.keys()) == sorted(theirs.keys())
        assert ours.metadata() == {"format": "pt"}
        for name in ours.keys():  # noqa: SIM118
            np.testing.assert_array_equal(ours.get_tensor(name), theirs.get_tensor(name))
