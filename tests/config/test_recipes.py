"""Every recipe loads, passes its checks, says what it takes and gives, and describes a model that can be built."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert.commands.cli.arguments import parse
from bert.config import FinetuneConfig, ModelConfig, PretrainConfig, recipe_folder, recipe_names
from bert.config.pretraining import resolve_phases
from bert.config.sources import with_micro_batches
from bert.config.yaml_io import load_config
from bert.data.pretraining.input_formats import INPUT_FORMATS
from bert.model.electra import MaskedTokens
from bert.model.heads import HEADS
from bert.model.pretraining import PermutedTokens
from bert.tasks import TASKS
from bert.tasks.docstring_tasks import DOCSTRING_TASKS
from bert.tasks.embedding import EmbeddingTask
from bert.tasks.sequence_to_sequence import SequenceToSequenceTask
from bert.training.loop import count_parameters
from bert.training.optimizer import learning_rate_schedule
from bert.training.pretraining.objectives import build_model_and_loss

FINETUNING = recipe_names(for_task=True)
PRETRAINING = recipe_names(for_task=False)
PARAMETERS = {"tiny": 4_433_468, "mini": 11_267_900, "small": 29_058_876, "medium": 41_668_412, "base": 110_106_428,
              "large": 336_226_108}  # fmt: skip
ROBERTA = {"roberta": 124_697_433, "roberta_mini": 5_463_040, "falling_masks": 5_463_040, "better_decay": 5_463_040}
HOURS = {"hours": 1_883_906}
STUDENT = {"student": 17_569_724}
ALBERT = {"albert_base": 11_813_810}
MODERN = {"modern_base": 149_655_232, "modern_mini": 5_516_800, "modern_long": 149_655_232}
GPT = {"gpt_tiny": 834_944, "gpt_mini": 6_901_760, "gpt2": 124_439_808}
MPNET = {"mpnet_base": 109_514_682}
ELECTRA = {"electra_small": 14_196_219, "electra_mini": 4_020_161}
BASE = ModelConfig(vocab_size=30522, hidden_size=768, num_hidden_layers=12, num_attention_heads=12,
                   intermediate_size=3072)  # fmt: skip
NARROW = ModelConfig(vocab_size=64, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
METHODS = {"few_shot": "classification", "nomic_embed": "embedding", "qwen3_embed": "embedding"}
"""Further recipes of a task, by name."""
KEY = jax.ShapeDtypeStruct((), jax.random.key(0).dtype)
LABELS = 3
"""Number of labels for tasks whose labels come from the data."""


def pretraining(name: str) -> PretrainConfig:
    """The recipe, with a corpus where it has none."""
    config = with_micro_batches(load_config(PretrainConfig, recipe_folder() / f"{name}.yaml"))
    return dataclasses.replace(config, data=dataclasses.replace(config.data, train=config.data.train or "corpus.txt"))


def test_there_is_a_recipe_for_every_size_and_task() -> None:
    counted = {*ELECTRA, *ROBERTA, *HOURS, *STUDENT, *ALBERT, *MPNET, *MODERN, *GPT, *PARAMETERS}
    assert set(PRETRAINING) == {"quickstart", "paper", "budget24h", "domain", *counted}
    # Benchmarks and custom tasks have recipes, kinds of file have none.
    assert set(FINETUNING) == {*TASKS, *DOCSTRING_TASKS, *METHODS} - {"ner", "multiple_choice"}


@pytest.mark.parametrize("name", recipe_names())
def test_the_head_says_command_hardware_time_and_score(name: str) -> None:
    head = re.match(r"(#.*\n)+", (recipe_folder() / f"{name}.yaml").read_text(encoding="utf-8"))[0]
    command = "finetune" if name in FINETUNING else "pretrain"
    given = "" if name == "quickstart" else f" --config {name} "
    assert f"\n# bert {command}{given}" in head
    assert "python " not in head
    assert "\n# Hardware: " in head
    # Where a figure is from: measured here, the paper's, or an estimate with its arithmetic.
    assert re.search(r"^# Time: (measured|paper|estimate): ", head, re.MULTILINE)
    assert re.search(r"^# Score: (measured|paper|none)\b", head, re.MULTILINE)


@pytest.mark.parametrize(
    ("override", "rows", "predictions"),
    [("--training.batch_size=16", 16, 77), ("--training.batch_size=8", 8, 77), ("--data.sequence_length=64", 16, 10)],
)
def test_domain_takes_one_override_to_become_small(override: str, rows: int, predictions: int) -> None:
    argv = ["--config=domain", "--data.train=corpus.txt", override]
    config, *_ = parse(PretrainConfig, argv, prog="bert pretrain", description="", default_recipe=None)
    training = config.training
    assert training.batch_size // training.gradient_accumulation_steps == rows
    assert config.data.predictions_per_row == predictions


@pytest.mark.parametrize("name", PRETRAINING)
@pytest.mark.parametrize("override", [["--training.steps=400"], ["--training.steps=40", "--training.batch_size=8"]])
def test_one_override_makes_any_pretraining_recipe_small(name: str, override: list[str]) -> None:
    argv = [f"--config={name}", "--data.train=corpus.txt", "--output_dir=runs/short", *override]
    config, *_ = parse(PretrainConfig, argv, prog="bert pretrain", description="", default_recipe=None)
    steps = int(config.training.steps)
    assert config.optimizer.warmup_steps is None
    for phase in resolve_phases(config, steps):
        training = phase.config.training
        rows = training.batch_size // training.gradient_accumulation_steps
        assert rows * phase.config.data.sequence_length <= 256 * 128


@pytest.mark.parametrize("name", FINETUNING)
def test_one_override_makes_any_finetuning_recipe_small(name: str) -> None:
    argv = [f"--config={name}", "--data.dir=somewhere", "--output_dir=runs/short", "--training.steps=40"]
    if load_config(FinetuneConfig, recipe_folder() / f"{name}.yaml").init is None:  # else from random weights
        argv.append("--init=runs/X")
    config, *_ = parse(FinetuneConfig, argv, prog="bert finetune", description="", default_recipe=None)
    assert (config.training.steps, config.training.epochs, config.optimizer.num_warmup_steps(40)) == (40, None, 4)


@pytest.mark.medium
@pytest.mark.parametrize("name", PRETRAINING)
def test_pretraining_recipes(name: str) -> None:
    config = pretraining(name)
    config.check()
    sizes = dataclasses.replace(config.model, vocab_size=config.tokenizer.vocab_size)
    # What continues a published encoder takes its sizes.
    sizes = BASE if name == "domain" else sizes
    config = dataclasses.replace(config, model=sizes, training=dataclasses.replace(config.training, scan_layers=True))
    label = INPUT_FORMATS[config.data.input_format].label
    model, _ = build_model_and_loss(config)
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, 8), jnp.int32)))
    counts = PARAMETERS | ELECTRA | ROBERTA | HOURS | STUDENT | ALBERT | MPNET | MODERN | GPT
    if name in counts:
        assert count_parameters(params) == counts[name]
    for phase in resolve_phases(config, int(config.training.steps)):
        data, training = phase.config.data, phase.config.training
        rows = training.batch_size // training.gradient_accumulation_steps
        tokens = jax.ShapeDtypeStruct((rows, data.sequence_length), jnp.int32)
        positions = jax.ShapeDtypeStruct((rows, data.predictions_per_row), jnp.int32)
        if name in ELECTRA:
            numbers = jax.ShapeDtypeStruct(positions.shape, jnp.float32)
            masked = MaskedTokens(positions, positions, numbers, numbers)
            output = jax.eval_shape(model.apply, params, tokens, tokens, tokens, masked)
            assert output.detection_logits.shape == tokens.shape
        elif name in MPNET:
            permuted = PermutedTokens(positions, positions, jax.ShapeDtypeStruct(positions.shape, jnp.float32))
            output = jax.eval_shape(model.apply, params, tokens, None, tokens, permuted)
        elif name in GPT:
            positions = tokens  # every one
            output = jax.eval_shape(model.apply, params, tokens, None, tokens)
        else:
            output = jax.eval_shape(model.apply, params, tokens, tokens, tokens, positions)
        logits = output.prediction_logits if label or name in ELECTRA else output
        assert logits.shape == (*positions.shape, sizes.vocab_size)
        assert logits.dtype == jnp.float32
        assert not label or output.seq_relationship_logits.shape == (rows, 2)


@pytest.mark.parametrize("name", PRETRAINING)
def test_a_recipe_with_dropout_before_the_pooler_sets_it(name: str) -> None:
    model = pretraining(name).model
    assert model.pooler_dropout == (model.resolved.pooler_dropout or None)


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_the_papers_two_phases(name: str) -> None:
    config = pretraining(name)
    short, long = resolve_phases(config, int(config.training.steps))
    assert (short.end, long.end) == (900_000, 1_000_000)
    sizes = [(p.config.data.sequence_length, p.config.data.predictions_per_row) for p in (short, long)]
    assert sizes == [(128, 20), (512, 77)]
    assert {p.config.training.batch_size for p in (short, long)} == {256}
    assert short.config.optimizer == long.config.optimizer


@pytest.mark.parametrize("name", FINETUNING)
def test_finetuning_recipes(name: str) -> None:
    config = load_config(FinetuneConfig, recipe_folder() / f"{name}.yaml")
    assert config.task == METHODS.get(name, name) or name in DOCSTRING_TASKS
    data = dataclasses.replace(config.data, dir="somewhere")
    init = config.init or "runs/X"  # translation starts from random weights
    dataclasses.replace(config, init=init, data=data).check()
    task = TASKS[config.task]
    if isinstance(task, (SequenceToSequenceTask, EmbeddingTask)):
        return
    model = HEADS[task.kind](NARROW, task.num_labels or LABELS, None, jnp.dtype(config.training.dtype), None)
    choices = (5,) if task.kind in ("multiple_choice", "reranker") else ()
    rows = config.training.batch_size
    tokens = jax.ShapeDtypeStruct((rows, *choices, config.data.max_length), jnp.int32)
    outputs, _ = jax.eval_shape(model.init_with_output, KEY, tokens, tokens, tokens)
    for output in jax.tree.leaves(outputs):
        assert output.shape[0] == rows
        assert output.dtype == jnp.float32


def test_what_continues_a_model_has_one() -> None:
    assert pretraining("domain").init == "google-bert/bert-base-uncased"


def test_the_student_has_a_teacher() -> None:
    assert pretraining("student").distillation.teacher == "sentence-transformers/all-MiniLM-L6-v2"


def test_the_budgets_arithmetic() -> None:
    """The 24 hours in the recipe's header: steps x tokens x FLOPs per token at 60 TFLOP/s."""
    from bert.training.flops import forward_flops

    config = pretraining("budget24h")
    data, training = config.data, config.training
    sizes = dataclasses.replace(config.model, vocab_size=config.tokenizer.vocab_size)
    flops = 3 * sum(forward_flops(sizes, data.sequence_length, ["predictions"], data.predictions_per_row, {}).values())
    tokens = int(training.steps) * training.batch_size * data.sequence_length
    assert round(tokens / 1e9, 1) == 8.9
    assert round(flops / 1e9, 2) == 0.57
    assert round(tokens * flops / 60e12 / 3600, 1) == 23.5


