"""Two leads are upgraded and rolled back one after the other while clients of both versions pull and push."""

import json
import sys
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import grpc
import pytest

from kvgrpc.v1 import transfer_pb2
from tests.operators.programs import free_ports
from tests.service.engines import HOME, SUCCEEDED, Engine, wait_until
from tests.skew.versions import TREE, Version, serving

PROGRAM = Path(__file__).with_name("storm_program.py")
ROLLS = ((0, True), (1, True), (0, False), (1, False))
"""Which lead is replaced next, and whether by one of the wheel."""
MOVES = 20
"""Number of moves that each life of a lead sees before the next one is replaced."""
FLAGS = ("--drain-s", "5")


def fill(engine: Engine, seed: int) -> None:
    """Writes random bytes into the blocks that no client has."""

    def filled() -> bool:
        try:
            blocks = engine.allocate(engine.counts().free_block_count)
        except grpc.RpcError:  # a client took a block in between
            return False
        engine.write(blocks, seed)
        engine.free(blocks)
        return True

    wait_until(filled)


def moved_through(engine: Engine) -> bool:
    """Says whether clients have moved blocks through this life of a lead, as source and as destination."""
    request = transfer_pb2.ListTransfersRequest(filter=transfer_pb2.TransferFilter(states=[SUCCEEDED]), page_size=1000)
    directions = [transfer.direction for transfer in engine.api.transfers.ListTransfers(request).transfers]
    return len(directions) >= MOVES and len(set(directions)) == 2


def told(engines: list[Engine]) -> list[object]:
    """Returns what the leads say of their blocks and transfers."""
    return [(engine.counts(), engine.transfers_state()) for engine in engines]


def check(said: list[Counter[str]]) -> None:
    """Checks what the programs counted."""
    for seen in said:
        assert seen["wrong"] == seen["untyped"] == 0, said
        assert seen["right"] > 0, said


def rolled(programs: list[Future[str]], engine: Engine) -> bool:
    """Says whether clients move blocks through this life of a lead. Raises what a program that ended raised."""
    for program in programs:
        assert not program.done(), program.result()
    return moved_through(engine)


def test_a_rolling_upgrade_and_its_way_back_bring_no_wrong_byte_and_leave_no_request_untyped(
    versions: dict[bool, Version], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    addresses = [f"{HOME}:{port}" for port in free_ports(2)]
    stop = tmp_path / "stop"
    with ThreadPoolExecutor() as threads, ExitStack() as everything:
        leads = [everything.enter_context(ExitStack()) for _ in addresses]

        def begin(lead: int, wheel: bool, life: int) -> Engine:
            folder = tmp_path / f"lead-{lead}-{life}"
            listen = "--listen", addresses[lead]
            engine = leads[lead].enter_context(serving(versions[wheel], folder, *listen, *FLAGS))
            fill(engine, seed=2 * life + lead)
            return engine

        engines = [begin(lead, False, 0) for lead in range(len(addresses))]
        everything.callback(stop.touch)
        runs = [versions[wheel].run for wheel in (True, True, False, False)]
        programs = [threads.submit(run, str(PROGRAM), *addresses, str(stop)) for run in runs]
        for engine in engines:
            wait_until(partial(rolled, programs, engine), what=partial(told, engines))
        for life, (lead, wheel) in enumerate(ROLLS, start=1):
            leads[lead].close()  # it drains, and ends in order
            engines[lead] = begin(lead, wheel, life)
            wait_until(partial(rolled, programs, engines[lead]), what=partial(told, engines))
        stop.touch()
        said = [Counter[str](json.loads(program.result())) for program in programs]
    with capsys.disabled():
        sys.stdout.write(f"\n{dict(sum(said, Counter()))}\n")
    check(said)


def test_a_planted_byte_is_seen(tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    with serving(TREE, tmp_path / "one") as one, serving(TREE, tmp_path / "other") as other:
        for seed, engine in enumerate((one, other)):
            fill(engine, seed)
        stop.touch()  # the program ends after its first move
        said = Counter[str](json.loads(TREE.run(str(PROGRAM), one.address, other.address, str(stop), "--plant")))
    assert said == {"wrong": 1}
    with pytest.raises(AssertionError):
        check([said])
