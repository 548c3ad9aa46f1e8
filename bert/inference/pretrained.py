"""`Pretrained`, the class of the models that `bert.load` returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from bert.config import Decoding, TaskDataConfig
from bert.data.encoding import row_template, tokenize
from bert.data.inputs import Text, as_list, as_text_or_pair, as_texts, check_count
from bert.data.rows import QueryDocumentRows, Rows, SourceTargetRows, TokenRows
from bert.errors import UserError, log_message, on_one_line, system_errors_as_user_errors
from bert.inference.export import TOLERANCE, save_model
from bert.inference.forward import BUCKETS, BatchedForward, EncodeOutput, GraphForward
from bert.inference.generate import SequenceGenerator, TextGenerator, complete_decoding, generate_texts, make_decoding
from bert.inference.scoring import (
    TEMPLATE,
    MaskPrediction,
    TextScorer,
    check_stride,
    encode_masked,
    rank_tokens,
    zero_shot_labels,
)
from bert.inference.search import (
    Mining,
    RankedDocument,
    SearchResults,
    VectorIndex,
    cosines,
    mine_negatives,
    rank_documents,
    require_scores_of_pairs,
    search_corpus,
)
from bert.interchange import hub
from bert.interchange.bundle import ModelBundle, build_module
from bert.model.electra import extract_generator
from bert.model.names import ENCODER_DECODER
from bert.model.pooling import Pooling
from bert.parallel.devices import require_no_fork
from bert.tasks.base import Outputs, Task
from bert.tasks.question_answering import ANSWER_SETTINGS
from bert.tokenizer.vocabulary import embedding_rows

Params = dict[str, Any]

PromptName = Literal["query", "document"]
"""Role of a text in retrieval."""

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
        graph: an ONNX graph that ONNX Runtime executes instead of the compiled JAX functions, or None.
    """

    architecture: str = "BertForPreTraining"
    task: Task | None = None
    data: TaskDataConfig = field(default_factory=TaskDataConfig)
    num_feature_layers: int | None = None
    graph: Path | None = None

    def __repr__(self) -> str:
        """Returns a summary of a few lines: source, architecture, sizes, parameters, vocabulary, task and labels."""
        sizes, labels = self.config, self.labels
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

    # Parameters and arrays.

    @cached_property
    def module(self) -> Any:
        """The Flax module for `params`."""
        layers = self.num_feature_layers
        more = {} if layers is None else {"num_feature_layers": layers}
        return build_module(self).clone(dtype=jnp.dtype(self.dtype), **more)

    def apply(self, *inputs: Any, **named: Any) -> Any:
        """Calls ``module.apply`` with `params`. The inputs are arrays, for example the result of `tokenize`."""
        require_no_fork()
        return self.module.apply({"params": self._device_params}, *inputs, **named)

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
        rows = [as_text_or_pair(given, index) for index, given in enumerate(as_list(texts), 1)]
        features = self._features(rows, max_length)
        batch = features.batch(np.arange(len(rows)), int(features.lengths.max(initial=1)), len(rows))
        return {name: batch[name] for name in ("input_ids", "token_type_ids", "attention_mask")}

    def outputs(self, features: Rows, batch_size: int = 32) -> Outputs:
        """Returns the outputs of the task head, one array per row (see `bert.tasks.base.Outputs`)."""
        if isinstance(features, SourceTargetRows):
            decoding = self.decoding or Decoding()
            results = self._sequence_generator.decode(features.sources, decoding, batch_size, range(len(features)))
            return [np.array(best.token_ids, np.int32) for best, *_ in results]
        if isinstance(features, QueryDocumentRows):
            return self._forward.embed_groups(features, self.pooling or Pooling(), batch_size)
        if self.task is not None and "embed" in self.task.calls and isinstance(features, TokenRows):
            return list(self._forward.embed(features, self.pooling or Pooling(), batch_size))
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

    # Embeddings and search.

    def encode(self, texts: str | Sequence[Text], batch_size: int = 32) -> EncodeOutput:
        """Returns the hidden states of texts, or of pairs of texts as tuples. Texts that are too long are truncated.

        A string is a batch of one text (B = 1). A sentence-transformers folder may configure a shorter maximum length
        or lower-casing. For many texts, `embed` is faster and needs less memory.

        Raises:
            UserError: an input is not a text or a pair of texts, or ``batch_size`` is below 1.
        """
        features, pooling = self._features_to_pool(texts)
        return self._forward.encode_all(features, pooling, batch_size)

    def embed(self, texts: str | Sequence[Text], batch_size: int = 32, prompt: PromptName | None = None) -> np.ndarray:
        """Returns the embeddings of texts, [B, E] float32, or [E] for a string.

        At most two batches of hidden states are in memory at a time. Many short texts are packed into shared rows, in
        which each text attends only to itself, to avoid padding.

        Args:
            texts: texts, or pairs of texts as tuples.
            batch_size: number of texts per batch.
            prompt: ``query`` or ``document`` to prepend the model's prompt of that name, if it has one.

        Raises:
            UserError: see `encode`; also if ``prompt`` has another value.
        """
        if isinstance(texts, str):
            return self.embed([texts], batch_size, prompt)[0]
        if prompt not in (None, *get_args(PromptName)):
            raise UserError(f"prompt is {prompt!r}: pass {' or '.join(get_args(PromptName))}, or None for none")
        texts, pooling, skipped = as_list(texts), self.pooling or Pooling(), None
        if prompt is not None:
            start = getattr(pooling, f"{prompt}_prompt")
            if start and not pooling.include_prompt:
                # Like sentence-transformers, count the tokens of the prompt without the special token at its end.
                features, _ = self._features_to_pool([start])
                count = len(features.ids) - bool(row_template(self.tokenizer, pair=False).suffix)
                skipped = np.array([count * isinstance(text, str) for text in texts], int)
            texts = [start + text if isinstance(text, str) else text for text in texts]
        return self._forward.embed(*self._features_to_pool(texts), batch_size, skipped)

    def similarity(self, texts: str | Sequence[Text], others: str | Sequence[Text], batch_size: int = 32) -> np.ndarray:
        """Returns the cosine similarity of each text with each of the others, [A, B] float32. A string is one text.

        Raises:
            UserError: see `embed`.
        """
        return cosines(*(self.embed([side] if isinstance(side, str) else side, batch_size) for side in (texts, others)))

    def search(
        self,
        queries: str | Sequence[Text],
        corpus: Sequence[Text] | np.ndarray | VectorIndex,
        top_k: int = 10,
        batch_size: int = 32,
    ) -> SearchResults:
        """Returns the documents with the highest cosine similarity to each query.

        The search is exact, except with an approximate index. Documents are embedded and compared in blocks, so the
        embeddings of the whole corpus are never in memory. Queries and documents are prefixed with the model's prompts.

        Args:
            queries: texts. A string is a single query, whose result has no query axis.
            corpus: one of the following.

                - Texts.
                - Embeddings [N, D] from ``embed(texts, prompt="document")``, for repeated searches.
                - A FAISS index of embeddings of length 1 with the inner product as metric. It may return fewer than
                  ``top_k`` documents; missing ones have the index -1.
            top_k: number of documents per query, at most the size of the corpus.
            batch_size: number of texts per batch.

        Raises:
            UserError: see `embed`; also if there are no documents, a text is empty, or embeddings have another width.
        """
        if isinstance(queries, str):
            indices, scores = self.search([queries], corpus, top_k, batch_size)
            return SearchResults(indices[0], scores[0])

        def embed(texts: Sequence[Text], role: PromptName) -> np.ndarray:
            return self.embed(texts, batch_size, role)

        return search_corpus(embed, queries, corpus, top_k, self.embedding_size, self.source)

    def rank(
        self, query: str, documents: Sequence[str], label: str = "1", batch_size: int = 32
    ) -> list[RankedDocument]:
        """Returns the documents sorted by a cross-encoder's score for the pair of query and document.

        Args:
            query: a text.
            documents: texts.
            label: label whose probability is the score of a classifier. Rerankers and regression models ignore it.
            batch_size: number of pairs per batch.

        Raises:
            UserError: the model does not classify or score pairs of texts, it lacks the label, or a text is empty.
        """
        return rank_documents(self.answers, self.require_pair_scores(label), query, documents, label, batch_size)

    def require_pair_scores(self, label: str) -> Task:
        """Returns the task if it scores pairs of texts. Raises UserError as in `rank`."""
        if self.task is None and self.problem_type is None:
            raise UserError(
                f"{self.source} is an encoder without scores for pairs of texts: use a reranker, or use search, which "
                "compares embeddings"
            )
        return require_scores_of_pairs(self.require_task(), label, self.source)

    def mine_negatives(
        self,
        rows: Any,
        corpus: Sequence[str] | None = None,
        *,
        scorer: Pretrained | None = None,
        label: str = "1",
        num_negatives: int = 4,
        top_k: int = 50,
        margin: float = 0.0,
        relative_margin: float = 0.05,
        batch_size: int = 32,
        say: Callable[[str], None] = lambda text: None,
    ) -> list[dict[str, Any]]:
        """Adds hard negatives to rows: documents that a search returns and that are not positives of the query.

        A document with a score close to the positive's may be an unlabelled correct answer. A negative's score is
        therefore lower by at least ``margin`` plus ``relative_margin`` times the absolute value of the positive's
        score.

        Args:
            rows: dictionaries with ``query`` and ``positive``, a data frame, or the path of a file with these columns.
            corpus: documents; None for the positives of all rows.
            scorer: a cross-encoder whose scores replace the cosine similarity.
            label: label, if the scorer is a classifier (see `rank`).
            num_negatives: maximum number of negatives per row. Those with the highest scores are chosen.
            top_k: number of retrieved documents per query, from which negatives are chosen.
            margin: minimum difference between the scores.
            relative_margin: minimum difference as a share of the positive's score.
            batch_size: number of texts per batch.
            say: called with the numbers of negatives.

        Returns:
            The rows with ``negatives``, a list of texts, and ``score``, the scores of the positive and each negative.

        Raises:
            UserError: a row has no positive or already has negatives, a document is empty, or the corpus is too small;
                see also `embed` and `rank`.
        """
        settings = Mining(num_negatives, top_k, margin, relative_margin)
        return mine_negatives(self, rows, corpus, scorer, label, settings, batch_size, say)

    # The fine-tuned task.

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
        """Returns one answer per input, in order, as a named tuple of the task.

        Rows are built as in training: inputs longer than ``data.max_length`` are truncated, or split into windows if
        the task supports it. A published model without a known ``max_length`` uses all its positions.

        A question answering model without a threshold always returns an answer, like the transformers pipeline. Its
        probability includes "no answer" as a candidate, so it is near 0 if there is no answer.

        Args:
            inputs: texts, or the inputs of the task: pairs of texts, of a question and its context, or of a question
                and its choices. A string is one text, whose answer is returned without a list.
            batch_size: number of rows per batch.
            null_score_diff_threshold: for question answering, like the arguments below. The answer is empty if the
                score of "no answer" exceeds the best answer's score by more than this; 0 returns the likelier one.
            doc_stride: number of tokens between the starts of the windows of a long context.
            max_answer_length: maximum number of tokens of an answer.
            n_best: return a list of up to this many different answers, most likely first.

        Raises:
            UserError: the model has no task that supports prediction, an input does not fit the task, or a setting is
                invalid or belongs to another task.
        """
        values = (null_score_diff_threshold, doc_stride, max_answer_length, n_best)
        settings: dict[str, Any] = dict(zip(ANSWER_SETTINGS, values, strict=True))
        if isinstance(inputs, str):
            return self.predict([inputs], batch_size, **settings)[0]
        task = self.with_answer_settings(settings)
        data = self.data if doc_stride is None else dataclasses.replace(self.data, doc_stride=doc_stride)
        return self.answers(task, as_list(inputs), batch_size, data)

    def with_answer_settings(self, settings: Mapping[str, Any]) -> Task:
        """Returns the task with the given settings of `predict`. Raises UserError for invalid settings."""
        return self.require_task().with_answer_settings(settings)

    def answers(
        self, task: Task, inputs: Sequence[Any], batch_size: int, data: TaskDataConfig | None = None
    ) -> list[Any]:
        """Returns the answers of `predict` for a task that reads the model's head. ``data`` replaces `data`."""
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
        """Chooses among labels on which an entailment model (MNLI) was not trained.

        Args:
            text: a text, whose answer is a `Label`, or a list of texts for a list of answers. Long texts are truncated.
            labels: candidate labels.
            template: a sentence about the text, with {} for the label. The model predicts whether the text entails it.
            multi_label: whether several labels may apply. Each label then has a separate probability.
            batch_size: number of (text, label) pairs per batch.

        Raises:
            UserError: the model lacks the labels entailment and contradiction, or a text, label or template is invalid.
        """
        if isinstance(text, str):
            return self.zero_shot([text], labels, template, multi_label, batch_size)[0]
        if self.task is None:
            raise UserError(f"{self.source} is no entailment model: use zero_shot with a model fine-tuned on MNLI")
        task = self.task

        def logits(pairs: list[Any]) -> np.ndarray:
            features = task.features(self.tokenizer, task.examples_from_inputs(pairs), self.data)
            return np.array(self.outputs(features, batch_size))

        return zero_shot_labels(task, self.source, logits, text, labels, template, multi_label)

    def require_task(self) -> Task:
        """Returns the task that `predict` uses. Raises UserError if there is none."""
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

    # Language modelling and generation.

    def score(self, data: Any, *, stride: int | None = None, batch_size: int = 8) -> Any:
        """Returns the task's metrics on labelled rows or, for a causal language model, a `TextScore` per text.

        Args:
            data: for a task on custom data, the path of a labelled file, or rows in memory: dictionaries by column, a
                ``pandas.DataFrame`` or a ``datasets.Dataset``. For a language model, texts. A string is one text, whose
                score is returned without a list. Each token is predicted once, the first one after the end token.
            stride: for a language model, the number of tokens between the starts of the windows of long texts. A
                smaller stride gives more context and takes longer. None: half of the positions.
            batch_size: number of rows or windows per batch.

        Raises:
            UserError: the task reads its own files, a row lacks a column or has an unknown label, the model is not a
                language model, an input is not a text, or ``stride`` is not between 1 and the number of positions.
        """
        if self.task is None:
            return self.score_texts(data, stride=stride, batch_size=batch_size)
        examples = self.task.labelled_examples(data)
        features = self.task.features(self.tokenizer, examples, self.data)
        return self.task.score(self.task.predict(self.outputs(features, batch_size), features, examples), examples)

    def score_texts(self, texts: str | Sequence[str], *, stride: int | None = None, batch_size: int = 8) -> Any:
        """Returns the log-probability of texts under a causal language model (see `score`)."""
        if isinstance(texts, str):
            return self.score_texts([texts], stride=stride, batch_size=batch_size)[0]
        check_count("batch_size", batch_size)
        stride = check_stride(stride, self.config.max_position_embeddings, self.source)
        self.require_language_model()
        return self._text_scorer(_as_texts(texts), stride, batch_size)

    def fill_mask(self, text: Text, top_k: int = 5) -> list[list[MaskPrediction]]:
        """Returns the ``top_k`` most likely tokens for each [MASK] of a text, the most likely first.

        For a run with replaced token detection, the generator makes the predictions.

        Args:
            text: a string, or a tuple of two strings for a pair.
            top_k: number of tokens for each [MASK].

        Raises:
            UserError: the text has no [MASK], or has one beyond the model's positions, or the model has no masked-LM
                head (for example because it is fine-tuned).
        """
        check_count("top_k", top_k)
        if "generator" in self.params:
            return self.generator.fill_mask(text, top_k)
        if self.config.causal or self.architecture == ENCODER_DECODER:
            raise UserError(f"{self.source} generates texts and has no masked-LM head: use generate")
        if "predictions" not in self.params:
            raise UserError(f"{self.source} has no masked-LM head to fill masks with: load a pretraining run")
        features, positions = encode_masked(self.tokenizer, text, self.config.max_position_embeddings, self.source)
        logits = self._forward.predict_masks(features)[0, positions, : embedding_rows(self.tokenizer)]
        return [rank_tokens(self.tokenizer, of_mask, top_k) for of_mask in logits]

    @cached_property
    def generator(self) -> Pretrained:
        """The generator of a run with replaced token detection, as a masked language model.

        Raises:
            UserError: the model has no generator.
        """
        if "generator" not in self.params:
            raise UserError(f"{self.source} has no generator: use a pretraining run with training.objective rtd")
        config, params = extract_generator(self.config, self.params)
        return dataclasses.replace(self, config=config, params=params, architecture="BertForMaskedLM")

    def generate(
        self,
        prompts: str | Sequence[str],
        *,
        details: bool = False,
        batch_size: int = 16,
        numbers: Sequence[int] | None = None,
        **settings: Any,
    ) -> Any:
        """Continues prompts or, with an encoder-decoder, generates the target of each source.

        The default is greedy decoding or, for an encoder-decoder, the settings with which it was evaluated.
        ``temperature`` enables sampling, and ``beams`` enables beam search. The number of positions limits prompt and
        continuation together, and source and target separately. A sample depends only on the seed, the indices of its
        text and sample, and the position. It does not depend on other texts or the batch size.

        Args:
            prompts: texts, or sources for an encoder-decoder. An empty prompt starts a new text. A string is one
                prompt, whose result is returned without a list.
            details: return `Continuation` with scores and token ids instead of strings.
            batch_size: number of samples, or of texts with all their beams, per batch.
            numbers: indices of the texts, on which samples depend; None for 0, 1, ...
            **settings: fields of `bert.config.Decoding`: max_tokens, beams, temperature, top_k, top_p, num_samples,
                seed, length_penalty, length_norm, early_stopping, repetition_penalty, no_repeat_ngram_size, min_tokens,
                stop.

        Returns:
            The new text of each prompt, without the prompt. With ``num_samples`` above 1, a list of texts per prompt,
            best first with beam search.

        Raises:
            UserError: the model is neither a causal language model nor an encoder-decoder, a prompt is not a text or is
                too long, or a setting is invalid.
        """
        if isinstance(prompts, str):
            return self.generate([prompts], details=details, batch_size=batch_size, numbers=numbers, **settings)[0]
        decoding = make_decoding(self.complete_decoding(settings))
        check_count("batch_size", batch_size)
        self.require_generation()
        results = generate_texts(self._text_generator, _as_texts(prompts), decoding, batch_size, numbers)
        answers = [[answer if details else answer.text for answer in of_text] for of_text in results]
        return answers if decoding.num_samples > 1 else [answer for [answer] in answers]

    def complete_decoding(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Completes settings of `generate` with the settings with which an encoder-decoder was evaluated."""
        return complete_decoding(self.decoding if self.architecture == ENCODER_DECODER else None, settings)

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

    @system_errors_as_user_errors()
    def save(
        self,
        out: str | Path,
        format: str = "hf",
        say: Callable[[str], None] = log_message,
        *,
        length: int | None = None,
        dynamic_length: bool = False,
        quantize: str | None = None,
        dev: Any = None,
        tolerance: float = TOLERANCE,
    ) -> None:
        """Writes the model in another format atomically, and compares the outputs of the written model.

        Args:
            out: a new or empty folder, or the URL of a new folder.
            format: the format to write.

                - ``hf``: a folder for Hugging Face transformers.
                - ``stablehlo``: a function that needs only JAX.
                - ``onnx``: a graph for ONNX Runtime and others, for any number of rows and tokens.
            say: called with what was written and compared. By default, the logger ``bert`` warns about settings that
                the format cannot express.
            length: number of tokens T of a ``stablehlo`` function's inputs; None for the model's maximum.
            dynamic_length: leave T of a ``stablehlo`` function variable, up to the model's maximum.
            quantize: ``int8`` writes the weights of an ``onnx`` graph in 8 bits (dynamic quantization), and compares
                its score on dev with the float graph's. For an embedding model without a task, the score is the mean
                cosine similarity between the embeddings of both graphs.
            dev: data for that score: None for the dev rows of a run, or one of the following.

                - Labelled rows or a file, as in `score`.
                - The folder of a task that reads its own files.
                - For an embedding model without a task, texts or a file with one text per line.
            tolerance: maximum relative loss of score by int8.

        Raises:
            ExportError: the outputs differ, or the int8 graph loses more.
            UserError: the format is unknown, the head has no equivalent in other libraries, an option belongs to
                another format, a library is not installed, or ``out`` exists and is not an empty folder.
        """
        save_model(self, out, format, say, length, dynamic_length, quantize, dev, tolerance)

    def push_to_hub(self, name: str, *, private: bool = False, message: str = "Add a model of bert-jax") -> str:
        """Writes the model with `save` in the format ``hf``, and uploads it to the Hugging Face hub as one commit.

        Args:
            name: repository, ``organisation/name``, which is created if necessary.
            private: whether a new repository is private.
            message: commit message.

        Returns:
            The URL of the commit.

        Raises:
            UserError: see `save`; also if the repository cannot be written (name, access or network).
        """
        return hub.upload(self.save, name, private, message)

    # Compiled functions, built on first use.

    @cached_property
    def _device_params(self) -> Params:
        require_no_fork()
        return jax.device_put(self.params)

    @cached_property
    def _forward(self) -> BatchedForward:
        task = None if self.task is None or "embed" in self.task.calls else self.task  # embeddings have no head
        parts = (task, self.num_feature_layers, jnp.dtype(self.dtype))
        if self.graph is None:
            return BatchedForward(self.config, self._device_params, *parts)
        return GraphForward(self.graph, self.config, self.params, *parts)

    @cached_property
    def _text_generator(self) -> TextGenerator | SequenceGenerator:
        if self.architecture == ENCODER_DECODER:
            return self._sequence_generator
        return TextGenerator(self.config, self._device_params, self.tokenizer, self.source, jnp.dtype(self.dtype))

    @cached_property
    def _sequence_generator(self) -> SequenceGenerator:
        tokenizers = (self.tokenizer, self.target_tokenizer or self.tokenizer)
        return SequenceGenerator(self.config, self._device_params, tokenizers, self.source, jnp.dtype(self.dtype))

    @cached_property
    def _text_scorer(self) -> TextScorer:
        return TextScorer(self.config, self._device_params, self.tokenizer, jnp.dtype(self.dtype))

    def _features(self, texts: Sequence[Text], max_length: int | None = None) -> TokenRows:
        longest = self.config.max_position_embeddings
        return tokenize(self.tokenizer, list(texts), min(longest, max_length or longest))

    def _features_to_pool(self, inputs: str | Sequence[Text]) -> tuple[TokenRows, Pooling]:
        texts = [as_text_or_pair(text, index) for index, text in enumerate(as_list(inputs), 1)]
        pooling = self.pooling or Pooling()
        if pooling.lowercase:
            texts = [text.lower() if isinstance(text, str) else (text[0].lower(), text[1].lower()) for text in texts]
        return self._features(texts, pooling.max_length), pooling


def _as_texts(texts: Sequence[str]) -> list[str]:
    """Returns the inputs as a list of texts. Raises UserError."""
    expected = "a text is needed: pass a string"
    return [as_texts(text, index, expected)[0] for index, text in enumerate(as_list(texts), 1)]
