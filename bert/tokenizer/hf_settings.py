"""Reads tokenizer_config.json, added_tokens.json and special_tokens_map.json, which say how to tokenize a text."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bert.errors import UserError
from bert.files import read_json
from bert.tokenizer.library import lowercases, special_ids

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NO_LIMIT = 2**31 - 1
"""Length of a row that is not truncated."""

SETTINGS, ADDED, SPECIAL = "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json"

_FLAGS = (
    *("do_lower_case", "strip_accents", "tokenize_chinese_chars", "add_prefix_space"),
    *("keep_accents", "split_by_punct"),
)
_TOKEN = ("lstrip", "rstrip", "single_word", "normalized", "special")
_WORD_PIECE = {
    f"{name}Tokenizer{fast}"
    for name in ("Bert", "DistilBert", "Electra", "MPNet", "PreTrained", "Basic")
    for fast in ("", "Fast")
}
"""Tokenizer classes of transformers that read a bare vocab.txt like BERT."""
GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
_WITHOUT_TYPES = ("DistilBert", "MPNet", "Roberta", "XLMRoberta")
"""Models whose tokenizer classes make no token_type_ids, unless model_input_names has them."""


@dataclass(frozen=True)
class TokenizerSettings:
    """Settings of a folder; None if its files do not have them.

    Attributes:
        do_lower_case, strip_accents, tokenize_chinese_chars: normalization of WordPiece.
        add_prefix_space: byte-level vocabularies read the first word of a text like the others.
        keep_accents, split_by_punct: settings of ALBERT's and DeBERTa's SentencePiece files.
        truncation_side: "left" or "right", the end at which a long text is truncated.
        model_input_names: arrays that transformers passes to the model, such as token_type_ids.
        added: (id, token, flags) of each token that was added to the vocabulary.
        special: tokens of the vocabulary that are not split in texts, such as the markers of entities.
        tokenizer_class: class of transformers.
        reader: class that reads the folder: a class of the folder's code, ``tokenizer_class``, or config.json's class.
    """

    do_lower_case: bool | None = None
    strip_accents: bool | None = None
    tokenize_chinese_chars: bool | None = None
    add_prefix_space: bool | None = None
    keep_accents: bool | None = None
    split_by_punct: bool | None = None
    truncation_side: str | None = None
    model_input_names: tuple[str, ...] | None = None
    added: tuple[tuple[int, str, tuple[tuple[str, bool], ...]], ...] = ()
    special: tuple[str, ...] = ()
    tokenizer_class: str | None = None
    reader: str | None = None

    @property
    def has_token_types(self) -> bool:
        """Whether transformers passes the model different token types for the texts of a pair."""
        if self.model_input_names is not None:
            return "token_type_ids" in self.model_input_names
        return not (self.tokenizer_class or "").startswith(_WITHOUT_TYPES)

    def require_wordpiece(self, folder: Path) -> None:
        """Raises UserError if a bare vocab.txt belongs to a class that splits words differently from BERT."""
        name = self.reader
        if name is not None and name not in _WORD_PIECE:
            fix = "put its tokenizer.json next to it"
            raise UserError(f"{folder}: the tokenizer is a {name}, which reads vocab.txt differently: {fix}")

    def apply(self, tokenizer: Tokenizer, folder: Path) -> None:
        """Applies the settings to a tokenizer, and adds missing tokens.

        Raises:
            UserError: an added token has another id in the vocabulary.
        """
        from tokenizers import AddedToken, normalizers

        steps = tokenizer.normalizer
        # The class without a model takes all of tokenizer.json.
        is_whole = self.tokenizer_class in GENERIC_CLASSES and (folder / "tokenizer.json").is_file()
        if isinstance(steps, normalizers.BertNormalizer) and not is_whole:
            names = {"lowercase": "do_lower_case", "handle_chinese_chars": "tokenize_chinese_chars"}
            for name, key in {**names, "strip_accents": "strip_accents"}.items():
                if (value := getattr(self, key)) is not None:
                    setattr(steps, name, value)
            tokenizer.normalizer = steps
        if self.truncation_side is not None:
            set_truncation_side(tokenizer, self.truncation_side)
        if self.add_prefix_space is not None:
            set_prefix_space(tokenizer, self.add_prefix_space)
        known = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
        for number, content, flags in self.added:
            token = AddedToken(content, **dict(flags))
            if content in known and all(getattr(known[content], name) == value for name, value in flags):
                continue
            (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
            if tokenizer.token_to_id(content) != number:
                raise UserError(
                    f"{folder}: the added token {content!r} has the id {number}, but its vocabulary has "
                    f"{tokenizer.token_to_id(content)}: copy all tokenizer files from one source"
                )
        for content in self.special:
            if content not in known and tokenizer.token_to_id(content) is not None:  # else the model has no row for it
                tokenizer.add_special_tokens([AddedToken(content, special=True)])


def set_prefix_space(tokenizer: Tokenizer, add: bool) -> None:
    """Sets whether a byte-level tokenizer reads the first word of a text like the others. Does nothing for other kinds.

    The post-processor has the same setting: it removes spaces from the offsets, and the added one is not in the text.
    """
    from tokenizers import pre_tokenizers

    words, ending = tokenizer.pre_tokenizer, tokenizer.post_processor
    if not isinstance(words, pre_tokenizers.ByteLevel):
        return
    words.add_prefix_space = add
    tokenizer.pre_tokenizer = words
    if hasattr(ending, "add_prefix_space"):
        ending.add_prefix_space = add
        tokenizer.post_processor = ending


def lower_cased(tokenizer: Tokenizer) -> Tokenizer:
    """Returns a tokenizer that lower-cases texts except special tokens, like do_lower_case of sentence-transformers."""
    from tokenizers import Tokenizer, normalizers

    if lowercases(tokenizer):
        return tokenizer
    copy, steps = Tokenizer.from_str(tokenizer.to_str()), tokenizer.normalizer
    copy.normalizer = normalizers.Sequence([normalizers.Lowercase(), *([] if steps is None else [steps])])
    return copy


def set_one_token_type(tokenizer: Tokenizer) -> None:
    """Sets all token types of a WordPiece vocabulary's rows to 0, for models without token types."""
    from tokenizers import processors

    special = special_ids(tokenizer)
    names = [(str(tokenizer.id_to_token(id)), id) for id in (special.cls, special.sep)]
    (cls, _), (sep, _) = names
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{cls} $A {sep}", pair=f"{cls} $A {sep} $B {sep}", special_tokens=names
    )