def test_roberta_has_the_published_settings() -> None:
    """Compares the recipe with roberta-base's model card. Its parameters are counted above."""
    config = pretraining("roberta")
    data, optimizer, training = config.data, config.optimizer, config.training
    assert (config.tokenizer.kind, config.tokenizer.vocab_size) == ("byte_level", 50265)
    assert (data.input_format, data.static_masking) == ("full_sentences", False)
    assert (data.sequence_length, data.masked_lm_prob) == (512, 0.15)
    assert (training.steps, training.batch_size, optimizer.num_warmup_steps(500_000)) == (500_000, 8192, 24_000)
    assert (optimizer.learning_rate, optimizer.beta1, optimizer.beta2, optimizer.epsilon) == (6e-4, 0.9, 0.98, 1e-6)
    assert (optimizer.weight_decay, optimizer.max_grad_norm, config.model.hidden_dropout_prob) == (0.01, 0, 0.1)


def test_modern_base_has_the_published_settings() -> None:
    """Compares with answerdotai/ModernBERT-base and the authors' recipe. Its parameters are counted above."""
    config = pretraining("modern_base")
    data, model, optimizer, training = config.data, config.model, config.optimizer, config.training
    assert (model.num_hidden_layers, model.hidden_size, model.num_attention_heads) == (22, 768, 12)
    assert (model.intermediate_size, config.tokenizer.vocab_size, model.max_position_embeddings) == (1152, 50368, 8192)
    assert (model.attention_window, model.global_attention_every) == (128 // 2, 3)
    assert (model.rotary_base, model.local_rotary_base, model.layer_norm_eps) == (160_000, 10_000, 1e-5)
    assert (data.sequence_length, data.masked_lm_prob, training.batch_size) == (1024, 0.3, 4608)
    assert optimizer.num_warmup_steps(training.steps) * 768 * 1024 == pytest.approx(3e9, rel=0.01)
    assert (optimizer.learning_rate, optimizer.beta1, optimizer.beta2, optimizer.epsilon) == (8e-4, 0.9, 0.98, 1e-6)
    assert optimizer.weight_decay * optimizer.learning_rate == pytest.approx(1e-5)
    assert (optimizer.name, optimizer.max_grad_norm) == ("stable_adamw", 0)


@pytest.mark.medium
def test_modern_base_has_the_three_published_stages() -> None:
    """Warner et al. 2024, section 2.2 and table 3; the authors' yamls/modernbert/modernbert-base-pretrain.yaml."""
    phases = resolve_phases(pretraining("modern_base"), 438_500)
    sizes = {phase: (phase.end - phase.first) * phase.config.training.batch_size for phase in phases}
    tokens = {
        number: sum(rows * phase.config.data.sequence_length for phase, rows in sizes.items() if phase.number == number)
        for number in (1, 2, 3)
    }
    assert tokens == pytest.approx({1: 1.719e12, 2: 250e9, 3: 50e9}, rel=3e-3)
    *ramp, first, second, third = phases
    assert [phase.config.training.batch_size for phase in ramp] == [768, 1536, 2304, 3072, 3840]
    assert sum(sizes[phase] * 1024 for phase in ramp) == pytest.approx(50e9, rel=1e-3)
    stages = (first.config, second.config, third.config)
    assert [alone.model.rotary_base for alone in stages] == [10_000, 160_000, 160_000]
    assert [alone.data.sequence_length for alone in stages] == [1024, 8192, 8192]
    assert [alone.training.batch_size for alone in stages] == [4608, 576, 576]
    rates = [learning_rate_schedule(p.config.optimizer, p.schedule_steps[1], p.schedule_steps[0]) for p in phases[-3:]]
    ends = [float(rate(phase.end - 1)) for rate, phase in zip(rates, phases[-3:], strict=True)]
    assert ends == pytest.approx([8e-4, 3e-4, 3e-7], abs=2e-6)
    for alone in stages:
        assert alone.optimizer.weight_decay * alone.optimizer.learning_rate == pytest.approx(1e-5, rel=1e-3)


def test_falling_masks_has_four_rates() -> None:
    phases = resolve_phases(pretraining("falling_masks"), 2_400)
    assert [phase.config.data.masked_lm_prob for phase in phases] == [0.3, 0.25, 0.2, 0.15]
    assert [phase.held_out.masked_lm_prob for phase in phases] == [0.15] * 4
    assert [phase.end for phase in phases] == [600, 1_200, 1_800, 2_400]


def test_better_decay_is_constant_for_80_percent_and_then_decays_as_one_minus_sqrt() -> None:
    """Hu et al. 2024, section 5, with the decay of Hägele et al. 2024, arXiv 2405.18392."""
    phases = resolve_phases(pretraining("better_decay"), 2_400)
    assert [phase.end for phase in phases] == [1_920, 2_400]
    stable, decay = (
        learning_rate_schedule(phase.config.optimizer, phase.schedule_steps[1], phase.schedule_steps[0])
        for phase in phases
    )
    assert [float(stable(step)) for step in (0, 60, 120, 1_000, 1_919)] == pytest.approx([0, 7.5e-4, *[1.5e-3] * 3])
    steps = np.array([1_920, 1_921, 2_040, 2_160, 2_399])
    expected = 1.5e-3 * (1 - np.sqrt((steps - 1_920) / 480))
    assert [float(decay(step)) for step in steps] == pytest.approx(expected, abs=1e-8)


def test_modern_long_is_modern_base_over_longer_rows() -> None:
    """Warner et al. 2024, section 2.2: 250 billion tokens in batches of as many tokens, at a lower rate."""
    base, long = pretraining("modern_base"), pretraining("modern_long")
    assert (long.model, long.tokenizer) == (base.model, base.tokenizer)
    tokens = long.training.batch_size * long.data.sequence_length
    assert tokens == base.training.batch_size * base.data.sequence_length
    assert long.training.steps * tokens == pytest.approx(250e9, rel=1e-3)
    assert (long.data.packing, long.training.remat, long.optimizer.learning_rate) == (True, "full", 3e-4)


def test_albert_base_has_the_published_settings() -> None:
    """Lan et al. 2019, section 4.1 and table 1; its parameters are counted above."""
    config = pretraining("albert_base")
    model, optimizer, training = config.model, config.optimizer, config.training
    assert (model.num_hidden_layers, model.layer_groups, model.num_attention_heads) == (12, 1, 12)
    assert model.hidden_size == 768
    assert (model.intermediate_size, model.embedding_size, model.hidden_act) == (3072, 128, "gelu_tanh")
    assert (config.tokenizer.kind, config.tokenizer.vocab_size, config.data.input_format) == ("unigram", 30_000, "sop")
    assert (training.steps, training.batch_size, config.data.sequence_length) == (125_000, 4096, 512)
    assert (optimizer.name, optimizer.learning_rate, optimizer.num_warmup_steps(125_000)) == ("lamb", 1.76e-3, 3_125)


def test_gpt2_has_the_published_settings() -> None:
    """Compares the recipe with Radford et al. 2019, section 2.3, and with nanoGPT for values that the paper lacks."""
    config = pretraining("gpt2")
    data, model, optimizer, training = config.data, config.model, config.optimizer, config.training
    assert (config.tokenizer.kind, config.tokenizer.vocab_size) == ("byte_level", 50257)
    assert (data.input_format, training.objective, data.sequence_length) == ("blocks", "clm", 1024)
    assert (model.causal, model.pre_layer_norm, model.residual_init) == (True, True, "scaled")
    assert (training.steps, training.batch_size, optimizer.num_warmup_steps(600_000)) == (600_000, 512, 2_000)
    assert (optimizer.learning_rate, optimizer.beta2, optimizer.weight_decay) == (6e-4, 0.95, 0.1)
    assert (optimizer.schedule, optimizer.final_rate) == ("cosine", 0.1)


def test_electra_small_has_the_published_settings() -> None:
    """google-research/electra configure_pretraining.py and its small model."""
    config = pretraining("electra_small")
    model, data, electra = config.model, config.data, config.electra
    assert (model.num_hidden_layers, model.hidden_size, model.num_attention_heads) == (12, 256, 4)
    assert (model.intermediate_size, model.embedding_size, model.pooler_act) == (1024, 128, "gelu")
    assert (data.sequence_length, data.masked_lm_prob, data.predictions_per_row) == (128, 0.15, 19)
    assert (electra.generator_hidden_size, electra.disc_weight) == (0.25, 50)
    assert (config.training.steps, config.training.batch_size) == (1_000_000, 128)
    assert (config.optimizer.learning_rate, config.optimizer.num_warmup_steps(1_000_000)) == (5e-4, 10_000)
