"""Each option of the model is shown to train: by heart, and on the embedded corpus."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

import bert
from bert.commands.finetune import main as finetune
from bert.commands.pretrain import main
from bert.config import ModelConfig, OptimizerConfig
from bert.errors import UserError
from bert.inference.attention_maps import compute_attention_map
from bert.model.pretraining import BertForPreTraining
from bert.parallel.backends import PmapParallelism
from bert.training.losses import make_pretraining_loss
from bert.training.optimizer import make_optimizer
from bert.training.step import TrainState, make_train_step
from tests.conftest import SMALL_RUN
from tests.helpers import OPTIONS, SINGLE, results_of
from tests.tiny_training import T, V, batch_of


def flags(option: str) -> list[str]:
    return [f"--model.{name}={json.dumps(value).strip(chr(34))}" for name, value in OPTIONS[option].items()]


@pytest.mark.slow
@pytest.mark.parametrize("option", SINGLE)
def test_an_option_learns_a_batch_by_heart(option: str) -> None:
    learns_by_heart(option)


@pytest.mark.slow
def test_all_options_at_once_learn_a_batch_by_heart() -> None:
    learns_by_heart("all at once")


def learns_by_heart(option: str) -> None:
    sizes = {"max_position_embeddings": T, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = ModelConfig(V, 16, 2, 2, 32, initializer_range=0.1, **sizes, **OPTIONS[option])
    model = BertForPreTraining(config)
    objective = make_pretraining_loss(model.apply)
    optimizer = make_optimizer(OptimizerConfig(learning_rate=5e-3, warmup_steps=20), 200)
    parallel = PmapParallelism(jax.devices()[:1])
    batch = batch_of(0)
    batch["masked_lm_positions"][:] = np.arange(4) + 1  # no place asked for two different tokens
    init = jax.jit(
        lambda key: TrainState.create(model.init(key, batch["input_ids"])["params"], optimizer, objective.metrics)
    )
    state, step = (
        parallel.put_state(init(jax.random.key(0))),
        parallel.compile(make_train_step(objective, optimizer, 0)),
    )
    losses = []
    for _ in range(200):
        state, outcome = step(state, parallel.shard_batch(batch, 1))
        losses.append(float(outcome.loss[0]))
    assert losses[0] > 4  # ln 61 + ln 2 = 4.8
    assert losses[-1] < 0.1


def options_of(model: bert.Pretrained, option: str) -> dict:
    return {name: getattr(model.config, name) for name in OPTIONS[option]}


@pytest.mark.slow
@pytest.mark.parametrize("option", ["all at once", "modern"])
def test_a_run_with_all_options_is_loaded_and_fine_tuned(option: str, corpus: Path, sst2: Path, tmp_path: Path) -> None:
    run, rows = tmp_path / "run", "nsp" if "type_vocab_size" not in OPTIONS[option] else "full_sentences"
    arguments = [
        f"--data.train={corpus}",
        *SMALL_RUN,
        "--model.num_hidden_layers=3",
        f"--data.input_format={rows}",
    ]
    assert main([*arguments, f"--output_dir={run}", *flags(option)]) == 0
    model = bert.load(run)
    assert options_of(model, option) == OPTIONS[option]
    assert compute_attention_map(model, "ba ko").weights.shape[0] == 3
    assert model.encode(["ba ko"]).last_hidden_state.shape[-1] == 16
    assert len(model.fill_mask("Ba [MASK].")[0]) == 5
    with pytest.raises(UserError, match="cannot express"):
        model.save(tmp_path / "hf")
    task = [f"--data.dir={sst2}", f"--output_dir={tmp_path / 'task'}", "--data.max_length=32", "--data.buckets=32"]
    assert finetune(["--config=sst2", f"--init={run}", *task, "--training.batch_size=8", "--training.epochs=1"]) == 0
    assert options_of(bert.load(tmp_path / "task"), option) == OPTIONS[option]
    assert bert.load(tmp_path / "task").predict(["ba ri"])[0].label


@pytest.mark.slow
@pytest.mark.parametrize("option", [None, *OPTIONS])
def test_an_option_beats_word_frequencies_on_the_embedded_corpus(option: str | None, tmp_path: Path) -> None:
    """400 steps on the docstrings of the standard library, no option for comparison; narrow is half as wide."""
    run = tmp_path / "run"
    arguments = [
        "--data.train=docstrings:stdlib",
        "--tokenizer.vocab_size=1024",
        "--data.sequence_length=32",
        "--data.max_predictions_per_sequence=5",
        "--data.num_workers=1",
        "--model.hidden_size=64",
        "--model.intermediate_size=256",
        "--transfer=null",
        "--training.steps=400",
        "--training.eval_every=400",
        "--training.checkpoint_every=400",
        "--optimizer.warmup_steps=40",
    ]
    chosen = [flag.replace("embedding_size=8", "embedding_size=32") for flag in (flags(option) if option else [])]
    assert main(["--config=quickstart", f"--output_dir={run}", *arguments, *chosen]) == 0
    results = results_of(run)
    loss, unigram = results["eval"]["mlm_loss"], results["baselines"]["unigram"]["loss"]
    print(f"{option}: {loss:.3f}, word frequencies {unigram:.3f}")
    assert loss < unigram - 0.1
