"""The table of tasks, and the task of a configuration."""

from __future__ import annotations

import difflib

from bert.config import FinetuneConfig, TaskDataConfig
from bert.config.model import DECODER_KEYS
from bert.config.validation import check_unused
from bert.errors import UserError
from bert.tasks import embedding, multiple_choice, reranker, sequence_to_sequence
from bert.tasks.base import Task
from bert.tasks.question_answering import task as question_answering
from bert.tasks.question_answering.task import QUESTION_KEYS
from bert.tasks.sequence_classification import custom, glue
from bert.tasks.token_classification import custom as custom_token_classification
from bert.tasks.token_classification import task as token_classification
from bert.tasks.token_classification.task import TAG_KEYS

MODULES = (
    glue,
    question_answering,
    token_classification,
    multiple_choice,
    custom,
    custom_token_classification,
    sequence_to_sequence,
    embedding,
    reranker,
)

BUILT_IN = tuple(task for module in MODULES for task in module.TASKS)

TASKS: dict[str, Task] = {task.name: task for task in BUILT_IN}

CUSTOM_TASK_KEYS = (
    "train", "dev", "test", "column_names", "columns", "metrics", "score_range",
    "source", "target", "max_target_length", "class_weights", "label_thresholds",
)  # fmt: skip
"""Keys of ``data`` that only the tasks read that have them in `Task.data_keys`."""

BUILT_IN_KEYS = (*TAG_KEYS, *QUESTION_KEYS)
"""Keys of ``data`` that only some built-in tasks read; registered tasks may read all of them."""

UNREAD_KEYS = {
    "sequence_to_sequence": {
        "language_model_weight": "has a decoder's loss of its own",
        "classifier_dropout": "has no classifier",
        "num_feature_layers": "has no head over a frozen encoder",
    },
    "embedding": {
        "language_model_weight": "neither classifies nor scores single texts",
        "classifier_dropout": "has no classifier",
        "num_feature_layers": "has no head over a frozen encoder",
    },
}
"""Keys of the configuration that tasks of a kind do not read, and the reason."""


def register_task(task: Task) -> None:
    """Registers a custom task under its name in this process, for fine-tuning, `bert.load` and prediction.

    A run's folder contains the name of its task and no code: register the task before you load the run.

    Raises:
      ValueError: a built-in task has that name.
    """
    if any(task.name == other.name for other in BUILT_IN):
        raise ValueError(f"{task.name} is a built-in task: use another name")
    TASKS[task.name] = task


def find_task(name: str) -> Task:
    """Returns the task with that name. Raises UserError with the nearest names."""
    if name in TASKS:
        return TASKS[name]
    near = difflib.get_close_matches(name.lower().replace("-", ""), TASKS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(TASKS)}"
    raise UserError(f"task is {name!r}, which is unknown: {hint} (bert.register_task registers a task of your own)")


def make_task(config: FinetuneConfig) -> Task:
    """Returns the task of a run. Raises UserError for a key that is set and that the task does not read."""
    task = find_task(config.task)
    _check_data_keys(task, config.data)
    _check_sections(task, config)
    return task.from_config(config.data).with_settings(config)


def _check_data_keys(task: Task, data: TaskDataConfig) -> None:
    unset = TaskDataConfig()
    is_built_in = any(task.name == other.name for other in BUILT_IN)
    for key in (*CUSTOM_TASK_KEYS, *(BUILT_IN_KEYS if is_built_in else ())):
        if key not in task.data_keys and getattr(data, key) != getattr(unset, key):
            readers = ", ".join(other.name for other in BUILT_IN if key in other.data_keys)
            raise UserError(f"data.{key} is set, but it is for {readers}, and the task is {task.name}: remove it")


def _check_sections(task: Task, config: FinetuneConfig) -> None:
    for kind in ("embedding", "reranker"):
        if task.kind != kind:
            reason = f"but it is for {kind}, and the task is {task.name}: remove it"
            check_unused(f"{kind}.", getattr(config, kind), reason)
    if task.kind in UNREAD_KEYS:
        check_unused("", config, f"but {task.name} has no head: remove it", ("head_init",))
        for key, reason in UNREAD_KEYS[task.kind].items():
            if value := getattr(config, key):
                raise UserError(f"{key} is {value}, but {task.name} {reason}: remove it")
    if task.kind != "sequence_to_sequence":
        writers = ", ".join(other.name for other in BUILT_IN if other.kind == "sequence_to_sequence")
        reason = f"but it is for {writers}, and the task is {task.name}: remove it"
        check_unused("model.", config.model, reason, DECODER_KEYS)
        check_unused("decoding.", config.decoding, reason)
        check_unused("target_tokenizer.", config.target_tokenizer, reason)
        check_unused("", config, reason, ("decoder_init",))
        check_unused("training.", config.training, reason, ("label_smoothing",))
    elif config.model.causal:
        raise UserError(
            f"model.causal is true, but the encoder of {task.name} sees the whole source: set it to false, or init "
            "to another model"
        )
