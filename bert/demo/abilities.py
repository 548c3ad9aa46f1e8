"""The tabs of the demo, with example texts."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from bert.data.inputs import Text
from bert.errors import UserError, without_surrogates
from bert.inference.attention_maps import compute_attention_map, make_page
from bert.inference.pretrained import Pretrained
from bert.model.names import ENCODER_DECODER, has_decoder
from bert.runs.metrics_log import read_results
from bert.tasks.base import Task
from bert.tasks.multiple_choice import MultipleChoiceTask
from bert.tasks.question_answering import QuestionAnsweringTask
from bert.tasks.sequence_classification import Label, Labels, Score
from bert.tasks.token_classification import TokenClassificationTask
from bert.tokenizer.library import special_ids
from bert.tokenizer.vocabulary import token_text

TEXTS = (
    ("A gripping story, beautifully filmed.",),
    ("The plot is dull, and the film is far too long.",),
    ("Ada Lovelace met Charles Babbage in London in 1833.",),
    ("The office of Siemens in Munich opened a second lab in Zurich.",),
)

PAIRS = (
    ("A man plays the guitar.", "Someone makes music."),
    ("A man plays the guitar.", "The shares fell by two percent."),
)

QUESTIONS = (
    ("When do I get my money?", "Refunds are paid within five working days. Vouchers are sent at once."),
    ("Who wrote the notes?", "Charles Babbage designed the machine. Ada Lovelace wrote the notes on it in 1843."),
)

CHOICES = (
    ("She opened the umbrella because", "it began to rain.\nthe soup was cold.\nhe could not read."),
    ("He put the milk into", "the fridge.\nthe drawer.\nthe river."),
)

PROMPTS = (("A dog runs across the field.",), ("Once upon a time there was",))


def with_masks(mask: str) -> tuple[tuple[str, ...], ...]:
    """Returns example texts with a mask."""
    return ((f"The capital of France is {mask}.",), (f"She took the {mask} for a walk.",))


MAX_CHARACTERS = 20_000
"""Maximum number of characters of a text, so that other requests do not have to wait."""

MAX_ATTENTION_TOKENS = 128
"""Maximum number of tokens of an attention page, which has two megabytes for 12 layers with 12 heads."""

MAX_CHOICES = 10
"""Maximum number of choices of a question. One program is compiled per number."""

MAX_TOKENS = 40
"""Maximum number of tokens that a language model generates."""

TOP_K = 8
"""Number of tokens listed for a mask."""

Highlights = list[tuple[str, str | None]]
"""Parts of a text, each with its label or None."""


@dataclass(frozen=True)
class Ability:
    """One tab of the page, which is also a function of its API.

    Attributes:
        answer: maps texts to one value per output, or to the value of a single output. Its parameter names are the
            API's.
        outputs: kind (a key of `bert.demo.page.OUTPUTS`) and label of each output.
        num_required: number of leading texts that must not be empty.
    """

    name: str
    title: str
    description: str
    answer: Callable[..., Any]
    inputs: tuple[str, ...]
    outputs: tuple[tuple[str, str], ...]
    examples: tuple[tuple[str, ...], ...]
    num_required: int

    @property
    def is_page(self) -> bool:
        """Whether the answer is an HTML page."""
        return self.outputs[0][0] == "page"

    def __call__(self, *texts: str | None) -> Any:
        """Returns the answer for the texts.

        Raises:
            UserError: a text is empty or too long, or the model rejects it.
        """
        checked = [_checked(label, text) for label, text in zip(self.inputs, texts, strict=True)]
        for label, text in zip(self.inputs[: self.num_required], checked, strict=False):
            if not any(unicodedata.category(character)[0] not in "CZ" for character in text):
                raise UserError(f"the {label} is empty: write at least one word")
        return self.answer(*checked)


def _checked(label: str, text: str | None) -> str:
    text = without_surrogates(text or "")
    if len(text) > MAX_CHARACTERS:
        raise UserError(
            f"the {label} has {len(text):,} characters, and this page reads {MAX_CHARACTERS:,}: pass a shorter text"
        )
    return text


def abilities_of(model: Pretrained) -> list[Ability]:
    """Returns the abilities of a model. Its task comes first."""
    writes = model.architecture in (ENCODER_DECODER, "BertForCausalLM")
    abilities = []
    compares = model.task is None or "embed" in model.task.calls
    if model.task is not None and not compares and model.architecture != ENCODER_DECODER:
        abilities.append(_task_ability(model, model.task))
    if writes:
        abilities.append(_generation(model))
    elif "predictions" in model.params or "generator" in model.params:
        abilities.append(_mask_filling(model))
    if compares and not writes:
        abilities.append(_similarity(model))
    if not model.config.is_static:
        abilities.append(_attention(model))
    sample = _sample_input(model)
    return [_with_sample(ability, sample) for ability in abilities] if sample else abilities


def _sample_input(model: Pretrained) -> tuple[str, ...]:
    """Returns the sample input in a run's results.json; () if there is none."""
    if model.step is None or model.task is None or "embed" in model.task.calls:
        return ()
    try:
        sample = (read_results(model.source) or {}).get("sample_input") or ()
    except UserError:  # other examples are used instead
        return ()
    is_short = all(isinstance(text, str) and text.strip() and len(text) <= MAX_CHARACTERS for text in sample)
    return tuple(sample) if is_short else ()


