"""outrider trace: one request, round by round."""
