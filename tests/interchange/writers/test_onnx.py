"""The ONNX export, run by ONNX Runtime: every head, activation and family, at several sizes."""

import dataclasses
import json
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer

from bert.commands.export import main
from bert.data.long_texts import LongTexts
from bert.errors import UserError
from bert.model.heads import HEADS
from bert.model.names import ARCHITECTURES, GLOBAL_TOKENS
from bert.model.pooling import MODES, PooledDense, Pooling
from bert.tokenizer.hf_settings import set_truncation_side
from tests.helpers import OPTIONS

onnx = pytest.importorskip("onnx", reason="needs the extra `onnx`")
onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra `onnx`")

import bert.interchange.writers.onnx as exporter  # noqa: E402
from tests.messages import has_all  # noqa: E402

LONGEST, SHORTER, MOST = 12, 5, 7
ROBERTA = {"position_offset": 2, "type_vocab_size": 1}
MODERN = {**OPTIONS["modern"], "num_hidden_layers": 3}
LINEAR = OPTIONS["linear disentangled attention"]
CASES = {
    "encoder": ("Bert", {}),
    "encoder without pooler": ("Bert", {"pooler": False}),
    "pretraining": ("BertForPreTraining", {}),
    "next sentence": ("BertForNextSentencePrediction", {}),
    "classification": ("BertForSequenceClassification", {"num_hidden_layers": 2}),
    "tokens": ("BertForTokenClassification", {}),
    "spans": ("BertForQuestionAnswering", {}),
    "choices": ("BertForMultipleChoice", {}),
    "untied gelu": ("BertForMaskedLM", {"tie_word_embeddings": False}),
    "normalised before": ("BertForPreTraining", {"pre_layer_norm": True, "num_hidden_layers": 2}),
    "fixed positions": ("BertForMaskedLM", {"position_embedding_type": "sinusoidal"}),
    "scaled words": ("BertForMaskedLM", {"scale_embeddings": True, "position_embedding_type": "sinusoidal"}),
    "narrow embeddings": ("BertForPreTraining", {"embedding_size": 6}),
    "as gpt-2": ("BertForMaskedLM", {"embedding_norm": False, "prediction_transform": False}),
    "no segments, no bias": ("BertForMaskedLM", {"type_vocab_size": 0, "prediction_bias": False}),
    "gelu_tanh": ("BertForMaskedLM", {"hidden_act": "gelu_tanh"}),
    "relu": ("BertForMaskedLM", {"hidden_act": "relu"}),
    "silu": ("BertForMaskedLM", {"hidden_act": "silu"}),
    "elu, shared": (
        "BertForMaskedLM",
        {"hidden_act": "elu", "num_hidden_layers": 4, "layer_groups": 2, "step_embedding": True},
    ),
    "tanh": ("BertForMaskedLM", {"hidden_act": "tanh"}),
    "replaced tokens": ("BertForReplacedTokenDetection", {"embedding_size": 6}),
    "gelu pooler": ("BertForSequenceClassification", {"pooler_act": "gelu"}),
    "no positions": ("BertForMaskedLM", {"position_embedding_type": "none"}),
    "roberta": ("BertForMaskedLM", ROBERTA),
    "roberta choices": ("BertForMultipleChoice", ROBERTA),
    "left to right": ("BertForCausalLM", {"causal": True}),
    "left-to-right classifier": ("BertForSequenceClassification", {"causal": True}),
    "left-to-right choices": ("BertForMultipleChoice", {"causal": True}),
    "no bias": ("BertForTokenClassification", OPTIONS["no biases"]),
    "gated": ("BertForMaskedLM", OPTIONS["gated feed-forward"]),
    "rms": ("BertForSequenceClassification", OPTIONS["RMSNorm"]),
    "window": ("BertForMaskedLM", {**OPTIONS["local attention"], "causal": True}),
    **{
        f"global tokens of {architecture}": (architecture, {**OPTIONS["global tokens"], "num_hidden_layers": 2})
        for architecture in ("Bert", *GLOBAL_TOKENS)
    },
    "rotary": ("BertForMaskedLM", OPTIONS["rotary positions"]),
    "relative": ("BertForMaskedLM", {**OPTIONS["relative positions"], "num_hidden_layers": 2}),
    "shared keys": ("BertForMaskedLM", {**OPTIONS["shared keys"], "num_hidden_layers": 2}),
    "wide heads": ("BertForMaskedLM", {**OPTIONS["wide heads"], "num_key_value_heads": 1}),
    "some biases": ("BertForMaskedLM", OPTIONS["some biases"]),
    "sandwich": ("BertForMaskedLM", {**OPTIONS["sandwich"], "num_hidden_layers": 2}),
    "disentangled": ("BertForSequenceClassification", {**OPTIONS["disentangled attention"], "num_hidden_layers": 2}),
    "linear disentangled": (
        "BertForSequenceClassification",
        {**LINEAR, "num_hidden_layers": 2, "disentangled_products": "both"},
    ),
    "key and position": ("BertForMaskedLM", LINEAR),
    "query and position": ("BertForMaskedLM", {**LINEAR, "disentangled_products": "content_to_position"}),
    "convolution": ("BertForPreTraining", {**OPTIONS["convolution"], "num_hidden_layers": 2}),
    "wide convolution before": ("BertForTokenClassification", {"conv_kernel_size": 9, "pre_layer_norm": True}),
    "capped logits": ("BertForCausalLM", {"prediction_softcap": 0.5, "causal": True}),
    "mean": ("BertForSequenceClassification", OPTIONS["pooler of the mean"]),
    "last": ("BertForSequenceClassification", {"pooler_input": "last"}),
    "modern": ("BertForSequenceClassification", MODERN),
    "modern encoder": ("Bert", MODERN),
    "modern masked LM": ("BertForMaskedLM", MODERN),
    "modern tokens": ("BertForTokenClassification", MODERN),
    "modern spans": ("BertForQuestionAnswering", MODERN),
}


