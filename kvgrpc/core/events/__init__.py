"""Events: everything that can happen to a node.

`calls` come from engines, schedulers and routers, `peers` from other leads, `ranks` from workers; `lives` are about
this engine itself. All are frozen values: the shell checks their form, the node their meaning.
"""

from kvgrpc.core.events.calls import (
    AcknowledgeTransfers,
    AllocateBlocks,
    CancelDrain,
    CancelScope,
    CancelTransfer,
    ConnectPeer,
    Destination,
    FinishedBlocks,
    FreeBlocks,
    GiveAllocation,
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
    StartDrain,
    WaitsFor,
)
from kvgrpc.core.events.lives import LeasesVoided, LifeBegan, MemoryGone, Tick
from kvgrpc.core.events.peers import (
    AccessAnswered,
    AccessClosing,
    AccessSettling,
    CallAbandoned,
    ChecksumBlocks,
    ChecksumsAnswered,
    CloseAccess,
    CloseAnswered,
    CloseOutcome,
    DialFailed,
    HandshakeReceived,
    KeysRenewed,
    OpenAccess,
    Opened,
    PartsAnswered,
    PartsReady,
    PeerAlive,
    PeerAnswered,
    PeerRequest,
    PeerSilent,
    PostSend,
    PostSendAnswered,
    ProofRefused,
    RegisterAnswered,
    RenewAnswered,
    SettleAccess,
    SettleAnswered,
)
from kvgrpc.core.events.ranks import (
    ChecksumsComputed,
    CopiedOut,
    EndpointOffered,
    MeetingBegan,
    PeerMapped,
    PostingEnded,
    ProcessEnded,
    Rekeyed,
    SendPosted,
    SendWanted,
    StepDone,
)
from kvgrpc.core.values.call import Call, ReadyPart

Event = (
    FinishedBlocks | RegisterPush | ReserveBlocks | PartsReady | PartsAnswered | RegisterAnswered | PullBlocks
    | GiveDestination | RenewLeases | ReleaseLease | CancelTransfer | AcknowledgeTransfers | AllocateBlocks
    | ReclaimBlocks | FreeBlocks | GiveAllocation | ConnectPeer | HandshakeReceived | PeerAnswered | DialFailed
    | PeerAlive | PeerSilent | OpenAccess | SettleAccess | CloseAccess | AccessAnswered | SettleAnswered
    | CloseAnswered | RenewAnswered | EndpointOffered | MeetingBegan | PeerMapped | PostingEnded | StepDone
    | CallAbandoned | ChecksumBlocks | ChecksumsAnswered | ChecksumsComputed | CopiedOut | ProcessEnded | Rekeyed
    | PostSend | PostSendAnswered | ProofRefused | SendWanted | SendPosted | ReleaseQuarantine | LeasesVoided
    | StartDrain | CancelDrain
    | KeysRenewed | LifeBegan | MemoryGone | Tick
)  # fmt: skip
