"""The StableHLO export: what it answers at several sizes, and that nothing of this package is needed to ask."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax import export as jax_export
from safetensors.numpy import load_file

import bert
from bert.commands.export import main
from bert.errors import UserError
from bert.interchange.writers import stablehlo
from bert.interchange.writers.signature import write_metadata_files
from bert.model.names import ARCHITECTURES, GLOBAL_TOKENS
from bert.model.pooling import Pooling
from tests.helpers import OPTIONS
from tests.messages import has_all


def graph_in(folder):
    """The exported function of inputs, and its serialized form."""
    exported = jax_export.deserialize((folder / "model.jaxexport").read_bytes())
    weights = load_file(folder / "model.safetensors")
    return jax.jit(lambda inputs: exported.call(weights, inputs)), exported


def rows(shape: tuple[int, ...], names: list[str], vocabulary: int = 61, segments: int = 3) -> dict[str, np.ndarray]:
    """Random inputs of the tokenizers' integer type. Half of the last row is padding."""
    random = np.random.default_rng(sum(shape))
    tops = {"input_ids": vocabulary, "decoder_input_ids": vocabulary, "token_type_ids": segments, "attention_mask": 1}
    inputs = {name: random.integers(0, tops[name], shape) for name in names}
    inputs["attention_mask"] = np.ones(shape, np.int64)
    inputs["attention_mask"][-1, ..., shape[-1] // 2 :] = 0
    return inputs


SIZES = [(batch, length) for batch in (1, 3, 5) for length in (12, 6)]
"""Three batch sizes and two lengths, the longest and a shorter one."""

ROBERTA = {"position_offset": 2, "type_vocab_size": 1, "hidden_act": "gelu_tanh"}
GPT2 = {"causal": True, "pre_layer_norm": True, "embedding_norm": False, "prediction_transform": False,
        "prediction_bias": False, "type_vocab_size": 0}  # fmt: skip
CHOICES = [(batch, 2, length) for batch, length in SIZES]
FAST = [
    ("BertForSequenceClassification", {}, SIZES),
]
SLOW = [
    (
        "BertForSequenceToSequence",
        {"share_decoder": "all", "pre_layer_norm": True, "scale_embeddings": True},
        SIZES[:3],
    ),
    (
        "BertForPreTraining",
        {"pre_layer_norm": True, "position_embedding_type": "sinusoidal", "embedding_size": 6},
        SIZES,
    ),
    *((name, {}, CHOICES if name == "BertForMultipleChoice" else SIZES) for name in ARCHITECTURES),
    ("BertForMaskedLM", {"tie_word_embeddings": False}, SIZES),
    ("BertForMaskedLM", ROBERTA, SIZES),
    ("BertForCausalLM", GPT2, SIZES),
    ("BertForMaskedLM", {"conv_kernel_size": 9, "prediction_softcap": 2.0}, SIZES),
    ("BertForMultipleChoice", ROBERTA, CHOICES),
    *(
        (name, OPTIONS["global tokens"], CHOICES if name == "BertForMultipleChoice" else SIZES)
        for name in GLOBAL_TOKENS
    ),
    ("BertForSequenceToSequence", {"share_decoder": "embeddings", "decoder_layers": 2}, SIZES),
]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("architecture", "sizes", "shapes"), [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_answers_as_we_do(make, answer, tmp_path, architecture, sizes, shapes):
    """Every head at 1e-5, an order under what is promised; most of them among the slow tests."""
    model = make(architecture, **sizes)
    said = []
    model.save(tmp_path / "out", "stablehlo", said.append, dynamic_length=True)
    assert said[0].startswith("verified: the outputs are within")
    graph, exported = graph_in(tmp_path / "out")
    assert exported.platforms == ("cpu", "cuda", "tpu")
    without_segments = model.config.position_offset or not model.config.type_vocab_size
    names = ["input_ids", "attention_mask", "token_type_ids"][: 2 if without_segments else 3]
    if architecture == "BertForSequenceToSequence":
        names[2:] = ["decoder_input_ids"]
    for shape in shapes:
        inputs = rows(shape, names, segments=model.config.type_vocab_size)
        if "decoder_input_ids" in inputs:
            inputs["decoder_input_ids"] = inputs["decoder_input_ids"][:, :5]
        expected, answers = (
            jax.jit(lambda params, inputs=inputs: answer(model, params, inputs))(model.params),
            graph(inputs),
        )
        assert set(answers) == set(expected)
        for name, array in expected.items():
            np.testing.assert_allclose(answers[name], array, rtol=0, atol=1e-5)


@pytest.mark.medium
def test_needs_nothing_of_this_package(make, answer, tmp_path, monkeypatch, capsys):
    model = make("BertForTokenClassification")
    monkeypatch.setattr("bert.inference.load.load", lambda source, log, **adapter: model)
    out = tmp_path / "out"
    assert main(["tiny", str(out), "--format=stablehlo", "--length=10"]) == 0
    assert "verified" in capsys.readouterr().out
    signature = json.loads((out / "signature.json").read_text())
    assert signature["labels"] == ["no", "perhaps", "yes", "both"]
    assert signature["inputs"][0] == {"name": "input_ids", "shape": ["batch_size", 10], "dtype": "int32"}
    assert signature["outputs"] == [{"name": "logits", "shape": ["batch_size", 10, 4], "dtype": "float32"}]
    five_lines, from_text = [part.split("```")[0] for part in (out / "README.md").read_text().split("```python\n")[1:]]
    assert five_lines.count("\n") == 5
    script = "import sys; sys.modules.update(bert=None, flax=None)\n"
    script += f"{five_lines}first = outputs\n{from_text}"
    script += "np.savez('shown', first['logits'], *inputs.values(), outputs['logits'])"
    subprocess.run([sys.executable, "-I", "-c", script], cwd=out, check=True, env={**os.environ, "XLA_FLAGS": ""})
    first, ids, mask, segments, logits = np.load(out / "shown.npz").values()
    assert first.shape == (1, 10, 4)
    tokens = model.tokenizer.get_vocab()
    assert ids[0].tolist() == [tokens[token] for token in ("[CLS]", "one", "text", "[SEP]", *["[PAD]"] * 6)]
    expected = answer(model, model.params, {"input_ids": ids, "attention_mask": mask, "token_type_ids": segments})
    np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=1e-5)


def test_the_thresholds_of_labels_are_beside_the_graph(make, tmp_path):
    settings = {"problem_type": "multi_label_classification", "label_thresholds": (0.25, 0.5, 0.5, 1.0)}
    model = dataclasses.replace(make("BertForSequenceClassification"), **settings)
    write_metadata_files(model, tmp_path, stablehlo.signature(model), "int32", [])
    content = json.loads((tmp_path / "signature.json").read_text())
    assert {key: content[key] for key in settings} == {**settings, "label_thresholds": [0.25, 0.5, 0.5, 1.0]}
    assert "`no` 0.25, `perhaps` 0.5, `yes` 0.5, `both` 1 (a" in (tmp_path / "README.md").read_text()
    with pytest.raises(bert.UserError, match=r"is an export to ONNX or StableHLO, .* README\.md .* the format hf"):
        bert.load(tmp_path)


def test_the_activation_of_a_score_is_beside_the_graph(make, tmp_path):
    sigmoid = "torch.nn.modules.activation.Sigmoid"
    model = dataclasses.replace(make("BertForSequenceClassification"), score_activation=sigmoid)
    write_metadata_files(model, tmp_path, stablehlo.signature(model), "int32", [])
    assert json.loads((tmp_path / "signature.json").read_text())["score_activation"] == sigmoid
    assert f"Apply `{sigmoid}` to it." in (tmp_path / "README.md").read_text()


def test_what_texts_are_cut_to_and_begin_with_is_beside_the_graph(make, tmp_path):
    pooling = Pooling(max_length=7, lowercase=True, query_prompt="query: ", document_prompt="passage: ")
    model = dataclasses.replace(make("Bert"), pooling=pooling)
    write_metadata_files(model, tmp_path, stablehlo.signature(model), "int32", [])
    content = json.loads((tmp_path / "signature.json").read_text())
    told = {"lowercase": True, "query_prompt": "query: ", "document_prompt": "passage: "}
    assert content["pooling"] == {"mode": "mean", "normalize": False, **told}
    lengths = (content["max_length"], json.loads((tmp_path / "tokenizer_config.json").read_text())["model_max_length"])
    assert lengths == (7, 7)


@pytest.mark.medium
def test_weights_are_beside_the_graph(make):
    model = make("Bert", vocab_size=50_000)
    assert len(stablehlo.serialized(model, stablehlo.signature(model))) < 100_000


@pytest.mark.medium
def test_what_answers_otherwise_is_not_exported(make, tmp_path, monkeypatch, fails):
    other = make("BertForNextSentencePrediction", hidden_act="relu")
    written = stablehlo.serialized(other, stablehlo.signature(other, 12))
    monkeypatch.setattr(stablehlo, "serialized", lambda model, inputs: written)
    model = make("BertForNextSentencePrediction")
    monkeypatch.setattr("bert.inference.load.load", lambda source, log, **adapter: model)
    error = fails(main, "tiny", str(tmp_path / "out"), "--format=stablehlo")
    assert "tiny: its graph's logits differs by" in error
    assert list(tmp_path.iterdir()) == []


def test_mistakes(make, tmp_path, monkeypatch, fails):
    model = make("Bert")
    monkeypatch.setattr("bert.inference.load.load", lambda source, log, **adapter: model)
    to_out = ("tiny", str(tmp_path / "out"), "--format=stablehlo")
    assert has_all(fails(main, *to_out, "--length=13"), "length is 13", "model reads 1 to 12 tokens")
    (tmp_path / "out").touch()
    assert "out exists already" in fails(main, *to_out)
    assert "--length and --dynamic_length are for stablehlo" in fails(main, "tiny", str(tmp_path / "new"), "--length=8")
    with pytest.raises(UserError, match="length is 8 and dynamic_length is set"):
        model.save(tmp_path / "new", "stablehlo", length=8, dynamic_length=True)
    with pytest.raises(UserError, match="format is 'pickle'"):
        model.save(tmp_path / "new", "pickle")


@pytest.mark.slow
def test_the_guides_five_lines_call_an_export_without_this_package(make, answer, tmp_path):
    """Runs the block of the page in a process that cannot import `bert`, `flax` or `optax`."""
    model = make("BertForSequenceClassification", max_position_embeddings=128, hidden_size=12)
    model.save(tmp_path / "sst2-jax", "stablehlo", length=128)
    page = (Path(__file__).parents[3] / "docs" / "export_and_serve.md").read_text(encoding="utf-8")
    [lines] = [block for block in page.split("```python\n") if block.startswith("import jax, jax.export")]
    lines = lines.split("```")[0]
    assert sum(map(bool, lines.splitlines())) == 5
    script = "import sys; sys.modules.update(bert=None, flax=None, optax=None)\n"
    script += f"{lines}np.save('shown.npy', outputs['logits'])\n"
    script += "print(*sorted(name for name in sys.modules if name.split('.')[0] in ('bert', 'flax', 'optax')))"
    command = [sys.executable, "-I", "-c", script]
    shown = subprocess.run(command, cwd=tmp_path, check=True, env={**os.environ, "XLA_FLAGS": ""}, capture_output=True)
    assert shown.stdout.split() == [b"bert", b"flax", b"optax"], "blocked, and none of their parts loaded"
    inputs = {name: np.ones((1, 128), np.int32) for name in ("input_ids", "attention_mask", "token_type_ids")}
    expected = answer(model, model.params, inputs)["logits"]
    np.testing.assert_allclose(np.load(tmp_path / "shown.npy"), expected, rtol=0, atol=1e-5)
