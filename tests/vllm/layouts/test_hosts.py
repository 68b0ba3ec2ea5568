"""Workers on other hosts than their scheduler: nodes of vLLM's own are served, and others stop the start."""

import json
import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from socket import gethostname
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from kvgrpc.integrations.vllm.meeting import ATTACHED, TICKET, WorkerGreeting, check_here
from kvgrpc.integrations.vllm.modes import launch
from kvgrpc.integrations.vllm.options import BlockOptions
from kvgrpc.integrations.vllm.places import FolderPlace, MeetingPlace, StorePlace
from kvgrpc.integrations.vllm.worker_side import WorkerSide
from tests.vllm.cores import LAYERS, pool_of
from tests.vllm.processes import command_line, tree_of

LAYOUT = pool_of(states=False)[0]
OPTIONS = BlockOptions(data_paths=("collective",))


@pytest.fixture
def store() -> Iterator[str]:
    """Yields the address of a store such as vLLM's worker of rank 0 has for the workers of all nodes."""
    made = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield f"127.0.0.1:{made.port}"
    del made  # the store lives as long


@pytest.fixture(params=["folder", "store"])
def place(request: pytest.FixtureRequest, tmp_path: Path, store: str) -> MeetingPlace:
    return FolderPlace(tmp_path) if request.param == "folder" else StorePlace(store, "here/tmp/a")


def worker_at(layout: Any = LAYOUT) -> WorkerSide:
    made, (_, memory) = WorkerSide(OPTIONS, layout), pool_of(states=False)
    made.register({str(layer): memory[layer] for layer in range(LAYERS)}, [[str(layer) for layer in range(LAYERS)]])
    return made


def links() -> list[int]:
    """Returns the processes that link a rank of this process to a lead on another host."""
    return [pid for pid in tree_of(os.getpid()) if "kvgrpc.rank_link" in command_line(pid)]


def test_a_text_that_is_left_at_a_place_is_heard_whole_until_it_is_removed(place: MeetingPlace) -> None:
    assert not place.has(TICKET)
    place.say(TICKET, "a ticket\n" * 1000)
    assert place.has(TICKET)
    assert place.hear(TICKET, 1.0) == "a ticket\n" * 1000
    place.remove(TICKET)
    assert not place.has(TICKET)
    with pytest.raises(TimeoutError, match=r"did not come within 0\.01 s .*ticket"):
        place.hear(TICKET, 0.01)


def test_a_worker_on_another_node_attaches_over_the_network_and_leaves_no_ticket(store: str) -> None:
    near, far = worker_at(), worker_at()
    greetings = [WorkerGreeting(str(of.folder), [], LAYOUT, gethostname()) for of in (near, far)]
    greetings[1].store = store
    with closing(near), closing(far):
        for side, greeting in zip((near, far), greetings, strict=True):
            side.attach(greeting.place)
        with launch(OPTIONS, LAYOUT, "E", "weights", [(greeting, [0]) for greeting in greetings]):
            assert len(links()) == 1, "the far rank's alone"
            assert not greetings[1].place.has(TICKET)
            with pytest.raises(ValueError, match="serves an engine once"):
                launch(OPTIONS, LAYOUT, "F", "weights", [(greeting, [0]) for greeting in greetings])
    assert links() == []


def test_a_worker_on_another_node_says_why_it_cannot_attach(store: str) -> None:
    greeting = WorkerGreeting("/a", [], LAYOUT, gethostname(), store=store)
    greeting.place.say(TICKET, json.dumps({}))
    with closing(worker_at()) as side:
        side.attach(greeting.place)
        assert greeting.place.hear(ATTACHED, 10.0) == "KeyError: 'rank'"


def test_a_lead_at_loopback_stops_the_start_of_an_engine_on_several_hosts(tmp_path: Path, store: str) -> None:
    elsewhere = WorkerGreeting(str(tmp_path), [], LAYOUT, "gpu-7", store=store)
    what = r'one is on gpu-7, and the lead serves at 127\.0\.0\.1:\d+\. To do: set "listen" to an address of this host'
    with pytest.raises(ValueError, match=what):
        launch(OPTIONS, LAYOUT, "E", "weights", [(elsewhere, [0])])


def test_a_worker_on_a_host_that_is_no_node_stops_the_start_and_is_named(tmp_path: Path) -> None:
    """Ray may place a worker elsewhere, and vLLM's configuration does not say so."""
    here = WorkerGreeting(str(tmp_path), [], LAYOUT, "here")
    elsewhere = WorkerGreeting(str(tmp_path / "none"), [], LAYOUT, "gpu-7")
    check_here([[here, here], [here, replace(elsewhere, store="10.0.0.1:29501")]])
    what = r"rank 1 of stage 1 is on gpu-7, and .*/none is not on .*\. To do: keep all workers of an engine on one host"
    with pytest.raises(ValueError, match=what):
        check_here([[here, here], [here, elsewhere]])
