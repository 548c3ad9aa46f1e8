"""Pretraining runs."""
