"""`bert finetune`: from a pretrained encoder and labelled files to scores and predictions."""

from __future__ import annotations

import dataclasses
import math

from bert.commands.arguments import invocation, parse, run_command
from bert.config import FinetuneConfig, UserError

DESCRIPTION = """Fine-tunes a pretrained encoder on a task, scores it on the dev set after every epoch, keeps the best
checkpoint and writes predictions. Run again with the same output_dir, a run resumes where it was."""


@run_command
def main(argv: list[str]) -> int:
    """Runs the command and returns its exit status."""
    config, recipe = parse(
        FinetuneConfig, argv, prog=invocation("finetune"), description=DESCRIPTION, default_recipe=None
    )
    if recipe is None and config.output_dir is None:
        raise UserError("neither --config nor --output_dir is given: name a recipe, for example --config sst2")
    if config.output_dir is None:
        config = dataclasses.replace(config, output_dir=f"runs/{recipe}")

    from bert.run import open_run

    run = open_run(config)

    from bert.finetuning import finetune
    from bert.train import Interrupted

    try:
        results = finetune(run)
    except Interrupted as stop:
        print(f"interrupted and saved at step {stop.step:,}; go on with: "
              f"{invocation('finetune')} --config {run.path / 'config.yaml'}")  # fmt: skip
        return stop.status
    _show(results, str(run.path))
    return 0


def _show(results: dict, path: str) -> None:
    print(f"\n{results['task']} dev, best of all evaluations (step {results['best_step']:,}), from {results['init']}:")
    for name, value in results["dev"].items():
        value = math.nan if value is None else value  # a run that diverged
        baseline = results["majority_class"].get(name)
        print(f"  {name:10}{value:8.4f}" + ("" if baseline is None else f"   (majority class {baseline:.4f})"))
    print(
        f"\n{results['seconds']:.0f} seconds; {path} holds predictions/, checkpoints, metrics.jsonl, curves.png, "
        "results.json"
        f"\nnext:\n  bert predict {path} FILE.txt"
    )
