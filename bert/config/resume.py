"""Keys that may change when a run resumes, and how the result then compares with an uninterrupted run.

Imports no JAX.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from bert.config.finetuning import FinetuneConfig
from bert.config.model import MODEL_KEYS_KEPT_WITH_INIT
from bert.config.pretraining import PretrainConfig, phase_configs
from bert.config.run_file import flatten, with_credentials
from bert.config.validation import EARLIER_DEFAULTS
from bert.config.yaml_io import keys_of
from bert.errors import redact

Config = TypeVar("Config", PretrainConfig, FinetuneConfig)

SCHEDULE_CONDITION = "the learning rate and the phase of every step done so far stay the same"


@dataclass(frozen=True)
class ResumableKey:
    """A key that may change when a run resumes.

    Attributes:
        key: keys of phases have no number.
        effect: ``exact`` if the result is bit for bit that of a run that had the new value from the start; ``rounding``
            if it is the same except for the rounding of sums; ``later`` if steps are exact, and log lines or
            evaluations are at other steps from here on.
        condition: when it may change; empty for always.
        reason: why the result does not depend on it.
    """

    key: str
    effect: Literal["exact", "rounding", "later"]
    reason: str
    condition: str = ""

    @property
    def of_schedule(self) -> bool:
        """Whether it may change only if the schedule so far stays the same."""
        return self.condition == SCHEDULE_CONDITION


def _of_schedule(key: str, reason: str) -> ResumableKey:
    return ResumableKey(key, "exact", reason, SCHEDULE_CONDITION)


RESUMABLE = (
    ResumableKey("output_dir", "exact", "the folder may have moved"),
    ResumableKey("profile", "exact", "it writes a trace and does not change the training"),
    ResumableKey("loggers", "exact", "they receive copies of the metrics"),
    ResumableKey("transfer", "exact", "it runs after the last step"),
    ResumableKey("num_seeds", "exact", "each seed is a run by itself", "the run has several seeds before and after"),
    ResumableKey("data.num_workers", "exact", "examples do not depend on the processes that build them"),
    ResumableKey("data.cache_dir", "exact", "the digest of the examples is compared"),
    ResumableKey("training.log_every", "later", "log lines are means since the line before"),
    ResumableKey("training.eval_every", "later", "fine-tuning chooses its best checkpoint among the evaluations"),
    ResumableKey("training.checkpoint_every", "exact", "a checkpoint does not change the state"),
    ResumableKey("training.max_to_keep", "exact", "the newest checkpoint always stays"),
    ResumableKey("training.max_consecutive_nonfinite_steps", "exact", "it only ends a run"),
    ResumableKey("training.eval_batch_size", "rounding", "scores of evaluations are sums over rows"),
    ResumableKey("training.gradient_accumulation_steps", "rounding", "gradients of micro-batches are added"),
    ResumableKey("training.mesh", "rounding", "gradients of devices are added; so for any other number of devices"),
    ResumableKey("training.remat", "rounding", "activations are computed again"),
    ResumableKey("training.scan_layers", "rounding", "layers are compiled as one"),
    ResumableKey("training.pad_vocab_to_multiple_of", "rounding", "tokens beyond the vocabulary have no probability"),
    ResumableKey("phases.gradient_accumulation_steps", "rounding", "gradients of micro-batches are added"),
    _of_schedule("training.steps", "batches, masks and dropout depend on the number of a step alone"),
    _of_schedule("training.epochs", "as training.steps"),
    _of_schedule("training.max_minutes", "it ends or decays a run whose rate has not fallen"),
    _of_schedule("optimizer.schedule", "steps done so far had the same rates"),
    _of_schedule("optimizer.warmup_steps", "steps done so far had the same rates"),
    _of_schedule("optimizer.warmup_ratio", "steps done so far had the same rates"),
    _of_schedule("optimizer.decay_ratio", "steps done so far had the same rates"),
    _of_schedule("optimizer.final_rate", "steps done so far had the same rates"),
)
"""Every remedy of `bert.errors.OUT_OF_MEMORY` is one of these."""

RESUMABLE_KEYS = tuple(entry.key for entry in RESUMABLE)

INCIDENTAL_KEYS = tuple(entry.key for entry in RESUMABLE if not entry.of_schedule)
"""Keys that do not change what a run learns beyond rounding."""

SCHEDULE_KEYS = tuple(entry.key for entry in RESUMABLE if entry.of_schedule)

DERIVED_KEYS = (
    "model.vocab_size",
    "model.decoder_vocab_size",
    "model.decoder_layers",
    "data.labels",
    "data.clitics",
    "data.pair_truncation",
    "data.dev_fraction",
    "distillation.checksum",
    "embedding.pooling",
    "embedding.normalize",
    "embedding.lowercase",
    "embedding.query_prompt",
    "embedding.document_prompt",
    "lora.checksum",
)
"""Keys that default to null and are filled in from the data or the initial model; config.yaml records the value."""


def first_difference(requested: Config, stored: Config) -> tuple[str, Any, Any] | None:
    """Returns the first key that differs and may not change on resume, with its stored and its requested value."""
    # A run that starts from another one has that one's sizes, whatever the recipe says.
    source = requested.init not in (None, "none") or getattr(requested, "architecture_from", None) is not None
    stored_values, values = flatten(dataclasses.asdict(stored)), flatten(dataclasses.asdict(requested))
    stored_resolved, resolved = flatten(_with_computed_defaults(stored)), flatten(_with_computed_defaults(requested))
    defaults = {key: field.default for key, field in keys_of(type(requested)).items()}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        comes_along = section in ("model", "tokenizer") and name not in MODEL_KEYS_KEPT_WITH_INIT
        if key == "tokenizer.path" and isinstance(requested, PretrainConfig):
            comes_along = False  # the source's vocabulary may be extended
        may_change = (source and comes_along) or re.sub(r"^phases\.\d+\.", "phases.", key) in RESUMABLE_KEYS
        if key == "num_seeds":  # more of several may come; one run and several are different folders
            may_change = (value > 1) == (stored_values[key] > 1)
        is_derived = key in DERIVED_KEYS and value is None
        earlier = (defaults.get(key), EARLIER_DEFAULTS.get(name))
        is_earlier_default = name in EARLIER_DEFAULTS and (value, stored_values.get(key)) == earlier
        is_equal = resolved[key] == stored_resolved.get(key) or redact(value) == redact(stored_values.get(key))
        if not (may_change or is_derived or is_earlier_default or is_equal):
            return key, stored_values.get(key), value
    return next(((key, value, None) for key, value in stored_values.items() if key not in values), None)


def _with_computed_defaults(config: PretrainConfig | FinetuneConfig) -> dict[str, Any]:
    """Returns the values of a configuration, with those that null stands for in keys that are computed from others."""
    values = dataclasses.asdict(dataclasses.replace(config, model=config.model.resolved))
    if isinstance(config, PretrainConfig):
        values["data"]["max_predictions_per_sequence"] = config.data.predictions_per_row
        for phase, alone in zip(values["phases"] or [], phase_configs(config), strict=False):
            phase["max_predictions_per_sequence"] = alone.data.predictions_per_row
    return values


def has_other_schedule(requested: Config, stored: Config) -> bool:
    """Whether a key differs that may change only if the schedule so far stays the same."""
    before, after = flatten(dataclasses.asdict(stored)), flatten(dataclasses.asdict(requested))
    return any(before.get(key) != after.get(key) for key in SCHEDULE_KEYS)


def apply_resumable_keys(stored: Config, requested: Config) -> Config:
    """The stored configuration with the requested values of `RESUMABLE_KEYS`."""
    for key in RESUMABLE_KEYS:
        section, _, name = key.rpartition(".")
        if not section:
            stored = _with_value(stored, requested, name)
        elif getattr(stored, section, None) and getattr(requested, section, None):
            changed = _with_value(getattr(stored, section), getattr(requested, section), name)
            stored = dataclasses.replace(stored, **{section: changed})
    return with_credentials(stored, requested)


def _with_value(stored: Any, requested: Any, name: str) -> Any:
    """A section, or each of a list of sections, with one value of another; as it is without such a key."""
    if isinstance(stored, list):
        return [_with_value(*pair, name) for pair in zip(stored, requested, strict=True)]
    return dataclasses.replace(stored, **{name: getattr(requested, name)}) if hasattr(requested, name) else stored
