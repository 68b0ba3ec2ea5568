"""The configuration: defaults, file, environment and flags in this order, and every wrong value by its name."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from kvgrpc.config import DATA_PATHS, TABLES, Config, PoolConfig, SchedulerConfig, split_address
from kvgrpc.config_sources import load
from kvgrpc.core.policy.values import OnLoss, Rules
from kvgrpc.core.values.layout import Group, GroupKind
from kvgrpc.core.values.limits import Limits
from kvgrpc.core.values.networks import EVERYWHERE, PrivateNetworks, is_loopback
from kvgrpc.errors import InvalidRequest

FILE = """
listen = "127.0.0.1:7001"
engine_id = "from-file"
data_paths = ["cma", "shm"]
copy_threads = 3
read_blocks = true
drain_s = 1.5

[pool]
blocks = 32
dtype = "bfloat16"

[limits]
lease_ttl_s = 5
blocks_per_request = 100
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "kvgrpc.toml"
    path.write_text(FILE)
    return path


def refused_field(**values: Any) -> str:
    """The setting that a refusal names."""
    with pytest.raises(InvalidRequest) as caught:
        load(None, {}, values)
    (violation,) = caught.value.violations
    assert violation.description
    return violation.field


def test_without_anything_it_is_a_server_on_loopback_with_a_pool() -> None:
    config = load(None, {}, {})
    assert config == Config()
    assert is_loopback(split_address(config.listen, "listen")[0])
    assert config.pool is not None
    assert config.data_paths == DATA_PATHS
    assert not config.read_blocks


def test_the_file_overrides_the_defaults(file: Path) -> None:
    config = load(file, {}, {})
    assert (config.listen, config.engine_id, config.copy_threads) == ("127.0.0.1:7001", "from-file", 3)
    assert (config.data_paths, config.read_blocks, config.drain_s) == (("cma", "shm"), True, 1.5)
    assert config.pool == PoolConfig(blocks=32, dtype="bfloat16")
    assert config.limits == Limits(lease_ttl_s=5, blocks_per_request=100)


def test_the_environment_overrides_the_file(file: Path) -> None:
    environment = {
        "KVGRPC_ENGINE_ID": "from-environment",
        "KVGRPC_DATA_PATHS": "nixl, shm",
        "KVGRPC_COPY_THREADS": "1",
        "KVGRPC_READ_BLOCKS": "false",
        "KVGRPC_BANDWIDTH_LIMIT_BYTES_PER_S": "1e6",
        "UNRELATED_KVGRPC_ENGINE_ID": "kept out",
    }
    config = load(file, environment, {})
    assert (config.engine_id, config.listen) == ("from-environment", "127.0.0.1:7001")
    assert (config.data_paths, config.copy_threads, config.read_blocks) == (("nixl", "shm"), 1, False)
    assert config.bandwidth_limit_bytes_per_s == 1e6


def test_flags_override_everything_and_a_flag_that_is_not_given_nothing(file: Path) -> None:
    environment = {"KVGRPC_ENGINE_ID": "from-environment", "KVGRPC_LISTEN": "127.0.0.1:7002"}
    config = load(file, environment, {"engine_id": "from-flag", "listen": None, "data_paths": "shm"})
    assert (config.engine_id, config.listen, config.data_paths) == ("from-flag", "127.0.0.1:7002", ("shm",))


def test_a_default_of_a_command_gives_way_to_every_source(tmp_path: Path) -> None:
    path, default = tmp_path / "kvgrpc.toml", {"listen": "127.0.0.1:1"}
    path.write_text("drain_s = 1.0")
    assert load(path, {}, {"listen": None}, default).listen == "127.0.0.1:1"
    path.write_text('listen = "127.0.0.1:2"')
    assert load(path, {}, {}, default).listen == "127.0.0.1:2"
    assert load(None, {"KVGRPC_LISTEN": "127.0.0.1:3"}, {}, default).listen == "127.0.0.1:3"


