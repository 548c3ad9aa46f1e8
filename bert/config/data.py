"""The corpus and its examples."""

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
    check_fields,
    check_unused,
)
from bert.errors import UserError

DOCSTRINGS_PREFIX = "docstrings:"
"""Start of a ``data.train`` that names the embedded corpus, the prose of installed packages:
docstrings:[PACKAGE,...][:SPLIT]."""

HUB_PREFIX = "hub:"
"""Start of a ``data.train`` that names a data set on the Hugging Face hub: hub:ORG/NAME[:CONFIG][:SPLIT]."""

LANGUAGE = re.compile("[a-z]{2,3}(-[a-z]+)*")
"""Of a code of a language. To one that is unknown the rules of English apply."""

InputFormatName = Literal["nsp", "sop", "full_sentences", "doc_sentences", "blocks"]
INPUT_FORMATS: tuple[str, ...] = get_args(InputFormatName)

PAIR_FORMATS = ("nsp", "sop")
"""Input formats whose rows are pairs of segments with a label."""

OF_STREAMS = ("stream_readers", "shuffle_buffer")
"""Keys that only streams use."""

OF_HELD_OUT_ROWS = (
    *("verbatim", "document_per_line", "text_field", "one_sentence_per_line", "language"),
    *("input_format", "masked_lm_prob", "whole_word_masking", "short_seq_prob"),
)
"""Keys of the section ``data`` that decide what is predicted of a held-out text, except the lengths of its rows."""

UNUSED_BY_STREAMS = ("near_duplicates", "static_masking", "dupe_factor")
"""Keys that compare or count the documents or rows of a whole corpus."""

UNUSED_BY_BLOCKS = ("one_sentence_per_line", "language")
"""Keys of sentences, which blocks do not look for."""

UNUSED_BY_CLM = (
    "max_predictions_per_sequence",
    "masked_lm_prob",
    "whole_word_masking",
    "static_masking",
    "dupe_factor",
)
"""Keys of masks, and of examples that differ by their masks."""


