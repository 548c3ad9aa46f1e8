"""SQuAD, tagging and multiple choice from their files to scores, official predictions and `bert predict`.

The data is small and regular: a distinct word marks the answer, so that a tiny model learns it in seconds.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import bert
from bert import metrics
from bert.commands.finetune import main
from bert.commands.predictions import predict_command as predict
from bert.data.rows import TokenRows
from bert.tasks.token_classification import conll
from tests.conftest import SMALL_MODEL
from tests.helpers import FILLERS, NAMES, interrupted_at, lines_of, questions, results_of, words
from tests.messages import has_all

pytestmark = pytest.mark.slow


TINY = [*SMALL_MODEL, "--init=none", "--data.max_length=32", "--data.buckets=32", "--tokenizer.vocab_size=64",
        "--model.hidden_dropout_prob=0", "--training.batch_size=8",
        "--model.attention_probs_dropout_prob=0", "--optimizer.learning_rate=2e-2", "--training.epochs=12",
        "--training.eval_every=30", "--tokenizer.min_frequency=1"]  # fmt: skip
SHORT_WINDOWS = ["--data.max_query_length=8", "--data.doc_stride=8"]


def run(folder: Path, data: Path, recipe: str, *arguments: str) -> int:
    windows = SHORT_WINDOWS if recipe in ("squad", "squad2", "span") else []
    return main([f"--config={recipe}", f"--data.dir={data}", f"--output_dir={folder}", *TINY, *windows, *arguments])


@pytest.fixture(scope="module")
def squad_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both versions: 36 training questions, 12 of dev, 3 to predict."""
    folder = tmp_path_factory.mktemp("squad")
    for version, impossible in (("1.1", False), ("2.0", True)):
        for split, count in (("train", 36), ("dev", 12), ("test", 3)):
            content = questions(count, impossible)
            (folder / f"{split}-v{version}.json").write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="module")
def ner_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """CoNLL-2003's columns: one-word persons, two-word places, one long sentence in five."""
    folder = tmp_path_factory.mktemp("ner")
    for split, count in (("train", 40), ("valid", 15), ("test", 5)):
        lines = ["-DOCSTART- -X- -X- O", ""]
        for number in range(count):
            tagged = [(word, "O") for word in words(number, 50 if number % 5 == 0 else 5)]
            tagged[number % 4] = (NAMES[number % 3], "I-PER")
            tagged.insert((number * 7) % len(tagged), ("New", "I-LOC"))
            place = tagged.index(("New", "I-LOC"))
            tagged.insert(place + 1, ("York", "I-LOC"))
            lines += [f"{word} NN I-NP {tag}" for word, tag in tagged] + [""]
        (folder / f"{split}.txt").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def choice_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """CommonsenseQA's layout: the right choice is the name; three to five choices."""
    folder = tmp_path_factory.mktemp("choices")
    for split, count in (("train", 40), ("dev", 15), ("test_nolabels", 4)):
        lines = []
        for number in range(count):
            texts = words(number, 3 + number % 3)
            right = number % len(texts)
            texts[right] = NAMES[number % 3]
            choices = [{"label": "ABCDE"[place], "text": text} for place, text in enumerate(texts)]
            entry = {"id": f"c{number}", "question": {"stem": f"ba {FILLERS[number % 5]}", "choices": choices}}
            lines.append(json.dumps(entry if "nolabels" in split else {**entry, "answerKey": "ABCDE"[right]}))
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def finished(recipe: str, data: str) -> Callable[..., Path]:
    """Returns a fixture: the folder of a finished run of a recipe on the data of another fixture."""

    @pytest.fixture(scope="module")
    def finished_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
        folder = tmp_path_factory.mktemp("runs") / recipe
        assert run(folder, request.getfixturevalue(data), recipe) == 0
        return folder

    return finished_run


squad_run, ner_run = finished("squad2", "squad_data"), finished("conll2003", "ner_data")
choice_run = finished("commonsenseqa", "choice_data")


