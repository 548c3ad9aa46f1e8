"""What every head of a model looks at in a text, or in the source of one, as a page and as a picture."""

from __future__ import annotations

import base64
import html
import json
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from tokenizers import Tokenizer

from bert.config import ModelConfig
from bert.data.batching import bucket_length
from bert.data.encoding import plain_ids, tokenize
from bert.data.inputs import Text, as_text_or_pair, as_texts
from bert.data.multi_text_rows import target_boundaries
from bert.data.rows import TokenRows
from bert.errors import UserError
from bert.files import atomic_write
from bert.inference.forward import BUCKETS, check_finite, check_inputs
from bert.inference.generate import Continuation
from bert.inference.pretrained import Params, Pretrained
from bert.model.decoders import BertForSequenceToSequence
from bert.model.encoder import Bert
from bert.model.names import has_decoder
from bert.tokenizer.hf_settings import NO_LIMIT
from bert.tokenizer.special_tokens import special_ids
from bert.tokenizer.vocabulary import token_text

MAX_TICK_LABELS = 24
"""Most tokens that a picture names: more are not readable."""


@dataclass(frozen=True)
class AttentionTokens:
    """The tokens on one side of an attention map.

    Attributes:
        tokens: T tokens as people read them, special tokens included.
        segments: [T] of 0 and 1.
        special: [T] booleans, true for special tokens.
        num_truncated: tokens of the text that did not fit the model.
    """

    tokens: list[str]
    segments: np.ndarray
    special: np.ndarray
    num_truncated: int = 0

    @classmethod
    def from_ids(
        cls, tokenizer: Tokenizer, ids: np.ndarray, segments: np.ndarray | None = None, num_truncated: int = 0
    ) -> AttentionTokens:
        """The tokens of the ids [T], of one segment if None are given."""
        segments = np.zeros(len(ids), np.int32) if segments is None else segments
        return cls(_tokens(tokenizer, ids), segments, np.isin(ids, special_ids(tokenizer).all), num_truncated)

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class AttentionMap:
    """Attention over a text or a pair of texts, or the cross-attention of a target to its source.

    Attributes:
        source: name of the model.
        rows: the T tokens that attend. Those of cross-attention are the tokens that the model predicts.
        columns: the S tokens that are attended to; ``rows`` itself if these are the tokens that attend.
        weights: [layers, N, T, S] float32: how much of its attention token t gives to token s; each row sums to 1.
    """

    source: str
    rows: AttentionTokens
    columns: AttentionTokens
    weights: np.ndarray

    @property
    def is_cross(self) -> bool:
        """Whether rows and columns are different texts."""
        return self.rows is not self.columns

    @property
    def sides(self) -> dict[str, AttentionTokens]:
        """The texts by the name of their tokens."""
        return {"target tokens": self.rows, "source tokens": self.columns} if self.is_cross else {"tokens": self.rows}


def compute_attention_map(model: Pretrained, text: Text, target: str | Continuation | None = None) -> AttentionMap:
    """Attention of every layer and head over a text, or over a pair of texts given as a tuple.

    Args:
        model: of an encoder-decoder, the encoder unless there is a ``target``.
        text: a text or a pair.
        target: of an encoder-decoder: the text that it writes for the source ``text``, or what its `generate` gives
            with ``details``. The map then is the cross-attention, when the whole target is read at once.

    Raises:
        UserError: not a text or a pair of texts, one of them is empty, or a target for a model without a decoder.
    """
    text = as_text_or_pair(text, 1)
    if not all(part.strip() for part in ([text] if isinstance(text, str) else text)):
        raise UserError("the text is empty: give at least one word")
    if target is not None:
        return _compute_alignment(model, text, target)
    features, num_truncated = _cut(model, text)
    length = len(features.ids)
    batch = _pad_to_bucket(model, features)
    params = {name: part for name, part in model.params["bert"].items() if name != "pooler"}
    weights = _self_attentions(
        model.config, params, batch["input_ids"], batch["token_type_ids"], batch["attention_mask"]
    )
    segments = batch["token_type_ids"][0, :length]
    tokens = AttentionTokens.from_ids(model.tokenizer, features.ids, segments, num_truncated)
    return AttentionMap(model.origin, tokens, tokens, _stack(weights, length, length))


