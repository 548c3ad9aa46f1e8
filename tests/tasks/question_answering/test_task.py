"""SQuAD: accepted and rejected files, and the threshold of a run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import softmax
from tokenizers import Tokenizer

import bert
from bert.commands.cli.arguments import parse
from bert.commands.predictions import predict_command as predict
from bert.config import FinetuneConfig, TaskDataConfig
from bert.errors import UserError
from bert.model.heads import BertForQuestionAnswering
from bert.runs.folder import open_run
from bert.tasks import find_task, make_task, question_answering
from bert.tasks.question_answering import Answer, Example, QuestionAnsweringTask
from bert.tasks.registry import published_task
from tests.messages import has_all
from tests.tasks.letter_examples import example, question_tokenizer
from tests.tiny_models import CONFIG, model_of


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return question_tokenizer()


def entry(id: str = "q1", question: str = "who ?", answers: Any = (("Ada", 0),), **more: Any) -> dict[str, Any]:
    listed = [{"text": text, "answer_start": start} for text, start in answers]
    return {"id": id, "question": question, "answers": listed, **more}


def write(folder: Path, *entries: Any, context: Any = "Ada met Bob.") -> Path:
    content = {"version": "1.1", "data": [{"title": "t", "paragraphs": [{"context": context, "qas": list(entries)}]}]}
    path = folder / "dev.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def error_of(path: Path, **arguments: Any) -> str:
    with pytest.raises(UserError) as caught:
        question_answering.read(path, **arguments)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(str(path))
    return str(caught.value)


def test_questions_with_and_without_answers(tmp_path):
    path = write(tmp_path, entry(answers=[("Ada", 0), ("Bob", 8)]), entry("q2", answers=(), is_impossible=True))
    dataset = question_answering.read(path)
    assert dataset.examples == [
        Example("q1", "who ?", "Ada met Bob.", (Answer("Ada", 0), Answer("Bob", 8))),
        Example("q2", "who ?", "Ada met Bob.", (), is_impossible=True),
    ]
    assert dataset.misplaced == dataset.skipped == []
    assert question_answering.references(dataset.examples) == {"q1": ["Ada", "Bob"], "q2": []}


def test_answers_that_do_not_stand_where_they_should_are_counted(tmp_path):
    wrong = [("Ada", 1), ("ada", 0), ("Bob.", 900), ("Ada", -12), ("", 0), (" ", 3)]
    path = write(tmp_path, *(entry(f"q{number}", answers=[answer]) for number, answer in enumerate(wrong)),
                 entry("half", answers=[("Bob", 0), ("Bob", 8)]), entry("good"))  # fmt: skip
    dataset = question_answering.read(path)
    assert dataset.misplaced == ["q0", "q1", "q2", "q3", "q4", "q5", "half"]
    assert dataset.skipped == ["q0", "q1", "q2", "q3", "q4", "q5"]
    assert [example.id for example in dataset.trainable] == ["half", "good"]
    assert dataset.trainable[0].answer == Answer("Bob", 8)
    assert question_answering.references(dataset.examples)["q0"] == ["Ada"], "its text is a right answer all the same"
    message = error_of(path, strict=True)
    assert has_all(message, "question q0: the answer 'Ada' does not stand at character 1", "there is 'da")


def test_a_file_to_predict_needs_no_answers(tmp_path):
    question = {"id": "q", "question": "who ?"}
    assert question_answering.read(write(tmp_path, question), labelled=False).examples[0].answers == ()
    assert "question q: no 'answers'" in error_of(write(tmp_path, question))
    assert has_all(error_of(write(tmp_path, entry(answers=()))), "question q1", "is_impossible")


def test_a_test_split_is_labelled_where_every_question_has_an_answer_or_is_impossible(tmp_path):
    """Then it is scored; one question without either, and it is only predicted."""
    task = find_task("squad2")
    answered, impossible = entry(), entry("q2", answers=(), is_impossible=True)
    for entries, labelled in [
        ((answered, impossible), True),
        ((answered, impossible, entry("q3", answers=())), False),
        ((answered, {"id": "q3", "question": "who ?"}), False),
        ((entry("q3", answers=(), is_impossible=False),), False),
    ]:
        write(tmp_path, *entries).rename(tmp_path / "test-v2.0.json")
        assert task.read(tmp_path, "test").labelled is labelled
    write(tmp_path, answered, impossible).rename(tmp_path / "test-v1.1.json")
    with pytest.raises(UserError, match=r"question q2.*SQuAD v2\.0.*task squad2"):
        find_task("squad").read(tmp_path, "test")


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([], "holds no questions"),
        ([{"question": "who ?"}], "data[0].paragraphs[0].qas[0]: no 'id'"),
        ([entry(id=7)], "qas[0]: 'id' is '7'"),
        ([{"id": "q"}], "question q: no 'question'"),
        ([entry(question=" ")], "question q1: the question is empty"),
        ([entry(), entry()], "question q1: the id occurs twice"),
        ([entry(is_impossible=True)], "question q1: is_impossible is true"),
        ([entry(is_impossible=0)], "question q1: 'is_impossible' is '0'"),
        ([entry(answers=[("Ada", "0")])], "question q1: 'answer_start' is '0'"),
        ([entry(answers=[("Ada", False)])], "question q1: 'answer_start' is 'False'"),
        ([entry() | {"answers": ["Ada"]}], "question q1: no 'text'"),
        (["who ?"], "qas[0]: no 'id'"),
    ],
)
def test_what_is_wrong_is_told_with_file_and_question(tmp_path, entries, words):
    assert words in error_of(write(tmp_path, *entries))


LINES = """{"version": "1.1", "data": [
  {"title": "\\"id\\": \\"q1\\" [{", "paragraphs": [
    {"qas": [
      {"answers": [{"answer_start": 0, "text": "Ada"}],
       "question": "who ?",
       "id": "q1"},
      {"question": "who ?", "answers": [{"answer_start": 0, "text": "Ada"}],
       "id": "q\\u00e9"}
     ], "context": "Ada met Bob."}
  ]},
  {"paragraphs": [
    {"context": "Ada met Bob.", "qas": [
      {"id": "q3", "question": "who ?", "answers": [
        {"text": "Ada", "answer_start": 0}]}
    ]}
  ]}
]}
"""


"""Three questions; the title looks like the first one's id."""


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('"id": "q3"', '"id": "q1"', "question q1: the id occurs twice: give"),
        ('"id": "q3"', '"id": "qé"', "question qé: the id occurs twice: give"),
        ('"id": "q3", ', "", "data[1].paragraphs[0].qas[0]: no 'id'"),
        ('"id": "q3"', '"id": 3', "data[1].paragraphs[0].qas[0]: 'id' is '3'"),
        ('{"id": "q3", "question": "who ?"', '{"id": "q3"', "question q3: no 'question'"),
        ('"answer_start": 0}]}\n', '"answer_start": 9}]}\n', "question q3: the answer 'Ada' does not stand"),
        ('"question": "who ?",\n', '"question": "",\n', "question q1: the question is empty"),
        ('{"context": "Ada met Bob.", "qas"', '{"qas"', "data[1].paragraphs[0]: no 'context'"),
        ('  {"paragraphs"', '  {"paragraph"', "data[1]: no 'paragraphs'"),
        ('"data"', '"date"', ".json: no 'data'"),
        ('"qas": [\n', '"qas": 7, "qas": [\n', "question q3: the answer 'Ada' does not stand"),
        ('"id": "q3"', '"id": "\\ud800"', "question ?: the answer 'Ada' does not stand"),
    ],
)
def test_errors_name_the_question_or_its_index(tmp_path, old, new, told):
    path = tmp_path / "dev.json"
    assert old in LINES
    text = LINES.replace(old, new, 1)
    if told.endswith("does not stand"):
        text = text.replace('"answer_start": 0}]}\n', '"answer_start": 9}]}\n')
    path.write_text(text, encoding="utf-8-sig")
    assert told in error_of(path, strict=True).replace(f"{path}", path.name)


