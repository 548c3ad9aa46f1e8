"""Configuration of a fine-tuning run and its labelled data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from bert.config.model import WINDOW_MODES, LongTextMode, ModelConfig, PairTruncation
from bert.config.options import Decoding, EmbeddingConfig, LoraConfig, RerankerConfig, TaskDistillationConfig
from bert.config.tokenizer import TokenizerConfig
from bert.config.training import LoggerName, OptimizerConfig, TrainingConfig
from bert.config.validation import (
    Fraction,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Range,
    Seed,
    check_fields,
    check_paths,
    check_unused,
    conflict,
)
from bert.errors import UserError


@dataclass(frozen=True)
class ColumnsConfig:
    """Names of the columns (JSONL: fields) of a custom task."""

    text_a: str = "text"
    """The text, or the first text of a pair."""
    text_b: str | None = None
    """The second text of a pair. null: single texts."""
    label: str = "label"
    """The label or score. Multilabel: a list of labels, or labels separated by ;. Optional in test files."""
    id: str | None = None
    """Unique identifier of a row in predictions. Defaults to the row number, from 0."""
    words: str | None = None
    """Tagging: the list of a sentence's words (JSONL), or the column with the word (TSV, CSV). Defaults to words or
    tokens, in TSV and CSV otherwise to the first column."""
    tags: str | None = None
    """Tagging: the list of tags, or the column with the tag. Defaults to tags or ner_tags, in TSV and CSV otherwise to
    the last column. For texts: the list of entities; defaults to entities, spans or label."""
    question: str = "question"
    """Spans: the question."""
    context: str = "context"
    """Spans: the text that contains the answer."""
    answer: str = "answer"
    """Spans: the answer's text, or a list of correct answers; empty if the context has none."""
    answer_start: str | None = "answer_start"
    """Spans: offset of the answer in the context, in characters from 0. null: the first occurrence of its text."""
    source: str = "source"
    """Sequence to sequence: the source text."""
    target: str = "target"
    """Sequence to sequence: the target text. Optional in test files."""
    query: str = "query"
    """Embedding, reranker: the query."""
    positive: str = "positive"
    """Embedding, reranker: a document that answers the query."""
    negatives: str = "negatives"
    """Embedding, reranker: a document that does not answer the query, or a list of them in JSONL. Optional."""
    references: str | None = None
    """Sequence to sequence: in JSONL files for dev and test, a list of further correct targets. null: none."""