@partial(jax.jit, static_argnums=0)
def _self_attentions(
    config: ModelConfig, params: Params, input_ids: jax.Array, token_type_ids: jax.Array, attention_mask: jax.Array
) -> tuple[jax.Array, ...]:
    apply: Callable[..., Any] = Bert(config, add_pooling_layer=False).apply
    return apply({"params": params}, input_ids, token_type_ids, attention_mask, intermediates=True).attentions


@partial(jax.jit, static_argnums=0)
def _cross_attentions(
    config: ModelConfig, params: Params, input_ids: jax.Array, target_ids: jax.Array, attention_mask: jax.Array
) -> tuple[jax.Array, ...]:
    module = BertForSequenceToSequence(config)
    apply: Callable[..., Any] = module.apply
    inputs = (input_ids, target_ids, attention_mask)
    return cast(tuple[jax.Array, ...], apply({"params": params}, *inputs, method=module.cross_attentions))


def _pad_to_bucket(model: Pretrained, features: TokenRows) -> dict[str, np.ndarray]:
    """A row, padded to a length for which a program is compiled once."""
    return features.batch(np.arange(1), _bucket(model, len(features.ids)), 1)


def _bucket(model: Pretrained, length: int) -> int:
    return bucket_length(length, BUCKETS, model.config.max_position_embeddings)


def _stack(weights: tuple[jax.Array, ...], rows: int, columns: int) -> np.ndarray:
    """The weights of all layers [layers, N, T, S], without those of padding."""
    whole = np.stack([layer[0, :, :rows, :columns] for layer in jax.device_get(weights)])
    check_finite([0], whole[None])
    return whole


def _compute_alignment(model: Pretrained, source: Text, target: str | Continuation) -> AttentionMap:
    if not has_decoder(model.architecture):
        raise UserError(f"{model.source} has no decoder ({model.architecture}): leave out the target")
    if not isinstance(source, str):
        raise UserError(f"the source is a pair of texts, and {model.source} reads one: pass one text")
    tokenizer = model.target_tokenizer or model.tokenizer
    start, end = target_boundaries(tokenizer)
    whole = np.array([start, *_target_ids(tokenizer, target, end)], np.int32)
    longest = model.config.max_position_embeddings
    check_inputs(whole, model.config.decoder.known_vocab_size)
    read, predicted = whole[:-1][:longest], whole[1:][:longest]
    features, num_truncated = _cut(model, source)
    batch = _pad_to_bucket(model, features)
    # No token of the target attends to those after it: of what kind these are does not matter.
    target_ids = np.pad(read, (0, _bucket(model, len(read)) - len(read)))[None]
    weights = _cross_attentions(model.config, model.params, batch["input_ids"], target_ids, batch["attention_mask"])
    return AttentionMap(
        source=model.origin,
        rows=AttentionTokens.from_ids(tokenizer, predicted, num_truncated=len(whole) - 1 - len(read)),
        columns=AttentionTokens.from_ids(model.tokenizer, features.ids, num_truncated=num_truncated),
        weights=_stack(weights, len(read), len(features.ids)),
    )


def _target_ids(tokenizer: Tokenizer, target: str | Continuation, end: int) -> list[int]:
    """The tokens that the model predicts, with the end of a text. Raises UserError for an empty text."""
    if isinstance(target, Continuation):
        return [*target.token_ids, *([end] if target.ended else [])]
    [text] = as_texts(target, 1, "the target is a text: pass a string")
    if not text.strip():
        raise UserError("the target is empty: give at least one word")
    return [*plain_ids(tokenizer, [text], literal=True)[0].tolist(), end]


def _cut(model: Pretrained, text: Text) -> tuple[TokenRows, int]:
    """The row of a text, and the number of tokens that did not fit the model."""
    features = tokenize(model.tokenizer, [text], model.config.max_position_embeddings)
    check_inputs(features.ids, model.config.known_vocab_size)
    return features, len(tokenize(model.tokenizer, [text], NO_LIMIT).ids) - len(features.ids)


def _tokens(tokenizer: Tokenizer, ids: np.ndarray) -> list[str]:
    """Tokens by id: WordPiece's as they are; byte-level ones as text, a space at the start as an open box."""
    return [token_text(tokenizer, int(token_id)).replace(" ", "␣") for token_id in ids]


