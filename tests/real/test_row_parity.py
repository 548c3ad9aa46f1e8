"""Whole rows and whole answers against transformers' own preprocessing and pipelines, for every kind of input.

Models are small and random, texts hostile. Of each family: BERT cased and uncased with the published vocabularies,
RoBERTa with a small byte-level one, and the vocabulary of a sentence-transformers folder.
"""

from __future__ import annotations

import dataclasses
import json
import random
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bert
from bert.commands.finetune import main
from bert.config import DataConfig
from bert.data.pretraining.build import build_examples
from bert.data.pretraining.dataset import open_rows
from bert.tasks.token_classification import CLITICS, split_text
from bert.tokenizer.vocabulary import load_tokenizer
from tests.real.hf_models import draw_weights
from tests.real.vocabularies import train_merges

pytestmark = pytest.mark.real

torch = pytest.importorskip("torch", reason="needs the extra `torch`")
transformers = pytest.importorskip("transformers", reason="needs the extra `torch`")

LENGTH = 48
LABELS = ("O", "B-X", "I-X")
FAMILIES = ("cased", "uncased", "roberta", "roberta-prefix-space", "sentence-transformers")
WORDS = (
    "the", "The", "THE", "cat", "sat", "on", "mat", "don't", "U.S.", "3.14", "naïve", "café", "cafe\u0301", "Straße",
    "İstanbul", "ﬁne", "½", "你好", "日本語の", "ελληνικά", "кириллица", "العربية", "हिन्दी", "ไทย", "👩\u200d👧", "😀",
    "e-mail", "a_b", "C++", "http://x.y/z?q=1", "@you", "#tag", "...", "—", "“q”", "\u200bzero", "soft\u00adhyphen",
    "x\u0301\u0302", "Ⅷ", "…", "ǅ", "supercalifragilistic", "a" * 30,
)  # fmt: skip
SPACES = (" ", " ", " ", "  ", "\t", "\n", "\u00a0", "\u3000", "")


def hostile(seed: int, words: int) -> str:
    """Words of many scripts with all kinds of white space between, around and missing."""
    draw = random.Random(seed)
    return "".join(draw.choice(WORDS) + draw.choice(SPACES) for _ in range(words)) + draw.choice(("", " ", "."))


TEXTS = [hostile(seed, 1 + seed % 9 + 20 * (seed % 8 == 7)) for seed in range(40)] + ["a", " a", "a ", "."]
PAIRS = [(TEXTS[i], hostile(100 + i, 1 + i % 7)) for i in range(len(TEXTS))]


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory) -> Path:
    """RoBERTa's files: vocab.json, merges.txt."""
    folder = tmp_path_factory.mktemp("byte-level")
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    built = train_merges(700, special, [hostile(seed, 40) for seed in range(200)])
    built.model.save(str(folder))
    return folder


Make = Callable[..., Path]