@dataclass(frozen=True)
class TaskDataConfig:
    """The labelled data of a task."""

    dir: str | None = None
    """Folder with the task's original files (train.tsv, dev.tsv, test.tsv; JSON for SQuAD, and so on) or with a data
    set saved by datasets; or a data set on the hub, hub:ORG/NAME[:CONFIG], such as hub:nyu-mll/glue."""
    train: str | None = None
    """Custom tasks, like all keys from here to columns: training file in data.dir, or its path (.parquet, or .tsv, .csv
    or .jsonl, also as .gz, .bz2, .xz or .zst); for a data set, the split. Defaults to train with any of these
    suffixes."""
    dev: str | None = None
    """File or split for evaluation and for the choice of checkpoints. Defaults to dev with any suffix, or the split
    validation; if there is none, dev_fraction of the training rows are held out."""
    test: str | None = None
    """File or split for the final predictions, scored if it has labels. Defaults to test with any suffix, if it
    exists."""
    column_names: list[str] | None = None
    """Names of the columns of TSV and CSV files without a header line."""
    bad_rows: Literal["error", "skip"] = "error"
    """Rows without a text or a label are an error (error), or are skipped with a warning and counted in results.json
    (skip). Both report the number of such rows and the first line numbers."""
    metrics: list[str] | None = None
    """Scores; the first one selects the best checkpoint. Classification: accuracy, f1 (of the second of two labels),
    macro_f1, matthews. Multilabel: micro_f1, macro_f1. Regression: pearson, spearman. Defaults to accuracy, or both."""
    class_weights: list[str] | str | None = None
    """Classification, multilabel: weights of the loss by label, for rare labels: balanced (computed from the
    frequencies of the labels in the training rows), or LABEL=FACTOR .... null: all rows have the same weight."""
    label_thresholds: list[Annotated[float, Range(minimum=0, maximum=1)]] | None = None
    """Multilabel: minimum probability of a predicted label, one for each label or one for all. null: tuned on dev for
    the first of metrics, and written to results.json."""
    calibration: PositiveFloat | Literal["temperature"] | None = None
    """Classification, multilabel: the logits are divided by this number, so that probabilities are shares of right
    answers. It changes no label, unless label_thresholds are set, which are compared with the new probabilities.
    temperature: fitted on dev (Guo et al. 2017), and written to results.json. null: 1."""
    score_range: list[Annotated[float, Range()]] | None = None
    """Minimum and maximum score in regression, or of pairs for embeddings and rerankers. Other scores in files are an
    error; predictions of a regression are clipped."""
    source: str | None = None
    """Sequence to sequence: suffix of parallel files with one text per line, such as de for train.de, val.de and
    test*.de. null: read columns."""
    target: str | None = None
    """Sequence to sequence: suffix of the target files, such as en."""
    columns: ColumnsConfig = field(default_factory=ColumnsConfig)
    """the columns of a custom task"""
    unlabelled: str | None = None
    """File in data.dir, or its path, with texts without labels, on which the student also learns from
    distillation.teacher: a text file with one input per line, or a table with the columns of the training file, as for
    bert predict. null: none."""
    max_length: Annotated[int, Range(minimum=8)] = 128
    """Maximum length of a row in tokens, including special tokens. Longer inputs are truncated, the longer text first;
    SQuAD and tagging split them into several rows."""
    pair_truncation: PairTruncation | None = None
    """Truncation of pairs. google: remove tokens from the longer text, from the second if they are equal, as in
    google-research/bert. longest_first: an odd token stays in the longer text, in the second if they are equal, as in
    transformers. Defaults to the rule of init: longest_first for a Hugging Face model, else google.
    """
    long_texts: LongTextMode = "cut"
    """Texts longer than max_length, for tasks that classify or score texts, and for embeddings. cut: keep the first
    tokens. head_tail: keep the first and the last tokens, 128 and 382 of 510 or in that proportion (Sun et al. 2019).
    windows: read the whole text through windows and average their logits or vectors. windows_max: use the maximum of
    each logit or feature instead of the average."""
    max_train_windows: Positive = 8
    """Maximum number of windows of a text in a training step, which bounds the memory. Windows of a
    longer text are spread evenly over it. Evaluation and prediction read all windows."""
    max_target_length: Annotated[int, Range(minimum=2)] | None = None
    """Sequence to sequence: maximum length of a target in training, in tokens with its start or end token; longer ones
    are truncated. At most max_length, which is the default."""
    buckets: list[Positive] = field(default_factory=lambda: [8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512])
    """Lengths that batches are padded to. Batches whose rows are a random sample are padded in up to four groups of
    similar lengths (embeddings, and on a CPU also taggers and translation). Each length costs a compilation and saves
    padding."""
    packing: bool = False
    """Put several texts of a training batch into one row of the encoder. Each attends only to itself and starts at
    position 0, so that nearly no padding is computed. Batches are then random samples. For tasks with one text or pair
    per row, and for embeddings of hidden states."""
    max_train_samples: Positive | None = None
    """Train on a random sample of this size (rows, questions, sentences or choices)."""
    max_dev_samples: Positive | None = None
    """Evaluate on a random sample of dev rows of this size."""
    dev_fraction: Fraction | None = None
    """Hold out this share of the training rows as dev instead of reading a dev file; questions about one context stay
    together. 0: hold out none without a dev file, so that there is no dev score. null: read the dev file; custom tasks
    without one hold out 0.1, or none if classifier_training is contrastive."""
    stratify_dev: bool | None = None
    """Whether dev_fraction holds out the same share of each label, for tasks with one label per row. Defaults to true
    for these tasks. null in a run of an older version: false."""
    sample_seed: Seed | None = None
    """Seed of these samples. Defaults to seed; several seeds share the first one, and so the dev rows."""
    labels: list[str] | None = None
    """Labels of a custom task, in the order of their indices. Defaults to the labels that a data set declares, or to
    the labels of the training file, sorted alphabetically or numerically. Multilabel: if the file has no column label,
    the names of the columns of the labels.
    """
    invalid_tags: Literal["error", "count"] = "error"
    """Tagging: tags that violate the file's scheme, such as I-PER after O, are an error (error), or are counted and
    interpreted like conlleval does (count)."""
    clitics: list[str] | None = None
    """Tagging: word endings such as 's and n't that are separate words in the texts of bert predict. Defaults to the
    ones that are separate words in the training data."""
    doc_stride: Positive = 128
    """SQuAD and texts with windows: tokens between the starts of two windows of a long text, at most a window's
    tokens."""
    max_query_length: Positive = 64
    """SQuAD: maximum length of a question in tokens; longer ones are truncated."""
    max_answer_length: Positive = 30
    """SQuAD: maximum length of an answer in tokens."""
    n_best_size: Positive = 20
    """SQuAD: maximum number of answers per question in nbest_predictions.json."""
    null_score_diff_threshold: Annotated[float, Range()] | None = None
    """SQuAD v2.0: a question has no answer if the null score exceeds the best answer's score by more than this. null:
    tuned for the best F1 on dev, and written to results.json."""
    misaligned_answers: Literal["skip", "error"] = "skip"
    """SQuAD: training questions with a wrong answer offset are skipped and counted (skip), or are an error, in dev as
    well (error)."""

    def check(self) -> None:
        """Raises UserError for values with which no features can be built."""
        check_fields("data.", self)
        if self.dir is None and self.train is None:
            raise UserError("data.dir is not set: name the folder of the task's train and dev files, --data.dir DIR")
        if not self.buckets:
            raise UserError("data.buckets is an empty list: list at least one length")
        if self.dev_fraction and self.dev is not None:
            raise UserError("data.dev and data.dev_fraction are both set: remove one of them")
        for name in ("column_names", "labels", "metrics"):
            values = getattr(self, name)
            if values is not None and not 0 < len(values) == len({value.strip() for value in values}):
                raise UserError(f"data.{name} is {values}: list each name once, or leave it out")
        if self.columns.text_a == self.columns.text_b:
            raise UserError(f"data.columns.text_a and text_b are both {self.columns.text_a!r}: name two columns")
        if self.score_range is not None and (len(self.score_range) != 2 or self.score_range[0] >= self.score_range[1]):
            raise UserError(f"data.score_range is {self.score_range}: list the minimum and the maximum score")


