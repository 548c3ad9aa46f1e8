"""`bert finetune`: fine-tunes a pretrained model on labelled data."""

from __future__ import annotations

import math
import shlex
import textwrap
from typing import Any

from bert.commands.cli.arguments import run_command
from bert.commands.cli.training import TrainingCommand
from bert.config import FinetuneConfig
from bert.errors import format_number
from bert.runs.metrics_log import scored_splits

DESCRIPTION = """Fine-tunes a pretrained model on a task, scores it on the dev set after every epoch, keeps the best
checkpoint and writes predictions. The same command with the same output_dir resumes a run."""

CROSS_VALIDATION_FOLDS = 4
"""Number of folds in the suggested command."""

MAX_TEXT_LENGTH, MAX_CONTEXT_LENGTH = 100, 300
"""Maximum number of characters of a text in a suggested command."""

COLLAPSED = "collapsed: all predictions are equal, or no better than without the text"


@run_command
def main(argv: list[str]) -> int:
    """Runs the command and returns its exit status."""
    command = TrainingCommand(argv, FinetuneConfig, "finetune", DESCRIPTION, None)
    with command.running():
        if command.is_sweep:
            command.run_sweep()
        else:
            from bert.training.launch import start_or_resume

            command.show(start_or_resume(command.request), _show)
    return command.status


def _show(results: dict[str, Any], path: str) -> None:
    runs = results.get("runs", ())  # results of several seeds
    what = f"{len(runs)} seeds, best of all evaluations of each" if runs else "best of all evaluations"
    step = "" if runs else f" (step {results['best_step']:,})"
    first, *_ = splits = scored_splits(results)
    if first != "dev":
        what = "which do not show how well new rows are predicted, because there are no dev rows"
    print(f"\n{results['task']} {'dev' if first == 'dev' else 'training rows'}, {what}{step}, from {results['init']}:")
    for split in splits:
        if split != first:
            print(f"{split}:")
        scores = results[split]["mean"] if runs else results[split]
        width = max(10, *(len(name) + 2 for name in scores))
        for name, value in scores.items():
            deviation = f" +-{_number(results[split]['standard_deviation'][name])}" if runs else ""
            baseline = _baseline(results, name) if split == first else ""
            label = results.get("metric_labels", {}).get(name)
            of_label = "" if label is None else f"   of the label {label!r}"
            print(f"  {name:{width}}{_number(value)}{deviation}{baseline}{of_label}")
        if split == first and results["collapsed"] is True:  # a list for several seeds
            print(f"  {COLLAPSED}")
        if split == first:
            for remark in results.get("remarks", ()):
                print(f"  {remark}")
            if (temperature := results.get("tuned", {}).get("calibration")) is not None:
                error = results["details"]["dev"]["calibration"]["ece"]
                print(f"  calibrated with temperature {temperature:.4g}: expected calibration error {error:.4g}")
            if "divergence" in results:
                print(f"  {results['divergence']}")
    for run in runs:
        score = _number(run[first][results["main_metric"]]).strip()
        notes = [*([COLLAPSED] if run["collapsed"] else []), *run.get("remarks", ())]
        notes += [run["divergence"]] if "divergence" in run else []
        note = f"   {'; '.join(notes)}".rstrip()
        print(f"  seed {run['seed']}: {results['main_metric']} {score} at step {run['best_step']:,}{note}")
    files = "predictions/, checkpoints, metrics.jsonl, curves.png, results.json"
    best, sample = path, results
    if runs:
        files, best, sample = "results.json and a folder for each seed", f"{path}/seed-{results['best_seed']}", runs[0]
    print(f"\n{results['seconds']:.0f} seconds; {path} holds {files}\nnext:{_next(best, sample)}")


def _next(path: str, results: dict[str, Any]) -> str:
    """Suggests commands that use an input of the run's dev set."""
    run = shlex.quote(path)
    texts = results.get("sample_input") or ()
    limit = MAX_TEXT_LENGTH if len(texts) == 1 else MAX_CONTEXT_LENGTH
    texts = [textwrap.shorten(text, limit, placeholder="") for text in texts]
    lines = [f"bert inspect {run}"]
    if texts and all(texts):
        format_ = "\\t".join(["%s"] * len(texts)) + "\\n"
        lines.insert(0, f"printf '{format_}' {' '.join(map(shlex.quote, texts))} | bert predict {run} -")
    if "dev" not in results:
        lines.insert(0, f"bert evaluate {run} train --cross_validate {CROSS_VALIDATION_FOLDS}   # a score for new rows")
    return "".join(f"\n  {line}" for line in lines)


def _number(value: float | None) -> str:
    return f"{format_number(math.nan if value is None else value, 4):>8}"  # None: the run diverged


def _baseline(results: dict[str, Any], name: str) -> str:
    baseline = results["baseline"]
    value = results[baseline].get(name) if baseline else None
    return "" if value is None else f"   ({baseline.replace('_', ' ')} {format_number(value, 4)})"
