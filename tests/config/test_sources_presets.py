"""`training.preset`, attention as one kernel, and the padded vocabulary."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert.commands.pretrain import main as pretrain
from bert.config import (
    DataConfig,
    FinetuneConfig,
    ModelConfig,
    PretrainConfig,
    TaskDataConfig,
    TrainingConfig,
    apply_preset,
    recipe_folder,
)
from bert.config.yaml_io import load_config
from bert.errors import UserError
from bert.model.dropout import Dropout
from bert.model.layers import LayerExecution
from bert.model.pretraining import BertForPreTraining
from bert.parallel.devices import max_cudnn_head_dim
from bert.training.losses import make_pretraining_loss
from tests.messages import has_all

CONFIG = ModelConfig(
    vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
    max_position_embeddings=16, attention_probs_dropout_prob=0.0,
)  # fmt: skip


def batch():
    random = np.random.default_rng(0)
    lengths = np.array([12, 7, 3, 9])
    return {
        "input_ids": random.integers(5, 99, (4, 12)),
        "token_type_ids": np.zeros((4, 12), np.int32),
        "attention_mask": (np.arange(12) < lengths[:, None]).astype(np.int32),
        "masked_lm_positions": np.array([[1, 2, 0]] * 4),
        "masked_lm_ids": random.integers(5, 99, (4, 3)),
        "masked_lm_weights": np.array([[1.0, 1.0, 0.0]] * 4, np.float32),
        "next_sentence_labels": np.array([0, 1, 1, 0]),
        "next_sentence_weights": np.ones(4, np.float32),
    }


@pytest.mark.slow
def test_one_kernel_and_a_padded_vocabulary_give_the_same_losses_and_gradients():
    params = jax.jit(BertForPreTraining(CONFIG).init)(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"]

    def of(execution):
        objective = make_pretraining_loss(BertForPreTraining(CONFIG, execution=execution).apply)
        dropout = Dropout.for_step(0, 1, jnp.arange(4))

        def loss(params):
            losses, counts = objective.forward(params, batch(), dropout)
            return sum(total for total, _ in losses.values()), {**losses, **counts}

        return jax.jit(jax.value_and_grad(loss, has_aux=True))(params)

    plain, fast = of(LayerExecution()), of(LayerExecution(attention="xla", pad_vocab_to_multiple_of=64))
    assert jax.tree.map(jnp.shape, fast) == jax.tree.map(jnp.shape, plain)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6), fast, plain)


@pytest.mark.medium
def test_what_is_beyond_the_vocabulary_is_never_predicted():
    head = BertForPreTraining(CONFIG, execution=LayerExecution(pad_vocab_to_multiple_of=64))
    params = jax.jit(head.init)(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"]
    assert params["predictions"]["bias"].shape == (99,)
    assert params["bert"]["embeddings"]["word"]["embedding"].shape[0] == 99
    logits = np.asarray(jax.jit(head.apply)({"params": params}, np.ones((2, 8), np.int32)).prediction_logits)
    assert logits.shape[-1] == 128
    assert not jax.nn.softmax(logits)[..., 99:].any()
    assert logits.argmax(-1).max() < 99


class Device:
    """A device, as far as the choice of attention looks at it."""

    def __init__(self, platform, version, capability=None):
        self.platform, self.client = platform, SimpleNamespace(platform_version=version)
        if capability is not None:
            self.compute_capability = capability


TURING, AMPERE, ADA, HOPPER, BLACKWELL = (
    Device("gpu", "PJRT C API\ncuda 12090", capability) for capability in ("7.5", "8.0", "8.9", "9.0", "10.0")
)
AMD = Device("gpu", "PJRT C API\nrocm 60300", "gfx942")
CPU, TPU = Device("cpu", "cpu"), Device("tpu", "PJRT C API\nTFRT TPU v5 lite")


def heads_of(size: int) -> ModelConfig:
    return ModelConfig(hidden_size=size, num_attention_heads=1)


def test_the_fast_preset_is_one_line():
    config = load_config(PretrainConfig, recipe_folder() / "base.yaml")
    assert apply_preset(config) is config
    assert LayerExecution.from_config(config.training, heads_of(64), [AMPERE]) == LayerExecution()
    fast = apply_preset(dataclasses.replace(config, training=dataclasses.replace(config.training, preset="fast")))
    assert fast.model == dataclasses.replace(config.model, attention_probs_dropout_prob=0.0)
    assert fast.training.dtype == "bfloat16"
    dataclasses.replace(fast, data=dataclasses.replace(fast.data, train=["corpus.txt"])).check()
    packed = apply_preset(dataclasses.replace(fast, data=dataclasses.replace(fast.data, packing=True)))
    for training, device, attention in (
        (fast.training, AMPERE, {"attention": "cudnn"}),
        (fast.training, CPU, {"attention": "xla"}),
        (packed.training, AMPERE, {}),
    ):
        execution = LayerExecution(**attention, pad_vocab_to_multiple_of=64)
        assert LayerExecution.from_config(training, heads_of(64), [device]) == execution
    for packing, attention in ((False, "auto"), (True, "xla")):
        tuned = FinetuneConfig(data=TaskDataConfig(packing=packing), training=TrainingConfig(preset="fast"))
        assert apply_preset(tuned).training.attention_implementation == attention


FAST, FAST_FILE = "--training.preset fast", "training: {preset: fast"


@pytest.mark.parametrize(
    ("file", "arguments", "expected"),
    [
        ("", "--training.preset fast", ("bfloat16", 64, 0.0, "auto")),
        ("", "--training.preset fast --training.dtype float32", ("float32", 64, 0.0, "xla")),
        ("", "--training.preset fast --training.pad_vocab_to_multiple_of 128", ("bfloat16", 128, 0.0, "auto")),
        ("", "--training.preset fast --model.attention_probs_dropout_prob 0.1", ("bfloat16", 64, 0.1, "xla")),
        ("", "--training.preset fast --training.attention_implementation cudnn", ("bfloat16", 64, 0.0, "cudnn")),
        ("training: {preset: fast, dtype: float32}", "", ("float32", 64, 0.0, "xla")),
        (f"{FAST_FILE}, pad_vocab_to_multiple_of: 128}}", "--training.dtype float32", ("float32", 128, 0.0, "xla")),
        ("training: {dtype: float32, pad_vocab_to_multiple_of: 1}", FAST, ("bfloat16", 64, 0.0, "auto")),
        ("training: {preset: reference, dtype: float32}", "--training.preset fast", ("bfloat16", 64, 0.0, "auto")),
    ],
)
def test_what_is_given_beside_the_preset_wins_and_the_stored_configuration_repeats_it(
    tmp_path, capsys, file, arguments, expected
):
    def printed(name, text, *arguments):
        (tmp_path / name).write_text(text)
        with pytest.raises(SystemExit):
            pretrain(["--config", str(tmp_path / name), *arguments, "--print_config"])
        return capsys.readouterr().out

    stored = printed("given.yaml", file, *arguments.split())
    (tmp_path / "config.yaml").write_text(stored)
    config = load_config(PretrainConfig, tmp_path / "config.yaml")
    training = config.training
    actual = (
        training.dtype,
        training.pad_vocab_to_multiple_of,
        config.model.attention_probs_dropout_prob,
        training.attention_implementation,
    )
    assert actual == expected
    assert printed("again.yaml", stored) == stored


def test_cudnns_kernel_takes_packed_rows():
    packed = DataConfig(input_format="nsp", packing=True)
    training = TrainingConfig(attention_implementation="cudnn", dtype="bfloat16")
    model = ModelConfig(attention_probs_dropout_prob=0.0)
    assert PretrainConfig(data=packed, training=training, model=model).training.attention_implementation == "cudnn"


@pytest.mark.parametrize(
    ("devices", "largest"),
    [
        ([CPU], 0), ([TPU], 0), ([AMD], 0), ([TURING], 0), ([AMPERE], 128), ([ADA], 128), ([HOPPER], 256),
        ([BLACKWELL], 256), ([HOPPER, AMPERE], 128), ([AMPERE, TURING], 0),
    ],
)  # fmt: skip
def test_cudnns_attention_is_for_nvidias_gpus_since_ampere(monkeypatch, devices, largest):
    assert max_cudnn_head_dim(devices) == largest
    monkeypatch.setattr("bert.model.layers.local_devices", lambda: devices)
    fast = TrainingConfig(preset="fast")
    assert LayerExecution.from_config(fast, heads_of(64)).attention == ("cudnn" if largest else "xla")
    if not largest:
        for model in (heads_of(64), None):
            with pytest.raises(UserError, match=r"NVIDIA GPUs.*8\.0"):
                LayerExecution.from_config(TrainingConfig(attention_implementation="cudnn"), model)


@pytest.mark.parametrize(
    ("head_size", "device", "fits"),
    [
        (64, AMPERE, True), (128, AMPERE, True), (136, AMPERE, False), (256, HOPPER, True), (264, HOPPER, False),
        (12, HOPPER, False),
    ],
)  # fmt: skip
def test_heads_that_cudnn_does_not_take_are_left_to_xla_by_the_preset_and_told_else(head_size, device, fits):
    largest = max_cudnn_head_dim([device])
    fast, asked = TrainingConfig(preset="fast"), TrainingConfig(attention_implementation="cudnn")
    assert LayerExecution.from_config(fast, heads_of(head_size), [device]).attention == ("cudnn" if fits else "xla")
    if fits:
        assert LayerExecution.from_config(asked, heads_of(head_size), [device]).attention == "cudnn"
        return
    with pytest.raises(UserError) as error:
        LayerExecution.from_config(asked, heads_of(head_size), [device])
    assert has_all(str(error.value), "8 features", f"most {largest}")
    assert f"model's have {head_size} (model.hidden_size / model.num_attention_heads)" in str(error.value)


def test_disentangled_attention_is_left_to_xla() -> None:
    model = dataclasses.replace(heads_of(64), position_embedding_type="disentangled", relative_attention_buckets=8)
    assert LayerExecution.from_config(TrainingConfig(preset="fast"), model, [AMPERE]).attention == "xla"
    with pytest.raises(UserError, match=r"attention_implementation is cudnn, .* disentangled"):
        LayerExecution.from_config(TrainingConfig(attention_implementation="cudnn"), model, [AMPERE])


def test_the_kernel_for_tpus_is_asked_for_by_its_name() -> None:
    asked = TrainingConfig(attention_implementation="splash")
    assert LayerExecution.from_config(asked, heads_of(12), [TPU, TPU]).attention == "splash"
    assert LayerExecution.from_config(TrainingConfig(preset="fast"), heads_of(64), [TPU]).attention == "xla"
    for devices in ([CPU], [TPU, AMPERE]):
        with pytest.raises(UserError, match="splash, which requires TPUs"):
            LayerExecution.from_config(asked, None, devices)
    biased = dataclasses.replace(heads_of(64), relative_attention_buckets=8)
    with pytest.raises(UserError, match=r"splash, .* model\.relative_attention_buckets is 8: set"):
        LayerExecution.from_config(asked, biased, [TPU])


def test_the_kernel_for_tpus_takes_float32_and_no_dropout() -> None:
    asked = TrainingConfig(attention_implementation="splash")
    asked.check_attention(0.0)
    with pytest.raises(UserError, match=r"model.attention_probs_dropout_prob is 0.1, which training.attention_impl"):
        asked.check_attention(0.1)
    with pytest.raises(UserError, match=r"training.objective is plm, which training.attention_implementation splash"):
        dataclasses.replace(asked, objective="plm").check_attention(0.0)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["--training.dtype=float32"],
            "training.dtype is float32, which training.attention_implementation cudnn",
        ),
        (
            ["--model.attention_probs_dropout_prob=0.1"],
            "model.attention_probs_dropout_prob is 0.1, which training.attention_implementation cudnn",
        ),
        (["--model.attention_probs_dropout_prob=0", "--data.packing=true"], "data.packing is true"),
        (["--training.preset=quick"], "--training.preset quick: use one of reference, fast"),
        (
            ["--training.attention_implementation=flash"],
            "--training.attention_implementation flash: use one of auto, xla, cudnn, splash",
        ),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_made(fails, tmp_path, arguments, sentence):
    folder = tmp_path / "run"
    options = [
        "--training.attention_implementation=cudnn",
        "--training.dtype=bfloat16",
        f"--output_dir={folder}",
        *arguments,
    ]
    assert sentence in fails(pretrain, *options)
    assert not folder.exists()


@pytest.mark.slow
def test_a_fast_run_ends_resumes_and_is_exported_without_padding(corpus, tmp_path):
    import bert
    from tests.conftest import SMALL_RUN

    folder = tmp_path / "fast"
    arguments = [f"--data.train={corpus}", f"--output_dir={folder}", *SMALL_RUN, "--training.preset=fast"]
    assert pretrain(arguments) == 0
    assert pretrain(arguments) == 0  # finds itself, and has nothing left to do
    stored = load_config(PretrainConfig, folder / "config.yaml")
    assert (stored.training.preset, stored.training.pad_vocab_to_multiple_of) == ("fast", 64)
    model = bert.load(folder)
    size = model.tokenizer.get_vocab_size()
    assert size % 64
    assert model.params["predictions"]["bias"].shape == (size,)
    model.save(tmp_path / "hf")
    assert bert.load(tmp_path / "hf").params["bert"]["embeddings"]["word"]["embedding"].shape[0] == size
