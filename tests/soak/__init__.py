"""Long checks with an exit code and no figure that is tracked: kills, leaks, many streams."""
