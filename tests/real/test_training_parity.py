"""Training steps against transformers under torch's AdamW: the same weights, batches and, if any, dropout masks."""

import itertools
from collections.abc import Callable, Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util

from bert.config import ModelConfig, OptimizerConfig
from bert.data.batching import bucket_length, epoch_batches
from bert.data.rows import IGNORE_INDEX, TokenRows
from bert.interchange import families
from bert.interchange.families.base import Family
from bert.model.decoders import BertForCausalLM
from bert.model.dropout import Dropout
from bert.model.heads import HEADS
from bert.model.pretraining import BertForPreTraining
from bert.parallel.backends import PmapParallelism
from bert.training.losses import LOSSES, Loss, make_pretraining_loss, make_task_loss
from bert.training.optimizer import make_optimizer
from bert.training.step import TrainState, compile_bucketed_train_step, make_train_step
from bert.training.token_losses import make_next_token_loss

pytestmark = pytest.mark.real

torch = pytest.importorskip("torch", reason="needs the extra `torch`")
transformers = pytest.importorskip("transformers", reason="needs the extra `torch`")

LAYERS = 3
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


def params_of(model, family: Family, architecture: str) -> dict:
    """Returns copies of the weights of transformers' model under our names, which `test_hf_parity.py` checks."""
    state, flat = model.state_dict(), {}
    for tensor in family.names.tensors(LAYERS, architecture):
        if tensor.name in state and not (tensor.name == "lm_head.weight" and model.config.tie_word_embeddings):
            flat |= tensor.split(state[tensor.name].numpy().copy())
    return traverse_util.unflatten_dict(flat, sep="/")


def test_losses_of_a_hundred_steps_follow_torch() -> None:
    torch.manual_seed(0)
    reference = transformers.BertForPreTraining(transformers.BertConfig(**SIZES)).train()
    params = params_of(reference, families.BERT, "BertForPreTraining")
    ours, theirs = our_losses(params), torch_losses(reference)
    difference = np.abs(ours - theirs) / theirs
    assert theirs[-1] < 0.8 * theirs[0], "nothing was learned: the comparison says nothing"
    assert difference[0] < 1e-4
    assert difference.max() < 1e-3, difference  # float32 rounding, fed back through a hundred updates


@pytest.mark.parametrize("tied", [True, False])
def test_losses_of_a_left_to_right_model_follow_torch(tied: bool) -> None:
    """A hundred steps next to GPT2LMHeadModel from the same weights."""
    torch.manual_seed(0)
    reference = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=V, n_positions=40, n_embd=96, n_layer=LAYERS, n_head=3, n_inner=200, tie_word_embeddings=tied,
            bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    ).train()  # fmt: skip
    params = params_of(reference, families.GPT2, "BertForCausalLM")
    settings = {name: limit.value for name, limit in families.GPT2.limits.items()}
    config = ModelConfig(
        **{**SIZES, **settings, "hidden_act": "gelu_tanh", "layer_norm_eps": 1e-5, "tie_word_embeddings": tied}
    )
    objective = make_next_token_loss(BertForCausalLM(config))
    rows = [next_tokens(batch) for batch in batches()]
    ours = losses_of(params, objective, rows)
    theirs = torch_updates(reference, map(next_token_loss_of, rows), STEPS)
    difference = np.abs(ours - theirs)
    print(f"from {theirs[0]:.3f} to {theirs[-1]:.3f}, within {difference.max():.1e}")
    assert theirs[-1] < 0.8 * theirs[0], "nothing was learned: the comparison says nothing"
    assert difference[0] < 1e-4
    assert difference.max() < 1e-3, difference


