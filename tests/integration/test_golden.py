"""Values recorded once: a change that moves one of them changes what users' runs compute."""

import hashlib
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util

import bert
from bert.commands.pretrain import main
from bert.config import PretrainConfig
from bert.config.yaml_io import load_config as load_config
from bert.data.pretraining.build import build_examples
from bert.data.pretraining.dataset import open_rows
from bert.data.pretraining.loader import PretrainingLoader, make_masking
from bert.model.dropout import Dropout
from bert.tokenizer.vocabulary import load_tokenizer
from tests.conftest import SMALL_RUN

STEPS = 5

VOCABULARY = "fc5c501f26de72a2"
IDS = [2, 36, 43, 42, 32, 35, 77, 1, 39, 1, 3, 4, 8, 1, 47, 3]
BATCHES = {
    "0 input_ids": "83e38474b39b182b",
    "0 masked_lm_positions": "4a937424b03cdaa9",
    "0 masked_lm_ids": "3b57ceb7a7fa5820",
    "0 masked_lm_weights": "049fc42ffde0bd24",
    "0 token_type_ids": "f45f1400cc25cc31",
    "0 attention_mask": "73e6c812534c3783",
    "0 rows": "1ed423902a7c8841",
    "0 next_sentence_labels": "d48d1720a6bba30a",
    "0 next_sentence_weights": "5d4ee7f6df1dd848",
    "7 input_ids": "a0052e7297e5b8bb",
    "7 masked_lm_positions": "0e3aaf0ab89d0873",
    "7 masked_lm_ids": "724e27ded8a45d50",
    "7 masked_lm_weights": "148e8611ba49362b",
    "7 token_type_ids": "aef64b1f09bea32a",
    "7 attention_mask": "68afa5b7d0ee5ef1",
    "7 rows": "1ed423902a7c8841",
    "7 next_sentence_labels": "dfe3215a9e5b151f",
    "7 next_sentence_weights": "5d4ee7f6df1dd848",
}
DROPOUT = "050683ec7c66a7d0"
LOSSES = [4.5045566, 4.3078414, 4.27382, 4.3413832, 4.4007407]
PARAMETERS = "bbfa80c8c1c1fae6"
NORMS = [
    0.0180871,
    3.99996,
    1.97908,
    0.5371,
    3.44435,
    0.0,
    1.347,
    0.0176121,
    1.45914,
    0.0190466,
    1.46192,
    0.0184279,
    1.43288,
    0.0175653,
    3.99904,
    0.0227388,
    1.9354,
    0.0175036,
    1.99618,
    0.0173288,
    3.99946,
    0.0147716,
    1.4004,
    62.4067,
    0.0187184,
    3.98979,
    0.0180111,
    1.35906,
    0.00521155,
    0.523189,
]


def digest(*arrays: np.ndarray) -> str:
    hashed = hashlib.sha256()
    for array in arrays:
        hashed.update(f"{array.dtype}{array.shape}".encode() + np.ascontiguousarray(array).tobytes())
    return hashed.hexdigest()[:16]


@pytest.fixture(scope="module")
def run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("golden") / "run"
    every = [f"--training.{key}={STEPS}" for key in ("steps", "eval_every", "checkpoint_every")]
    assert not main([f"--data.train={corpus}", f"--output_dir={folder}", *SMALL_RUN, *every, "--training.log_every=1"])
    return folder


@pytest.mark.medium
def test_vocabulary_and_token_ids(run: Path) -> None:
    tokenizer = load_tokenizer(run)
    words = (run / "vocab.txt").read_bytes()
    ids = tokenizer.encode("Bakori tune losa, mi!", "[MASK] é 猫 ri").ids
    assert (hashlib.sha256(words).hexdigest()[:16], ids) == (VOCABULARY, IDS)


@pytest.mark.medium
def test_batches_and_masks(run: Path) -> None:
    config, tokenizer = load_config(PretrainConfig, run / "config.yaml"), load_tokenizer(run)
    examples = build_examples(config.data, tokenizer)
    loader = PretrainingLoader(open_rows(examples.train), make_masking(config.data, tokenizer), 8, config.seed)
    digests = {}
    for step in (0, 7):
        for name, array in loader.batch(step).items():
            digests[f"{step} {name}"] = digest(array)
    assert digests == BATCHES


def test_dropout_bits() -> None:
    dropout = Dropout.for_step(3, 5, jnp.arange(4)).fold_in("layer_0")
    assert digest(np.asarray(dropout(jnp.ones((4, 6, 8)), 0.1, "hidden"))) == DROPOUT


@pytest.mark.medium
def test_parameters_and_losses(run: Path) -> None:
    """Five steps in float32 with dropout.

    Sums differ between processors in their last bits only; the key's bias has no gradient but rounding.
    """
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["split"] == "train"]
    np.testing.assert_allclose(losses, LOSSES, rtol=2e-6)
    params = traverse_util.flatten_dict(bert.load(run).params, sep="/")
    shapes = "\n".join(f"{name} {array.shape}" for name, array in sorted(params.items()))
    assert hashlib.sha256(shapes.encode()).hexdigest()[:16] == PARAMETERS
    norms = [float(np.linalg.norm(params[name])) for name in sorted(params)]
    np.testing.assert_allclose(norms, NORMS, rtol=2e-5, atol=2e-6)
