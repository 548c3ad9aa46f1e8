"""A fine-tuning run and its labelled data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from bert.config.model import ModelConfig, PairTruncation, TokenizerConfig
from bert.config.options import Decoding, EmbeddingConfig, LoraConfig, RerankerConfig
from bert.config.training import LoggerName, OptimizerConfig, TrainingConfig
from bert.config.validation import (
    Fraction,
    InnerFraction,
    NonNegative,
    NonNegativeFloat,
    Positive,
    Range,
    Seed,
    check_fields,
    check_paths,
    check_unused,
)
from bert.errors import UserError


@dataclass(frozen=True)
class ColumnsConfig:
    """Names of the columns, or of the fields in JSONL, of a custom task."""

    text_a: str = "text"
    """The text; of a pair the first one."""
    text_b: str | None = None
    """The second text of a pair; null for single texts."""
    label: str = "label"
    """The label, or the score; multi-label: a list of labels, or labels with ; between; a test file may do without."""
    id: str | None = None
    """What predictions are numbered by, each once; null counts the rows from 0."""
    words: str | None = None
    """Tagging: in JSONL the list of a sentence's words, null takes words; in columns named by
    data.column_names or their own first row, the one with the word, null takes words or the first."""
    tags: str | None = None
    """Tagging: the list of its tags, null takes tags; or the column with the tag, null takes tags or the last."""
    question: str = "question"
    """Spans: the question."""
    context: str = "context"
    """Spans: the text that has the answer."""
    answer: str = "answer"
    """Spans: the answer's text, or a list of right ones; empty where the context has none."""
    answer_start: str | None = "answer_start"
    """Spans: the answer's first character in the context, from 0; null takes the first place that has its text."""
    source: str = "source"
    """Sequence to sequence: the text that is read."""
    target: str = "target"
    """Sequence to sequence: the text that is written; a test file may do without."""
    query: str = "query"
    """Embedding, reranker: the text that is searched for."""
    positive: str = "positive"
    """Embedding, reranker: the document that answers it."""
    negatives: str = "negatives"
    """Embedding, reranker: a document that does not, or in JSONL a list of these; rows may do without."""
    references: str | None = None
    """Sequence to sequence: in JSONL of dev and test, a list of further targets that are as good; null for none."""


