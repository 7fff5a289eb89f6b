"""Stock clients, each a program for an environment that has none of ours: `PROGRAM URL MODEL`."""
