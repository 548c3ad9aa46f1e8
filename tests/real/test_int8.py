"""MiniLM with weights in 8 bits: its size, and how near its embeddings are to the float ones."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import bert

pytestmark = pytest.mark.real

TEXTS = [
    "A man plays the guitar.",
    "Someone makes music on an instrument with six strings.",
    "The shares fell by two percent after the report of the bank.",
    "How do I continue a run that was killed?",
]


def test_embeddings_of_int8_are_near_those_of_float(shared: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="needs the extra `onnx`")
    model = bert.load(shared / "models" / "all-MiniLM-L6-v2")
    said: list[str] = []
    model.save(tmp_path / "out", "onnx", said.append, quantize="int8", dev=TEXTS, tolerance=0.02)
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in said[1].splitlines()]
    table = {name: (left, right) for name, left, right in cells}
    cosine = float(table["cosine with the float model"][1])
    assert 0.98 < cosine < 1
    float_size, int8_size = map(float, table["megabytes"])
    assert int8_size < 0.27 * float_size
    assert int8_size == pytest.approx((tmp_path / "out" / "model.onnx").stat().st_size / 1e6, abs=0.06)
    from onnxruntime import InferenceSession

    session = InferenceSession(tmp_path / "out" / "model.onnx", providers=["CPUExecutionProvider"])
    feed = {name: array.astype(np.int64) for name, array in model.tokenize(TEXTS[:1]).items()}
    hidden = session.run(["last_hidden_state"], feed)[0][0]
    mean = hidden.mean(axis=0)
    assert mean / np.linalg.norm(mean) @ model.embed(TEXTS[0]) > 0.97
    assert json.loads((tmp_path / "out" / "signature.json").read_text())["pooling"]["mode"] == "mean"
