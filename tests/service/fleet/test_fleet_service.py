"""FleetService at real leads: entries, watches and pairs follow what is there, and what answers."""

from collections.abc import Callable, Iterator

import grpc
import pytest

from kvgrpc.v1 import admin_pb2, common_pb2, fleet_pb2
from tests.service.api import refused
from tests.service.conftest import Start
from tests.service.engines import Engine, wait_until
from tests.service.fleet.conftest import EnginesFile, row

HEALTHY, FAILED = fleet_pb2.ENGINE_STATE_HEALTHY, fleet_pb2.ENGINE_STATE_FAILED
DRAINING, UNPROVEN = fleet_pb2.ENGINE_STATE_DRAINING, fleet_pb2.ENGINE_STATE_UNPROVEN


def listed(engine: Engine, **wanted: object) -> dict[str, fleet_pb2.FleetEngine]:
    """Returns the listed engines, by id."""
    asked = fleet_pb2.ListEnginesRequest(filter=fleet_pb2.EngineFilter(**wanted), page_size=1000)  # type: ignore[arg-type]
    return {one.engine_id: one for one in engine.api.fleet.ListEngines(asked).engines}


def states(engine: Engine) -> dict[str, int]:
    return {name: one.state for name, one in listed(engine).items()}


def pick(engine: Engine, **fields: object) -> fleet_pb2.PickPairResponse:
    return engine.api.fleet.PickPair(fleet_pb2.PickPairRequest(**fields))  # type: ignore[arg-type] # its fields


def test_an_engine_is_healthy_when_its_lead_answers_as_the_entry_says(start: Start, engines_file: EnginesFile) -> None:
    lead, other = start(("--engine-id", "a"), ("--engine-id", "b"), **engines_file.environment)
    engines_file.write([row(lead, incarnation=lead.incarnation()), row(other)])
    wait_until(lambda: states(lead) == {"a": HEALTHY, "b": HEALTHY})
    found = listed(lead)["b"]
    assert (list(found.addresses), found.why, found.HasField("answer_age")) == ([other.address], "", True)
    other.process.kill()
    wait_until(lambda: states(lead) == {"a": HEALTHY, "b": FAILED})
    assert other.address in listed(lead)["b"].why


def test_an_entry_that_lies_is_never_healthy(start: Start, engines_file: EnginesFile) -> None:
    lead, other = start(("--engine-id", "a"), ("--engine-id", "b"), **engines_file.environment)
    lies = {
        "another id": row(other, engine_id="c"),
        "another life": row(other, engine_id="b", incarnation=other.incarnation() - 1),
        "nobody": row(other, engine_id="d", addresses=["127.0.0.1:1"]),
        "not to be dialled": row(other, engine_id="e", addresses=["192.0.2.1:50051"]),
    }
    engines_file.write([row(lead), *lies.values()])
    wait_until(lambda: states(lead) == {"a": HEALTHY} | dict.fromkeys("bcde", FAILED))
    whys = {name: one.why for name, one in listed(lead).items()}
    assert "answers engine b" in whys["c"]
    assert f"answers engine b, incarnation {other.incarnation()}" in whys["b"]
    assert "dial_allow" in whys["e"]
    assert not pick(lead).HasField("decode")


def test_an_engine_that_drains_is_not_picked_and_is_when_it_goes_on(start: Start, engines_file: EnginesFile) -> None:
    lead, other = start(("--engine-id", "a"), ("--engine-id", "b"), **engines_file.environment)
    engines_file.write([row(lead), row(other)])
    wait_until(lambda: pick(lead).HasField("prefill"))
    other.api.admin.StartDrain(admin_pb2.StartDrainRequest())
    wait_until(lambda: states(lead)["b"] == DRAINING)
    found = pick(lead)
    assert not found.HasField("prefill")
    assert "1 draining, 1 healthy" in found.reason
    assert {(one.state, one.engine_count) for one in found.state_counts} == {(HEALTHY, 1), (DRAINING, 1)}
    other.api.admin.CancelDrain(admin_pb2.CancelDrainRequest())
    wait_until(lambda: pick(lead).HasField("prefill"))


