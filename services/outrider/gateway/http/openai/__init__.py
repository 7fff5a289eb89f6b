"""What clients send and read: the bodies of OpenAI's endpoints, and their conversion.

No I/O. Not here: how bodies travel (`outrider.gateway.http`). Begin with `schemas` for requests, `shapes` for answers.
"""