def _with_sample(ability: Ability, sample: tuple[str, ...]) -> Ability:
    """Returns the ability with an input from the run's data as its example, if the number of texts matches."""
    if ability.name == "choose":
        sample = (sample[0], "\n".join(sample[1:]))
    elif ability.name == "attention":
        sample = sample[:1]
    sample += ("",) * (len(ability.inputs) - max(len(sample), ability.num_required))
    return replace(ability, examples=(sample,)) if len(sample) == len(ability.inputs) else ability


def _task_ability(model: Pretrained, task: Task) -> Ability:
    makers: dict[str, Callable[[Pretrained, Any], Ability]] = {
        "question_answering": _question_answering,
        "token_classification": _tagging,
        "multiple_choice": _multiple_choice,
    }
    return makers.get(task.kind, _prediction)(model, task)


def _mask_filling(model: Pretrained) -> Ability:
    mask = token_text(model.tokenizer, special_ids(model.tokenizer).mask)
    return Ability(
        "fill_mask",
        "Fill a mask",
        f"Write {mask} in place of one word: the model predicts tokens for it.",
        partial(fill_mask, model),
        ("text",),
        (("bars", "probability of each token"),),
        with_masks(mask),
        1,
    )


def fill_mask(model: Pretrained, text: str) -> dict[str, float]:
    """Returns the most likely tokens for the only mask of a text."""
    masks = model.fill_mask(text, TOP_K)
    if len(masks) > 1:
        raise UserError(f"the text has {len(masks)} masks, and this page fills one: remove the others")
    # Byte-level tokens may have equal texts. The most likely one is kept.
    return {prediction.token.replace(" ", "␣"): prediction.probability for prediction in reversed(masks[0])}


def _prediction(model: Pretrained, task: Task) -> Ability:
    """Returns the ability of a task that reads one text, two texts, or one with an optional second."""
    num_required = len(task.input_columns)
    takes_pair = num_required == 2 or ("text_a", "text_b") in task.table_columns
    outputs_of: dict[type, tuple[tuple[str, str], ...]] = {
        Label: (("bars", "probability of each label"),),
        Labels: (("text", "labels"), ("shares", "probability of each label")),
        Score: (("number", "score"),),
    }
    second = "second text" if num_required == 2 else "second text (may be empty)"
    return Ability(
        "predict",
        "Score" if task.answer_type is Score else "Classify",
        f"The model was fine-tuned for {task.name}.",
        partial(predict_pair if takes_pair else predict, model),
        ("first text", second) if takes_pair else ("text",),
        outputs_of.get(task.answer_type, (("json", "answer"),)),
        PAIRS if num_required == 2 else tuple((text, "") for (text,) in TEXTS) if takes_pair else TEXTS,
        num_required,
    )


def predict(model: Pretrained, text: Text) -> Any:
    """Returns the answer of a model that scores or classifies texts."""
    [answer] = model.predict([text])
    answer_type = model.require_task().answer_type
    if answer_type is Labels:
        return ", ".join(answer.labels) or "none", answer.probabilities
    if answer_type is Label:
        return answer.probabilities
    return answer.score if answer_type is Score else answer._asdict()


def predict_pair(model: Pretrained, text_a: str, text_b: str = "") -> Any:
    """Like `predict`, with an optional second text."""
    return predict(model, (text_a, text_b) if text_b.strip() else text_a)


def _question_answering(model: Pretrained, task: QuestionAnsweringTask) -> Ability:
    return Ability(
        "answer_question",
        "Answer a question",
        "The answer is a part of the context" + (", or there is none." if task.may_be_impossible else "."),
        partial(answer_question, model),
        ("question", "context"),
        (("bars", "answer"), ("highlights", "context")),
        QUESTIONS,
        2,
    )


