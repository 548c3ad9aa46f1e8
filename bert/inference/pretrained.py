"""What `bert.load` returns: a model that reads texts and answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, get_args, overload

import jax
import jax.numpy as jnp
import numpy as np

from bert.config import Decoding, TaskDataConfig
from bert.data.encoding import row_template, tokenize
from bert.data.inputs import as_filled_texts, as_list, as_text_or_pair, check_count, shown
from bert.data.multi_text_rows import QueryDocumentRows, SourceTargetRows
from bert.data.rows import Rows, TokenRows
from bert.errors import UserError, on_one_line
from bert.inference.forward import BUCKETS, BatchedForward, GraphForward, check_finite
from bert.inference.language_model import ENCODER_DECODER
from bert.inference.scoring import TEMPLATE, best_label, entailment_labels, hypotheses
from bert.inference.searchable import LABELS_SHOWN, PromptName, SearchableModel
from bert.interchange.bundle import build_module
from bert.metrics import softmax
from bert.model.electra import extract_generator
from bert.model.pooling import Pooling
from bert.parallel.devices import require_no_fork
from bert.tasks.base import Outputs, Task
from bert.tasks.columns import ColumnFilesTask, labelled_examples
from bert.tasks.embedding import EmbeddingTask
from bert.tasks.question_answering import ANSWER_SETTINGS, SquadTask
from bert.tokenizer.hf_settings import NO_LIMIT
from bert.tokenizer.special_tokens import special_ids
from bert.tokenizer.vocabulary import embedding_rows, token_text

Text = str | tuple[str, str]
Params = dict[str, Any]


class EncodeOutput(NamedTuple):
    """What `Pretrained.encode` returns; T is the longest text's, in tokens.

    Attributes:
        last_hidden_state: [B, T, D] float32, zero at padding.
        pooled_output: [B, D] float32; None for a model without pooler.
        attention_mask: [B, T] int32, 1 for a token and 0 for padding.
        embeddings: [B, E] float32, the hidden states pooled as the model declares (`Pretrained.pooling`).
    """

    last_hidden_state: np.ndarray
    pooled_output: np.ndarray | None
    attention_mask: np.ndarray
    embeddings: np.ndarray


class MaskPrediction(NamedTuple):
    """One candidate for a [MASK]: the token, its probability, its id."""

    token: str
    probability: float
    token_id: int


@dataclass(frozen=True, kw_only=True, repr=False)
class Pretrained(SearchableModel):
    """A model with its vocabulary, ready to be asked.

    Attributes:
        task: the task it was fine-tuned for, or None.
        data: how the task's rows were made.
    """

    architecture: str = "BertForPreTraining"
    task: Task | None = None
    data: TaskDataConfig = field(default_factory=TaskDataConfig)

    def __repr__(self) -> str:
        """A few lines: source, architecture, sizes, parameters, vocabulary, task and labels."""
        sizes = self.config
        labels = self.labels
        more = f", ... ({len(labels)} labels)" if len(labels) > LABELS_SHOWN else ""
        lines = {
            "source": self.origin,
            "architecture": self.architecture,
            "encoder": f"{sizes.num_hidden_layers} layers, hidden size {sizes.hidden_size}, "
            f"{sizes.num_attention_heads} heads, feed-forward size {sizes.intermediate_size}, "
            f"up to {sizes.max_position_embeddings} tokens",
            "parameters": f"{sum(leaf.size for leaf in jax.tree.leaves(self.params)):,}",
            "vocabulary": f"{embedding_rows(self.tokenizer):,} tokens",
            "task": None if self.task is None else self.task.name,
            "labels": ", ".join(labels[:LABELS_SHOWN]) + more,
        }
        return "\n".join(["Pretrained", *(f"  {name}: {on_one_line(value)}" for name, value in lines.items() if value)])

    def warm_up(self, lengths: Iterable[int] | None = None, batch_sizes: Iterable[int] = (1,)) -> None:
        """Compiles `predict`, or without a task `embed` and `encode`, for the given shapes, so that no request waits.

        Lengths are rounded up to one of `BUCKETS`, numbers of inputs to a power of two; each pair compiles once.

        Args:
            lengths: tokens of the inputs, special ones included; None for every length that is read.
            batch_sizes: inputs of one call; those above 32 as they are passed as ``batch_size``.

        Raises:
            UserError: a number below 1, a model that writes texts, or a task of multiple choice, which compiles for
                each number of choices.
        """
        if self.architecture == "BertForMultipleChoice" and self.task is not None:
            raise UserError(f"{self.task.name} compiles for each number of choices: call predict with such questions")
        if self.architecture == ENCODER_DECODER:
            raise UserError(
                f"{self.source} writes texts, which compiles for each length of these: call predict instead"
            )
        limit = (self.pooling or Pooling()).max_length if self.task is None else self.data.max_length
        longest = min(limit or self.config.max_position_embeddings, self.config.max_position_embeddings)
        lengths, batch_sizes = ([*BUCKETS, longest] if lengths is None else list(lengths)), list(batch_sizes)
        for name, counts in (("lengths", lengths), ("batch_sizes", batch_sizes)):
            for count in counts:
                check_count(f"one of {name}", count)
        self.embed([]) if self.task is None else self.predict([])  # prepares the tokenizer
        for length in sorted({min(length, longest) for length in lengths}):
            for rows in batch_sizes:
                self._forward.warm_up(rows, length)

    def encode(self, texts: str | Sequence[Text], batch_size: int = 32) -> EncodeOutput:
        """Hidden states of texts, and of pairs of texts given as tuples; longer ones than the model's are cut.

        A string is a batch of one text (B = 1). A sentence-transformers folder may declare a shorter length, and that
        texts are lower-cased first. Of many texts, `embed` takes less memory and time.

        Raises:
            UserError: an input is not a text or a pair of texts, or ``batch_size`` is not at least 1.
        """
        features, pooling = self._features_to_pool(texts)
        longest = int(features.lengths.max(initial=0))
        hidden = np.zeros((len(features), longest, self.config.hidden_size), np.float32)
        pooled = np.zeros((len(features), self.config.hidden_size), np.float32)
        embeddings = np.zeros((len(features), self.embedding_size), np.float32)
        mask = (np.arange(longest) < features.lengths[:, None]).astype(np.int32)
        for rows, output in self._forward.encode(features, batch_size):
            states = output.last_hidden_state[: len(rows), :longest]
            token_mask = mask[rows, : states.shape[1]]
            hidden[rows, : states.shape[1]] = states * token_mask[:, :, None]
            embeddings[rows] = pooling(states, token_mask)
            if output.pooled_output is not None:
                pooled[rows] = output.pooled_output[: len(rows)]
        check_finite(range(len(features)), embeddings)
        return EncodeOutput(hidden, pooled if self._forward.has_pooler else None, mask, embeddings)

    def embed(self, texts: str | Sequence[Text], batch_size: int = 32, prompt: PromptName | None = None) -> np.ndarray:
        """The embeddings of `encode` alone, [B, E] float32, or [E] for a string.

        In memory are the hidden states of two batches at once. Many short texts share rows, in which each attends to
        itself, so that little of what is computed is padding.

        Args:
            texts: as of `encode`.
            batch_size: texts at once.
            prompt: query or document: texts begin with this prompt of the model, if it has one.

        Raises:
            UserError: as `encode`; or there is no such prompt.
        """
        if isinstance(texts, str):
            return self.embed([texts], batch_size, prompt)[0]
        texts, pooling = self._prompted(as_list(texts), prompt), self.pooling or Pooling()
        skipped = None
        if prompt is not None and not pooling.include_prompt:
            is_single = np.array([isinstance(text, str) for text in texts], bool)
            skipped = np.where(is_single, self._prompt_tokens(getattr(pooling, f"{prompt}_prompt")), 0)
        return self._forward.embed(*self._features_to_pool(texts), batch_size, skipped)

    def _prompt_tokens(self, prompt: str) -> int:
        """Tokens of a row in front of the text that follows a prompt, as sentence-transformers counts them."""
        if not prompt:
            return 0
        features, _ = self._features_to_pool([prompt])
        return len(features.ids) - bool(row_template(self.tokenizer, pair=False).suffix)

    def _prompted(self, texts: list[Any], prompt: PromptName | None) -> list[Any]:
        """Texts with a prompt in front; pairs stay as they are."""
        if prompt not in (None, *get_args(PromptName)):
            raise UserError(f"prompt is {prompt!r}: pass {' or '.join(get_args(PromptName))}, or None for none")
        start = "" if prompt is None else getattr(self.pooling or Pooling(), f"{prompt}_prompt")
        return [start + text if isinstance(text, str) else text for text in texts]

    def tokenize(self, texts: str | Sequence[Text], max_length: int | None = None) -> dict[str, np.ndarray]:
        """Rows as the model reads them, padded to the longest: arguments of `apply`, [B, T] int32 each.

        Args:
            texts: texts, or pairs of texts as tuples. A string is a batch of one text.
            max_length: tokens of a row at most; None for as many as the position table has.

        Raises:
            UserError: an input is not a text or a pair of texts, or ``max_length`` has no room for
                the special tokens.
        """
        if max_length is not None:
            check_count("max_length", max_length)
        rows = [as_text_or_pair(given, index) for index, given in enumerate(as_list(texts), 1)]
        features = self._features(rows, max_length)
        batch = features.batch(np.arange(len(rows)), int(features.lengths.max(initial=1)), len(rows))
        return {name: batch[name] for name in ("input_ids", "token_type_ids", "attention_mask")}

    @cached_property
    def module(self) -> Any:
        """The Flax module that `params` fills."""
        layers = self.num_feature_layers
        more = {} if layers is None else {"num_feature_layers": layers}
        return build_module(self).clone(dtype=jnp.dtype(self.dtype), **more)

    def apply(self, *inputs: Any, **named: Any) -> Any:
        """``module.apply`` of `params`: what the model computes of arrays, for instance of those of `tokenize`."""
        require_no_fork()
        return self.module.apply({"params": self._device_params}, *inputs, **named)

    def score(self, data: Any, *, stride: int | None = None, batch_size: int = 8) -> Any:
        """The task's scores of labelled rows; or, of a left-to-right language model, the log-probability of texts.

        Args:
            data: of a task on custom data the path of a labelled file, or rows in memory: dictionaries by column, a
                ``pandas.DataFrame`` or a ``datasets.Dataset``. Of a language model, texts: see `LanguageModel.score`.
            stride: of windows over texts.
            batch_size: rows or windows at once.

        Returns:
            A dictionary of the task's metrics; or a `TextScore` for each text.

        Raises:
            UserError: the task reads its own files, a row lacks a column or has an unknown label; or as
                `LanguageModel.score`.
        """
        if self.task is None:
            return super().score(data, stride=stride, batch_size=batch_size)
        if not isinstance(self.task, ColumnFilesTask):
            raise UserError(
                f"{self.task.name} reads its own files, whose scores are in results.json: use a model of a custom task"
            )
        examples = labelled_examples(self.task, data)
        features = self.task.features(self.tokenizer, examples, self.data)
        return self.task.score(self.task.predict(self.outputs(features, batch_size), features, examples), examples)

    def fill_mask(self, text: Text, top_k: int = 5) -> list[list[MaskPrediction]]:
        """The ``top_k`` most likely tokens for each [MASK] of a text, masks in order, most likely first.

        A run with data.prediction replaced answers by its generator.

        Args:
            text: a string, or a tuple of two for a pair.
            top_k: proposals for each [MASK].

        Raises:
            UserError: no [MASK] in the text, one beyond the length that the model reads, or a model without the MLM
                head (a fine-tuned one).
        """
        check_count("top_k", top_k)
        if "generator" in self.params:
            return self.generator.fill_mask(text, top_k)
        if self.config.causal:
            raise UserError(f"{self.source} reads left to right and has no masked-LM head: use generate")
        if self.architecture == ENCODER_DECODER:
            raise UserError(f"{self.source} writes texts and has no masked-LM head: use generate")
        if "predictions" not in self.params:
            raise UserError(f"{self.source} has no masked-LM head to fill masks with: load a pretraining run")
        features, positions = self._encode_masked(text)
        logits = self._forward.predict_masks(features)
        predictions = []
        for position in positions:
            probabilities = softmax(logits[0, position, : embedding_rows(self.tokenizer)])
            best = np.argsort(-probabilities, kind="stable")[:top_k]
            predictions.append(
                [MaskPrediction(token_text(self.tokenizer, int(i)), float(probabilities[i]), int(i)) for i in best]
            )
        return predictions

    @cached_property
    def generator(self) -> Pretrained:
        """The generator of a run with data.prediction replaced, as a masked language model.

        Raises:
            UserError: the model has none.
        """
        if "generator" not in self.params:
            raise UserError(f"{self.source} has no generator: use a pretraining run with data.prediction replaced")
        config, params = extract_generator(self.config, self.params)
        return dataclasses.replace(self, config=config, params=params, architecture="BertForMaskedLM")

    @overload
    def predict(
        self,
        inputs: str,
        batch_size: int = 32,
        *,
        null_score_diff_threshold: float | None = None,
        doc_stride: int | None = None,
        max_answer_length: int | None = None,
        n_best: int | None = None,
    ) -> Any: ...

    @overload
    def predict(
        self,
        inputs: Sequence[Any],
        batch_size: int = 32,
        *,
        null_score_diff_threshold: float | None = None,
        doc_stride: int | None = None,
        max_answer_length: int | None = None,
        n_best: int | None = None,
    ) -> list[Any]: ...

    def predict(
        self,
        inputs: str | Sequence[Any],
        batch_size: int = 32,
        *,
        null_score_diff_threshold: float | None = None,
        doc_stride: int | None = None,
        max_answer_length: int | None = None,
        n_best: int | None = None,
    ) -> Any:
        """The fine-tuned task's answers, one per input in their order: named tuples, as the task has them.

        Rows are made as those of dev were: an input longer than ``data.max_length`` is cut, by tasks with windows read
        through several. A published model, whose ``max_length`` is not known, cuts where its position table ends.

        A model that answers questions and does not declare a threshold always gives an answer, as the pipeline of
        transformers does by default. The probability counts no answer as one of the candidates: it is near 0 if the
        model finds that there is none.

        Args:
            inputs: a list of texts, or of what else the task takes: tuples of a pair of texts, of a question with its
                context or with its choices. A string is one text, and its answer is not in a list.
            batch_size: rows at once.
            null_score_diff_threshold: of a model that answers questions, as the three arguments below: the answer is
                empty if the score of no answer exceeds the best answer's by more than this; 0 gives the likelier one.
            doc_stride: tokens between the starts of the windows through which a long context is read.
            max_answer_length: longest answer in tokens.
            n_best: each answer becomes a list of at most this number of different ones, the most likely first. None
                gives the answer without a list.

        Raises:
            UserError: the model was not fine-tuned for a task that is answered here; an input is not what the task
                takes; a setting is not the task's or cannot work; or ``batch_size`` is not at least 1.
        """
        values = (null_score_diff_threshold, doc_stride, max_answer_length, n_best)
        settings: dict[str, Any] = dict(zip(ANSWER_SETTINGS, values, strict=True))
        if isinstance(inputs, str):
            return self.predict([inputs], batch_size, **settings)[0]
        task = self.with_answer_settings(settings)
        data = self.data if doc_stride is None else dataclasses.replace(self.data, doc_stride=doc_stride)
        return self.answers(task, as_list(inputs), batch_size, data)

    def with_answer_settings(self, settings: Mapping[str, Any]) -> Task:
        """The task with settings of `predict`. Raises UserError for one that is not the task's, or cannot work."""
        task = self.require_task()
        if isinstance(task, SquadTask):
            return task.with_answer_settings(settings)
        if given := next((name for name, value in settings.items() if value is not None), None):
            raise UserError(f"{given} is for models that answer questions, and {self.source} does not: remove it")
        return task

    def answers(
        self, task: Task, inputs: Sequence[Any], batch_size: int, data: TaskDataConfig | None = None
    ) -> list[Any]:
        """Returns the result of `predict` for a list and a task that reads the model's head.

        Args:
            task: the task.
            inputs: as of `predict`.
            batch_size: rows at once.
            data: how rows are made; None for `data`.
        """
        examples = task.examples_from_inputs(inputs)
        features = task.features(self.tokenizer, examples, data or self.data)
        predictions = task.predict(self.outputs(features, batch_size), features, examples)
        answers = task.format_predictions(predictions, examples)
        if len(answers) != len(inputs):
            raise UserError(f"{task.name} gave {len(answers)} answers to {len(inputs)} inputs: fix that task's methods")
        return answers

    def zero_shot(
        self,
        text: str | Sequence[str],
        labels: Sequence[str],
        template: str = TEMPLATE,
        multi_label: bool = False,
        batch_size: int = 32,
    ) -> Any:
        """The label that fits a text, of labels that a model of entailment (MNLI) was not trained on.

        Args:
            text: a text, whose answer is a `Label`, or several, whose answers are a list. Long ones are cut.
            labels: to choose from.
            template: a sentence about the text, with {} for the label. The model says whether the text entails it.
            multi_label: whether any number of labels may fit: each has a probability of its own.
            batch_size: pairs of a text and a label at once.

        Raises:
            UserError: the model has no labels entailment and contradiction; or a text, a label or the template is bad.
        """
        if isinstance(text, str):
            return self.zero_shot([text], labels, template, multi_label, batch_size)[0]
        if labels is not None and not isinstance(labels, str):
            labels = as_list(labels)
        if self.task is None:
            raise UserError(
                f"{self.source} is no model of entailment, by which zero_shot chooses labels: use a model fine-tuned "
                "on MNLI or its like"
            )
        task = self.task
        entailed, opposite = entailment_labels(task, self.source)
        sentences = hypotheses(labels, template)
        pairs = [(given, sentence) for given in as_filled_texts("text", text) for sentence in sentences]
        features = task.features(self.tokenizer, task.examples_from_inputs(pairs), self.data)
        logits = np.array(self.outputs(features, batch_size)).reshape(-1, len(sentences), task.num_labels)
        return [best_label(of_text, labels, entailed, opposite, multi_label) for of_text in logits]

    def require_task(self) -> Task:
        """The task that `predict` answers.

        Raises:
            UserError: there is none.
        """
        if self.task is not None:
            return self.task
        if self.problem_type is not None:
            raise UserError(
                f"{self.source} is fine-tuned for {self.problem_type}, which bert predict does not answer: "
                "name another model"
            )
        raise UserError(
            f"{self.source} is not fine-tuned for a task: fine-tune it first with bert finetune --init {self.source}"
        )

    def outputs(self, features: Rows, batch_size: int = 32) -> Outputs:
        """What the task's head says of each row, in the order of the rows: see `bert.tasks.base.Outputs`."""
        if isinstance(features, SourceTargetRows):
            found = self._sequence_generator.decode(
                features.sources, self.decoding or Decoding(), batch_size, range(len(features))
            )
            return [np.array(best.token_ids, np.int32) for best, *_ in found]
        if isinstance(features, QueryDocumentRows):
            return self._embed_groups(features, batch_size)
        if isinstance(self.task, EmbeddingTask) and isinstance(features, TokenRows):
            return list(self._forward.embed(features, self.pooling or Pooling(), batch_size))
        return self._forward.apply_head(features, batch_size)

    def _embed_groups(self, features: QueryDocumentRows, batch_size: int) -> Outputs:
        """The embeddings of each row's query and documents side by side, 0 for a document that it lacks."""
        pooling, documents = self.pooling or Pooling(), features.documents
        queries, flat = (
            self._forward.embed(rows, pooling, batch_size) for rows in (features.queries, documents.sequences)
        )
        texts = np.zeros((len(features), 1 + documents.choices.max(), self.embedding_size), np.float32)
        texts[:, 0] = queries
        texts[:, 1:][np.arange(texts.shape[1] - 1) < documents.choices[:, None]] = flat
        return list(texts.reshape(len(texts), -1))

    def _features_to_pool(self, inputs: str | Sequence[Text]) -> tuple[TokenRows, Pooling]:
        texts = [as_text_or_pair(given, index) for index, given in enumerate(as_list(inputs), 1)]
        pooling = self.pooling or Pooling()
        if pooling.lowercase:
            texts = [_lower(text) for text in texts]
        return self._features(texts, pooling.max_length), pooling

    def _encode_masked(self, text: Any) -> tuple[TokenRows, np.ndarray]:
        """A text as one row, and the positions of its masks, at least one. Raises UserError where one is cut off."""
        if isinstance(text, list):
            raise UserError(f"the text is {shown(text)}: pass one string, or a tuple of two for a pair")
        given = as_text_or_pair(text, 1)
        features = self._features([given])
        mask = special_ids(self.tokenizer).mask
        positions = np.flatnonzero(features.ids == mask)
        longest = self.config.max_position_embeddings
        uncut = tokenize(self.tokenizer, [given], NO_LIMIT) if len(features.ids) == longest else features
        name = self.tokenizer.id_to_token(mask)
        if not (uncut.ids == mask).any():
            raise UserError(f"no {name} in {shown(text)}: put one where a word is to be guessed")
        if cut := np.count_nonzero(uncut.ids == mask) - len(positions):
            raise UserError(
                f"{cut} {name} in {shown(text)} beyond the {longest} tokens that {self.source} reads: "
                "pass a shorter text"
            )
        return features, positions

    def _features(self, texts: Sequence[Text], max_length: int | None = None) -> TokenRows:
        longest = self.config.max_position_embeddings
        return tokenize(self.tokenizer, list(texts), min(longest, max_length or longest))

    @cached_property
    def _forward(self) -> BatchedForward:
        dtype = jnp.dtype(self.dtype)
        task = None if isinstance(self.task, EmbeddingTask) else self.task  # which has no head
        parts = (task, self.num_feature_layers, dtype)
        if self.graph is None:
            return BatchedForward(self.config, self._device_params, *parts)
        return GraphForward(self.graph, self.config, self.params, *parts)


def _lower(text: Text) -> Text:
    return text.lower() if isinstance(text, str) else (text[0].lower(), text[1].lower())
