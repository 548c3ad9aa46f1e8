"""Checkpoints that TensorFlow itself has written, read without it; and what the model then answers."""

import json
import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util

import bert
from bert.config import ModelConfig
from bert.data.encoding import tokenize
from bert.errors import UserError
from bert.interchange.families import GOOGLE_NAMES
from bert.interchange.readers.google import read_params
from bert.interchange.readers.tf_checkpoint import Bundle
from bert.model.encoder import Bert
from bert.model.pretraining import BertForPreTraining
from tests.helpers import english

pytestmark = pytest.mark.real

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
tf = pytest.importorskip("tensorflow", reason="needs the extra `tf`")

SIZES = {
    "vocab_size": 1013,
    "hidden_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 3,
    "intermediate_size": 200,
    "max_position_embeddings": 40,
    "type_vocab_size": 3,
    "initializer_range": 0.1,
}


def google_tensors(state: dict) -> dict[str, np.ndarray]:
    """transformers' weights under the names, and in the layout, of google-research/bert."""
    tensors = {}
    for name, tensor in state.items():
        if name.startswith("cls.predictions.decoder"):  # tied
            continue
        array = tensor.detach().numpy()
        name = name.replace("encoder.layer.", "encoder.layer_").replace(".", "/")
        for theirs, googles in {
            "LayerNorm/weight": "LayerNorm/gamma",
            "LayerNorm/bias": "LayerNorm/beta",
            "_embeddings/weight": "_embeddings",
            "seq_relationship/weight": "seq_relationship/output_weights",
            "seq_relationship/bias": "seq_relationship/output_bias",
            "predictions/bias": "predictions/output_bias",
        }.items():
            name = name.replace(theirs, googles)
        if name.endswith("/weight"):
            name, array = name.removesuffix("weight") + "kernel", array.T
        tensors[name] = np.ascontiguousarray(array)
    return tensors


def save(folder: Path, tensors: dict[str, np.ndarray], act: str = "gelu") -> None:
    """Saves like google-research/bert's training: TensorFlow 1's Saver, with the optimizer's slots and the step."""
    folder.mkdir(exist_ok=True)
    (folder / "bert_config.json").write_text(json.dumps({**SIZES, "hidden_act": act}))
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        for name, array in tensors.items():
            tf.compat.v1.get_variable(name, initializer=array, use_resource=False)
            for slot in ("adam_m", "adam_v"):
                tf.compat.v1.get_variable(f"{name}/{slot}", initializer=np.ones_like(array), use_resource=False)
        tf.compat.v1.train.get_or_create_global_step()
        session.run(tf.compat.v1.global_variables_initializer())
        tf.compat.v1.train.Saver().save(session, str(folder / "bert_model.ckpt"))


def save_v2(prefix: Path, tensors: dict[str, np.ndarray], slices: dict[str, str] | None = None) -> None:
    tf.raw_ops.SaveV2(
        prefix=str(prefix),
        tensor_names=list(tensors),
        shape_and_slices=[(slices or {}).get(name, "") for name in tensors],
        tensors=list(map(tf.constant, tensors.values())),
    )


def assert_all_equal(prefix: Path, tensors: dict[str, np.ndarray]) -> None:
    """Against what was written, and against TensorFlow's own reader."""
    bundle, reader = Bundle(prefix), tf.train.load_checkpoint(str(prefix))
    assert sorted(bundle.entries) == sorted(tensors) == sorted(reader.get_variable_to_shape_map())
    for name, array in tensors.items():
        found = bundle.read(name)
        assert found.dtype == array.dtype
        np.testing.assert_array_equal(found, array)
        np.testing.assert_array_equal(found, reader.get_tensor(name))


