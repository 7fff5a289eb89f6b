"""Routes speculation rounds and runs the fleet. May import outrider; outrider never imports this."""
