"""Every recipe reads the data set of its benchmark on the hub: small copies with the published columns and splits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, List, Translation, Value

from bert.config import ColumnsConfig, FinetuneConfig, TaskDataConfig
from bert.tasks import make_task
from bert.tasks.question_answering import Answer

TEXT = Value("string")
CONTEXT = "Ann left New York. Ann is here."
SQUAD = {
    "id": ["q1", "q2"],
    "title": ["Ann", "Ann"],
    "context": [CONTEXT, CONTEXT],
    "question": ["Who?", "Where?"],
    "answers": [{"text": ["Ann", "Ann"], "answer_start": [0, 19]}, {"text": ["New York"], "answer_start": [9]}],
}
SQUAD_FEATURES = {
    **dict.fromkeys(("id", "title", "context", "question"), TEXT),
    "answers": {"text": List(TEXT), "answer_start": List(Value("int32"))},
}
SWAG = {
    "video-id": ["v", "v"], "fold-ind": ["1", "2"], "startphrase": ["a b", "c d"], "sent1": ["a", "c"],
    "sent2": ["b", "d"], **{f"ending{n}": [f"x{n}", f"y{n}"] for n in range(4)}, "gold-source": ["gold", "gen"],
}  # fmt: skip
COMMONSENSE = {
    "id": ["c1", "c2"],
    "question": ["What?", "Why?"],
    "question_concept": ["a", "b"],
    "choices": [{"label": ["A", "B"], "text": ["yes", "no"]}, {"label": ["A", "B"], "text": ["so", "and so"]}],
}
PAIR = {"premise": ["Ann left", "Ann left"], "hypothesis": ["she left", "he left"]}
NLI = ["entailment", "neutral", "contradiction"]


def table(rows: dict[str, list[Any]], **features: Any) -> Dataset:
    return Dataset.from_dict(rows, features=Features({name: features.get(name, TEXT) for name in rows}))


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Reads each split of a data set from the hub, and from a folder of `datasets`, which must agree."""

    def read_splits(name: str, saved: dict[str, Dataset], **data: Any) -> dict[str, Any]:
        splits = DatasetDict(saved)
        splits.save_to_disk(str(tmp_path / "saved"))
        monkeypatch.setattr(datasets, "load_dataset", lambda source, config: splits)
        task = make_task(FinetuneConfig(task=name, data=TaskDataConfig(dir="hub:org/name", **data)))
        found = []
        for place in (Path("hub:org/name"), tmp_path / "saved"):
            fitted = task.fit(task.read(place, "train"))
            found.append({split: fitted.read(place, split) for split in fitted.splits(place)})
        for split, examples in found[0].items():
            assert list(examples.groups) == list(found[1][split].groups)
        return found[0]

    return read_splits


@pytest.mark.parametrize("name", ["squad", "squad2", "span"])
def test_squad(read, name: str) -> None:
    rows = table(SQUAD, **SQUAD_FEATURES)
    splits = read(name, {"train": rows, "validation": rows})
    assert list(splits) == ["train", "dev"]
    for dataset in splits.values():
        assert [example.id for example in dataset.examples] == (["0", "1"] if name == "span" else ["q1", "q2"])
        assert [example.answers for example in dataset.examples] == [
            (Answer("Ann", 0), Answer("Ann", 19)),
            (Answer("New York", 9),),
        ]


def test_squad_with_questions_without_an_answer(read) -> None:
    none = {**SQUAD, "answers": [SQUAD["answers"][0], {"text": [], "answer_start": []}]}
    splits = read("squad2", {"train": table(none, **SQUAD_FEATURES), "validation": table(none, **SQUAD_FEATURES)})
    assert [example.is_impossible for example in splits["dev"].examples] == [False, True]


def test_swag(read) -> None:
    labels = ClassLabel(names=["0", "1", "2", "3"])
    train, test = (table({**SWAG, "label": numbers}, label=labels) for numbers in ([3, 0], [-1, -1]))
    splits = read("swag", {"train": train, "validation": train, "test": test})
    assert splits["dev"].labels.tolist() == [3, 0]
    assert splits["train"].choices[0] == ["b x0", "b x1", "b x2", "b x3"]
    assert not splits["test"].labelled


def test_commonsenseqa(read) -> None:
    choices = {"label": List(TEXT), "text": List(TEXT)}
    train, test = (table({**COMMONSENSE, "answerKey": keys}, choices=choices) for keys in (["B", "A"], ["", ""]))
    splits = read("commonsenseqa", {"train": train, "validation": train, "test": test})
    assert splits["train"].labels.tolist() == [1, 0]
    assert splits["dev"].choices == [["yes", "no"], ["so", "and so"]]
    assert splits["dev"].ids == ["c1", "c2"]
    assert not splits["test"].labelled


@pytest.mark.parametrize("form", ["columns", "translation"])
def test_translations(read, form: str) -> None:
    """Multi30k has a column for each language, WMT has a column of translations."""
    texts = {"en": ["red", "blue"], "de": ["rot", "blau"]}
    rows = table(texts)
    if form == "translation":
        pairs = [{"en": en, "de": de} for en, de in zip(*texts.values(), strict=True)]
        rows = table({"translation": pairs}, translation=Translation(languages=["en", "de"]))
    splits = read("multi30k", {"train": rows, "validation": rows, "test": rows}, source="de", target="en")
    for pairs in splits.values():
        assert (list(pairs.sources), pairs.references) == (["rot", "blau"], [["red"], ["blue"]])


def test_xnli(read) -> None:
    rows = table({**PAIR, "label": [0, 2]}, label=ClassLabel(names=NLI))
    columns = ColumnsConfig(text_a="premise", text_b="hypothesis")
    splits = read("classification", {"train": rows, "validation": rows, "test": rows}, columns=columns)
    assert splits["train"].label_words == tuple(NLI)
    assert splits["test"].labels.tolist() == [0, 2]
    assert splits["test"].texts_b == PAIR["hypothesis"]