def test_every_setting_but_the_tables_has_its_variable() -> None:
    addresses = {"listen": "127.0.0.1:1", "admin_listen": "127.0.0.1:3", "metrics": "127.0.0.1:9464"}
    texts = addresses | {"advertise": "host:2", "data_paths": "shm", "dial_allow": "*", "ready_file": ""}
    texts |= {"log_level": "DEBUG", "log_format": "json"}
    numbers = {"copy_threads": "7", "bandwidth_limit_bytes_per_s": "7", "drain_s": "7", "trace_ring_spans": "7"}
    flags = {
        "read_blocks": "yes",
        "insecure": "1",
        "source_writes": "true",
        "exit_with_engine": "0",
        "checksums": "yes",
    }
    names = {item.name for item in fields(Config)} - TABLES.keys()
    values = {name: (texts | numbers | flags).get(name, "text") for name in names}
    config = load(None, {f"KVGRPC_{name.upper()}": value for name, value in values.items()}, {})
    assert all(getattr(config, name) != getattr(Config(), name) for name in names - {"ready_file", "exit_with_engine"})


def test_a_key_of_a_table_has_a_variable_that_changes_it_alone(file: Path) -> None:
    environment = {"KVGRPC_POOL_BLOCKS": "64", "KVGRPC_LIMITS_LEASE_TTL_S": "2.5", "KVGRPC_LIMITS_LEASES": "7"}
    config = load(file, environment, {})
    assert config.pool == PoolConfig(blocks=64, dtype="bfloat16")
    assert config.limits == Limits(lease_ttl_s=2.5, blocks_per_request=100, leases=7)
    assert load(None, {"KVGRPC_POOL_DTYPE": "int8"}, {}).pool == PoolConfig(dtype="int8")
    assert load(None, {"KVGRPC_POOL_DEVICE": "cuda:12"}, {}).pool == PoolConfig(device="cuda:12")


def test_keys_of_the_scheduler_have_variables_too() -> None:
    environment = {"KVGRPC_SCHEDULER_STAGED": "Yes", "KVGRPC_SCHEDULER_ON_LOSS": "recompute"}
    assert load(None, environment, {}).scheduler == SchedulerConfig("recompute", staged=True)
    with pytest.raises(InvalidRequest):
        load(None, {"KVGRPC_SCHEDULER_STAGED": "perhaps"}, {})


@pytest.mark.parametrize(
    ("layers", "step", "ranges"),
    [((4,), 0, ()), ((4,), 3, ((0, 3), (3, 1))), ((2, 4), 2, ((0, 2), (2, 2))), ((), 2, ())],
)
def test_parts_fit_the_deepest_group(layers: tuple[int, ...], step: int, ranges: tuple[tuple[int, int], ...]) -> None:
    groups = tuple(Group("g", GroupKind.FULL_ATTENTION, count, 16, 64, 1, 8, "uint8") for count in layers)
    assert SchedulerConfig(layers_per_part=step).rules(groups).layer_ranges == ranges


def test_the_rules_of_the_scheduler_are_those_that_are_set() -> None:
    rules = SchedulerConfig("recompute", 7, 1, 0, staged=True).rules(())
    assert rules == Rules((), OnLoss.RECOMPUTE, 7, 1, (), staged=True)


