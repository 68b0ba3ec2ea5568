"""`python -m examples.demo`: the whole job on real input, shown side by side."""

import json
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from examples.demo.stoppable import run_stoppable
from kvgrpc.errors import KVGrpcError

if TYPE_CHECKING:
    from examples.demo.results import Result


class DataPath(StrEnum):
    """Data paths to choose from."""

    AUTO = "auto"
    SHM = "shm"
    CMA = "cma"
    NIXL = "nixl"
    COLLECTIVE = "collective"


class Mode(StrEnum):
    """The side that begins a transfer."""

    PULL = "pull"
    PUSH = "push"


def demo(  # noqa: PLR0913, PLR0917 - one argument per option, all by name
    datapath: Annotated[DataPath, typer.Option(help="Data path; auto takes the best.")] = DataPath.AUTO,
    mode: Annotated[
        Mode, typer.Option(help="pull: D fetches what P hands over. push: P moves into blocks that D reserved.")
    ] = Mode.PULL,
    layerwise: Annotated[
        bool, typer.Option("--layerwise", help="Push each layer once it is computed, and compare with whole prompts.")
    ] = False,
    tls: Annotated[
        bool,
        typer.Option("--tls", help="Mutual TLS: both servers and the router have certificates of a CA of this run."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
    corrupt_block: Annotated[
        bool, typer.Option(help="Change a received block before decoding: the comparison must fail.")
    ] = False,
    swap_grants: Annotated[
        bool, typer.Option(help="Give two requests each other's grants: both must be refused.")
    ] = False,
) -> None:
    """Split a small transformer across two engines and show that the tokens are those of one engine.

    Starts two servers (P prefills, D decodes) and three engine processes: one attached to each server, and one that
    does both by itself. After the prompts comes a conversation, for which P takes D's replies back. What is being done
    goes to standard error, the result to standard output. Exit code 0 when every token is equal and nothing is left
    behind, else 1.
    """
    from examples.demo.results import Options
    from examples.demo.run import run

    if layerwise and mode is not Mode.PUSH:
        raise typer.BadParameter("layers are pushed, not pulled: add --mode push", param_hint="--layerwise")
    options = Options(mode is Mode.PUSH, layerwise, corrupt_block, swap_grants)
    try:
        result = run_stoppable(run(datapath.value, options, lambda line: typer.echo(line, err=True), tls=tls))
    except (KVGrpcError, TimeoutError) as error:
        typer.echo(f"demo: {str(error) or 'a process did not answer in time'}", err=True)
        raise typer.Exit(1) from error
    raise typer.Exit(report(result, as_json))


def report(result: "Result", as_json: bool) -> int:
    """Shows the result and returns the exit code."""
    if as_json:
        typer.echo(json.dumps(result.as_json()))
    else:
        from examples.demo.view import show

        show(result)
    return 0 if result.identical else 1
