"""`Pretrained`, the class of the models that `bert.load` returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from bert.config import Decoding, TaskDataConfig
from bert.config.model import LongTextMode
from bert.data.encoding import tokenize
from bert.data.inputs import Text, as_list, as_text_or_pair, check_count
from bert.data.long_texts import CutTexts, with_long_texts
from bert.data.rows import QueryDocumentRows, Rows, SourceTargetRows, TokenRows
from bert.data.windows import WindowedRows
from bert.errors import LOGGER, UserError, first_line, on_one_line
from bert.inference import embeddings, evaluation, export, mining, scoring
from bert.inference import generate as generation
from bert.inference import search as retrieval
from bert.inference.forward import BUCKETS, BatchedForward
from bert.inference.table import TableForward
from bert.interchange.bundle import ModelBundle
from bert.model.names import ENCODER_DECODER
from bert.model.parameters import Params, num_parameters
from bert.parallel.devices import require_no_fork
from bert.runs.metrics_log import to_jsonable
from bert.tasks.base import Outputs, Task
from bert.tasks.question_answering import ANSWER_SETTINGS
from bert.tokenizer.vocabulary import embedding_rows

if TYPE_CHECKING:
    from bert.inference.compiled import CompiledForward
    from bert.inference.generators import SequenceGenerator, TextGenerator
    from bert.inference.text_scorer import TextScorer

LABELS_SHOWN = 8
"""Maximum number of labels in the summary of a model."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Pretrained(ModelBundle):
    """A model with its tokenizer and task, ready for inference.

    Attributes:
        task: the task for which the model was fine-tuned, or None.
        data: configuration of the task's rows.
        num_feature_layers: number of last layers whose outputs the head of a frozen encoder reads; None for other
            heads.
        engine: what runs the encoder and the task head: ``jax``, or ``onnxruntime`` (see `bert.load`).
        graph: file of an ONNX graph with the encoder or the head, which ONNX Runtime runs; None for the model's own.
    """

    architecture: str = "BertForPreTraining"
    query_model: Pretrained | None = None
    task: Task | None = None
    data: TaskDataConfig = field(default_factory=TaskDataConfig)
    num_feature_layers: int | None = None
    engine: str = "jax"
    graph: Path | None = None

    def __repr__(self) -> str:
        """Returns a summary of a few lines: source, architecture, sizes, parameters, vocabulary, task and labels."""
        labels = self.labels
        more = f", ... ({len(labels)} labels)" if len(labels) > LABELS_SHOWN else ""
        lines = {
            "source": self.origin,
            "architecture": self.architecture,
            "encoder": self.sizes,
            "queries": None if self.query_model is None else self.query_model.sizes,
            "parameters": f"{num_parameters(self.params):,}",
            "vocabulary": f"{embedding_rows(self.tokenizer):,} tokens",
            "task": None if self.task is None else self.task.name,
            "labels": ", ".join(labels[:LABELS_SHOWN]) + more,
            "adapters": ", ".join(self.task_adapters),
        }
        return "\n".join(["Pretrained", *(f"  {name}: {on_one_line(value)}" for name, value in lines.items() if value)])

    # Parameters and arrays.

    @cached_property
    def module(self) -> Any:
        """The Flax module for `params`."""
        from bert.interchange.modules import build_module

        layers = self.num_feature_layers
        more = {} if layers is None else {"num_feature_layers": layers}
        return build_module(self).clone(dtype=self._jax_dtype, **more)

    def apply(self, *inputs: Any, **named: Any) -> Any:
        """Calls ``module.apply`` with `params`. The inputs are arrays, for example the result of `tokenize`."""
        require_no_fork()
        params = self._device_params["bert"] if self.architecture == "Bert" else self._device_params
        return self.module.apply({"params": params}, *inputs, **named)

    def tokenize(self, texts: str | Sequence[Text], max_length: int | None = None) -> dict[str, np.ndarray]:
        """Returns rows padded to the longest one, as arguments for `apply`: [B, T] int32 each.

        Args:
            texts: texts, or pairs of texts as tuples. A string is a batch of one text.
            max_length: maximum number of tokens per row; None for the model's number of positions.

        Raises:
            UserError: an input is not a text or a pair of texts, or ``max_length`` is too small for the special tokens.
        """
        if max_length is not None:
            check_count("max_length", max_length)
        rows = [as_text_or_pair(text, index) for index, text in enumerate(as_list(texts), 1)]
        features = self._features(rows, max_length)
        batch = features.batch(np.arange(len(rows)), int(features.lengths.max(initial=1)), len(rows))
        return {name: batch[name] for name in ("input_ids", "token_type_ids", "attention_mask")}

    def outputs(self, features: Rows, batch_size: int = 32) -> Outputs:
        """Returns the outputs of the task head, one array per row (see `bert.tasks.base.Outputs`)."""
        if isinstance(features, SourceTargetRows):
            decoding = self.decoding or Decoding()
            results = self._sequence_generator.decode(features.sources, decoding, batch_size, range(len(features)))
            return [np.array(best.token_ids, np.int32) for best, *_ in results]
        if isinstance(features, QueryDocumentRows) and self.query_model is not None:
            sides = ((self.query_model, features.queries), (self, features.documents.sequences))
            return features.join(*(model.outputs(rows, batch_size) for model, rows in sides))
        if isinstance(features, QueryDocumentRows):
            return self._forward.embed_groups(features, self.pooling_or_default, batch_size)
        if isinstance(features, TokenRows | WindowedRows) and (self.task is None or "embed" in self.task.calls):
            return list(self._forward.embed(features, self.pooling_or_default, batch_size))
        return self._forward.apply_head(features, batch_size)

    def warm_up(self, lengths: Iterable[int] | None = None, batch_sizes: Iterable[int] = (1,)) -> None:
        """Compiles `predict` (`embed` and `encode` without a task) for the given shapes, so that no request waits.

        Lengths are rounded up to one of `BUCKETS`, and numbers of inputs to a power of two. Each pair is compiled once.

        Args:
            lengths: numbers of tokens, including special tokens; None for all buckets up to the model's maximum.
            batch_sizes: numbers of inputs per call. Values above 32 apply to calls with that ``batch_size``.

        Raises:
            UserError: a number is below 1, or the model is an encoder-decoder or for multiple choice. Those compile for
                each target length or number of choices.
        """
        if self.architecture == "BertForMultipleChoice" and self.task is not None:
            raise UserError(f"{self.task.name} compiles for each number of choices: call predict with such questions")
        if self.architecture == ENCODER_DECODER:
            raise UserError(f"{self.source} compiles for each length of the generated texts: call predict instead")
        limit = self.pooling_or_default.max_length if self.task is None else self.data.max_length
        max_length = min(limit or self.config.max_position_embeddings, self.config.max_position_embeddings)
        lengths, batch_sizes = ([*BUCKETS, max_length] if lengths is None else list(lengths)), list(batch_sizes)
        for name, counts in (("lengths", lengths), ("batch_sizes", batch_sizes)):
            for count in counts:
                check_count(f"one of {name}", count)
        self.embed([], prompt="document") if self.task is None else self.predict([])  # prepares the tokenizer
        for length in sorted({min(length, max_length) for length in lengths}):
            for rows in batch_sizes:
                self._forward.warm_up(rows, length)
        if self.query_model is not None:
            self.query_model.warm_up(lengths, batch_sizes)

    # Embeddings and search.

    encode = embeddings.encode
    embed = embeddings.embed
    for_task = embeddings.for_task

    @cached_property
    def _of_last_task(self) -> dict[str, Pretrained]:
        """The last result of `for_task`, by its task."""
        return {}

    similarity = retrieval.similarity
    search = retrieval.search
    rank = retrieval.rank
    require_pair_scores = retrieval.require_pair_scores
    mine_negatives = mining.mine_negatives

    # The fine-tuned task.

    def predict(
        self,
        inputs: str | Mapping[str, Any] | Sequence[Any],
        batch_size: int = 32,
        *,
        null_score_diff_threshold: float | None = None,
        doc_stride: int | None = None,
        max_answer_length: int | None = None,
        n_best: int | None = None,
        min_confidence: float | None = None,
        long_texts: LongTextMode | None = None,
    ) -> Any:
        """Returns one answer per input, in order, as a named tuple of the task.

        Rows are built as in training: inputs longer than ``data.max_length`` are truncated, or split into windows if
        the task supports it. A published model without a known ``max_length`` uses all its positions.

        A question answering model without a threshold always returns an answer, like the transformers pipeline. Its
        probability includes "no answer" as a candidate, so it is near 0 if there is no answer.

        Args:
            inputs: texts, or the inputs of the task: pairs of texts, of a question and its context, or of a question
                and its choices. Any of them may be a dictionary with the fields of a row. A string or a dictionary is
                one input, whose answer is returned without a list.
            batch_size: number of rows per batch.
            null_score_diff_threshold: for question answering, like the arguments below. The answer is empty if the
                score of "no answer" exceeds the best answer's score by more than this; 0 returns the likelier one.
            doc_stride: number of tokens between the starts of the windows of a long context.
            max_answer_length: maximum number of tokens of an answer.
            n_best: return a list of up to this many different answers, most likely first.
            min_confidence: for classification, abstain from inputs whose most likely label has a lower probability. The
                label of the answer is then None.
            long_texts: for classification and regression, how texts that are too long are read: cut, head_tail or
                windows, as ``data.long_texts``; None: as in training, or cut for a model that does not declare it.

        Raises:
            UserError: the model has no task that supports prediction, an input does not fit the task, or a setting is
                invalid or belongs to another task.
        """
        values = (null_score_diff_threshold, doc_stride, max_answer_length, n_best, min_confidence)
        settings: dict[str, Any] = dict(zip((*ANSWER_SETTINGS, "min_confidence"), values, strict=True))
        if isinstance(inputs, str | Mapping):
            return self.predict([inputs], batch_size, long_texts=long_texts, **settings)[0]
        task = self.with_answer_settings(settings)
        inputs = [_without_names(each, index, task) for index, each in enumerate(as_list(inputs), 1)]
        data = self.data if doc_stride is None else dataclasses.replace(self.data, doc_stride=doc_stride)
        data = with_long_texts(data, long_texts, task)
        answers = self.answers(task, inputs, batch_size, data, self._cut_texts)
        self._cut_texts.warn(LOGGER.warning)
        return answers

    @cached_property
    def _cut_texts(self) -> CutTexts:
        """The texts that `predict` has cut."""
        return CutTexts()

    def with_answer_settings(self, settings: Mapping[str, Any]) -> Task:
        """Returns the task with the given settings of `predict`. Raises UserError for invalid settings."""
        return self.require_task().with_answer_settings(settings)

    def answers(
        self,
        task: Task,
        inputs: Sequence[Any],
        batch_size: int,
        data: TaskDataConfig | None = None,
        cut: CutTexts | None = None,
    ) -> list[Any]:
        """Returns the answers of `predict` for a task that reads the model's head.

        Args:
            data: replaces `data`.
            cut: counts the texts that are cut, for tasks that read ``data.long_texts``.
        """
        examples = task.examples_from_inputs(inputs)
        features = task.features(self.tokenizer, examples, data or self.data)
        if cut is not None and "long_texts" in task.data_keys:
            cut.add(self.tokenizer, cast(Any, examples).texts, features, data or self.data)
        predictions = task.predict(self.outputs(features, batch_size), features, examples)
        answers = task.format_predictions(predictions, examples)
        if len(answers) != len(inputs):
            raise UserError(
                f"{task.name} returned {len(answers)} answers for {len(inputs)} inputs: correct its methods"
            )
        return answers

    def require_task(self) -> Task:
        """Returns the task that `predict` uses. Raises UserError if there is none."""
        if self.task is not None:
            return self.task
        if self.problem_type is not None:
            raise UserError(
                f"{self.source} is fine-tuned for {self.problem_type}, which is not supported: use another model"
            )
        raise UserError(
            f"{self.source} is not fine-tuned for a task: fine-tune it first with bert finetune --init {self.source}"
        )

    # Language modelling and generation.

    def score(self, data: Any, *, stride: int | None = None, batch_size: int = 8) -> Any:
        """Returns the task's metrics on labelled rows or, for a causal language model, a `TextScore` per text.

        Args:
            data: for a fine-tuned model, the data of `evaluate`, which also returns intervals. For a language model,
                texts. A string is one text, whose score is returned without a list. Each token is predicted once, the
                first one after the end token.
            stride: for a language model, the number of tokens between the starts of the windows of long texts. A
                smaller stride gives more context and takes longer. None: half of the positions, or all of them with
                ``model.memory_length``.
            batch_size: number of rows or windows per batch.

        Raises:
            UserError: the model is neither fine-tuned nor a language model, a row is invalid (see `evaluate`), an input
                is not a text, or ``stride`` is not between 1 and the number of positions.
        """
        if self.task is None:
            return self.score_texts(data, stride=stride, batch_size=batch_size)
        labelled = evaluation.labelled_data(self, data)
        predictions = evaluation.predictions_of(self, labelled, lambda _, rows: self.outputs(rows, batch_size))
        return labelled.scorer.score(predictions, labelled.examples)

    evaluate = evaluation.evaluate
    score_texts = scoring.score_texts
    fill_mask = scoring.fill_mask
    zero_shot = scoring.zero_shot

    @cached_property
    def generator(self) -> Pretrained:
        """The generator of a run with replaced token detection, as a masked language model.

        Raises:
            UserError: the model has no generator.
        """
        if "generator" not in self.params:
            raise UserError(f"{self.source} has no generator: use a pretraining run with training.objective rtd")
        from bert.model.electra import extract_generator

        config, params = extract_generator(self.config, self.params)
        return dataclasses.replace(self, config=config, params=params, architecture="BertForMaskedLM")

    generate = generation.generate
    complete_decoding = generation.complete_decoding

    def require_generation(self) -> None:
        """Raises UserError if the model is neither a causal language model nor an encoder-decoder."""
        if self.architecture != ENCODER_DECODER:
            self.require_language_model()

    def require_language_model(self) -> None:
        """Raises UserError if the model is not a causal language model."""
        if self.architecture != "BertForCausalLM":
            raise UserError(
                f"{self.source} is not a left-to-right language model ({self.architecture}): use a run with "
                "training.objective clm, or a GPT-2 model"
            )

    # Export.

    save = export.save
    push_to_hub = export.push_to_hub

    # Compiled functions, built on first use. JAX is imported here, because the engine onnxruntime does not need it.

    @cached_property
    def _device_params(self) -> Params:
        from bert.inference.compiled import put_params

        require_no_fork()
        return put_params(self.params, self._jax_dtype)

    @property
    def _jax_dtype(self) -> Any:
        """Type of the computation in JAX, which also serves what a graph of 8 bits lacks."""
        import jax.numpy as jnp

        return jnp.dtype("float32" if self.dtype == "int8" else self.dtype)

    @cached_property
    def _forward(self) -> BatchedForward:
        if self.config.is_static:
            return TableForward(self.config, self.params["bert"]["embeddings"]["word"]["embedding"])
        if self.graph is None and self.engine == "jax":
            return self._compiled
        from bert.inference.onnx_engine import GraphForward, cached_graph

        graph = self.graph
        graph_of = partial(cached_graph, self) if graph is None else lambda architecture: graph
        return GraphForward(graph_of, self.config, self._head_task)

    @cached_property
    def _compiled(self) -> CompiledForward:
        return self._programs.with_params(self._device_params)

    @cached_property
    def _programs(self) -> CompiledForward:
        """The compiled functions, which the models of all tasks share."""
        from bert.inference.compiled import CompiledForward

        parts = (self._head_task, self.num_feature_layers, self._jax_dtype)
        return CompiledForward(self.config, self.params, *parts)

    @property
    def _head_task(self) -> Task | None:
        """The task whose head the model has; embeddings have none."""
        return None if self.task is None or "embed" in self.task.calls else self.task

    @cached_property
    def _text_generator(self) -> TextGenerator | SequenceGenerator:
        from bert.inference.generators import TextGenerator

        if self.architecture == ENCODER_DECODER:
            return self._sequence_generator
        arguments = (self.config, self._device_params, self.tokenizer, self.source, self._jax_dtype)
        return TextGenerator(*arguments, self.end_ids)

    @cached_property
    def _sequence_generator(self) -> SequenceGenerator:
        from bert.inference.generators import SequenceGenerator

        tokenizers = (self.tokenizer, self.target_tokenizer or self.tokenizer)
        arguments = (self.config, self._device_params, tokenizers, self.source, self._jax_dtype)
        return SequenceGenerator(*arguments)

    @cached_property
    def _text_scorer(self) -> TextScorer:
        from bert.inference.text_scorer import TextScorer

        return TextScorer(self.config, self._device_params, self.tokenizer, self._jax_dtype)

    def _features(self, texts: Sequence[Text], max_length: int | None = None) -> TokenRows:
        """Encodes texts as rows of at most ``max_length`` tokens, or of the model's number of positions."""
        positions = self.config.max_position_embeddings
        return tokenize(self.tokenizer, list(texts), min(positions, max_length or positions))


def _without_names(given: Any, index: int, task: Task) -> Any:
    """Returns an input of `Pretrained.predict` as its task reads it. Raises UserError for a field that is missing."""
    if not isinstance(given, Mapping):
        return given
    try:
        return task.input_of_row(to_jsonable(given))  # converted as in training
    except ValueError as error:
        raise UserError(f"input {index}: {first_line(error)}") from None
