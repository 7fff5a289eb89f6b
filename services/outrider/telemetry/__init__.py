"""Logs, metrics and spans. None of them contains prompts or answers."""
