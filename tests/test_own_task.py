"""A task of one's own as a user runs it: the files and the class of docs/own_task.md, from the page itself."""

import importlib
import json
import re
import sys
from pathlib import Path

import pytest

import bert
from bert.commands.arguments import parse
from bert.commands.finetune import main
from bert.commands.predict import main as predict
from bert.config import FinetuneConfig
from bert.data import tasks
from bert.run import open_run

PAGE = (Path(__file__).parent.parent / "docs" / "own_task.md").read_text(encoding="utf-8")
SMALL = ["--data.max_length=32", "--data.buckets=32", "--training.batch_size=8", "--training.epochs=1"]


def block(start: str) -> str:
    """The page's block of code that begins so."""
    [code] = re.findall(rf"^```\w+\n({re.escape(start)}.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return code


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, the current one; the tasks of the process are as before when it is left."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(tasks, "TASKS", dict(tasks.TASKS))
    return tmp_path


def test_the_pages_yaml_names_the_columns(workplace: Path, pretrained: Path, capsys, fails) -> None:
    (workplace / "tickets.yaml").write_text(block("# tickets.yaml"))
    (workplace / "tickets").mkdir()
    rows = block("message,queue\n").splitlines()
    for name, count in (("train", 8), ("dev", 3), ("test", 2)):
        (workplace / "tickets" / f"{name}.csv").write_text("\n".join([rows[0], *(rows[1:] * count)]) + "\n")
    arguments = ["--config=tickets.yaml", f"--init={pretrained}", "--output_dir=run", *SMALL]
    assert main(arguments) == 0
    assert "\ntest:\n  loss " in capsys.readouterr().out
    results = json.loads(Path("run/results.json").read_text())
    assert (results["main_metric"], results["majority_class"]["accuracy"]) == ("macro_f1", 0.5)
    assert set(results["dev"]) == set(results["test"]) == {"loss", "macro_f1", "accuracy"}
    dev = [line.split("\t") for line in Path("run/predictions/dev.tsv").read_text().splitlines()]
    assert dev[0] == ["index", "prediction", "label", "probability"]
    assert [line[2] for line in dev[1:]] == ["billing", "technical"] * 3
    assert len(Path("run/predictions/test.tsv").read_text().splitlines()) == 5

    (workplace / "tickets").rename("elsewhere")  # config.yaml alone says what predict needs
    (workplace / "texts.txt").write_text("please refund my order\n")
    assert predict(["run", "texts.txt"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["text"] == "please refund my order"
    assert set(answer["probabilities"]) == {"billing", "technical"}

    Path("elsewhere").rename("tickets")
    config, _ = parse(FinetuneConfig, arguments, prog="", description="", default_recipe=None)
    assert open_run(config).resumed  # the same command goes on: the labels that train told are no difference
    error = fails(main, *arguments, "--output_dir=other", "--data.columns.label=team")
    assert "tickets/train.csv, line 1: no 'team' among 'message', 'queue': set data.columns.label to" in error


def test_the_pages_class_reads_another_layout(workplace: Path, pretrained: Path, monkeypatch, capsys, fails) -> None:
    (workplace / "reviews.py").write_text(block("# reviews.py"))
    for split, count in (("train", 20), ("test", 3)):
        for label, word in (("neg", "ko"), ("pos", "ba")):
            folder = workplace / "aclImdb" / split / label
            folder.mkdir(parents=True)
            for number in range(count):
                (folder / f"{number}.txt").write_text(f"{word} ri {'tu ' * (number % 3)}")
    arguments = ["--config=classification", "--task=reviews", "--data.dir=aclImdb", "--output_dir=run", *SMALL]
    arguments.append(f"--init={pretrained}")
    assert "task is 'reviews', which is unknown" in fails(main, *arguments)
    reviews = importlib.import_module("reviews")
    assert reviews.main(arguments) == 0
    results = json.loads(Path("run/results.json").read_text())
    assert results["task"] == "reviews"
    assert "accuracy" in results["test"]
    assert len(Path("run/predictions/dev.tsv").read_text().splitlines()) == 1 + 4
    [answer] = bert.load("run").predict(["ba ri"])
    assert set(answer.probabilities) == {"neg", "pos"}

    del tasks.TASKS["reviews"]  # as for somebody else: the run brings no code
    monkeypatch.delitem(sys.modules, "reviews")
    capsys.readouterr()
    (workplace / "texts.txt").write_text("ba ri\n")
    assert "task is 'reviews', which is unknown" in fails(predict, "run", "texts.txt")
    assert "bert.register_task" in fails(predict, "run", "texts.txt")
    assert "reviews" not in sys.modules
    (workplace / "aclImdb" / "train" / "neg" / "3.txt").write_text(" ")
    monkeypatch.delitem(sys.modules, "reviews", raising=False)
    error = fails(importlib.import_module("reviews").main, *arguments, "--output_dir=other")
    assert "aclImdb/train, file 12: text is empty" in error


@pytest.mark.slow
def test_the_pages_tags_and_answers(workplace: Path, pretrained: Path, capsys) -> None:
    for name, line, question in (
        ("entities", '{"words"', "Ann left New York."),
        ("questions", '{"id"', "Who left?\tAnn left New York."),
    ):
        row = block(line)
        (workplace / f"{name}.yaml").write_text(block(f"# {name}.yaml"))
        (workplace / name).mkdir()
        for split, count in (("train", 16), ("dev", 4), ("test", 2)):
            rows = [row.replace('"id": "7"', f'"id": "{number}"') for number in range(count)]
            (workplace / name / f"{split}.jsonl").write_text("".join(rows))
        arguments = ["--data.max_query_length=12", "--data.doc_stride=8"] if name == "questions" else []
        assert (
            main([f"--config={name}.yaml", f"--init={pretrained}", f"--output_dir={name}-run", *SMALL, *arguments]) == 0
        )
        assert "f1" in json.loads(Path(f"{name}-run/results.json").read_text())["test"]
        (workplace / "texts.txt").write_text(question + "\n")
        capsys.readouterr()
        assert predict([f"{name}-run", "texts.txt"]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert {"entities", "answer"} & set(answer)
    assert Path("entities-run/predictions/test.conll").read_text().startswith("Ann B-PER ")
    assert len(json.loads(Path("questions-run/predictions/predictions.json").read_text())) == 4


@pytest.mark.slow
def test_a_regression_over_pairs(workplace: Path, pretrained: Path, capsys) -> None:
    lines = [json.dumps({"a": "ba " * (row % 4 + 1), "b": "ri", "stars": row % 4 + 0.5}) for row in range(16)]
    for name in ("train", "dev"):
        (workplace / f"{name}.jsonl").write_text("\n".join(lines))
    columns = [f"--data.columns.{key}={name}" for key, name in (("text_a", "a"), ("text_b", "b"), ("label", "stars"))]
    arguments = [*columns, "--data.train=train.jsonl", "--data.score_range=[0, 4]", *SMALL]
    assert main(["--config=regression", f"--init={pretrained}", "--output_dir=run", *arguments]) == 0
    assert set(json.loads(Path("run/results.json").read_text())["dev"]) == {"loss", "pearson", "spearman"}
    (workplace / "pairs.tsv").write_text("ba\tri\n")
    capsys.readouterr()
    assert predict(["run", "pairs.tsv"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["text_a"], answer["text_b"]) == ("ba", "ri")
    assert 0 <= answer["score"] <= 4