def write_html(attention: AttentionMap, path: Path) -> None:
    """Writes the page of `make_page` into a file."""
    page = make_page(attention)
    with atomic_write(path) as temporary:
        temporary.write_text(page, encoding="utf-8")


def make_page(attention: AttentionMap) -> str:
    """One HTML page that needs nothing else: data, script and style are in it, and it may load nothing."""
    layers, heads, _, _ = attention.weights.shape
    # A byte a weight, relative to the largest of its row: a uniform row of 512 is as exact as the peak of a sharp one.
    largest = attention.weights.max(-1)
    bytes_ = np.round(255 * attention.weights / np.maximum(largest, 1e-30)[..., None]).astype(np.uint8)
    data = {
        "source": attention.source,
        "layers": layers,
        "heads": heads,
        "rows": _page_data(attention.rows),
        "columns": _page_data(attention.columns) if attention.is_cross else None,
        "weights": _encode_base64(bytes_),
        "largest": _encode_base64(np.round(65535 * largest).astype("<u2")),
    }
    # Inside a script element nothing but "<" can end it; escaped, tokens such as "</script>" are text.
    content = json.dumps(data).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    page = resources.files("bert.inference").joinpath("attention_page.html").read_text(encoding="utf-8")
    filling = {"title": html.escape(f"attention of {attention.source}"), "data": content}
    return re.sub(r"\{\{(title|data)\}\}", lambda match: filling[match[1]], page)


def _page_data(side: AttentionTokens) -> dict[str, Any]:
    return {**vars(side), "segments": side.segments.tolist(), "special": side.special.tolist()}


def _encode_base64(array: np.ndarray) -> str:
    return base64.b64encode(zlib.compress(array.tobytes(), 9)).decode("ascii")


def write_png(attention: AttentionMap, path: Path) -> None:
    """Writes a PNG: a row of squares a layer, a column a head, each square the weights [T, S] of one head."""
    # The Agg canvas without pyplot: no display, no global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    layers, heads, height, width = attention.weights.shape
    named = max(height, width) <= MAX_TICK_LABELS
    size = (_panel_size(width, named) * heads + 1.9, _panel_size(height, named) * layers + 1.6)
    figure = Figure(figsize=size, dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(layers, heads, squeeze=False, sharex=True, sharey=True)
    # Under a square root a weight of 0.01 is still visible next to one of 1; all heads share the scale.
    norm = PowerNorm(0.5, 0, 1)
    for (layer, head), axes in np.ndenumerate(grid):
        image = axes.imshow(attention.weights[layer, head], cmap="Blues", norm=norm, interpolation="nearest")
        for side, draw in ((attention.columns, axes.axvline), (attention.rows, axes.axhline)):
            for boundary in np.flatnonzero(np.diff(side.segments)) + 0.5:
                draw(boundary, color="#D55E00", linewidth=0.6)
        axes.set_xticks(range(width) if named else [])
        axes.set_yticks(range(height) if named else [])
        axes.tick_params(length=0, labelsize=6)
        if layer == 0:
            axes.set_title(f"head {head + 1}", fontsize=8)
        if head == 0:
            axes.set_ylabel(f"layer {layer + 1}", fontsize=8)
    if named:
        for axes in grid[-1]:
            axes.set_xticklabels(attention.columns.tokens, rotation=90, parse_math=False)
        for axes in grid[:, 0]:
            axes.set_yticklabels(attention.rows.tokens, parse_math=False)
    bar = figure.colorbar(image, ax=grid, fraction=0.03, pad=0.01, ticks=[0, 0.01, 0.1, 0.3, 0.6, 1])
    bar.ax.tick_params(labelsize=7)
    bar.set_label("attention from the row's token to the column's", fontsize=8)
    figure.suptitle(f"{attention.source}: {_lengths(attention)}", fontsize=9, parse_math=False)
    with atomic_write(path) as temporary:
        figure.savefig(temporary, format="png")


def _panel_size(tokens: int, named: bool) -> float:
    """Inches along a side of a square of the picture."""
    return max(1.1, 0.115 * tokens) if named else min(2.4, 1.1 + tokens / 200)


def _lengths(attention: AttentionMap) -> str:
    """The numbers of tokens on each side."""
    return "; ".join(
        f"{len(side)} {name}" + (f", {side.num_truncated} more cut" if side.num_truncated else "")
        for name, side in attention.sides.items()
    )
