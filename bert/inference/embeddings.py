"""Embeddings of texts: prompts, tasks with adapters, separate models for queries, and an embedding per token.

The functions are methods of `bert.Pretrained`, except `lengths_to_embed`, which the server calls.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast, get_args

import numpy as np

from bert.config.model import LongTextMode
from bert.data.encoding import row_template, tokenize
from bert.data.inputs import Text, as_list, as_text_or_pair
from bert.data.late_interaction import ScoredRows, tokenize_scored
from bert.data.long_texts import UNCUT, LongTexts, encode_texts, with_long_texts
from bert.errors import UserError
from bert.inference.forward import EncodeOutput
from bert.interchange.task_adapters import TASK_OF_PROMPT, find_task
from bert.model.late_interaction import Role


def encode(model: Any, texts: str | Sequence[Text], batch_size: int = 32) -> EncodeOutput:
    """Returns the hidden states of texts, or of pairs of texts as tuples. Texts that are too long are truncated.

    A string is a batch of one text (B = 1). A sentence-transformers folder may configure a shorter maximum length
    or lower-casing. No prompt is prepended. For many texts, `embed` is faster and needs less memory.

    Raises:
        UserError: an input is not a text or a pair of texts, or ``batch_size`` is below 1.
    """
    rows, pooling = _texts_to_pool(model, texts), model.pooling_or_default
    if pooling.has_token_vectors:
        return model._forward.encode_all(_rows_of_texts(model, rows), pooling, batch_size)
    return model._forward.encode_all(model._features(rows, pooling.max_length), pooling, batch_size)


def embed(
    model: Any,
    texts: str | Sequence[Text],
    batch_size: int = 32,
    prompt: Role | None = None,
    *,
    task: str | None = None,
    long_texts: LongTextMode | None = None,
) -> Any:
    """Returns the embeddings of texts, an array [B, E] float32, or [E] for a string.

    A model of late interaction has an embedding per token. It returns a list of arrays [T_i, E], one per text.

    At most two batches of hidden states are in memory at a time. Many short texts are packed into shared rows, in
    which each text attends only to itself, to avoid padding.

    A folder with a Router has a separate model for queries, which embeds the texts with the prompt ``query``.

    Args:
        texts: texts, or pairs of texts as tuples.
        batch_size: number of texts per batch.
        prompt: ``query`` or ``document`` to prepend the model's prompt of that name, if it has one; None for its
            default prompt, if it declares one, and its ``default_route``. A model with adapters uses its adapters
            for ``retrieval.query`` and ``retrieval.passage``.
        task: name of a task, whose adapter and prompt are used (see `for_task`); None for the model's own weights.
        long_texts: how texts that are too long are read, as ``data.long_texts``; None: as in training, or cut for a
            model that does not declare it.

    Raises:
        UserError: see `encode`; also if ``prompt``, ``task`` or ``long_texts`` has another value, or if both
            ``prompt`` and ``task`` are given.
    """
    if isinstance(texts, str):
        return model.embed([texts], batch_size, prompt, task=task, long_texts=long_texts)[0]
    if prompt not in (None, *get_args(Role)):
        raise UserError(f"prompt is {prompt!r}: pass {' or '.join(get_args(Role))}, or None for none")
    if task is not None and prompt is not None:
        raise UserError(f"prompt is {prompt!r}, but the task {task} has its own prompt: remove one of them")
    if (task := _task_of(model, prompt, task)) is not None:
        return model.for_task(task).embed(texts, batch_size, long_texts=long_texts)
    if (of_role := model.for_role(prompt)) is not model:
        return of_role.embed(texts, batch_size, prompt, long_texts=long_texts)
    pooling, skipped, start = model.pooling_or_default, None, _prompt_of(model, prompt)
    rows = _texts_to_pool(model, texts, start)
    if start and not pooling.include_prompt:
        # Like sentence-transformers, count the tokens of the prompt without the special token at its end.
        prefix_ids = model._features(_texts_to_pool(model, [start]), pooling.max_length).ids
        skipped = np.full(len(rows), len(prefix_ids) - bool(row_template(model.tokenizer, pair=False).suffix))
    data = with_long_texts(model.data, long_texts)
    if pooling.has_token_vectors:
        _require_whole_texts(model, data.long_texts)
        return model._forward.embed(_rows_of_texts(model, rows, prompt), pooling, batch_size)
    settings = LongTexts.from_config(data)._replace(max_length=model.longest_text)
    return model._forward.embed(encode_texts(model.tokenizer, rows, settings), pooling, batch_size, skipped)


def for_task(model: Any, task: str) -> Any:
    """Returns the model with the adapter of a task added to its weights, and the task's prompt as default prompt.

    The model of the last task is kept, with its weights on the device.

    Args:
        task: one of ``task_adapters``, such as ``retrieval.query`` of Jina embeddings v3.

    Raises:
        UserError: the model has no such adapter.
    """
    name, kept = find_task(model.task_adapters, task, model.source), model._of_last_task
    if (known := kept.get(name)) is not None:
        return known
    kept.clear()  # frees its weights before others are made
    on_device, adapter = model.graph is None and model.engine == "jax", model.task_adapters[name]
    if on_device:
        import jax

        params = adapter.merge(model.params, model.config, jax.device_put)
    else:
        params = adapter.merge(model.params, model.config)
    pooling = dataclasses.replace(model.pooling_or_default, default_prompt=adapter.prompt)
    adapted = model.replace(params=params, pooling=pooling, task_adapters={})
    if on_device:
        adapted.__dict__["_compiled"] = model._programs.with_params(adapted._device_params)
    kept[name] = adapted
    return adapted


def lengths_to_embed(
    model: Any, texts: Sequence[Text], prompt: Role | None = None, task: str | None = None
) -> tuple[np.ndarray, int]:
    """Returns the numbers of tokens of texts, with the prompt and special tokens, and the number that `embed` reads."""
    if (task := _task_of(model, prompt, task)) is not None:
        start = model.task_adapters[find_task(model.task_adapters, task, model.source)].prompt
    else:
        model = model.for_role(prompt)
        start = _prompt_of(model, prompt)
    return tokenize(model.tokenizer, _texts_to_pool(model, texts, start), UNCUT).lengths, _longest_text(model, prompt)


def _task_of(model: Any, prompt: Role | None, task: str | None) -> str | None:
    """Returns the task, or the one for texts with the prompt if the model has an adapter for it."""
    of_prompt = TASK_OF_PROMPT.get(prompt or "")
    return of_prompt if task is None and of_prompt in model.task_adapters else task


def _prompt_of(model: Any, role: Role | None) -> str:
    return cast(str, getattr(model.pooling_or_default, f"{role or 'default'}_prompt"))


def _longest_text(model: Any, role: Role | None) -> int:
    return cast(int, model.pooling_or_default.interaction.max_length(role) or model.longest_text)


def _rows_of_texts(model: Any, texts: Sequence[Text], role: Role | None = None) -> ScoredRows:
    """Encodes texts as a model (`bert.Pretrained`) reads queries, documents, or texts without a role."""
    return tokenize_scored(
        model.tokenizer, texts, _longest_text(model, role), model.pooling_or_default.interaction, role
    )


def _require_whole_texts(model: Any, long_texts: str) -> None:
    """Raises UserError if texts with an embedding per token would be read in another way than cut."""
    if long_texts != "cut":
        raise UserError(
            f"long_texts is {long_texts}, but {model.source} has an embedding per token, whose texts are cut: leave it "
            "out, and split long texts"
        )


def _texts_to_pool(model: Any, inputs: str | Sequence[Text], prompt: str = "") -> list[Text]:
    """Returns the texts as the model of embeddings reads them, each after the prompt."""
    texts = [as_text_or_pair(text, index) for index, text in enumerate(as_list(inputs), 1)]
    if prompt:
        texts = [prompt + text if isinstance(text, str) else (prompt + text[0], text[1]) for text in texts]
    if model.pooling_or_default.lowercase:
        texts = [text.lower() if isinstance(text, str) else (text[0].lower(), text[1].lower()) for text in texts]
    return texts