def test_no_pool_is_said_with_no_in_the_environment_and_a_key_makes_one_again(file: Path) -> None:
    assert load(file, {"KVGRPC_POOL": "no"}, {}).pool is None
    assert load(file, {"KVGRPC_POOL_LAYERS": "3", "KVGRPC_POOL": "No"}, {}).pool == PoolConfig(layers=3)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("KVGRPC_POOL", "num_layers=3", "is a table: set KVGRPC_POOL_LAYERS, KVGRPC_POOL_KV_HEADS"),
        ("KVGRPC_POOL", "", "or no, for none"),
        ("KVGRPC_LIMITS", "leases=3", "is a table: set KVGRPC_LIMITS_LEASE_TTL_S"),
        ("KVGRPC_ENGINEID", "x", "did you mean KVGRPC_ENGINE_ID?"),
        ("KVGRPC_DATA_PATH", "shm", "did you mean KVGRPC_DATA_PATHS?"),
        ("KVGRPC_LEASE_TTL_S", "3", "did you mean KVGRPC_LIMITS_LEASE_TTL_S?"),
        ("KVGRPC_POOL_LAYER", "3", "did you mean KVGRPC_POOL_LAYERS?"),
        ("KVGRPC_engine_id", "x", "is no setting"),
        ("KVGRPC_pool", "no", "is no setting"),
        ("KVGRPC_PORT", "50051", "there are KVGRPC_ADMIN_LISTEN, KVGRPC_ADVERTISE"),
        ("KVGRPC_LISTEN_PORT", "50051", "did you mean KVGRPC_LISTEN?"),
        ("KVGRPC_", "", "is no setting"),
    ],
)
def test_a_variable_that_means_nothing_is_refused_with_what_to_set_instead(name: str, text: str, says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        load(None, {name: text}, {})
    (violation,) = caught.value.violations
    assert violation.field == name
    assert says in violation.description


@pytest.mark.parametrize(
    ("name", "field"), [("KVGRPC_POOL_BLOCKS", "pool.blocks"), ("KVGRPC_LIMITS_LEASES", "limits.leases")]
)
@pytest.mark.parametrize("text", ["many", "1.5", "0", ""])
def test_a_variable_that_cannot_be_is_refused_by_the_name_of_its_key(name: str, field: str, text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        load(None, {name: text}, {})
    assert [violation.field for violation in caught.value.violations] == [field]


@pytest.mark.parametrize("service", ["KVGRPC", "KVGRPC_PREFILL"])
def test_variables_of_a_kubernetes_service_are_let_through(service: str) -> None:
    environment = {
        f"{service}_SERVICE_HOST": "10.0.0.7",
        f"{service}_SERVICE_PORT": "50051",
        f"{service}_SERVICE_PORT_GRPC": "50051",
        f"{service}_PORT": "tcp://10.0.0.7:50051",
        f"{service}_PORT_50051_TCP": "tcp://10.0.0.7:50051",
        f"{service}_PORT_50051_TCP_PROTO": "tcp",
        f"{service}_PORT_50051_TCP_PORT": "50051",
        f"{service}_PORT_50051_TCP_ADDR": "10.0.0.7",
    }
    assert load(None, environment, {}) == Config()


@pytest.mark.parametrize("text", ["bogus = 1", "[server]\nlisten = 1", "Listen = '127.0.0.1:1'"])
def test_an_unknown_setting_is_refused_by_its_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "kvgrpc.toml"
    path.write_text(text)
    with pytest.raises(InvalidRequest, match="is no setting"):
        load(path, {}, {})


def test_a_setting_with_a_typo_is_refused_with_the_nearest_one(tmp_path: Path) -> None:
    path = tmp_path / "kvgrpc.toml"
    path.write_text("data_path = 'shm'")
    with pytest.raises(InvalidRequest, match="did you mean data_paths"):
        load(path, {}, {})


@pytest.mark.parametrize("data", [b"listen = ", b"\xff\xfe", b"a = 1\na = 2"], ids=repr)
def test_a_file_that_is_no_toml_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "kvgrpc.toml"
    path.write_bytes(data)
    with pytest.raises(InvalidRequest, match="config"):
        load(path, {}, {})


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(InvalidRequest, match="config"):
            load(path, {}, {})


COUNTS = ("recompute_threshold_tokens", "prefill_backoff_tokens", "layers_per_part")
WRONG: list[tuple[str, Any, str]] = [
    ("listen", "nonsense", "listen"),
    ("listen", "127.0.0.1:", "listen"),
    ("listen", "127.0.0.1:x", "listen"),
    ("listen", "127.0.0.1:-1", "listen"),
    ("listen", "127.0.0.1:65536", "listen"),
    ("listen", "127.0.0.1:\N{SUPERSCRIPT TWO}", "listen"),
    ("listen", ":50051", "listen"),
    ("listen", "", "listen"),
    ("listen", 50051, "listen"),
    ("listen", "0.0.0.0:50051", "listen"),
    ("listen", "10.0.0.1:50051", "listen"),
    ("listen", "example.org:50051", "listen"),
    ("advertise", "nonsense", "advertise"),
    ("advertise", 1, "advertise"),
    ("engine_id", 7, "engine_id"),
    ("engine_id", "e" * 200, "engine_id"),
    ("weights_revision", ["v1"], "weights_revision"),
    ("data_paths", "window,shm", "data_paths"),
    ("data_paths", "collective,cma,window", "data_paths"),
    ("data_paths", "", "data_paths"),
    ("data_paths", [], "data_paths"),
    ("data_paths", "shm,pigeon", "data_paths"),
    ("data_paths", 5, "data_paths"),
    ("data_paths", "shm,shm", "data_paths"),
    ("copy_threads", 0, "copy_threads"),
    ("copy_threads", "many", "copy_threads"),
    ("copy_threads", 1.5, "copy_threads"),
    ("copy_threads", True, "copy_threads"),
    ("trace_ring_spans", -1, "trace_ring_spans"),
    ("trace_ring_spans", 1 << 20, "trace_ring_spans"),
    ("bandwidth_limit_bytes_per_s", 0, "bandwidth_limit_bytes_per_s"),
    ("bandwidth_limit_bytes_per_s", -1.0, "bandwidth_limit_bytes_per_s"),
    ("bandwidth_limit_bytes_per_s", "nan", "bandwidth_limit_bytes_per_s"),
    ("bandwidth_limit_bytes_per_s", float("inf"), "bandwidth_limit_bytes_per_s"),
    ("drain_s", -1, "drain_s"),
    ("drain_s", float("nan"), "drain_s"),
    ("drain_s", "soon", "drain_s"),
    ("dial_allow", 5, "dial_allow"),
    ("read_blocks", "perhaps", "read_blocks"),
    ("read_blocks", 3, "read_blocks"),
    ("insecure", "perhaps", "insecure"),
    ("ready_file", "/nonexistent/folder/ready", "ready_file"),
    ("session_socket", "/tmp/" + "s" * 200, "session_socket"),
    ("exit_with_engine", True, "exit_with_engine"),
    ("pool", 5, "pool"),
    ("pool", True, "pool"),
    ("pool", {"bogus": 1}, "pool.bogus"),
    ("pool", {"blocks": 0}, "pool.blocks"),
    ("pool", {"blocks": -1}, "pool.blocks"),
    ("pool", {"blocks": "many"}, "pool.blocks"),
    ("pool", {"blocks": 1.5}, "pool.blocks"),
    ("pool", {"layers": True}, "pool.layers"),
    ("pool", {"dtype": "complex"}, "pool.dtype"),
    ("pool", {"dtype": 5}, "pool.dtype"),
    ("pool", {"device": "gpu"}, "pool.device"),
    ("pool", {"device": "cuda"}, "pool.device"),
    ("pool", {"device": "cuda:-1"}, "pool.device"),
    ("pool", {"device": "cuda:00"}, "pool.device"),
    ("pool", {"device": "cuda:1000"}, "pool.device"),
    ("pool", {"device": "cuda:0\n"}, "pool.device"),
    ("pool", {"device": ""}, "pool.device"),
    ("pool", {"device": 0}, "pool.device"),
    ("scheduler", 5, "scheduler"),
    ("scheduler", {"bogus": 1}, "scheduler.bogus"),
    ("scheduler", {"on_loss": "despair"}, "scheduler.on_loss"),
    *[("scheduler", {name: -1}, f"scheduler.{name}") for name in COUNTS],
    *[("scheduler", {name: True}, f"scheduler.{name}") for name in COUNTS],
    ("scheduler", {"staged": "perhaps"}, "scheduler.staged"),
    ("limits", 5, "limits"),
    ("limits", {"bogus": 1}, "limits.bogus"),
    *[("limits", {name: 0}, f"limits.{name}") for name in (item.name for item in fields(Limits))],
    ("limits", {"lease_ttl_s": "long"}, "limits.lease_ttl_s"),
    ("limits", {"lease_ttl_s": float("nan")}, "limits.lease_ttl_s"),
    ("limits", {"lease_cap_s": float("inf")}, "limits.lease_cap_s"),
    ("limits", {"leases": 1.5}, "limits.leases"),
    ("limits", {"leases": True}, "limits.leases"),
]


def test_a_value_that_cannot_be_is_refused_by_the_name_of_its_setting(subtests: pytest.Subtests) -> None:
    for key, value, field in WRONG:
        with subtests.test(f"{key}={value}"):
            assert refused_field(**{key: value}) == field


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "127.5.5.5:1", "[::1]:50051", "localhost:65535"])
def test_loopback_is_bound_without_further_ado(listen: str) -> None:
    assert load(None, {}, {"listen": listen}).listen == listen


