"""Question answering: answers are spans of the context."""

from bert.tasks.question_answering.span_features import (
    Answer,
    Answers,
    Example,
    Windows,
    decode_answers,
    make_qa_features,
)
from bert.tasks.question_answering.squad import Dataset, read, read_questions, references, write_predictions
from bert.tasks.question_answering.task import (
    ANSWER_SETTINGS,
    AnswerPrediction,
    CustomQuestionAnswering,
    QuestionAnsweringTask,
)

__all__ = [
    "ANSWER_SETTINGS",
    "Answer",
    "AnswerPrediction",
    "Answers",
    "CustomQuestionAnswering",
    "Dataset",
    "Example",
    "QuestionAnsweringTask",
    "Windows",
    "decode_answers",
    "make_qa_features",
    "read",
    "read_questions",
    "references",
    "write_predictions",
]
