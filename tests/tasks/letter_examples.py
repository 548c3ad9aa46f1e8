"""Questions whose tokens are letters."""

from __future__ import annotations

import numpy as np
from tokenizers import Tokenizer

from bert.tasks.question_answering import Answer, Example, Windows
from tests.letters import letter_tokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyz"


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *(f"##{letter}" for letter in LETTERS), *".?'("]


CLS, SEP = 2, 3


def question_tokenizer() -> Tokenizer:
    built = letter_tokenizer(WORDS)
    built.add_special_tokens(WORDS[:5])
    return built


def example(context: str, answer: str | None = None, question: str = "q", id: str = "q1") -> Example:
    answers = () if answer is None else (Answer(answer, context.index(answer)),)
    return Example(id, question, context, answers, answer is None)


def oracle(windows: Windows) -> tuple[np.ndarray, np.ndarray]:
    """Logits that are 10 at the right places and 0 elsewhere."""
    logits = np.zeros((2, len(windows), windows.lengths.max()), np.float32)
    for half, places in zip(logits, windows.labels.T, strict=True):
        half[np.arange(len(windows)), places] = 10
    return logits[0], logits[1]