@pytest.mark.parametrize("listen", ["0.0.0.0:1", "[::]:1", "10.0.0.1:1", "example.org:1"])
def test_elsewhere_is_bound_only_when_that_is_said(listen: str) -> None:
    assert load(None, {}, {"listen": listen, "insecure": True}).listen == listen


def test_no_pool_is_said_with_false(tmp_path: Path) -> None:
    path = tmp_path / "kvgrpc.toml"
    path.write_text("pool = false\n")
    assert load(path, {}, {}).pool is None
    assert load(None, {}, {"pool": False}).pool is None


@pytest.mark.parametrize(
    ("address", "allowed"),
    [
        ("127.0.0.1:1", True),
        ("127.9.9.9:65535", True),
        ("[::1]:1", True),
        ("localhost:1", True),
        ("10.0.0.1:1", False),
        ("0.0.0.0:1", False),
        ("[::]:1", False),
        ("169.254.169.254:80", False),
        ("example.org:1", False),
        ("127.0.0.1.example.org:1", False),
        ("2130706433:1", False),
        ("127.1:1", False),
        ("127.0.0.1", False),
        ("127.0.0.1:0", False),
        ("127.0.0.1:65536", False),
        ("127.0.0.1:\N{SUPERSCRIPT TWO}", False),
        ("unix:/tmp/socket", False),
        ("dns:///127.0.0.1:1", False),
        ("", False),
    ],
)
def test_by_default_only_this_machine_is_dialled(address: str, allowed: bool) -> None:
    assert Config().may_dial(address) is allowed


