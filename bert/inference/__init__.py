"""Inference with trained models: `bert.load` and `bert.Pretrained`."""
