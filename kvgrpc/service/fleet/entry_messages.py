"""Entries as messages, and back."""

from kvgrpc.fleet.entry import EngineEntry, EngineRole
from kvgrpc.v1 import fleet_pb2
from kvgrpc.wire.values import core_data_path, data_path

ROLES = {
    EngineRole.PREFILL: fleet_pb2.ENGINE_ROLE_PREFILL,
    EngineRole.DECODE: fleet_pb2.ENGINE_ROLE_DECODE,
    EngineRole.BOTH: fleet_pb2.ENGINE_ROLE_BOTH,
}
_ROLES = {int(value): role for role, value in ROLES.items()}


def entry_to_proto(entry: EngineEntry) -> fleet_pb2.FleetEngine:
    """Returns the message of an entry, without what is known of its engine."""
    paths = map(data_path, entry.data_paths)
    return fleet_pb2.FleetEngine(
        engine_id=entry.engine_id,
        incarnation=entry.incarnation,
        life=entry.life,
        addresses=entry.addresses,
        role=ROLES[entry.role],
        model_name=entry.model_name,
        model_digest=entry.model,
        layout_digest=entry.layout,
        data_paths=[path for path in paths if path],
        host=entry.host,
        tenant=entry.tenant,
        version=entry.version,
    )


def entry_from_proto(found: fleet_pb2.FleetEngine) -> EngineEntry:
    """Returns the entry of a message, unchecked."""
    return EngineEntry(
        found.engine_id,
        tuple(found.addresses),
        found.incarnation,
        found.life,
        _ROLES.get(found.role, EngineRole.BOTH),
        found.model_digest,
        found.layout_digest,
        tuple(map(core_data_path, found.data_paths)),
        found.host,
        found.tenant,
        version=found.version,
        model_name=found.model_name,
    )
