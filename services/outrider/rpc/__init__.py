"""gRPC infrastructure shared by all processes: servers, channels, credentials, errors. Independent of their roles.

Not here: what messages may hold (`outrider.protocol`). Begin with `link` for streams between processes, with `server`
for the other end.
"""