@pytest.mark.parametrize(("act", "theirs"), [("gelu", "gelu_new"), ("relu", "relu")])
def test_a_bert_that_tensorflow_saved(tmp_path: Path, shared: Path, act: str, theirs: str) -> None:
    """The same arrays, and with them transformers' hidden states and logits, with the tanh form where it says gelu."""
    torch = pytest.importorskip("torch", reason="needs the extra `torch`")
    transformers = pytest.importorskip("transformers", reason="needs the extra `torch`")
    torch.manual_seed(0)
    reference = transformers.BertForPreTraining(transformers.BertConfig(**SIZES, hidden_act=theirs)).eval()
    with torch.no_grad():
        for parameter in reference.parameters():  # biases and LayerNorm as well: fresh ones are zeros and ones
            parameter.add_(0.05 * torch.randn_like(parameter))
    tensors = google_tensors(reference.state_dict())
    save(tmp_path, tensors, act)

    said: list[str] = []
    config, params = read_params(tmp_path, said.append)
    assert config == ModelConfig(**SIZES, hidden_act="gelu_tanh" if act == "gelu" else act)
    assert said[1].startswith(f"not loaded from {tmp_path / 'bert_model.ckpt'}: {2 * len(tensors) + 1} tensors of")
    known = {
        tensor.paths[0]: tensor
        for head in ("BertForSequenceClassification", "BertForQuestionAnswering")
        for tensor in GOOGLE_NAMES.tensors(config.num_hidden_layers, head)
    }
    found = {}
    for path, array in traverse_util.flatten_dict(params, sep="/").items():
        tensor = known[path]
        found[tensor.name] = array.T if tensor.transposed else array
    assert found.keys() == tensors.keys()
    for name, array in tensors.items():
        np.testing.assert_array_equal(found[name], array)

    random = np.random.default_rng(0)
    ids, segments = random.integers(0, 1013, (4, 33)), random.integers(0, 3, (4, 33))
    mask = np.ones((4, 33), int)
    mask[1, 20:] = mask[2, 5:] = 0
    with torch.no_grad():
        expected = reference(*map(torch.tensor, (ids, mask, segments)), output_hidden_states=True)
    inputs = tuple(map(jnp.asarray, (ids, segments, mask)))
    logits = BertForPreTraining(config).apply({"params": params}, *inputs)
    encoded = Bert(config).apply({"params": params["bert"]}, *inputs, intermediates=True)
    real = mask.astype(bool)
    for mine, other in zip(encoded.hidden_states, expected.hidden_states, strict=True):
        np.testing.assert_allclose(mine[real], other.numpy()[real], atol=1e-4)
    np.testing.assert_allclose(logits.prediction_logits[real], expected.prediction_logits.numpy()[real], atol=1e-4)
    np.testing.assert_allclose(logits.seq_relationship_logits, expected.seq_relationship_logits.numpy(), atol=1e-4)

    (tmp_path / "vocab.txt").write_text(
        "".join(f"{token}\n" for token in english(SIZES["vocab_size"])), encoding="utf-8"
    )
    model = bert.load(tmp_path)
    lines = (shared / "data/glue/MRPC/dev.tsv").read_text("utf-8-sig").splitlines()[1:9]
    pairs = [tuple(" ".join(text.split()[:5]) for text in line.split("\t")[3:]) for line in lines]
    features = tokenize(model.tokenizer, pairs, SIZES["max_position_embeddings"])
    batch = features.batch(np.arange(len(pairs)), int(features.lengths.max()), len(pairs))
    ids, mask, segments = (batch[name] for name in ("input_ids", "attention_mask", "token_type_ids"))
    assert segments.any()
    with torch.no_grad():
        expected = reference.bert(*(torch.tensor(array, dtype=torch.long) for array in (ids, mask, segments)))
    encoded, real = model.encode(pairs), mask.astype(bool)
    np.testing.assert_array_equal(encoded.attention_mask, mask)
    np.testing.assert_allclose(encoded.last_hidden_state[real], expected.last_hidden_state.numpy()[real], atol=1e-4)
    np.testing.assert_allclose(encoded.pooled_output, expected.pooler_output.numpy(), atol=1e-4)


def test_every_type_and_many_blocks(tmp_path: Path) -> None:
    """Many names make an index of several blocks, whose keys share most of their bytes."""
    random = np.random.default_rng(0)
    tensors = {
        f"bert/encoder/layer_{number}/attention/output/dense/kernel/of/a/long/name": np.float32(random.normal())
        for number in range(12_000)
    }
    tensors |= {
        "half": random.normal(size=(3, 5)).astype(np.float16),
        "brain": random.normal(size=(3, 5)).astype(tf.bfloat16.as_numpy_dtype),
        "large": random.normal(size=(700, 1001)).astype(np.float32),
        "empty": np.zeros((0, 3), np.float32),
        "ids": random.integers(-(2**31), 2**31, 9, np.int32),
        "step": np.int64(-(2**40)),
    }
    save_v2(tmp_path / "model.ckpt", tensors)
    assert (tmp_path / "model.ckpt.index").stat().st_size > 2 * 2**18
    assert_all_equal(tmp_path / "model.ckpt", tensors)


def test_several_data_files(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    tensors = {f"part_{number}/kernel": random.normal(size=(number, 7)).astype(np.float32) for number in range(1, 10)}
    names = list(tensors)
    parts = [tmp_path / f"part-{number}" for number in range(3)]
    for number, part in enumerate(parts):
        save_v2(part, {name: tensors[name] for name in names[number::3]})
    tf.raw_ops.MergeV2Checkpoints(
        checkpoint_prefixes=list(map(str, parts)), destination_prefix=str(tmp_path / "model.ckpt")
    )
    assert len(list(tmp_path.glob("model.ckpt.data-*-of-00003"))) == 3
    assert_all_equal(tmp_path / "model.ckpt", tensors)


def test_what_is_not_read_is_said(tmp_path: Path) -> None:
    """Partitioned variables, TensorFlow 2's object graphs, and the format before 2017."""
    (tmp_path / "bert_config.json").write_text(json.dumps(SIZES))
    prefix = tmp_path / "bert_model.ckpt"
    half = np.ones((2, 3), np.float32)
    save_v2(prefix, {"table": half}, {"table": "4 3 0,2:0,3"})
    assert list(Bundle(prefix).entries) == ["table"]
    with pytest.raises(UserError, match="table is stored in parts"):
        Bundle(prefix).read("table")

    tf.train.Checkpoint(model=tf.Variable(half)).write(str(prefix))
    with pytest.raises(UserError, match="object graph of TensorFlow 2"):
        read_params(tmp_path)

    for file in tmp_path.glob("bert_model.ckpt*"):
        file.unlink()
    tf.raw_ops.Save(filename=str(prefix), tensor_names=["table"], data=[tf.constant(half)])
    with pytest.raises(UserError, match=r"old format \(V1\)"):
        read_params(tmp_path)