@dataclass(frozen=True)
class DataConfig:
    """The corpus, and the examples made of it."""

    train: list[str] | str = field(default_factory=list)
    """Corpus: files, globs or folders of .txt (an empty line ends a document), of .jsonl with a "text" field, either
    also as .gz, .bz2, .xz or .zst, of .parquet with a "text" column (see text_field); folders that datasets saved;
    URLs of these; hub:ORG/NAME[:CONFIG][:SPLIT]; docstrings:[PACKAGE,...][:SPLIT] is the prose in the docstrings of
    what is installed (stdlib stands for the standard library), and its split dev one module in ten."""
    mixture_weights: list[PositiveFloat] | None = None
    """Share of the training text for each entry of data.train: those that have less are repeated; null takes each
    document once."""
    eval: list[str] | str | None = None
    """Held-out corpus in the same forms; null holds out a share of data.train instead."""
    eval_fraction: Fraction = 0.05
    """Share of the documents of data.train that is held out when data.eval is null."""
    near_duplicates: Annotated[float, Range(above=0, most=1)] | None = None
    """Documents of data.train are left out if this share of their runs of five words, and of those of an earlier
    document, occurs in both (about; by MinHash, extra dedup); null keeps all."""
    streaming: bool = False
    """Train while data.train is read, pass after pass: URLs and data sets on the hub are not copied to disk. Needs
    data.eval, whose examples are built."""
    stream_readers: Positive = 4
    """Processes, of all hosts together, that read a stream; each reads its own files, if there are enough, and gives
    its share of every batch."""
    shuffle_buffer: Positive = 64
    """Megabytes of text among which the rows of a stream are mixed, of all readers together; at least 4 each."""
    verbatim: bool = False
    """Read documents as they are, with white space and empty lines: a .txt file is then one document (needs
    data.input_format blocks)."""
    document_per_line: bool = False
    """Each line of a .txt file is a document, as in logs and collections of short texts."""
    text_field: list[str] | str = "text"
    """Field of .jsonl, or column of .parquet and data sets, with the text; several are joined by line ends. Null and
    empty ones are skipped."""
    one_sentence_per_line: bool = False
    """The corpus already has one sentence a line: do not look for sentence boundaries."""
    language: list[str] | str = "en"
    """Language code by which sentence boundaries are found; several: one for each entry of data.train."""
    input_format: InputFormatName = "nsp"
    """Input format, how rows are made of text. Pairs of segments with a label: nsp (next sentence prediction: does B
    follow A, or is it from another document) and sop (sentence order prediction: are two consecutive segments swapped,
    as in ALBERT). Rows without a label: full_sentences and doc_sentences (rows filled with whole sentences across
    documents or within one, as in RoBERTa), and blocks (rows of exactly sequence_length tokens, as in GPT-2)."""
    sequence_length: Annotated[int, Range(least=8)] = 128
    """Tokens T a row, special ones included."""
    max_predictions_per_sequence: Positive | None = None
    """Maximum number of predictions P per row, or per example of packed rows. null: masked_lm_prob x sequence_length,
    rounded up, and at most sequence_length - 1."""
    masked_lm_prob: InnerFraction = 0.15
    """Share of a row's tokens that are predicted."""
    whole_word_masking: bool = False
    """Mask whole words or none of their tokens; each token is still replaced as 80/10/10 has it."""
    static_masking: bool = False
    """Mask a row in the same way at every visit; with dupe_factor each copy has its own masks."""
    dupe_factor: Positive = 1
    """Times the training text is made into examples, each time with other pairs (Google's dupe_factor); full rows get
    other frozen masks."""
    short_seq_prob: Fraction = 0.1
    """Share of pairs with a random shorter target length, so that short inputs are learned too; full rows have none."""
    packing: bool = False
    """Put several short examples into one training row (histogram packing): each sees itself alone, begins at position
    0, and has its own [CLS], label and masks. Held-out rows stay one example each, so that runs compare."""
    max_sequences_per_pack: Annotated[int, Range(least=2)] = 8
    """Most examples K of a packed row; more of them where examples are shorter than an eighth of sequence_length."""
    seed: Seed = 12345
    """Seed of the document order, the held-out share and the sentence pairs; the examples are cached by it."""
    num_workers: Positive | None = None
    """Processes that build the examples; null takes one a core. The result does not depend on it."""
    cache_dir: str | None = None
    """Folder for built examples; null takes bert-jax/examples in the user's cache folder. A URL of gs:// or s3:// is
    that of a copy of this folder, which machines share."""

    @property
    def predictions_per_row(self) -> int:
        """P, as a number."""
        if self.max_predictions_per_sequence is not None:
            return self.max_predictions_per_sequence
        share = Decimal(repr(self.masked_lm_prob))  # 0.15 x 20 is over 3 in binary
        return min(math.ceil(share * self.sequence_length), self.sequence_length - 1)

    def check(self) -> None:
        """Raises UserError for values no example can be built with."""
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
                raise UserError(f"data.language is {language!r}: give a code in lower case, such as en, de or pt-br")
        self._check_input_format()
        if self.dupe_factor > 1 and not self.static_masking and self.input_format not in PAIR_FORMATS:
            raise UserError(
                f"data.dupe_factor is {self.dupe_factor}, but data.input_format {self.input_format} has no pairs that "
                "would differ: remove it (masks are drawn again at every visit), or set data.static_masking"
            )
        self._check_streaming()
        if self.packing and self.input_format in ("full_sentences", "blocks"):
            raise UserError(
                f"data.packing is true, and the rows of data.input_format {self.input_format} are full already: leave "
                "packing out, or choose nsp, sop or doc_sentences"
            )
        if not self.packing:
            no_packs = "and data.packing is false: remove it, or set data.packing"
            check_unused("data.", self, no_packs, ["max_sequences_per_pack"])
        if self.eval_fraction == 0 and self.eval is None:
            raise UserError("data.eval_fraction is 0 and data.eval is not set: set one of them")

    def _check_input_format(self) -> None:
        """Raises UserError for keys that the input format does not use."""
        if self.verbatim and self.input_format != "blocks":
            raise UserError(
                f"data.verbatim is true, and data.input_format {self.input_format} makes rows of sentences: set "
                "data.input_format to blocks, or remove data.verbatim"
            )
        if self.document_per_line and self.verbatim:
            raise UserError("data.document_per_line and data.verbatim are both true: a file cannot be both, remove one")
        if self.document_per_line and self.one_sentence_per_line and self.input_format in PAIR_FORMATS:
            raise UserError(
                "data.document_per_line and data.one_sentence_per_line are both true, and data.input_format "
                f"{self.input_format} needs documents with two sentences: remove one, or set data.input_format to "
                "full_sentences"
            )
        if self.input_format not in PAIR_FORMATS:
            no_pairs = f"and the rows of data.input_format {self.input_format} have no pairs: remove it"
            check_unused("data.", self, no_pairs, ["short_seq_prob"])
        if self.input_format == "blocks":
            check_unused(
                "data.", self, "and data.input_format blocks does not look for sentences: remove it", UNUSED_BY_BLOCKS
            )

    def _check_streaming(self) -> None:
        """Raises UserError for keys that need the whole corpus, if it is a stream, and for those of a stream if not."""
        if not self.streaming:
            check_unused("data.", self, "and data.streaming is false: remove it, or set data.streaming", OF_STREAMS)
            return
        if self.eval is None:
            raise UserError(
                "data.streaming is true and data.eval is null: set data.eval, a stream has no held-out share"
            )
        unknown = "and data.streaming does not know the whole corpus: remove it, or set data.streaming to false"
        check_unused("data.", self, unknown, UNUSED_BY_STREAMS)

    def _check_entries(self) -> None:
        """What is given for each entry of data.train must be as many."""
        sources = [("data.train", self.train)]
        if isinstance(self.language, list) and self.eval is not None:
            sources.append(("data.eval", self.eval))
        for name, values in (("data.mixture_weights", self.mixture_weights), ("data.language", self.language)):
            for key, source in sources if name == "data.language" else sources[:1]:
                entries = len(source) if isinstance(source, list) else 1
                if isinstance(values, list) and len(values) != entries:
                    raise UserError(
                        f"{name} has {len(values)} values and {key} {entries}: give one for each (quote globs, so that "
                        "the shell does not make many of one)"
                    )
