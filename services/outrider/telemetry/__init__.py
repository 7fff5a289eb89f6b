"""Logs, metrics and spans. None of them contains prompts or answers.

A new metric is a line where its process counts: `target/metrics.py`, `gateway/generation/metrics.py`, or the
router's `observe`; `metrics.py` here has those that several processes have.

Not here: which numbers a process counts. Begin with `metrics`.
"""