@dataclass(frozen=True)
class TaskDataConfig:
    """The labelled data of a task."""

    dir: str | None = None
    """Folder with the task's original files (train.tsv, dev.tsv, test.tsv; for SQuAD its JSON, and so on), or that
    datasets saved with all splits; hub:nyu-mll/glue and its like, hub:ORG/NAME[:CONFIG]."""
    train: str | None = None
    """For a custom task, as all keys from here to columns: training file in data.dir (or with a path), .tsv, .csv
    or .jsonl, also as .gz, .bz2, .xz, .zst; of a data set the split; null takes train with any of these ends."""
    dev: str | None = None
    """Its file to choose checkpoints by; null takes dev with any end, of a data set the split validation; without one,
    dev_fraction of the training rows are held out."""
    test: str | None = None
    """Its file to predict, and to score where it has labels; null takes test with any end where there is one."""
    column_names: list[str] | None = None
    """Names of the columns of TSV and CSV files whose first line does not tell them."""
    metrics: list[str] | None = None
    """Scores, the first one chooses the best checkpoint; classification: accuracy, f1 (of the second of two labels),
    macro_f1, matthews; multilabel: micro_f1, macro_f1; regression: pearson, spearman; null takes accuracy, or both."""
    class_weights: list[str] | str | None = None
    """Classification, multilabel: factor of the loss of rows with a label, for rare ones: balanced takes it from the
    shares of the labels in the training rows, LABEL=FACTOR ... sets it; null weighs all rows the same."""
    label_thresholds: list[Annotated[float, Range(least=0, most=1)]] | None = None
    """Multilabel: least probability of a label that is predicted, one for each label or one for all; null tunes them on
    dev for the first of metrics and writes them into results.json."""
    score_range: list[Annotated[float, Range()]] | None = None
    """Least and greatest score of a regression, or of pairs for embeddings and rerankers: others are refused in files.
    Predictions of a regression are cut to them."""
    source: str | None = None
    """Sequence to sequence: the end of the names of parallel files with a text on each line, such as de for train.de,
    val.de and test*.de; null reads columns."""
    target: str | None = None
    """Sequence to sequence: the same for the target, such as en."""
    columns: ColumnsConfig = field(default_factory=ColumnsConfig)
    """the columns of a custom task"""
    max_length: Annotated[int, Range(least=8)] = 128
    """Longest row in tokens, special ones included. Longer inputs are cut, the longer text first; those of SQuAD and
    of tagging are read through several rows."""
    pair_truncation: PairTruncation | None = None
    """How pairs are cut: google takes tokens from the longer text, of equals from the second, as google-research/bert;
    longest_first gives an odd token to the longer text, of equals to the second, as transformers. Defaults to the
    way of init: longest_first for a published Hugging Face model, else google."""
    max_target_length: Annotated[int, Range(least=2)] | None = None
    """Sequence to sequence: longest target in training, in tokens, with its start or its end; longer ones are cut. It
    is never over max_length, which null takes."""
    buckets: list[Positive] = field(default_factory=lambda: [8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512])
    """Lengths that batches are padded to: each costs one compilation and saves padding."""
    max_train_samples: Positive | None = None
    """Train on a random sample of so many training rows; of questions, sentences or choices likewise."""
    max_dev_samples: Positive | None = None
    """Score on a random sample of so many dev rows."""
    dev_fraction: InnerFraction | None = None
    """Hold out this share of the training rows as dev, and read no dev file; questions about one context stay together.
    null reads the dev file; a custom task without one holds out 0.1."""
    sample_seed: Seed | None = None
    """Seed of these samples; null takes seed, for several seeds the first one, so that all have the same dev rows."""
    labels: list[str] | None = None
    """Labels in the order of their numbers, for tasks that have none of their own; null: the labels that a data set
    declares, or those of the training file sorted alphabetically or numerically. Multilabel: if the file has no column
    label, the names of the columns of the labels."""
    invalid_tags: Literal["error", "count"] = "error"
    """Tagging: tags that the file's scheme does not allow there, such as I-PER after O, are an error, or counted
    (count) and read as conlleval reads them."""
    clitics: list[str] | None = None
    """Tagging: word endings such as 's and n't that are separate words in the texts of bert predict; null: those that
    are separate words in the training data."""
    doc_stride: Positive = 128
    """SQuAD: tokens between the starts of two windows over a long context."""
    max_query_length: Positive = 64
    """SQuAD: longest question in tokens; longer ones are cut."""
    max_answer_length: Positive = 30
    """SQuAD: longest answer in tokens."""
    n_best_size: Positive = 20
    """SQuAD: most answers listed for each question in nbest_predictions.json."""
    null_score_diff_threshold: Annotated[float, Range()] | None = None
    """SQuAD v2.0: no answer is given where its score is better than the best answer's by more than this; null tunes it
    for the best F1 on dev and writes it into results.json."""
    misaligned_answers: Literal["skip", "error"] = "skip"
    """SQuAD: training questions whose answers do not stand where the file says are skipped and counted (skip), or an
    error (error), in dev too."""

    def check(self) -> None:
        """Raises UserError for values no feature can be built with."""
        check_fields("data.", self)
        if self.dir is None and self.train is None:
            raise UserError("data.dir is not set: name the folder of the task's train and dev files, --data.dir DIR")
        if not self.buckets:
            raise UserError("data.buckets is an empty list: list at least one length")
        if self.dev_fraction is not None and self.dev is not None:
            raise UserError("data.dev and data.dev_fraction are both set: remove one of them")
        for name in ("column_names", "labels", "metrics"):
            values = getattr(self, name)
            if values is not None and not 0 < len(values) == len({value.strip() for value in values}):
                raise UserError(f"data.{name} is {values}: list each name once, or leave it out")
        if self.columns.text_a == self.columns.text_b:
            raise UserError(f"data.columns.text_a and text_b are both {self.columns.text_a!r}: name two columns")
        if self.score_range is not None and (len(self.score_range) != 2 or self.score_range[0] >= self.score_range[1]):
            raise UserError(f"data.score_range is {self.score_range}: give the least and the greatest score")


