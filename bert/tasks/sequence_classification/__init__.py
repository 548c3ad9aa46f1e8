"""Sequence classification: one label, several labels or a score for each text or pair of texts."""

from bert.tasks.sequence_classification.base import Examples, LabelTask, SequenceClassificationTask
from bert.tasks.sequence_classification.classification import (
    ClassificationPredictions,
    ClassificationTask,
    Label,
    RegressionTask,
    Score,
    lexical_baseline,
)
from bert.tasks.sequence_classification.custom import CustomClassification, CustomMultilabel, CustomRegression
from bert.tasks.sequence_classification.glue import SUBMISSIONS
from bert.tasks.sequence_classification.multilabel import Labels, MultilabelTask

__all__ = [
    "SUBMISSIONS",
    "ClassificationPredictions",
    "ClassificationTask",
    "CustomClassification",
    "CustomMultilabel",
    "CustomRegression",
    "Examples",
    "Label",
    "LabelTask",
    "Labels",
    "MultilabelTask",
    "RegressionTask",
    "Score",
    "SequenceClassificationTask",
    "lexical_baseline",
]
