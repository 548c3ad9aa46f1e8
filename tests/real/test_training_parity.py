"""A hundred training steps against transformers under torch's AdamW: the same weights, the same batches."""

import jax
import numpy as np
import pytest

from bert.config import ModelConfig, OptimizerConfig
from bert.heads import BertForPreTraining
from bert.losses import pretraining_objective
from bert.optimizer import make_optimizer
from bert.parallel import DataParallel
from bert.step import TrainState, make_train_step
from tests.real.test_model_parity import LAYERS, params_of

pytestmark = pytest.mark.real

torch = pytest.importorskip("torch", reason="needs the extra `torch`")
transformers = pytest.importorskip("transformers", reason="needs the extra `torch`")

STEPS, B, T, P, V = 100, 16, 24, 4, 1013
WARMUP, PEAK, DECAY, CLIP = 10, 1e-3, 0.01, 1.0
SIZES = {
    "vocab_size": V,
    "hidden_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 3,
    "intermediate_size": 200,
    "max_position_embeddings": 40,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def batches() -> list[dict[str, np.ndarray]]:
    """Rows that count up, by one or by two, through 50 of the words: which ones is learned within a hundred steps."""
    random = np.random.default_rng(0)
    made = []
    for _ in range(STEPS):
        ids = 10 + (random.integers(0, 50, (B, 1)) + np.arange(T) * random.integers(1, 3, (B, 1))) % 50
        lengths = random.integers(T // 2, T + 1, B)
        real = np.arange(T) < lengths[:, None]
        positions = np.sort(np.argsort(random.random((B, T // 2)), axis=1)[:, :P], axis=1)
        labels = np.take_along_axis(ids, positions, axis=1)
        weights = (np.arange(P) < random.integers(1, P + 1, (B, 1))).astype(np.float32)
        masked = ids.copy()
        np.put_along_axis(masked, positions, np.where(weights > 0, 3, labels), axis=1)
        made.append(
            {
                "input_ids": np.where(real, masked, 0).astype(np.int32),
                "token_type_ids": (np.arange(T) >= T // 3).astype(np.int32) * real,
                "attention_mask": real.astype(np.int32),
                "masked_lm_positions": positions.astype(np.int32),
                "masked_lm_ids": labels.astype(np.int32),
                "masked_lm_weights": weights,
                "next_sentence_labels": ((ids[:, 1] - ids[:, 0]) % 50 == 1).astype(np.int32),
                "next_sentence_weights": np.ones(B, np.float32),
                "rows": np.arange(B, dtype=np.int32),
            }
        )
    return made


def test_losses_of_a_hundred_steps_follow_torch() -> None:
    torch.manual_seed(0)
    reference = transformers.BertForPreTraining(transformers.BertConfig(**SIZES)).train()
    params = jax.tree.map(np.array, params_of(reference))
    ours, theirs = our_losses(params), torch_losses(reference)
    difference = np.abs(ours - theirs) / theirs
    assert theirs[-1] < 0.8 * theirs[0], "nothing was learned: the comparison says nothing"
    assert difference[0] < 1e-4
    assert difference.max() < 1e-3, difference  # float32 rounding, fed back through a hundred updates


def our_losses(params: dict) -> np.ndarray:
    settings = OptimizerConfig(
        learning_rate=PEAK, warmup_steps=WARMUP, weight_decay=DECAY, bias_correction=True, max_grad_norm=CLIP
    )
    model = BertForPreTraining(ModelConfig(**SIZES))
    objective = pretraining_objective(model.apply)
    optimizer = make_optimizer(settings, STEPS)
    parallel = DataParallel()
    step = parallel.compile(make_train_step(objective, optimizer, seed=0))
    state = parallel.replicate(TrainState.create(params, optimizer, objective.metrics))
    losses = []
    for batch in batches():
        state, outcome = step(state, parallel.place(batch, 1))
        losses.append(float(parallel.fetch(outcome.loss)))
    return np.array(losses)


def torch_losses(model) -> np.ndarray:
    """BERT's loop as PyTorch users write it: parameter groups by the decay rule, clipping, a linear schedule."""
    spared = {name for name, _ in model.named_parameters() if name.endswith("bias") or "LayerNorm" in name}
    groups = [
        {"params": [p for name, p in model.named_parameters() if (name in spared) == without], "weight_decay": decay}
        for without, decay in ((False, DECAY), (True, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=PEAK, betas=(0.9, 0.999), eps=1e-6)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, WARMUP, STEPS)
    losses = []
    for batch in batches():
        labels = np.full((B, T), -100)
        chosen = np.where(batch["masked_lm_weights"] > 0, batch["masked_lm_ids"], -100)
        np.put_along_axis(labels, batch["masked_lm_positions"].astype(int), chosen, axis=1)
        loss = model(
            input_ids=torch.tensor(batch["input_ids"], dtype=torch.long),
            token_type_ids=torch.tensor(batch["token_type_ids"], dtype=torch.long),
            attention_mask=torch.tensor(batch["attention_mask"]),
            labels=torch.tensor(labels),
            next_sentence_label=torch.tensor(batch["next_sentence_labels"], dtype=torch.long),
        ).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return np.array(losses)
