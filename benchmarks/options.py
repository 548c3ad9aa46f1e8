"""Pretrains small candidates, each for the same time on one core.

    PYTHONPATH=. taskset -c 0 python benchmarks/options.py OUT --train TRAIN --eval EVAL --tokenizer VOCABULARY

The default candidates are `bert` with one option of modern encoders at a time, and with all of them. `--candidates`
also supports:

- `bert` without one of the three changes that small budgets need;
- `rotary` with one other option, other rows or another schedule;
- `rotary` with one option against instability, each at three learning rates;
- the recipe `hours`, its model on rows of one text with masked or replaced tokens, and `hours` with one change.

OUT gets one run per candidate, which `transfer.py` can fine-tune. A short run of both phases measures the seconds per
step, which determine the number of steps in the given time. `--steps` sets the number directly. `--seed` starts from
other weights, in runs named CANDIDATE-SEED. Finished runs are not repeated.
"""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from bert.config import recipe_folder
from bert.runs.metrics_log import read_metrics

Settings = dict[str, Any]
"""Settings of a run: section -> key -> value, and the list of its phases."""

SHORT_ROWS: Settings = {"input_format": "full_sentences", "sequence_length": 32, "max_predictions_per_sequence": 5}
BERT: Settings = {
    "data": SHORT_ROWS,
    "model": {
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 512,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "initializer_range": 0.05,
        "position_embedding_init": "sinusoidal",
        "max_position_embeddings": 512,
    },
    "optimizer": {"learning_rate": 2e-3, "warmup_ratio": 0.05, "bias_correction": True},
    "training": {"batch_size": 128},
    "phases": [{"share": 0.75}, {"sequence_length": 128, "max_predictions_per_sequence": 20, "batch_size": 32}],
}
OPTIONS: dict[str, Settings] = {
    "pre_norm": {"pre_layer_norm": True, "first_layer_norm": False},
    "rotary": {"position_embedding_type": "rotary"},
    # Three matrices of this width have as many parameters as two of 512.
    "gated": {"gated_feed_forward": True, "intermediate_size": 341},
    "no_biases": {"use_bias": False, "norm_bias": False},
}
HOURS: Settings = yaml.safe_load((recipe_folder() / "hours.yaml").read_text(encoding="utf-8"))


def merged(*overlays: Settings) -> Settings:
    """Merges settings. Later overlays replace earlier ones."""
    settings: Settings = {}
    for overlay in overlays:
        for name, values in overlay.items():
            settings[name] = {**settings.get(name, {}), **values} if isinstance(values, dict) else values
    return settings


MODERN = {
    "bert": BERT,
    "modern": merged(BERT, *({"model": option} for option in OPTIONS.values())),
    **{name: merged(BERT, {"model": option}) for name, option in OPTIONS.items()},
}
"""The default candidates."""
LONG_ROWS: Settings = {
    "data": {"sequence_length": 128, "max_predictions_per_sequence": 20},
    "training": {"batch_size": 32},
    "phases": [{}],
}
"""Rows of 128 tokens from the first step on."""
WITHOUT_ONE_CHANGE: dict[str, Settings] = {
    "bert_long_rows": merged(BERT, LONG_ROWS),
    "bert_pairs": merged(BERT, {"data": {"input_format": "nsp"}}),
    "bert_random_positions": merged(BERT, {"model": {"position_embedding_init": "normal"}}),
}
MORE_OPTIONS: dict[str, Settings] = {
    "rms_norm": {"norm_type": "rms", "norm_bias": False},
    "shared_layers": {"layer_groups": 1},
    "no_positions": {"position_embedding_type": "none"},
}
"""Overrides of `rotary`, one per candidate."""
STABILITY: dict[str, Settings] = {
    "clipped": {},
    "stable_adamw": {"optimizer": {"name": "stable_adamw", "max_grad_norm": 0.0}},
    "z_loss": {"training": {"z_loss": 1e-4}},
    "skip_spikes": {"optimizer": {"spike_deviations": 6.0, "skip_spikes": True}},
    "no_embedding_norm": {"model": {"embedding_norm": False}},
    "scaled_embeddings": {"model": {"scale_embeddings": True}},
}
"""Overrides of `rotary` against instability, and of its embeddings.

`clipped` is `rotary`, whose gradient has a norm of at most 1.
"""
RATES = ("2e-3", "8e-3", "3e-2")
FALLING_MASKS: Settings = {
    "phases": [*({"share": 0.25, "masked_lm_prob": share} for share in (0.3, 0.25, 0.2)), BERT["phases"][-1]]
}
"""A masking rate that falls from 30% to 15%, as in the recipe `falling_masks`."""
DEEP: Settings = {"model": {"hidden_size": 96, "num_hidden_layers": 4, "intermediate_size": 384}}
"""Twice as many layers as `bert`, three quarters as wide: an eighth more parameters in the layers."""
FULL_ROWS = merged(HOURS, {"data": SHORT_ROWS, "training": {"batch_size": 128}})
REPLACED = {"training": {"objective": "rtd"}, "electra": {"generator_hidden_size": 0.5}}
CANDIDATES = {
    **MODERN,
    **WITHOUT_ONE_CHANGE,
    "rotary_long_rows": merged(MODERN["rotary"], LONG_ROWS),
    **{f"rotary_{name}": merged(MODERN["rotary"], {"model": option}) for name, option in MORE_OPTIONS.items()},
    **{
        f"{name}_{rate}": merged(MODERN["rotary"], option, {"optimizer": {"learning_rate": float(rate)}})
        for name, option in STABILITY.items()
        for rate in RATES
    },
    "rotary_falling_masks": merged(MODERN["rotary"], FALLING_MASKS),
    "rotary_deep": merged(MODERN["rotary"], DEEP),
    "rotary_untied": merged(MODERN["rotary"], {"model": {"tie_word_embeddings": False}}),
    "rotary_narrow_embeddings": merged(MODERN["rotary"], {"model": {"embedding_size": 64}}),
    "rotary_decay": merged(MODERN["rotary"], {"optimizer": {"schedule": "warmup_stable_decay"}}),
    "hours": HOURS,
    "full_rows": FULL_ROWS,
    "replaced": merged(FULL_ROWS, REPLACED),
    "hours_pre_norm": merged(HOURS, {"model": OPTIONS["pre_norm"]}),
    "hours_narrow_embeddings": merged(HOURS, {"model": {"embedding_size": 64}}),
    "hours_rate_1e-3": merged(HOURS, {"optimizer": {"learning_rate": 1e-3}}),
    "hours_rate_4e-3": merged(HOURS, {"optimizer": {"learning_rate": 4e-3}}),
}
LOGGING = {"eval_every": 10**6, "checkpoint_every": 10**6, "log_every": 10}
TOKENS = 4096
"""Tokens per step."""
PROBE_STEPS = 80
"""Number of steps of the short timed run."""