def test_a_pair_is_explained_and_follows_the_prompt(start: Start, engines_file: EnginesFile) -> None:
    lead, other, third = start(
        ("--engine-id", "p1"), ("--engine-id", "p2"), ("--engine-id", "d"), **engines_file.environment
    )
    rows = [
        row(lead, role="prefill", host="x"),
        row(other, role="prefill", host="y"),
        row(third, role="decode", host="z"),
    ]
    engines_file.write([{**one, "model_name": "m"} for one in rows])
    wait_until(lambda: set(states(lead).values()) == {HEALTHY} and len(states(lead)) == 3)
    chain = common_pb2.ContentChain(digests=bytes(range(64)) * 16, token_count=32 * 16)
    first = pick(lead, chain=chain, model_name="m")
    again = pick(lead, chain=chain, model_name="m")
    assert first.decode.engine.engine_id == again.decode.engine.engine_id == "d"
    assert (first.prefill.held_token_count, first.cost.computed_share) == (0, 1.0)
    assert again.prefill.engine.engine_id == first.prefill.engine.engine_id
    assert (again.prefill.held_token_count, again.cost.computed_share) == (512, 0.0)
    assert (first.cost.distance, again.cost.distance, again.same_host) == (0.25, 0.0, False)
    assert again.decode.held_token_count == 512, "what was moved there before"
    cost = again.cost
    assert abs(cost.total - cost.prefill_load - cost.decode_load - cost.computed_share - cost.distance) < 1e-9
    assert "32 of 32 units held" in again.reason
    excluded = pick(lead, chain=chain, excluded_engine_ids=[first.prefill.engine.engine_id])
    assert excluded.prefill.engine.engine_id not in ("", first.prefill.engine.engine_id)
    assert not pick(lead, model_name="other").HasField("prefill")


def test_the_load_that_a_lead_tells_counts(start: Start, engines_file: EnginesFile) -> None:
    lead, busy, third = start(
        ("--engine-id", "p"), ("--engine-id", "d1"), ("--engine-id", "d2"), **engines_file.environment
    )
    engines_file.write([row(lead, role="prefill"), row(busy, role="decode"), row(third, role="decode")])
    busy.allocate(500)
    none = fleet_pb2.FleetEngine()
    wait_until(lambda: listed(lead).get("d1", none).load > 0.9)
    wait_until(lambda: listed(lead).get("d2", none).state == fleet_pb2.ENGINE_STATE_HEALTHY)
    assert pick(lead).decode.engine.engine_id == "d2"


def test_engines_are_listed_page_by_page_and_filtered(start: Start, engines_file: EnginesFile) -> None:
    (lead,) = start(("--engine-id", "a"), **engines_file.environment)
    names = [f"e{n}" for n in range(5)]
    engines_file.write(
        [row(lead, engine_id=n, role="decode" if n == "e0" else "both", addresses=["127.0.0.1:1"]) for n in names]
    )
    wait_until(lambda: set(states(lead)) == set(names))
    found, token = [], ""
    while True:
        reply = lead.api.fleet.ListEngines(fleet_pb2.ListEnginesRequest(page_size=2, page_token=token))
        found += [one.engine_id for one in reply.engines]
        token = reply.next_page_token
        if not token:
            break
    assert found == names
    assert set(listed(lead, engine_id="e3")) == {"e3"}
    assert set(listed(lead, role=fleet_pb2.ENGINE_ROLE_PREFILL)) == set(names) - {"e0"}
    assert set(listed(lead, states=[HEALTHY])) == set()
    with refused(lead.api, "INVALID_ARGUMENT", "INVALID_FIELD"):
        lead.api.fleet.ListEngines(fleet_pb2.ListEnginesRequest(page_token="x"))


class Watching:
    """A watch, and what it has told of so far."""

    def __init__(self, engine: Engine, after: str = "", **wanted: object) -> None:
        asked = fleet_pb2.WatchEnginesRequest(filter=fleet_pb2.EngineFilter(**wanted), after_revision=after)  # type: ignore[arg-type]
        self._call = engine.api.fleet.WatchEngines(asked, timeout=120)
        self._replies: Iterator[fleet_pb2.WatchEnginesResponse] = iter(self._call)
        self.known: dict[str, fleet_pb2.FleetEngine] = {}
        self.revision = ""
        self.snapshots = 0

    def read(self) -> None:
        """Reads up to the next complete message."""
        complete = False
        while not complete:
            reply = next(self._replies)
            if reply.snapshot:
                self.snapshots += 1
                self.known.clear()
            for one in reply.engines:
                self.known[one.entry_id] = one
            for entry_id in reply.removed_entry_ids:
                self.known.pop(entry_id, None)
            complete, self.revision = reply.complete, reply.revision

    def until(self, holds: Callable[[dict[str, int]], bool]) -> None:
        while not holds({one.engine_id: one.state for one in self.known.values()}):
            self.read()

    def end(self) -> str:
        self._call.cancel()
        return self.revision


