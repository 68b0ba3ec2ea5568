"""The dashboard for Grafana, from the table of its panels. `python -m scripts.dashboard` writes the file."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent.parent / "deploy/grafana/kvgrpc.json"
WIDTH, HEIGHT, COLUMNS = 8, 7, 3
AT = '{instance=~"$instance"}'
EVERY = "$__rate_interval"


@dataclass(frozen=True)
class Panel:
    """One graph: its title, the unit of its values, what it says, and its queries by their legends."""

    title: str
    unit: str
    says: str
    queries: dict[str, str]


def _rate(metric: str, labels: str = "") -> str:
    return f'rate({metric}{{instance=~"$instance"{labels}}}[{EVERY}])'


def _quantile(share: float, metric: str, *by: str, labels: str = "") -> str:
    return f"histogram_quantile({share}, sum by ({', '.join(('le', *by))}) ({_rate(f'{metric}_bucket', labels)}))"


REFUSED = ', rpc_response_status_code!="OK"'
RECEIVE = ', direction="receive"'
ROWS: dict[str, tuple[Panel, ...]] = {
    "Transfers": (
        Panel("Transfers that ended", "ops", "Rate by mode and outcome, at the engines that received.", {
            "{{mode}} {{outcome}}": f"sum by (mode, outcome) ({_rate('kvgrpc_transfers_total', RECEIVE)})",
        }),
        Panel("Time of a transfer", "s", "Median and 99th percentile, at the engines that received.", {
            "p50 {{mode}}": _quantile(0.5, "kvgrpc_transfer_duration_seconds", "mode", labels=RECEIVE),
            "p99 {{mode}}": _quantile(0.99, "kvgrpc_transfer_duration_seconds", "mode", labels=RECEIVE),
        }),
        Panel("Time by phase", "s", "Mean time of each phase of a received transfer.", {
            "{{phase}}": f"sum by (phase) ({_rate('kvgrpc_transfer_phase_seconds_sum', RECEIVE)}) / "
            f"sum by (phase) ({_rate('kvgrpc_transfer_phase_seconds_count', RECEIVE)})",
        }),
        Panel("Bytes received", "Bps", "Rate of received KV.", {
            "{{instance}}": f"sum by (instance) ({_rate('kvgrpc_received_bytes_total')})",
        }),
        Panel("Failures", "ops", "Transfers that failed, by reason.", {
            "{{reason}}": f"sum by (reason) ({_rate('kvgrpc_transfer_failures_total')})",
        }),
        Panel("Slow data paths", "ops", "Received transfers over a data path that is not the first choice.", {
            "{{data_path}}": f"sum by (data_path) ({_rate('kvgrpc_slow_path_transfers_total')})",
        }),
        Panel("Size of a transfer", "bytes", "Median of received transfers, by data path.", {
            "{{data_path}}": _quantile(0.5, "kvgrpc_transfer_bytes", "data_path"),
        }),
        Panel("Transfers under way", "short", "Transfers that are not over.", {
            "{{direction}} {{state}}": f"sum by (direction, state) (kvgrpc_transfers_unfinished{AT})",
        }),
        Panel("Waits", "short", "Transfers that wait, by what they wait for.", {
            "{{for}}": f"sum by (for) (kvgrpc_transfers_waiting{AT})",
        }),
    ),
    "Blocks and leases": (
        Panel("Blocks", "short", "Blocks by state.", {"{{state}}": f"sum by (state) (kvgrpc_blocks{AT})"}),
        Panel("Leases", "short", "Live leases by state.", {"{{state}}": f"sum by (state) (kvgrpc_leases{AT})"}),
        Panel("Ends of leases", "ops", "How leases ended.", {
            "{{state}}": f"sum by (state) ({_rate('kvgrpc_lease_ends_total')})",
        }),
        Panel("Oldest lease", "s", "A lease that grows old is a reader that never came.", {
            "{{instance}}": f"kvgrpc_oldest_lease_age_seconds{AT}",
        }),
        Panel("Quarantine", "short", "Blocks that wait for the proof that nothing writes them.", {
            "{{instance}}": 'sum by (instance) (kvgrpc_blocks{instance=~"$instance", state="quarantined"})',
        }),
        Panel("Who waits for blocks", "short", "Requests that lack blocks, and readers that wait for their own.", {
            "requests {{instance}}": f"kvgrpc_lacking_requests{AT}",
            "readers {{instance}}": f"kvgrpc_waiting_readers{AT}",
        }),
    ),
    "Calls and callers": (
        Panel("Calls", "ops", "Calls by method.", {
            "{{rpc_method}}": f"sum by (rpc_method) ({_rate('rpc_server_call_duration_seconds_count')})",
        }),
        Panel("Time of a call", "s", "99th percentile by method. Calls that wait are among them.", {
            "{{rpc_method}}": _quantile(0.99, "rpc_server_call_duration_seconds", "rpc_method"),
        }),
        Panel("Refused calls", "ops", "Calls that ended with an error, by code.", {
            "{{rpc_response_status_code}}": "sum by (rpc_response_status_code) "
            f"({_rate('rpc_server_call_duration_seconds_count', REFUSED)})",
        }),
        Panel("Calls that wait", "short", "Calls in the call queue, and those that gRPC has not handed over.", {
            "queue {{instance}}": f"kvgrpc_calls_waiting{AT}",
            "gRPC {{instance}}": f"kvgrpc_calls_backlog{AT}",
        }),
        Panel("Overload", "ops", "Calls refused because more come than the server serves.", {
            "{{instance}}": f"sum by (instance) ({_rate('kvgrpc_calls_refused_total')})",
        }),
        Panel("Peers", "short", "Engines that each lead knows.", {"{{state}}": f"sum by (state) (kvgrpc_peers{AT})"}),
        Panel("Denied callers", "ops", "Calls refused because of identity, role or policy.", {
            "{{reason}}": f"sum by (reason) ({_rate('kvgrpc_denied_calls_total')})",
        }),
        Panel("Certificates", "s", "Time until the certificate in use ends.", {
            "{{instance}}": f"kvgrpc_tls_certificate_not_after_seconds{AT} - time()",
        }),
        Panel("Named tensors", "short", "Tensors in stores, and calls that wait for them.", {
            "tensors {{state}}": f"sum by (state) (kvgrpc_store_tensors{AT})",
            "waits for {{for}}": f"sum by (for) (kvgrpc_store_waits{AT})",
        }),
    ),
    "The fleet": (
        Panel("Engines of the registry", "short", "Entries by state, as kvgrpc fleet sees them.", {
            "{{state}}": f"max by (state) (kvgrpc_fleet_entries{AT})",
        }),
        Panel("Choices", "ops", "Requests that got a pair, a decode engine alone, or none.", {
            "{{outcome}}": f"sum by (outcome) ({_rate('kvgrpc_fleet_picks_total')})",
        }),
        Panel("Published", "short", "1 while the registry has the engine, 0 while it lacks it.", {
            "{{instance}}": f"kvgrpc_fleet_published{AT}",
        }),
        Panel("Silence of the registry", "s", "Time since it broke off. Meanwhile its last list is in use.", {
            "{{instance}}": f"kvgrpc_fleet_registry_silence_seconds{AT}",
        }),
        Panel("Refused entries", "ops", "Entries of the registry that cannot be used.", {
            "{{instance}}": f"sum by (instance) ({_rate('kvgrpc_fleet_refused_entries_total')})",
        }),
    ),
    "The process": (
        Panel("Event loop", "s", "99th percentile of the delay of a timer.", {
            "{{instance}}": _quantile(0.99, "kvgrpc_event_loop_lag_seconds", "instance"),
        }),
        Panel("Processor", "percentunit", "Share of one core.", {
            "{{instance}}": f"rate(process_cpu_seconds_total{AT}[{EVERY}])",
        }),
        Panel("Memory", "bytes", "Resident memory, with the pool in it, and what calls keep.", {
            "resident {{instance}}": f"process_resident_memory_bytes{AT}",
            "kept {{instance}}": f"sum by (instance) (kvgrpc_kept_bytes{AT})",
        }),
    ),
}  # fmt: skip


def dashboard() -> dict[str, Any]:
    """Returns the dashboard as Grafana imports it."""
    shown: list[dict[str, Any]] = []
    top = 0
    for name, panels in ROWS.items():
        place = {"x": 0, "y": top, "w": WIDTH * COLUMNS, "h": 1}
        shown.append({"type": "row", "title": name, "collapsed": False, "gridPos": place, "panels": []})
        top += 1
        for number, panel in enumerate(panels):
            row, column = divmod(number, COLUMNS)
            shown.append(_graph(panel, column * WIDTH, top + row * HEIGHT))
        top += HEIGHT * -(-len(panels) // COLUMNS)
    for number, one in enumerate(shown, 1):
        one["id"] = number
    source = {"type": "prometheus", "uid": "${source}"}
    variables = [
        {"name": "source", "type": "datasource", "query": "prometheus", "label": "Source"},
        {
            "name": "instance", "type": "query", "label": "Lead", "datasource": source, "multi": True,
            "includeAll": True, "allValue": ".*", "current": {"text": "All", "value": "$__all"}, "refresh": 2,
            "query": {"query": "label_values(kvgrpc_build_info, instance)", "refId": "instances"},
        },
    ]  # fmt: skip
    return {
        "uid": "kvgrpc", "title": "kvgrpc", "tags": ["kvgrpc"], "schemaVersion": 39, "editable": True,
        "time": {"from": "now-1h", "to": "now"}, "refresh": "10s", "templating": {"list": variables}, "panels": shown,
    }  # fmt: skip


def _graph(panel: Panel, x: int, y: int) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${source}"}
    return {
        "type": "timeseries", "title": panel.title, "description": panel.says, "datasource": source,
        "gridPos": {"x": x, "y": y, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + number), "expr": query, "legendFormat": legend, "datasource": source,
             "exemplar": "_bucket" in query}
            for number, (legend, query) in enumerate(panel.queries.items())
        ],
    }  # fmt: skip


def text() -> str:
    """Returns the content of the file."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