@pytest.fixture(params=FAMILIES)
def family(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def make(shared, byte_level, tmp_path_factory) -> Make:
    """Writes a random model of a family and an architecture, with transformers and its tokenizer, into a folder."""

    def write(family: str, architecture: str, **settings: Any) -> Path:
        folder = tmp_path_factory.mktemp(f"{family}-{architecture}")
        if family.startswith("roberta"):
            tokenizer = transformers.RobertaTokenizer.from_pretrained(
                byte_level, add_prefix_space=family.endswith("prefix-space")
            )
        elif family == "sentence-transformers":
            tokenizer = transformers.AutoTokenizer.from_pretrained(shared / "models" / "all-MiniLM-L6-v2")
        else:
            tokenizer = transformers.BertTokenizer.from_pretrained(
                shared / "data" / "vocab" / f"bert-base-{family}", do_lower_case=family == "uncased"
            )
        roberta = family.startswith("roberta")
        kind = transformers.RobertaConfig if roberta else transformers.BertConfig
        sizes = {
            "vocab_size": len(tokenizer),
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 48,
            "max_position_embeddings": LENGTH + 2 * roberta,
            "type_vocab_size": 1 if roberta else 2,
            "pad_token_id": tokenizer.pad_token_id,
            **settings,
        }
        torch.manual_seed(0)
        name = f"{'Roberta' if roberta else 'Bert'}For{architecture}"
        # far from zero, so that answers depend on every token
        draw_weights(getattr(transformers, name)(kind(**sizes)), 0.2).save_pretrained(folder)
        tokenizer.model_max_length = LENGTH
        tokenizer.save_pretrained(folder)
        return folder

    return write


@pytest.fixture(autouse=True)
def _one_length(monkeypatch) -> None:
    """Every input is padded to the same length: a model is compiled once for each batch size."""
    monkeypatch.setattr("bert.inference.compiled.BUCKETS", (LENGTH,))


def rows_of(features: Any) -> list[list[int]]:
    return [row.tolist() for row in np.split(features.ids, features.offsets[1:-1])]


def labelled(labels: tuple[str, ...]) -> dict[str, Any]:
    return {"id2label": dict(enumerate(labels)), "label2id": {label: i for i, label in enumerate(labels)}}


def test_masks_are_filled_alike(make, family) -> None:
    folder = make(family, "MaskedLM")
    theirs, ours = transformers.pipeline("fill-mask", str(folder), top_k=4), bert.load(folder)
    mask = theirs.tokenizer.mask_token
    for text in TEXTS[:7]:
        for given in (f"{text} {mask} .", f"{mask}{text[:20]}", f"a{mask} {text[:9]}\n {mask}"):
            expected = theirs(given)
            expected = expected if isinstance(expected[0], list) else [expected]
            found = ours.fill_mask(given, top_k=4)
            assert [[guess.token_id for guess in guesses] for guesses in found] == [
                [guess["token"] for guess in guesses] for guesses in expected
            ], given
            for mine, other in zip(found, expected, strict=True):
                assert [guess.probability for guess in mine] == pytest.approx([g["score"] for g in other], abs=1e-4)


@pytest.mark.parametrize("inputs", ["texts", "pairs"])
def test_texts_and_pairs_are_classified_alike(make, family, inputs) -> None:
    folder = make(family, "SequenceClassification", **labelled(("no", "yes", "both")))
    theirs, ours = transformers.pipeline("text-classification", str(folder), top_k=None), bert.load(folder)
    given: list[Any] = TEXTS if inputs == "texts" else PAIRS
    asked = given if inputs == "texts" else [{"text": a, "text_pair": b} for a, b in PAIRS]
    columns = (TEXTS,) if inputs == "texts" else tuple(map(list, zip(*PAIRS, strict=True)))
    task = ours.require_task()
    features = task.features(ours.tokenizer, task.examples_from_inputs(given), ours.data)
    batch = theirs.tokenizer(*columns, truncation=True, max_length=LENGTH)
    assert rows_of(features) == batch["input_ids"]
    assert any(len(row) == LENGTH for row in batch["input_ids"]), "some are cut"
    if "token_type_ids" in batch:
        assert [sum(types) for types in batch["token_type_ids"]] == (
            features.lengths - features.segment_a_lengths
        ).tolist()
    else:
        assert (features.lengths == features.segment_a_lengths).all()
    for answer, expected in zip(ours.predict(given), (theirs(text, truncation=True) for text in asked), strict=True):
        expected = expected[0] if isinstance(expected[0], list) else expected
        assert answer.label == expected[0]["label"]
        assert answer.probabilities == pytest.approx({e["label"]: e["score"] for e in expected}, abs=1e-4)


def test_choices_are_made_alike(make, family) -> None:
    folder = make(family, "MultipleChoice")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    reference = transformers.AutoModelForMultipleChoice.from_pretrained(folder).eval()
    ours = bert.load(folder)
    given = [(text, [hostile(200 + i, 3), hostile(300 + i, 12), "b"]) for i, text in enumerate(TEXTS[:12])]
    task = ours.require_task()
    features = task.features(ours.tokenizer, task.examples_from_inputs(given), ours.data)
    for i, ((context, choices), answer) in enumerate(zip(given, ours.predict(given), strict=True)):
        batch = tokenizer([context] * 3, choices, truncation=True, max_length=LENGTH, padding=True, return_tensors="pt")
        length = batch["input_ids"].shape[1]
        mine = features.batch(np.array([i]), length, 1)
        for name, expected in batch.items():
            np.testing.assert_array_equal(mine[name][0], expected)
        with torch.no_grad():
            logits = reference(**{name: array[None] for name, array in batch.items()}).logits[0]
        assert answer.choice == choices[int(logits.argmax())]
        assert list(answer.probabilities) == pytest.approx(logits.softmax(-1).tolist(), abs=1e-4)


def words_of(texts: list[str], tokenizer: Any, clitics: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Texts with their words; those whose words all have tokens (transformers leaves out the others, we do not)."""
    found = [(text, split_text(text, clitics)[0]) for text in texts]
    return [
        (text, words) for text, words in found
        if words and set(range(len(words))) <= set(tokenizer(words, is_split_into_words=True).word_ids())
    ]  # fmt: skip


def test_words_are_tagged_alike(make, family) -> None:
    if family == "roberta":
        pytest.skip("transformers reads lists of words with add_prefix_space alone")
    folder = make(family, "TokenClassification", **labelled(("DT", "NN", "VB")))
    ours = bert.load(folder)
    compare_tags(ours, folder, words_of(TEXTS, transformers.AutoTokenizer.from_pretrained(folder), CLITICS))


def compare_tags(ours: bert.Pretrained, folder: Path, cases: list[tuple[str, list[str]]]) -> None:
    theirs = transformers.pipeline("token-classification", str(folder), aggregation_strategy="first")
    tokenizer, task = theirs.tokenizer, ours.require_task()
    assert len(cases) > 25
    compared = 0
    for text, words in cases:
        row = tokenizer(words, is_split_into_words=True, truncation=True, max_length=LENGTH)
        if len(tokenizer(words, is_split_into_words=True)["input_ids"]) > LENGTH:
            continue  # transformers cuts; ours has windows
        features = task.features(ours.tokenizer, task.examples_from_inputs([text]), ours.data)
        assert rows_of(features) == [row["input_ids"]], text
        firsts = [place for place, word in enumerate(row.word_ids()) if word is not None]
        firsts = [place for place in firsts if place == 0 or row.word_ids()[place - 1] != row.word_ids()[place]]
        assert np.flatnonzero(features.words >= 0).tolist() == firsts
        with torch.no_grad():
            given = {name: torch.tensor([values]) for name, values in row.items()}
            shares = theirs.model(**given).logits[0, firsts].softmax(-1)
        [answer] = ours.predict([text])
        tags = [theirs.model.config.id2label[int(number)] for number in shares.argmax(-1)]
        assert [(word["text"], word["tag"]) for word in answer.words] == list(zip(words, tags, strict=True))
        assert [word["probability"] for word in answer.words] == pytest.approx(shares.max(-1).values.tolist(), abs=1e-4)
        compared += 1
    assert compared > 20


QUESTIONS = [hostile(400 + i, 1 + i % 4) for i in range(40)]


def spans_of(row: Any, feature: int, start_logits: np.ndarray, end_logits: np.ndarray, context: str) -> list[tuple]:
    """(score, first character, text) of every span of a window, best first, as run_qa.py's postprocessing has them, but
    for the white space around them, which some vocabularies count among the characters of a word."""
    places = [i for i, owner in enumerate(row.sequence_ids(feature)) if owner == 1]
    offsets = row["offset_mapping"][feature]
    found = []
    for a in places:
        for b in range(a, min(a + 30, places[-1] + 1)):
            covered = context[offsets[a][0] : offsets[b][1]]
            start = offsets[a][0] + len(covered) - len(covered.lstrip())
            found.append((start_logits[a] + end_logits[b], start, covered.strip()))
    return sorted((span for span in found if span[2]), reverse=True)


def test_questions_are_answered_alike(make, family) -> None:
    folder = make(family, "QuestionAnswering")
    compare_answers(bert.load(folder), folder, stride=9)


def compare_answers(ours: bert.Pretrained, folder: Path, stride: int) -> None:
    """Rows, windows of long contexts too, token types, and the best answers of contexts that fit one row."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    reference = transformers.AutoModelForQuestionAnswering.from_pretrained(folder).eval()
    task, data = ours.require_task(), dataclasses.replace(ours.data, doc_stride=stride)
    windows = answered = 0
    for number, (question, context) in enumerate(
        zip(QUESTIONS, map(hostile, range(500, 540), range(3, 43)), strict=True)
    ):
        taken = len(tokenizer(question, "a")["input_ids"]) - 1
        if not question.strip() or taken > LENGTH // 2:
            continue
        room = LENGTH - taken
        row = tokenizer(
            question, context, truncation="only_second", max_length=LENGTH, stride=room - min(room, stride),
            return_overflowing_tokens=True, return_offsets_mapping=True,
        )  # fmt: skip
        asked = task.examples_from_inputs([(question, context)])
        features = task.features(ours.tokenizer, asked, data)
        assert rows_of(features) == row["input_ids"], (question, context)
        windows += len(features) > 1
        batch = features.batch(np.arange(len(features)), LENGTH, len(features))
        if "token_type_ids" in row:
            types = zip(batch["token_type_ids"].tolist(), features.lengths, strict=True)
            assert [own[:length] for own, length in types] == row["token_type_ids"]
        else:
            assert not batch["token_type_ids"].any()
        if len(features) > 1:
            continue
        given = {name: torch.tensor(row[name]) for name in tokenizer.model_input_names}
        with torch.no_grad():
            output = reference(**given)
        best = spans_of(row, 0, output.start_logits[0].numpy(), output.end_logits[0].numpy(), context)
        if best[1:] and best[0][0] - best[1][0] < 1e-3:
            continue  # a tie
        [answer] = ours.predict([(question, context)])
        assert answer.start == best[0][1], number
        rest = answer.answer.removeprefix(best[0][2])
        assert answer.answer.startswith(best[0][2])
        assert all(unicodedata.category(character) == "Mn" for character in rest), "accents that uncased models strip"
        candidate = task.predict(ours.outputs(features), features, asked).n_best["1"][0]
        assert candidate.start_logit + candidate.end_logit == pytest.approx(best[0][0], abs=1e-3)
        answered += 1
    assert windows > 5
    assert answered > 5


def finetuned(config: str, init: Path, folder: Path, *arguments: str) -> bert.Pretrained:
    small = [
        "--training.epochs=1",
        "--training.batch_size=4",
        f"--data.buckets={LENGTH}",
        f"--data.max_length={LENGTH}",
    ]
    assert main([f"--config={config}", f"--init={init}", f"--output_dir={folder}", *small, *arguments]) == 0
    return bert.load(folder)


@pytest.mark.parametrize("prefix_space", ["roberta", "roberta-prefix-space"])
def test_the_export_of_a_tagging_run_makes_the_rows_it_was_trained_on(make, tmp_path, prefix_space) -> None:
    data = tmp_path / "data"
    data.mkdir()
    words = [[word for word in hostile(seed, 6).split() if word.strip("\u200b")] for seed in range(12)]
    lines = "\n\n".join(
        "\n".join(f"{word}\t{('DT', 'NN')[i % 2]}" for i, word in enumerate(row)) for row in words if row
    )
    for split in ("train", "dev"):
        (data / f"{split}.tsv").write_text(lines + "\n", encoding="utf-8")
    run = finetuned("conll2003", make(prefix_space, "MaskedLM"), tmp_path / "run", f"--data.dir={data}")
    run.save(tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    task = run.require_task()
    trained = rows_of(task.features(run.tokenizer, task.read(data, "train"), run.data))
    rows = [tokenizer(row, is_split_into_words=True)["input_ids"] for row in words if row]
    short = [row for row in rows if len(row) <= LENGTH]
    assert len(short) > 4
    assert all(row in trained for row in short)
    compare_tags(run, tmp_path / "out", words_of(TEXTS, tokenizer, task.clitics))


def test_the_export_of_a_question_answering_run_makes_the_rows_it_was_trained_on(make, tmp_path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    answers = [{"text": "cat", "answer_start": 4}]
    paragraphs = [
        {"context": f"the cat {i} sat", "qas": [{"id": f"{i}", "question": "who", "answers": answers}]}
        for i in range(8)
    ]
    for split in ("train", "dev"):
        (data / f"{split}-v1.1.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    more = (f"--data.dir={data}", "--data.max_query_length=24", "--data.doc_stride=9")
    run = finetuned("squad", make("roberta", "MaskedLM"), tmp_path / "run", *more)
    run.save(tmp_path / "out")
    compare_answers(run, tmp_path / "out", stride=9)


def test_continued_pretraining_reads_sentences_as_running_text(make, tmp_path) -> None:
    """A document that fits one row is what transformers makes of its text."""
    documents = [f"The cat {i} sat.  A dog ran.The mat.\nOn {i} mats." for i in range(12)]
    (tmp_path / "corpus.txt").write_text("\n\n".join(documents))
    folder = make("roberta", "MaskedLM")
    config = DataConfig(
        train=str(tmp_path / "corpus.txt"),
        input_format="doc_sentences",
        sequence_length=LENGTH,
        num_workers=1,
        eval_fraction=0.2,
    )
    found = build_examples(config, load_tokenizer(folder), tmp_path / "cache")
    rows = open_rows(found.train)
    taken = rows.take(np.arange(len(rows)))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    expected = tokenizer([" ".join(document.split()) for document in documents])["input_ids"]
    assert len(rows) == 10
    for ids, length in zip(taken["input_ids"], taken["length"], strict=True):
        assert ids[:length].tolist() in expected
