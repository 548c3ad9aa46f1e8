"""Rows that a run trains and evaluates on: samples, rows held out as dev, and their log messages."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from bert.config import FinetuneConfig, TaskDataConfig
from bert.errors import UserError, WarningText
from bert.tasks import make_task
from bert.tasks.split_facts import cut_facts, label_facts
from bert.tasks.splits import Splits, has_dev, held_out, read_splits, require_dev
from bert.tokenizer.library import SPECIAL_TOKENS
from tests.helpers import made_files


def splits_of(folder: Path, task: str = "classification", seed: int = 0, **data: object) -> Splits:
    """The splits of a run that starts now, or of a run of an older version (``is_new=False``)."""
    is_new, own = data.pop("is_new", True), {name: data.pop(name) for name in ("classifier_training",) if name in data}
    config = FinetuneConfig(task=task, seed=seed, init="none", data=TaskDataConfig(dir=str(folder), **data), **own)
    config.data.check()
    return read_splits(make_task(config), config, is_new)


def rows(*labels: str) -> str:
    return "text,label\n" + "".join(f"text {number},{label}\n" for number, label in enumerate(labels))


SORTED = rows(*["neg"] * 60, *["pos"] * 40)


def test_a_sample_of_a_file_sorted_by_label_has_both_labels(tmp_path: Path) -> None:
    made_files(tmp_path, train_csv=SORTED, dev_csv=SORTED)
    splits = splits_of(tmp_path, max_train_samples=20, max_dev_samples=30)
    train, dev = splits.examples["train"], splits.examples["dev"]
    assert (len(train), len(dev)) == (20, 30)
    assert 4 <= train.labels.sum() <= 14
    assert train.ids == sorted(train.ids, key=int), "the order of the file"
    assert train.texts_a == [f"text {number}" for number in train.ids]
    assert splits_of(tmp_path, max_train_samples=20).examples["train"].ids == train.ids
    assert splits_of(tmp_path, max_train_samples=20, seed=1).examples["train"].ids != train.ids
    assert splits_of(tmp_path, max_train_samples=20, seed=1, sample_seed=0).examples["train"].ids == train.ids
    assert set(splits_of(tmp_path, max_train_samples=30).examples["train"].ids) > set(train.ids)
    assert len(splits_of(tmp_path, max_train_samples=1000).examples["train"]) == 100


def test_a_sample_with_one_label_names_the_option(tmp_path: Path) -> None:
    made_files(tmp_path, train_csv=SORTED, dev_csv=SORTED)
    with pytest.raises(UserError, match=r"1 training.*data\.max_train_samples.*label '"):
        splits_of(tmp_path, max_train_samples=1)
    made_files(tmp_path, train_csv=rows("pos", "pos", "pos"))
    with pytest.raises(UserError, match="label 'pos'"):
        splits_of(tmp_path, max_train_samples=2)


def test_labels_are_those_of_the_whole_file(tmp_path: Path) -> None:
    made_files(tmp_path, train_csv=rows(*"abcdefgh" * 3), dev_csv=rows(*"abcdefgh"))
    assert splits_of(tmp_path, max_train_samples=3).task.labels == tuple("abcdefgh")


def test_dev_is_held_out_where_it_has_no_file(tmp_path: Path) -> None:
    made_files(tmp_path, train_csv=SORTED)
    splits = splits_of(tmp_path, max_train_samples=40)
    train, dev = splits.examples["train"], splits.examples["dev"]
    assert (len(train), len(dev)) == (40, 10)
    assert not set(train.ids) & set(dev.ids)
    assert splits.data.dev_fraction == 0.1
    assert splits.notes == (
        "dev: 10 of the 100 training rows are held out at random, by label (no dev file, data.dev_fraction 0.1)",
    )
    again = splits_of(tmp_path, max_train_samples=40, dev_fraction=0.1)
    assert (again.examples["train"].ids, again.examples["dev"].ids) == (train.ids, dev.ids)
    assert len(splits_of(tmp_path, dev_fraction=0.25, max_dev_samples=7).examples["dev"]) == 7
    made_files(tmp_path, train_csv=rows("pos"))
    with pytest.raises(UserError, match=r"file has 1 row.*data\.dev"):
        splits_of(tmp_path)


def test_a_share_that_is_set_is_held_out_beside_a_dev_file(tmp_path: Path) -> None:
    made_files(tmp_path, train_csv=SORTED, dev_csv="broken", test_csv=SORTED)
    splits = splits_of(tmp_path, dev_fraction=0.2)
    assert {name: len(examples) for name, examples in splits.examples.items()} == {"train": 80, "dev": 20, "test": 100}
    assert splits.notes[0].endswith("held out at random, by label (data.dev_fraction 0.2)")
    with pytest.raises(UserError, match=r"data\.dev and data\.dev_fraction are both set"):
        splits_of(tmp_path, dev="dev.csv", dev_fraction=0.2)
    with pytest.raises(UserError, match=r"data\.dev_fraction is 1\.5.*at least 0 and below 1"):
        splits_of(tmp_path, dev_fraction=1.5)


def test_a_missing_file_that_is_named_is_an_error(tmp_path: Path) -> None:
    made_files(tmp_path, train_csv=SORTED)
    with pytest.raises(UserError, match=r"dve\.csv does not exist"):
        splits_of(tmp_path, dev="dve.csv")


def test_rows_of_a_group_stay_together() -> None:
    groups = [number // 3 for number in range(300)]
    dev = held_out(groups, 0.1, seed=4)
    assert len(dev) == 30
    assert not {groups[row] for row in dev} & {groups[row] for row in np.setdiff1d(np.arange(300), dev)}
    assert held_out(groups, 0.1, seed=5).tolist() != dev.tolist()
    assert len(held_out(["same"] * 10, 0.3, seed=0)) == 3
    assert len(held_out(["a"] * 9 + ["b"], 0.99, seed=0)) in (1, 9), "something is left to train on"


def counts_of(splits: Splits, name: str) -> dict[str, int]:
    counts = splits.task.rows_by_label(splits.examples[name])
    return dict(zip(splits.task.labels, counts.tolist(), strict=True))


@pytest.mark.parametrize("seed", range(5))
def test_each_label_has_its_share_of_the_held_out_rows(tmp_path: Path, seed: int) -> None:
    """0.1 of 86, 14, 4 and 1 rows are 8.6, 1.4, 0.4, and none of a single row: 10 in all, by largest remainder."""
    made_files(tmp_path, train_csv=rows(*["a"] * 86, "single", *["b"] * 14, *["c"] * 4))
    splits = splits_of(tmp_path, seed=seed)
    counts = counts_of(splits, "dev")
    assert (counts["a"], counts["single"], counts["b"] + counts["c"]) == (9, 0, 1)
    assert splits.data.stratify_dev is True
    assert splits.notes[1].startswith("dev has no row of 2 labels, 'c', 'single', which have too few training rows")
    assert splits.notes[1].endswith("rows held out by label: 'a' 9, 'b' 1, 'c' 0, 'single' 0")
    again = splits_of(tmp_path, seed=seed, stratify_dev=True, is_new=False)
    assert again.examples["dev"].ids == splits.examples["dev"].ids, "as the stored configuration says"
    assert splits_of(tmp_path, seed=seed + 1).examples["dev"].ids != splits.examples["dev"].ids


def test_runs_of_older_versions_keep_their_dev_rows(tmp_path: Path) -> None:
    made_files(tmp_path, train_csv=SORTED)
    old = splits_of(tmp_path, dev_fraction=0.1, is_new=False)
    expected = np.sort(np.argsort(np.random.Philox(key=np.array([0, 2**63], np.uint64)).random_raw(100))[:10])
    assert [int(id) for id in old.examples["dev"].ids] == expected.tolist()
    assert old.data.stratify_dev is False
    assert old.notes[0].endswith("of the 100 training rows are held out at random (no dev file, data.dev_fraction 0.1)")
    assert splits_of(tmp_path, stratify_dev=False).examples["dev"].ids == old.examples["dev"].ids


def test_equal_texts_stay_together_when_dev_is_held_out_by_label() -> None:
    groups = [number // 3 for number in range(300)]
    labels = np.array([group % 4 == 0 for group in groups], np.int32)
    labels[0] = 0  # a group has its most frequent label
    dev = held_out(groups, 0.2, seed=3, labels=labels)
    assert not {groups[row] for row in dev} & {groups[row] for row in np.setdiff1d(np.arange(300), dev)}
    assert abs(labels[dev].sum() - 15) <= 3 and abs(len(dev) - 60) <= 6
    renumbered = held_out([f"text {group}" for group in groups], 0.2, seed=3, labels=1 - labels)
    assert renumbered.tolist() == dev.tolist(), "neither names nor numbers of labels matter"
    with pytest.raises(UserError, match="no label has two training rows"):
        held_out([*"abc"], 0.5, seed=0, labels=np.arange(3))


def test_few_labels_train_on_all_rows(tmp_path: Path) -> None:
    made_files(tmp_path, train_csv=SORTED, test_csv=SORTED)
    splits = splits_of(tmp_path, classifier_training="contrastive", max_dev_samples=7)
    assert (len(splits.examples["train"]), has_dev(splits.examples), splits.data.dev_fraction) == (100, False, 0)
    assert "there is no dev score; estimate it with bert evaluate --cross_validate" in splits.notes[-1]
    with pytest.raises(UserError, match=r"the sweep has no dev rows.*data\.dev_fraction"):
        require_dev(splits.examples, "the sweep")
    assert len(splits_of(tmp_path, classifier_training="contrastive", dev_fraction=0.1).examples["dev"]) == 10
    assert len(splits_of(tmp_path, dev_fraction=0.0).examples["train"]) == 100
    with pytest.raises(UserError, match=r"data\.calibration is set, but there are no dev rows"):
        splits_of(tmp_path, dev_fraction=0.0, calibration="temperature")
    with pytest.raises(UserError, match=r"the task multilabel needs dev rows"):
        splits_of(tmp_path, "multilabel", dev_fraction=0.0)
    with pytest.raises(UserError, match=r"data\.stratify_dev is true, but multilabel"):
        splits_of(tmp_path, "multilabel", stratify_dev=True)
    made_files(tmp_path, dev_csv=SORTED)
    assert has_dev(splits_of(tmp_path, classifier_training="contrastive").examples)
    assert has_dev(splits_of(tmp_path, dev_fraction=0.0).examples)


def test_questions_about_one_context_are_not_separated(tmp_path: Path) -> None:
    questions = [
        {"question": f"who {number}?", "context": f"Ann left {number // 4}.", "answer": "Ann" if number % 4 else "",
         "answer_start": 0}
        for number in range(80)
    ]  # fmt: skip
    made_files(tmp_path, train_jsonl="".join(json.dumps(question) + "\n" for question in questions))
    splits = splits_of(tmp_path, "span", max_train_samples=5)
    train, dev = splits.examples["train"].examples, splits.examples["dev"].examples
    assert (len(train), len(dev)) == (5, 8)
    assert not {example.context for example in train} & {example.context for example in dev}
    assert splits.task.may_be_impossible, "as the whole file says"


def test_every_kind_of_examples_can_be_sampled(tmp_path: Path) -> None:
    sentences = [{"words": ["Ann", str(number)], "tags": ["B-PER", "O"]} for number in range(30)]
    made_files(tmp_path, train_jsonl="".join(json.dumps(sentence) + "\n" for sentence in sentences))
    tagged = splits_of(tmp_path, "tagging", max_train_samples=9)
    assert [len(examples) for examples in tagged.examples.values()] == [9, 3]
    assert all(len(tagged.examples["train"].columns[row]) == 2 for row in range(9))
    header = "sent1,sent2,ending0,ending1,label\n"
    lines = "".join(f"a {number},b,c,d,{number % 2}\n" for number in range(20))
    made_files(tmp_path, train_csv=header + lines, val_csv=header + lines)
    chosen = splits_of(tmp_path, "swag", max_train_samples=5, max_dev_samples=4).examples
    assert [len(examples.choices) for examples in chosen.values()] == [5, 4]
    assert chosen["dev"].labels.tolist() == [int(id) % 2 for id in chosen["dev"].ids]


def test_the_shares_of_the_labels_are_told(tmp_path: Path) -> None:
    made_files(tmp_path, train_csv=rows(*["billing"] * 51, *["technical"] * 49), dev_csv=rows("technical", "billing"))
    splits = splits_of(tmp_path)
    facts = label_facts(splits.task, splits.examples, splits.data)
    assert facts == [("labels", "train billing 51%, technical 49%\ndev billing 50%, technical 50%")]


def test_a_label_that_train_lacks_is_a_warning(tmp_path: Path) -> None:
    made_files(tmp_path, train_csv=rows(*["neg"] * 198, *["pos"] * 2), dev_csv=SORTED)
    splits = splits_of(tmp_path)
    [_, warning] = label_facts(splits.task, splits.examples, splits.data)
    words = "'pos' has 1% of the training rows and 40% of dev: split the data again at random"
    assert warning == ("warning", words)
    splits = splits_of(tmp_path, labels=["neg", "pos", "new"], max_train_samples=190, dev="dev.csv")
    [_, (_, words)] = label_facts(splits.task, splits.examples, splits.data)
    assert words.endswith("set a larger data.max_train_samples")


def test_up_to_twenty_labels_are_shown(tmp_path: Path) -> None:
    names = [f"label {number:02}" for number in range(20)]
    made_files(tmp_path, train_csv=rows(*names * 2), dev_csv=rows(*names))
    splits = splits_of(tmp_path)
    [(_, words)] = label_facts(splits.task, splits.examples, splits.data)
    assert all(words.count(name) == 2 for name in names)
    assert "other labels" not in words


@pytest.mark.medium
def test_many_labels_take_one_line(tmp_path: Path) -> None:
    names = [f"label {number}" for number in range(150)]
    made_files(tmp_path, train_csv=rows(*["label 7"] * 150, *names), dev_csv=rows(*names * 5))
    splits = splits_of(tmp_path)
    facts = label_facts(splits.task, splits.examples, splits.data)
    assert facts[0][1].startswith("train label 7 50%, label 0 0.3%, ")
    assert facts[0][1].endswith("131 other labels 87%")
    assert len(facts[0][1]) < 800
    made_files(tmp_path, train_csv=rows(*["label 0"] * 50_000, *names))
    splits = splits_of(tmp_path)
    [_, (_, words)] = label_facts(splits.task, splits.examples, splits.data)
    assert words.count("training rows") == 3
    assert "and 146 other labels differ as much" in words


def test_scores_have_no_shares_of_labels(tmp_path: Path) -> None:
    row = json.dumps({"text": "a", "label": 1}) + "\n"
    made_files(tmp_path, train_jsonl=row, dev_jsonl=row)
    splits = splits_of(tmp_path, "regression")
    assert label_facts(splits.task, splits.examples, splits.data) == []


@pytest.mark.parametrize(
    ("train", "dev", "facts"),
    [
        (["B-X", "I-X", "B-X", "B-Y"], ["O", "O", "B-X"], ("entities", "train X 2, Y 1\ndev X 1")),
        (["S-X", "B-X", "E-X", "S-Y"], ["O", "O", "O"], ("entities", "train X 2, Y 1\ndev none")),
        (["X", "X", "Y", "Z"], ["X", "Z", "Z"], ("tags", "train X 2, Y 1, Z 1\ndev Z 2, X 1")),
    ],
)
def test_tags_are_counted(tmp_path: Path, train: list[str], dev: list[str], facts: tuple[str, str]) -> None:
    files = {f"{name}_jsonl": json.dumps({"words": ["a"] * len(tags), "tags": tags}) + "\n"
             for name, tags in (("train", train), ("dev", dev))}  # fmt: skip
    made_files(tmp_path, **files)
    splits = splits_of(tmp_path, "tagging")
    assert label_facts(splits.task, splits.examples, splits.data) == [facts]


def test_rows_that_are_cut_are_told(tmp_path: Path) -> None:
    words = Tokenizer(WordLevel({token: number for number, token in enumerate(SPECIAL_TOKENS)}, "[UNK]"))
    words.pre_tokenizer = Whitespace()
    lengths = [4] * 50 + [20] * 30 + [100] * 20
    lines = "".join(f"{'a ' * (length - 2)},{number % 2}\n" for number, length in enumerate(lengths))
    made_files(tmp_path, train_csv="text,label\n" + lines, dev_csv="text,label\n" + lines.splitlines()[0] + "\n")

    def facts(length: int, max_length: int) -> list[tuple[str, str]]:
        splits = splits_of(tmp_path, max_length=length)
        features = {
            name: splits.task.features(words, examples, splits.data) for name, examples in splits.examples.items()
        }
        return cut_facts(splits.task, words, splits.examples, features, splits.data, max_length)

    told = "train 50% (median 12 tokens), dev 0%; --data.max_length 32 cuts 20% of train"
    assert facts(16, 512) == [("rows cut", told)]
    assert facts(64, 64) == [("rows cut", "train 20% (median 12 tokens), dev 0%")]
    assert facts(100, 512) == []


def test_a_benchmark_without_its_dev_file_names_the_share(tmp_path: Path) -> None:
    (tmp_path / "train.tsv").write_text(
        "sentence\tlabel\n" + "".join(f"text {number}\t{number % 2}\n" for number in range(9))
    )
    with pytest.raises(UserError, match=r"has no dev\.tsv: .*, or data\.dev_fraction"):
        splits_of(tmp_path, "sst2")
    assert [len(examples) for examples in splits_of(tmp_path, "sst2", dev_fraction=0.3).examples.values()] == [6, 3]
    (tmp_path / "train.txt").write_text("Ann B-PER\n\nHe O\n")
    with pytest.raises(UserError, match=r"data\.dev_fraction"):
        splits_of(tmp_path, "ner")


def test_rows_that_are_left_out_are_a_warning(tmp_path: Path) -> None:
    labels = datasets.ClassLabel(names=["x", "y"])
    features = datasets.Features({"text": datasets.Value("string"), "label": labels})
    table = datasets.Dataset.from_dict({"text": [*"abcd"], "label": [0, 1, -1, 1]}, features=features)
    datasets.DatasetDict({"train": table}).save_to_disk(str(tmp_path))
    left_out, held_out, _ = splits_of(tmp_path).notes
    assert "without a label left out" in left_out and isinstance(left_out, WarningText)
    assert "held out" in held_out and not isinstance(held_out, WarningText)
