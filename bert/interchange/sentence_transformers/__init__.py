"""Folders of sentence-transformers: modules, prompts and settings around an encoder."""
