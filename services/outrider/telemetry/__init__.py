"""Logs, metrics and spans. Prompts and answers stay out of all of them."""
