"""Random models of transformers, and the outputs of theirs and ours for the same rows."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import linen as nn
from safetensors import safe_open
from safetensors.numpy import load_file

import bert
from bert.data.encoding import tokenize
from bert.interchange import families
from bert.interchange.modules import build_module
from bert.interchange.writers.hf import pad_left
from bert.model.encoder import Bert
from bert.tokenizer.library import special_ids
from tests.real.vocabularies import PIECES, VOCABULARIES, write_wordpiece

torch = pytest.importorskip("torch", reason="needs the extra `torch`")
transformers = pytest.importorskip("transformers", reason="needs the extra `torch`")

AUTO = {
    "Bert": "AutoModel",
    "BertForReplacedTokenDetection": "AutoModelForPreTraining",
}
"""The classes of transformers whose names do not follow from the architecture's."""
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


WIDTH = 33
"""Tokens per row. Most operations are compiled for one shape: eight rows, or two with four choices each."""


def draw_weights(model, deviation: float = 0.05):
    """Adds random numbers to every parameter: biases and LayerNorm of a new model are zeros and ones."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(deviation * torch.randn_like(parameter))
    return model.eval()


def drawn(folder: Path, architecture: str, family: str = "bert", adjust: Callable | None = None, **settings: Any):
    """Returns a model of odd sizes with every parameter random, saved to the folder with a vocabulary."""
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
    settings = {key: value for key, value in {**sizes, **settings}.items() if value is not None}
    config = transformers.AutoConfig.for_model(family, **settings)
    model = getattr(transformers, families.family_of_type(family).classes[architecture])(config)
    draw_weights(model)
    if adjust is not None:
        with torch.no_grad():
            adjust(model)
    model.save_pretrained(folder)
    model.path = folder / "model.safetensors"
    VOCABULARIES.get(family, write_wordpiece)(folder)
    return model


def inputs(
    architecture: str, padded: bool, segments: int = 3, first: int = 0, padding: int = 0, words: int = PIECES
) -> dict[str, np.ndarray]:
    """Returns random rows without the token of padding, unless that is BERT's."""
    random = np.random.default_rng(1)
    shape = (2, 4, WIDTH) if architecture == "BertForMultipleChoice" else (8, WIDTH)
    mask = np.ones(shape, int)
    if padded:
        mask[1, ..., 20:] = mask[-1, ..., 5:] = 0
    ids = random.integers(first, words, shape)
    ids[(ids == padding) & (padding > 0)] -= 1
    ids[mask == 0] = padding
    return {"input_ids": ids, "token_type_ids": random.integers(0, segments, shape), "attention_mask": mask}


