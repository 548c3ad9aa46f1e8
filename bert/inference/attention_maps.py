"""Attention weights of every head over a text, or from a target to its source, as an HTML page or a picture."""

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
from bert.data.encoding import plain_ids, target_boundaries, tokenize
from bert.data.inputs import Text, as_text_or_pair, as_texts
from bert.data.rows import TokenRows
from bert.errors import UserError
from bert.files import atomic_write
from bert.inference.forward import BUCKETS, check_finite, check_inputs
from bert.inference.generate import Continuation
from bert.inference.pretrained import Pretrained
from bert.model.decoders import BertForSequenceToSequence
from bert.model.encoder import Bert
from bert.model.names import GLOBAL_TOKENS, GlobalTokenKind, has_decoder
from bert.model.parameters import Params
from bert.tokenizer.hf_settings import NO_LIMIT
from bert.tokenizer.library import special_ids
from bert.tokenizer.vocabulary import token_text

MAX_TICK_LABELS = 24
"""Maximum number of tokens with labels in a picture."""


@dataclass(frozen=True)
class AttentionTokens:
    """The tokens on one side of an attention map.

    Attributes:
        tokens: T readable tokens, special tokens included.
        segments: [T] of 0 and 1.
        special: [T] booleans, true for special tokens.
        num_truncated: number of tokens of the text that did not fit the model.
    """

    tokens: list[str]
    segments: np.ndarray
    special: np.ndarray
    num_truncated: int = 0

    @classmethod
    def from_ids(
        cls, tokenizer: Tokenizer, ids: np.ndarray, segments: np.ndarray | None = None, num_truncated: int = 0
    ) -> AttentionTokens:
        """Makes the tokens from ids [T]. Without ``segments``, all are in one segment."""
        segments = np.zeros(len(ids), np.int32) if segments is None else segments
        # The leading space of byte-level tokens becomes an open box.
        tokens = [token_text(tokenizer, int(token_id)).replace(" ", "␣") for token_id in ids]
        return cls(tokens, segments, np.isin(ids, special_ids(tokenizer).all), num_truncated)

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class AttentionMap:
    """Attention over a text or a pair of texts, or the cross-attention of a target to its source.

    Attributes:
        source: name of the model.
        rows: the T tokens that attend; for cross-attention the predicted tokens.
        columns: the S tokens that are attended to; the same object as ``rows`` for self-attention.
        weights: [layers, N, T, S] float32: attention weights from token t to token s; each row sums to 1.
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
        """The tokens of each side, by name."""
        return {"target tokens": self.rows, "source tokens": self.columns} if self.is_cross else {"tokens": self.rows}


def compute_attention_map(model: Pretrained, text: Text, target: str | Continuation | None = None) -> AttentionMap:
    """Computes the attention of every layer and head over a text, or over a pair of texts given as a tuple.

    Args:
        model: a model. For an encoder-decoder without ``target``, the encoder is used.
        text: a text, or a tuple of two texts.
        target: for an encoder-decoder: the target of the source ``text``, or a `Continuation` from `generate` with
            ``details``. The result is then the cross-attention for this target.

    Raises:
        UserError: the input is not a text or a pair of texts, a text is empty, or the model has no layers, or no
            decoder for a target.
    """
    if model.config.is_static:
        raise UserError(f"{model.source} is a table of embeddings without attention: use a model with layers")
    text = as_text_or_pair(text, 1)
    if not all(part.strip() for part in ([text] if isinstance(text, str) else text)):
        raise UserError("the text is empty: pass at least one word")
    if target is not None:
        return _compute_alignment(model, text, target)
    features, num_truncated = _cut(model, text)
    length = len(features.ids)
    batch = features.batch(np.arange(1), _bucket(model, len(features.ids)), 1)
    params = {name: part for name, part in model.params["bert"].items() if name != "pooler"}
    kind = GLOBAL_TOKENS.get(model.architecture)
    weights = _self_attentions(
        model.config, kind, params, batch["input_ids"], batch["token_type_ids"], batch["attention_mask"]
    )
    segments = batch["token_type_ids"][0, :length]
    tokens = AttentionTokens.from_ids(model.tokenizer, features.ids, segments, num_truncated)
    return AttentionMap(model.origin, tokens, tokens, _stack(weights, length, length))


@partial(jax.jit, static_argnums=(0, 1))
def _self_attentions(
    config: ModelConfig,
    global_tokens: GlobalTokenKind | None,
    params: Params,
    input_ids: jax.Array,
    token_type_ids: jax.Array,
    attention_mask: jax.Array,
) -> tuple[jax.Array, ...]:
    apply: Callable[..., Any] = Bert(config, add_pooling_layer=False, global_tokens=global_tokens).apply
    return apply({"params": params}, input_ids, token_type_ids, attention_mask, intermediates=True).attentions


@partial(jax.jit, static_argnums=0)
def _cross_attentions(
    config: ModelConfig, params: Params, input_ids: jax.Array, target_ids: jax.Array, attention_mask: jax.Array
) -> tuple[jax.Array, ...]:
    module = BertForSequenceToSequence(config)
    apply: Callable[..., Any] = module.apply
    inputs = (input_ids, target_ids, attention_mask)
    return cast(tuple[jax.Array, ...], apply({"params": params}, *inputs, method=module.cross_attentions))


def _bucket(model: Pretrained, length: int) -> int:
    """Returns the padded length of a row, so that only one program is compiled per bucket."""
    return bucket_length(length, BUCKETS, model.config.max_position_embeddings)


def _stack(weights: tuple[jax.Array, ...], rows: int, columns: int) -> np.ndarray:
    """Stacks the weights of all layers to [layers, N, T, S] without padding."""
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
    positions = model.config.max_position_embeddings
    check_inputs(whole, model.config.decoder.known_vocab_size)
    read, predicted = whole[:-1][:positions], whole[1:][:positions]
    features, num_truncated = _cut(model, source)
    batch = features.batch(np.arange(1), _bucket(model, len(features.ids)), 1)
    # Attention is causal, so padding tokens have no effect.
    target_ids = np.pad(read, (0, _bucket(model, len(read)) - len(read)))[None]
    weights = _cross_attentions(model.config, model.params, batch["input_ids"], target_ids, batch["attention_mask"])
    return AttentionMap(
        source=model.origin,
        rows=AttentionTokens.from_ids(tokenizer, predicted, num_truncated=len(whole) - 1 - len(read)),
        columns=AttentionTokens.from_ids(model.tokenizer, features.ids, num_truncated=num_truncated),
        weights=_stack(weights, len(read), len(features.ids)),
    )


def _target_ids(tokenizer: Tokenizer, target: str | Continuation, end: int) -> list[int]:
    """Returns the predicted tokens with the end token. Raises UserError for an empty text."""
    if isinstance(target, Continuation):
        return [*target.token_ids, *([end] if target.ended else [])]
    [text] = as_texts(target, 1, "the target is a text: pass a string")
    if not text.strip():
        raise UserError("the target is empty: pass at least one word")
    return [*plain_ids(tokenizer, [text], literal=True)[0].tolist(), end]


def _cut(model: Pretrained, text: Text) -> tuple[TokenRows, int]:
    """Returns the row of a text, and the number of tokens that did not fit the model."""
    features = tokenize(model.tokenizer, [text], model.config.max_position_embeddings)
    check_inputs(features.ids, model.config.known_vocab_size)
    return features, len(tokenize(model.tokenizer, [text], NO_LIMIT).ids) - len(features.ids)


def write_html(attention: AttentionMap, path: Path) -> None:
    """Writes the page of `make_page` to a file."""
    page = make_page(attention)
    with atomic_write(path) as temporary:
        temporary.write_text(page, encoding="utf-8")


def make_page(attention: AttentionMap) -> str:
    """Returns a self-contained HTML page with data, script and style. It makes no requests."""
    layers, heads, _, _ = attention.weights.shape
    # One byte per weight, relative to the row's maximum, so that flat rows of 512 tokens are as exact as peaked ones.
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
    # Escaped so that tokens such as "</script>" cannot end the script element.
    content = json.dumps(data).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    page = resources.files("bert.inference").joinpath("attention_page.html").read_text(encoding="utf-8")
    filling = {"title": html.escape(f"attention of {attention.source}"), "data": content}
    return re.sub(r"\{\{(title|data)\}\}", lambda match: filling[match[1]], page)


def _page_data(side: AttentionTokens) -> dict[str, Any]:
    return {**vars(side), "segments": side.segments.tolist(), "special": side.special.tolist()}


def _encode_base64(array: np.ndarray) -> str:
    return base64.b64encode(zlib.compress(array.tobytes(), 9)).decode("ascii")


def write_png(attention: AttentionMap, path: Path) -> None:
    """Writes a PNG with a row of panels per layer and a column per head. Each panel shows the weights [T, S]."""
    # The Agg canvas without pyplot needs no display and no global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    layers, heads, height, width = attention.weights.shape
    named = max(height, width) <= MAX_TICK_LABELS
    size = (_panel_size(width, named) * heads + 1.9, _panel_size(height, named) * layers + 1.6)
    figure = Figure(figsize=size, dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(layers, heads, squeeze=False, sharex=True, sharey=True)
    # A square-root scale shared by all heads makes a weight of 0.01 visible next to 1.
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
    """Returns the side length of a panel in inches."""
    return max(1.1, 0.115 * tokens) if named else min(2.4, 1.1 + tokens / 200)


def _lengths(attention: AttentionMap) -> str:
    """Describes the number of tokens on each side."""
    return "; ".join(
        f"{len(side)} {name}" + (f", {side.num_truncated} more cut" if side.num_truncated else "")
        for name, side in attention.sides.items()
    )
