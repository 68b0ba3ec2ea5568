"""A real name server on loopback: the names' leads introduce themselves, and none of what DNS may do to an answer
takes an engine out of use.
"""

import asyncio
from functools import partial

import dns.rcode
import pytest

from kvgrpc.errors import InvalidRequest, Reason, Unavailable
from kvgrpc.fleet.directory import Directory
from kvgrpc.fleet.entry import EngineEntry, EngineRole
from kvgrpc.registry.dns import DnsRegistry, DnsSettings, dns_settings
from kvgrpc.registry.introductions import IntroductionLimits, LifeNumbers
from tests.fleet.entries import entry
from tests.registry.following import following, ids, until
from tests.registry.nameserver import name_server

SRV = "_kvgrpc._tcp.kv.example"
QUICK = IntroductionLimits(ask_every_s=0.05, retry_s=0.05, timeout_s=1.0)


class Leads:
    """Who answers at which address."""

    def __init__(self, **at: EngineEntry) -> None:
        self.at = {f"{host}.kv.example:50051": one for host, one in at.items()}
        self.asked: list[str] = []

    async def introduce(self, address: str) -> EngineEntry:
        self.asked.append(address)
        if address not in self.at:
            raise Unavailable(Reason.PEER_UNREACHABLE, "nobody answers")
        return self.at[address]


def services(*hosts: str, port: int = 50051) -> list[str]:
    return [f"0 0 {port} {host}.kv.example." for host in hosts]


def stale(directory: Directory) -> bool:
    return directory.stale_s(0.0) is not None


async def test_the_leads_of_a_service_introduce_themselves() -> None:
    leads = Leads(p1=entry("a", incarnation=7), p2=entry("b", role=EngineRole.DECODE))
    async with name_server() as server:
        server.zone[SRV, "SRV"] = 0, services("p1", "p2")
        async with following(DnsRegistry(server.settings(SRV), leads.introduce, QUICK)) as directory:
            await until(lambda: ids(directory) == ["a", "b"])
            one = directory.find("a")
            assert one is not None
            assert one.entry.addresses == ("p1.kv.example:50051",)  # the name, which certificates have
            assert one.entry.incarnation == 7
            server.zone[SRV, "SRV"] = 0, services("p2", "p3")
            leads.at["p3.kv.example:50051"] = entry("c")
            await until(lambda: ids(directory) == ["b", "c"])


async def test_the_addresses_of_a_name_are_those_of_its_leads() -> None:
    leads = Leads()
    leads.at = {"10.0.0.1:7": entry("a"), "10.0.0.2:7": entry("b"), "[fd00::1]:7": entry("six")}
    async with name_server() as server:
        server.zone["four.example", "A"] = 0, ["10.0.0.2", "10.0.0.1"]
        server.zone["six.example", "AAAA"] = 0, ["fd00::1"]
        for name, engines in (("four.example", ["a", "b"]), ("six.example", ["six"])):
            async with following(DnsRegistry(server.settings(name, 7), leads.introduce, QUICK)) as directory:
                await until(partial(are, directory, engines))


def are(directory: Directory, engines: list[str]) -> bool:
    return ids(directory) == engines


async def test_an_answer_that_fits_no_packet_is_asked_for_over_tcp() -> None:
    names = [f"p{n:03}" for n in range(200)]
    leads = Leads(**{name: entry(name) for name in names})
    async with name_server() as server:
        server.zone[SRV, "SRV"] = 0, services(*names)
        async with following(DnsRegistry(server.settings(SRV), leads.introduce, QUICK)) as directory:
            await until(lambda: ids(directory) == names)


async def test_no_answer_an_error_and_an_empty_answer_keep_the_last_list() -> None:
    leads = Leads(p1=entry("a"), p2=entry("b"))
    async with name_server() as server:
        server.zone[SRV, "SRV"] = 0, services("p1", "p2")
        async with following(DnsRegistry(server.settings(SRV, timeout_s=0.3), leads.introduce, QUICK)) as directory:
            await until(lambda: ids(directory) == ["a", "b"])
            for fault in ("silent", "SERVFAIL", "REFUSED", "no such name", "no records", "not there"):
                right = dict(server.zone)
                server.silent = fault == "silent"
                server.code = dns.rcode.from_text(fault) if fault.isupper() else dns.rcode.NOERROR
                if fault == "no such name":
                    server.zone.clear()
                if fault == "no records":
                    server.zone = {(SRV, "TXT"): (0, ["x"])}
                if fault == "not there":
                    server.zone[SRV, "SRV"] = 0, ["0 0 0 ."]
                await until(partial(stale, directory))
                assert ids(directory) == ["a", "b"], fault
                server.zone, server.silent, server.code = right, False, dns.rcode.NOERROR
                await until(lambda: not stale(directory))
                assert ids(directory) == ["a", "b"], fault


async def test_a_packet_that_is_lost_is_sent_again() -> None:
    leads = Leads(p1=entry("a"))
    async with name_server() as server:
        server.zone[SRV, "SRV"] = 0, services("p1")
        server.drop = 1
        settings = server.settings(SRV, timeout_s=10.0)
        async with following(DnsRegistry(settings, leads.introduce, QUICK)) as directory:
            await until(lambda: ids(directory) == ["a"])
            assert not stale(directory)
            assert not server.drop


