"""The fine-tuning tasks, by the value of ``task``. NumPy only, no JAX."""

import sys

from bert.tasks import sequence_classification, token_classification
from bert.tasks.registry import BUILT_IN, TASKS, find_task, make_task, register_task

__all__ = ["BUILT_IN", "TASKS", "find_task", "make_task", "register_task"]

# Scripts that define tasks import from the modules' former names.
for _former in ("custom_sequence", "multilabel", "sequence"):
    sys.modules[f"bert.tasks.{_former}"] = sequence_classification
sys.modules["bert.tasks.custom_token_classification"] = token_classification.custom