def test_the_dial_list_takes_hosts_networks_and_everything() -> None:
    config = load(None, {}, {"dial_allow": "10.0.0.0/8, decode.example.org, fd00::/8"})
    for address in ("10.1.2.3:1", "decode.example.org:1", "[fd00::1]:1"):
        assert config.may_dial(address)
    for address in ("11.0.0.1:1", "prefill.example.org:1", "127.0.0.1:1", "[fe80::1]:1"):
        assert not config.may_dial(address)
    assert load(None, {}, {"dial_allow": ["*"]}).may_dial("anywhere.example.org:1")


def test_networks_are_declared_private_only_where_the_server_has_tls(tmp_path: Path) -> None:
    names = {"private_networks": "10.0.0.0/8, decode.example.org"}
    assert load(None, {}, names).networks() == EVERYWHERE
    with_tls = {"tls": {"dir": str(tmp_path)}}
    assert load(None, {}, with_tls).networks() == PrivateNetworks(())
    assert load(None, {}, names | with_tls).networks() == PrivateNetworks(("10.0.0.0/8", "decode.example.org"))


@given(st.text(max_size=40))
def test_any_text_is_an_address_or_a_refusal_and_never_dialled_by_accident(text: str) -> None:
    config = Config()
    if config.may_dial(text):
        host, port = split_address(text, "address")
        assert is_loopback(host)
        assert 0 < port < 65536


@given(st.sampled_from([item.name for item in fields(Config)]), st.integers() | st.floats() | st.text() | st.booleans())
def test_any_value_of_any_setting_is_taken_or_refused(name: str, value: Any) -> None:
    try:
        load(None, {}, {name: value})
    except InvalidRequest as error:
        assert error.violations  # noqa: PT017 - either outcome is one


def test_the_pool_of_a_configuration_is_laid_out_as_it_says() -> None:
    layout = PoolConfig(layers=3, kv_heads=2, head_dim=8, block_tokens=4, blocks=10, dtype="float32").layout()
    assert layout.total_bytes == 3 * 10 * (2 * 4 * 2 * 8 * 4)
    assert [region.first_layer for region in layout.regions] == [0, 1, 2]
