"""Losses, optimizer, step, loop, pretraining and fine-tuning runs."""
