"""A custom task as a user runs it: the files and the class of docs/own_task.md, from the page itself."""

import importlib
import json
import re
import sys
from pathlib import Path

import pytest

import bert
from bert import tasks
from bert.commands.cli.arguments import parse
from bert.commands.finetune import main
from bert.commands.predictions import predict_command as predict
from bert.config import FinetuneConfig, TaskDataConfig
from bert.config.yaml_io import load_config
from bert.runs.folder import open_run
from bert.tasks import registry
from tests.helpers import results_of

PAGE = (Path(__file__).parents[2] / "docs" / "own_task.md").read_text(encoding="utf-8")
SMALL = ["--data.max_length=32", "--data.buckets=32", "--training.batch_size=8", "--training.epochs=1"]


def block(start: str) -> str:
    """The page's block of code that begins so."""
    [code] = re.findall(rf"^```\w+\n({re.escape(start)}.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return code


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, the current one; the tasks and modules of the process are as before when it is left."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registry, "TASKS", dict(registry.TASKS))
    monkeypatch.delitem(sys.modules, "reviews", raising=False)
    return tmp_path


@pytest.fixture
def queues(workplace: Path) -> Path:
    """The page's configuration, and rows with its columns."""
    rows = ["message,queue", '"I was charged twice, again",billing', "The app closes when I log in,technical"]
    (workplace / "queues").mkdir()
    for name, count in (("train", 8), ("dev", 3), ("test", 2)):
        (workplace / "queues" / f"{name}.csv").write_text("\n".join([rows[0], *(rows[1:] * count)]) + "\n")
    (workplace / "queues.yaml").write_text(block("# queues.yaml"))
    return workplace / "queues.yaml"


@pytest.fixture
def reviews(workplace: Path) -> list[str]:
    """The page's class and film reviews one a file; the arguments of a run on them."""
    (workplace / "reviews.py").write_text(block("# reviews.py"))
    for split, count in (("train", 20), ("test", 3)):
        for label, word in (("neg", "ko"), ("pos", "ba")):
            folder = workplace / "aclImdb" / split / label
            folder.mkdir(parents=True)
            for number in range(count):
                (folder / f"{number}.txt").write_text(f"{word} ri {'tu ' * (number % 3)}")
    return ["--config=classification", "--task=reviews", "--data.dir=aclImdb", *SMALL]


def written(name: str, line: str) -> FinetuneConfig:
    """The page's configuration of that name, next to many copies of the page's line of JSONL, each with its own id."""
    Path(name).mkdir()
    for split, count in (("train", 16), ("dev", 4), ("test", 2)):
        rows = [block(line).replace('"id": "7"', f'"id": "{number}"') for number in range(count)]
        (Path(name) / f"{split}.jsonl").write_text("".join(rows))
    Path(f"{name}.yaml").write_text(block(f"# {name}.yaml"))
    return load_config(FinetuneConfig, f"{name}.yaml")


def test_the_pages_yaml_names_the_columns(queues: Path, fails) -> None:
    config = load_config(FinetuneConfig, queues)
    task, folder = tasks.make_task(config), Path(config.data.dir)
    assert task.splits(folder) == ["train", "dev", "test"]
    train = task.read(folder, "train")
    assert train.texts_a[:2] == ["I was charged twice, again", "The app closes when I log in"]
    assert task.fit(train).labels == ("billing", "technical")
    assert task.main_metric == "macro_f1"
    arguments = ["--config=queues.yaml", "--init=none", "--output_dir=run", "--data.columns.label=team"]
    error = fails(main, *arguments)
    assert "queues/train.csv, line 1: no 'team' among 'message', 'queue': set data.columns.label to" in error


def test_the_pages_class_reads_another_layout(reviews: list[str], fails) -> None:
    arguments = [*reviews, "--init=none", "--output_dir=run"]
    assert "task is 'reviews', which is unknown" in fails(main, *arguments)
    script = importlib.import_module("reviews")
    task = tasks.make_task(FinetuneConfig(task="reviews", data=TaskDataConfig(dir="aclImdb")))
    task = task.fit(task.read(Path("aclImdb"), "train"))
    assert task.labels == ("neg", "pos")
    assert [len(task.read(Path("aclImdb"), split)) for split in task.splits(Path("aclImdb"))] == [36, 4, 6]
    Path("aclImdb/train/neg/3.txt").write_text(" ")
    assert "aclImdb/train, file 12: text is empty" in fails(script.main, "finetune", *arguments)


def test_the_pages_tags_and_answers_are_read(workplace: Path) -> None:
    config = written("entities", '{"words"')
    task = tasks.make_task(config)
    assert task.read(Path(config.data.dir), "train").labels == ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")
    config = written("questions", '{"id"')
    [example, _] = tasks.make_task(config).read(Path(config.data.dir), "test").examples
    assert (example.id, example.answer) == ("0", ("Ann", 0))


@pytest.mark.slow
def test_a_run_over_the_pages_columns(queues: Path, pretrained: Path, capsys) -> None:
    arguments = ["--config=queues.yaml", f"--init={pretrained}", "--output_dir=run", *SMALL]
    assert main(arguments) == 0
    assert "\ntest:\n  loss " in capsys.readouterr().out
    results = results_of(Path("run"))
    assert (results["main_metric"], results["majority_class"]["accuracy"]) == ("macro_f1", 0.5)
    assert set(results["dev"]) == set(results["test"]) == {"loss", "macro_f1", "accuracy"}
    dev = [line.split("\t") for line in Path("run/predictions/dev.tsv").read_text().splitlines()]
    assert dev[0] == ["index", "prediction", "label", "probability", "text"]
    assert [line[2] for line in dev[1:]] == ["billing", "technical"] * 3
    assert len(Path("run/predictions/test.tsv").read_text().splitlines()) == 5
    config, *_ = parse(FinetuneConfig, arguments, prog="", description="", default_recipe=None)
    with open_run(config) as run:  # the same command resumes: the labels that train told are no difference
        assert run.resumed

    Path("queues").rename("elsewhere")  # config.yaml alone says what predict needs
    Path("texts.txt").write_text("please refund my order\n")
    assert predict(["run", "texts.txt"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["text"] == "please refund my order"
    assert set(answer["probabilities"]) == {"billing", "technical"}


@pytest.mark.slow
def test_a_run_of_the_pages_class_brings_no_code(reviews, pretrained: Path, monkeypatch, capsys, fails) -> None:
    script = importlib.import_module("reviews")
    assert script.main(["finetune", *reviews, f"--init={pretrained}", "--output_dir=run"]) == 0
    results = results_of(Path("run"))
    assert results["task"] == "reviews"
    assert "accuracy" in results["test"]
    assert len(Path("run/predictions/dev.tsv").read_text().splitlines()) == 1 + 4
    [answer] = bert.load("run").predict(["ba ri"])
    assert set(answer.probabilities) == {"neg", "pos"}

    del registry.TASKS["reviews"]  # as for somebody else
    monkeypatch.delitem(sys.modules, "reviews")
    Path("texts.txt").write_text("ba ri\n")
    error = fails(predict, "run", "texts.txt")
    assert "task is 'reviews', which is unknown" in error
    assert "bert.register_task" in error
    assert "reviews" not in sys.modules


@pytest.mark.slow
def test_runs_over_the_pages_tags_and_answers(workplace: Path, pretrained: Path, capsys) -> None:
    for name, line, question in (
        ("entities", '{"words"', "Ann left New York."),
        ("questions", '{"id"', "Who left?\tAnn left New York."),
    ):
        written(name, line)
        arguments = ["--data.max_query_length=12", "--data.doc_stride=8"] if name == "questions" else []
        folder = f"{name}-run"
        assert (
            main([f"--config={name}.yaml", f"--init={pretrained}", f"--output_dir={folder}", *SMALL, *arguments]) == 0
        )
        assert "f1" in results_of(Path(folder))["test"]
        Path("texts.txt").write_text(question + "\n")
        capsys.readouterr()
        assert predict([folder, "texts.txt"]) == 0
        assert {"entities", "answer"} & set(json.loads(capsys.readouterr().out))
    assert Path("entities-run/predictions/test.conll").read_text().startswith("Ann B-PER ")
    assert len(json.loads(Path("questions-run/predictions/predictions.json").read_text())) == 4


@pytest.mark.slow
def test_a_regression_over_pairs(workplace: Path, pretrained: Path, capsys) -> None:
    lines = [json.dumps({"a": "ba " * (row % 4 + 1), "b": "ri", "stars": row % 4 + 0.5}) for row in range(16)]
    for name in ("train", "dev"):
        Path(f"{name}.jsonl").write_text("\n".join(lines))
    columns = [f"--data.columns.{key}={name}" for key, name in (("text_a", "a"), ("text_b", "b"), ("label", "stars"))]
    arguments = [*columns, "--data.train=train.jsonl", "--data.score_range=[0, 4]", *SMALL]
    assert main(["--config=regression", f"--init={pretrained}", "--output_dir=run", *arguments]) == 0
    assert set(results_of(Path("run"))["dev"]) == {"loss", "pearson", "spearman"}
    Path("pairs.tsv").write_text("b\ta\nri\tba\n")
    capsys.readouterr()
    assert predict(["run", "pairs.tsv"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["text_a"], answer["text_b"]) == ("ba", "ri")
    assert 0 <= answer["score"] <= 4
