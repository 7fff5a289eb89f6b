"""What draft and target workers have in common: how their process starts and ends, and how its threads talk.

Knows no drafts and no verification: a worker's own package says what a step is.
"""
