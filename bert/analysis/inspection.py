"""Facts for `bert inspect`: parameters, FLOPs, vocabulary and provenance of a run or a model."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
from tokenizers import Tokenizer

from bert.config import FinetuneConfig, ModelConfig, PretrainConfig, TrainingConfig
from bert.config.pretraining import phase_configs
from bert.config.run_file import config_class_of_run, load_run_config
from bert.errors import UserError
from bert.inference.load import fetch_model, load
from bert.interchange.hub import download, is_hub_name
from bert.interchange.readers.hf import is_hf_folder, read_hf_settings
from bert.interchange.readers.peft import is_adapter
from bert.interchange.sentence_transformers.reader import encoder_folder
from bert.interchange.tensor_files import weight_files
from bert.model.decoders import BertForSequenceToSequence
from bert.model.heads import BertForMultipleChoice
from bert.model.names import pretraining_architecture
from bert.runs.checkpoint import Checkpointer
from bert.runs.environment import read_environment
from bert.runs.folder import KINDS, run_and_step
from bert.tasks import make_task
from bert.tokenizer.library import is_wordpiece, special_tokens, vocabulary_kind
from bert.tokenizer.vocabulary import load_tokenizer, normalization, tokenizer_fingerprint
from bert.training.finetuning.initialization import EncoderDecoderInit
from bert.training.finetuning.kinds import build_task_model
from bert.training.flops import Facts, RunConfig, Shapes, count_parts, shapes_of
from bert.training.pretraining.objectives import build_model_and_loss

KIND_TITLES = {"wordpiece": "WordPiece", "byte_level": "byte-level BPE", "unigram": "Unigram"}
"""Titles of the values of `vocabulary_kind`."""


def summarize(source: str | Path, length: int | None = None) -> Facts:
    """Returns facts of a run or another source of `bert.load`, as JSON values.

    Args:
        source: folder of a run or of a model, or a name on the hub.
        length: tokens T per row for FLOPs; None for the run's length.

    Raises:
        UserError: there is no model, a file is damaged, or ``length`` is out of range.
    """
    path, _ = fetch_model(source)
    path = download(str(source), weights=False) if is_hub_name(source) else path
    config = load_run_config(path) if (path / "config.yaml").is_file() else None
    read: list[str] = []
    if (
        config is not None
        and not Checkpointer(path / "checkpoints", 1, read.append).steps()
        and _is_single_seed(config)
    ):
        model, step = config.model, None
        if model.vocab_size is None:
            raise UserError(f"{path} has neither a checkpoint nor a vocabulary yet: let the run get that far")
        architecture, shapes = _expected_parameters(config)
        tokenizer, task = load_tokenizer(path), config.task if isinstance(config, FinetuneConfig) else None
        read.append("no checkpoint yet: sizes are from config.yaml")
    elif config is None and _lacks_weights(path):
        model, architecture, stored, tokenizer = read_hf_settings(path, read.append)
        step, task, shapes = None, None, _by_path(stored)
        size = 4 * sum(math.prod(shape) for shape in shapes.values())
        read.append(f"needs {size / 1e9:,.2f} GB for its parameters in float32, once its weights are downloaded")
    else:
        pretrained = load(source, read.append)
        model, step, tokenizer = pretrained.config, pretrained.step, pretrained.tokenizer
        architecture = pretrained.architecture
        shapes = shapes_of(pretrained.params)
        if pretrained.pooling is not None:
            shapes |= _by_path(pretrained.pooling.shapes)
        task = None if pretrained.task is None else pretrained.task.name
    facts = {
        "source": str(source),
        "kind": "published model" if config is None else f"{KINDS[type(config)]} run",
        "architecture": architecture,
        "task": task,
        "step": step,
        "model": dataclasses.asdict(model),
        **count_parts(model, shapes, architecture, config, length),
        "vocabulary": _vocabulary(tokenizer, model),
        "read": read,
    }
    if config is not None:
        facts["initial_weights"] = _initial_weights(config)
        facts["sessions"] = read_environment(path)
    return facts


def _by_path(shapes: dict[str, tuple[int, ...]]) -> Shapes:
    return {tuple(path.split("/")): shape for path, shape in shapes.items()}


def _lacks_weights(folder: Path) -> bool:
    """Whether a folder is a published model without weights, which is described by its config.json alone."""
    is_model = is_hf_folder(folder) and not is_adapter(folder)
    return is_model and not weight_files(encoder_folder(folder))


def _is_single_seed(config: RunConfig) -> bool:
    return not isinstance(config, FinetuneConfig) or config.num_seeds == 1


def _expected_parameters(config: RunConfig) -> tuple[str, Shapes]:
    """Returns the architecture and parameter shapes of a run without a checkpoint."""
    on_any_device = dataclasses.replace(config, training=TrainingConfig(objective=config.training.objective))
    model: nn.Module
    declared = None
    if isinstance(on_any_device, PretrainConfig):
        model, _ = build_model_and_loss(on_any_device)
    else:
        task = make_task(on_any_device)
        model, declared = build_task_model(task, on_any_device), task.architecture
    ids = jnp.zeros((1, 2, 8) if isinstance(model, BertForMultipleChoice) else (1, 8), jnp.int32)
    drawn = EncoderDecoderInit(model) if isinstance(model, BertForSequenceToSequence) else model
    params = jax.eval_shape(drawn.init, jax.random.key(0), ids)["params"]
    if isinstance(config, PretrainConfig):
        return pretraining_architecture(set(params), config.model), shapes_of(params)
    return declared or type(model).__name__, shapes_of(params)


def pretraining_costs(config: PretrainConfig) -> tuple[int, list[float]]:
    """Returns the number of parameters of a run, and the FLOPs of a training step per token for each phase."""
    architecture, shapes = _expected_parameters(config)
    phases = [count_parts(phase.model, shapes, architecture, phase, None) for phase in phase_configs(config)]
    return phases[0]["parameters"], [phase["flops_per_token"]["training"] for phase in phases]


def _vocabulary(tokenizer: Tokenizer, model: ModelConfig) -> Facts:
    tokens = tokenizer.get_vocab()
    facts: Facts = {
        "kind": KIND_TITLES[vocabulary_kind(tokenizer)],
        "tokens": len(tokens),
        "rows": model.vocab_size,
        "special": {token: tokens[token] for token in special_tokens(tokens).values()},
        "fingerprint": tokenizer_fingerprint(tokenizer),
    }
    if is_wordpiece(tokenizer):
        facts |= dict(zip(("lowercase", "strip_accents"), normalization(tokenizer), strict=True))
    return facts


def _initial_weights(config: RunConfig) -> str:
    """Returns the source of a run's initial weights."""
    if config.init is None or config.init == "none":
        sizes_from = getattr(config, "architecture_from", None)
        return "random weights" + (f" of the sizes of {sizes_from}" if sizes_from else "")
    source, _ = run_and_step(config.init)
    if (source / "config.yaml").is_file():
        kind = f"{KINDS[config_class_of_run(source)]} run"
    else:
        kind = "a published model" if source.is_dir() else "on the hub, or removed"
    return f"{config.init} ({kind}){_adapters(config)}"


def _adapters(config: RunConfig) -> str:
    """Describes the adapters that are merged into a run's weights."""
    if not isinstance(config, FinetuneConfig) or config.lora.rank is None:
        return ""
    return f", with adapters of rank {config.lora.rank} on {', '.join(config.lora.projections)} (LoRA)"
