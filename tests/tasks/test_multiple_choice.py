"""Multiple choice: both layouts, a row for each choice, any number of choices, and errors."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from bert.errors import UserError
from bert.tasks import find_task, multiple_choice
from bert.tasks.columns import table_files
from bert.tasks.multiple_choice import Examples

HEADER = ",video-id,sent1,sent2,ending0,ending1,ending2,ending3,label\n"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh"]


@pytest.fixture
def tokenizer() -> Tokenizer:
    """Letters a to h are tokens 5 to 12."""
    built = Tokenizer(models.WordPiece({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    built.normalizer = normalizers.BertNormalizer()
    built.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return built


def write(folder: Path, content: str | bytes, name: str = "train.csv") -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def line(stem: str = "s", choices: str = "xyz", answer: str | None = "A", **more: Any) -> str:
    listed = [{"label": "ABCDEFGH"[number], "text": text} for number, text in enumerate(choices)]
    entry = {"question": {"stem": stem, "choices": listed}} | ({} if answer is None else {"answerKey": answer})
    return json.dumps(entry | more) + "\n"


def error_of(path: Path, **arguments: Any) -> str:
    with pytest.raises(UserError) as caught:
        multiple_choice.read(path, **arguments)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(str(path))
    return str(caught.value)


def test_swag(tmp_path):
    content = HEADER + '0,v,"He said, ""go"".",She,runs.,"sits, then\nlaughs.",e2,e3,1\n7,v,A,B,c,d,e,f,3\n'
    examples = multiple_choice.read(write(tmp_path, "\ufeff" + content))
    assert examples.contexts == ['He said, "go".', "A"]
    assert examples.choices[0] == ["She runs.", "She sits, then\nlaughs.", "She e2", "She e3"]
    assert examples.names[1] == ["0", "1", "2", "3"]
    assert examples.labels.tolist() == [1, 3]
    assert examples.labels.dtype == np.int32
    assert examples.ids == ["0", "1"]


def test_swag_without_labels_and_with_two_endings(tmp_path):
    examples = multiple_choice.read(write(tmp_path, "sent1,sent2,ending1,ending0\r\na,,d,c\r\n"), labelled=False)
    assert (examples.choices, examples.labels) == ([["c", "d"]], None)


def test_commonsenseqa(tmp_path):
    content = line("s", "xyz", "C", id="one") + "\n" + line("t\u2028", "uv", "A", id="two")
    examples = multiple_choice.read(write(tmp_path, content, "dev.jsonl"))
    assert examples.contexts == ["s", "t\u2028"]
    assert examples.choices == [["x", "y", "z"], ["u", "v"]]
    assert examples.names == [["A", "B", "C"], ["A", "B"]]
    assert (examples.labels.tolist(), examples.ids) == ([2, 0], ["one", "two"])
    lists = {"question": "s", "choices": {"label": ["A", "B"], "text": ["x", "y"]}, "answerKey": "B"}
    of_lists = multiple_choice.read(write(tmp_path, json.dumps(lists), "dev.jsonl"))
    assert (of_lists.choices, of_lists.names, of_lists.labels.tolist()) == ([["x", "y"]], [["A", "B"]], [1])
    unlabelled = multiple_choice.read(write(tmp_path, line(answer=None), "test.jsonl"), labelled=False)
    assert (unlabelled.labels, unlabelled.ids) == (None, ["0"])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is empty"),
        (HEADER, "holds no questions"),
        ("sent1,sent2,ending0,label\na,b,c,0\n", "line 2: fewer than two choices"),
        ("sent1,sent2,ending0,ending1\na,b,c,d\n", "line 2: no 'label'"),
        ("sent1,sent,ending0,ending1\na,b,c,d\n", "line 2: no 'question' among 'sent1', 'sent'"),
        (HEADER + '0,v,"a\nb",b,c,d,e,f,1\n0,v,a,b,c,d,e,1\n', "line 4: 8 columns where the header has 9"),
        ("question,a,b,answer\nwho,x,y,a\n", """{"question": "...", "choices": ["x", "y"], "answerKey": "0"}"""),
        (HEADER + "0,v,a,b,c,d,e,f,4\n", "line 2: label is '4'"),
        (HEADER + "0,v,a,b,c,d,e,f,\n", "line 2: label is empty"),
        (HEADER + "0,v, ,b,c,d,e,f,1\n", "line 2: the question is empty"),
        (HEADER + "0,v,a,b,c,,e,f,1\n", "line 2: fewer than two choices"),
        (HEADER + '0,v,"a"x,b,c,d,e,f,1\n', "line 2: not CSV"),
        (HEADER + '0,v,"a,b,c,d,e,f,1\n', "line 2: not CSV"),
        (HEADER.encode() + b"0,v,a,b,c,d,e,f,1\n0,v,\xe9,b,c,d,e,f,1\n", "line 3: not UTF-8"),
    ],
)
def test_what_is_wrong_in_csv_is_told_with_file_and_line(tmp_path, content, words):
    assert words in error_of(write(tmp_path, content))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("\n", "holds no questions"),
        (line() + "{", "line 2: not JSON"),
        ("[]", "line 1: not an object"),
        ("{}", "line 1: no 'question'"),
        ('{"question": "who"}', "line 1: no 'choices' among 'question'"),
        ('{"question": "who", "choices": ["x"]}', "line 1: fewer than two choices"),
        ('{"question": {"choices": []}}', "line 1: the question is empty"),
        ('{"question": {"stem": "s"}}', "line 1: fewer than two choices"),
        (line(" "), "line 1: the question is empty"),
        (line(choices="x"), "line 1: fewer than two choices"),
        (line(choices="x "), "line 1: fewer than two choices"),
        (line().replace('"B"', '"A"'), "line 1: the labels"),
        (line().replace('"label": "B", ', ""), "line 1: the labels"),
        (line() + line(answer=None), "line 2: no 'answerKey'"),
        (line(answer="D"), "line 1: answerKey is 'D'"),
        (line(id="one") + line(id="one"), "line 2: the id one is on line 1 already"),
        (line(id=[]), "line 1: id is []"),
    ],
)
def test_what_is_wrong_in_jsonl_is_told_with_file_and_line(tmp_path, content, words):
    assert words in error_of(write(tmp_path, content, "dev.jsonl"))


def test_some_right_choices_are_no_file_without(tmp_path):
    for content, number in ((line(answer=None) + line(), 1), (line() + line(answer=None), 2)):
        with pytest.raises(UserError, match=f"line {number}: no 'answerKey'"):
            multiple_choice.read(write(tmp_path, content, "test.jsonl"), labelled=None)
    assert multiple_choice.read(write(tmp_path, line(answer=None), "bare.jsonl"), labelled=None).labels is None


def test_a_data_frame_with_a_missing_answer_has_floats(tmp_path):
    frame = pd.DataFrame({"question": ["a", "b", "c"], "choices": [["x", "y"]] * 3, "answerKey": [0, 1, None]})
    for name, content in table_files(frame, "train").items():
        (tmp_path / name).write_text(content)
    read = dataclasses.replace(find_task("multiple_choice"), skips_bad_rows=True).read(tmp_path, "train")
    assert read.labels.tolist() == [0, 1]


def test_missing_files_are_named(tmp_path):
    assert "does not exist" in error_of(tmp_path / "x.csv")


@pytest.fixture
def examples() -> Examples:
    choices = [["b", "c d e"], ["a"] * 3, ["f", "g", "h", "f g"]]
    return Examples(["a", "b c", "d"], choices, [list("ABCD")] * 3, np.array([1, 0, 3], np.int32), ["0", "1", "2"])


def test_a_row_for_each_choice(tokenizer, examples):
    rows = multiple_choice.tokenize(tokenizer, examples, 7)
    assert len(rows) == 3
    assert len(rows.sequences) == 9
    assert (rows.choices.tolist(), rows.lengths.tolist()) == ([len(c) for c in examples.choices], [7, 6, 6])
    batch = rows.batch(np.array([2, 0]), 8, 3)
    assert batch["input_ids"].shape == (3, 4, 8)
    assert batch["input_ids"][0, 3].tolist() == [2, 8, 3, 10, 11, 3, 0, 0]
    assert batch["input_ids"][1, 1].tolist() == [2, 5, 3, 7, 8, 9, 3, 0]
    assert batch["token_type_ids"][1, 1].tolist() == [0, 0, 0, 1, 1, 1, 1, 0]
    assert batch["choice_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1]]  # the fill row weighs nothing
    np.testing.assert_array_equal(batch["input_ids"][1, 2], batch["input_ids"][1, 0])
    assert (batch["labels"].tolist(), batch["weights"].tolist()) == ([3, 1, 0], [1, 1, 0])


def test_batches_that_cannot_hold_the_rows_are_refused(tokenizer, examples):
    rows = multiple_choice.tokenize(tokenizer, examples, 8)
    with pytest.raises(ValueError, match="2 rows do not fit"):
        rows.batch(np.array([0, 1]), 8, 1)
    with pytest.raises(ValueError, match="do not fit a batch"):
        rows.batch(np.array([0]), 4, 1)


def test_predictions(tmp_path, examples):
    shares = np.array([[0.25, 0.75, 0, 0], [1, 0, 0, 0], [0.1, 0.2, 0.3, 0.4]])
    path = multiple_choice.write_predictions(tmp_path / "p" / "dev.tsv", examples, np.array([1, 0, 2]), shares)
    assert path.read_text() == (
        "id\tprediction\tlabel\tprobability\n0\tB\tB\t0.750000\n1\tA\tA\t1.000000\n2\tC\tD\t0.300000\n"
    )
    unlabelled = Examples(examples.contexts, examples.choices, examples.names, None, examples.ids)
    multiple_choice.write_predictions(path, unlabelled, np.array([1, 0, 2]), shares)
    assert path.read_text().startswith("id\tprediction\tprobability\n0\tB\t0.750000\n")
    with pytest.raises(ValueError, match="3 questions, 2 predictions"):
        multiple_choice.write_predictions(path, examples, np.array([1, 0]), shares)


def test_a_null_start_of_the_endings_is_none_at_all():
    fields = {"sent1": "a", "sent2": None, "ending0": "x", "ending1": "y"}
    assert multiple_choice.parse_question(fields)[1] == ["x", "y"]
    with pytest.raises(ValueError, match="empty or not a text"):
        multiple_choice.parse_question({**fields, "ending1": 3})