async def test_a_lead_that_restarts_introduces_itself_anew_also_while_dns_is_down() -> None:
    """Incarnations are random names: also a smaller one is a newer life."""
    leads = Leads(p1=entry("a", incarnation=9, life=0))
    async with name_server() as server:
        server.zone[SRV, "SRV"] = 0, services("p1")
        registry = DnsRegistry(server.settings(SRV, timeout_s=0.3), leads.introduce, QUICK)

        def lives(incarnation: int) -> bool:
            one = directory.find("a")
            return one is not None and one.entry.incarnation == incarnation and one.proved_at > 0

        async with following(registry) as directory:
            await until(lambda: lives(9))
            leads.at["p1.kv.example:50051"] = entry("a", incarnation=3, life=0)
            await until(lambda: lives(3))
            server.silent = True
            await until(partial(stale, directory))
            leads.at["p1.kv.example:50051"] = entry("a", incarnation=2, life=0)
            await until(lambda: lives(2))
            assert stale(directory)


async def test_an_address_where_nobody_answers_is_no_entry_and_a_lead_that_falls_silent_stays_one() -> None:
    leads = Leads(p1=entry("a"))
    async with name_server() as server:
        server.zone[SRV, "SRV"] = 0, services("p1", "nobody")
        async with following(DnsRegistry(server.settings(SRV), leads.introduce, QUICK)) as directory:
            await until(lambda: ids(directory) == ["a"])
            leads.at.clear()
            leads.asked.clear()
            await until(lambda: leads.asked.count("p1.kv.example:50051") > 2)
            assert ids(directory) == ["a"]


async def test_leads_that_never_answer_keep_nobody_from_being_asked() -> None:
    async def introduce(address: str) -> EngineEntry:
        if not address.startswith("z"):
            await asyncio.Event().wait()
        return entry("z")

    limits = IntroductionLimits(asked_at_once=1, retry_s=0.0, timeout_s=0.05)
    async with name_server() as server:
        server.zone[SRV, "SRV"] = 0, services("a0", "a1", "a2", "z")
        async with following(DnsRegistry(server.settings(SRV), introduce, limits)) as directory:
            await until(lambda: ids(directory) == ["z"])


@pytest.mark.parametrize(("ttl", "least", "most"), [(0, 0.2, 9.0), (86_400, 0.01, 0.2)])
async def test_the_time_to_live_of_an_answer_is_kept_within_bounds(ttl: int, least: float, most: float) -> None:
    leads = Leads(p1=entry("a"))
    async with name_server() as server:
        server.zone[SRV, "SRV"] = ttl, services("p1")
        settings = server.settings(SRV, look_min_s=least, look_max_s=most)
        now = asyncio.get_running_loop().time
        async with following(DnsRegistry(settings, leads.introduce, QUICK)):
            await until(lambda: server.asked)
            begun, before = now(), len(server.asked)
            await until(lambda: len(server.asked) >= before + 3)
            # Three questions lie at least two waits apart.
            assert now() - begun >= 2 * 0.2 - 0.05


async def test_the_number_of_candidates_is_bounded() -> None:
    names = [f"p{n:02}" for n in range(20)]
    leads = Leads(**{name: entry(name) for name in names})
    limits = IntroductionLimits(candidates=3, asked_at_once=2, ask_every_s=60.0)
    async with name_server() as server:
        server.zone[SRV, "SRV"] = 0, services(*names)
        async with following(DnsRegistry(server.settings(SRV), leads.introduce, limits)) as directory:
            await until(lambda: directory.complete)
            await until(lambda: len(server.asked) > 3)
            assert ids(directory) == names[:3]
            assert sorted(leads.asked) == [f"{name}.kv.example:50051" for name in names[:3]]


def test_a_life_has_the_number_of_its_turn_and_keeps_it() -> None:
    numbers = LifeNumbers(2)
    assert [numbers.of("a", incarnation) for incarnation in (9, 3, 9, 3, 7)] == [1, 2, 1, 2, 3]
    assert [numbers.of(name, 1) for name in ("b", "c", "a")] == [1, 1, 1]  # of three ids two are remembered
    assert [numbers.of("c", incarnation) for incarnation in range(2, 12)] == list(range(2, 12))


def test_an_address_of_dns_names_a_host_with_a_port_or_a_service() -> None:
    assert dns_settings("dns:///kv.example:7") == DnsSettings("kv.example", 7)
    assert dns_settings(f"dns+srv:///{SRV}") == DnsSettings(SRV)
    assert dns_settings("dns://127.0.0.1:5353/kv:7") == DnsSettings("kv", 7, ("127.0.0.1",), 5353)
    assert dns_settings(f"dns+srv://[fd00::53]/{SRV}") == DnsSettings(SRV, servers=("fd00::53",))
    for wrong in (
        "dns:///kv.example", "dns:///:7", "dns:///kv:0", "dns:///kv:x", "dns://kv:7", "dns+srv:///", f"dns+srv://{SRV}",
        "dns:///a..b:1", "dns:///.:7", "dns://ns.example/kv:7", "dns://127.0.0.1:x/kv:7", "dns://[::1/kv:7",
    ):  # fmt: skip
        with pytest.raises(InvalidRequest):
            dns_settings(wrong)
