from collections.abc import Sequence

import numpy as np
import pytest

from bert.data.pretraining.masking import Masking, SamplingMasking, philox_uint64, philox_uint64_of_rows

V, MASK, SPECIAL = 1000, 4, (0, 1, 2, 3, 4)


def corpus(rows: int, length: int = 128) -> np.ndarray:
    """Rows [CLS] words [SEP] words [SEP] padding, of different lengths."""
    random = np.random.default_rng(0)
    ids = random.integers(5, V, (rows, length)).astype(np.uint16)
    ids[:, 0] = 2
    for row, end in zip(ids, random.integers(8, length + 1, rows), strict=True):
        row[end // 2] = row[end - 1] = 3
        row[end:] = 0
    return ids


def masked(ids: np.ndarray, masking: Masking, key: tuple[int, int] = (7, 1)) -> dict[str, np.ndarray]:
    words = philox_uint64(key, 0, len(ids), masking.uint64s_per_row(ids.shape[1]))
    return masking(ids, words)


def test_a_worked_example() -> None:
    # Ten maskable tokens at 30%: three are chosen, those with the smallest of the first twelve 32-bit words. Their
    # fates are the next P words, in order of position: below 0.8 [MASK], from 0.9 a random token, between them kept.
    masking = Masking(vocab_size=20, mask_id=4, special_ids=SPECIAL, max_predictions=4, prob=0.3)
    ids = np.array([[2, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 3]], dtype=np.uint16)
    share = lambda x: int(x * 2**32)  # noqa: E731
    selection = [0, 900, 50, 800, 700, 10, 600, 500, 400, 300, 30, 1]  # smallest of the maskable: places 5, 10, 2
    fates = [share(0.5), share(0.85), share(0.95), 0]  # place 2 -> [MASK], place 5 -> kept, place 10 -> random
    choices = [0, 0, share(0.5), 0]  # the random token is number 7 of the 15 ordinary ones: 5 + 7
    halves = np.array(selection + fates + choices, dtype=np.uint32)
    words = np.zeros((1, masking.uint64s_per_row(12) * 2), dtype=np.uint32)
    words[0, : len(halves)] = halves
    result = masking(ids, words.view(np.uint64))
    assert result["input_ids"].tolist() == [[2, 10, 4, 12, 13, 14, 15, 16, 17, 18, 12, 3]]
    assert result["masked_lm_positions"].tolist() == [[2, 5, 10, 0]]
    assert result["masked_lm_ids"].tolist() == [[11, 14, 19, 0]]
    assert result["masked_lm_weights"].tolist() == [[1, 1, 1, 0]]


def test_each_row_predicts_15_percent_rounded_at_least_one_at_most_p() -> None:
    masking = Masking(V, MASK, SPECIAL, max_predictions=12)
    ids = corpus(2000)
    count = masked(ids, masking)["masked_lm_weights"].sum(axis=1)
    maskable = (ids >= 5).sum(axis=1)
    np.testing.assert_array_equal(count, np.clip(np.floor(maskable * 0.15 + 0.5), 1, 12))
    assert count.min() == 1
    assert count.max() == 12


def predictions_of(ids: np.ndarray, result: dict[str, np.ndarray]) -> tuple[np.ndarray, ...]:
    """Row, position, original and resulting token of each prediction."""
    rows, places = np.nonzero(result["masked_lm_weights"])
    positions = result["masked_lm_positions"][rows, places]
    return rows, positions, ids[rows, positions].astype(int), result["input_ids"][rows, positions]


def assert_80_10_10(before: np.ndarray, after: np.ndarray) -> None:
    """Checks the shares within four standard deviations; a random token is the original one in 1 of 995 cases."""
    masks, kept = after == MASK, after == before
    for share, expected in ((masks, 0.8), (~masks & ~kept, 0.1 * 994 / 995), (kept, 0.1 + 0.1 / 995)):
        assert abs(share.mean() - expected) < 4 * np.sqrt(expected * (1 - expected) / len(before))


def test_80_10_10_and_uniform_choice() -> None:
    ids = corpus(20_000)
    rows, positions, before, after = predictions_of(ids, masked(ids, Masking(V, MASK, SPECIAL, max_predictions=20)))
    assert_80_10_10(before, after)
    # Every ordinary token is drawn about as often as another (chi-squared, 994 degrees of freedom, 5 deviations).
    drawn = np.bincount(after[(after != MASK) & (after != before)], minlength=V)[5:]
    assert ((drawn - drawn.mean()) ** 2 / drawn.mean()).sum() < 994 + 5 * np.sqrt(2 * 994)
    # Every place is chosen about as often as its neighbours.
    full = ids[:, -1] == 3
    inner = np.delete(np.bincount(positions[full[rows]], minlength=128), [0, 64, 127])
    assert abs(inner - inner.mean()).max() < 5 * np.sqrt(inner.mean())


def test_specials_and_padding_are_never_touched_nor_put_in() -> None:
    masking = Masking(V, MASK, SPECIAL, max_predictions=20)
    ids = corpus(5000)
    result = masked(ids, masking)
    rows, positions, before, _ = predictions_of(ids, result)
    assert (before >= 5).all()
    changed = result["input_ids"] != ids
    assert not changed[ids < 5].any()
    assert set(np.unique(result["input_ids"][changed])) & set(SPECIAL) == {MASK}
    np.testing.assert_array_equal(result["masked_lm_ids"][result["masked_lm_weights"] > 0], before)
    # Nothing else changed, no place is predicted twice, and places ascend.
    untouched = changed.copy()
    untouched[rows, positions] = False
    assert not untouched.any()
    used = result["masked_lm_weights"] > 0
    assert (np.diff(np.where(used, result["masked_lm_positions"], 9999), axis=1)[used[:, 1:]] > 0).all()


def test_a_row_without_maskable_tokens_predicts_nothing() -> None:
    ids = np.array([[2, 3, 3, 0, 0, 0, 0, 0]], dtype=np.uint16)
    result = masked(ids, Masking(V, MASK, SPECIAL, max_predictions=4))
    assert result["masked_lm_weights"].sum() == 0
    np.testing.assert_array_equal(result["input_ids"], ids)


def test_short_rows_with_more_places_than_tokens() -> None:
    ids = corpus(50, length=8)
    result = masked(ids, Masking(V, MASK, SPECIAL, max_predictions=20))
    assert result["masked_lm_positions"].shape == (50, 20)
    np.testing.assert_array_equal(result["masked_lm_weights"].sum(axis=1), 1)


@pytest.mark.parametrize("continuing", [(), range(700, V)])
@pytest.mark.parametrize("length", [128, 77])
def test_rows_are_the_same_whoever_draws_them(length: int, continuing: Sequence[int]) -> None:
    masking = Masking(V, MASK, SPECIAL, max_predictions=20, continuing_ids=continuing)
    ids = corpus(64, length)
    whole = masked(ids, masking)
    words = masking.uint64s_per_row(length)
    for first in (0, 16, 48):
        part = masking(ids[first : first + 16], philox_uint64((7, 1), first, 16, words))
        for name, value in part.items():
            np.testing.assert_array_equal(value, whole[name][first : first + 16])
    other = masked(ids, masking, key=(7, 2))
    assert (other["masked_lm_positions"] != whole["masked_lm_positions"]).any(axis=1).mean() > 0.8


def words_of(ids: np.ndarray, continuing: set[int]) -> list[list[list[int]]]:
    """The words of each row as lists of positions; a special token ends one."""
    result = []
    for row in ids.tolist():
        words: list[list[int]] = []
        open_word = False
        for place, token in enumerate(row):
            if token in SPECIAL:
                open_word = False
            elif open_word and token in continuing:
                words[-1].append(place)
            else:
                words.append([place])
                open_word = True
        result.append(words)
    return result


CONTINUING = range(700, V)  # 30% of the tokens


def whole_words(**changes) -> Masking:
    return Masking(V, MASK, SPECIAL, **{"max_predictions": 20, "continuing_ids": CONTINUING, **changes})


def test_a_worked_example_of_whole_words() -> None:
    # Nine maskable tokens at 40%: a budget of four. Words by their random numbers: the one at place 1 (one token), that
    # at place 2 (four tokens, which no longer fit: passed over), that at place 6 (two), that at place 8 (one).
    masking = Masking(30, MASK, SPECIAL, max_predictions=5, prob=0.4, continuing_ids=(20, 21, 22))
    ids = np.array([[2, 10, 11, 20, 21, 22, 12, 20, 13, 14, 3, 0]], dtype=np.uint16)
    halves = np.zeros((1, masking.uint64s_per_row(12) * 2), dtype=np.uint32)
    halves[0, :12] = [0, 10, 20, 1, 1, 1, 30, 1, 40, 50, 0, 0]
    result = masking(ids, halves.view(np.uint64))
    assert result["masked_lm_positions"].tolist() == [[1, 6, 7, 8, 0]]
    assert result["masked_lm_ids"].tolist() == [[10, 12, 20, 13, 0]]
    assert result["masked_lm_weights"].tolist() == [[1, 1, 1, 1, 0]]
    assert result["input_ids"].tolist() == [[2, 4, 11, 20, 21, 22, 4, 4, 4, 14, 3, 0]]


def test_words_are_masked_whole_or_not_at_all_within_the_budget() -> None:
    masking, ids = whole_words(max_predictions=12), corpus(500)
    result = masked(ids, masking)
    single = masked(ids, Masking(V, MASK, SPECIAL, max_predictions=12))
    budget = single["masked_lm_weights"].sum(axis=1)
    used = result["masked_lm_weights"] > 0
    assert (used.sum(axis=1) <= budget).all()
    assert used.sum() > 0.98 * budget.sum()
    for row, words in enumerate(words_of(ids, set(CONTINUING))):
        chosen = set(result["masked_lm_positions"][row, used[row]].tolist())
        assert sorted(chosen) == result["masked_lm_positions"][row, used[row]].tolist()
        assert chosen == {place for word in words if word[0] in chosen for place in word}
        unused = int(budget[row]) - len(chosen)
        assert all(len(word) > unused for word in words if word[0] not in chosen), "what is left out does not fit"
    np.testing.assert_array_equal(
        np.where(used, result["masked_lm_ids"], 0),
        np.where(used, np.take_along_axis(ids, result["masked_lm_positions"], 1), 0),
    )


def test_whole_words_are_80_10_10_token_by_token() -> None:
    ids = corpus(20_000)
    result = masked(ids, whole_words())
    rows, positions, before, after = predictions_of(ids, result)
    assert_80_10_10(before, after)
    untouched = np.ones(ids.shape, bool)
    untouched[rows, positions] = False
    np.testing.assert_array_equal(result["input_ids"][untouched], ids[untouched])
    # Words of all lengths are about equally likely. Longer ones are slightly less likely: they may no longer fit.
    assert np.isin(before, CONTINUING).mean() == pytest.approx(np.isin(ids[ids >= 5], CONTINUING).mean(), rel=0.15)


@pytest.mark.parametrize("row", [[2, 3, 0, 0, 0, 0, 0, 0], [2, 10, 800, 800, 800, 800, 800, 3]])
def test_no_word_that_fits_predicts_nothing(row) -> None:
    ids = np.array([row], dtype=np.uint16)
    result = masked(ids, whole_words())
    assert result["masked_lm_weights"].sum() == 0
    np.testing.assert_array_equal(result["input_ids"], ids)


@pytest.mark.parametrize("words_per_row", [4, 84])
def test_rows_in_any_order_have_the_words_of_their_numbers(words_per_row) -> None:
    rows = np.array([7, 2**40, 0, 7, 8, 3])
    words = philox_uint64_of_rows((5, 6), rows, words_per_row)
    assert len(np.unique(words)) == 5 * words_per_row
    for row, drawn in zip(rows.tolist(), words, strict=True):
        np.testing.assert_array_equal(drawn, philox_uint64((5, 6), row, 1, words_per_row)[0])
    assert philox_uint64_of_rows((5, 6), rows[:0], words_per_row).shape == (0, words_per_row)


@pytest.mark.parametrize("sizes", [[1] * 100, [3] * 30, [9, 1, 9, 1, 40], [21] * 6 + [1] * 2, [2] * 60])
def test_whole_words_are_taken_in_the_order_of_their_draws(sizes) -> None:
    """Compares with a plain loop, also if the first words of the order are too long or too few."""
    masking = whole_words()
    tokens = [token for size in sizes for token in [10] + [800] * (size - 1)]
    ids = np.array([[2, *tokens, 3]] * 64, dtype=np.uint16)
    words = philox_uint64((1, 2), 0, len(ids), masking.uint64s_per_row(ids.shape[1]))
    starts = np.cumsum([1, *sizes])[:-1]
    result = masking(ids, words)
    for row, draws in enumerate(words.view(np.uint32)):
        left, chosen = int(masking.predictions_of[sum(sizes)]), []
        for word in sorted(range(len(sizes)), key=lambda word: (draws[starts[word]], starts[word])):
            if sizes[word] <= left:
                chosen += range(starts[word], starts[word] + sizes[word])
                left -= sizes[word]
        taken = result["masked_lm_weights"][row] > 0
        assert result["masked_lm_positions"][row][taken].tolist() == sorted(chosen)


def test_the_order_of_the_memory_does_not_matter() -> None:
    ids = corpus(16)
    for name, value in masked(np.asfortranarray(ids), whole_words()).items():
        np.testing.assert_array_equal(value, masked(ids, whole_words())[name])


def test_a_generators_masks_are_85_per_cent_masks_and_none_random() -> None:
    masking = SamplingMasking(V, MASK, SPECIAL, max_predictions=20)
    ids = np.random.default_rng(0).integers(5, V, (4000, 128))
    words = philox_uint64((1, 2), 0, 4000, masking.uint64s_per_row(128))
    batch = masking(ids, words)
    plain = Masking(V, MASK, SPECIAL, max_predictions=20)(ids, words)
    for name in ("masked_lm_positions", "masked_lm_ids", "masked_lm_weights"):
        np.testing.assert_array_equal(batch[name], plain[name])
    read = np.take_along_axis(batch["input_ids"], batch["masked_lm_positions"], axis=1)
    used = batch["masked_lm_weights"] > 0
    masked = read[used] == MASK
    assert abs(masked.mean() - 0.85) < 4 * (0.85 * 0.15 / used.sum()) ** 0.5
    np.testing.assert_array_equal(read[used][~masked], batch["masked_lm_ids"][used][~masked])
    uniforms = batch["sample_uniforms"]
    assert (uniforms.shape, uniforms.dtype) == (used.shape, np.float32)
    assert 0 <= uniforms.min() < 1e-3 < 0.999 < uniforms.max() < 1
    assert abs(uniforms.mean() - 0.5) < 4 / (12 * uniforms.size) ** 0.5
    assert len(np.unique(uniforms)) > 0.99 * uniforms.size


def test_a_rows_uniforms_do_not_depend_on_the_rows_before_it() -> None:
    masking = SamplingMasking(V, MASK, SPECIAL, max_predictions=5)
    ids = np.random.default_rng(0).integers(5, V, (6, 32))
    count = masking.uint64s_per_row(32)
    whole = masking(ids, philox_uint64((1, 2), 0, 6, count))
    part = masking(ids[4:], philox_uint64((1, 2), 4, 2, count))
    np.testing.assert_array_equal(whole["sample_uniforms"][4:], part["sample_uniforms"])
