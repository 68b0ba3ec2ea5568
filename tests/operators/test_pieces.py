"""The parts of `make operators-check` that need no Prometheus and no Jaeger."""

import json
import re
from pathlib import Path

import pytest

from tests.operators import deploy_files, manifests, panels
from tests.operators.accounting import CALL, TOLD, accounted, gaps
from tests.operators.faults import FAULTS
from tests.operators.jaeger import Span
from tests.operators.programs import APISERVER_VERSION, Missing, Programs, found_in
from tests.operators.rules import FILE, THRESHOLDS, names, shortened
from tests.operators.traces import TracesFound

RULES = FILE.read_text()


def span(name: str, start: int, end: int, parent: str = "", service: str = "kvgrpc", *, rpc: bool = False) -> Span:
    return Span(service, "p", name, name, parent, start, end, failed=False, is_rpc=rpc)


def test_short_rules_differ_from_the_real_ones_in_times_only() -> None:
    short = shortened(RULES)
    assert names(short) == names(RULES)
    assert not re.search(r"for: (?!1s$)\w+$", short, re.MULTILINE)
    assert set(re.findall(r"\[\w+\]", short)) == {"[15s]"}
    changed = [
        (before, after)
        for before, after in zip(RULES.splitlines(), short.splitlines(), strict=True)
        if re.sub(r"for: \w+|\[\w+\]", "", before) != re.sub(r"for: \w+|\[\w+\]", "", after)
    ]
    assert len(changed) == len(THRESHOLDS)


def test_a_threshold_that_is_no_longer_there_is_noticed() -> None:
    with pytest.raises(AssertionError, match="KvgrpcLeaseLeak"):
        shortened(RULES.replace("kvgrpc_oldest_lease_age_seconds > 900", "kvgrpc_oldest_lease_age_seconds > 1000"))


def test_every_alert_has_a_fault() -> None:
    code = Path(FAULTS[0].__code__.co_filename).read_text()
    assert len(FAULTS) == len(names(RULES))
    assert not [name for name in names(RULES) if f'"{name}"' not in code]


def test_every_query_of_the_dashboard_is_tried_without_variables() -> None:
    shown = json.loads(panels.DASHBOARD.read_text())["panels"]
    tried = panels.queries()
    assert len(tried) == sum(len(panel.get("targets", [])) for panel in shown)
    assert not [query for _, query in tried if "$" in query]
    with pytest.raises(AssertionError, match="variable"):
        panels.with_variables("up[$__interval]")


def test_an_rpc_says_nothing_after_its_end_whatever_begins_later() -> None:
    call = span(CALL, 0, 100, service="client")
    put, deliver = span("PutTensor", 0, 1, CALL, rpc=True), span("deliver", 90, 100, "PutTensor")
    assert accounted([[call, put, deliver]]) == pytest.approx(0.11)


def test_time_is_accounted_for_by_spans_that_have_none_within() -> None:
    call = span(CALL, 0, 100, service="client")
    whole, wire, settle = (
        span("receive", 0, 100, CALL),
        span("wire", 10, 60, "receive"),
        span("settle", 50, 90, "receive"),
    )
    assert accounted([[call, whole, wire, settle]]) == pytest.approx(0.8)
    assert accounted([[call, whole]]) == 1.0
    assert accounted([[call], [call, span("late", 90, 300, CALL)]]) == pytest.approx(0.05)
    assert accounted([]) == 0.0


def test_the_span_of_an_rpc_accounts_for_its_ends_and_not_for_what_is_between() -> None:
    call, rpc = span(CALL, 0, 100, service="client"), span("pull", 5, 95, CALL, "client", rpc=True)
    inner = [span("open", 20, 40, "pull"), span("wire", 50, 90, "pull")]
    assert accounted([[call, rpc, *inner]]) == pytest.approx(0.8)
    assert accounted([[call, rpc, *inner]], ends=False) == pytest.approx(0.6)
    assert accounted([[call, rpc]]) == pytest.approx(0.9)


