"""Checkpoints of others: one table of names (`names`), read in both directions."""
