"""Linear models on words, with which a fine-tuned encoder is compared."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from bert.errors import require

INVERSE_REGULARISATION = 10.0
"""C of the logistic regression. scikit-learn's default, 1, regularizes too strongly on a few hundred short texts."""

WINDOWS = (0, 1, 2)
"""Numbers of words on either side of a word that a baseline of tagging reads; the best one is reported."""

SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


def window_tags(train: Any, dev: Any, window: int) -> list[list[str]]:
    """Returns the tags of dev from a logistic regression on each word and its neighbours, with their positions.

    Args:
        train, dev: `Sentences` with words and tags.
        window: number of neighbours on either side.
    """
    from sklearn.feature_extraction import DictVectorizer
    from sklearn.linear_model import LogisticRegression

    vectorizer = DictVectorizer()
    inputs = vectorizer.fit_transform([features for words in train.words for features in _neighbours(words, window)])
    model = LogisticRegression(C=INVERSE_REGULARISATION, max_iter=300)
    model.fit(inputs, [tag for tags in require(train.tags, "the tags") for tag in tags])
    return [list(model.predict(vectorizer.transform(_neighbours(words, window)))) for words in dev.words]


def _neighbours(words: Sequence[str], window: int) -> list[dict[str, str]]:
    """Returns the features of each word: the words around it by their distance."""
    padded = [*["<start>"] * window, *words, *["<end>"] * window]
    offsets = range(2 * window + 1)
    return [{str(offset): padded[index + offset] for offset in offsets} for index in range(len(words))]


def best_words(train: Sequence[Any], dev: Sequence[Any], window: int) -> dict[str, str]:
    """Returns an answer to each question of dev: the word of its context that is most likely the first of the answer.

    A logistic regression on a word and its neighbours, with their positions, estimates the likelihood.

    Args:
        train, dev: the questions, each with ``question``, ``context``, ``answer`` and ``id``.
        window: number of neighbours on either side.
    """
    from sklearn.feature_extraction import DictVectorizer
    from sklearn.linear_model import LogisticRegression

    vectorizer = DictVectorizer()
    inputs = vectorizer.fit_transform([f for one in train for f in _neighbours(one.context.split(), window)])
    starts = [match.start() == one.answer.start for one in train for match in re.finditer(r"\S+", one.context)]
    if len(set(starts)) == 1:
        return {one.id: one.context.split()[0] for one in dev}
    model = LogisticRegression(C=INVERSE_REGULARISATION, max_iter=300).fit(inputs, starts)
    answers = {}
    for one in dev:
        words = one.context.split()
        scores = model.decision_function(vectorizer.transform(_neighbours(words, window)))
        answers[one.id] = words[int(np.argmax(scores))]
    return answers


def best_sentences(train: Sequence[Any], dev: Sequence[Any]) -> dict[str, str]:
    """Returns an answer to each question of dev: the sentence of its context that is most likely the answer.

    A logistic regression on the words of a sentence, and on the number of words that it shares with the question,
    estimates the likelihood. Sentences end with a full stop, question mark or exclamation mark.

    Args:
        train, dev: the questions, each with ``question``, ``context``, ``answers`` and ``id``.
    """
    from scipy.sparse import csr_matrix, hstack
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    vectorizer = TfidfVectorizer(sublinear_tf=True, ngram_range=(1, 2), token_pattern=r"\S+")
    candidates = [(one, sentence) for one in train for sentence in SENTENCE_END.split(one.context)]
    vectorizer.fit([sentence for _, sentence in candidates])

    def inputs(pairs: Sequence[tuple[Any, str]]) -> Any:
        shared = [[len({*one.question.split()} & {*sentence.split()})] for one, sentence in pairs]
        return hstack([vectorizer.transform([sentence for _, sentence in pairs]), csr_matrix(shared)], format="csr")

    is_answer = [any(answer.text.strip() in sentence for answer in one.answers) for one, sentence in candidates]
    if len(set(is_answer)) == 1:
        return {one.id: SENTENCE_END.split(one.context)[0] for one in dev}
    model = LogisticRegression(C=INVERSE_REGULARISATION, max_iter=1000).fit(inputs(candidates), is_answer)
    answers = {}
    for one in dev:
        sentences = SENTENCE_END.split(one.context)
        scores = model.decision_function(inputs([(one, sentence) for sentence in sentences]))
        answers[one.id] = sentences[int(np.argmax(scores))]
    return answers
