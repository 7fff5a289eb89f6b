"""Drafts that are looked up in text: they need tokens only, no model and no round trip."""
