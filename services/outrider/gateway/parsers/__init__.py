"""From an answer's text to a message: reasoning, content and tool calls, as the text comes. Pure."""
