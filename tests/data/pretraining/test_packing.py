"""Packing: which examples share a row, what the rows look like, and how they are masked."""

import itertools

import numpy as np
import pytest

from bert.config import DataConfig
from bert.data.pretraining import build
from bert.data.pretraining.build import build_examples, build_shard_subset
from bert.data.pretraining.dataset import open_rows
from bert.data.pretraining.loader import PretrainingLoader, masked_batch, random_uint64s_per_row
from bert.data.pretraining.masking import Masking, philox_uint64
from bert.data.pretraining.packing import EXAMPLE_LENGTH, assign_packs, pack_rows, packing_arrays, shortest_pack_first
from bert.errors import UserError
from tests.helpers import all_rows, config_of, digest

T, K, V, MASK, SPECIAL = 64, 5, 1000, 4, (0, 1, 2, 3, 4)


def lengths_like_wikipedia(count: int, max_length: int, seed: int = 0) -> np.ndarray:
    """Half of the examples full, the others of any length, short ones more often."""
    random = np.random.default_rng(seed)
    short = 5 + ((max_length - 5) * random.random(count) ** 1.5).astype(np.int64)
    return np.where(random.random(count) < 0.5, max_length, short)


def min_rows(lengths: np.ndarray, max_length: int, max_count: int) -> int:
    """Fewer rows cannot hold these examples: by their tokens, by their number, by those no two of which fit."""
    short = lengths[lengths < max_length]
    full = len(lengths) - len(short)
    return full + max(
        -(-int(short.sum()) // max_length), -(-len(short) // max_count), int((2 * short > max_length).sum())
    )


def one_by_one(lengths: np.ndarray, max_length: int, max_count: int) -> list[list[int]]:
    """The same strategy on single examples: from the longest on, into the pack with the most room."""
    packs: list[list[int]] = []
    for length in sorted(lengths.tolist(), reverse=True):
        open_packs = [pack for pack in packs if len(pack) < max_count]
        roomiest = min(open_packs, key=sum, default=[max_length])
        if sum(roomiest) + length <= max_length:
            roomiest.append(length)
        else:
            packs.append([length])
    return packs


def test_a_worked_example() -> None:
    histogram = np.zeros(11, int)
    histogram[[10, 6, 5, 3, 2]] = 1, 2, 1, 2, 3
    # 10 is full; 6, 6 and 5 open packs; 3 goes to the 5, which has the most room, 3 to a 6; 2 to the other 6 (room 4),
    # 2 to that again or to the 5 + 3 (room 2 each), 2 to the one that is left.
    packs = shortest_pack_first(histogram, 4)
    assert sorted(pack for count, pack in packs for _ in range(count)) == [(5, 3, 2), (6, 2, 2), (6, 3), (10,)]
    assert shortest_pack_first(np.array([0, 0, 7]), 3) == [(7, (2,))]
    assert sorted(shortest_pack_first(np.array([0, 7, 0, 0, 0]), 3)) == [(1, (1,)), (2, (1, 1, 1))]


@pytest.mark.parametrize("seed", range(8))
def test_the_histogram_gives_what_one_example_at_a_time_gives(seed: int) -> None:
    random = np.random.default_rng(seed)
    max_length, max_count = int(random.integers(8, 40)), int(random.integers(2, 6))
    lengths = random.integers(1, max_length + 1, 150)
    groups = shortest_pack_first(np.bincount(lengths, minlength=max_length + 1), max_count)
    actual = sorted((sum(pack), len(pack)) for count, pack in groups for _ in range(count))
    expected = one_by_one(lengths, max_length, max_count)
    assert len(actual) == len(expected)
    assert [total for total, _ in actual] == sorted(map(sum, expected))


@pytest.mark.parametrize(("max_length", "max_count", "rate"), [(512, 8, 1.02), (512, 3, 1.05), (128, 8, 1.02)])
def test_every_example_once_no_row_too_long_and_few_rows(max_length: int, max_count: int, rate: float) -> None:
    lengths = lengths_like_wikipedia(5000, max_length)
    packs = assign_packs(lengths, max_length, max_count)
    assert sorted(itertools.chain.from_iterable(packs)) == list(range(5000))
    assert max(int(lengths[pack].sum()) for pack in packs) <= max_length
    assert max(map(len, packs)) <= max_count
    assert min_rows(lengths, max_length, max_count) <= len(packs) <= rate * min_rows(lengths, max_length, max_count)
    assert assign_packs(lengths, max_length, max_count) == packs
    assert [pack[0] for pack in packs] == sorted(pack[0] for pack in packs)


def columns_of(lengths: np.ndarray, max_length: int = T) -> dict[str, np.ndarray]:
    """Rows of [CLS] A [SEP] B [SEP] with these lengths, whose tokens identify the example."""
    random = np.random.default_rng(1)
    ids = random.integers(len(SPECIAL), V, (len(lengths), max_length)).astype(np.uint16)
    segment_a = (lengths // 2 + 1).astype(np.int32)
    at = np.arange(len(lengths))
    ids[:, 0], ids[at, segment_a - 1], ids[at, lengths - 1] = 2, 3, 3
    ids[np.arange(max_length) >= lengths[:, None]] = 0
    label = (at % 3 == 0).astype(np.int8)
    return {
        "input_ids": ids,
        "length": lengths.astype(np.int32),
        "segment_a_length": segment_a,
        "next_sentence_label": label,
    }


def taken_apart(rows: dict[str, np.ndarray]) -> list[tuple]:
    """(tokens, length of A, label) of every example of packed rows."""
    result = []
    for row in zip(*(rows[n] for n in ("input_ids", EXAMPLE_LENGTH, "segment_a_length", "next_sentence_label")),
                   strict=True):  # fmt: skip
        ids, lengths, segment_a, labels = row
        starts = np.cumsum(lengths) - lengths
        for start, length, second, label in zip(starts, lengths, segment_a, labels, strict=True):
            if length:
                result.append((ids[start : start + length].tolist(), int(second), int(label)))
            else:
                assert second == label == 0
        assert not ids[lengths.sum() :].any()
    return result


def test_packed_rows_hold_the_same_examples() -> None:
    columns = columns_of(lengths_like_wikipedia(300, T))
    rows = pack_rows(columns, K, pad=0)
    assert rows["input_ids"].dtype == np.uint16
    assert rows[EXAMPLE_LENGTH].shape == rows["segment_a_length"].shape == (len(rows["length"]), K)
    np.testing.assert_array_equal(rows["length"], rows[EXAMPLE_LENGTH].sum(axis=1))
    alone = [
        (ids[:length].tolist(), int(second), int(label))
        for ids, length, second, label in zip(*columns.values(), strict=True)
    ]
    assert sorted(taken_apart(rows)) == sorted(alone)
    assert len(rows["length"]) < 0.8 * len(alone)


def test_places_by_hand() -> None:
    packed = packing_arrays(np.array([[3, 4, 0], [2, 2, 2], [0, 0, 0]]), np.array([[2, 1, 0], [2, 2, 1], [0, 0, 0]]), 8)
    assert packed["example_ids"].tolist() == [[1, 1, 1, 2, 2, 2, 2, 0], [1, 1, 2, 2, 3, 3, 0, 0], [0] * 8]
    assert packed["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 0], [0, 1, 0, 1, 0, 1, 0, 0], [0] * 8]
    assert packed["token_type_ids"].tolist() == [[0, 0, 1, 0, 1, 1, 1, 0], [0, 0, 0, 0, 0, 1, 0, 0], [0] * 8]
    assert packed["cls_positions"].tolist() == [[0, 3, 0], [0, 2, 4], [0, 0, 0]]


def masked(rows: dict[str, np.ndarray], masking: Masking) -> dict[str, np.ndarray]:
    words = philox_uint64((7, 1), 0, len(rows["length"]), random_uint64s_per_row(masking, rows))
    return masked_batch(rows, masking, words, 0)


def owners_of_predictions(batch: dict[str, np.ndarray]) -> np.ndarray:
    """[B, K]: predictions of each example."""
    owners = np.take_along_axis(batch["example_ids"], batch["masked_lm_positions"], axis=1)
    used = batch["masked_lm_weights"] > 0
    return np.stack([((owners == number + 1) & used).sum(axis=1) for number in range(K)], axis=1)


@pytest.mark.parametrize("limit", [20, 4])
def test_each_example_predicts_its_15_percent_and_none_is_lost(limit: int) -> None:
    masking = Masking(V, MASK, SPECIAL, max_predictions=limit)
    rows = pack_rows(columns_of(lengths_like_wikipedia(4000, T)), K, pad=0)
    batch = masked(rows, masking)
    lengths = rows[EXAMPLE_LENGTH]
    maskable = np.maximum(lengths - 3, 0)
    expected = np.where(lengths > 0, np.clip(np.floor(maskable * 0.15 + 0.5), 1, limit), 0)
    np.testing.assert_array_equal(owners_of_predictions(batch), expected)
    assert batch["masked_lm_positions"].shape == (len(lengths), masking.predictions_per_row(T, K))
    used = batch["masked_lm_weights"] > 0
    assert (np.diff(np.where(used, batch["masked_lm_positions"], 9999), axis=1)[used[:, 1:]] > 0).all()
    np.testing.assert_array_equal(batch["next_sentence_weights"], lengths > 0)


def test_80_10_10_and_uniform_choice_within_the_examples() -> None:
    masking = Masking(V, MASK, SPECIAL, max_predictions=20)
    rows = pack_rows(columns_of(np.full(9000, 20)), K, pad=0)
    batch = masked(rows, masking)
    row, spot = np.nonzero(batch["masked_lm_weights"])
    positions = batch["masked_lm_positions"][row, spot]
    before, after = batch["masked_lm_ids"][row, spot], batch["input_ids"][row, positions]
    np.testing.assert_array_equal(before, rows["input_ids"][row, positions])
    assert (before >= len(SPECIAL)).all()
    untouched = batch["input_ids"].copy()
    untouched[row, positions] = before
    np.testing.assert_array_equal(untouched, rows["input_ids"])
    n = len(row)
    for share, expected in ((after == MASK, 0.8), (after == before, 0.1 + 0.1 / 995)):
        assert abs(share.mean() - expected) < 4 * np.sqrt(expected * (1 - expected) / n)
    chosen = np.bincount(batch["position_ids"][row, positions], minlength=20)
    inner = np.delete(chosen, [0, 10, 19])  # [CLS] and the two [SEP]
    assert chosen.sum() == inner.sum() == n
    assert abs(inner - inner.mean()).max() < 5 * np.sqrt(inner.mean())


def test_words_are_masked_whole_within_their_example() -> None:
    continuing = tuple(range(600, V))
    masking = Masking(V, MASK, SPECIAL, max_predictions=20, continuing_ids=continuing)
    rows = pack_rows(columns_of(lengths_like_wikipedia(500, T)), K, pad=0)
    batch = masked(rows, masking)
    chosen = np.zeros(batch["input_ids"].shape, bool)
    row, spot = np.nonzero(batch["masked_lm_weights"])
    chosen[row, batch["masked_lm_positions"][row, spot]] = True
    ids = rows["input_ids"].astype(int)
    # A token that continues a word shares the fate of the one before it, unless that is a special token.
    joined = (ids[:, 1:] >= 600) & (ids[:, :-1] >= len(SPECIAL))
    np.testing.assert_array_equal(chosen[:, 1:][joined], chosen[:, :-1][joined])
    budget = np.clip(np.floor(np.maximum(rows[EXAMPLE_LENGTH] - 3, 0) * 0.15 + 0.5), 0, 20)
    predicted = owners_of_predictions(batch)
    assert (predicted <= np.where(rows[EXAMPLE_LENGTH] > 0, np.maximum(budget, 1), 0)).all()
    assert predicted.sum() > 0.7 * budget.sum()


def test_an_example_that_fills_its_row_is_masked_as_unpacked_rows_are() -> None:
    columns = columns_of(np.full(40, T))
    masking = Masking(V, MASK, SPECIAL, max_predictions=9)
    rows = pack_rows(columns, K, pad=0)
    words = philox_uint64((3, 0), 0, 40, masking.uint64s_per_row(T, K))
    actual = masking(rows["input_ids"], words, rows[EXAMPLE_LENGTH])
    expected = masking(columns["input_ids"], words)
    np.testing.assert_array_equal(actual["masked_lm_positions"][:, :9], expected["masked_lm_positions"])
    assert not actual["masked_lm_weights"][:, 9:].any()


@pytest.mark.parametrize(("length", "max_count", "cap"), [(14, 3, 20), (20, 3, 2), (12, 2, 20)])
def test_places_for_predictions_are_as_many_as_a_row_can_want(length: int, max_count: int, cap: int) -> None:
    masking = Masking(V, MASK, SPECIAL, max_predictions=cap, prob=0.3)
    expected = [int(masking.predictions_of[max(size - 2, 0)]) for size in range(length + 1)]
    best = max(
        sum(expected[size] for size in sizes)
        for sizes in itertools.product(range(length + 1), repeat=max_count)
        if sum(sizes) <= length
    )
    assert masking.predictions_per_row(length, max_count) == best
    assert masking.predictions_per_row(length) == cap


@pytest.fixture
def small_shards(monkeypatch) -> None:
    monkeypatch.setattr(build, "SHARD_BYTES", 8000)


def packing_of(place, **changes) -> DataConfig:
    pairs = {"short_seq_prob": 0.6} if changes.get("input_format") != "doc_sentences" else {}
    return config_of(place, **{"sequence_length": T, "packing": True, **pairs, **changes})


@pytest.mark.parametrize("input_format", ["nsp", "sop", "doc_sentences"])
def test_a_packed_set_has_the_examples_of_the_unpacked_one(input_format, small_shards, place, tokenizer, tmp_path):
    plain = build_examples(packing_of(place, input_format=input_format, packing=False), tokenizer, tmp_path)
    example_set = build_examples(packing_of(place, input_format=input_format), tokenizer, tmp_path)
    assert len(example_set.train) > 3
    assert example_set.folder != plain.folder
    assert [path.read_bytes() for path in example_set.eval] == [path.read_bytes() for path in plain.eval]
    np.testing.assert_array_equal(example_set.unigram_counts, plain.unigram_counts)
    for name in ("documents", "sentences", "tokens", "unused_tokens", "positive_rows"):
        assert example_set.counts[f"train_{name}"] == plain.counts[f"train_{name}"]
    assert example_set.counts["train_rows"] < plain.counts["train_rows"]
    for mine, expected in zip(example_set.train, plain.train, strict=True):  # shard by shard
        rows, alone = all_rows([mine]), all_rows([expected])
        lengths = alone["length"]
        label = next((name for name in alone if name.endswith("_label")), None)
        none = np.zeros_like(lengths)
        examples_alone = [
            (ids[:length].tolist(), int(second), int(answer))
            for ids, length, second, answer in zip(
                alone["input_ids"], lengths, alone["segment_a_length"], alone.get(label, none), strict=True
            )
        ]
        answers = rows.get(label, np.zeros_like(rows[EXAMPLE_LENGTH]))
        assert sorted(taken_apart({**rows, "next_sentence_label": answers})) == sorted(examples_alone)
        assert len(rows["length"]) <= 1.1 * min_rows(lengths, T, 8) + 1


@pytest.mark.medium
def test_bytes_do_not_depend_on_workers_parts_or_a_second_call(small_shards, place, tokenizer, tmp_path):
    one = build_examples(packing_of(place), tokenizer, tmp_path / "one")
    assert build_examples(packing_of(place, max_predictions_per_sequence=3), tokenizer, tmp_path / "one") == one
    assert build_examples(packing_of(place, max_sequences_per_pack=2), tokenizer, tmp_path / "one").folder != one.folder
    assert build_shard_subset(packing_of(place), tokenizer, (2, 2), tmp_path / "parts") is None
    assert digest(build_shard_subset(packing_of(place), tokenizer, (1, 2), tmp_path / "parts")) == digest(one)
    two = build_examples(packing_of(place, num_workers=2), tokenizer, tmp_path / "two")
    assert digest(two) == digest(one)


def test_batches_of_packed_rows_are_a_function_of_seed_step_and_place(place, tokenizer, tmp_path):
    rows = open_rows(build_examples(packing_of(place), tokenizer, tmp_path).train)
    masking = Masking(tokenizer.get_vocab_size(), MASK, SPECIAL, max_predictions=10)
    for frozen in (False, True):
        whole = PretrainingLoader(rows, masking, batch_size=8, seed=1, static_masking=frozen)
        halves = [PretrainingLoader(rows, masking, 8, 1, (i, 2), frozen) for i in range(2)]
        shapes = {name: value.shape for name, value in whole.batch(0).items()}
        assert shapes["example_ids"] == shapes["position_ids"] == (8, T)
        assert shapes["cls_positions"] == shapes["next_sentence_labels"] == shapes["next_sentence_weights"] == (8, 8)
        for step in (7, 0):
            parts = [half.batch(step) for half in halves]
            for name, value in whole.batch(step).items():
                np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_format": "full_sentences", "packing": True}, r"packing is true, but data\.input_format is full_"),
        ({"packing": True, "max_sequences_per_pack": 1}, r"data\.max_sequences_per_pack is 1: it must be at least 2"),
        ({"max_sequences_per_pack": 4}, r"max_sequences_per_pack is 4, but data\.packing is false: remove it"),
    ],
)
def test_what_cannot_be_packed_is_one_sentence(changes, message) -> None:
    with pytest.raises(UserError, match=message):
        DataConfig(train="docstrings:stdlib", **changes).check()
