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

_OfTransfer = FinishedBlocks | PullBlocks | GiveDestination | RenewLeases | ReleaseLease | CancelTransfer
_OfPush = RegisterPush | ReserveBlocks | PartsReady | PartsAnswered | RegisterAnswered | AcknowledgeTransfers
_OfBlocks = AllocateBlocks | ReclaimBlocks | FreeBlocks | GiveAllocation | ReleaseQuarantine | StartDrain | CancelDrain
_OfPeer = ConnectPeer | HandshakeReceived | PeerAnswered | DialFailed | PeerAlive | PeerSilent | CallAbandoned
_OfAccess = OpenAccess | SettleAccess | CloseAccess | ChecksumBlocks | PostSend | KeysRenewed | ProofRefused
_Answers = AccessAnswered | SettleAnswered | CloseAnswered | RenewAnswered | ChecksumsAnswered | PostSendAnswered
_Memory = EndpointOffered | MeetingBegan | PeerMapped | Rekeyed | LifeBegan | MemoryGone | LeasesVoided
_Reports = PostingEnded | StepDone | ChecksumsComputed | CopiedOut | ProcessEnded | SendWanted | SendPosted
Event = _OfTransfer | _OfPush | _OfBlocks | _OfPeer | _OfAccess | _Answers | _Memory | _Reports | Tick
