"""What a run is made of: frozen dataclasses, their checks, and where recipes lie. Imports no JAX.

Field names follow Google's ``bert_config.json`` where it has one. The text under each field is its ``--help``.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bert.phases import PhaseConfig, check_phases
from bert.values import Count, UserError

STANDARD_LIBRARY = "stdlib:"
"""Value of ``data.train`` for the embedded corpus: the docstrings of the running Python's standard library."""

HUB = "hub:"
"""Start of a ``data.train`` that names a data set on the Hugging Face hub: hub:ORG/NAME[:CONFIG][:SPLIT]."""

OBJECTIVES = ("nsp", "sop", "full_sentences", "doc_sentences")

REMAT = ("none", "dots", "full")

ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu", "tanh")


@dataclass(frozen=True)
class ModelConfig:
    """The encoder."""

    vocab_size: int | None = None
    """Rows V of the word embedding; null takes the size of the vocabulary."""
    hidden_size: int = 128
    """Width D of the hidden states."""
    num_hidden_layers: int = 2
    """Number of encoder layers."""
    num_attention_heads: int = 2
    """Attention heads N a layer; must divide hidden_size."""
    intermediate_size: int = 512
    """Width F of the feed-forward layer; 4 x hidden_size in the paper."""
    hidden_act: str = "gelu"
    """Activation: gelu (the erf form), gelu_tanh (as Google's code computes it), relu, silu, tanh."""
    hidden_dropout_prob: float = 0.1
    """Dropout after embeddings, attention output and feed-forward output."""
    attention_probs_dropout_prob: float = 0.1
    """Dropout on the attention weights."""
    max_position_embeddings: int = 512
    """Rows of the position table, less position_offset: the longest sequence the model can read."""
    position_offset: int = 0
    """Row of the position table that the first token takes: 0 in BERT, one after the padding id in RoBERTa."""
    type_vocab_size: int = 2
    """Number of segments."""
    initializer_range: float = 0.02
    """Standard deviation of the truncated-normal initialisation."""
    position_init: str = "normal"
    """How the learned position table starts: as random numbers (normal), or as sinusoids of the same deviation."""
    layer_norm_eps: float = 1e-12
    """Epsilon of LayerNorm."""
    tie_word_embeddings: bool = True
    """The MLM head decodes with the word embeddings, as published; false gives it a matrix of its own."""
    embedding_size: int | None = None
    """Width E of the embeddings and of the MLM head's decoder, with a projection to hidden_size (ALBERT); null makes
    it hidden_size, without one."""
    position_embedding: str = "learned"
    """Positions by a learned table (learned), or by fixed sinusoids that are no parameters (sinusoidal)."""
    pre_layer_norm: bool = False
    """LayerNorm before attention and feed-forward, and one after the last layer; false has it after each (the paper's),
    which needs a longer warm-up."""

    @property
    def embedding_width(self) -> int:
        """E, as a number."""
        return self.embedding_size or self.hidden_size

    def check(self) -> None:
        """Raises UserError where the sizes cannot be built."""
        for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
                     "max_position_embeddings", "type_vocab_size"):  # fmt: skip
            _at_least(f"model.{name}", getattr(self, name), 1)
        _at_least("model.position_offset", self.position_offset, 0)
        if self.hidden_size % self.num_attention_heads:
            raise UserError(
                f"model.hidden_size ({self.hidden_size}) is not divisible by model.num_attention_heads "
                f"({self.num_attention_heads}): change one of them"
            )
        if self.hidden_act not in ACTIVATIONS:
            raise UserError(f"model.hidden_act is {self.hidden_act!r}: choose one of {', '.join(ACTIVATIONS)}")
        if self.position_init not in ("normal", "sinusoidal"):
            raise UserError(f"model.position_init is {self.position_init!r}: choose normal or sinusoidal")
        if self.position_embedding not in ("learned", "sinusoidal"):
            raise UserError(f"model.position_embedding is {self.position_embedding!r}: choose learned or sinusoidal")
        if self.embedding_size is not None:
            _at_least("model.embedding_size", self.embedding_size, 1)
        _fraction("model.hidden_dropout_prob", self.hidden_dropout_prob)
        _fraction("model.attention_probs_dropout_prob", self.attention_probs_dropout_prob)


