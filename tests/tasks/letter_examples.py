"""Questions whose tokens are letters."""

from __future__ import annotations

from tokenizers import Tokenizer

from bert.tasks.span_features import Answer, Example
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
