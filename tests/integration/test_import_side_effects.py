"""Importing the package changes nothing for the rest of the process."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.medium

STATE = """
import importlib, logging, os, pkgutil, signal, sys, threading
import absl.logging, datasets, flax, jax, matplotlib, onnx, optax, orbax.checkpoint, tensorboardX

def state():
    loggers = [logging.getLogger(), *map(logging.getLogger, ("absl", "jax", "orbax"))]
    return {
        "hooks": (sys.unraisablehook, sys.excepthook, threading.excepthook),
        "logging": [(logger.level, logger.disabled, list(logger.filters), list(logger.handlers)) for logger in loggers],
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        "environment": dict(os.environ),
        "jax": jax.config.values,
    }

before = state()
import bert
for module in pkgutil.walk_packages(bert.__path__, "bert."):
    importlib.import_module(module.name)
after = state()
changed = [name for name in before if before[name] != after[name]]
assert not changed, changed
"""


def test_importing_every_module_changes_nothing_global() -> None:
    result = subprocess.run(
        [sys.executable, "-c", STATE], cwd=Path(__file__).parents[2], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