@dataclass(frozen=True)
class FinetuneConfig:
    """A fine-tuning run."""

    task: str = "sst2"
    """Task. GLUE: cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte, wnli. Questions: squad (v1.1), squad2 (v2.0). CoNLL
    columns: ner, conll2003, wnut17. SWAG's CSV or CommonsenseQA's JSONL: multiple_choice, swag, commonsenseqa. Sequence
    to sequence: translation, summarization, multi30k, aeslc. packages: the package that a docstring is from. Custom
    data: classification, multilabel, regression, tagging or span (docs/own_task.md), embedding (docs/embeddings.md) and
    reranker (docs/reranking.md)."""
    output_dir: str | None = None
    """Folder of the run, or its URL in a bucket (gs://, s3://). Defaults to runs/ and the name of the recipe. The same
    command resumes the run."""
    init: str | None = None
    """Run, Hugging Face folder, folder of google-research/bert or hub name to start from. none: train from random
    weights, as a control that shows the effect of pretraining."""
    architecture_from: str | None = None
    """Run or model whose sizes and vocabulary are used, without its weights; for init none."""
    seed: Seed = 0
    """Seed of the initial head, the order of the data and dropout."""
    num_seeds: Positive = 1
    """Number of runs with consecutive seeds from seed on, each in its own subfolder. results.json has their mean and
    standard deviation."""
    patience: Positive | None = None
    """Stop after this number of consecutive evaluations without a better main metric. null: train to the end."""
    classifier_dropout: Fraction | None = None
    """Dropout rate before the classifier. Defaults to hidden_dropout_prob. squad, squad2 and span have none."""
    language_model_weight: NonNegativeFloat = 0.0
    """Weight of the loss of the next tokens of each row, added to the loss of a task that classifies or scores texts;
    0.5 in GPT. For causal models (model.causal)."""
    head_init: Literal["source", "none"] = "source"
    """Initial weights of the head, with init. source: the source's head, if it is for the same kind of task; labels are
    matched by name, and new labels start from random weights. none: random weights.
    """
    classifier_pooling: Literal["init", "first", "mean"] = "init"
    """Input of the classifier of texts. first: the first token, through the pooler of init. mean: the mean of all
    tokens, through LayerNorm without parameters. init: mean for a custom task if init declares mean pooling, like most
    sentence-transformers folders, otherwise first, or the pooling of a fine-tuned init.
    """
    classifier_training: Literal["cross_entropy", "contrastive"] = "cross_entropy"
    """Training of a classifier of texts. cross_entropy: the encoder and the classifier together. contrastive: the
    encoder, so that texts with the same label have similar vectors; before each evaluation, the classifier is fitted to
    the training rows by logistic regression (as in SetFit; Tunstall et al. 2022). For few labels and mean pooling."""
    decoder_init: Literal["encoder", "none"] = "encoder"
    """Sequence to sequence with init: initial weights of the decoder. encoder: the source's encoder (BERT2BERT of Rothe
    et al. 2020). none: random weights (BERT2Rnd). Cross-attention starts from random weights."""
    num_init_layers: Positive | None = None
    """Number of encoder layers of init to start from, evenly spaced from the first to the last, as in DistilBERT. null:
    all."""
    num_frozen_layers: NonNegative | None = None
    """Number of lower encoder layers that are frozen, together with the embeddings; 0: the embeddings only. null: train
    all."""
    num_feature_layers: Positive | None = None
    """Train only the head, on the concatenated outputs of the last n layers (4 in the paper). null: train all."""
    loggers: list[LoggerName] | None = None
    """Loggers of metrics besides metrics.jsonl: tensorboard, wandb (Weights & Biases), mlflow, or several separated by
    commas; [] for none. Defaults to tensorboard if tensorboardX is installed."""
    profile: bool = False
    """Write a profile of a few early steps to profile/ in the run's folder, for TensorBoard and Perfetto."""
    data: TaskDataConfig = field(default_factory=TaskDataConfig)
    """the labelled data"""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    """the vocabulary, if init is none and architecture_from is not set"""
    target_tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    """sequence to sequence: the target's own vocabulary, if any of these is set"""
    model: ModelConfig = field(default_factory=ModelConfig)
    """the encoder, if init is none and architecture_from is not set"""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """the optimizer"""
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)
    """the task embedding"""
    reranker: RerankerConfig = field(default_factory=RerankerConfig)
    """the task reranker"""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """low-rank adapters (LoRA)"""
    distillation: TaskDistillationConfig = field(default_factory=TaskDistillationConfig)
    """a fine-tuned teacher"""
    training: TrainingConfig = field(default_factory=TrainingConfig)
    """the training loop"""
    decoding: Decoding = field(default_factory=Decoding)
    """sequence to sequence: how the final predictions are generated"""

    def check(self) -> None:
        """Raises UserError for the first invalid value or combination of values."""
        check_paths(self)
        check_fields("", self)
        parts = (self.model, self.tokenizer, self.data, self.embedding, self.reranker, self.optimizer, self.lora)
        for part in (*parts, self.distillation, self.training):
            part.check()
        self.training.check_warmup(self.optimizer)
        by_steps = "but fine-tuning ends after training.epochs or training.steps: remove it"
        check_unused("training.", self.training, by_steps, ["max_minutes"])
        check_unused("training.", self.training, "but the task sets the objective: remove it", ["objective"])
        if self.training.tokens_per_batch is not None and self.training.tokens_per_batch < self.data.max_length:
            fix = "raise the first or lower the second, so that a row fits"
            raise conflict(self, "training.tokens_per_batch", "data.max_length", fix)
        if self.data.long_texts in WINDOW_MODES:
            self._check_windows()
        if self.data.packing:
            self._check_packing()
        if self.classifier_pooling != "init" and self.init == "none":
            fix = "set model.pooler_type and model.pooler_input instead"
            raise conflict(self, "classifier_pooling", "init", fix)
        if self.classifier_pooling == "mean" and self.num_feature_layers is not None:
            fix = "remove one of the two, because it reads the first token"
            raise conflict(self, "classifier_pooling", "num_feature_layers", fix)
        if self.classifier_training == "contrastive":
            self._check_contrastive()
        self.training.check_attention(self.model.attention_probs_dropout_prob)
        if self.init is None:
            raise UserError(
                "init is not set: name the run to start from, --init runs/X, or --init none for random weights"
            )
        if self.architecture_from is not None and self.init != "none":
            raise conflict(self, "architecture_from", "init", "set init to none, or remove architecture_from")
        source = "architecture_from" if self.architecture_from is not None else None if self.init == "none" else "init"
        if source is not None:
            check_unused("tokenizer.", self.tokenizer, f"but the vocabulary comes with {source}: remove it")
        self._check_decoder()
        self._check_lora()
        self._check_distillation()
        self.training.check_mesh_batches(self.batches())
        if self.init == "none" and self.architecture_from is None:
            if self.model.halting:
                fix = "but fine-tuning does not add this cost of a layer to its loss: set it to 0"
                raise UserError(f"model.halting is {self.model.halting:g}, {fix}")
            self.check_model()
        if self.seed + self.num_seeds > 2**32:
            raise UserError(f"seed + num_seeds is {self.seed + self.num_seeds}: it must be at most 2**32")
        for key, unset in (("num_frozen_layers", None), ("language_model_weight", 0)):
            if self.num_feature_layers is not None and getattr(self, key) != unset:
                fix = "remove one of the two, since num_feature_layers freezes the whole encoder"
                raise conflict(self, key, "num_feature_layers", fix)

    def batches(self) -> list[tuple[str, int, int]]:
        """Returns (key, rows, micro-batches) of the batches with a fixed number of rows."""
        training = self.training
        evaluation = ("training.eval_batch_size", training.rows_per_evaluation, 1)
        if training.tokens_per_batch is not None:
            return [evaluation]
        return [("training.batch_size", training.batch_size, training.gradient_accumulation_steps), evaluation]

    @property
    def has_target_tokenizer(self) -> bool:
        """Whether the target of a sequence-to-sequence model has its own vocabulary."""
        return not self.target_tokenizer.is_unset

    def _check_decoder(self) -> None:
        """Raises UserError for invalid settings of a decoder, its vocabulary or its output."""
        self.target_tokenizer.check("target_tokenizer")
        self.decoding.check("decoding.")
        if self.decoding.num_samples > 1:
            one = "but predictions have one target per row: remove it, and pass num_samples to generate"
            raise UserError(f"decoding.num_samples is {self.decoding.num_samples}, {one}")
        if self.decoding.stop:
            whole = "but whole targets are compared: remove it, and pass stop to generate"
            raise UserError(f"decoding.stop is {self.decoding.stop}, {whole}")
        if self.has_target_tokenizer and self.model.share_decoder != "none":
            raise UserError(
                f"target_tokenizer is set, but model.share_decoder is {self.model.share_decoder}, with one vocabulary "
                "for both sides: remove one of the two"
            )
        if self.has_target_tokenizer and self.model.copy_attention:
            fix = "remove one of the two, since only tokens of the same vocabulary are copied"
            raise UserError(f"target_tokenizer is set, but model.copy_attention is true: {fix}")
        if self.has_target_tokenizer and self.init != "none" and self.decoder_init == "encoder":
            fix = "set decoder_init to none, or remove target_tokenizer"
            raise UserError(f"target_tokenizer is set, but decoder_init is encoder, with the vocabulary of init: {fix}")
        if (self.data.source is None) != (self.data.target is None):
            fix = "set both to the suffixes of parallel files, such as de and en, or none to read columns"
            raise conflict(self, "data.source", "data.target", fix)

    def _check_lora(self) -> None:
        """Raises UserError for adapters of weights that are random or frozen in another way."""
        if self.lora.rank is None:
            return
        for key in ("init", "decoder_init"):
            if getattr(self, key) == "none":
                fix = f"adapters need pretrained weights: set {key}, or remove lora.rank"
                raise conflict(self, "lora.rank", key, fix)
        for key in ("num_frozen_layers", "num_feature_layers"):
            if getattr(self, key) is not None:
                fix = "remove one of the two, since lora.rank freezes the whole encoder"
                raise conflict(self, "lora.rank", key, fix)

    def _check_contrastive(self) -> None:
        """Raises UserError for settings that the contrastive loss, or a fitted classifier, does not support."""
        fixes = {
            "num_feature_layers": "remove it, because only the encoder is trained by gradients",
            "language_model_weight": "remove it",
            "training.tokens_per_batch": "set training.batch_size instead, because the rows of a batch are compared",
            "training.average_checkpoints": "remove it, because each evaluation has its own classifier",
        }
        for key, fix in fixes.items():
            section = self.training if key.startswith("training.") else self
            name = key.removeprefix("training.")
            if getattr(section, name) != getattr(type(section), name):
                raise conflict(self, "classifier_training", key, fix)

    def _check_distillation(self) -> None:
        """Raises UserError for unlabelled texts without a teacher, and for settings that a teacher does not support."""
        if self.num_init_layers is not None and self.init == "none":
            raise conflict(self, "num_init_layers", "init", "set model.num_hidden_layers instead")
        if self.distillation.teacher is None and self.data.unlabelled is not None:
            fix = "set the teacher that labels the texts, or remove data.unlabelled"
            raise conflict(self, "data.unlabelled", "distillation.teacher", fix)
        for key in ("language_model_weight", "classifier_training"):
            if self.distillation.teacher is not None and getattr(self, key) != getattr(type(self), key):
                raise conflict(self, "distillation.teacher", key, "remove one of the two")

    def _check_windows(self) -> None:
        """Raises UserError for settings that need one row per text."""
        if self.training.tokens_per_batch is not None:
            fix = "set training.batch_size instead, because texts have different numbers of windows"
            raise conflict(self, "training.tokens_per_batch", "data.long_texts", fix)
        if self.language_model_weight:
            raise conflict(self, "language_model_weight", "data.long_texts", "set data.long_texts to cut or head_tail")

    def _check_packing(self) -> None:
        """Raises UserError for batches whose texts cannot share rows."""
        if self.training.tokens_per_batch is not None:
            fix = "set training.batch_size instead, because packed rows have no padding to limit"
            raise conflict(self, "data.packing", "training.tokens_per_batch", fix)
        if self.data.long_texts in WINDOW_MODES:
            raise conflict(self, "data.packing", "data.long_texts", "set data.long_texts to cut or head_tail")

    def check_model(self) -> None:
        """Raises UserError if the model, whose sizes are known now, does not fit the other settings."""
        self.model.check()  # the sizes of init and the keys of the decoder
        if self.data.packing and self.model.global_attention_sep_id is not None:
            fix = "remove data.packing, because global tokens attend to a whole row"
            raise conflict(self, "data.packing", "model.global_attention_sep_id", fix)
        if self.data.packing and (self.embedding.is_lexical or self.embedding.has_token_vectors):
            fix = "remove data.packing, which supports one vector per text, pooled from hidden states"
            raise conflict(self, "data.packing", "embedding.pooling", fix)
        if self.language_model_weight and not self.model.causal:
            fix = "remove it, or set init to a causal model"
            raise conflict(self, "language_model_weight", "model.causal", fix)
        if self.classifier_pooling == "mean" and self.model.causal:
            raise conflict(self, "classifier_pooling", "model.causal", "remove it, since the last token is read")
        if self.classifier_training == "contrastive" and self.model.pooler_type != "norm":
            raise UserError(
                "classifier_training is contrastive, but the classifier does not read the mean of the tokens: set init "
                "to a sentence encoder with mean pooling, or classifier_pooling to mean"
            )
        self.training.check_kernel(self.model)
        self.training.check_mesh_sizes(self.model)
        if self.data.max_length > self.model.max_position_embeddings:
            fix = f"set data.max_length to at most {self.model.max_position_embeddings}"
            raise conflict(self, "data.max_length", "model.max_position_embeddings", fix)
        self.model.check_length("data.max_length", self.data.max_length)
        self.model.check_depths(self.optimizer.layerwise_lr_decay, self.num_frozen_layers or 0)
        self.embedding.check_width(self.model.hidden_size)
        if (self.lora.rank or 0) > self.model.hidden_size:
            raise conflict(self, "lora.rank", "model.hidden_size", "use a smaller rank")
        for key in ("num_frozen_layers", "num_feature_layers"):
            if (getattr(self, key) or 0) > self.model.num_hidden_layers:
                raise conflict(self, key, "model.num_hidden_layers", "use at most as many layers")