@pytest.mark.parametrize(
    ("data", "recipe"), [("squad_data", "squad2"), ("ner_data", "conll2003"), ("choice_data", "commonsenseqa")]
)
def test_every_kind_of_row_is_learned_in_batches_by_tokens(data, recipe, request, tmp_path: Path) -> None:
    folder, by_tokens = tmp_path / "run", ["--training.tokens_per_batch=256", "--data.buckets=[8,16,32]"]
    assert run(folder, request.getfixturevalue(data), recipe, *by_tokens) == 0
    results = results_of(folder)
    assert results["dev"][results["main_metric"]] > (90 if recipe == "squad2" else 0.9)


def asked(folder: Path, lines: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    (tmp_path / "lines.txt").write_text(lines)
    capsys.readouterr()
    assert predict([str(folder), str(tmp_path / "lines.txt")]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_squad2_learns_and_leaves_the_official_files(squad_run: Path, squad_data: Path) -> None:
    results = results_of(squad_run)
    dev = results["dev"]
    assert results["main_metric"] == "best_f1"
    assert dev["best_f1"] > 90
    assert (dev["total"], dev["HasAns_total"], dev["NoAns_total"]) == (12, 8, 4)
    assert results["no_answer"]["f1"] == pytest.approx(100 * 4 / 12)
    assert not results["collapsed"]
    written = {path.name: json.loads(path.read_text()) for path in (squad_run / "predictions").glob("*.json")}
    assert set(written) == {"predictions.json", "nbest_predictions.json", "null_odds.json"}
    entries = [paragraph["qas"][0] for paragraph in questions(12, True)["data"][0]["paragraphs"]]
    right = {entry["id"]: [answer["text"] for answer in entry["answers"]] for entry in entries}
    scores = metrics.squad_metrics(written["predictions.json"], right)
    assert {name: dev[name] for name in scores} == scores, "the scores are those of the file, at the tuned threshold"
    threshold = bert.load(squad_run).data.null_score_diff_threshold
    assert results["tuned"] == {"null_score_diff_threshold": threshold}
    assert yaml.safe_load((squad_run / "config.yaml").read_text())["data"]["null_score_diff_threshold"] is None
    assert scores["f1"] == dev["best_f1"]
    for id, odds in written["null_odds.json"].items():
        assert (written["predictions.json"][id] == "") == (odds > threshold)
        assert sum(candidate["probability"] for candidate in written["nbest_predictions.json"][id]) == pytest.approx(1)
    assert set(json.loads((squad_run / "predictions/test/predictions.json").read_text())) == {"q0", "q1", "q2"}


def test_answers_to_new_questions_have_their_characters(squad_run, tmp_path, capsys, fails) -> None:
    question, context = results_of(squad_run)["sample_input"]
    assert question.endswith("?")
    assert len(asked(squad_run, f"{question}\t{context}\n", tmp_path, capsys)) == 1
    long = " ".join([*words(1, 40), "Xena", *words(2, 40)])
    lines = f"who ?\tba Xavi ri tu\nwho ?\t{long}\n" + json.dumps({"question": "who ?", "context": "ba\nXena"})
    answers = asked(squad_run, lines + "\nwho ?\tba ri tu\n", tmp_path, capsys)
    assert [answer["answer"] for answer in answers] == ["Xavi", "Xena", "Xena", ""]
    for answer in answers[:3]:
        assert answer["context"][answer["start"] : answer["end"]] == answer["answer"]
        assert 0.3 < answer["probability"] <= 1
    assert (answers[3]["start"], answers[3]["end"]) == (None, None)
    assert list(answers[0]) == ["question", "context", "answer", "start", "end", "probability"]
    file = tmp_path / "bad.txt"
    mistakes = (("who ?", "1 column(s)"), (" \tba", "empty"), ('{"question": "who"}', "no 'context'"),
                ('{"question": "who"', "not JSON"), ('{"question": "", "context": "a"}', "not empty"))  # fmt: skip
    for line, told in mistakes:
        file.write_text(line + "\n")
        assert has_all(
            error := fails(predict, str(squad_run), str(file)), f"{file}: 1 of 1 inputs have no answer", "line 1"
        )
        assert told in error
    with pytest.raises(bert.config.UserError, match="input 2 has an empty question"):
        bert.load(squad_run).predict([("who ?", "ba"), (" ", "ba")])
    assert bert.load(squad_run).predict([]) == []


def test_squad_without_impossible_questions(squad_data, tmp_path, capsys, fails) -> None:
    folder = tmp_path / "run"
    arguments = ("--data.max_train_samples=32", "--patience=5")
    assert run(folder, squad_data, "squad", *arguments) == 0
    results = results_of(folder)
    assert set(results["dev"]) == {"loss", "exact_match", "f1"}
    assert results["dev"]["exact_match"] > 90
    assert bert.load(folder).data.null_score_diff_threshold is None
    assert {path.name for path in (folder / "predictions").glob("*")} == {
        "predictions.json", "nbest_predictions.json", "errors.tsv", "test_errors.tsv", "test"}  # fmt: skip
    shutil.copytree(squad_data, tmp_path / "mixed")
    shutil.copy(squad_data / "train-v2.0.json", tmp_path / "mixed" / "train-v1.1.json")
    error = fails(main, "--config=squad", f"--data.dir={tmp_path / 'mixed'}", f"--output_dir={tmp_path / 'x'}", *TINY)
    assert has_all(error, "question q2", "SQuAD v2.0", "task squad2")


def test_misplaced_answers_are_skipped_and_told_or_an_error(squad_data, tmp_path, capsys, fails) -> None:
    data = tmp_path / "data"
    shutil.copytree(squad_data, data)
    content = questions(9, False)
    content["data"][0]["paragraphs"][4]["qas"][0]["answers"][0]["answer_start"] += 1
    (data / "train-v1.1.json").write_text(json.dumps(content))
    assert run(tmp_path / "run", data, "squad", "--training.epochs=1") == 0
    warnings = capsys.readouterr().err
    assert "train-v1.1.json: 1 question(s)" in warnings and "q4 is the first; 1 without" in warnings
    error = fails(main, "--config=squad", f"--data.dir={data}", f"--output_dir={tmp_path / 'x'}", *TINY,
                  "--data.misaligned_answers=error")  # fmt: skip
    assert "question q4: the answer 'Xena' does not stand" in error


def test_ner_learns_and_writes_the_columns(ner_run: Path, ner_data: Path) -> None:
    results = results_of(ner_run)
    assert results["main_metric"] == "f1"
    for split in ("dev", "test"):
        assert results[split]["f1"] > 0.9
        assert {"precision", "recall", "accuracy", "f1_LOC", "f1_PER", "loss"} <= set(results[split])
    assert results["commonest_tag"]["f1"] > 0.9, "here the word tells the tag"
    written = conll.read(ner_run / "predictions" / "dev.conll")
    sentences = conll.read(ner_data / "valid.txt")
    assert written.words == sentences.words
    assert all(len(cells) == 5 for sentence in written.columns for cells in sentence)
    scores = metrics.entity_metrics(written.tags, sentences.tags)
    assert {name: results["dev"][name] for name in scores} == pytest.approx(scores)
    types = [line.split("\t") for line in (ner_run / "predictions/dev_types.tsv").read_text().splitlines()]
    assert [row[0] for row in types] == ["type", "LOC", "PER"]
    assert types[1][4] == "15"
    assert bert.load(ner_run).data.labels == ["O", "B-LOC", "I-LOC", "B-PER", "I-PER"]


def test_entities_of_new_texts_have_their_characters(ner_run, tmp_path, capsys) -> None:
    long = " ".join([*words(1, 60), "Xerxes", *words(2, 3)])
    short, far = asked(ner_run, f"ba Xena lo New  York\n{long}\n", tmp_path, capsys)
    assert [(entity["type"], entity["text"]) for entity in short["entities"]] == [("PER", "Xena"), ("LOC", "New  York")]
    [person] = far["entities"]
    for answer, entity in ((short, short["entities"][0]), (short, short["entities"][1]), (far, person)):
        assert answer["text"][entity["start"] : entity["end"]] == entity["text"]
        assert 0.3 < entity["probability"] <= 1
    assert bert.load(ner_run).predict(["  "])[0].entities == []


def test_what_is_wrong_with_tags_is_told_before_anything_is_trained(ner_data, tmp_path, fails, capsys) -> None:
    data = tmp_path / "data"
    shutil.copytree(ner_data, data)

    def told(split: str, content: str, *arguments: str) -> str:
        (data / f"{split}.txt").write_text(content)
        folder = f"--output_dir={tmp_path / 'x'}"
        return fails(main, "--config=conll2003", f"--data.dir={data}", folder, *TINY, *arguments)

    assert has_all(told("valid", "ba O\nri B-DRUG\n"), "valid.txt, line 2", "B-DRUG does not occur")
    assert "valid.txt, line 3: 1 columns between spaces" in told("valid", "ba O\nri O\ntu\n")
    broken = "ba B-PER\n\nri I-PER\n\ntu B-PER\n\nlo B-LOC\nmi I-LOC\n"
    assert has_all(told("valid", broken), "valid.txt, line 3", "I-PER")
    assert run(tmp_path / "y", data, "conll2003", "--data.invalid_tags=count", "--training.epochs=1") == 0
    warnings = capsys.readouterr().err
    assert "valid.txt: the tags of 1 sentence(s)" in warnings and "(line 3)" in warnings
    assert "missing is not a folder" in fails(main, "--config=wnut17", f"--data.dir={tmp_path / 'missing'}", *TINY,
                                              f"--output_dir={tmp_path / 'z'}")  # fmt: skip


def test_multiple_choice_learns_and_answers(choice_run: Path, choice_data: Path, tmp_path, capsys, fails) -> None:
    results = results_of(choice_run)
    assert results["dev"]["accuracy"] > 0.9
    assert len(results["sample_input"]) > 2
    assert results["chance"]["accuracy"] == pytest.approx((1 / 3 + 1 / 4 + 1 / 5) / 3)
    rows = [line.split("\t") for line in (choice_run / "predictions" / "dev.tsv").read_text().splitlines()]
    assert rows[0] == ["id", "prediction", "label", "probability"]
    assert np.mean([row[1] == row[2] for row in rows[1:]]) == pytest.approx(results["dev"]["accuracy"])
    assert len((choice_run / "predictions" / "test.tsv").read_text().splitlines()) == 5
    more = {"question": "ba mi", "choices": ["mi", "lo", "Xerxes"]}
    lines = f"ba ri\tri\tXena\nba tu\tXavi\ttu\tlo\n{json.dumps(more)}\n"
    answers = asked(choice_run, lines, tmp_path, capsys)
    assert [answer["choice"] for answer in answers] == ["Xena", "Xavi", "Xerxes"]
    assert [len(answer["probabilities"]) for answer in answers] == [2, 3, 3]
    assert answers[1]["choices"] == ["Xavi", "tu", "lo"]
    assert sum(answers[2]["probabilities"]) == pytest.approx(1)
    (tmp_path / "lines.txt").write_text("ba\tri\n")
    assert "line 1: 2 column(s)" in fails(predict, str(choice_run), str(tmp_path / "lines.txt"))


def test_an_interrupted_run_ends_the_same(squad_run, squad_data, tmp_path, monkeypatch, capsys) -> None:
    folder = tmp_path / "run"
    assert interrupted_at(20, TokenRows, monkeypatch, lambda: run(folder, squad_data, "squad2")) == 143
    assert not (folder / "predictions").exists()
    assert main([f"--config={folder / 'config.yaml'}"]) == 0
    assert lines_of(folder) == lines_of(squad_run)
    assert run(folder, squad_data, "squad2") == 0, "and once more, now that its threshold stands in config.yaml"
    for name in ("predictions.json", "nbest_predictions.json", "null_odds.json"):
        assert (folder / "predictions" / name).read_bytes() == (squad_run / "predictions" / name).read_bytes()
    seconds = {"seconds": 0, "timing": 0}
    assert {**results_of(folder), **seconds} == {**results_of(squad_run), **seconds}


@pytest.mark.parametrize(
    ("fixture", "architecture", "labels"),
    [("ner_run", "BertForTokenClassification", 5), ("squad_run", "BertForQuestionAnswering", None),
     ("choice_run", "BertForMultipleChoice", None)],
)  # fmt: skip
def test_a_run_is_handed_to_others(fixture, architecture, labels, request, tmp_path) -> None:
    folder: Path = request.getfixturevalue(fixture)
    own = bert.load(folder)
    own.save(tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["architectures"] == [architecture]
    assert labels is None or list(config["id2label"].values()) == ["O", "B-LOC", "I-LOC", "B-PER", "I-PER"]
    inputs = {"ner_run": ["ba Xena ri New York"], "squad_run": [("who ?", "ba Xavi")],
             "choice_run": [("ba ri", "tu", "Xena")]}[fixture]  # fmt: skip
    actual, expected = own.predict(inputs)[0], bert.load(tmp_path / "hf").predict(inputs)[0]
    assert str(actual) == str(expected) if fixture != "ner_run" else actual.entities == expected.entities


@pytest.mark.parametrize(
    ("recipe", "data"), [("conll2003", "ner_data"), ("squad", "squad_data"), ("swag", "choice_data")]
)
def test_every_way_to_fine_tune(recipe, data, request, tmp_path, capsys) -> None:
    """Several seeds over frozen features (paper 5.3); then frozen layers with a learning rate for each layer."""
    data = request.getfixturevalue(data)
    short = ("--training.epochs=1", "--training.eval_every=3")
    assert run(tmp_path / "seeds", data, recipe, *short, "--num_seeds=2", "--num_feature_layers=1", "--patience=1") == 0
    results = results_of(tmp_path / "seeds")
    assert (results["seeds"], set(results["dev"])) == ([0, 1], {"mean", "standard_deviation"})
    assert "of which" in capsys.readouterr().out
    frozen = ("--num_frozen_layers=1", "--optimizer.layerwise_lr_decay=0.9")
    assert run(tmp_path / "frozen", data, recipe, *short, *frozen) == 0
    assert "are trained" in capsys.readouterr().out
    bert.load(tmp_path / "seeds" / "seed-1").predict([])


@pytest.mark.parametrize(
    ("fixture", "split", "names"),
    [("squad_run", "dev", {"predictions.json", "nbest_predictions.json", "null_odds.json"}),
     ("squad_run", "test", {"test/predictions.json", "test/nbest_predictions.json", "test/null_odds.json"}),
     ("ner_run", "dev", {"dev.conll", "dev_types.tsv"}), ("choice_run", "dev", {"dev.tsv"})],
)  # fmt: skip
def test_a_split_is_predicted_byte_for_byte(fixture, split, names, request, tmp_path) -> None:
    """Some contexts, sentences and choices are longer than max_length."""
    folder: Path = request.getfixturevalue(fixture)
    assert predict([str(folder), split, "--output", str(tmp_path / "out")]) == 0
    written = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*.*")}
    assert names <= written
    for name in written:
        assert (tmp_path / "out" / name).read_bytes() == (folder / "predictions" / name).read_bytes(), name


LONG = " ".join(words(3, 60))
OWN: dict[str, tuple[str, list[str], list[dict[str, Any]]]] = {
    "pair": ("rte", [], [
        {"index": n, "sentence1": "ba ri" if n % 3 else LONG, "sentence2": LONG if n % 5 == 0 else "tu",
         "label": ("entailment", "not_entailment")[n % 2]} for n in range(24)]),
    "regression": ("regression", ["--data.score_range=[0, 4]", "--data.columns.label=stars"], [
        {"text": "ba ri" if n % 3 else LONG, "stars": n % 4 + 0.5} for n in range(24)]),
    "columns": ("classification", ["--data.columns.text_a=message", "--data.columns.id=key"], [
        {"key": f"k{n}", "message": "ba ri" if n % 3 else LONG, "label": "xy"[n % 2]} for n in range(24)]),
    "span": ("span", ["--data.columns.id=id"], [
        {"id": str(n), "question": "who ?", "context": f"{LONG if n % 3 else 'ba'} Xena", "answer": "Xena",
         "answer_start": len(f"{LONG if n % 3 else 'ba'} ")} for n in range(24)]),
    "embedding": ("embedding", [], [
        {"query": f"ba {FILLERS[n % 5]}", "positive": f"{LONG if n % 3 else 'ba'} {n}", "negatives": ["tu"] * (n % 2)}
        for n in range(24)]),
    "scored pairs": ("embedding", ["--embedding.loss=cosent"], [
        {"text_a": "ba ri" if n % 3 else LONG, "text_b": LONG if n % 5 == 0 else "tu", "score": n % 4}
        for n in range(24)]),
    "labelled texts": ("embedding", ["--embedding.loss=same_label", "--data.columns.text_a=text"], [
        {"text": f"{'ba ri' if n % 3 else LONG} {n}", "score": "xyz"[n % 3]} for n in range(24)]),
    "tagging": ("tagging", [], [
        {"words": ["Xena", *words(n, 60 if n % 3 else 4)], "tags": ["B-PER", *["O"] * (60 if n % 3 else 4)]}
        for n in range(24)]),
}  # fmt: skip


@pytest.mark.parametrize("name", OWN)
def test_a_split_of_any_task_is_predicted_byte_for_byte(name, tmp_path, capsysbinary) -> None:
    recipe, arguments, rows = OWN[name]
    data, folder = tmp_path / "data", tmp_path / "run"
    data.mkdir()
    for split in ("train", "dev"):
        if name == "pair":
            lines = ["\t".join(rows[0]), *("\t".join(map(str, row.values())) for row in rows)]
            (data / f"{split}.tsv").write_text("\n".join(lines) + "\n")
        else:
            (data / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run(folder, data, recipe, *arguments, "--training.epochs=1", "--data.buckets=[16, 32]") == 0
    capsysbinary.readouterr()
    assert predict([str(folder), "dev"]) == 0
    first = {"span": "predictions.json", "tagging": "dev.conll"}.get(name, "dev.tsv")
    assert capsysbinary.readouterr().out == (folder / "predictions" / first).read_bytes()
    if name == "tagging":
        scores = bert.load(folder).score(data / "dev.jsonl")
        of_run = results_of(folder)["dev"]
        assert {"f1", "accuracy"} <= scores.keys() <= of_run.keys()
        assert scores == pytest.approx({name: of_run[name] for name in scores}, abs=1e-6)
    if name in ("regression", "columns"):
        assert predict([str(folder), str(data / "dev.jsonl")]) == 0
        answers = [json.loads(line) for line in capsysbinary.readouterr().out.splitlines()]
        written = [line.split("\t") for line in (folder / "predictions" / "dev.tsv").read_text().splitlines()]
        key = "key" if name == "columns" else "index"
        assert written[0][0] == key
        for answer, row in zip(answers, written[1:], strict=True):
            assert answer.get(key, row[0]) == row[0]
            if name == "columns":
                assert answer["label"] == row[1]
                assert answer["probabilities"][row[1]] == pytest.approx(float(row[3]), abs=2e-6)
            else:
                assert answer["score"] == pytest.approx(min(max(float(row[1]), 0), 4), abs=2e-6)