def inputs_of(session, architecture: str) -> dict[str, np.ndarray]:
    """The largest batch of full rows: [MOST, LONGEST], of choices [MOST, 2, LONGEST]."""
    random = np.random.default_rng(2)
    shape = (MOST, 2, LONGEST) if architecture == "BertForMultipleChoice" else (MOST, LONGEST)
    tops = {"input_ids": 61, "token_type_ids": 3, "attention_mask": 1}
    inputs = {port.name: random.integers(0, tops[port.name], shape) for port in session.get_inputs()}
    return {**inputs, "attention_mask": np.ones(shape, np.int64)}


@pytest.mark.medium
@pytest.mark.parametrize("case", CASES)
def test_answers_as_we_do(make, answer, case):
    architecture, sizes = CASES[case]
    model = make(architecture, **sizes)
    session = onnxruntime.InferenceSession(exporter.build(model).SerializeToString())
    names = [port.name for port in session.get_outputs()]
    inputs = inputs_of(session, architecture)
    # Ours always runs at one size, with what the graph is not given masked: one compilation
    compiled = jax.jit(lambda params, inputs: answer(model, params, inputs))
    padded = np.arange(LONGEST) < np.arange(2, 2 + MOST).reshape(MOST, *[1] * (inputs["input_ids"].ndim - 1))
    masks = {"full": inputs["attention_mask"], "padded": inputs["attention_mask"] * padded}
    for batch in (1, 3, MOST):
        for length in (1, SHORTER, LONGEST):
            for mask in masks.values():
                within = mask * (np.arange(LONGEST) < length)
                expected = compiled(model.params, {**inputs, "attention_mask": within})
                feed = {**inputs, "attention_mask": mask}
                outputs = session.run(None, {name: array[:batch, ..., :length] for name, array in feed.items()})
                assert set(names) == set(expected)
                for name, array in zip(names, outputs, strict=True):
                    expected_values = np.asarray(expected[name])[:batch]
                    if expected_values.ndim > 1 and expected_values.shape[1] == LONGEST:
                        is_token = within[:batch, :length] > 0
                        array, expected_values = array[is_token], expected_values[:, :length][is_token]
                    np.testing.assert_allclose(array, expected_values, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("length", [8192, 5000])
def test_the_longest_row_answers_as_ours(make, answer, length):
    """Local and global layers of ModernBERT's 8,192 positions, for a full and a padded row."""
    model = make("Bert", **{**MODERN, "max_position_embeddings": 8192})
    session = onnxruntime.InferenceSession(exporter.build(model).SerializeToString())
    inputs = inputs_of(session, "Bert")
    inputs = {name: np.resize(array, (1, 8192)) for name, array in inputs.items()}
    inputs["attention_mask"] *= np.arange(8192) < length
    expected = np.asarray(answer(model, model.params, inputs)["last_hidden_state"])
    [found] = session.run(["last_hidden_state"], inputs)
    np.testing.assert_allclose(found[0, :length], expected[0, :length], rtol=0, atol=1e-5)


def test_every_head_is_among_the_cases():
    assert {architecture for architecture, _ in CASES.values()} == set(ARCHITECTURES) - {"BertForSequenceToSequence"}
    assert {head.__name__ for head in HEADS.values()} - {"BertForReranking"} <= set(ARCHITECTURES)  # a classifier's


def test_every_option_of_the_encoder_is_among_the_cases():
    changed = {key for _, sizes in CASES.values() for key in sizes}
    assert {key for options in OPTIONS.values() for key in options} - changed == {"residual_init", "halting"}


def test_an_encoder_decoder_is_refused(make, tmp_path):
    with pytest.raises(UserError, match=r"tiny is an encoder-decoder.*ONNX"):
        make("BertForSequenceToSequence").save(tmp_path / "out", format="onnx")


@pytest.mark.parametrize(("key", "value"), [("position_embedding_type", "transformer_xl"), ("halting", 0.01)])
def test_layers_that_the_graph_lacks_are_refused(key, value, make, tmp_path):
    with pytest.raises(UserError, match=rf"tiny has model.{key} {value}, .*: use format stablehlo"):
        make("BertForMaskedLM", **{key: value}).save(tmp_path / "out", format="onnx")


@pytest.mark.medium
def test_rows_without_a_token_are_no_nan(make, answer):
    model = make("Bert")
    session = onnxruntime.InferenceSession(exporter.build(model).SerializeToString())
    inputs = inputs_of(session, "Bert")
    inputs["attention_mask"][0] = 0
    expected = jax.jit(lambda params: answer(model, params, inputs))(model.params)
    np.testing.assert_allclose(session.run(None, inputs)[0], expected["last_hidden_state"], rtol=0, atol=1e-5)


def test_more_tokens_than_positions_are_an_error(make):
    session = onnxruntime.InferenceSession(exporter.build(make("Bert")).SerializeToString())
    inputs = {port.name: np.ones((1, LONGEST + 1), np.int64) for port in session.get_inputs()}
    with pytest.raises(onnxruntime.capi.onnxruntime_pybind11_state.Fail):
        session.run(None, inputs)


@pytest.mark.medium
def test_the_folder(make, tmp_path, monkeypatch, capsys):
    model = make("BertForTokenClassification")
    monkeypatch.setattr("bert.inference.load.load", lambda source, log, **adapter: model)
    out = tmp_path / "deep" / "out"
    assert main(["tiny", str(out), "--format=onnx"]) == 0
    assert "verified: the outputs are within" in capsys.readouterr().out
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    signature = json.loads((out / "signature.json").read_text())
    config = json.loads((out / "config.json").read_text())
    assert signature["labels"] == list(config["id2label"].values()) == ["no", "perhaps", "yes", "both"]
    assert config["architectures"] == ["BertForTokenClassification"]
    session = onnxruntime.InferenceSession(out / "model.onnx")
    ports = {"inputs": session.get_inputs(), "outputs": session.get_outputs()}
    assert {kind: [(port["name"], port["shape"]) for port in signature[kind]] for kind in ports} == {
        kind: [(port.name, port.shape) for port in values] for kind, values in ports.items()
    }
    assert [port.name for port in ports["inputs"]] == ["input_ids", "attention_mask", "token_type_ids"]
    assert {port.type for port in ports["inputs"]} == {"tensor(int64)"}
    assert ports["outputs"][0].shape == ["batch_size", "sequence_length", 4]
    code = (out / "README.md").read_text().split("```python\n")[1].split("```")[0]
    shape = "import sys; sys.modules.update(bert=None, jax=None)\n" + code + "print(outputs[0].shape)"
    shown = subprocess.run([sys.executable, "-c", shape], cwd=out, capture_output=True, text=True, check=True)
    assert shown.stdout == "(1, 8, 4)\n"


@pytest.mark.medium
@pytest.mark.parametrize(("format", "side"), [("onnx", "right"), ("onnx", "left"), ("stablehlo", "right")])
def test_the_lines_of_the_readme_cut_texts_as_in_training(make, tmp_path, monkeypatch, format: str, side: str) -> None:
    model = dataclasses.replace(make("BertForSequenceClassification"), long_texts=LongTexts(SHORTER), texts_per_input=1)
    model = model.replace(tokenizer=Tokenizer.from_str(model.tokenizer.to_str()))
    set_truncation_side(model.tokenizer, side)
    text = "text " * 6 + "one " * 6
    assert len(model.tokenize(text)["input_ids"][0]) == LONGEST
    model.save(tmp_path / format, format)
    readme = (tmp_path / format / "README.md").read_text().replace('("a pair", "of texts")', repr(text))
    result: dict[str, Any] = {}
    monkeypatch.chdir(tmp_path / format)
    exec("".join(block.split("```")[0] for block in readme.split("```python\n")[1:]), result)
    logits = result["outputs"]["logits"] if isinstance(result["outputs"], dict) else result["outputs"][0]
    expected = model.apply(**model.tokenize(["one text", text], max_length=SHORTER))
    np.testing.assert_allclose(logits, expected, atol=1e-5)
    assert json.loads((tmp_path / format / "signature.json").read_text())["max_length"] == SHORTER


@pytest.mark.medium
def test_weights_over_the_limit_lie_beside_the_graph(make, tmp_path, monkeypatch):
    monkeypatch.setattr(exporter, "LARGEST", 0)
    make("BertForSequenceClassification").save(tmp_path / "out", "onnx")
    assert (tmp_path / "out" / "model.onnx_data").stat().st_size > (tmp_path / "out" / "model.onnx").stat().st_size


@pytest.mark.medium
def test_a_graph_of_an_activation_that_transformers_lacks_is_exported(make, tmp_path):
    make("BertForMaskedLM", hidden_act="elu").save(tmp_path / "out", "onnx")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["hidden_act"] == "elu"


@pytest.mark.medium
def test_what_answers_otherwise_is_not_exported(make, tmp_path, monkeypatch, fails):
    model, other = make("BertForQuestionAnswering"), make("BertForQuestionAnswering", layer_norm_eps=0.01)
    built = exporter.build(other)
    monkeypatch.setattr(exporter, "build", lambda model, fused: built)
    monkeypatch.setattr("bert.inference.load.load", lambda source, log, **adapter: model)
    to_out = ("tiny", str(tmp_path / "out"), "--format=onnx")
    assert "tiny: its graph's end_logits differs by" in fails(main, *to_out)
    built.graph.node[0].op_type = "NoSuchOperator"
    assert "tiny: its graph cannot be run (" in fails(main, *to_out)
    assert list(tmp_path.iterdir()) == []


def test_mistakes(make, tmp_path, monkeypatch, fails):
    model = make("Bert")
    monkeypatch.setattr("bert.inference.load.load", lambda source, log, **adapter: model)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert "full exists already" in fails(main, "tiny", str(tmp_path / "full"), "--format=onnx")
    assert "for stablehlo" in fails(main, "tiny", str(tmp_path / "out"), "--format=onnx", "--dynamic_length")
    headless = make("BertForMaskedLM")
    del headless.params["predictions"]
    with pytest.raises(UserError, match="tiny has no weights"):
        headless.save(tmp_path / "out", "onnx")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert has_all(
        fails(main, "tiny", str(tmp_path / "out"), "--format=onnx"), "onnxruntime is not installed", "'bert-jax[onnx]'"
    )


DENSE = [
    PooledDense(np.eye(24, 10, dtype=np.float32), np.ones(10, np.float32), "torch.nn.modules.activation.GELU"),
    PooledDense(np.eye(10, 8, dtype=np.float32), None, "torch.nn.Sigmoid"),
]
POOLINGS = {
    **{mode: Pooling(mode, normalize=mode != "max", max_length=7, lowercase=mode == "cls") for mode in MODES},
    "mean+cls": Pooling("mean+cls", normalize=True, truncate_dim=5),
    "dense": Pooling("mean", normalize=True, dense=tuple(DENSE)),
}


@pytest.mark.medium
@pytest.mark.parametrize(
    "name",
    [name if name in ("weightedmean", "dense") else pytest.param(name, marks=pytest.mark.slow) for name in POOLINGS],
)
def test_the_lines_of_the_readme_compute_embeddings(name: str, make, tmp_path, monkeypatch) -> None:
    model = dataclasses.replace(make("Bert"), pooling=POOLINGS[name])
    for format in ("onnx", "stablehlo") if name in ("weightedmean", "dense") else ("onnx",):
        model.save(tmp_path / format, format)
        blocks = (tmp_path / format / "README.md").read_text().split("```python\n")[1:]
        result: dict[str, Any] = {}
        monkeypatch.chdir(tmp_path / format)
        exec("".join(block.split("```")[0] for block in blocks), result)
        np.testing.assert_allclose(result["embeddings"], model.embed(["one text", "another text"]), atol=1e-5)