def test_a_watch_tells_a_snapshot_then_changes_and_goes_on_where_it_was(
    start: Start, engines_file: EnginesFile
) -> None:
    lead, other = start(("--engine-id", "a"), ("--engine-id", "b"), **engines_file.environment)
    engines_file.write([row(lead), row(other)])
    watch = Watching(lead)
    watch.until(lambda seen: seen == {"a": HEALTHY, "b": HEALTHY})
    engines_file.write([row(lead)])
    watch.until(lambda seen: seen == {"a": HEALTHY})
    assert watch.snapshots == 1
    revision = watch.end()
    engines_file.write([row(lead), row(other, engine_id="c", addresses=["127.0.0.1:1"])])
    again = Watching(lead, after=revision)
    again.until(lambda seen: seen == {"c": FAILED})
    assert again.snapshots == 0, "the changes since then were enough"
    again.end()
    for unknown in ("x", f"{'0' * 16}-1", revision.partition("-")[0] + "-999999"):
        fresh = Watching(lead, after=unknown)
        fresh.until(lambda seen: seen == {"a": HEALTHY, "c": FAILED})
        assert fresh.snapshots == 1
        fresh.end()


def test_a_filtered_watch_hears_that_an_entry_meets_its_filter_no_more(start: Start, engines_file: EnginesFile) -> None:
    lead, other = start(("--engine-id", "a"), ("--engine-id", "b"), **engines_file.environment)
    engines_file.write([row(lead), row(other)])
    watch = Watching(lead, states=[HEALTHY])
    watch.until(lambda seen: set(seen) == {"a", "b"})
    other.process.kill()
    watch.until(lambda seen: set(seen) == {"a"})
    watch.end()


def test_a_large_fleet_comes_in_several_messages_of_one_snapshot(start: Start, engines_file: EnginesFile) -> None:
    (lead,) = start(("--engine-id", "a"), **engines_file.environment)
    engines_file.write([row(lead, engine_id=f"e{n}", addresses=["192.0.2.1:1"]) for n in range(600)])
    wait_until(lambda: len(listed(lead)) == 600)
    replies = lead.api.fleet.WatchEngines(fleet_pb2.WatchEnginesRequest(), timeout=60)
    found = [next(replies) for _ in range(3)]
    replies.cancel()
    assert [(one.snapshot, one.complete, bool(one.revision)) for one in found] == [
        (True, False, False), (False, False, False), (False, True, True),
    ]  # fmt: skip
    assert sum(len(one.engines) for one in found) == 600


def test_a_registry_that_breaks_keeps_its_last_list_and_says_since_when(
    start: Start, engines_file: EnginesFile
) -> None:
    lead, other = start(("--engine-id", "a"), ("--engine-id", "b"), **engines_file.environment)
    engines_file.write([row(lead), row(other)])
    wait_until(lambda: pick(lead).HasField("prefill"))
    engines_file.spoil()
    wait_until(lambda: lead.api.fleet.ListEngines(fleet_pb2.ListEnginesRequest()).HasField("registry_silence"))
    assert states(lead) == {"a": HEALTHY, "b": HEALTHY}
    assert pick(lead).HasField("prefill")
    lead.check_alive()


def test_without_a_registry_the_service_says_so(source: Engine) -> None:
    for call in (
        lambda: source.api.fleet.ListEngines(fleet_pb2.ListEnginesRequest()),
        lambda: source.api.fleet.PickPair(fleet_pb2.PickPairRequest()),
        lambda: next(source.api.fleet.WatchEngines(fleet_pb2.WatchEnginesRequest())),
    ):
        with refused(source.api, "UNIMPLEMENTED", "FEATURE_UNAVAILABLE"):
            call()


def test_a_registry_that_never_answered_is_unavailable(start: Start, engines_file: EnginesFile) -> None:
    engines_file.spoil()
    (lead,) = start(("--engine-id", "a"), **engines_file.environment)
    with refused(lead.api, "UNAVAILABLE", "PEER_UNREACHABLE"):
        lead.api.fleet.ListEngines(fleet_pb2.ListEnginesRequest())
    lead.check_alive()


def test_inputs_are_bounded(start: Start, engines_file: EnginesFile) -> None:
    (lead,) = start(("--engine-id", "a"), **engines_file.environment)
    wrong = fleet_pb2.PickPairRequest(chain=common_pb2.ContentChain(digests=b"x" * 33, token_count=16))
    with refused(lead.api, "INVALID_ARGUMENT", "INVALID_FIELD"):
        lead.api.fleet.PickPair(wrong)
    with refused(lead.api, "OUT_OF_RANGE", "LIMIT_EXCEEDED"):
        lead.api.fleet.PickPair(fleet_pb2.PickPairRequest(excluded_engine_ids=["x"] * 65))
    most = fleet_pb2.PickPairRequest(chain=common_pb2.ContentChain(digests=bytes(32) * 100_000, token_count=1_600_000))
    lead.api.fleet.PickPair(most)
    watches = [lead.api.fleet.WatchEngines(fleet_pb2.WatchEnginesRequest(), timeout=60) for _ in range(64)]
    for watch in watches:
        next(watch)
    with pytest.raises(grpc.RpcError) as caught:
        next(lead.api.fleet.WatchEngines(fleet_pb2.WatchEnginesRequest(), timeout=60))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    for watch in watches:
        watch.cancel()
