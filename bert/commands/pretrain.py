"""`bert pretrain`: pretrains a model on a corpus."""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path
from typing import Any

from bert.commands.cli.arguments import command_name, run_command
from bert.commands.cli.training import TrainingCommand
from bert.config import PretrainConfig
from bert.errors import format_number

DESCRIPTION = """Pretrains a model on a corpus. Without arguments, it trains a tiny model on the docstrings of all
installed packages, in a few minutes on two CPU cores. The same command with the same output_dir resumes a run."""


COMPARED = ("pretrained", "random_weights", "bag_of_words")
"""The columns of the table of ``transfer``."""


@run_command
def main(argv: list[str]) -> int:
    """Runs the command and returns its exit status."""
    command = TrainingCommand(argv, PretrainConfig, "pretrain", DESCRIPTION, "quickstart")
    with command.running():
        if command.is_sweep:
            command.run_sweep()
        else:
            from bert.training.launch import start_or_resume

            command.show(start_or_resume(command.request), _show)
    return command.status


def _show(results: dict[str, Any], path: str) -> None:
    measured, baselines = results["eval"], results["baselines"]
    unigram = baselines["unigram"]
    print(f"\nheld-out text after {results['steps']:,} steps:")
    print(f"  {'':22}{'model':>10}{'baseline':>12}")
    prediction = next(name for name in ("lm", "plm", "mlm") if f"{name}_accuracy" in measured)
    lines = [
        (
            f"{prediction.upper()} accuracy",
            measured[f"{prediction}_accuracy"],
            unigram.get("accuracy"),
            "most frequent token",
        ),
        (f"{prediction.upper()} perplexity", measured["perplexity"], unigram.get("perplexity"), "unigram frequencies"),
    ]
    for name, value in baselines.items():
        if name.endswith("_majority_accuracy"):  # the objective's label, if it has one
            metric = name.removesuffix("_majority_accuracy")
            lines.append((f"{metric.upper()} accuracy", measured[f"{metric}_accuracy"], value, "majority class"))
    if "disc_recall" in measured:
        lines.append(("DISC recall", measured["disc_recall"], 0.0, "no token predicted as replaced"))
    for name, value, baseline, what in lines:
        digits = 1 if name.endswith("perplexity") else 3
        print(f"  {name:22}{_number(value, digits):>10}{_number(baseline, digits):>12}   ({what})")
    if "bits_per_byte" in measured:
        print(f"  {'bits per byte':22}{_number(measured['bits_per_byte'], 3):>10}")
    for remark in results.get("remarks", ()):
        print(f"  {remark}")
    if "transfer" in results:
        _show_transfer(results["transfer"])
    if "filled_masks" in results:
        _show_filled_masks(results["filled_masks"])
    else:
        print("\nheld-out texts, continued:")
        for sample in results["continuations"]:
            print(f"  {json.dumps(sample['text'], ensure_ascii=False)}")
            print(f"    -> {json.dumps(sample['continuation'], ensure_ascii=False)}")
    vocabulary = ", ".join(name for name in ("tokenizer.json", "vocab.txt") if Path(path, name).is_file())
    print(
        f"\n{results['seconds']:.0f} seconds; {path} holds checkpoints, {vocabulary}, metrics.jsonl, curves.png, "
        "results.json"
        f"{', export (for transformers)' if Path(path, 'export').is_dir() else ''}\nnext:{_next(path, results)}"
    )


def _show_filled_masks(filled_masks: list[dict[str, Any]]) -> None:
    print("\nmasked words of held-out sentences:")
    for filled in filled_masks:
        guesses = ", ".join(f"{guess['token']} {_share(guess['probability'])}" for guess in filled["guesses"])
        print(f"  {filled['text']}\n    -> {guesses}   (truth: {filled['truth']})")


def _show_transfer(transfer: list[dict[str, Any]]) -> None:
    """Prints a row for each task."""
    from bert.runs.report import align_columns

    seeds = len(transfer[0]["pretrained"]["scores"])
    print(f"\nfine-tuned, scores on held-out modules{f' (means of {seeds} seeds)' if seeds > 1 else ''}:")
    header = ("", *(name.replace("_", " ") for name in COMPARED))
    rows = [
        (
            f"{task['task'].replace('_', ' ')} ({task['train_rows']:,} labels), {task['metric'].replace('_', ' ')}",
            *(_number(task[name]["mean"], 3) if name in task else "" for name in COMPARED),
        )
        for task in transfer
    ]
    print("\n".join(align_columns([header, *rows])))


def _next(path: str, results: dict[str, Any]) -> str:
    """Suggests commands that use the run and its held-out text."""
    run, lines = shlex.quote(path), []
    if continuations := results.get("continuations"):
        lines = [f"bert generate {run} {shlex.quote(continuations[0]['text'])}"]
    if filled_masks := results.get("filled_masks"):
        text = filled_masks[0]["text"]
        lines = [f"bert attention {run} {shlex.quote(text)} --output attention.html"]
    for task in results.get("transfer", ())[1:2]:
        name = task["task"]
        data = f"--data.dir {run}/transfer/{name} " if Path(path, "transfer", name).is_dir() else ""
        lines.append(f"{command_name('finetune')} --config {name} --init {run} {data}--output_dir runs/{name}")
    lines.append(f"bert inspect {run}")
    if "remarks" not in results:
        lines.append(f"{command_name('finetune')} --help   # to fine-tune from this run: --init {run}")
    if filled_masks:
        lines.append(f"in Python: bert.load({path!r}).fill_mask({text!r})")
    return "".join(f"\n  {line}" for line in lines)


def _number(value: float | None, digits: int) -> str:
    """Formats a number; null, which a diverged run has in results.json, becomes nan."""
    return format_number(math.nan if value is None else value, digits)


def _share(value: float | None) -> str:
    return f"{math.nan if value is None else value:.0%}"