def test_files_that_are_not_squad(tmp_path):
    path = tmp_path / "dev.json"
    assert "cannot be read" in error_of(path)
    for content, words in [
        (b'{"data":\n [', "line 2: not JSON"),
        (b"[]", ".json: no 'data'"),
        (b'{"data": 3}', ".json: 'data' is '3': it must be a list"),
        (b'{"data": [{}]}', "data[0]: no 'paragraphs'"),
        (b'{"data": [{"paragraphs": [{"qas": []}]}]}', "data[0].paragraphs[0]: no 'context'"),
        (b'{"data": "\xe9"}', "byte 10: not UTF-8"),
    ]:
        path.write_bytes(content)
        assert words in error_of(path)
    path.write_bytes(b"\xef\xbb\xbf" + write(tmp_path, entry()).read_bytes())
    assert len(question_answering.read(path).examples) == 1


RECIPE = "task: squad2\ninit: none\ndata: {dir: x, max_length: 16, max_query_length: 4}\ntraining: {epochs: 1}\n"


def config_of(path: Path, *arguments: str) -> FinetuneConfig:
    """Configuration of ``bert finetune --config path``."""
    return parse(FinetuneConfig, [f"--config={path}", *arguments], prog="", description="", default_recipe=None)[0]


def tune(config: FinetuneConfig, tokenizer: Tokenizer, null: float) -> float:
    """Runs from the configuration to the threshold, for a model whose null scores are about ``null``."""
    with open_run(config) as run:
        task = make_task(run.config)
        run = run.save_config(dataclasses.replace(run.config, data=task.to_config(run.config.data)))
        examples = [example("x", "x", id="q1"), example("x", None, id="q2")]
        dev = question_answering.Dataset(examples, [])
        rows = task.features(tokenizer, dev, run.config.data)
        outputs = [np.zeros((length, 2), np.float32) for length in rows.lengths]
        outputs[0][0], outputs[1][0] = null - 1, null + 1
        tuned = task.tune(outputs, rows, dev)
        answers = tuned.predict(outputs, rows, dev)
        if config.data.null_score_diff_threshold is None:
            assert tuned.score(answers, dev)["f1"] == 100, "the threshold is that of this model"
        assert answers.null_score_diff_threshold == tuned.to_config(run.config.data).null_score_diff_threshold
        return answers.null_score_diff_threshold


