"""Instructions in README.md for texts that are longer than a row, which an exported model does not split itself."""

from __future__ import annotations

from bert.config.model import WINDOW_MODES
from bert.data.encoding import RowTemplate, row_template
from bert.data.long_texts import LongTexts, head_length
from bert.interchange.bundle import ModelBundle

POOLED = {"mean": "hidden.mean(0)", "cls": "hidden[0]", "max": "hidden.max(0).values"}
"""Vector of a window from its hidden states, by `bert.model.pooling.Pooling.mode`."""


def long_text_rule(model: ModelBundle) -> list[str]:
    """Returns a paragraph on how the model reads long texts; none if it cuts them."""
    own = model.long_texts
    if own is None or own.mode == "cut":
        return []
    template = row_template(model.tokenizer)
    room, outputs = template.room(own.max_length), "vectors" if model.architecture == "Bert" else "logits"
    if own.mode == "head_tail":
        head = head_length(room)
        rule = f"Of a text with more than {room} tokens, the first {head} and the last {room - head} are kept."
    else:
        pooled = "maximum" if own.mode == "windows_max" else "mean"
        rule = (
            f"A text with more than {room} tokens is read through windows of {room} tokens that start "
            f"{min(own.stride, room)} tokens apart; the last one ends with the text. The {outputs} of a text are the "
            f"{pooled} of the {outputs} of its windows."
        )
        if outputs == "vectors" and model.pooling is not None and model.pooling.normalize:
            rule += " Vectors are scaled to length 1 before and after that."
    return [f"{rule}{_pairs(model, own)}"]


def _pairs(model: ModelBundle, own: LongTexts) -> str:
    if model.architecture == "Bert" or model.texts_per_input == 1:
        return ""
    if own.mode == "head_tail":
        return " Of a pair, the longer text is shortened first."
    return (
        " Of a pair, the text with more tokens is read through windows, each with the other text, which is cut to half "
        "a row."
    )


def long_text_usage(model: ModelBundle) -> list[str]:
    """Returns the paragraph of `long_text_rule` and, for single texts, lines that follow it with transformers."""
    rule, own = long_text_rule(model), model.long_texts
    if not rule or own is None or model.texts_per_input == 2:
        return rule
    template = row_template(model.tokenizer)
    rows = _window_lines(template, own) if own.mode in WINDOW_MODES else _head_tail_lines(template, own)
    lines = ["import torch", "", 'ids = tokenizer("a text", add_special_tokens=False)["input_ids"]', *rows]
    outputs = _vector_lines(model, own) if model.architecture == "Bert" else _logit_lines(own)
    return ["## Long texts", *rule, "\n".join(["```python", *lines, *outputs, "```"])]


def _framed(template: RowTemplate, part: str) -> str:
    """Returns the expression of a row: the ids of the special tokens around a part of the text."""
    before, after = (", ".join(map(str, ids)) for ids in (template.prefix, template.suffix))
    return f"[{before}{', ' if before else ''}*{part}{', ' if after else ''}{after}]"


def _window_lines(template: RowTemplate, own: LongTexts) -> list[str]:
    room = template.room(own.max_length)
    return [
        f"last = max(len(ids) - {room}, 0)",
        f"starts = [*range(0, last, {min(own.stride, room)}), last]",
        f"rows = [{_framed(template, f'ids[start : start + {room}]')} for start in starts]",
    ]


def _head_tail_lines(template: RowTemplate, own: LongTexts) -> list[str]:
    room = template.room(own.max_length)
    head = head_length(room)
    kept = f"ids if len(ids) <= {room} else ids[:{head}] + ids[-{room - head}:]"
    return [f"rows = [{_framed(template, f'({kept})')}]"]


def _over_windows(own: LongTexts) -> str:
    return "amax(0)" if own.mode == "windows_max" else "mean(0)"


def _logit_lines(own: LongTexts) -> list[str]:
    logits = "torch.stack([model(torch.tensor([row])).logits[0] for row in rows])"
    return [f"logits = {logits}.{_over_windows(own)}"]


def _vector_lines(model: ModelBundle, own: LongTexts) -> list[str]:
    pooling = model.pooling
    if pooling is None or pooling.is_lexical or pooling.mode not in POOLED or pooling.dense:
        return []
    scale = "torch.nn.functional.normalize(VECTOR, dim=-1)" if pooling.normalize else "VECTOR"
    vectors = scale.replace("VECTOR", f"torch.stack([{POOLED[pooling.mode]} for hidden in states])")
    return [
        "states = [model(torch.tensor([row])).last_hidden_state[0] for row in rows]",
        f"vectors = {vectors}",
        f"embedding = {scale.replace('VECTOR', f'vectors.{_over_windows(own)}')}",
    ]
