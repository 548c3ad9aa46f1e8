"""Models whose graph is cached: loaded for ONNX Runtime without JAX and without their weights."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bert
from bert.commands.language_models import evaluate_command
from bert.commands.predictions import predict_command
from bert.model.heads import BertForSequenceClassification
from bert.runs.checkpoint_directory import CheckpointDirectory
from tests.processes import finish, launch
from tests.tiny_models import CONFIG, TASKS, model_of, sentence_encoder

pytest.importorskip("onnx", reason="needs the extra `onnx`")
pytest.importorskip("onnxruntime", reason="needs the extra `onnx`")

SCRIPT = """
import json, sys
import bert
from bert.commands.predictions import predict_command

encoder, classifier, run = (bert.load(name, engine="onnxruntime") for name in sys.argv[1:4])
vectors = encoder.embed(["ba ko", "mi"])
encoder.search(["ba"], ["ba ko", "mi"], top_k=1)
labels = [[label for label, *_ in model.predict(["ba ko", "mi"])] for model in (classifier, run)]
assert predict_command([sys.argv[2], "--engine=onnxruntime", sys.argv[4]]) == 0
loaded = sorted({"jax", "flax", "jaxlib", "orbax", "optax"} & set(sys.modules))
print(json.dumps({"vectors": vectors.tolist(), "labels": labels, "imported": loaded}))
"""


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    return tmp_path / "caches" / "bert-jax"


def load(folder: Path) -> bert.Pretrained:
    return bert.load(folder, lambda text: None, engine="onnxruntime")


def change_last_byte(file: Path) -> None:
    """Changes a file, which keeps its size and its time."""
    before = file.stat()
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


@pytest.mark.medium
def test_nothing_imports_jax_once_the_graphs_are_cached(tmp_path: Path, finetuned: Path) -> None:
    (tmp_path / "classifier").mkdir()
    classifier = model_of(
        tmp_path / "classifier", BertForSequenceClassification(CONFIG, 2), TASKS["published"], labels=("no", "yes")
    )
    classifier.save(tmp_path / "classifier" / "out")
    folders = [sentence_encoder(tmp_path), tmp_path / "classifier" / "out", finetuned]
    inputs = tmp_path / "inputs.txt"
    inputs.write_text("ba ko\nmi\n")
    first, second, third = map(load, folders)
    vectors = first.embed(["ba ko", "mi"])
    labels = [[answer.label for answer in model.predict(["ba ko", "mi"])] for model in (second, third)]
    (tmp_path / "script.py").write_text(SCRIPT)
    [text] = finish(launch(tmp_path / "script.py", *folders, inputs))
    found = json.loads(text.splitlines()[-1])
    assert found["imported"] == []
    np.testing.assert_allclose(found["vectors"], vectors, atol=1e-6)
    assert found["labels"] == labels


@pytest.mark.medium
def test_weights_are_read_only_for_methods_that_need_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = sentence_encoder(tmp_path)
    expected = bert.load(folder, lambda text: None)
    vectors = load(folder).embed(["ba ko"])
    monkeypatch.setattr("bert.interchange.readers.hf.read_tensors", None)
    stored = load(folder).replace(source="renamed")
    np.testing.assert_array_equal(stored.embed(["ba ko"]), vectors)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    again = load(folder)
    np.testing.assert_array_equal(again.params["bert"]["embeddings"]["word"]["embedding"],
                                  expected.params["bert"]["embeddings"]["word"]["embedding"])  # fmt: skip
    assert repr(again) == repr(expected)


@pytest.mark.medium
def test_changed_weights_have_another_graph(tmp_path: Path, caches: Path) -> None:
    folder = sentence_encoder(tmp_path)
    before = load(folder).embed("ba ko")
    stored = load(folder)
    change_last_byte(folder / "model.safetensors")  # the exponent of a value, as float32 is little-endian
    np.testing.assert_array_equal(stored.embed("ba ko"), before)  # the graph of the weights that were loaded
    after = load(folder).embed("ba ko")
    np.testing.assert_allclose(after, bert.load(folder, lambda text: None).embed("ba ko"), atol=1e-5)
    assert len(list((caches / "graphs").iterdir())) == len(list((caches / "weights").iterdir())) == 2
    with pytest.raises(bert.UserError, match="have changed since the model was loaded"):
        stored.params  # noqa: B018


@pytest.mark.medium
def test_damaged_checkpoints_and_records_are_not_used(finetuned: Path, tmp_path: Path, caches: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finetuned, run)
    first = load(run)
    [record] = (caches / "weights").iterdir()
    record.write_text("{")
    assert load(run).step == first.step == CheckpointDirectory(run / "checkpoints").best
    assert json.loads(record.read_text())["checksum"]
    [damaged, *_] = (file for file in (run / "checkpoints" / str(first.step)).rglob("*") if file.stat().st_size > 4096)
    change_last_byte(damaged)
    assert load(run).step != first.step


@pytest.mark.medium
@pytest.mark.parametrize("command", [evaluate_command, predict_command])
def test_commands_give_the_same_for_a_split(command: Any, finetuned: Path, capfdbinary: Any) -> None:
    printed = []
    for engine in ("jax", "onnxruntime"):
        capfdbinary.readouterr()
        assert command([str(finetuned), "dev", f"--engine={engine}"]) == 0
        printed.append(re.split(rb"(\d+\.\d+)", capfdbinary.readouterr().out))
    assert printed[0][::2] == printed[1][::2] and len(printed[0]) > 10
    numbers = [[float(number) for number in parts[1::2]] for parts in printed]
    assert numbers[0] == pytest.approx(numbers[1], abs=1e-4)


def test_a_cross_validation_has_no_engine(finetuned: Path, fails: Any) -> None:
    assert "--engine" in fails(evaluate_command, str(finetuned), "dev", "--cross_validate=3", "--engine=onnxruntime")