def truncation_side(tokenizer: Tokenizer) -> str:
    """Returns the end, "left" or "right", at which a long text is truncated."""
    return str((tokenizer.truncation or {"direction": "right"})["direction"])


def set_truncation_side(tokenizer: Tokenizer, side: str) -> None:
    """Sets the end at which rows are truncated. The tokenizer itself does not truncate."""
    if side == "left":
        tokenizer.enable_truncation(NO_LIMIT, direction=side)
    else:
        tokenizer.no_truncation()


def read_model_max_length(folder: Path) -> int | None:
    """Returns the maximum number of tokens of a row in tokenizer_config.json; None if there is none."""
    limit = read_object(folder / SETTINGS).get("model_max_length")
    return limit if type(limit) is int and limit >= 1 else None


def read_settings(folder: Path) -> TokenizerSettings:
    """Returns the settings of a folder. Raises UserError for malformed files."""
    content = read_object(folder / SETTINGS)
    for name in _FLAGS:
        value = content.get(name)
        if value is not None and not isinstance(value, bool):
            raise UserError(f"{folder / SETTINGS}: {name} is {value!r}, set it to true or false")
    if (side := content.get("truncation_side")) not in (None, "left", "right"):
        raise UserError(f"{folder / SETTINGS}: truncation_side is {side!r}, set it to left or right")
    inputs, kind = content.get("model_input_names"), content.get("tokenizer_class")
    reader = _reader_class(folder, content)
    return TokenizerSettings(
        **{name: content.get(name) for name in _FLAGS},
        truncation_side=side,
        model_input_names=tuple(inputs) if isinstance(inputs, list) else None,
        added=_read_added(folder, content),
        special=_read_special(content, read_object(folder / SPECIAL)),
        tokenizer_class=kind if isinstance(kind, str) else None,
        reader=reader if isinstance(reader, str) else None,
    )


def _reader_class(folder: Path, content: dict[str, Any]) -> Any:
    """Returns the class that reads the folder: of its code, of its settings, or of config.json in older folders."""
    of_code = content.get("auto_map")
    names = of_code.get("AutoTokenizer") if isinstance(of_code, dict) else None
    if isinstance(names, list):  # a slow and a fast class
        names = next((name for name in names if name), None)
    if kind := names or content.get("tokenizer_class"):
        return kind
    with contextlib.suppress(UserError):  # faults of config.json are reported when the model is read
        return read_object(folder / "config.json").get("tokenizer_class")
    return None


def _read_added(folder: Path, content: dict[str, Any]) -> tuple[tuple[int, str, tuple[tuple[str, bool], ...]], ...]:
    added: dict[int, tuple[str, dict[str, bool]]] = {}
    for text, token_id in read_object(folder / ADDED).items():
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise UserError(f"{folder / ADDED}: the number of {text!r} is {token_id!r}: copy the file again")
        added[token_id] = (text, {})
    decoder = content.get("added_tokens_decoder") or {}
    tokens = decoder if isinstance(decoder, dict) else {"": decoder}
    for number, token in tokens.items():
        is_numbered = number.isdecimal() and len(number) <= 10
        if not (is_numbered and isinstance(token, dict) and isinstance(token.get("content"), str)):
            raise UserError(f"{folder / SETTINGS}: added_tokens_decoder is not a table of numbered tokens: copy it")
        added[int(number)] = (token["content"], {flag: bool(token[flag]) for flag in _TOKEN if flag in token})
    return tuple((token_id, text, tuple(flags.items())) for token_id, (text, flags) in sorted(added.items()))


def _read_special(*contents: dict[str, Any]) -> tuple[str, ...]:
    """Returns the special tokens of the settings that have no role."""
    named: list[Any] = []
    for content in contents:
        for key in ("additional_special_tokens", "extra_special_tokens"):
            given = content.get(key) or []
            named += given.values() if isinstance(given, dict) else given if isinstance(given, list) else []
    texts = [token.get("content") if isinstance(token, dict) else token for token in named]
    return tuple(dict.fromkeys(text for text in texts if isinstance(text, str) and text))


def read_object(file: Path) -> dict[str, Any]:
    """Returns the object in a JSON file, empty if there is no file. Raises UserError for other content."""
    if not file.is_file():
        return {}
    content = read_json(file)
    if not isinstance(content, dict):
        raise UserError(f"{file} is not a JSON object: fix it or remove it")
    return content
