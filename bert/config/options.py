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
    conflict,
)
from bert.errors import UserError

GENERATOR_HEAD_SIZE = 64
"""Size of the generator's attention heads in the paper."""


@dataclass(frozen=True)
class ElectraConfig:
    """Replaced-token detection (Clark et al. 2020); names as in google-research/electra configure_pretraining.py."""

    generator_hidden_size: Annotated[float, Range(above=0, maximum=1)] = 0.25
    """Width of the generator as a share of model.hidden_size. Its feed-forward layer is 4 times as wide, its heads have
    64 features, and it has as many layers as the model."""
    disc_weight: PositiveFloat = 50.0
    """Weight of the discriminator's loss relative to the generator's."""

    def generator_width(self, model: ModelConfig) -> int:
        """Width of the generator's hidden states."""
        return round(model.hidden_size * self.generator_hidden_size)

    def check(self, model: ModelConfig, objective: str) -> None:
        """Raises UserError for values that leave no generator, or that ``training.objective`` ignores."""
        check_fields("electra.", self)
        if objective != "rtd":
            fix = "remove it, or set training.objective rtd"
            check_unused("electra.", self, f"but training.objective is {objective}: {fix}")
        elif not model.prediction_transform:
            raise UserError("model.prediction_transform is false, but training.objective is rtd: remove it")
        width = self.generator_width(model)
        share = f"electra.generator_hidden_size is {self.generator_hidden_size}"
        if not width:
            raise UserError(f"{share}, but model.hidden_size is {model.hidden_size}: use a larger share")
        head_size = int(width // generator_heads(width) * model.rotary_fraction)  # as far as it is rotated
        is_rotary = model.position_embedding_type == "rotary" and objective == "rtd"
        if is_rotary and (head_size % 2 or not head_size):
            rotary = "but model.position_embedding_type is rotary and needs an even number"
            raise UserError(f"{share}, which makes heads of {head_size} features, {rotary}: use another share")
        if is_rotary and model.rotary_scaling == "ntk" and head_size == 2:
            raise UserError(f"{share}, which makes heads that rotate 2 features, but ntk needs 4: use another share")


def generator_heads(width: int) -> int:
    """Returns the number of heads of a generator of this width.

    Heads have `GENERATOR_HEAD_SIZE` features if that divides the width (google-research/electra run_pretraining.py,
    get_generator_config).
    """
    return next(n for n in range(max(1, width // GENERATOR_HEAD_SIZE), 0, -1) if width % n == 0)


@dataclass(frozen=True)
class DistillationConfig:
    """A teacher, and the losses that are added to the loss of training.objective."""

    teacher: str | None = None
    """Run, Hugging Face folder, folder of google-research/bert or hub name of the teacher (short: --teacher). The
    student uses its vocabulary. null: no teacher."""
    checksum: str | None = None
    """SHA-256 of the teacher's weights, filled in at the start. A run resumes only with the same weights."""
    initial_weights: Literal["teacher", "random"] = "teacher"
    """Initial weights of the student if init is null. teacher: the teacher's embeddings, or their principal components
    if the student is narrower, and some of its layers if they have the same shape (DistilBERT). A student that is wider
    than its teacher starts from random weights."""
    temperature: PositiveFloat = 2.0
    """Temperature of both distributions over tokens (Hinton et al. 2015)."""
    token_weight: NonNegativeFloat = 1.0
    """Weight of the KL divergence from the teacher's distribution at the predicted positions, times the squared
    temperature. No effect if the teacher has no MLM head."""
    hidden_weight: NonNegativeFloat = 1.0
    """Weight of the mean distance between hidden states of tokens, over all pairs of layers."""
    hidden_loss: Literal["cosine", "mse"] = "cosine"
    """Distance of hidden states: 1 - cosine (DistilBERT), or the mean squared difference (TinyBERT)."""
    sentence_weight: NonNegativeFloat = 1.0
    """Weight of 1 - cosine between the mean last hidden states of a row."""
    student_layers: list[NonNegative] | None = None
    """Student layers that learn the hidden states of teacher_layers, one each; 0: the embeddings. Defaults to the last
    layer. If the widths differ, a linear projection of the student's states is learned as well."""
    teacher_layers: list[NonNegative] | None = None
    """Teacher layers for student_layers, as many. Defaults to the last layer."""

    def check(self) -> None:
        """Raises UserError for values that cannot work."""
        check_fields("distillation.", self)
        if self.teacher is None:
            check_unused("distillation.", self, "but there is no teacher: remove it, or set distillation.teacher")
            return
        if not (self.token_weight or self.hidden_weight or self.sentence_weight):
            fix = "set one of them, or remove distillation.teacher"
            raise UserError(f"distillation.token_weight, hidden_weight and sentence_weight are 0: {fix}")
        students, teachers = self.student_layers, self.teacher_layers
        if (students is None) != (teachers is None) or len(students or ()) != len(teachers or ()):
            fix = "set both, with as many layers"
            raise conflict(self, "distillation.student_layers", "distillation.teacher_layers", fix)
        if students is not None and not 0 < len(set(students)) == len(students):
            raise UserError(f"distillation.student_layers is {students}: list each layer once, and at least one")


@dataclass(frozen=True)
class TaskDistillationConfig:
    """A fine-tuned teacher, whose outputs are learned in addition to the labels (Hinton et al. 2015)."""

    teacher: str | None = None
    """Fine-tuned run, Hugging Face folder or hub name whose outputs are learned (short: --teacher), for tasks that
    classify, score or tag texts. It needs the labels of the task, in any order; its vocabulary may differ. It reads
    each row once, before training. null: no teacher."""
    checksum: str | None = None
    """SHA-256 of the teacher's weights, filled in at the start. A run resumes only with the same weights."""
    temperature: PositiveFloat = 2.0
    """Temperature of the distributions over labels, whose divergence is multiplied by its square. Not used for scores,
    whose squared difference is minimized."""
    weight: Annotated[float, Range(minimum=0, maximum=1)] = 0.5
    """Weight of the teacher's loss; the loss of the labels has the weight 1 - weight. 1: learn from the teacher alone.
    0: learn from the labels alone, as without a teacher."""

    @property
    def is_used(self) -> bool:
        """Whether there is a teacher that changes the run."""
        return self.teacher is not None and self.weight > 0

    def check(self) -> None:
        """Raises UserError for values that cannot work."""
        check_fields("distillation.", self)
        if self.teacher is None:
            check_unused("distillation.", self, "but there is no teacher: remove it, or set distillation.teacher")


PoolingMode = Literal["mean", "cls", "max", "lasttoken", "splade", "tokens"]
"""Poolings that are trained."""

LEXICAL_POOLING = "splade"
"""Pooling whose embeddings are weights of the words in the vocabulary."""

TOKEN_POOLING = "tokens"
"""Pooling with a vector per token."""

TOKEN_DIMENSIONS = 128
"""Default width of the vectors of tokens, as in the paper of ColBERT."""


@dataclass(frozen=True)
class LateInteractionConfig:
    """Pooling tokens: lengths of queries, and which tokens have a vector. Defaults to the settings of init."""

    query_length: Positive | None = None
    """Maximum number of tokens of a query. Defaults to the setting of init, or 32. Documents have data.max_length."""
    expanded_length: NonNegative | None = None
    """Number of tokens to which shorter queries are extended by mask tokens, which have vectors as well (Khattab and
    Zaharia 2020, section 3.2). 0: queries are not extended. Defaults to the setting of init, or query_length."""
    attends_to_expansion: bool | None = None
    """Let the tokens of a query attend to these mask tokens. Defaults to the setting of init, or false."""
    expansion_token: str | None = None
    """Token in place of the mask token. null: the setting of init, or the mask token."""
    skipped_tokens: list[str] | None = None
    """Tokens without a vector. []: none. Defaults to the setting of init, or punctuation marks."""
    skipping_roles: list[Literal["query", "document"]] | None = None
    """Which texts lack vectors of skipped_tokens. Defaults to the setting of init, or document."""


TEACHER_LOSSES = ("margin_mse", "kl_divergence")
"""Losses of embeddings that need a teacher's scores of the documents."""


@dataclass(frozen=True)
class EmbeddingConfig:
    """Task embedding: one vector per text."""

    loss: Literal["in_batch", "triplet", "margin_mse", "kl_divergence", "cosent", "cosine", "same_label"] = "in_batch"
    """Loss. For rows of a query, a positive and negatives: in_batch (the documents of all other rows of the batch, on
    all devices, are negatives too; InfoNCE) or triplet (margin between the positive and the row's negatives). With a
    teacher's scores: margin_mse (their differences; Hofstätter et al. 2020) or kl_divergence (their softmax;
    ColBERTv2). For pairs with a score: cosent (order of the cosines; CoSENT) or cosine (squared error of the cosine,
    with scores mapped to 0 to 1). For texts with a label: same_label (texts of the batch with the same label are
    positives, all others negatives; SupCon)."""
    temperature: PositiveFloat | None = None
    """All losses except triplet and cosine: divisor of the cosines, or of the scores with pooling splade or tokens.
    Defaults to 0.05, with splade and tokens to 1."""
    margin: PositiveFloat = 0.2
    """triplet: minimum difference between the cosines (tokens: the scores) of the positive and a negative."""
    num_negatives: Positive | None = None
    """Rows with a query: maximum number of negatives per row, the first ones. null: use all. Each adds a text to every
    row of a batch."""
    matryoshka: list[Positive] | None = None
    """Widths to which embeddings may be truncated: the loss is the mean over the whole embedding and these prefixes
    (Kusupati et al. 2022). null: train the whole embedding only."""
    pooling: PoolingMode | None = None
    """Pooling of the tokens' hidden states: mean, first token (cls), maximum of each feature (max), or last token
    (lasttoken), for causal models. splade: the maximum of log(1 + relu(logit)) of each vocabulary word in the MLM head
    (Formal et al. 2021), compared by inner products. tokens: a vector per token (ColBERT; Khattab and Zaharia 2020);
    the score is the sum over the query's vectors of their maximum product with the document's. Defaults to the setting
    of init, or mean."""
    dimensions: Positive | None = None
    """tokens: width of the vectors, to which a linear layer projects the hidden states. Defaults to the width of init's
    projection, or 128."""
    late_interaction: LateInteractionConfig = field(default_factory=LateInteractionConfig)
    """vectors of tokens"""
    query_flops_weight: NonNegativeFloat = 5e-5
    """splade: weight of the FLOPS regularizer of queries, the sum over the vocabulary of the squared mean weight of a
    word in a batch (Paria et al. 2020). It grows quadratically over the first third of the steps."""
    document_flops_weight: NonNegativeFloat = 3e-5
    """splade: weight of the FLOPS regularizer of documents, or of the second texts of pairs."""
    normalize: bool | None = None
    """Scale embeddings to length 1. Losses and scores use cosines in any case, except with splade, which is not scaled.
    Vectors of tokens are always scaled. Defaults to the setting of init, or true."""
    lowercase: bool | None = None
    """Lower-case texts before tokenization. Defaults to the setting of init, or false."""

    query_prompt: str | None = None
    """Prefix of queries, or of the first texts of pairs, such as "query: ". Also used by search. Defaults to the
    setting of init, or no prefix; tokens: [unused0] if the vocabulary has it and [unused1]."""
    document_prompt: str | None = None
    """Prefix of documents, or of the second texts of pairs. Defaults to the setting of init, or no prefix; tokens:
    [unused1] if the vocabulary has both."""

    @property
    def has_scores(self) -> bool:
        """Whether the rows are pairs with a score."""
        return self.loss in ("cosent", "cosine")

    @property
    def is_lexical(self) -> bool:
        """Whether embeddings are weights of the words in the vocabulary."""
        return self.pooling == LEXICAL_POOLING

    @property
    def has_token_vectors(self) -> bool:
        """Whether a text has a vector per token."""
        return self.pooling == TOKEN_POOLING

    @property
    def token_dimensions(self) -> int:
        """Width of the vectors of tokens."""
        return self.dimensions or TOKEN_DIMENSIONS

    @property
    def divisor(self) -> float:
        """The temperature with its default."""
        return self.temperature or (1.0 if self.is_lexical or self.has_token_vectors else 0.05)

    def check(self) -> None:
        """Raises UserError for values that cannot work."""
        check_fields("embedding.", self)
        if (self.has_scores or self.loss == "same_label") and self.num_negatives is not None:
            raise conflict(self, "embedding.num_negatives", "embedding.loss", "remove it, since there are no negatives")
        if self.matryoshka is not None and not 0 < len(self.matryoshka) == len(set(self.matryoshka)):
            raise UserError(f"embedding.matryoshka is {self.matryoshka}: list each width once, or remove it")
        if self.is_lexical:
            for key in ("matryoshka", "normalize"):
                if getattr(self, key):
                    raise conflict(self, f"embedding.{key}", "embedding.pooling", "remove it")
            if self.loss == "cosine":
                raise conflict(self, "embedding.loss", "embedding.pooling", "set the loss to cosent")
        self._check_token_vectors()

    def _check_token_vectors(self) -> None:
        """Raises UserError for settings that one vector per token lacks, and for its settings with another pooling."""
        check_fields("embedding.late_interaction.", self.late_interaction)
        if self.pooling is not None and not self.has_token_vectors:
            reason = f"but embedding.pooling is {self.pooling}: remove it, or set the pooling to tokens"
            check_unused("embedding.", self, reason, ("dimensions",))
            check_unused("embedding.late_interaction.", self.late_interaction, reason)
        if not self.has_token_vectors:
            return
        for key, is_wrong in (("matryoshka", self.matryoshka), ("normalize", self.normalize is False)):
            if is_wrong:
                raise conflict(self, f"embedding.{key}", "embedding.pooling", "remove it")
        if self.lowercase:
            raise conflict(self, "embedding.lowercase", "embedding.pooling", "use an uncased tokenizer")
        if self.loss in ("cosine", "same_label"):
            fix = "set the loss to in_batch, triplet, margin_mse, kl_divergence or cosent, or use another pooling"
            raise conflict(self, "embedding.loss", "embedding.pooling", fix)
        length, expanded = self.late_interaction.query_length, self.late_interaction.expanded_length
        if length is not None and (expanded or 0) > length:
            raise UserError(
                f"embedding.late_interaction.expanded_length is {expanded}, but query_length is {length}: use at most "
                "as many tokens"
            )

    def check_width(self, hidden_size: int) -> None:
        """Raises UserError for a width that is not below the model's."""
        if self.matryoshka is not None and max(self.matryoshka) >= hidden_size:
            widest = max(self.matryoshka)
            raise UserError(
                f"embedding.matryoshka has {widest}, but embeddings have {hidden_size} numbers, which are trained in "
                "any case: list smaller widths"
            )


@dataclass(frozen=True)
class RerankerConfig:
    """Task reranker: one score for a query and a document read together (a cross-encoder)."""

    loss: Literal["binary", "ordinal", "listwise"] = "binary"
    """Cross-entropy of the relevance (0 to 1) of each document (binary), of the order of each two documents of a query
    with different relevance (ordinal; RankNet), or of the softmax over all documents of a query (listwise; ListNet)."""
    num_negatives: Positive | None = None
    """Training rows with a positive: maximum number of negatives per row, the first ones. null: use all. Every query of
    a batch has room for the largest number of documents. Dev and test always use all documents."""

    def check(self) -> None:
        """Raises UserError for values that cannot work."""
        check_fields("reranker.", self)


PROJECTIONS = ("query", "key", "value", "output")
"""The projections of an attention layer."""


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters (Hu et al. 2021) of a frozen encoder."""

    rank: Positive | None = None
    """Rank r of the adapters; 8 in the paper for GLUE. Only adapters, pooler and head are trained and stored in
    checkpoints. Use a higher learning rate than without adapters: 4e-4 or more. null: train all parameters."""
    alpha: PositiveFloat = 8.0
    """Adapters are scaled by alpha / rank, so that the learning rate does not depend on the rank."""
    projections: list[str] = field(default_factory=lambda: ["query", "value"])
    """Projections of self-attention with adapters: query, key, value, output. The paper adapts query and value, the
    best use of a given number of parameters (table 5)."""
    checksum: str | None = None
    """SHA-256 of the frozen weights, filled in at the start. A run resumes only with the same weights."""

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
        """Factor of the product of an adapter's two matrices."""
        return self.alpha / (self.rank or 1)


TYPES: dict[type, tuple[type, str]] = {
    bool: (bool, "true or false"),
    int: (numbers.Integral, "a whole number"),
    float: (numbers.Real, "a number"),
    str: (str, "text"),
}
"""Accepted Python types (including NumPy's numbers) by field type, with their names in messages."""


@dataclass(frozen=True)
class Decoding:
    """Greedy decoding (the default), sampling if ``temperature`` is set, or beam search if ``beams`` is over 1."""

    max_tokens: Positive = 64
    """Maximum length of a continuation in tokens, including the end token."""
    beams: Positive = 1
    """Number of hypotheses per text in beam search."""
    length_penalty: Annotated[float, Range()] = 1.0
    """Exponent of the length that beam search divides the sum of log-probabilities by; 0: no normalization."""
    length_norm: Literal["length", "gnmt"] = "length"
    """Length in length_penalty: the generated tokens (length), or (5 + tokens) / 6 (gnmt; Wu et al. 2016, section
    7)."""
    early_stopping: bool = False
    """End beam search when as many hypotheses as beams are finished, instead of when no better one is possible."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature: divisor of the logits. 0: choose the most likely token."""
    top_k: Positive | None = None
    """Sample from the k most likely tokens. null: from all tokens."""
    top_p: Annotated[float, Range(above=0, maximum=1)] = 1.0
    """Sample from the smallest set of tokens with at least this total probability (Holtzman et al. 2019)."""
    repetition_penalty: PositiveFloat = 1.0
    """Divisor of positive logits, and factor of negative ones, for tokens that already occur in the text or the prompt
    (Keskar et al. 2019). Beam search applies it to log-probabilities."""
    no_repeat_ngram_size: NonNegative = 0
    """Length of token sequences that may occur only once in the text and its prompt; 0: no limit."""
    min_tokens: NonNegative = 0
    """Minimum number of tokens before the end token."""
    stop: list[str] | None = None
    """Texts that end a continuation, and are removed from it. May be repeated on the command line."""
    num_samples: Positive = 1
    """Number of continuations per text: samples, or the best hypotheses of beam search."""
    seed: Seed = 0
    """Seed of sampling. A token depends only on it, the position, and the numbers of the text and the sample."""

    def check(self, prefix: str = "") -> None:
        """Raises UserError for values that cannot work.

        Args:
            prefix: prefix of the fields' names in messages, such as ``--``.
        """
        for one in fields(self):
            if one.name != "stop":
                _check_type(f"{prefix}{one.name}", getattr(self, one.name), one.default)
        if self.stop is not None and not (
            isinstance(self.stop, list | tuple) and all(isinstance(text, str) and text for text in self.stop)
        ):
            raise UserError(f"{prefix}stop is {self.stop!r}: pass a list of texts that are not empty")
        if self.min_tokens > self.max_tokens:
            raise conflict(self, f"{prefix}min_tokens", f"{prefix}max_tokens", "lower the first or raise the second")
        check_fields(prefix, self)
        if self.beams > 1 and self.temperature > 0:
            fix = "remove one of them, since beam search does not sample"
            raise conflict(self, f"{prefix}beams", f"{prefix}temperature", fix)
        for name, samples in (("top_k", self.top_k is not None), ("top_p", self.top_p < 1)):
            if self.temperature == 0 and samples:
                fix = "set the temperature, for example to 1, to sample"
                raise conflict(self, f"{prefix}{name}", f"{prefix}temperature", fix)
        if self.temperature == 0 and self.num_samples > self.beams:
            fix = f"without sampling there are no more continuations than beams: set {prefix}temperature or more beams"
            raise conflict(self, f"{prefix}num_samples", f"{prefix}beams", fix)


def _check_type(name: str, value: object, default: object) -> None:
    """Raises UserError if a value has another type than the default; None stands for an optional integer."""
    if default is None and value is None:
        return
    kind, words = TYPES[int if default is None else type(default)]
    if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
        raise UserError(f"{name} is {value!r}: pass {words}")
