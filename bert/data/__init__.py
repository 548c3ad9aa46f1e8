"""Text and labelled files to batches, in NumPy and Arrow."""
