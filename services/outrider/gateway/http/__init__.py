"""The OpenAI-compatible HTTP API.

Here: connections, access, reading of bodies, streams. Not here: the forms of the bodies (`openai/`), and how an answer
is made (`outrider.gateway.generation`). Begin with `app`.
"""
