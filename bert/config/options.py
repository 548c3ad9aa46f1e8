"""Options of single objectives and tasks: replaced tokens, distillation, embedding, reranking, LoRA and decoding.

The text under each field is its ``--help``.
"""

from __future__ import annotations

import numbers
from dataclasses import dataclass, field, fields
from typing import Annotated, Literal

from bert.config.model import ModelConfig
from bert.config.validation import (
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Range,
    Seed,
    check_fields,
    check_unused,
)
from bert.errors import UserError

GENERATOR_HEAD_SIZE = 64
"""Features of a generator's head, as published."""


@dataclass(frozen=True)
class ElectraConfig:
    """Replaced-token detection (Clark et al. 2020); names as in google-research/electra configure_pretraining.py."""

    generator_hidden_size: Annotated[float, Range(above=0, most=1)] = 0.25
    """Width of the generator as a share of model.hidden_size; its feed-forward layer is 4 times as wide, its heads have
    64 features, its number of layers is the model's."""
    disc_weight: PositiveFloat = 50.0
    """Weight of the discriminator's loss next to the generator's."""

    def generator_width(self, model: ModelConfig) -> int:
        """Width of the generator's hidden states."""
        return round(model.hidden_size * self.generator_hidden_size)

    def check(self, model: ModelConfig, objective: str) -> None:
        """Raises UserError for values that leave no generator, or that ``training.objective`` ignores."""
        check_fields("electra.", self)
        if objective != "rtd":
            check_unused(
                "electra.", self, f"but training.objective is {objective}: remove it, or set training.objective rtd"
            )
        elif not model.prediction_transform:
            raise UserError(
                "model.prediction_transform is false, and training.objective rtd always has the transform: remove it"
            )
        width = self.generator_width(model)
        if not width:
            raise UserError(
                f"electra.generator_hidden_size is {self.generator_hidden_size}, which makes a generator of width 0 "
                f"with model.hidden_size {model.hidden_size}: use a larger share"
            )
        head_size = width // generator_heads(width)
        if model.position_embedding_type == "rotary" and objective == "rtd" and head_size % 2:
            raise UserError(
                f"electra.generator_hidden_size is {self.generator_hidden_size}, which makes heads of {head_size} "
                "features in the generator, and rotary positions turn pairs of features: use another share"
            )