@dataclass(frozen=True)
class FinetuneConfig:
    """A fine-tuning run."""

    task: str = "sst2"
    """The task: cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte or wnli of GLUE; squad (v1.1) or squad2 (v2.0); ner for
    CoNLL columns, conll2003 and wnut17 among them; multiple_choice for SWAG's CSV or CommonsenseQA's JSONL, swag and
    commonsenseqa among them; translation and summarization, which write a text for a text (sequence to sequence),
    multi30k and aeslc among them; packages, the installed package that a docstring is from; for custom data
    classification, multilabel, regression, tagging or span (docs/own_task.md), embedding (docs/embeddings.md) and
    reranker (docs/reranking.md)."""
    output_dir: str | None = None
    """Folder of the run, or its URL in a bucket (gs://, s3://); null takes runs/ and the name of the recipe. Run
    again, it resumes."""
    init: str | None = None
    """Run, Hugging Face folder, folder of google-research/bert or hub name to start from; "none" trains from random
    weights, the control that shows what pretraining gave."""
    architecture_from: str | None = None
    """With init none: the run or model whose sizes and vocabulary to take, without its weights."""
    seed: Seed = 0
    """Seed of the head's initialisation, order of data and dropout."""
    num_seeds: Positive = 1
    """Runs of this many seeds, the first one seed, each in a sub-folder; results.json tells mean and deviation."""
    patience: Positive | None = None
    """Stop after so many evaluations in a row without a better main metric; null trains to the end."""
    classifier_dropout: Fraction | None = None
    """Dropout before the classifier; null takes hidden_dropout_prob. Those of squad, squad2 and span have none."""
    language_model_weight: NonNegativeFloat = 0.0
    """Factor of the loss of the next tokens of each row, which is added to that of a task that classifies or scores
    texts; 0.5 in GPT. Of a model that reads left to right (model.causal)."""
    head_init: Literal["source", "none"] = "source"
    """With init: the head starts as the source's head, if both are for the same kind of task (source), or from random
    weights (none). Labels are matched by name; new labels start from random weights."""
    decoder_init: Literal["encoder", "none"] = "encoder"
    """With init, and for sequence to sequence: the decoder starts as the source's encoder (encoder; BERT2BERT of Rothe
    et al. 2020), or from random weights (none; BERT2Rnd). Cross-attention starts from random weights."""
    num_frozen_layers: NonNegative | None = None
    """Lower encoder layers that stay as they are, and with them the embeddings (0: these alone); null trains all."""
    num_feature_layers: Positive | None = None
    """Train the head alone, on the outputs of so many last layers side by side (4 in the paper); null trains all."""
    loggers: list[LoggerName] | None = None
    """Where metrics go besides metrics.jsonl: tensorboard, wandb (Weights & Biases), mlflow, or several with commas
    between them; null takes tensorboard where tensorboardX is installed, [] none."""
    profile: bool = False
    """Write a trace of a few early steps to profile/ in the run's folder, for TensorBoard and Perfetto."""
    data: TaskDataConfig = field(default_factory=TaskDataConfig)
    """the labelled data"""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    """the vocabulary, where init is none and architecture_from is not set"""
    target_tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    """sequence to sequence: a vocabulary of the target's own, where any of these is set"""
    model: ModelConfig = field(default_factory=ModelConfig)
    """the encoder, where init is none and architecture_from is not set"""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """the optimizer"""
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)
    """the task embedding"""
    reranker: RerankerConfig = field(default_factory=RerankerConfig)
    """the task reranker"""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """low-rank adapters (LoRA)"""
    training: TrainingConfig = field(default_factory=TrainingConfig)
    """the training loop"""
    decoding: Decoding = field(default_factory=Decoding)
    """sequence to sequence: how the final predictions are generated"""

    def check(self) -> None:
        """Raises UserError at the first value, or pair of values, that cannot work."""
        check_paths(self)
        check_fields("", self)
        parts = (self.model, self.tokenizer, self.data, self.embedding, self.reranker, self.optimizer, self.lora)
        for part in (*parts, self.training):
            part.check()
        self.training.check_warmup(self.optimizer)
        by_steps = "but fine-tuning ends after training.epochs or training.steps: remove it"
        check_unused("training.", self.training, by_steps, ["max_minutes"])
        check_unused("training.", self.training, "but the task sets the objective: remove it", ["objective"])
        if self.training.tokens_per_batch is not None and self.training.tokens_per_batch < self.data.max_length:
            raise UserError(
                f"training.tokens_per_batch ({self.training.tokens_per_batch}) has no room for a row of "
                f"data.max_length ({self.data.max_length}): raise the one or lower the other"
            )
        self.training.check_attention(self.model.attention_probs_dropout_prob)
        if self.init is None:
            raise UserError(
                "init is not set: name the run to start from, --init runs/X, or --init none for random weights"
            )
        if self.architecture_from is not None and self.init != "none":
            raise UserError(
                "architecture_from is set, but init is not none: set init to none, or remove architecture_from"
            )
        source = "architecture_from" if self.architecture_from is not None else None if self.init == "none" else "init"
        if source is not None:
            check_unused("tokenizer.", self.tokenizer, f"but the vocabulary comes with {source}: remove it")
        self._check_decoder()
        self._check_lora()
        self.training.check_mesh_batches(self.batches())
        if self.init == "none" and self.architecture_from is None:
            self.check_model()
        if self.seed + self.num_seeds > 2**32:
            raise UserError(f"seed + num_seeds is {self.seed + self.num_seeds}: it must be at most 2**32")
        if self.num_frozen_layers is not None and self.num_feature_layers is not None:
            raise UserError(
                "num_frozen_layers and num_feature_layers are both set, and the latter freezes the whole encoder: "
                "remove one of them"
            )
        if self.language_model_weight and self.num_feature_layers is not None:
            raise UserError(
                "language_model_weight and num_feature_layers are both set, and the latter freezes the whole encoder: "
                "remove one of them"
            )

    def batches(self) -> list[tuple[str, int, int]]:
        """Key, rows and micro-batches of the batches whose number of rows is set."""
        training = self.training
        evaluation = ("training.eval_batch_size", training.rows_per_evaluation, 1)
        if training.tokens_per_batch is not None:
            return [evaluation]
        return [("training.batch_size", training.batch_size, training.gradient_accumulation_steps), evaluation]

    @property
    def has_target_tokenizer(self) -> bool:
        """Whether the target of a sequence-to-sequence model has a vocabulary of its own."""
        return not self.target_tokenizer.is_unset

    def _check_decoder(self) -> None:
        """Raises UserError for settings of a decoder, of its vocabulary or of its answers that cannot work."""
        self.target_tokenizer.check("target_tokenizer")
        self.decoding.check("decoding.")
        if self.decoding.num_samples > 1:
            raise UserError(
                f"decoding.num_samples is {self.decoding.num_samples}, but predictions have one target a line: remove "
                "it, and pass num_samples to generate"
            )
        if self.decoding.stop:
            raise UserError(
                f"decoding.stop is {self.decoding.stop}, but targets are compared whole: remove it, and pass stop to "
                "generate"
            )
        if self.has_target_tokenizer and self.model.share_decoder != "none":
            raise UserError(
                f"target_tokenizer is set, but model.share_decoder is {self.model.share_decoder}, which has one "
                "vocabulary for both sides: remove one of the two"
            )
        if self.has_target_tokenizer and self.init != "none" and self.decoder_init == "encoder":
            raise UserError(
                "target_tokenizer is set, but decoder_init is encoder, which has the vocabulary of init: set "
                "decoder_init to none, or remove target_tokenizer"
            )
        if (self.data.source is None) != (self.data.target is None):
            missing, there = ("source", "target") if self.data.source is None else ("target", "source")
            raise UserError(
                f"data.{there} is set, but data.{missing} is not: set both to the ends of parallel files, such as de "
                "and en, or remove it to read columns"
            )

    def _check_lora(self) -> None:
        """Raises UserError for adapters of weights that are random or not trained."""
        if self.lora.rank is None:
            return
        for name, value in (("init", self.init), ("decoder_init", self.decoder_init)):
            if value == "none":
                raise UserError(
                    f"lora.rank is {self.lora.rank}, but {name} is none, and adapters are for weights that are "
                    f"pretrained: set {name}, or remove lora.rank"
                )
        for name in ("num_frozen_layers", "num_feature_layers"):
            if getattr(self, name) is not None:
                raise UserError(
                    f"lora.rank and {name} are both set, and lora.rank freezes the whole encoder: remove one of them"
                )

    def check_model(self) -> None:
        """Raises UserError if the model, once its sizes are known, has too few layers, rows are too long for it, or it
        is none that ``language_model_weight`` is for."""
        if self.language_model_weight and not self.model.causal:
            raise UserError(
                f"language_model_weight is {self.language_model_weight}, and the model does not read left to right "
                "(model.causal is false): remove it, or set init to a left-to-right model"
            )
        self.training.check_kernel(self.model)
        self.training.check_mesh_sizes(self.model)
        if self.data.max_length > self.model.max_position_embeddings:
            raise UserError(
                f"data.max_length ({self.data.max_length}) is over the model's position table "
                f"(model.max_position_embeddings, {self.model.max_position_embeddings}): shorten it"
            )
        self.model.check_length("data.max_length", self.data.max_length)
        self.model.check_depths(self.optimizer.layerwise_lr_decay, self.num_frozen_layers or 0)
        self.embedding.check_width(self.model.hidden_size)
        if (self.lora.rank or 0) > self.model.hidden_size:
            raise UserError(
                f"lora.rank is {self.lora.rank}, but the model is {self.model.hidden_size} wide (model.hidden_size): "
                "use a smaller one"
            )
        for name in ("num_frozen_layers", "num_feature_layers"):
            if (getattr(self, name) or 0) > self.model.num_hidden_layers:
                raise UserError(
                    f"{name} is {getattr(self, name)}, but the model has {self.model.num_hidden_layers} layers: "
                    "take no more than these"
                )
