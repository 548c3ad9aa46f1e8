"""Corpus files to documents and sentences."""
