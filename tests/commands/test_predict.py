"""`bert predict` on splits, tables and streams with bad lines."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from bert.commands import main as bert_main
from bert.commands.predictions import predict_command as predict
from bert.errors import LOGGER
from bert.inference.load import load
from bert.inference.pretrained import Pretrained


@pytest.mark.medium
def test_a_split_is_predicted_as_the_run_did(finetuned: Path, tmp_path: Path, capsysbinary, monkeypatch) -> None:
    assert (finetuned / "config.yaml").read_text().count("max_length: 32")
    capsysbinary.readouterr()
    assert predict([str(finetuned), "dev"]) == 0
    assert capsysbinary.readouterr().out == (finetuned / "predictions" / "dev.tsv").read_bytes()
    assert predict([str(finetuned), "test", "--output", str(tmp_path / "test")]) == 0
    assert sorted(path.name for path in (tmp_path / "test").iterdir()) == ["SST-2.tsv", "test.tsv"]
    for path in (tmp_path / "test").iterdir():
        assert path.read_bytes() == (finetuned / "predictions" / path.name).read_bytes()
    assert (tmp_path / "test" / "test.tsv").read_text().startswith("index\tprediction\tprobability\n0\t")
    monkeypatch.chdir(tmp_path)  # where there is a folder of that name
    capsysbinary.readouterr()
    assert predict([str(finetuned), "test"]) == 0
    assert capsysbinary.readouterr().out == (tmp_path / "test" / "SST-2.tsv").read_bytes()


def test_texts_that_are_cut_are_one_warning(finetuned: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    (tmp_path / "texts.txt").write_text("ba ri\n" + "ko ri " * 40 + "\n" + "tu " * 1000 + "\n")
    model, limit = load(finetuned), 32
    longest = max(len(model.tokenizer.encode(line).ids) for line in (tmp_path / "texts.txt").read_text().splitlines())
    told = f"2 texts are cut to data.max_length ({limit} tokens), the longest of {longest:,} tokens"
    capsys.readouterr()
    assert predict([str(finetuned), str(tmp_path / "texts.txt")]) == 0
    assert capsys.readouterr().err.count(told) == 1
    assert predict([str(finetuned), str(tmp_path / "texts.txt"), "--long_texts", "windows"]) == 0
    out, err = capsys.readouterr()
    assert told not in err
    expected = model.predict((tmp_path / "texts.txt").read_text().splitlines(), long_texts="windows")
    for line, answer in zip(out.splitlines(), expected, strict=True):
        assert json.loads(line)["probabilities"] == pytest.approx(answer.probabilities, abs=1e-6)
    messages: list[str] = []
    monkeypatch.setattr(LOGGER, "warning", messages.append)
    for _ in range(2):
        model.predict((tmp_path / "texts.txt").read_text().splitlines())
    [message] = messages
    assert message.startswith(told) and "data.max_length" in message and "data.long_texts" in message


def test_a_table_is_read_by_the_columns_of_the_task(finetuned: Path, sst2: Path, tmp_path: Path, capsys, fails) -> None:
    output = tmp_path / "answers.jsonl"
    assert predict([str(finetuned), str(sst2 / "test.tsv"), "--output", str(output)]) == 0
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(answer["index"], answer["text"]) for answer in answers] == [(str(i), f"ba ri {i}") for i in range(5)]
    written = [line.split("\t") for line in (finetuned / "predictions" / "test.tsv").read_text().splitlines()[1:]]
    for answer, (id, prediction, probability) in zip(answers, written, strict=True):
        assert (answer["index"], answer["label"]) == (id, ("negative", "positive")[int(prediction)])
        assert answer["probabilities"][answer["label"]] == pytest.approx(float(probability), abs=2e-6)
    table = tmp_path / "a.csv"
    table.write_text("text,label\nba,1\n")
    assert "line 1: no 'sentence' among 'text', 'label'" in fails(predict, str(finetuned), str(table))
    assert "dev, test" in fails(predict, str(finetuned), "val")
    whole = fails(predict, str(finetuned), "dev", "--batch_size=4")
    assert "--batch_size is for inputs" in whole


def test_a_bad_line_gets_its_error_and_the_others_their_answers(finetuned: Path, monkeypatch, capsys) -> None:
    content = b"ba ri tu\n\nko \xff\n  \nko ri\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    capsys.readouterr()
    assert bert_main(["predict", str(finetuned), "-"]) == 2
    out, error = capsys.readouterr()
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["text"] for line in lines] == ["ba ri tu", "", "ko \ufffd", "  ", "ko ri"]
    assert ["error" in line for line in lines] == [False, True, True, True, False]
    assert [line["line"] for line in lines[1:4]] == [2, 3, 4]
    assert error == (
        "error: standard input: 3 of 5 inputs have no answer, the first on line 2: an empty text: write it or "
        "remove the line\n"
    )


def test_an_input_that_the_task_refuses_does_not_end_the_others(finetuned: Path, monkeypatch, tmp_path, capsys) -> None:
    from bert.errors import UserError

    answer = Pretrained.answers

    def refuses(self, task, inputs, *more, **settings):
        if "ko" in inputs:
            raise UserError("text 1 does not fit: write another")
        return answer(self, task, inputs, *more, **settings)

    monkeypatch.setattr(Pretrained, "answers", refuses)
    (tmp_path / "a.txt").write_text("ba\nko\nri\n")
    capsys.readouterr()
    assert bert_main(["predict", str(finetuned), str(tmp_path / "a.txt")]) == 2
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line.get("label") is None for line in lines] == [False, True, False]
    assert lines[1] == {"line": 2, "text": "ko", "error": "text 1 does not fit: write another"}
