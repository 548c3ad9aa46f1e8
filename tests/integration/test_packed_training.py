"""Packed rows train as their examples alone: the same losses, the same gradients, on any devices, through a run."""

import dataclasses
import functools
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert.commands.pretrain import main
from bert.config import DataConfig, ModelConfig, PretrainConfig, TrainingConfig
from bert.data.pretraining.loader import masked_batch
from bert.data.pretraining.masking import Masking, philox_uint64
from bert.data.pretraining.packing import EXAMPLE_LENGTH, pack_rows
from bert.model.dropout import Dropout
from bert.model.encoder import Bert
from bert.model.mask import Packing
from bert.parallel.backends import PmapParallelism
from bert.training.pretraining.objectives import build_model_and_loss
from bert.training.step import compute_gradients
from tests.conftest import SMALL_RUN
from tests.helpers import lines_of, results_of, state_of

V, T, K, ROWS = 61, 32, 6, 8
CONFIG = ModelConfig(V, 16, 2, 2, 32, max_position_embeddings=T, position_offset=2, initializer_range=0.2)
MASKING = Masking(V, mask_id=4, special_ids=(0, 1, 2, 3, 4), max_predictions=5)


@functools.cache
def batch_of_packed_rows() -> dict[str, np.ndarray]:
    """Eight rows of one to six examples, spread unevenly, and padding here and there."""
    random = np.random.default_rng(0)
    lengths = np.array([31, 20, 12, 17, 9, 5, 13, 13, 4, 4, 4, 4, 4, 6, 5, 25, 8, 5, 4, 4, 32, 4])
    ids = random.integers(5, V, (len(lengths), T)).astype(np.uint16)
    segment_a = lengths // 2
    at = np.arange(len(lengths))
    ids[:, 0], ids[at, segment_a - 1], ids[at, lengths - 1] = 2, 3, 3
    rows = pack_rows(
        {
            "input_ids": np.where(np.arange(T) < lengths[:, None], ids, 0).astype(np.uint16),
            "length": lengths,
            "segment_a_length": segment_a,
            "next_sentence_label": random.integers(0, 2, len(lengths)),
        },
        K,
        pad=0,
    )
    counts = np.count_nonzero(rows[EXAMPLE_LENGTH], axis=1)
    # One example fills a row, another row is full of them, most have some padding.
    assert len(counts) == ROWS
    assert (counts.min(), counts.max()) == (1, K)
    words = philox_uint64((1, 2), 0, ROWS, MASKING.uint64s_per_row(T, K))
    batch = masked_batch(rows, MASKING, words, 0)
    uniforms = random.random(batch["masked_lm_ids"].shape, np.float32)
    return {**batch, "sample_uniforms": uniforms}  # which a generator of replaced tokens draws by


