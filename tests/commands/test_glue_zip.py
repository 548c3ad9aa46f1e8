"""`bert glue-zip`: the right files, once each, at the root of the zip."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from bert.commands.benchmark import glue_zip_command as main


def made(folder: Path, *names: str, content: str = "index\tprediction\n0\t1\n") -> Path:
    """A folder that looks like a run with these predictions."""
    (folder / "predictions").mkdir(parents=True)
    (folder / "config.yaml").write_text("task: x\n")
    for name in (*names, "dev.tsv"):
        (folder / "predictions" / name).write_text(content)
    return folder


def test_predictions_of_all_runs_at_the_root(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mnli, cola = made(tmp_path / "a", "MNLI-m.tsv", "MNLI-mm.tsv", "AX.tsv"), made(tmp_path / "b", "CoLA.tsv")
    assert main([str(mnli), str(cola), str(tmp_path / "out.zip")]) == 0
    with zipfile.ZipFile(tmp_path / "out.zip") as archive:
        assert archive.namelist() == ["AX.tsv", "CoLA.tsv", "MNLI-m.tsv", "MNLI-mm.tsv"]
        assert archive.read("CoLA.tsv") == b"index\tprediction\n0\t1\n"
    missing = capsys.readouterr().out.splitlines()[-1]
    assert missing == "missing for a complete submission: SST-2.tsv, MRPC.tsv, STS-B.tsv, QQP.tsv, QNLI.tsv, " \
        "RTE.tsv, WNLI.tsv"  # fmt: skip
    assert main([str(mnli), str(cola), str(tmp_path / "again.zip")]) == 0
    assert (tmp_path / "again.zip").read_bytes() == (tmp_path / "out.zip").read_bytes()


def test_of_several_seeds_the_best_is_taken(tmp_path: Path) -> None:
    made(tmp_path / "seed-0", "RTE.tsv")
    made(tmp_path / "seed-1", "RTE.tsv", content="index\tprediction\n0\tentailment\n")
    (tmp_path / "config.yaml").write_text("task: rte\n")
    (tmp_path / "results.json").write_text(json.dumps({"best_seed": 1}))
    assert main([str(tmp_path), str(tmp_path / "out.zip")]) == 0
    assert b"entailment" in zipfile.ZipFile(tmp_path / "out.zip").read("RTE.tsv")


def test_errors(tmp_path: Path, fails) -> None:
    rte, again, bare = made(tmp_path / "a", "RTE.tsv"), made(tmp_path / "b", "RTE.tsv"), made(tmp_path / "c")
    out = tmp_path / "out.zip"
    assert "RTE.tsv is in" in fails(main, str(rte), str(again), str(out))
    assert "holds none of GLUE's prediction files" in fails(main, str(bare), str(out))
    assert "holds no run (no config.yaml)" in fails(main, str(tmp_path), str(out))
    assert "does not end in .zip" in fails(main, str(rte), str(again))
    assert "-- is given more than once" in fails(main, str(rte), "--", "--")
    (rte / "predictions" / "RTE.tsv").write_text("id,label\n")
    assert "RTE.tsv, line 1: not 'index\\tprediction'" in fails(main, str(rte), str(out))
    (rte / "predictions" / "RTE.tsv").write_bytes(b"\xff\xfe\n")
    assert "RTE.tsv, line 1: not 'index\\tprediction'" in fails(main, str(rte), str(out))
    for damaged in ("{", "[1]"):
        (rte / "results.json").write_text(damaged)
        assert "results.json cannot be read" in fails(main, str(rte), str(out))
    assert not out.exists()
    out.write_bytes(b"mine")
    assert "exists already" in fails(main, str(again), str(out))
    assert out.read_bytes() == b"mine"
