"""outrider trace: requests, round by round."""
