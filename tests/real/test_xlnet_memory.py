"""XLNet's memory: two segments of transformers with mems, and ours with a `SegmentMemory`."""

from pathlib import Path

import numpy as np
import pytest

import bert
from bert.model.pretraining import BertForPermutedLM, PermutedTokens
from bert.model.recurrence import COLLECTION, SegmentMemory, kept_memory, memory_variables
from tests.real.family_cases import CASES
from tests.real.hf_models import drawn, torch

pytestmark = pytest.mark.real

B, T, M, P = 3, 7, 9, 3


def test_permuted_logits_and_states_after_a_segment(tmp_path: Path) -> None:
    """The memory has fewer tokens than M after the first segment, and more than fit after the second one."""
    settings = {**CASES["xlnet"].settings, "mem_len": M}
    reference = drawn(tmp_path / "theirs", "BertForMaskedLM", "xlnet", **settings).eval()
    model = bert.load(tmp_path / "theirs")
    assert model.config.memory_length == M
    random = np.random.default_rng(0)
    first, second = random.integers(6, model.config.known_vocab_size, (2, B, T))
    types = np.broadcast_to(np.arange(T) > 4, (B, T)).astype(int)
    positions = np.stack([random.permutation(T)[:P] for _ in range(B)])
    ranks = np.zeros((B, T), int)
    np.put_along_axis(ranks, positions, np.arange(1, P + 1)[None], axis=1)
    later, same = ranks[:, None] > ranks[:, :, None], ranks[:, None] == ranks[:, :, None]
    hidden = later | (same & (ranks[:, None] > 0))
    targets = np.zeros((B, P, T), np.float32)
    np.put_along_axis(targets, positions[:, :, None], 1, axis=2)
    with torch.no_grad():
        begun = reference(torch.tensor(first), token_type_ids=torch.tensor(types), use_mems=True)
        permutation = {"perm_mask": torch.tensor(hidden, dtype=torch.float), "target_mapping": torch.tensor(targets)}
        rest = {"token_type_ids": torch.tensor(types), "mems": begun.mems, "use_mems": True}
        theirs = reference(torch.tensor(second), **permutation, **rest)

    ours = BertForPermutedLM(model.config)
    params, memory, ones = model.params, SegmentMemory.empty(model.config, B), np.ones((B, P), np.float32)
    for ids, weights, mems in ((first, 0 * ones, begun.mems), (second, ones, theirs.mems)):
        permuted = PermutedTokens(positions, np.zeros((B, P), int), weights)
        variables = {"params": params, **memory_variables(memory)}
        logits, kept = ours.apply(variables, ids, types, None, permuted, mutable=[COLLECTION])
        memory = kept_memory(kept)
        known = int(memory.length[0])
        for layer, states in enumerate(mems):
            expected = states.numpy().transpose(1, 0, 2)[:, -known:]
            np.testing.assert_allclose(memory.states[:, layer, -known:], expected, atol=1e-4)
    np.testing.assert_allclose(logits, theirs.logits.numpy(), atol=1e-4)
    model.save(tmp_path / "ours")
    assert bert.load(tmp_path / "ours").config.memory_length == M
