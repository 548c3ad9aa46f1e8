"""The tasks one can fine-tune on, by the name that ``task`` takes. NumPy only, no JAX."""

from __future__ import annotations

import difflib

from bert.config import FinetuneConfig, UserError
from bert.data.tasks import glue, multiple_choice, sentences, squad, tagging
from bert.data.tasks.task import Task

TASKS: dict[str, Task] = {
    task.name: task for module in (glue, squad, tagging, multiple_choice) for task in module.TASKS
}


def find_task(name: str) -> Task:
    """The task of that name; UserError names the nearest ones."""
    if name in TASKS:
        return TASKS[name]
    near = difflib.get_close_matches(name.lower().replace("-", ""), TASKS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(TASKS)}"
    raise UserError(f"task is {name!r}, which is unknown: {hint}")


def task_of(config: FinetuneConfig) -> Task:
    """The task of a run, as its configuration shapes it."""
    return find_task(config.task).shaped(config.data)


def published_task(head: str | None, name: str, outputs: tuple[str, ...], problem_type: str | None) -> Task | None:
    """The task of a model of others, as far as it can be asked.

    Args:
      head: name in `bert.heads.HEADS`; None for a model that has none of these.
      name: of the model, for messages.
      outputs: names of its outputs.
      problem_type: of a sequence classifier, as config.json has it.

    Returns:
      None for what has no answer here.
    """
    if head == "classification":
        return sentences.published_task(name, outputs, problem_type)
    if head == "tagging" and outputs:
        return tagging.TaggingTask(name=name, labels=outputs)
    if head == "span":
        return squad.SquadTask(name=name, version="1.1")
    return multiple_choice.MultipleChoiceTask(name=name) if head == "choices" else None
