"""SQuAD: files read or refused, windows and their answers, n-best lists, the official files."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from bert import metrics
from bert.commands.arguments import parse
from bert.config import FinetuneConfig, TaskDataConfig
from bert.errors import UserError
from bert.runs.folder import open_run
from bert.tasks import find_task, make_task, question_answering
from bert.tasks.span_features import Answer, Answers, Example, Windows

LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *(f"##{letter}" for letter in LETTERS), *".?'("]
CLS, SEP = 2, 3


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Every letter is a token."""
    built = Tokenizer(models.WordPiece({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    built.normalizer = normalizers.BertNormalizer()
    built.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    built.add_special_tokens(WORDS[:5])
    return built


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
    assert "question q0: the answer 'Ada' does not stand at character 1 of its context, where there is 'da" in message


def test_a_file_to_predict_needs_no_answers(tmp_path):
    question = {"id": "q", "question": "who ?"}
    assert question_answering.read(write(tmp_path, question), labelled=False).examples[0].answers == ()
    assert "question q: no 'answers'" in error_of(write(tmp_path, question))
    assert "question q1: no answers: list one, or set is_impossible" in error_of(write(tmp_path, entry(answers=())))


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
    with pytest.raises(UserError, match=r"question q2: it has no answer, as in SQuAD v2\.0: use the task squad2"):
        find_task("squad").read(tmp_path, "test")


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([], "holds no questions"),
        ([{"question": "who ?"}], "data[0].paragraphs[0].qas[0]: no 'id'"),
        ([entry(id=7)], "qas[0]: 'id' is '7': it must be a text"),
        ([{"id": "q"}], "question q: no 'question'"),
        ([entry(question=" ")], "question q1: the question is empty"),
        ([entry(), entry()], "question q1: the id occurs twice"),
        ([entry(is_impossible=True)], "question q1: is_impossible is true but there are answers"),
        ([entry(is_impossible=0)], "question q1: 'is_impossible' is '0': it must be true or false"),
        ([entry(answers=[("Ada", "0")])], "question q1: 'answer_start' is '0': it must be a whole number"),
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
    assert "cannot be read (No such file or directory)" in error_of(path)
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


def example(context: str, answer: str | None = None, question: str = "q", id: str = "q1") -> Example:
    answers = () if answer is None else (Answer(answer, context.index(answer)),)
    return Example(id, question, context, answers, answer is None)


def rows(windows: Windows) -> list[list[str]]:
    return [[WORDS[id] for id in row] for row in np.split(windows.ids, windows.offsets[1:-1])]


def test_a_short_context_is_one_row(tokenizer):
    windows = question_answering.make_qa_features(tokenizer, [example("c (De f", "De")], 16, max_query_length=4)
    assert rows(windows) == [["[CLS]", "q", "[SEP]", "c", "(", "d", "##e", "f", "[SEP]"]]
    assert windows.labels.tolist() == [[5, 6]]
    assert windows.char_starts.tolist() == [-1, -1, -1, 0, 2, 3, 4, 6, -1]
    assert windows.char_ends.tolist() == [-1, -1, -1, 1, 3, 4, 5, 7, -1]
    assert windows.is_max_context.tolist() == [False] * 3 + [True] * 5 + [False]
    assert windows.segment_a_lengths.tolist() == [3]
    batch = windows.batch(np.array([0]), 12, 2)
    assert batch["token_type_ids"][0].tolist() == [0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 0, 0]
    assert batch["labels"].tolist() == [[5, 6], [0, 0]]
    assert batch["weights"].tolist() == [1, 0]


def test_a_long_context_is_read_through_windows(tokenizer):
    """Ten tokens through windows of six, two apart; by hand, after run_squad.py's rule."""
    windows = question_answering.make_qa_features(
        tokenizer, [example("a b c d e f g h i j", "g h")], 10, 2, max_query_length=1
    )
    assert [row[3:-1] for row in rows(windows)] == [list("abcdef"), list("cdefgh"), list("efghij")]
    assert windows.examples.tolist() == [0, 0, 0]
    # Not in the first, whole in the others.
    assert windows.labels.tolist() == [[0, 0], [7, 8], [5, 6]]
    # d has 2 tokens on its lesser side in the first window and 1 in the second; e has 1, 2 and 0; g has 1 and 2.
    shown = [row.tolist() for row in np.split(windows.is_max_context, windows.offsets[1:-1])]
    shown = ["".join(word for word, best in zip(row, own, strict=True) if best) for row, own in
             zip(rows(windows), shown, strict=True)]  # fmt: skip
    assert shown == ["abcd", "ef", "ghij"]


def test_every_token_has_its_most_context_in_one_window(tokenizer):
    text = " ".join(LETTERS * 3)
    for max_length, stride in [(20, 3), (20, 16), (20, 99), (47, 7), (100, 1)]:
        windows = question_answering.make_qa_features(
            tokenizer, [example(text), example("a", "a", id="q2")], max_length, stride, 1
        )
        starts = windows.char_starts[windows.is_max_context]
        assert sorted(starts.tolist()) == sorted([*range(0, len(text), 2), 0])
        assert windows.lengths.max() <= max_length


def test_questions_are_cut_and_share_their_context(tokenizer):
    examples = [example("a b", "b", "c d e f"), example("a b", "a", "x", "q2")]
    windows = question_answering.make_qa_features(tokenizer, examples, 9, max_query_length=2)
    assert rows(windows) == [
        ["[CLS]", "c", "d", "[SEP]", "a", "b", "[SEP]"],
        ["[CLS]", "x", "[SEP]", "a", "b", "[SEP]"],
    ]
    assert windows.labels[:, 0].tolist() == [5, 3]


def test_a_context_without_tokens_has_a_row_and_no_answer(tokenizer):
    examples = [example("\u200b", None), example("a", "a", id="q2")]
    windows = question_answering.make_qa_features(tokenizer, examples)
    assert rows(windows)[0] == ["[CLS]", "q", "[SEP]", "[SEP]"]
    logits = np.ones((2, 5))
    assert question_answering.decode_answers(examples, windows, logits, logits).texts == {"q1": "", "q2": "a"}
    assert question_answering.decode_answers(
        examples, windows, logits, logits, null_score_diff_threshold=9.0
    ).texts == {
        "q1": "",
        "q2": "a",
    }


def test_special_tokens_in_a_text_are_prose(tokenizer):
    windows = question_answering.make_qa_features(tokenizer, [example("a [SEP] b", "b", "[MASK]")])
    assert np.isin(windows.ids, [CLS, SEP]).sum() == 3


def test_lengths_that_leave_no_room_are_refused(tokenizer):
    with pytest.raises(UserError, match="a question of 64 tokens leaves no room for its context in a row of 64"):
        question_answering.make_qa_features(tokenizer, [example("a", "a")], 64)
    with pytest.raises(UserError, match="doc_stride is 0"):
        question_answering.make_qa_features(tokenizer, [example("a", "a")], doc_stride=0)


def test_the_tokenizer_of_the_caller_stays_as_it_is(tokenizer):
    tokenizer.enable_truncation(3)
    before = tokenizer.to_str()
    assert question_answering.make_qa_features(tokenizer, [example("a b c d e f", "b")]).lengths.tolist() == [10]
    assert tokenizer.to_str() == before


def oracle(windows: Windows) -> tuple[np.ndarray, np.ndarray]:
    """Logits that are 10 at the right places and 0 elsewhere."""
    logits = np.zeros((2, len(windows), windows.lengths.max()), np.float32)
    for half, places in zip(logits, windows.labels.T, strict=True):
        half[np.arange(len(windows)), places] = 10
    return logits[0], logits[1]


def test_answers_come_back_as_they_stand_in_the_context(tokenizer):
    """White space, case, accents, punctuation: all as written, whatever the tokens are; and half a word widened."""
    context = "abc d\u00e9  F\tghi. J'k  (Lm) o\u0308p\u00a0qe\u0301 " + " r s t" * 9
    wanted = ["abc d\u00e9", "d\u00e9  F", "F\tghi", "J'k", "Lm", "o\u0308p", "qe\u0301", "s t"]
    examples = [example(context, answer, id=answer) for answer in wanted]
    for max_length in (99, 20, 14):
        windows = question_answering.make_qa_features(tokenizer, examples, max_length, 3, 1)
        found = question_answering.decode_answers(examples, windows, *oracle(windows))
        assert found.texts == {answer: answer for answer in wanted}
        for id, best in found.best.items():
            assert context[best.start : best.end] == id
    whole = Tokenizer(
        models.WordPiece({"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4}, unk_token="[UNK]")
    )
    whole.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    windows = question_answering.make_qa_features(whole, examples := [example("in the 1990s .", "1990")])
    assert question_answering.decode_answers(examples, windows, *oracle(windows)).texts == {"q1": "1990s"}


def slow_n_best(windows: Windows, row: int, start: np.ndarray, end: np.ndarray, longest: int) -> list[tuple]:
    """Every span of a row, best first."""
    tokens = range(windows.lengths[row])
    offset = windows.offsets[row]
    return sorted(
        (
            (float(start[row, first] + end[row, last]), first, last)
            for first in tokens
            for last in tokens[first : first + longest]
            if windows.is_max_context[offset + first] and windows.char_starts[offset + last] >= 0
        ),
        reverse=True,
    )


def test_n_best_lists_are_those_of_trying_every_span(tokenizer, monkeypatch):
    monkeypatch.setattr("bert.tasks.span_features.ROWS_SCORED_AT_ONCE", 2)
    random = np.random.default_rng(5)
    texts = [" ".join(random.choice(list(LETTERS), 26, replace=False)) for _ in range(3)]
    examples = [example(text, None, id=str(number)) for number, text in enumerate([*texts, "a"])]
    windows = question_answering.make_qa_features(tokenizer, examples, 16, 4, 1)
    start, end = random.normal(size=(2, len(windows), 20)).astype(np.float32)
    found = question_answering.decode_answers(
        examples, windows, start, end, n_best_size=7, max_answer_length=5, null_score_diff_threshold=0.5
    )
    for number, one in enumerate(examples):
        own = np.flatnonzero(windows.examples == number)
        best = sorted((span for row in own for span in slow_n_best(windows, row, start, end, 5)), reverse=True)[:6]
        null = min(float(start[row, 0]) + float(end[row, 0]) for row in own)
        listed = found.n_best[one.id]
        scores = [candidate.start_logit + candidate.end_logit for candidate in listed]
        assert scores == pytest.approx(sorted([null, *(score for score, _, _ in best)], reverse=True))
        assert len({candidate.text for candidate in listed}) == len(listed) == len(best) + 1
        shares = np.exp(scores) / np.exp(scores).sum()
        assert [candidate.probability for candidate in listed] == pytest.approx(shares)
        assert found.null_odds[one.id] == pytest.approx(null - best[0][0])
        assert found.texts[one.id] == ("" if null - best[0][0] > 0.5 else found.best[one.id].text)


def test_equal_texts_count_once_and_the_better_stays(tokenizer):
    examples = [example("a b a", "a")]
    windows = question_answering.make_qa_features(tokenizer, examples, 16, max_query_length=1)
    start = np.array([[0, 0, 0, 1.0, 0, 3.0, 0]])
    listed = question_answering.decode_answers(examples, windows, start, np.zeros((1, 7)), max_answer_length=1).n_best[
        "q1"
    ]
    assert [(candidate.text, candidate.start) for candidate in listed] == [("a", 4), ("b", 2)]
    assert [candidate.probability for candidate in listed] == pytest.approx([1 / (1 + np.exp(-3)), 1 / (1 + np.exp(3))])


def test_no_answer_is_given_where_the_odds_pass_the_threshold(tokenizer):
    """The null score is the least of the windows'; a threshold moves the answer, not the lists."""
    examples = [example("a b c d e f g h", None)]
    windows = question_answering.make_qa_features(tokenizer, examples, 8, 4, 1)
    start, end = np.zeros((2, 2, 8))
    start[:, 0], start[1, 4] = [5.0, 2.0], 1.0
    for threshold, text in [(0.9, ""), (1.0, "f"), (1.1, "f")]:
        found = question_answering.decode_answers(
            examples, windows, start, end, 1, 1, null_score_diff_threshold=threshold
        )
        assert found.null_odds == {"q1": 1.0}
        assert found.texts == {"q1": text}
        assert [candidate.text for candidate in found.n_best["q1"]] == ["", "f"]
        assert found.n_best["q1"][0][1:3] == (-1, -1)


def test_logits_of_other_rows_are_refused(tokenizer):
    examples = [example("a b", "a")]
    windows = question_answering.make_qa_features(tokenizer, examples)
    for shape in [(1, 5), (2, 6)]:
        with pytest.raises(ValueError, match="wanted"):
            question_answering.decode_answers(examples, windows, np.zeros(shape), np.zeros(shape))


def test_the_official_files(tokenizer, tmp_path):
    examples = [example("Ada met Bob.", "Bob"), example("x y", None, id="q2")]
    windows = question_answering.make_qa_features(tokenizer, examples)
    paths = question_answering.write_predictions(
        tmp_path / "v1", question_answering.decode_answers(examples, windows, *oracle(windows))
    )
    assert [path.name for path in paths] == ["predictions.json", "nbest_predictions.json"]
    assert json.loads(paths[0].read_text())["q1"] == "Bob"

    found = question_answering.decode_answers(examples, windows, *oracle(windows), null_score_diff_threshold=0.0)
    paths = question_answering.write_predictions(tmp_path / "v2", found)
    written = {path.name: json.loads(path.read_text()) for path in paths}
    assert written["predictions.json"] == {"q1": "Bob", "q2": ""}
    assert written["null_odds.json"] == {"q1": -20.0, "q2": 20.0}
    best = written["nbest_predictions.json"]["q1"][0]
    assert best == {"text": "Bob", "probability": best["probability"], "start_logit": 10.0, "end_logit": 10.0}
    assert best["probability"] > 0.99


def test_the_best_threshold_is_found_on_answers_that_are_ones(tokenizer):
    examples = [example("a b", "a"), example("a b", None, id="q2")]
    windows = question_answering.make_qa_features(tokenizer, examples)
    found = question_answering.decode_answers(examples, windows, *oracle(windows), null_score_diff_threshold=-99.0)
    best = {id: candidate.text for id, candidate in found.best.items()}
    thresholds = metrics.best_null_threshold(best, found.null_odds, question_answering.references(examples))
    assert thresholds == {"best_exact": 100, "best_exact_thresh": -20, "best_f1": 100, "best_f1_thresh": -20}
    again = Answers(found.n_best, found.null_odds, thresholds["best_f1_thresh"])
    assert again.texts == {"q1": "a", "q2": ""}


RECIPE = "task: squad2\ninit: none\ndata: {dir: x, max_length: 16, max_query_length: 4}\ntraining: {epochs: 1}\n"


def config_of(path: Path, *arguments: str) -> FinetuneConfig:
    """What ``bert finetune --config path`` takes."""
    return parse(FinetuneConfig, [f"--config={path}", *arguments], prog="", description="", default_recipe=None)[0]


def tune(config: FinetuneConfig, tokenizer: Tokenizer, null: float) -> float:
    """The way of a run from its configuration to the threshold, for a model whose null scores are about ``null``."""
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
    given = config_of(tmp_path / "recipe.yaml", f"--output_dir={first}", "--data.null_score_diff_threshold=-1.5")
    assert tune(given, tokenizer, 0) == -1.5
    repeat = config_of(first / "config.yaml", f"--output_dir={again}")
    assert tune(repeat, tokenizer, 20) == -1.5
    write(tmp_path, entry()).rename(tmp_path / "dev-v2.0.json")
    told = "data.null_score_diff_threshold is set to -1.5: none is tuned on dev"
    assert told in make_task(repeat).read(tmp_path, "dev").notes[-1]
    unset = FinetuneConfig(task="squad2", data=TaskDataConfig())
    assert make_task(unset).read(tmp_path, "dev").notes == ()
