"""A pretraining run."""

from __future__ import annotations

from dataclasses import dataclass, field

from bert.config.checks import local_paths, seed_in_range
from bert.config.data import DataConfig
from bert.config.model import ModelConfig, TokenizerConfig
from bert.config.training import OptimizerConfig, TrainingConfig
from bert.phases import PhaseConfig, check_phases
from bert.values import UserError


@dataclass(frozen=True)
class PretrainConfig:
    """A pretraining run."""

    output_dir: str | None = None
    """Folder of the run; null takes runs/ and the name of the recipe. Run again, it resumes."""
    init: str | None = None
    """Run, Hugging Face folder, folder of google-research/bert or hub name to start from: weights and vocabulary; null
    starts from random weights."""
    seed: int = 0
    """Seed of initialisation, order of data, masks and dropout."""
    output_bias: str = "frequencies"
    """How the MLM head's output bias starts: at the log frequencies of the pieces, or, as published, at zeros."""
    phases: list[PhaseConfig] | None = None
    """Phases of the run, one after the other, each with rows and batches of its own; null is a single one. In YAML a
    list, each phase with some of the keys below; null on the command line drops a recipe's."""
    profile: bool = False
    """Write a trace of a few early steps to profile/ in the run's folder, for TensorBoard and Perfetto."""
    data: DataConfig = field(default_factory=DataConfig)
    """the corpus and its examples"""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    """the vocabulary"""
    model: ModelConfig = field(default_factory=ModelConfig)
    """the encoder"""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """the optimizer"""
    training: TrainingConfig = field(default_factory=TrainingConfig)
    """the training loop"""

    def check(self) -> None:
        """Raises UserError at the first value, or pair of values, that cannot work."""
        local_paths(self)
        for part in (self.model, self.tokenizer, self.data, self.optimizer, self.training):
            part.check()
        self.training.check_warmup(self.optimizer)
        self.training.check_attention(self.model.attention_probs_dropout_prob, self.data.packing)
        seed_in_range("seed", self.seed)
        if self.output_bias not in ("frequencies", "zeros"):
            raise UserError(f"output_bias is {self.output_bias!r}: choose frequencies or zeros")
        self.model.check_length("data.sequence_length", self.data.sequence_length)
        if self.data.sequence_length > self.model.max_position_embeddings:
            raise UserError(
                f"data.sequence_length ({self.data.sequence_length}) is over model.max_position_embeddings "
                f"({self.model.max_position_embeddings}): shorten the one or enlarge the other"
            )
        if self.data.max_predictions_per_sequence >= self.data.sequence_length:
            raise UserError(
                f"data.max_predictions_per_sequence ({self.data.max_predictions_per_sequence}) is not below "
                f"data.sequence_length ({self.data.sequence_length}): lower the one or raise the other"
            )
        if self.phases is not None:
            check_phases(self)
