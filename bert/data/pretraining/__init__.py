"""Documents to examples on disk to masked batches."""