def unpacked(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Unpacks each example of a packed batch into a separate row with the same corruption. No [B, K] arrays remain."""
    rows = []
    for row in range(len(batch["input_ids"])):
        for number in range(K):
            here = np.flatnonzero(batch["example_ids"][row] == number + 1)
            if not len(here):
                assert batch["next_sentence_weights"][row, number] == 0
                continue
            start, length = here[0], len(here)
            assert (here == np.arange(start, start + length)).all()
            alone = {name: np.zeros(T, np.int32) for name in ("input_ids", "token_type_ids", "attention_mask")}
            for name, values in alone.items():
                values[:length] = batch[name][row, here]
            positions = batch["masked_lm_positions"][row]
            mine = (batch["masked_lm_weights"][row] > 0) & (positions >= start) & (positions < start + length)
            for name in ("masked_lm_positions", "masked_lm_ids", "masked_lm_weights", "sample_uniforms"):
                values = batch[name][row, mine] - (start if name == "masked_lm_positions" else 0)
                alone[name] = np.pad(values, (0, MASKING.max_predictions - len(values)))
            for name in ("next_sentence_labels", "next_sentence_weights"):
                alone[name] = batch[name][row, number]
            rows.append({**alone, "rows": np.int32(len(rows))})
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


DETECTION = ("disc_loss", "disc_accuracy", "disc_recall", "replaced_share")


@functools.cache
def compiled(label: str | None, devices: int, drop: bool):
    data = DataConfig(input_format="nsp" if label == "next_sentence" else "full_sentences")
    training = TrainingConfig(objective="rtd" if label == "replaced" else "mlm")
    model, objective = build_model_and_loss(PretrainConfig(data=data, model=CONFIG, training=training))
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"]
    parallel = PmapParallelism(jax.devices()[:devices])

    def dropout(rows: jax.Array) -> Dropout | None:
        return Dropout.for_step(3, 5, rows) if drop else None

    step = parallel.compile(lambda params, batch: compute_gradients(params, batch, objective, dropout))
    return parallel, parallel.put_state(params), step


def gradients(label: str | None, batch: dict[str, np.ndarray], devices: int = 1, micro: int = 1, drop: bool = False):
    parallel, params, step = compiled(label, devices, drop)
    grads, sums = step(params, parallel.shard_batch(batch, micro))
    return parallel.to_host(grads), parallel.to_host(sums)


def assert_close(actual, expected, tolerance: float) -> None:
    """Per tensor in norm; the gradient of a key's bias is zero in theory, so its rounding is measured by its peers'."""

    def close(path, mine: np.ndarray, other: np.ndarray) -> None:
        norm = np.linalg.norm(other)
        if "key" in jax.tree_util.keystr(path) and mine.ndim == 1:
            norm = max(norm, 1.0)
        assert np.linalg.norm(mine - other) <= tolerance * norm, jax.tree_util.keystr(path)

    jax.tree_util.tree_map_with_path(close, actual, expected)


@pytest.mark.medium
@pytest.mark.parametrize("label", ["next_sentence", "replaced", pytest.param(None, marks=pytest.mark.slow)])
def test_packed_rows_have_the_losses_and_gradients_of_their_examples(label: str | None) -> None:
    batch = batch_of_packed_rows()
    alone = unpacked(batch)
    assert len(alone["input_ids"]) == 22
    assert alone["masked_lm_weights"].sum() == batch["masked_lm_weights"].sum()
    packed, our_sums = gradients(label, batch)
    separate, their_sums = gradients(label, alone)
    assert_close(packed, separate, 1e-5)
    of_label = {"next_sentence": {"nsp_loss", "nsp_accuracy"}, "replaced": {*DETECTION}}
    assert set(our_sums) == {"mlm_loss", "mlm_accuracy"} | of_label.get(label, set())
    for name, (total, weight) in their_sums.items():
        np.testing.assert_allclose(our_sums[name][0], total, rtol=1e-5)
        assert our_sums[name][1] == weight
    # What would be noticed: attention over the whole row, positions that continue, and one [CLS] for all.
    joined = {**batch, "example_ids": np.minimum(batch["example_ids"], 1)}
    going_on = {**batch, "position_ids": np.tile(np.arange(T, dtype=np.int32), (ROWS, 1))}
    one_cls = {**batch, "cls_positions": np.zeros_like(batch["cls_positions"])}
    for name, wrong in (("mlm_loss", joined), ("mlm_loss", going_on), ("nsp_loss", one_cls)):
        if name in their_sums:
            assert abs(gradients(label, wrong)[1][name][0] / their_sums[name][0] - 1) > 2e-4


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "micro"), [(4, 1), (2, 4)])
def test_devices_and_micro_batches_do_not_matter_for_packed_rows(devices: int, micro: int) -> None:
    expected, expected_sums = gradients("next_sentence", batch_of_packed_rows(), drop=True)
    grads, sums = gradients("next_sentence", batch_of_packed_rows(), devices, micro, drop=True)
    assert_close(grads, expected, 1e-6)
    for name, pair in expected_sums.items():
        np.testing.assert_allclose(sums[name], pair, rtol=1e-6)


@pytest.mark.medium
def test_no_example_sees_another() -> None:
    model, batch = Bert(CONFIG), batch_of_packed_rows()
    packing = Packing(batch["example_ids"], batch["position_ids"], batch["cls_positions"])
    params = jax.jit(model.init)(jax.random.key(1), jnp.zeros((1, 8), jnp.int32))

    @jax.jit
    def encode(ids: np.ndarray):
        result = model.apply(params, ids, batch["token_type_ids"], packing=packing, intermediates=True)
        return result.last_hidden_state, result.pooled_output, result.attentions

    hidden, pooled, attentions = encode(batch["input_ids"])
    assert pooled.shape == (ROWS, K, CONFIG.hidden_size)
    apart = batch["example_ids"][:, :, None] != batch["example_ids"][:, None, :]
    for weights in attentions:
        assert not np.asarray(weights)[np.broadcast_to(apart[:, None], weights.shape)].any()
    second = batch["example_ids"] == 2
    changed = np.where(second, (batch["input_ids"] + 7) % V, batch["input_ids"])
    hidden_after, pooled_after, _ = encode(changed)
    np.testing.assert_array_equal(np.asarray(hidden_after)[~second], np.asarray(hidden)[~second])
    assert (np.asarray(hidden_after)[second] != np.asarray(hidden)[second]).any(axis=-1).all()
    np.testing.assert_array_equal(np.delete(pooled_after, 1, axis=1), np.delete(pooled, 1, axis=1))


PACKED_RUN = [*SMALL_RUN, "--data.packing=true", "--data.short_seq_prob=0.8"]


@pytest.fixture(scope="module")
def packed_run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("packed") / "run"
    assert main([f"--data.train={corpus}", f"--output_dir={run}", *PACKED_RUN]) == 0
    return run


@pytest.mark.slow
def test_a_run_on_packed_rows_is_scored_on_the_same_held_out_rows(packed_run, corpus, tmp_path) -> None:
    plain = tmp_path / "plain"
    without = [argument for argument in PACKED_RUN if "packing" not in argument]
    assert main([f"--data.train={corpus}", f"--output_dir={plain}", *without]) == 0
    actual, expected = (results_of(run) for run in (packed_run, plain))
    assert actual["baselines"] == expected["baselines"], (
        "the same held-out tokens are predicted, the same labels asked for"
    )
    assert set(actual["eval"]) == set(expected["eval"])
    assert actual["eval"]["mlm_loss"] == pytest.approx(expected["eval"]["mlm_loss"], rel=0.05)
    assert lines_of(packed_run) != lines_of(plain)


@pytest.mark.slow
def test_a_run_on_packed_rows_resumes_exactly(packed_run, tmp_path) -> None:
    run = tmp_path / "run"
    shutil.copytree(packed_run, run)
    shutil.rmtree(run / "checkpoints" / "6")
    assert main([f"--config={run / 'config.yaml'}", f"--output_dir={run}"]) == 0
    assert lines_of(run) == lines_of(packed_run)
    jax.tree.map(np.testing.assert_array_equal, state_of(run), state_of(packed_run))


@pytest.mark.slow
def test_large_rows_of_many_short_examples_agree_too() -> None:
    """T 512: forty examples of 9 to 60 tokens over three rows."""
    long_rows = dataclasses.replace(CONFIG, max_position_embeddings=512)
    random = np.random.default_rng(5)
    lengths = random.integers(9, 61, 40)
    ids = random.integers(5, V, (40, 512)).astype(np.uint16)
    ids[:, 0], ids[np.arange(40), lengths - 1] = 2, 3
    ids[np.arange(512) >= lengths[:, None]] = 0
    columns = {"input_ids": ids, "length": lengths, "segment_a_length": lengths}
    rows = pack_rows(columns, 20, pad=0)
    model = Bert(long_rows)
    params = jax.jit(model.init)(jax.random.key(1), jnp.zeros((1, 8), jnp.int32))
    batch = masked_batch(
        rows, MASKING, philox_uint64((0, 0), 0, len(rows["length"]), MASKING.uint64s_per_row(512, 20)), 0
    )
    packing = Packing(batch["example_ids"], batch["position_ids"], batch["cls_positions"])
    together = model.apply(params, rows["input_ids"].astype(np.int32), packing=packing).pooled_output
    mask = (np.arange(512) < lengths[:, None]).astype(np.int32)[:, :64]
    alone = model.apply(params, ids[:, :64].astype(np.int32), attention_mask=mask).pooled_output
    pooled = np.asarray(together)[rows[EXAMPLE_LENGTH] > 0]
    order = np.argsort(pooled[:, 0]), np.argsort(np.asarray(alone)[:, 0])
    np.testing.assert_allclose(pooled[order[0]], np.asarray(alone)[order[1]], atol=1e-5)