def answer_question(model: Pretrained, question: str, context: str) -> tuple[dict[str, float], Highlights]:
    """Returns the answer with its probability, and the context with the answer marked."""
    [answer] = model.predict([(question, context)])
    if answer.start is None:
        return {"no answer": answer.probability}, [(context, None)]
    return {answer.answer: answer.probability}, mark(context, [(answer.start, answer.end, "answer")])


def _tagging(model: Pretrained, task: TokenClassificationTask) -> Ability:
    return Ability(
        "tag",
        "Find entities" if task.finds_entities else "Tag words",
        "The model marks the entities of a text." if task.finds_entities else "The model gives each word a tag.",
        partial(tag, model),
        ("text",),
        (("highlights", "entities" if task.finds_entities else "tags"),),
        TEXTS[2:],
        1,
    )


def tag(model: Pretrained, text: str) -> Highlights:
    """Returns the text with its entities marked by type, or its words by tag."""
    [answer] = model.predict([text])
    [(kind, parts)] = answer._asdict().items()
    name = "type" if kind == "entities" else "tag"
    return mark(text, [(part["start"], part["end"], part[name]) for part in parts])


def mark(text: str, spans: list[tuple[int, int, str]]) -> Highlights:
    """Splits a text into parts and labels the ``spans`` (start, end, name), which are sorted and disjoint."""
    parts: Highlights = []
    position = 0
    for start, end, name in spans:
        parts += [(text[position:start], None), (text[start:end], name)]
        position = end
    return [(part, name) for part, name in [*parts, (text[position:], None)] if part]


def _multiple_choice(model: Pretrained, task: MultipleChoiceTask) -> Ability:
    return Ability(
        "choose",
        "Choose",
        f"The model chooses the best of two to {MAX_CHOICES} choices.",
        partial(choose, model),
        ("question", "choices, one on each line"),
        (("bars", "probability of each choice"),),
        CHOICES,
        2,
    )


def choose(model: Pretrained, question: str, choices: str) -> dict[str, float]:
    """Returns the probability of each choice."""
    options = list(dict.fromkeys(line.strip() for line in choices.splitlines() if line.strip()))
    if not 2 <= len(options) <= MAX_CHOICES:
        raise UserError(f"there are {len(options)} different choices: write two to {MAX_CHOICES}, one on each line")
    [answer] = model.predict([(question, *options)])
    return dict(zip(options, answer.probabilities, strict=True))


def _similarity(model: Pretrained) -> Ability:
    name = model.pooling_or_default.similarity
    cosine = "The cosine of the embeddings of two texts: 1 for the same direction, 0 for unrelated ones."
    return Ability(
        "similarity",
        "Compare",
        cosine if name == "cosine" else f"The similarity ({name}) of the embeddings of two texts.",
        partial(similarity, model),
        ("first text", "second text"),
        (("number", name),),
        PAIRS,
        2,
    )


def similarity(model: Pretrained, text_a: str, text_b: str) -> float:
    """Returns the similarity of two texts."""
    return float(model.similarity(text_a, text_b)[0, 0])


def _generation(model: Pretrained) -> Ability:
    continues = model.architecture != ENCODER_DECODER
    return Ability(
        "generate",
        "Write",
        f"The model continues the text by at most {MAX_TOKENS} tokens." if continues else "The model writes a target.",
        partial(generate, model),
        ("text",),
        (("text", "written"),),
        PROMPTS,
        1,
    )


def generate(model: Pretrained, text: str) -> str:
    """Returns the continuation of a text, or the target of a source."""
    settings: dict[str, Any] = {} if model.architecture == ENCODER_DECODER else {"max_tokens": MAX_TOKENS}
    written: str = model.generate(text, num_samples=1, **settings)
    return written


def _attention(model: Pretrained) -> Ability:
    aligned = has_decoder(model.architecture)
    return Ability(
        "attention",
        "Attention",
        "Attention from each generated token to the tokens of your text."
        if aligned
        else "Attention from each token to the others, in every layer and head.",
        partial(attention, model),
        ("text",),
        (("page", "attention"),),
        PROMPTS if aligned else TEXTS,
        1,
    )


def attention(model: Pretrained, text: str) -> str:
    """Returns the HTML page of `bert attention` for a text. An encoder-decoder also generates the target."""
    if (count := model.tokenize(text)["input_ids"].shape[1]) > MAX_ATTENTION_TOKENS:
        raise UserError(f"the text has {count} tokens, and this page shows {MAX_ATTENTION_TOKENS}: pass a shorter text")
    target = model.generate(text, details=True, num_samples=1) if has_decoder(model.architecture) else None
    return make_page(compute_attention_map(model, text, target))