@dataclass(frozen=True)
class TokenizerConfig:
    """The WordPiece vocabulary."""

    path: str | None = None
    """vocab.txt, tokenizer.json, or a folder that holds one (a run, say); null trains one on the corpus. With init, the
    source's vocabulary extended by new words, whose rows start as the mean of their old pieces; null takes it as it
    is."""
    vocab_size: int = 30522
    """Number of pieces to train, special ones included; the result is smaller where the corpus has fewer."""
    lowercase: bool = True
    """Lower-case all text."""
    strip_accents: bool | None = None
    """Remove accents; null does so exactly when lower-casing, as BERT's own vocabularies do."""
    min_frequency: int = 2
    """Rarest pair of pieces that is still merged, and rarest character that is kept, when a vocabulary is trained."""
    unused: int = 0
    """Slots [unused0], [unused1], ... of a trained vocabulary, for words that are added later without new weights."""
    alphabet: int | None = None
    """Most characters that a trained vocabulary knows, the commonest; null takes what fits a quarter of it."""

    def check(self) -> None:
        """Raises UserError for a vocabulary that cannot be trained."""
        if not 32 <= self.vocab_size < 2**24:
            raise UserError(f"tokenizer.vocab_size is {self.vocab_size}: it must be at least 32 and below 2**24")
        _at_least("tokenizer.min_frequency", self.min_frequency, 1)
        _at_least("tokenizer.unused", self.unused, 0)
        if self.unused > self.vocab_size - 32:
            raise UserError(
                f"tokenizer.unused is {self.unused}: tokenizer.vocab_size ({self.vocab_size}) leaves no room for pieces"
            )
        if self.alphabet is not None:
            _at_least("tokenizer.alphabet", self.alphabet, 1)