def with_separators(batch: dict[str, np.ndarray], separator: int) -> dict[str, np.ndarray]:
    """Returns the rows with the three separators of a pair of texts, which transformers' Longformer requires."""
    ids = np.where(batch["input_ids"] == separator, separator + 1, batch["input_ids"])
    ends = batch["attention_mask"].sum(-1)
    for place in np.ndindex(ends.shape):
        ids[place][[ends[place] // 3, ends[place] // 3 + 1, ends[place] - 1]] = separator
    return {**batch, "input_ids": ids}


def real_inputs(folder: Path, model: bert.Pretrained, texts: list, architecture: str) -> dict[str, np.ndarray]:
    """Returns texts or pairs in the rows of our tokenizer, which must equal the rows of transformers' tokenizer."""
    features = tokenize(model.tokenizer, texts, WIDTH)
    batch = features.batch(np.arange(len(texts)), WIDTH, len(texts))
    assert features.lengths.min() < features.lengths.max(), "some rows are padded"
    batch["input_ids"][batch["attention_mask"] == 0] = special_ids(model.tokenizer).padding
    columns = (texts,) if isinstance(texts[0], str) else tuple(map(list, zip(*texts, strict=True)))
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    given = theirs(*columns, padding="max_length", truncation=True, max_length=WIDTH, padding_side="right")
    for name, expected in given.items():
        np.testing.assert_array_equal(batch[name], expected)
    shape = (2, len(texts) // 2, -1) if architecture == "BertForMultipleChoice" else (len(texts), -1)
    return {name: batch[name].reshape(shape) for name in ARGUMENTS}


def joined(batches: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Returns one batch with the rows of all: tracing a model takes longer than running it."""
    return {name: np.concatenate([batch[name] for batch in batches]) for name in ARGUMENTS}


def answers(reference, batch: dict[str, np.ndarray], pads_left: bool = False) -> list[np.ndarray]:
    """Returns every hidden state, then the outputs, of transformers' model.

    With ``pads_left`` it reads rows with their padding at the beginning.
    """
    order = np.argsort(batch["attention_mask"], axis=-1, kind="stable")
    batch = pad_left(batch) if pads_left else batch
    with torch.no_grad():
        tensors = {name: torch.tensor(array) for name, array in batch.items()}
        output = reference(**tensors, output_hidden_states=True)
    names = ("pooler_output", "prediction_logits", "seq_relationship_logits", "sop_logits", "logits")
    names += ("start_logits", "end_logits")
    heads = [getattr(output, name, None) for name in names]
    arrays = [array.numpy() for array in (*output.hidden_states, *(head for head in heads if head is not None))]
    if not pads_left:
        return arrays
    back = np.argsort(order.reshape(-1, order.shape[-1]), axis=-1)
    per_token = [array.shape[:2] == back.shape for array in arrays]
    rows = np.arange(len(back))[:, None]
    return [array[rows, back] if moved else array for array, moved in zip(arrays, per_token, strict=True)]


def our_answers(model: bert.Pretrained, batch: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Returns every hidden state, then the outputs, of our model, which is traced once."""
    encoded: list[Any] = []

    def record(call: Callable, args: tuple, kwargs: dict, context: nn.module.InterceptorContext) -> Any:
        if not isinstance(context.module, Bert) or context.method_name != "__call__":
            return call(*args, **kwargs)
        encoded.append(call(*args, **{**kwargs, "intermediates": True}))
        return encoded[-1]

    bare = model.architecture == "Bert"
    params = model.params["bert"] if bare else model.params
    with nn.intercept_methods(record):
        output = build_module(model).apply({"params": params}, *(batch[name] for name in ARGUMENTS))
    [states] = encoded
    if bare:
        heads = [] if states.pooled_output is None else [states.pooled_output]
    elif model.architecture == "BertForQuestionAnswering":
        heads = [output[..., 0], output[..., 1]]
    else:
        heads = jax.tree.leaves(output)
    return [*states.hidden_states, *heads]


def assert_alike(ours: list, theirs: list, mask: np.ndarray, tolerance: float = 1e-4) -> None:
    assert len(ours) == len(theirs)
    flat = mask.reshape(-1, mask.shape[-1]).astype(bool)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.shape == other.shape
        if mine.shape[:2] == flat.shape:  # outputs of padding may differ
            mine, other = mine[flat], other[flat]
        np.testing.assert_allclose(mine, other, rtol=0, atol=tolerance)


def assert_export(model: bert.Pretrained, reference, folder: Path, name: str, unused: tuple[str, ...] = ()) -> None:
    """Asserts that an Auto class of transformers loads the export as the class ``name``, with equal tensors and labels.

    ``unused`` are tensors that transformers saves, or creates, and never reads.
    """
    lines: list[str] = []
    model.save(folder, log=lines.append)
    assert "logits within" in lines[0] and lines[0].endswith("token ids equal"), lines[0]
    auto = AUTO.get(model.architecture, f"AutoModelFor{model.architecture.removeprefix('BertFor')}")
    auto = "AutoModelForCausalLM" if name.endswith("LMHeadModel") else auto
    again = getattr(transformers, auto).from_pretrained(folder).eval()
    assert type(again).__name__ == name
    state, expected = again.state_dict(), reference.state_dict()
    assert state.keys() == expected.keys()
    for name in state.keys() - set(unused):
        assert torch.equal(state[name], expected[name]), name
    if model.labels:
        assert model.labels == LABELS
        assert again.config.id2label == dict(enumerate(LABELS))
    ours, theirs = load_file(folder / "model.safetensors"), load_file(reference.path)
    for old, new in ((".gamma", ".weight"), (".beta", ".bias")):  # names of ESM, which transformers reads as well
        theirs = {name.replace(old, new): array for name, array in theirs.items()}
    assert ours.keys() - set(unused) == theirs.keys() - set(unused)
    with safe_open(folder / "model.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}
    for name in ours.keys() - set(unused):
        np.testing.assert_array_equal(ours[name], theirs[name])
