"""Configuration of the pretraining corpus and its examples."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Annotated, Literal, get_args

from bert.config.validation import (
    Fraction,
    InnerFraction,
    Positive,
    PositiveFloat,
    Range,
    Seed,
    Share,
    check_fields,
    check_unused,
    conflict,
)
from bert.errors import UserError

DOCSTRINGS_PREFIX = "docstrings:"
"""Prefix of ``data.train`` for the embedded corpus, docstrings of installed packages: docstrings:[PACKAGE,...][:SPLIT].
"""

HUB_PREFIX = "hub:"
"""Prefix of ``data.train`` for a data set on the Hugging Face hub: hub:ORG/NAME[:CONFIG][:SPLIT]."""

LANGUAGE = re.compile("[a-z]{2,3}(-[a-z]+)*")
"""Language codes such as de or pt-br. Unknown languages use the English sentence rules."""

InputFormatName = Literal["nsp", "sop", "full_sentences", "doc_sentences", "blocks"]
INPUT_FORMATS: tuple[str, ...] = get_args(InputFormatName)

PAIR_FORMATS = ("nsp", "sop")
"""Input formats whose rows are pairs of segments with a label."""

STREAM_KEYS = ("stream_readers", "shuffle_buffer")
"""Keys for streams only."""

HELD_OUT_KEYS = (
    *("verbatim", "document_per_line", "text_field", "one_sentence_per_line", "language"),
    *("input_format", "masked_lm_prob", "mask_share", "random_share", "whole_word_masking", "short_seq_prob"),
)
"""Keys of the section ``data`` that determine the predicted tokens of held-out text, except the lengths of its rows."""

UNUSED_BY_STREAMS = ("near_duplicates", "static_masking", "dupe_factor")
"""Keys that need the whole corpus, to compare its documents or to count its rows."""

FilterName = Literal["language", "c4", "gopher", "fineweb", "exact_duplicates"]

FILTER_KEYS = ("filters", "decontaminate", "near_duplicates")
"""Keys of the documents that are left out."""

WITHOUT_SPACES = ("zh", "ja", "th", "lo", "km", "my", "bo", "yue", "wuu")
"""Languages without spaces between words, to which rules on words do not apply."""

UNUSED_BY_BLOCKS = ("one_sentence_per_line", "language")
"""Keys of sentence boundaries, which blocks ignore."""

REPLACEMENTS = {"mlm": (0.8, 0.1), "rtd": (0.85, 0.0)}
"""Default shares of the predicted tokens that become [MASK] and a random token, by objective (Devlin et al. 2018,
section 3.1; google-research/electra pretrain/pretrain_helpers.py, mask)."""

REPLACEMENT_KEYS = ("mask_share", "random_share")
"""Keys of these shares."""

UNUSED_BY_CLM = (
    "max_predictions_per_sequence",
    "masked_lm_prob",
    *REPLACEMENT_KEYS,
    "whole_word_masking",
    "static_masking",
    "dupe_factor",
)
"""Keys of masks, which causal language modelling does not have."""


@dataclass(frozen=True)
class DataConfig:
    """The pretraining corpus and its examples."""

    train: list[str] | str = field(default_factory=list)
    """Corpus: files, globs, folders or URLs. Formats: .txt (an empty line ends a document) and .jsonl with a "text"
    field, both also as .gz, .bz2, .xz or .zst; .parquet with a "text" column (see text_field); folders saved by
    datasets. hub:ORG/NAME[:CONFIG][:SPLIT] names a data set on the hub. docstrings:[PACKAGE,...][:SPLIT] is the prose
    in docstrings of installed packages (stdlib: the standard library); its split dev is one module in ten."""
    mixture_weights: list[PositiveFloat] | None = None
    """Share of the training text for each entry of data.train; entries with too little text are repeated. null: use
    each document once."""
    eval: list[str] | str | None = None
    """Held-out corpus, in the formats of data.train. null: hold out a share of data.train (eval_fraction)."""
    eval_fraction: Fraction = 0.05
    """Share of the documents of data.train that is held out if data.eval is null."""
    filters: list[FilterName] | None = None
    """Filters of the documents of data.train, in order: language (data.language, as identified by fastText), c4, gopher
    and fineweb (the quality rules of these corpora, for languages with spaces between words), exact_duplicates. They
    are followed by decontaminate and near_duplicates. language needs the extra filters. null: none."""
    decontaminate: list[str] | str | None = None
    """Files or globs of evaluation sets (JSON, JSONL, CSV, TSV, Parquet or text). Removes documents of data.train that
    share 13 words in a row with one of their texts. null: keep all documents."""
    near_duplicates: Annotated[float, Range(above=0, maximum=1)] | None = None
    """Removes documents of data.train that share at least this fraction of their five-word sequences with an earlier
    document (estimated by MinHash; needs the extra filters). null: keep all documents."""
    streaming: bool = False
    """Train while data.train is being read, without copying URLs and hub data sets to disk. Needs data.eval."""
    stream_readers: Positive = 4
    """Number of processes on all hosts that read a stream. Each reads its own files, if there are enough, and provides
    an equal share of every batch."""
    shuffle_buffer: Positive = 64
    """Megabytes of text, over all readers, in which the rows of a stream are shuffled; at least 4 per reader."""
    verbatim: bool = False
    """Keep white space and empty lines: each .txt file is one document. Needs data.input_format blocks."""
    document_per_line: bool = False
    """Each line of a .txt file is a document, as in logs or collections of short texts."""
    text_field: list[str] | str = "text"
    """Field of .jsonl, or column of .parquet and data sets, that holds the text. Several are joined by line breaks;
    null and empty values are skipped."""
    one_sentence_per_line: bool = False
    """The corpus has one sentence per line: do not detect sentence boundaries."""
    language: list[str] | str = "en"
    """Language code for sentence boundaries, such as de; or a list with one code for each entry of data.train."""
    input_format: InputFormatName = "nsp"
    """Input format, how rows are made of text. Pairs of segments with a label: nsp (next sentence prediction: does B
    follow A, or is it from another document) and sop (sentence order prediction: are two consecutive segments swapped,
    as in ALBERT). Rows without a label: full_sentences and doc_sentences (rows filled with whole sentences across
    documents or within one, as in RoBERTa), and blocks (rows of exactly sequence_length tokens, as in GPT-2)."""
    sequence_length: Annotated[int, Range(minimum=8)] = 128
    """Tokens T per row, including special tokens."""
    max_predictions_per_sequence: Positive | None = None
    """Maximum number of predictions P per row, or per example of packed rows. null: masked_lm_prob x sequence_length,
    rounded up, and at most sequence_length - 1."""
    masked_lm_prob: InnerFraction = 0.15
    """Share of a row's tokens that are predicted."""
    mask_share: Share | None = None
    """Share of the predicted tokens that become [MASK]. Defaults to 0.8, or 0.85 with training.objective rtd."""
    random_share: Share | None = None
    """Share of the predicted tokens that become a random token; the rest stay. Defaults to 0.1, or 0 with
    training.objective rtd."""
    whole_word_masking: bool = False
    """Mask all tokens of a word or none of them. Each token is still replaced by the 80/10/10 rule."""
    static_masking: bool = False
    """Mask a row the same way in every epoch. With dupe_factor, each copy has its own masks."""
    dupe_factor: Positive = 1
    """Number of times that examples are made from the training text, each time with other pairs, or, in rows without
    pairs, with other static masks (Google's dupe_factor)."""
    short_seq_prob: Fraction = 0.1
    """Share of pairs with a random shorter length, so that the model also learns short inputs."""
    packing: bool = False
    """Put several short examples into one training row (histogram packing). Each attends only to itself, starts at
    position 0, and has its own [CLS], label and masks. Held-out rows have one example, so that losses are
    comparable."""
    max_sequences_per_pack: Annotated[int, Range(minimum=2)] = 8
    """Maximum number of examples K in a packed row. Raise it if most examples are shorter than an eighth of
    sequence_length."""
    seed: Seed = 12345
    """Seed of the document order, the held-out share and the sentence pairs. Part of the key of cached examples."""
    num_workers: Positive | None = None
    """Number of processes that build the examples. Defaults to one per core. The result does not depend on it."""
    cache_dir: str | None = None
    """Folder for built examples. Defaults to bert-jax/examples in the user's cache folder. A gs:// or s3:// URL names
    a copy of that folder that several machines share."""

    @property
    def predictions_per_row(self) -> int:
        """P, as a number."""
        if self.max_predictions_per_sequence is not None:
            return self.max_predictions_per_sequence
        share = Decimal(repr(self.masked_lm_prob))  # 0.15 x 20 is over 3 in binary
        return min(math.ceil(share * self.sequence_length), self.sequence_length - 1)

    def check(self) -> None:
        """Raises UserError for values with which no examples can be built."""
        check_fields("data.", self)
        if not self.train:
            raise UserError(
                "data.train is not set: name a corpus, for example --data.train 'corpus/*.txt' "
                '(or "docstrings:" for the embedded one)'
            )
        self._check_entries()
        fields = [self.text_field] if isinstance(self.text_field, str) else self.text_field
        if not all(fields) or not fields or len(set(fields)) < len(fields):
            raise UserError(f"data.text_field is {self.text_field!r}: name one or more different fields")
        for language in [self.language] if isinstance(self.language, str) else self.language:
            if not LANGUAGE.fullmatch(language):
                raise UserError(f"data.language is {language!r}: use a lower-case code such as en, de or pt-br")
        self._check_input_format()
        self._check_filters()
        if self.dupe_factor > 1 and not self.static_masking and self.input_format not in PAIR_FORMATS:
            fix = "without pairs, copies of a row do not differ: remove it, or set data.static_masking"
            raise conflict(self, "data.dupe_factor", "data.input_format", fix)
        self._check_streaming()
        if self.packing and self.input_format in ("full_sentences", "blocks"):
            fix = "its rows are full already: remove data.packing, or use another data.input_format"
            raise conflict(self, "data.packing", "data.input_format", fix)
        if not self.packing:
            no_packs = "but data.packing is false: remove it, or set data.packing"
            check_unused("data.", self, no_packs, ["max_sequences_per_pack"])
        if self.eval_fraction == 0 and self.eval is None:
            raise UserError("data.eval_fraction is 0 and data.eval is not set: set one of them")

    def _check_input_format(self) -> None:
        """Raises UserError for keys that the input format does not use."""
        if self.verbatim and self.input_format != "blocks":
            fix = "set data.input_format to blocks, or remove data.verbatim"
            raise conflict(self, "data.verbatim", "data.input_format", fix)
        if self.document_per_line and self.verbatim:
            raise conflict(self, "data.document_per_line", "data.verbatim", "remove one of the two")
        if self.document_per_line and self.one_sentence_per_line and self.input_format in PAIR_FORMATS:
            fix = f"{self.input_format} needs documents of two sentences: remove one, or use another data.input_format"
            raise conflict(self, "data.document_per_line", "data.one_sentence_per_line", fix)
        if self.input_format not in PAIR_FORMATS:
            no_pairs = f"but the rows of data.input_format {self.input_format} have no pairs: remove it"
            check_unused("data.", self, no_pairs, ["short_seq_prob"])
        if self.input_format == "blocks":
            unused = UNUSED_BY_BLOCKS[: 1 if self.filters else None]  # filters use the language
            check_unused("data.", self, "but data.input_format blocks ignores sentences: remove it", unused)

    def _check_filters(self) -> None:
        """Raises UserError for filters that are named twice or do not apply to the language."""
        names = self.filters or []
        if repeated := [name for name in names if names.count(name) > 1]:
            raise UserError(f"data.filters names {repeated[0]} twice: name each filter once")
        for language in [self.language] if isinstance(self.language, str) else self.language:
            rules = [name for name in names if name in ("c4", "gopher", "fineweb")]
            if rules and language.split("-")[0] in WITHOUT_SPACES:
                raise UserError(
                    f"data.filters has {rules[0]}, a rule on words, but data.language {language} has no spaces between "
                    "words: remove it"
                )

    def _check_streaming(self) -> None:
        """Raises UserError for keys that streams do not support, or that only streams use."""
        if not self.streaming:
            check_unused("data.", self, "but data.streaming is false: remove it, or set data.streaming", STREAM_KEYS)
            return
        if self.eval is None:
            raise conflict(self, "data.streaming", "data.eval", "set data.eval, since a stream has no held-out share")
        unknown = "but data.streaming does not know the whole corpus: remove it, or set data.streaming to false"
        check_unused("data.", self, unknown, UNUSED_BY_STREAMS)
        if "exact_duplicates" in (self.filters or ()):
            raise UserError(f"data.filters has exact_duplicates, {unknown}")

    def _check_entries(self) -> None:
        """Raises UserError for lists that do not have one value for each entry of data.train."""
        sources = [("data.train", self.train)]
        if isinstance(self.language, list) and self.eval is not None:
            sources.append(("data.eval", self.eval))
        for name, values in (("data.mixture_weights", self.mixture_weights), ("data.language", self.language)):
            for key, source in sources if name == "data.language" else sources[:1]:
                entries = len(source) if isinstance(source, list) else 1
                if isinstance(values, list) and len(values) != entries:
                    fix = "set one for each (quote globs, so that the shell does not expand them)"
                    raise UserError(f"{name} has {len(values)} values, but {key} has {entries}: {fix}")
