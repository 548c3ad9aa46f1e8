"""Distils a fine-tuned model of six layers into three layers and into the size of mini, on SST-2 and STS-B.

    PYTHONPATH=. taskset -c 0 python benchmarks/distil_task.py OUT --init all-MiniLM-L6-v2 --glue GLUE

The teacher is fine-tuned on a sample of labelled rows. Each student trains for the same number of steps with the labels
alone, and with the teacher on the labelled rows and on texts without labels, with three seeds each. An interrupted
comparison resumes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import bert
from bert.config import PretrainConfig, recipe_folder
from bert.config.yaml_io import load_config
from bert.metrics import softmax
from bert.tasks import find_task

CALLS = 200
STUDENTS = ("3 layers", "mini")
MINI = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")


class Comparison(NamedTuple):
    """A task of GLUE, read as a custom task.

    Attributes:
        steps: steps of the teacher, of the student of three layers, and of mini.
    """

    folder: str
    recipe: str
    metric: str
    labelled: int
    unlabelled: int
    steps: tuple[int, int, int]


TASKS = {
    "sst2": Comparison("SST-2", "classification", "accuracy", 1500, 8000, (300, 300, 600)),
    "stsb": Comparison("STS-B", "regression", "pearson", 1500, 4000, (200, 300, 600)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--init", required=True)
    parser.add_argument("--glue", type=Path, required=True, help="folder of SST-2/ and STS-B/")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--students", nargs="+", choices=STUDENTS, default=list(STUDENTS))
    parser.add_argument("--num_seeds", type=int, default=3)
    arguments = parser.parse_args()
    print("| task | model | learns from | metric | dev | distance to the teacher | parameters | ms a text |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for student in arguments.students:
        for name in arguments.tasks:
            compare(name, student, arguments.out, arguments.init, arguments.glue, arguments.num_seeds)


def compare(name: str, student: str, out: Path, init: str, glue: Path, num_seeds: int) -> None:
    task = TASKS[name]
    train, dev, texts = rows_of(name, glue)
    out.mkdir(parents=True, exist_ok=True)
    unlabelled = out / f"{name}-texts.jsonl"
    unlabelled.write_text("".join(json.dumps(row) + "\n" for row in texts), encoding="utf-8")
    settings: dict[str, Any] = {
        "data.max_length": 64, "training.batch_size": 32, "optimizer.warmup_ratio": 0.1, "training.epochs": None,
        "data.buckets": [16, 32, 64], "optimizer.learning_rate": 1e-4, "training.log_every": 25,
    }  # fmt: skip
    if len(texts[0]) == 2:
        settings |= {"data.columns.text_a": "text_a", "data.columns.text_b": "text_b"}

    def finetune(folder: str, steps: int, init: Any, **overrides: Any) -> bert.Run:
        values = {**settings, "training.steps": steps, "training.eval_every": steps, **overrides}
        return bert.finetune(task.recipe, train=train, dev=dev, init=init, output_dir=out / folder, overrides=values)

    teacher = finetune(f"{name}-teacher", task.steps[0], init)
    if student == STUDENTS[0]:
        report(name, "6 layers", "labels", task, [teacher], teacher.model, dev)
    taught = {"distillation.teacher": str(teacher.path), "data.unlabelled": str(unlabelled.resolve())}
    mini = load_config(PretrainConfig, recipe_folder() / "mini.yaml").model
    sizes = {f"model.{key}": getattr(mini, key) for key in MINI}
    own: dict[str, Any] = {"num_init_layers": 3}
    source, steps = str(teacher.path), task.steps[1]
    if student == "mini":
        source, steps = "none", task.steps[2]
        own = {**sizes, "tokenizer.path": init, "optimizer.learning_rate": 5e-4}
    for learned, more in (("labels", {}), ("labels and teacher", taught)):
        folder = f"{name}-{student.replace(' ', '')}-{'taught' if more else 'alone'}"
        runs = [finetune(f"{folder}-{seed}", steps, source, seed=seed, **own, **more) for seed in range(num_seeds)]
        report(name, student, learned, task, runs, teacher.model, dev)


def rows_of(name: str, glue: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns a random sample of training rows, all dev rows, and other training rows without their labels."""
    task, folder = find_task(name), glue / TASKS[name].folder
    splits = []
    for split in ("train", "dev"):
        examples = task.read(folder, split)
        names = ["text"] if examples.texts_b is None else ["text_a", "text_b"]
        columns = [examples.texts_a, *([] if examples.texts_b is None else [examples.texts_b])]
        labels = examples.known_labels
        words = [task.output_names[label] for label in labels] if labels.dtype == np.int32 else labels.tolist()
        splits.append([dict(zip([*names, "label"], row, strict=True)) for row in zip(*columns, words, strict=True)])
    order = np.random.default_rng(0).permutation(len(splits[0]))
    labelled, total = TASKS[name].labelled, TASKS[name].labelled + TASKS[name].unlabelled
    chosen = [splits[0][row] for row in order[:total]]
    texts = [{key: value for key, value in row.items() if key != "label"} for row in chosen[labelled:]]
    return chosen[:labelled], splits[1], texts


def report(
    name: str,
    student: str,
    learned: str,
    task: Comparison,
    runs: list[bert.Run],
    teacher: Any,
    dev: list[dict[str, Any]],
) -> None:
    """Prints a row: the score on dev, the distance of the outputs to the teacher's, and the latency of one text."""
    inputs = [row["text"] if "text" in row else (row["text_a"], row["text_b"]) for row in dev]
    scores = [run.results["dev"][task.metric] for run in runs]
    target = outputs_of(teacher, inputs)
    distances = [distance(outputs_of(run.model, inputs), target) for run in runs]
    print(
        f"| {name} | {student} | {learned} | {task.metric} | {summary(scores)} | {summary(distances)} | "
        f"{runs[0].results['parameters']:,} | {latency(runs[0].model, inputs):.2f} |",
        flush=True,
    )


def outputs_of(model: Any, inputs: list[Any]) -> np.ndarray:
    examples = model.task.examples_from_inputs(inputs)
    return np.array(model.outputs(model.task.features(model.tokenizer, examples, model.data)))


def distance(outputs: np.ndarray, target: np.ndarray) -> float:
    """Returns the mean KL divergence from the teacher's distribution, or the mean squared difference of scores."""
    if outputs.shape[-1] == 1:
        return float(np.mean((outputs - target) ** 2))
    student, teacher = softmax(outputs), softmax(target)
    return float(np.mean(np.sum(teacher * np.log(teacher / student), axis=-1)))


def latency(model: Any, inputs: list[Any]) -> float:
    """Returns the median processor time of `predict` for single inputs, in milliseconds."""
    times = []
    for text in [*inputs[:CALLS], *inputs[:CALLS]]:  # the first round compiles
        start = time.process_time()  # of one core, so that other work on it does not count
        model.predict([text])
        times.append((time.process_time() - start) * 1e3)
    return statistics.median(times[CALLS:])


def summary(values: list[float]) -> str:
    deviation = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.4f}{deviation}"


if __name__ == "__main__":
    main()
