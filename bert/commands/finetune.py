"""`bert finetune`: from a pretrained encoder and labelled files to scores and predictions."""

from __future__ import annotations

import math
import shlex
import textwrap
from typing import TYPE_CHECKING, Any

from bert.commands.arguments import run_command
from bert.commands.training import run_training
from bert.config import FinetuneConfig
from bert.runs.metrics_log import scored_splits

if TYPE_CHECKING:
    from bert.runs.folder import RunFolder

DESCRIPTION = """Fine-tunes a pretrained encoder on a task, scores it on the dev set after every epoch, keeps the best
checkpoint and writes predictions. Run again with the same output_dir, a run resumes where it was."""

LONGEST_TEXT = 300
"""Characters of a text in a suggested command."""

COLLAPSED = "collapsed: it answers the same throughout, or no better than one who never reads the text"


@run_command
def main(argv: list[str]) -> int:
    """Runs the command and returns its exit status."""
    return run_training(argv, FinetuneConfig, "finetune", DESCRIPTION, None, _train, _show)


def _train(run: RunFolder[FinetuneConfig]) -> dict[str, Any]:
    from bert.training.finetuning import finetune
    from bert.training.seeds import finetune_seeds

    return finetune_seeds(run) if run.config.num_seeds > 1 else finetune(run)


def _show(results: dict[str, Any], path: str) -> None:
    if "runs" in results:
        return _show_seeds(results, path)
    print(f"\n{results['task']} dev, best of all evaluations (step {results['best_step']:,}), from {results['init']}:")
    for split in scored_splits(results):
        if split != "dev":
            print(f"{split}:")
        width = _width(results[split])
        for name, value in results[split].items():
            print(f"  {name:{width}}{_number(value)}{_baseline(results, name) if split == 'dev' else ''}")
        if split == "dev" and results["collapsed"]:
            print(f"  {COLLAPSED}")
    print(
        f"\n{results['seconds']:.0f} seconds; {path} holds predictions/, checkpoints, metrics.jsonl, curves.png, "
        "results.json"
        f"\nnext:{_next(path, results)}"
    )


def _show_seeds(results: dict[str, Any], path: str) -> None:
    main, runs = results["main_metric"], results["runs"]
    print(f"\n{results['task']} dev, {len(runs)} seeds, best of all evaluations of each, from {results['init']}:")
    for split in scored_splits(results):
        if split != "dev":
            print(f"{split}:")
        mean, deviation = results[split]["mean"], results[split]["standard_deviation"]
        width = _width(mean)
        for name in mean:
            baseline = _baseline(results, name) if split == "dev" else ""
            print(f"  {name:{width}}{_number(mean[name])} +-{_number(deviation[name])}{baseline}")
    for run in runs:
        note = f"   {COLLAPSED}" if run["collapsed"] else ""
        print(f"  seed {run['seed']}: {main} {_number(run['dev'][main]).strip()} at step {run['best_step']:,}{note}")
    best = f"{path}/seed-{results['best_seed']}"
    print(
        f"\n{results['seconds']:.0f} seconds; {path} holds results.json and a folder for each seed"
        f"\nnext:{_next(best, runs[0])}"
    )


def _next(path: str, results: dict[str, Any]) -> str:
    """Commands that work as they stand: they ask about an input of the run's own dev set."""
    run = shlex.quote(path)
    texts = [textwrap.shorten(text, LONGEST_TEXT, placeholder="") for text in results.get("sample_input") or ()]
    lines = [f"bert inspect {run}"]
    if texts and all(texts):
        format_ = "\\t".join(["%s"] * len(texts)) + "\\n"
        lines.insert(0, f"printf '{format_}' {' '.join(map(shlex.quote, texts))} | bert predict {run} -")
    return "".join(f"\n  {line}" for line in lines)


def _width(scores: dict[str, Any]) -> int:
    return max(10, *(len(name) + 2 for name in scores))


def _number(value: float | None) -> str:
    return f"{math.nan if value is None else value:8.4f}"  # None: a run that diverged


def _baseline(results: dict[str, Any], name: str) -> str:
    baseline = results["baseline"]
    value = results[baseline].get(name) if baseline else None
    return "" if value is None else f"   ({baseline.replace('_', ' ')} {value:.4f})"
