"""The messages between processes: their bounds, checks and records. Opens no connection."""