def next_tokens(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The rows of a masked batch before they were masked, with the token that follows each."""
    ids, mask = batch["input_ids"].copy(), batch["attention_mask"]
    np.put_along_axis(ids, batch["masked_lm_positions"].astype(int), batch["masked_lm_ids"], axis=1)
    ids *= mask
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "next_token_ids": np.roll(ids, -1, axis=1),
        "next_token_weights": np.roll(mask, -1, axis=1).astype(np.float32) * (np.arange(T) < T - 1),
        "rows": batch["rows"],
    }


def next_token_loss_of(batch: dict[str, np.ndarray]) -> Callable:
    ids, mask = (torch.tensor(batch[name], dtype=torch.long) for name in ("input_ids", "attention_mask"))
    return lambda model: model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss


def our_losses(params: dict) -> np.ndarray:
    return losses_of(params, make_pretraining_loss(BertForPreTraining(ModelConfig(**SIZES)).apply), batches())


def losses_of(params: dict, objective: Loss, rows: Iterable[dict[str, np.ndarray]]) -> np.ndarray:
    """The losses of our own steps on batches."""
    settings = OptimizerConfig(
        learning_rate=PEAK, warmup_steps=WARMUP, weight_decay=DECAY, bias_correction=True, max_grad_norm=CLIP
    )
    optimizer = make_optimizer(settings, STEPS)
    parallel = PmapParallelism()
    step = parallel.compile(make_train_step(objective, optimizer, seed=0))
    state = parallel.put_state(TrainState.create(params, optimizer, objective.metrics))
    losses = []
    for batch in rows:
        state, outcome = step(state, parallel.shard_batch(batch, 1))
        losses.append(float(parallel.to_host(outcome.loss)))
    return np.array(losses)


def torch_losses(model) -> np.ndarray:
    """The losses of the batches, and the model trained on them."""
    return torch_updates(model, (pretraining_loss_of(batch) for batch in batches()), STEPS)


def pretraining_loss_of(batch: dict[str, np.ndarray]) -> Callable:
    labels = np.full((B, T), -100)
    chosen = np.where(batch["masked_lm_weights"] > 0, batch["masked_lm_ids"], -100)
    np.put_along_axis(labels, batch["masked_lm_positions"].astype(int), chosen, axis=1)
    return lambda model: (
        model(
            **torch_inputs(batch, B),
            labels=torch.tensor(labels),
            next_sentence_label=torch.tensor(batch["next_sentence_labels"], dtype=torch.long),
        ).loss
    )


def torch_inputs(batch: dict[str, np.ndarray], rows: int) -> dict:
    names = ("input_ids", "token_type_ids", "attention_mask")
    return {name: torch.tensor(batch[name][:rows], dtype=torch.long) for name in names}


def torch_updates(model, losses: Iterable[Callable], steps: int) -> np.ndarray:
    """BERT's loop as PyTorch users write it: parameter groups by the decay rule, clipping, a linear schedule."""
    norms = ("LayerNorm", ".ln_")
    spared = {name for name, _ in model.named_parameters() if name.endswith("bias") or any(n in name for n in norms)}
    groups = [
        {"params": [p for name, p in model.named_parameters() if (name in spared) == without], "weight_decay": decay}
        for without, decay in ((False, DECAY), (True, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=PEAK, betas=(0.9, 0.999), eps=1e-6)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, WARMUP, steps)
    found = []
    for loss_of in losses:
        loss = loss_of(model)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        schedule.step()
        found.append(loss.item())
    return np.array(found)


HEAD_STEPS, LABELS = 24, 5
ADDED_TO_EVERY_TOKEN = (("qa_outputs", "bias"), ("bert", "encoder", f"layer_{LAYERS - 1}", "output_norm", "bias"))
"""Parameters whose gradient is zero except for rounding, from which AdamW makes small steps.

They shift the logits of all tokens alike, which a softmax over the tokens ignores. The bias of the keys has no gradient
either.
"""


def rows_of_heads(head: str, padded: bool) -> TokenRows:
    """Rows of a question and a context, some of them with padding, that the heads of single tokens learn from."""
    random = np.random.default_rng(1)
    rows = HEAD_STEPS * B - 5  # the last batch is smaller than the others
    lengths = random.integers(T // 3, T + 1, rows) if padded else np.full(rows, T)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    ids = random.integers(10, 60, offsets[-1])
    if head == "span":  # from the first 17, not in the question, to the token after it
        firsts = [np.flatnonzero(ids[a + 6 : b - 1] == 17)[:1] + 6 for a, b in itertools.pairwise(offsets)]
        labels = np.array([(first[0], first[0] + 1) if len(first) else (0, 0) for first in firsts])
    else:  # of two tokens in three
        labels = np.where(np.arange(offsets[-1]) % 3 > 0, ids % LABELS, IGNORE_INDEX)
    return TokenRows(
        ids.astype(np.int32), offsets, np.full(rows, 6), labels.astype(np.int32), token_labels=head == "tokens"
    )


def head_batches(features: TokenRows) -> list[tuple[dict[str, np.ndarray], int]]:
    """Batches of an epoch, padded to one of two lengths, and the number of rows in each."""
    made = []
    for number, rows in enumerate(epoch_batches(features.lengths, B, seed=0, epoch=0)):
        batch = features.batch(rows, bucket_length(int(features.lengths[rows].max()), [20], T), B)
        made.append(({**batch, "rows": np.arange(B, dtype=np.int32)}, len(rows)))
        assert (len(rows) < B) == (number == HEAD_STEPS - 1)
    return made


def span_loss_of(batch: dict[str, np.ndarray], rows: int, mask_padding: bool) -> Callable:
    first, last = torch.tensor(batch["labels"][:rows], dtype=torch.long).T
    if not mask_padding:
        return lambda model: model(**torch_inputs(batch, rows), start_positions=first, end_positions=last).loss

    def loss(model):
        out, padding = model(**torch_inputs(batch, rows)), torch.tensor(batch["attention_mask"][:rows] == 0)
        scores = [logits.masked_fill(padding, -1e9) for logits in (out.start_logits, out.end_logits)]
        return sum(torch.nn.functional.cross_entropy(*pair) for pair in zip(scores, (first, last), strict=True)) / 2

    return loss


def tagging_loss_of(batch: dict[str, np.ndarray], rows: int) -> Callable:
    labels = torch.tensor(
        np.where(batch["labels"][:rows] == IGNORE_INDEX, -100, batch["labels"][:rows]), dtype=torch.long
    )
    return lambda model: model(**torch_inputs(batch, rows), labels=labels).loss


def keep_masks(batches: list[tuple[dict[str, np.ndarray], int]], rate: float, head: str) -> Iterator[np.ndarray]:
    """Dropout masks of this package under seed 0, in the order in which transformers needs them."""
    hidden, heads = SIZES["hidden_size"], SIZES["num_attention_heads"]
    for step, (batch, rows) in enumerate(batches):
        length = batch["input_ids"].shape[1]
        source = Dropout.for_step(0, step, jnp.arange(rows))
        yield np.array(source.keep_mask((rows, length, hidden), rate, "embeddings"))
        for layer in map(source.fold_in, range(LAYERS)):
            yield np.array(layer.keep_mask((rows, heads, length, length), rate, "attention_probs"))
            yield np.array(layer.keep_mask((rows, length, hidden), rate, "attention_output"))
            yield np.array(layer.keep_mask((rows, length, hidden), rate, "output"))
        if head == "tokens":
            yield np.array(source.keep_mask((rows, length, hidden), rate, "classifier"))


@pytest.mark.parametrize(
    ("head", "padded", "rate"),
    [("span", False, 0.0), ("span", True, 0.0), ("tokens", True, 0.0), ("span", True, 0.1), ("tokens", True, 0.1)],
)
def test_parameters_of_a_tuned_head_follow_torch(
    head: str, padded: bool, rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers includes padding in the softmax of its span loss, so with padding our loss is taken from the logits.

    With dropout, torch uses our dropout masks.
    """
    torch.manual_seed(0)
    sizes = {**SIZES, "hidden_dropout_prob": rate, "attention_probs_dropout_prob": rate}
    config = transformers.BertConfig(
        **sizes, num_labels=2 if head == "span" else LABELS, attn_implementation="eager" if rate else "sdpa"
    )
    kind = "QuestionAnswering" if head == "span" else "TokenClassification"
    reference = getattr(transformers, f"BertFor{kind}")(config).train()
    before = params_of(reference, families.BERT, f"BertFor{kind}")
    batches = head_batches(rows_of_heads(head, padded))
    params, ours = tuned(head, sizes, before, [batch for batch, _ in batches])
    if rate:
        masks = keep_masks(batches, rate, head)
        monkeypatch.setattr(
            torch.nn.functional, "dropout", lambda x, p, *_, **__: x * torch.tensor(next(masks)) / (1 - p)
        )
    losses = [span_loss_of(*one, padded) if head == "span" else tagging_loss_of(*one) for one in batches]
    theirs = torch_updates(reference, losses, HEAD_STEPS)
    if rate:
        assert next(masks, None) is None, "torch has dropout in fewer places"

    np.testing.assert_allclose(ours, theirs, rtol=3e-6)
    assert theirs[-1] < 0.97 * theirs[0], "nothing was learned: the comparison says nothing"
    after_torch = params_of(reference, families.BERT, f"BertFor{kind}")
    for path, after in traverse_util.flatten_dict(after_torch).items():
        mine, start = (traverse_util.flatten_dict(tree)[path] for tree in (params, before))
        if path[-2:] == ("key", "bias") or (head == "span" and path in ADDED_TO_EVERY_TOKEN):
            np.testing.assert_allclose(mine, after, atol=1e-4, err_msg=str(path))
            continue
        moved = np.linalg.norm(after - start)
        assert np.linalg.norm(mine - after) < 3e-5 * moved, path


def tuned(head: str, sizes: dict, params: dict, batches: list[dict[str, np.ndarray]]) -> tuple[dict, np.ndarray]:
    """Parameters after the batches, as `bert finetune` makes its steps, and the losses."""
    settings = OptimizerConfig(
        learning_rate=PEAK, warmup_steps=WARMUP, weight_decay=DECAY, bias_correction=True, max_grad_norm=CLIP
    )
    kind, labels = {"span": ("question_answering", 2), "tokens": ("token_classification", LABELS)}[head]
    model = HEADS[kind](ModelConfig(**sizes), labels)

    def apply(params: dict, batch: dict, dropout: object) -> jax.Array:
        inputs = (batch["input_ids"], batch["token_type_ids"], batch["attention_mask"])
        return model.apply({"params": params}, *inputs, dropout=dropout)

    objective = make_task_loss(LOSSES[kind], apply)
    optimizer, parallel = make_optimizer(settings, HEAD_STEPS), PmapParallelism()
    step = compile_bucketed_train_step(objective, optimizer, 0, "hash", parallel)
    state = parallel.put_state(TrainState.create(params, optimizer, objective.metrics))
    losses = []
    for batch in batches:
        state, outcome = step(state, parallel.shard_batch(batch, 1))
        losses.append(float(parallel.to_host(outcome.loss)))
    return parallel.to_host(state).params, np.array(losses)
