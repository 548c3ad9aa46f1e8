"""File formats of labelled data."""