def main() -> None:
    """Runs the missing candidates and prints a table of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--train", required=True)
    parser.add_argument("--eval", required=True)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--minutes", type=float, default=8.0, help="of training steps, for each candidate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="of each candidate, in place of those that fit into the time")
    parser.add_argument("--candidates", nargs="+", choices=CANDIDATES, default=list(MODERN))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    print(
        "| candidate | steps | million tokens | minutes | held-out loss | perplexity | accuracy |\n" + "|---" * 7 + "|"
    )
    for name in given.candidates:
        print(row(name, given), flush=True)


def row(name: str, given: argparse.Namespace) -> str:
    """Returns the candidate's table row, after running it if necessary."""
    run = given.out / (f"{name}-{given.seed}" if given.seed else name)
    if not (run / "results.json").exists():
        pretrain(run, CANDIDATES[name], given.steps or fitting_steps(name, given), given)
    lines = read_metrics(run)
    last = [line for line in lines if line["split"] == "eval"][-1]
    minutes = seconds_per_step(run) * last["step"] / 60
    return (
        f"| {run.name} | {last['step']:,} | {TOKENS * last['step'] / 1e6:.1f} | {minutes:.1f} "
        f"| {last['mlm_loss']:.3f} | {math.exp(last['mlm_loss']):.1f} | {last['mlm_accuracy']:.3f} |"
    )


def fitting_steps(name: str, given: argparse.Namespace) -> int:
    """Returns the number of steps that fit into the time, measured by a short run."""
    probe = pretrain(given.out / f"probe-{name}", CANDIDATES[name], PROBE_STEPS, given)
    return round(60 * given.minutes / seconds_per_step(probe))


def pretrain(run: Path, candidate: Settings, steps: int, given: argparse.Namespace) -> Path:
    """Trains a candidate for a number of steps."""
    text, training = {"train": given.train, "eval": given.eval}, {"steps": steps, **LOGGING}
    config = merged(candidate, {"data": text, "training": training})
    config |= {"tokenizer": {"path": given.tokenizer}, "seed": given.seed}
    file = run.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    command = [sys.executable, "-m", "bert", "pretrain", "--config", str(file), "--output_dir", str(run)]
    with open(run.with_suffix(".log"), "w", encoding="utf-8") as log:
        subprocess.run(command, stdout=log, stderr=log, check=True)
    return run


def seconds_per_step(run: Path) -> float:
    """Returns the mean without the first log line, because the first steps are slower. A run has at least 20 steps."""
    rates = [line["tokens_per_second"] for line in read_metrics(run) if line["split"] == "train"]
    return TOKENS * statistics.mean(1 / rate for rate in rates[1:])


if __name__ == "__main__":
    main()