@pytest.mark.medium
def test_a_repeated_run_searches_its_own_threshold(tokenizer, tmp_path):
    """``--config runs/squad2/config.yaml --seed 1 --output_dir runs/again``: another model, another threshold."""
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    first, again = tmp_path / "squad2", tmp_path / "again"
    recipe = config_of(tmp_path / "recipe.yaml", f"--output_dir={first}")
    assert tune(recipe, tokenizer, 0) == 0
    repeat = config_of(first / "config.yaml", "--seed=1", f"--output_dir={again}")
    assert repeat.data.null_score_diff_threshold is None
    assert tune(repeat, tokenizer, 20) == 40
    for config in (recipe, config_of(first / "config.yaml")):  # both resume
        assert tune(config, tokenizer, 0) == 0


def test_a_threshold_that_is_set_stays_in_the_run_and_its_repeats_and_is_told(tokenizer, tmp_path):
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    first, again = tmp_path / "squad2", tmp_path / "again"
    arguments = config_of(tmp_path / "recipe.yaml", f"--output_dir={first}", "--data.null_score_diff_threshold=-1.5")
    assert tune(arguments, tokenizer, 0) == -1.5
    repeat = config_of(first / "config.yaml", f"--output_dir={again}")
    assert tune(repeat, tokenizer, 20) == -1.5
    write(tmp_path, entry()).rename(tmp_path / "dev-v2.0.json")
    told = "data.null_score_diff_threshold is set to -1.5: none is tuned on dev"
    assert told in make_task(repeat).read(tmp_path, "dev").notes[-1]
    unset = FinetuneConfig(task="squad2", data=TaskDataConfig())
    assert make_task(unset).read(tmp_path, "dev").notes == ()


CONTEXT = "a b c. d e f g h"


def answers_of(tokenizer: Tokenizer, task: QuestionAnsweringTask, null: float, spans: dict[str, float]) -> list[Any]:
    """The answers to one question of a model with these scores of [CLS] and of one-letter spans; others have -50."""
    dataset = task.examples_from_inputs([("q", CONTEXT)])
    features = task.features(tokenizer, dataset, TaskDataConfig(max_length=32, max_query_length=4))
    logits = np.full((int(features.lengths[0]), 2), -25.0)
    logits[0] = null / 2
    for text, score in spans.items():
        logits[np.flatnonzero(features.char_starts == CONTEXT.index(text))[0]] = score / 2
    return task.format_predictions(task.predict([logits], features, dataset), dataset)


def test_the_share_of_an_answer_counts_no_answer(tokenizer):
    published = published_task("question_answering", "published", (), None)
    for task in (published, find_task("squad")):
        [answer] = answers_of(tokenizer, task, null=12.0, spans={"e": 2.0})
        assert (answer.answer, answer.start, answer.end) == ("e", 9, 10)
        assert answer.probability == pytest.approx(np.exp(-10) / (1 + np.exp(-10)), rel=1e-4)
    [sure] = answers_of(tokenizer, published, null=-12.0, spans={"e": 2.0})
    assert sure.probability == pytest.approx(1.0, abs=1e-4)
    [empty] = answers_of(
        tokenizer, published.with_answer_settings({"null_score_diff_threshold": 0}), null=12.0, spans={"e": 2.0}
    )
    assert (empty.answer, empty.start) == ("", None)
    assert empty.probability == pytest.approx(1.0, abs=1e-4)


