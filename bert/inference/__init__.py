"""Trained models that answer: `bert.load` and what it returns."""
