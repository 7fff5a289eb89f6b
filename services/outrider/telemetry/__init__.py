"""Logs and metrics. Prompts and answers stay out of both."""
