"""`bert inspect` on damaged runs, model folders and data files."""

from __future__ import annotations

import datetime
import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bert.analysis.diagnosis import DAMAGED, IGNORED, MISSING, diagnose, diagnose_data
from bert.commands.reports import inspect_command as main
from bert.errors import UserError
from bert.files import write_atomic


def states(findings: list) -> dict[str, str]:
    """The state of each finding by the file name that its sentence begins with."""
    return {Path(problem.split()[0].rstrip(":,")).name: state for state, problem in findings}


@pytest.fixture
def run(pretrained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pretrained, tmp_path / "run"))


def test_a_whole_run_has_no_findings(run: Path, finetuned: Path) -> None:
    assert diagnose(run) == diagnose(finetuned) == []


def test_every_damaged_file_of_a_run_is_listed(run: Path, capsys) -> None:
    tensors = max((run / "checkpoints/6").rglob("d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(tensors.read_bytes())
    content[len(content) // 2] ^= 1
    tensors.write_bytes(content)
    (run / "checkpoints/9.saving").mkdir()
    for name in ("results.json", "environment.json", "tokenizer.json"):
        (run / name).write_text("{")
    with (run / "metrics.jsonl").open("a") as file:
        file.write("not JSON\n")
    states_by_subject = states(diagnose(run))
    assert states_by_subject == {
        "tokenizer.json": DAMAGED,
        "6": DAMAGED,
        "9.saving": IGNORED,
        "results.json": DAMAGED,
        "metrics.jsonl": DAMAGED,
        "environment.json": DAMAGED,
    }
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        main([str(run)])
    text = capsys.readouterr().out
    assert "step 3" in text
    assert all(name in text for name in states_by_subject)


def test_a_run_with_an_older_good_checkpoint_can_still_be_used(run: Path, capsys) -> None:
    (run / "checkpoints/6/MANIFEST.json").write_text("{}")
    assert main([str(run), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["step"] == 3
    assert [problem["state"] for problem in facts["problems"]] == [DAMAGED]


def test_a_model_folder_without_weights(tmp_path: Path, capsys) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    (tmp_path / "tf_model.h5").touch()
    (tmp_path / "modeling.py").touch()
    (tmp_path / "generation_config.json").write_text("{,")
    states_by_subject = states(diagnose(tmp_path))
    assert states_by_subject["tf_model.h5"] == states_by_subject["modeling.py"] == IGNORED
    assert states_by_subject["generation_config.json"] == DAMAGED
    assert MISSING in states_by_subject.values()
    with pytest.raises(UserError):
        main([str(tmp_path)])
    assert "modeling.py" in capsys.readouterr().out


def test_a_table_with_empty_cells(tmp_path: Path, capsys) -> None:
    file = tmp_path / "train.csv"
    file.write_text("text,label\n" + "".join(f"row {row},{'ab'[row % 2] if row else ''}\n" for row in range(30)))
    facts, error = diagnose_data(file)
    assert error is None
    assert (facts["kind"], facts["rows"]) == ("table", 30)
    assert facts["columns"]["label"] == {"values": {"b": 15, "a": 14, "": 1}, "empty": 1}
    assert facts["columns"]["text"]["values"] is None
    assert [state for state, _ in facts["problems"]] == [MISSING]
    assert main([str(file)]) == 0
    assert "rows 30" in capsys.readouterr().out
    dates = [datetime.date(2026, 1, 1), None]
    pq.write_table(pa.table({"text": ["a", "b"], "label": ["x", "y"], "day": dates}), tmp_path / "train.parquet")
    facts, error = diagnose_data(tmp_path / "train.parquet")
    assert (error, facts["kind"], facts["rows"]) == (None, "table", 2)
    assert facts["columns"]["label"] == {"values": {"x": 1, "y": 1}, "empty": 0}


CONTEXT = "Ann left New York."
ANSWERS = [("Ann", 0), ("Ann", 2), ("Bob", 0)]
QUESTIONS = "".join(
    json.dumps({"id": row, "question": "Who?", "context": CONTEXT, "answer": answer, "answer_start": start}) + "\n"
    for row, (answer, start) in enumerate(ANSWERS)
).encode()
QAS = [
    {"id": str(row), "question": "Who?", "answers": [{"text": answer, "answer_start": start}]}
    for row, (answer, start) in enumerate(ANSWERS[:2])
]
SQUAD = json.dumps({"data": [{"paragraphs": [{"context": CONTEXT, "qas": QAS}]}]}).encode()
"""Questions of which the first is sound."""


@pytest.mark.parametrize(
    ("name", "content", "state", "counted"),
    [
        ("a.txt", b"one\n\ntwo\nthree\n", None, {"documents": 2, "lines": 3, "characters": 11}),
        ("one.txt", b"one\ntwo\n", MISSING, {"documents": 1}),
        ("empty.txt", b"", MISSING, {"documents": 0}),
        ("a.conll", b"Ann B-PER\nran O\n\n", None, {"sentences": 1, "words": 2}),
        ("train.jsonl", QUESTIONS, IGNORED, {"rows": 3, "questions": 3, "trainable": 1}),
        ("train.json", SQUAD, IGNORED, {"questions": 2, "trainable": 1}),
    ],
)
def test_readable_data_files(tmp_path: Path, name: str, content: bytes, state: str | None, counted: dict) -> None:
    write_atomic(tmp_path / name, content)
    facts, error = diagnose_data(tmp_path / name)
    assert error is None
    assert [problem.state for problem in facts["problems"]] == ([] if state is None else [state])
    assert counted.items() <= facts.items()


@pytest.mark.parametrize(
    ("name", "content", "counted"),
    [
        ("latin.txt", "one\n\nd\u00e9j\u00e0\n".encode("latin-1"), {"documents": 1}),
        ("a.pdf", b"%PDF", {}),
        ("a.txt.gz", b"no gzip", {"documents": 0}),
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', {"rows": 1}),
        ("train.json", b'{"data": []}', {}),
    ],
)
def test_unreadable_data_files_are_counted_up_to_the_fault(
    tmp_path: Path, capsys, name: str, content: bytes, counted: dict
) -> None:
    write_atomic(tmp_path / name, content)
    with pytest.raises(UserError, match=name):
        main([str(tmp_path / name), "--json"])
    assert counted.items() <= json.loads(capsys.readouterr().out).items()
    with pytest.raises(UserError, match=name):
        main([str(tmp_path / name)])
    assert "none found" not in capsys.readouterr().out


def test_a_vocabulary_that_loading_rejects_is_listed(run: Path) -> None:
    (run / "tokenizer.json").write_text((run / "tokenizer.json").read_text() + "\n")
    assert states(diagnose(run)) == {"tokenizer.json": DAMAGED}
    (run / "tokenizer.json").unlink()
    assert states(diagnose(run)) == {"tokenizer.json": MISSING}


def test_a_damaged_name_of_the_best_checkpoint_is_listed(finetuned: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(finetuned, tmp_path / "run"))
    (run / "checkpoints/PROTECTED").write_text("99\n")
    assert states(diagnose(run)) == {"PROTECTED": DAMAGED}


@pytest.mark.parametrize(
    "row",
    [
        {"question": "q", "context": "c", "choices": ["x", "y"], "answer": "A"},
        {"question": "q", "context": "c", "answer": "Yes, she did"},
        {"question": "q", "context": "", "label": 1},
    ],
    ids=["choices", "generated", "pairs"],
)
def test_questions_without_positions_are_a_plain_table(row: dict, tmp_path: Path) -> None:
    (tmp_path / "dev.jsonl").write_text(json.dumps(row) + "\n")
    facts, error = diagnose_data(tmp_path / "dev.jsonl")
    assert error is None and facts["rows"] == 1 and "questions" not in facts
