"""Conversion between text and token ids: chat templates, incremental detokenising, stop strings."""
