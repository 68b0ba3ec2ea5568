"""`kvgrpc completion`: the script by which a shell completes commands and options."""

from enum import Enum
from typing import Annotated

import typer

COMPLETE = "_KVGRPC_COMPLETE"
"""Variable by which the script asks the command what may come next."""


class Shell(Enum):
    """The shells that are served."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(shell: Annotated[Shell, typer.Argument(help="The shell.")]) -> None:
    """Print the script by which a shell completes commands and options.

    Example: [bold]source <(kvgrpc completion bash)[/bold]
    """
    from typer._completion_shared import get_completion_script

    typer.echo(get_completion_script(prog_name="kvgrpc", complete_var=COMPLETE, shell=shell.value))
