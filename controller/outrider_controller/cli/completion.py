"""outrider completion"""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

_VARIABLE = "_OUTRIDER_COMPLETE"


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print a script that makes the shell complete commands and options.

    \b
    bash: source <(outrider completion bash)
    zsh:  source <(outrider completion zsh)
    fish: outrider completion fish | source
    """
    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(ctx.find_root().command, {}, "outrider", _VARIABLE).source())
