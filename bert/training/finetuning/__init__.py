"""Fine-tuning runs."""