def generator_heads(width: int) -> int:
    """Heads of a generator of this width; they have `GENERATOR_HEAD_SIZE` features as far as they divide it
    (google-research/electra run_pretraining.py, get_generator_config)."""
    return next(n for n in range(max(1, width // GENERATOR_HEAD_SIZE), 0, -1) if width % n == 0)


@dataclass(frozen=True)
class DistillationConfig:
    """A teacher, and what the model learns of it next to training.objective."""

    teacher: str | None = None
    """Run, Hugging Face folder, folder of google-research/bert or hub name to learn from, --teacher for short: its
    vocabulary is taken, its weights stay as they are; null trains without a teacher."""
    checksum: str | None = None
    """SHA-256 of the teacher's weights, filled in at the start: a run resumes only with the same weights."""
    initial_weights: Literal["teacher", "random"] = "teacher"
    """Start of the student, if init is null: the teacher's embeddings, of which a narrower model takes the principal
    components, and in a model of the teacher's width and shape of layers as many of its layers (DistilBERT); or random
    numbers. A model that is wider than its teacher starts with random ones."""
    temperature: PositiveFloat = 2.0
    """Temperature that softens both distributions over tokens (Hinton et al. 2015)."""
    token_weight: NonNegativeFloat = 1.0
    """Weight of the KL divergence from the teacher's distribution at the predicted places, times the square of the
    temperature; without effect if the teacher has no MLM head."""
    hidden_weight: NonNegativeFloat = 1.0
    """Weight of the distance between hidden states of real tokens, the mean over the pairs of layers."""
    hidden_loss: Literal["cosine", "mse"] = "cosine"
    """That distance: 1 - cosine (DistilBERT) or the mean of the squared differences (TinyBERT)."""
    sentence_weight: NonNegativeFloat = 1.0
    """Weight of 1 - cosine between the means of the last hidden states over the tokens of a row."""
    student_layers: list[NonNegative] | None = None
    """Layers that learn the hidden states of distillation.teacher_layers, one each; 0 is the embeddings; null is the
    last layer. Where the widths differ, a linear projection of the student's states is learned with them."""
    teacher_layers: list[NonNegative] | None = None
    """The teacher's layers, as many; null is the last one."""

    def check(self) -> None:
        """Raises UserError for values that cannot work."""
        check_fields("distillation.", self)
        if self.teacher is None:
            check_unused("distillation.", self, "but there is no teacher: remove it, or set distillation.teacher")
            return
        if not (self.token_weight or self.hidden_weight or self.sentence_weight):
            raise UserError(
                "distillation.token_weight, hidden_weight and sentence_weight are 0: set one of them, or remove "
                "distillation.teacher"
            )
        pair = (self.student_layers, self.teacher_layers)
        if (pair[0] is None) != (pair[1] is None) or len(pair[0] or ()) != len(pair[1] or ()):
            raise UserError(
                f"distillation.student_layers is {pair[0]} and distillation.teacher_layers {pair[1]}: set both, with "
                "as many layers"
            )
        if pair[0] is not None and len(set(pair[0])) != max(1, len(pair[0])):
            raise UserError(f"distillation.student_layers is {pair[0]}: list each layer once, and at least one")


@dataclass(frozen=True)
class EmbeddingConfig:
    """The task embedding: one vector for each text, whose cosines are trained."""

    loss: Literal["in_batch", "triplet", "margin_mse", "cosent", "cosine", "same_label"] = "in_batch"
    """Rows of a query, a positive and negatives: in_batch, in which the documents of all other rows of the batch, on
    all devices, are negatives too (InfoNCE); triplet, the margin between the positive and the row's own negatives; or
    margin_mse, the differences of the scores that a teacher gives these (Hofstätter et al. 2020). Pairs with a score:
    cosent, the order of the cosines (CoSENT), or cosine, the squared error of the cosine from the score, whose range
    is mapped to 0 to 1. Texts with a label: same_label, in which the texts of the batch with the same label are
    positives, and all others negatives (SupCon)."""
    temperature: PositiveFloat = 0.05
    """All losses but triplet and cosine: cosines are divided by it."""
    margin: PositiveFloat = 0.2
    """triplet: how far the cosine of a negative should be below that of the positive."""
    num_negatives: Positive | None = None
    """Rows of a query: most negatives of a row, its first ones; null takes all. Each adds a text to every row of a
    batch."""
    matryoshka: list[Positive] | None = None
    """Widths to which embeddings may be cut: the loss is the mean of those of the whole embedding and of its first
    numbers (Kusupati et al. 2022); null trains the whole embedding alone."""
    pooling: Literal["mean", "cls", "max"] | None = None
    """How the hidden states of the tokens become an embedding: their mean, the first one (cls), or the largest value of
    each feature; null takes that which init declares, else mean."""
    normalize: bool | None = None
    """Whether embeddings have length 1; losses and scores are of cosines in any case. null takes what init declares,
    else true."""
    lowercase: bool | None = None
    """Lower-case texts first, whatever the vocabulary does; null takes what init declares, else false."""

    query_prompt: str | None = None
    """What queries, or the first texts of pairs, begin with, such as "query: "; null takes what init declares, else
    nothing. A search puts it before its queries."""
    document_prompt: str | None = None
    """What documents, or the second texts of pairs, begin with; null takes what init declares, else nothing."""

    @property
    def has_scores(self) -> bool:
        """Whether the rows are pairs with a score."""
        return self.loss in ("cosent", "cosine")

    def check(self) -> None:
        """Raises UserError for values that cannot work."""
        check_fields("embedding.", self)
        if (self.has_scores or self.loss == "same_label") and self.num_negatives is not None:
            raise UserError(
                f"embedding.num_negatives is set, but embedding.loss is {self.loss}, which has none: remove it"
            )
        if self.matryoshka is not None and not 0 < len(self.matryoshka) == len(set(self.matryoshka)):
            raise UserError(f"embedding.matryoshka is {self.matryoshka}: list each width once, or remove it")

    def check_width(self, hidden_size: int) -> None:
        """Raises UserError for a width that is not below the model's."""
        if self.matryoshka is not None and max(self.matryoshka) >= hidden_size:
            raise UserError(
                f"embedding.matryoshka has {max(self.matryoshka)}, but embeddings have {hidden_size} numbers, which "
                "are trained in any case: list smaller widths"
            )


@dataclass(frozen=True)
class RerankerConfig:
    """The task reranker: one score for a query together with a document (a cross-encoder)."""

    loss: Literal["binary", "ordinal", "listwise"] = "binary"
    """binary: the cross-entropy of each document's relevance, 0 to 1, and the sigmoid of its score. ordinal: that of
    the order of each two documents of a query of which one is more relevant (RankNet). listwise: that of the softmax
    over all documents of a query (ListNet)."""
    num_negatives: Positive | None = None
    """Training rows with a positive: most negatives of a row, its first ones; null takes all. A batch has room for as
    many documents a query as the query with the most of them has. Dev and test are scored with all."""

    def check(self) -> None:
        """Raises UserError for values that cannot work."""
        check_fields("reranker.", self)


PROJECTIONS = ("query", "key", "value", "output")
"""The projections of an attention layer."""


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters (Hu et al. 2021) next to a frozen encoder."""

    rank: Positive | None = None
    """Rank r of the adapters, 8 in the paper for GLUE: only these, the pooler and the head are trained, and checkpoints
    hold only these; null trains all. Adapters want a higher learning rate: 4e-4 or more."""
    alpha: PositiveFloat = 8.0
    """An adapter is multiplied by alpha / rank, so that another rank needs no other learning rate."""
    projections: list[str] = field(default_factory=lambda: ["query", "value"])
    """Projections of each self-attention that have adapters: query, key, value, output. The paper's experiments adapt
    query and value, the best use of a given number of parameters (its table 5)."""
    checksum: str | None = None
    """SHA-256 of the frozen weights, filled in at the start: a run resumes only with the same weights."""

    def check(self) -> None:
        """Raises UserError for values that cannot work."""
        check_fields("lora.", self)
        if self.rank is None:
            check_unused("lora.", self, "but lora.rank is null: set lora.rank, or remove it")
        if not self.projections or len(set(self.projections)) < len(self.projections):
            raise UserError(f"lora.projections is {self.projections}: list at least one projection, each once")
        for name in self.projections:
            if name not in PROJECTIONS:
                raise UserError(f"lora.projections has {name!r}: use some of {', '.join(PROJECTIONS)}")

    @property
    def scale(self) -> float:
        """Factor of the product of an adapter's two matrices; of a run with adapters."""
        return self.alpha / (self.rank or 1)


TYPES: dict[type, tuple[type, str]] = {
    bool: (bool, "true or false"),
    int: (numbers.Integral, "a whole number"),
    float: (numbers.Real, "a number"),
    str: (str, "text"),
}
"""What a value may be in Python, NumPy's numbers among them, and its name in messages."""


@dataclass(frozen=True)
class Decoding:
    """Greedy decoding (the default), sampling if ``temperature`` is set, or beam search if ``beams`` is over 1."""

    max_tokens: Positive = 64
    """Longest continuation, in tokens, the end token included."""
    beams: Positive = 1
    """Hypotheses that beam search keeps of each text."""
    length_penalty: Annotated[float, Range()] = 1.0
    """Exponent of the length by which beam search divides a sum of log-probabilities; 0 compares the sums."""
    length_norm: Literal["length", "gnmt"] = "length"
    """That length: the generated tokens (length), or (5 + tokens) / 6 (gnmt; Wu et al. 2016, section 7)."""
    early_stopping: bool = False
    """Beam search ends at as many finished hypotheses as beams, not when no better one is possible."""
    temperature: NonNegativeFloat = 0.0
    """Divisor of the logits that tokens are sampled from; 0 takes the most likely token."""
    top_k: Positive | None = None
    """Sample from so many of the most likely tokens; without it, from all."""
    top_p: Annotated[float, Range(above=0, most=1)] = 1.0
    """Sample from the fewest tokens that have this probability together (Holtzman et al. 2019)."""
    repetition_penalty: PositiveFloat = 1.0
    """Divisor of the logits above 0, and factor of those below, of tokens that a text already has, prompt included
    (Keskar et al. 2019); beam search applies it to log-probabilities."""
    no_repeat_ngram_size: NonNegative = 0
    """Length of the token sequences that may not occur twice in a text, prompt included; 0 allows all repetitions."""
    min_tokens: NonNegative = 0
    """Fewest tokens in front of the end token."""
    stop: list[str] | None = None
    """Texts that end a continuation, which is cut in front of them. On the command line it may be repeated."""
    num_samples: Positive = 1
    """Continuations of each text: samples, or the best of beam search."""
    seed: Seed = 0
    """Seed of the samples: a token depends on it, the numbers of the text and of the sample, and the position alone."""

    def check(self, prefix: str = "") -> None:
        """Raises UserError for values that cannot work.

        Args:
            prefix: of the fields' names in messages, such as ``--``.
        """
        for one in fields(self):
            if one.name != "stop":
                _check_type(f"{prefix}{one.name}", getattr(self, one.name), one.default)
        if self.stop is not None and not (
            isinstance(self.stop, list | tuple) and all(isinstance(text, str) and text for text in self.stop)
        ):
            raise UserError(f"{prefix}stop is {self.stop!r}: pass a list of texts that are not empty")
        if self.min_tokens > self.max_tokens:
            raise UserError(
                f"{prefix}min_tokens is {self.min_tokens}, over {prefix}max_tokens {self.max_tokens}: lower it"
            )
        check_fields(prefix, self)
        if self.beams > 1 and self.temperature > 0:
            raise UserError(
                f"{prefix}beams is {self.beams} and {prefix}temperature {self.temperature}: remove one of them, as "
                "beam search does not sample"
            )
        if self.temperature == 0 and (self.top_k is not None or self.top_p < 1):
            name, value = ("top_p", self.top_p) if self.top_k is None else ("top_k", self.top_k)
            raise UserError(
                f"{prefix}{name} is {value}, but {prefix}temperature is 0, which takes the most likely token: set "
                f"{prefix}temperature, for example to 1"
            )
        if self.temperature == 0 and self.num_samples > self.beams:
            raise UserError(
                f"{prefix}num_samples is {self.num_samples}, but there are no more continuations than beams "
                f"({self.beams}) without sampling: set {prefix}temperature or {prefix}beams"
            )


def _check_type(name: str, value: object, default: object) -> None:
    """Raises UserError for a value of another type than the field's, which its default tells; None is a whole number
    that may be left out."""
    if default is None and value is None:
        return
    kind, words = TYPES[int if default is None else type(default)]
    if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
        raise UserError(f"{name} is {value!r}: pass {words}")
