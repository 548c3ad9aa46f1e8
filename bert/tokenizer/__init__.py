"""Train, load and extend vocabularies."""
