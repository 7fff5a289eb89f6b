"""What the messages between processes mean: their bounds, checks and records. Opens no connection."""
