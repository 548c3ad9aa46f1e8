"""Parameters, FLOPs and memory of a model."""
