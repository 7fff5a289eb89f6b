"""What routers send, and what they read: streams, openings, commits.

Each field is checked here, once. Not here: what a step does with it (`step/`), and the drafts (`drafts/`). Begin with
`service`.
"""
