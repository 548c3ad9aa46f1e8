"""The run directory: configuration, checkpoints, metrics, progress, curves."""
