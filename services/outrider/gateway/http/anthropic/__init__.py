"""Anthropic's Messages API: its bodies, as a second form of chats. What Claude Code speaks.

No I/O, and no way of its own to an answer. Begin with `request` for requests, `answers` for answers.
"""
