"""What routers send, and what they read: openings, events, commits.

Each field is checked here, once. Not here: what a step does with it (`step/`), the drafts (`drafts/`), and the streams
(`service`, above). Begin with `wire`.
"""
