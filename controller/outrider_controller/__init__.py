"""Routes speculation rounds and runs the fleet. May import outrider; outrider never imports this.

Not here: what computes or verifies tokens (`outrider`). Begin with `router`; `cli` has the commands.
"""
