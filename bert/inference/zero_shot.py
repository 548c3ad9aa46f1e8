"""Labels that a model was never trained on, by a model of entailment (Yin et al. 2019, arXiv 1909.00161)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bert.data.inputs import as_filled_texts, as_list, shown
from bert.errors import UserError
from bert.metrics import softmax
from bert.tasks.base import Task
from bert.tasks.sequence import ClassificationTask, Label

TEMPLATE = "This example is {}."


def entailment_labels(task: Task, source: str) -> tuple[int, int]:
    """The numbers of the labels entailment and contradiction.

    Contradiction is found by its name, of two labels it is the other one, and else the last or the first label, as in
    transformers.

    Raises:
        UserError: the model does not classify, or has no label entailment.
    """
    names = [name.lower() for name in task.label_names] if isinstance(task, ClassificationTask) else []
    entailed = [number for number, name in enumerate(names) if name.startswith("entail")]
    if len(names) < 2 or len(entailed) != 1:
        raise UserError(
            f"{source} has no labels entailment and contradiction ({task.name}): use a model fine-tuned on "
            "MNLI or its like"
        )
    opposite = [number for number, name in enumerate(names) if name.startswith("contr")]
    if len(names) == 2 or len(opposite) != 1:
        opposite = [len(names) - 1 if entailed[0] == 0 else 0]
    return entailed[0], opposite[0]


def hypotheses(labels: Sequence[str], template: str) -> list[str]:
    """One sentence for each label. Raises UserError for a template without a place, and for labels that are equal."""
    labels = [] if labels is None or isinstance(labels, str) else as_list(labels)
    if not labels:
        raise UserError("labels has to be a list of at least one label: pass the labels to choose from")
    as_filled_texts("label", labels)
    if not all(isinstance(label, str) for label in labels) or len(set(labels)) < len(labels):
        raise UserError("labels has a label twice, or a pair of texts: pass each label once, as a string")
    if not isinstance(template, str) or template.count("{}") != 1:
        raise UserError(f"template is {shown(template)}: write {{}} once, where the label belongs")
    return [template.replace("{}", label) for label in labels]


def best_label(logits: np.ndarray, labels: Sequence[str], entailed: int, opposite: int, multi_label: bool) -> Label:
    """The answer for one text.

    Args:
        logits: [labels, classes] of the text with the sentence of each label.
        multi_label: whether each label is asked alone, entailment against contradiction, as a single one always is;
            else one of them is right.
    """
    each_alone = multi_label or len(labels) == 1
    shares = softmax(logits[:, [opposite, entailed]])[:, 1] if each_alone else softmax(logits[:, entailed])
    ranked = sorted(zip(labels, map(float, shares), strict=True), key=lambda pair: -pair[1])
    return Label(ranked[0][0], dict(ranked))
