"""Checkpoints that TensorFlow itself has written, read without it; and what the model then answers."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import traverse_util

import bert
from bert.config import ModelConfig
from bert.errors import UserError
from bert.interchange.families import GOOGLE_NAMES
from bert.interchange.readers.google import read_params
from bert.interchange.readers.tf_checkpoint import Bundle

pytestmark = pytest.mark.real

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def tensorflow() -> Any:
    """Imports TensorFlow in the worker that needs it, instead of in every worker that collects the tests."""
    return pytest.importorskip("tensorflow", reason="needs the extra `tf`")


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
    tf = tensorflow()
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
    tf = tensorflow()
    tf.raw_ops.SaveV2(
        prefix=str(prefix),
        tensor_names=list(tensors),
        shape_and_slices=[(slices or {}).get(name, "") for name in tensors],
        tensors=list(map(tf.constant, tensors.values())),
    )


def assert_all_equal(prefix: Path, tensors: dict[str, np.ndarray]) -> None:
    """Against what was written, and against TensorFlow's own reader."""
    tf = tensorflow()
    bundle, reader = Bundle(prefix), tf.train.load_checkpoint(str(prefix))
    assert sorted(bundle.entries) == sorted(tensors) == sorted(reader.get_variable_to_shape_map())
    for name, array in tensors.items():
        found = bundle.read(name)
        assert found.dtype == array.dtype
        np.testing.assert_array_equal(found, array)
        np.testing.assert_array_equal(found, reader.get_tensor(name))


@pytest.mark.parametrize(("act", "theirs"), [("gelu", "gelu_new"), ("relu", "relu")])
def test_a_bert_that_tensorflow_saved(tmp_path: Path, mrpc_texts, act: str, theirs: str) -> None:
    """The arrays are equal, and so are transformers' hidden states and logits, with the tanh form for ``gelu``."""
    hf_models = pytest.importorskip("tests.real.hf_models", reason="needs the extra `torch`")
    reference = hf_models.drawn(tmp_path / "hf", "BertForPreTraining", hidden_act=theirs)
    tensors, folder = google_tensors(reference.state_dict()), tmp_path / "google"
    save(folder, tensors, act)

    log: list[str] = []
    config, params = read_params(folder, log.append)
    assert config == ModelConfig(**SIZES, hidden_act="gelu_tanh" if act == "gelu" else act, pooler_dropout=False)
    assert log[1].startswith(f"not loaded from {folder / 'bert_model.ckpt'}: {2 * len(tensors) + 1} tensors of")
    known = {
        tensor.paths[0]: tensor
        for head in ("BertForSequenceClassification", "BertForQuestionAnswering")
        for tensor in GOOGLE_NAMES.tensors(config.num_hidden_layers, head)
    }
    read = {}
    for path, array in traverse_util.flatten_dict(params, sep="/").items():
        tensor = known[path]
        read[tensor.name] = array.T if tensor.transposed else array
    assert read.keys() == tensors.keys()
    for name, array in tensors.items():
        np.testing.assert_array_equal(read[name], array)

    (folder / "vocab.txt").write_bytes((tmp_path / "hf" / "vocab.txt").read_bytes())
    model = bert.load(folder)
    assert model.architecture == "BertForPreTraining"
    batches = [hf_models.inputs(model.architecture, padded) for padded in (False, True)]
    batches.append(hf_models.real_inputs(tmp_path / "hf", model, mrpc_texts[1], model.architecture))
    assert batches[-1]["token_type_ids"].any()
    every = hf_models.joined(batches)
    ours, expected = hf_models.our_answers(model, every), hf_models.answers(reference, every)
    hf_models.assert_alike(ours, expected, every["attention_mask"])
    encoded = model.encode(mrpc_texts[1])
    rows = model.tokenize(mrpc_texts[1])
    real = rows["attention_mask"].astype(bool)
    np.testing.assert_array_equal(encoded.attention_mask[:, : real.shape[1]], real)
    with hf_models.torch.no_grad():
        given = {name: hf_models.torch.tensor(array, dtype=hf_models.torch.long) for name, array in rows.items()}
        expected = reference.bert(**given)
    states = encoded.last_hidden_state[:, : real.shape[1]]
    np.testing.assert_allclose(states[real], expected.last_hidden_state.numpy()[real], atol=1e-4)
    np.testing.assert_allclose(encoded.pooled_output, expected.pooler_output.numpy(), atol=1e-4)


def test_every_type_and_many_blocks(tmp_path: Path) -> None:
    """Many names make an index of several blocks, whose keys share most of their bytes."""
    tf = tensorflow()
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
    tf = tensorflow()
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
    tf = tensorflow()
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
