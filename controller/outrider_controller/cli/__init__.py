"""The operator's command line. Speaks the public and the control API, and supervises the processes of one machine.

Data goes to stdout, everything else to stderr. Commands are imported when they are called: `outrider --help` loads
neither torch nor gRPC.

Not here: what a command asks of the cluster is answered by `control/api/`. Begin with `app`.
"""

from outrider.extras import naming_extras

with naming_extras("outrider", "controller"):
    from outrider_controller.cli.app import cli, main

__all__ = ["cli", "main"]
