"""gRPC infrastructure shared by all processes: servers, channels, credentials, errors. Independent of their roles."""