def test_a_call_does_not_wait_for_a_close_that_it_tells_a_peer() -> None:
    call, rpc = span(CALL, 0, 100, service="client"), span("pull", 0, 100, CALL, rpc=True)
    opened, told = span("open", 10, 60, "pull"), span(TOLD, 70, 120, "pull", rpc=True)
    assert gaps([call, rpc, opened, told]) == []
    (gap,) = gaps([call, rpc, opened, span("wire", 70, 90, "pull")])
    assert (gap.start, gap.end) == (60, 70)


def test_a_gap_says_which_spans_are_round_it() -> None:
    call, rpc = span(CALL, 0, 100, service="client"), span("pull", 0, 100, CALL, rpc=True)
    (gap,) = gaps([call, rpc, span("open", 0, 40, "pull"), span("wire", 50, 100, "pull")])
    assert str(gap) == "0.100 of the call after p/open, before p/wire within pull"


def test_a_span_whose_parent_is_missing_is_an_orphan() -> None:
    found = TracesFound(
        {("pull", 0): [span("request", 0, 9), span("open", 1, 2, "request"), span("wire", 2, 3, "gone")]}
    )
    assert found.orphans() == ["pull: wire"]


def test_a_program_that_is_not_here_is_named(tmp_path: Path) -> None:
    with pytest.raises(Missing, match="jaeger is not at"):
        Programs(tmp_path, tmp_path, tmp_path / "jaeger", *[tmp_path] * 6).need("jaeger")


def test_programs_are_looked_for_where_the_makefile_puts_them() -> None:
    makefile = Path("Makefile").read_text()
    assert "OPERATOR_TOOLS := .tools/operators\n" in makefile
    assert f"APISERVER_VERSION := {APISERVER_VERSION}\n" in makefile
    assert "$(OPERATOR_TOOLS)/kube-apiserver@$(APISERVER_VERSION)" in makefile
    assert found_in(Path("tools")).apiserver == Path(f"tools/kube-apiserver@{APISERVER_VERSION}")


def test_a_unit_that_systemd_would_not_take_or_that_is_less_closed_is_found(tmp_path: Path) -> None:
    unit = deploy_files.UNIT.read_text()
    try:
        assert deploy_files.of_unit(found_in(), unit, tmp_path) == (deploy_files.EXPOSURE_MAX, [])
    except Missing as missing:
        pytest.skip(str(missing))
    (why,) = deploy_files.of_unit(found_in(), unit.replace("Type=exec", "Type=none"), tmp_path)[1]
    assert "none" in why
    exposure, (why,) = deploy_files.of_unit(found_in(), unit.replace("CapabilityBoundingSet=\n", ""), tmp_path)
    assert exposure > deploy_files.EXPOSURE_MAX
    assert "at most" in why


def test_the_page_has_the_exposure_of_the_unit() -> None:
    assert f"exposure level is {deploy_files.EXPOSURE_MAX} of 10" in Path("docs/operating.md").read_text()


def test_settings_of_a_container_that_no_lead_takes_are_named() -> None:
    def pod(metrics: str) -> dict[str, object]:
        env = [
            {"name": "POD_IP", "valueFrom": {}},
            {"name": "KVGRPC_ADVERTISE", "value": "$(POD_IP):0"},
            {"name": "KVGRPC_INSECURE", "value": "yes"},
            {"name": "KVGRPC_METRICS", "value": metrics},
        ]
        return {"kind": "StatefulSet", "spec": {"template": {"spec": {"containers": [{"name": "engine", "env": env}]}}}}

    assert list(manifests.unusable(pod("0.0.0.0:9464"))) == []
    (why,) = manifests.unusable(pod("nonsense"))
    assert "container engine" in why
    assert "metrics" in why
    assert list(manifests.unusable({"kind": "Service", "spec": {}})) == []
