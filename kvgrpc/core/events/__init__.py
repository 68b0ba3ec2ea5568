"""Events: everything that can happen to a node.

`calls` come from engines, schedulers and routers, `peers` from other leads, `ranks` from workers; `lives` are what
happens to this engine itself. All are frozen values: the shell checks their form, the node their meaning.
"""

from kvgrpc.core.events.calls import (
    AcknowledgeTransfers,
    AllocateBlocks,
    CancelScope,
    CancelTransfer,
    ConnectPeer,
    Destination,
    Drain,
    FinishedBlocks,
    FreeBlocks,
    GiveDestination,
    LeaseRef,
    PullBlocks,
    PushSource,
    ReclaimBlocks,
    RegisterPush,
    ReleaseLease,
    ReleaseQuarantine,
    RenewLeases,
    ReserveBlocks,
    WaitsFor,
)
from kvgrpc.core.events.lives import LeasesVoided, LifeBegan, MemoryGone, Tick
from kvgrpc.core.events.peers import (
    AccessAnswered,
    CallAbandoned,
    ChecksumBlocks,
    ChecksumsAnswered,
    CloseAccess,
    CloseAnswered,
    CloseOutcome,
    Closing,
    DialFailed,
    HandshakeReceived,
    OpenAccess,
    Opened,
    PartsAnswered,
    PartsReady,
    PeerAlive,
    PeerAnswered,
    PeerSilent,
    PostSend,
    PostSendAnswered,
    RegisterAnswered,
    RenewAnswered,
    SettleAccess,
    SettleAnswered,
    Settling,
)
from kvgrpc.core.events.ranks import (
    ChecksumsComputed,
    CopiedOut,
    EndpointOffered,
    PeerMapped,
    PostingEnded,
    ProcessEnded,
    Rekeyed,
    SendPosted,
    SendWanted,
    StepDone,
)
from kvgrpc.core.values.calls import Call, ReadyPart

Event = (
    FinishedBlocks | RegisterPush | ReserveBlocks | PartsReady | PartsAnswered | RegisterAnswered
    | PullBlocks | GiveDestination | RenewLeases | ReleaseLease | CancelTransfer
    | AcknowledgeTransfers | AllocateBlocks | ReclaimBlocks | FreeBlocks | ConnectPeer | HandshakeReceived
    | PeerAnswered | DialFailed | PeerAlive | PeerSilent | OpenAccess | SettleAccess | CloseAccess | AccessAnswered
    | SettleAnswered | CloseAnswered | RenewAnswered | EndpointOffered | PeerMapped | PostingEnded | StepDone
    | CallAbandoned | ChecksumBlocks | ChecksumsAnswered | ChecksumsComputed | CopiedOut | ProcessEnded | Rekeyed
    | PostSend | PostSendAnswered | SendWanted | SendPosted | ReleaseQuarantine | Drain | LeasesVoided | LifeBegan
    | MemoryGone | Tick
)  # fmt: skip

__all__ = [
    "AccessAnswered",
    "AcknowledgeTransfers",
    "AllocateBlocks",
    "Call",
    "CallAbandoned",
    "CancelScope",
    "CancelTransfer",
    "ChecksumBlocks",
    "ChecksumsAnswered",
    "ChecksumsComputed",
    "CloseAccess",
    "CloseAnswered",
    "CloseOutcome",
    "Closing",
    "ConnectPeer",
    "CopiedOut",
    "Destination",
    "DialFailed",
    "Drain",
    "EndpointOffered",
    "Event",
    "FinishedBlocks",
    "FreeBlocks",
    "GiveDestination",
    "HandshakeReceived",
    "LeaseRef",
    "LeasesVoided",
    "LifeBegan",
    "MemoryGone",
    "OpenAccess",
    "Opened",
    "PartsAnswered",
    "PartsReady",
    "PeerAlive",
    "PeerAnswered",
    "PeerMapped",
    "PeerSilent",
    "PostSend",
    "PostSendAnswered",
    "PostingEnded",
    "ProcessEnded",
    "PullBlocks",
    "PushSource",
    "ReadyPart",
    "ReclaimBlocks",
    "RegisterAnswered",
    "RegisterPush",
    "Rekeyed",
    "ReleaseLease",
    "ReleaseQuarantine",
    "RenewAnswered",
    "RenewLeases",
    "ReserveBlocks",
    "SendPosted",
    "SendWanted",
    "SettleAccess",
    "SettleAnswered",
    "Settling",
    "StepDone",
    "Tick",
    "WaitsFor",
]
