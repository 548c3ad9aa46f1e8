"""Token classification: a tag for each word."""

from bert.tasks.token_classification.conll import Sentences, read_words
from bert.tasks.token_classification.custom import CustomTokenClassification
from bert.tasks.token_classification.task import Entities, Tagged, TokenClassificationTask, Words
from bert.tasks.token_classification.word_features import CLITICS, WordFeatures, entities, separate_clitics, split_text

__all__ = [
    "CLITICS",
    "CustomTokenClassification",
    "Entities",
    "Sentences",
    "Tagged",
    "TokenClassificationTask",
    "WordFeatures",
    "Words",
    "entities",
    "read_words",
    "separate_clitics",
    "split_text",
]