def test_the_best_answers_are_listed(tokenizer):
    task = find_task("squad").with_answer_settings({"n_best": 2, "max_answer_length": 1})
    spans = {"e": 2.0, "b": 3.0, "c": 1.0}
    [result] = answers_of(tokenizer, task, null=2.0, spans=spans)
    total = np.exp([2.0, 3.0, 1.0, 2.0]).sum()  # the last one for no answer
    assert [answer.answer for answer in result] == ["b", "e"]
    assert [answer.probability for answer in result] == pytest.approx([np.exp(3) / total, np.exp(2) / total], rel=1e-3)
    task = task.with_answer_settings({"n_best": 3, "null_score_diff_threshold": 0.0})
    [result] = answers_of(tokenizer, task, null=2.5, spans=spans)
    assert [answer.answer for answer in result] == ["b", "", "e"]


def test_the_longest_answer_is_a_setting(tokenizer):
    long = {"e f": 0.0}
    [answer] = answers_of(tokenizer, find_task("squad").with_answer_settings({"max_answer_length": 1}), -50, long)
    assert len(answer.answer) == 1


@pytest.mark.parametrize(
    "settings",
    [{"n_best": 0}, {"doc_stride": 0}, {"max_answer_length": 1.5}, {"null_score_diff_threshold": float("nan")}],
)
def test_a_setting_that_cannot_work_is_an_error(settings):
    with pytest.raises(UserError, match=next(iter(settings))):
        find_task("squad").with_answer_settings(settings)


@pytest.mark.medium
def test_settings_of_answers_are_arguments_and_options(tmp_path, fails):
    model = model_of(
        tmp_path, BertForQuestionAnswering(CONFIG), published_task("question_answering", "published", (), None)
    )
    pair = ("ba", "ko ri tu ba ko ri tu ba ko ri tu")
    [one], [several] = model.predict([pair]), model.predict([pair], n_best=3)
    assert several[0] == one and len(several) == 3
    [empty] = model.predict([pair], null_score_diff_threshold=-1e9)
    assert empty.answer == ""
    short = ("ba", "ko ri")
    [ranked] = model.predict([short], n_best=99, null_score_diff_threshold=0.0)
    start, end = np.moveaxis(np.asarray(model.apply(**model.tokenize([short])))[0], -1, 0)
    spans = model.tokenizer.encode(short[1], add_special_tokens=False).offsets
    before = len(start) - 1 - len(spans)  # [CLS], the question and [SEP]
    best: dict[str, float] = {"": start[0] + end[0]}
    for first, (begin, _) in enumerate(spans):
        for last, (_, stop) in enumerate(spans[first:], first):
            score = start[before + first] + end[before + last]
            best[short[1][begin:stop]] = max(best.get(short[1][begin:stop], -np.inf), score)
    expected = dict(zip(best, softmax(list(best.values())), strict=True))  # with the probability of no answer
    assert {answer.answer: answer.probability for answer in ranked} == pytest.approx(expected, rel=1e-4)
    [windows] = model.predict([pair], doc_stride=1, max_answer_length=1)
    assert len(windows.answer.split()) == 1
    with pytest.raises(UserError, match="n_best is for question answering models"):
        dataclasses.replace(model, task=find_task("sst2")).predict(["ba"], n_best=2)
    model.save(tmp_path / "out")
    [several] = bert.load(tmp_path / "out").predict([pair], n_best=2)
    rows = tmp_path / "in.txt"
    rows.write_text("\t".join(pair) + "\n")
    assert predict([str(tmp_path / "out"), str(rows), "--n_best", "2", f"--output={tmp_path / 'a.jsonl'}"]) == 0
    [line] = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert [answer["answer"] for answer in line["answers"]] == [answer.answer for answer in several]
    assert "--n_best is for inputs" in fails(predict, str(tmp_path / "out"), "dev", "--n_best=2")
    with pytest.raises(UserError, match="doc_stride is 0"):
        predict([str(tmp_path / "out"), str(rows), "--doc_stride=0"])