@dataclass(frozen=True)
class DataConfig:
    """The corpus, and the examples made of it."""

    train: list[str] | str | None = None
    """Corpus: files, globs or folders of .txt (an empty line ends a document), of .jsonl with a "text" field, either
    also as .gz, .bz2, .xz or .zst, of .parquet with a "text" column; folders that datasets saved;
    hub:ORG/NAME[:CONFIG][:SPLIT]; "stdlib:" is the prose of Python's own standard library."""
    weights: list[float] | None = None
    """Share of the training text for each entry of data.train: those that have less are repeated; null takes each
    document once."""
    eval: list[str] | str | None = None
    """Held-out corpus in the same forms; null holds out a share of data.train instead."""
    held_out: float = 0.05
    """Share of the documents of data.train that is held out when data.eval is null."""
    one_sentence_per_line: bool = False
    """The corpus already has one sentence a line: do not look for sentence boundaries."""
    language: list[str] | str = "en"
    """Language code by which sentence boundaries are found; several: one for each entry of data.train."""
    objective: str = "nsp"
    """What is learned beside masked words: nsp (does B follow A, or is it from another document), sop (are two
    consecutive segments swapped, as in ALBERT), or nothing, with rows full of whole sentences as in RoBERTa: across
    documents (full_sentences) or within one (doc_sentences)."""
    sequence_length: int = 128
    """Tokens T a row, special ones included."""
    max_predictions_per_sequence: int = 20
    """Most predictions P a row; in packed rows, an example."""
    masked_lm_prob: float = 0.15
    """Share of a row's tokens that are predicted."""
    whole_word_masking: bool = False
    """Mask whole words or none of their pieces; each piece is still replaced as 80/10/10 has it."""
    frozen_masks: bool = False
    """Mask a row in the same way at every visit, not afresh; with duplicates each copy has masks of its own."""
    duplicates: int = 1
    """Times the training text is made into examples, each time with other pairs (Google's dupe_factor)."""
    short_seq_prob: float = 0.1
    """Share of pairs with a random shorter target length, so that short inputs are learned too; full rows have none."""
    packing: bool = False
    """Put several short examples into one training row (histogram packing): each sees itself alone, begins at position
    0, and has its own [CLS], label and masks. Held-out rows stay one example each, so that runs compare."""
    max_examples_per_row: int = 8
    """Most examples K of a packed row; more of them where examples are shorter than an eighth of sequence_length."""
    seed: int = 12345
    """Seed of the document order, the held-out share and the sentence pairs; the examples are cached by it."""
    num_workers: int | None = None
    """Processes that build the examples; null takes one a core. The result does not depend on it."""
    cache_dir: str | None = None
    """Folder for built examples; null takes bert-jax/examples in the user's cache folder."""

    def check(self) -> None:
        """Raises UserError for values no example can be built with."""
        if self.train is None:
            raise UserError(
                "data.train is not set: name a corpus, for example --data.train 'corpus/*.txt' "
                '(or "stdlib:" for the embedded one)'
            )
        self._check_entries()
        if self.objective not in OBJECTIVES:
            raise UserError(f"data.objective is {self.objective!r}: choose one of {', '.join(OBJECTIVES)}")
        _at_least("data.sequence_length", self.sequence_length, 8)
        _at_least("data.max_predictions_per_sequence", self.max_predictions_per_sequence, 1)
        _at_least("data.duplicates", self.duplicates, 1)
        _at_least("data.max_examples_per_row", self.max_examples_per_row, 2)
        if self.packing and self.objective == "full_sentences":
            raise UserError(
                "data.packing is true, and the rows of data.objective full_sentences are full already: leave packing "
                "out, or choose nsp, sop or doc_sentences"
            )
        _fraction("data.masked_lm_prob", self.masked_lm_prob)
        _fraction("data.short_seq_prob", self.short_seq_prob)
        _fraction("data.held_out", self.held_out)
        if self.held_out == 0 and self.eval is None:
            raise UserError("data.held_out is 0 and data.eval is not set: name a held-out corpus or hold out a share")
        _seed("data.seed", self.seed)
        if self.num_workers is not None:
            _at_least("data.num_workers", self.num_workers, 1)

    def _check_entries(self) -> None:
        """What is given for each entry of data.train must be as many."""
        sources = [("data.train", self.train)]
        if isinstance(self.language, list) and self.eval is not None:
            sources.append(("data.eval", self.eval))
        for name, values in (("data.weights", self.weights), ("data.language", self.language)):
            for key, source in sources if name == "data.language" else sources[:1]:
                entries = len(source) if isinstance(source, list) else 1
                if isinstance(values, list) and len(values) != entries:
                    raise UserError(
                        f"{name} has {len(values)} values and {key} {entries}: give one for each (quote globs, so that "
                        "the shell does not make many of one)"
                    )
        if self.weights is not None and not all(0 < weight < float("inf") for weight in self.weights):
            raise UserError(f"data.weights is {self.weights}: every weight must be above 0")


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and its learning rate over time."""

    name: str = "adamw"
    """adamw (BERT's) or lamb (for batches of thousands)."""
    learning_rate: float = 1e-4
    """Peak learning rate."""
    warmup_steps: Count | None = None
    """Steps of linear warm-up; null takes warmup_ratio of all steps."""
    warmup_ratio: float = 0.1
    """Share of the steps that warm up, where warmup_steps is null."""
    weight_decay: float = 0.01
    """Decoupled weight decay; not applied to biases and LayerNorm."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.999
    """Decay of the second moment."""
    epsilon: float = 1e-6
    """Added to the root of the second moment."""
    bias_correction: bool = False
    """Correct the moments' bias towards zero; Google's BERT does not."""
    max_grad_norm: float = 1.0
    """Clip the gradient to this global norm; 0 turns clipping off."""
    layer_decay: float = 1.0
    """Factor of the learning rate from each encoder layer to the one below; 1 gives all layers the same rate."""

    def check(self) -> None:
        """Raises UserError for values that cannot train."""
        if self.name not in ("adamw", "lamb"):
            raise UserError(f"optimizer.name is {self.name!r}: choose adamw or lamb")
        if not self.learning_rate > 0:
            raise UserError(f"optimizer.learning_rate is {self.learning_rate}: it must be above 0")
        _fraction("optimizer.warmup_ratio", self.warmup_ratio)
        if self.warmup_steps is not None:
            _at_least("optimizer.warmup_steps", self.warmup_steps, 0)
        for name in ("weight_decay", "max_grad_norm", "epsilon"):
            _at_least(f"optimizer.{name}", getattr(self, name), 0)
        if not 0 < self.layer_decay <= 1:
            raise UserError(f"optimizer.layer_decay is {self.layer_decay}: it must be above 0 and at most 1")
        _fraction("optimizer.beta1", self.beta1)
        _fraction("optimizer.beta2", self.beta2)


@dataclass(frozen=True)
class TrainingConfig:
    """How long, how much at a time, and how often to look."""

    steps: Count | None = None
    """Optimizer steps; null takes training.epochs."""
    epochs: float | None = None
    """Passes over the training rows, where training.steps is null."""
    batch_size: int = 32
    """Rows B of one optimizer step, over all devices."""
    eval_batch_size: int | None = None
    """Rows of one evaluation batch, over all devices; null takes batch_size."""
    gradient_accumulation_steps: int = 1
    """Split each batch into this many micro-batches, one after the other, to save memory."""
    dtype: str = "float32"
    """Computation in float32 or bfloat16; parameters stay float32."""
    dropout_rng: str = "hash"
    """Dropout bits from a counter hash (fast) or from JAX's threefry (the reference)."""
    mesh: str | None = None
    """Devices as DATAxFSDPxTENSOR, 2x4x1 say: rows over the first two axes, parameters and optimizer state over the
    second, heads and feed-forward over the third; null keeps a copy of the model on every device (pmap)."""
    remat: str = "none"
    """What the backward pass computes anew instead of storing: none; all but the results of linear layers (dots); each
    layer from its input (full)."""
    scan_layers: bool = False
    """Compile one layer and loop over it: quick to compile, with a stacked copy of the layers' weights in memory."""
    log_every: Count = Count(100)
    """Steps between two lines of training metrics."""
    eval_every: Count | None = None
    """Steps between two evaluations; null: at every epoch in fine-tuning, at every checkpoint in pretraining."""
    checkpoint_every: Count = Count(1000)
    """Steps between two checkpoints."""
    keep_checkpoints: int = 3
    """Checkpoints kept, the newest ones."""
    max_skipped_steps: int = 10
    """Stop after so many steps in a row whose loss, gradient or update was NaN or infinite; fewer are skipped, and
    their batches written to nonfinite/ in the run's folder."""

    def check(self) -> None:
        """Raises UserError for values that contradict each other."""
        if (self.steps is None) == (self.epochs is None):
            state = "neither is set" if self.steps is None else "both are set"
            raise UserError(f"training.steps and training.epochs: {state}, set exactly one of them")
        if self.steps is not None:
            _at_least("training.steps", self.steps, 1)
        if self.epochs is not None and not self.epochs > 0:
            raise UserError(f"training.epochs is {self.epochs}: it must be above 0")
        for name in (
            "batch_size",
            "gradient_accumulation_steps",
            "log_every",
            "checkpoint_every",
            "keep_checkpoints",
            "max_skipped_steps",
        ):
            _at_least(f"training.{name}", getattr(self, name), 1)
        for name in ("eval_every", "eval_batch_size"):
            if getattr(self, name) is not None:
                _at_least(f"training.{name}", getattr(self, name), 1)
        if self.batch_size % self.gradient_accumulation_steps:
            raise UserError(
                f"training.batch_size ({self.batch_size}) is not divisible by "
                f"training.gradient_accumulation_steps ({self.gradient_accumulation_steps}): change one of them"
            )
        if self.dtype not in ("float32", "bfloat16"):
            raise UserError(f"training.dtype is {self.dtype!r}: choose float32 or bfloat16")
        if self.dropout_rng not in ("hash", "threefry"):
            raise UserError(f"training.dropout_rng is {self.dropout_rng!r}: choose hash or threefry")
        if self.mesh is not None and self.mesh_shape is None:
            raise UserError(
                f"training.mesh is {self.mesh!r}: write the devices along data, fsdp and tensor with an x between, "
                "such as 2x4x1"
            )
        if self.remat not in REMAT:
            raise UserError(f"training.remat is {self.remat!r}: choose one of {', '.join(REMAT)}")

    @property
    def mesh_shape(self) -> tuple[int, int, int] | None:
        """``mesh`` as numbers; None where it is null, or no three numbers."""
        match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", self.mesh or "")
        return match and tuple(map(int, match.groups()))


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
        for part in (self.model, self.tokenizer, self.data, self.optimizer, self.training):
            part.check()
        _seed("seed", self.seed)
        if self.output_bias not in ("frequencies", "zeros"):
            raise UserError(f"output_bias is {self.output_bias!r}: choose frequencies or zeros")
        if self.data.sequence_length > self.model.max_position_embeddings:
            raise UserError(
                f"data.sequence_length ({self.data.sequence_length}) is over model.max_position_embeddings "
                f"({self.model.max_position_embeddings}): shorten the one or enlarge the other"
            )
        if self.data.max_predictions_per_sequence >= self.data.sequence_length:
            raise UserError(
                f"data.max_predictions_per_sequence ({self.data.max_predictions_per_sequence}) is not below "
                f"data.sequence_length ({self.data.sequence_length})"
            )
        if self.phases is not None:
            check_phases(self)


@dataclass(frozen=True)
class ColumnsConfig:
    """Names of the columns, or of the fields in JSONL, of a task of one's own."""

    text_a: str = "text"
    """The text; of a pair the first one."""
    text_b: str | None = None
    """The second text of a pair; null for single texts."""
    label: str = "label"
    """The label, or the score; a test file may do without."""
    id: str | None = None
    """What predictions are numbered by, each once; null counts the rows from 0."""
    words: str | None = None
    """Tagging: in JSONL the list of a sentence's words, null takes words; in CoNLL columns that data.header names, the
    one with the word, null takes the first."""
    tags: str | None = None
    """Tagging: the list of its tags, null takes tags; or the column with the tag, null takes the last."""
    question: str = "question"
    """Spans: the question."""
    context: str = "context"
    """Spans: the text that has the answer."""
    answer: str = "answer"
    """Spans: the answer's text, or a list of right ones; empty where the context has none."""
    answer_start: str | None = "answer_start"
    """Spans: the answer's first character in the context, from 0; null takes the first place that has its text."""


@dataclass(frozen=True)
class TaskDataConfig:
    """The labelled data of a task."""

    dir: str | None = None
    """Folder with the task's original files (train.tsv, dev.tsv, test.tsv; for SQuAD its JSON, and so on), or that
    datasets saved with all splits; hub:nyu-mll/glue and its like, hub:ORG/NAME[:CONFIG]."""
    train: str | None = None
    """For a task of one's own, as all keys from here to columns: training file in data.dir (or with a path), .tsv, .csv
    or .jsonl, also as .gz, .bz2, .xz, .zst; of a data set the split; null takes train with any of these ends."""
    dev: str | None = None
    """Its file to choose checkpoints by; null takes dev with any end, of a data set the split validation."""
    test: str | None = None
    """Its file to predict, and to score where it has labels; null takes test with any end where there is one."""
    header: list[str] | None = None
    """Names of the columns of TSV and CSV files whose first line does not tell them."""
    metrics: list[str] | None = None
    """Scores, the first one chooses the best checkpoint; classification: accuracy, f1 (of the second of two labels),
    macro_f1, matthews; regression: pearson, spearman; null takes accuracy, or pearson and spearman."""
    score_range: list[float] | None = None
    """Least and greatest score of a regression: others are refused in files, and predictions are cut to them."""
    columns: ColumnsConfig = field(default_factory=ColumnsConfig)
    """the columns of a task of one's own"""
    max_length: int = 128
    """Longest row in tokens, special ones included. Longer inputs are cut, the longer text first; those of SQuAD and
    of tagging are read through several rows."""
    buckets: list[int] = field(default_factory=lambda: [8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512])
    """Lengths that batches are padded to: each costs one compilation and saves padding."""
    max_train_rows: int | None = None
    """Use only the first rows of the training file."""
    labels: list[str] | None = None
    """Labels in the order of their numbers, for tasks that have none of their own; null takes the training file's, in
    the order of the alphabet or of numbers."""
    broken_tags: str = "error"
    """Tagging: tags that the file's scheme does not allow there, such as I-PER after O, are an error, or counted
    (count) and read as conlleval reads them."""
    doc_stride: int = 128
    """SQuAD: tokens between the starts of two windows over a long context."""
    max_query_length: int = 64
    """SQuAD: longest question in tokens; longer ones are cut."""
    max_answer_length: int = 30
    """SQuAD: longest answer in tokens."""
    n_best: int = 20
    """SQuAD: most answers listed for each question in nbest_predictions.json."""
    null_threshold: float | None = None
    """SQuAD v2.0: no answer is given where its score is better than the best answer's by more than this; null takes
    what gives the best F1 on dev."""
    misplaced_answers: str = "skip"
    """SQuAD: training questions whose answers do not stand where the file says are skipped and counted (skip), or an
    error (error), in dev too."""

    def check(self) -> None:
        """Raises UserError for values no feature can be built with."""
        if self.dir is None and self.train is None:
            raise UserError("data.dir is not set: name the folder of the task's train and dev files, --data.dir DIR")
        _at_least("data.max_length", self.max_length, 8)
        if not self.buckets or min(self.buckets) < 1:
            raise UserError(f"data.buckets is {self.buckets}: list at least one length above 0")
        if self.max_train_rows is not None:
            _at_least("data.max_train_rows", self.max_train_rows, 1)
        for name in ("doc_stride", "max_query_length", "max_answer_length", "n_best"):
            _at_least(f"data.{name}", getattr(self, name), 1)
        if self.null_threshold is not None and self.null_threshold != self.null_threshold:
            raise UserError("data.null_threshold is nan: leave it out or give a number")
        for name, values in (("broken_tags", ("error", "count")), ("misplaced_answers", ("skip", "error"))):
            if getattr(self, name) not in values:
                raise UserError(f"data.{name} is {getattr(self, name)!r}: choose {' or '.join(values)}")
        for name in ("header", "labels", "metrics"):
            values = getattr(self, name)
            if values is not None and not 0 < len(values) == len(set(values)):
                raise UserError(f"data.{name} is {values}: list each name once, or leave it out")
        if self.score_range is not None and not (
            len(self.score_range) == 2 and self.score_range[0] < self.score_range[1]
        ):
            raise UserError(f"data.score_range is {self.score_range}: give the least and the greatest score")


@dataclass(frozen=True)
class FinetuneConfig:
    """A fine-tuning run."""

    task: str = "sst2"
    """The task: cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte or wnli of GLUE; squad (v1.1) or squad2 (v2.0); ner for
    CoNLL columns, conll2003 and wnut17 among them; multiple_choice for SWAG's CSV or CommonsenseQA's JSONL, swag and
    commonsenseqa among them; of one's own classification, regression, tagging or span (docs/own_task.md)."""
    output_dir: str | None = None
    """Folder of the run; null takes runs/ and the name of the recipe. Run again, it resumes."""
    init: str | None = None
    """Run, Hugging Face folder or hub name to start from; "none" trains from random weights, the control that shows
    what pretraining gave."""
    like: str | None = None
    """With init none: the run or model whose sizes and vocabulary to take, without its weights."""
    seed: int = 0
    """Seed of the head's initialisation, order of data and dropout."""
    seeds: int = 1
    """Runs of this many seeds, the first one seed, each in a sub-folder; results.json tells mean and deviation."""
    patience: int | None = None
    """Stop after so many evaluations in a row without a better main metric; null trains to the end."""
    classifier_dropout: float | None = None
    """Dropout before the classifier; null takes hidden_dropout_prob."""
    frozen_layers: int | None = None
    """Lower encoder layers that stay as they are, and with them the embeddings (0: these alone); null trains all."""
    feature_layers: int | None = None
    """Train the head alone, on the outputs of so many last layers side by side (4 in the paper); null trains all."""
    data: TaskDataConfig = field(default_factory=TaskDataConfig)
    """the labelled data"""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    """the vocabulary, where init is none and like is not set"""
    model: ModelConfig = field(default_factory=ModelConfig)
    """the encoder, where init is none and like is not set"""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """the optimizer"""
    training: TrainingConfig = field(default_factory=TrainingConfig)
    """the training loop"""

    def check(self) -> None:
        """Raises UserError at the first value, or pair of values, that cannot work."""
        for part in (self.model, self.tokenizer, self.data, self.optimizer, self.training):
            part.check()
        _seed("seed", self.seed)
        if self.init is None:
            raise UserError(
                "init is not set: name the run to start from, --init runs/X, or --init none for random weights"
            )
        if self.like is not None and self.init != "none":
            raise UserError("like is set, but init is not none: like only says what random weights look like")
        if self.classifier_dropout is not None:
            _fraction("classifier_dropout", self.classifier_dropout)
        _at_least("seeds", self.seeds, 1)
        _seed("seed + seeds - 1", self.seed + self.seeds - 1)
        for name, least in (("patience", 1), ("frozen_layers", 0), ("feature_layers", 1)):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), least)
        if self.frozen_layers is not None and self.feature_layers is not None:
            raise UserError("frozen_layers and feature_layers are both set: feature_layers freezes the whole encoder")

    def check_layers(self) -> None:
        """Raises UserError where the model, once its sizes are known, has too few layers for what is asked."""
        for name in ("frozen_layers", "feature_layers"):
            if (getattr(self, name) or 0) > self.model.num_hidden_layers:
                raise UserError(
                    f"{name} is {getattr(self, name)}, but the model has {self.model.num_hidden_layers} layers: "
                    "take no more than these"
                )


def _seed(name: str, value: int) -> None:
    if not 0 <= value < 2**32:
        raise UserError(f"{name} is {value}: it must be at least 0 and below 2**32")


def to_dict(config: Any) -> dict[str, Any]:
    """A configuration as nested plain values, ready for YAML or JSON."""
    plain = {}
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if dataclasses.is_dataclass(value):
            value = to_dict(value)
        elif isinstance(value, list):
            value = [to_dict(one) if dataclasses.is_dataclass(one) else one for one in value]
        plain[item.name] = int(value) if isinstance(value, Count) else value
    return plain


def recipe_names() -> list[str]:
    """Names that ``--config`` takes without a path."""
    return sorted(path.stem for path in recipe_folder().glob("*.yaml"))


def recipe_folder() -> Path:
    """configs/ of the clone, or its copy inside the installed package."""
    inside = Path(__file__).parent / "configs"
    return inside if inside.is_dir() else Path(__file__).parent.parent / "configs"


def _at_least(name: str, value: float, least: float) -> None:
    if not value >= least:  # so that NaN fails too
        raise UserError(f"{name} is {value}: it must be at least {least}")


def _fraction(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise UserError(f"{name} is {value}: it must be at least 0 and below 1")
