"""Sessions of three turns with tools, each a program like those above. A scripted model answers."""
