"""Actions: everything that a node asks its shell to do.

`answers` are for callers, `news` for the engine and watchers, `peers` for other leads, `ranks` for workers. All are
frozen values: the shell performs them in order and reports back as events.
"""

from kvgrpc.core.actions.answers import (
    Acknowledged,
    Allocated,
    Answer,
    BlocksReserved,
    Cancelled,
    Checksums,
    Closings,
    DrainChanged,
    Freed,
    GaveUp,
    HandedOver,
    Introduced,
    Later,
    Openings,
    PeerConnected,
    PullStarted,
    PushExpected,
    QuarantineReleased,
    Reclaimed,
    ReclaimedLease,
    Refuse,
    Registered,
    Released,
    Renewed,
    Reply,
    SendUnderWay,
    Verdicts,
    Widened,
)
from kvgrpc.core.actions.news import (
    BlocksLacking,
    BlocksReturnedNews,
    EngineNews,
    FailedNews,
    LayersReceivedNews,
    PartsReturnedNews,
    PullOpenedNews,
    PushWantedNews,
    ReceivedNews,
    TellEngine,
    TransferChanged,
    WeightsUnknown,
)
from kvgrpc.core.actions.peers import (
    Dial,
    HangUp,
    SendChecksums,
    SendClose,
    SendOpen,
    SendParts,
    SendPostSend,
    SendRegister,
    SendRenew,
    SendRenewKeys,
    SendSettle,
)
from kvgrpc.core.actions.ranks import (
    AnswerSend,
    AwaitEnd,
    ComputeChecksums,
    CopyOut,
    Expect,
    MakeOffer,
    MapPeer,
    Operation,
    Post,
    RankAction,
    Rekey,
    Send,
    UnmapPeer,
)

_OfAccess = SendOpen | SendSettle | SendClose | SendChecksums | SendPostSend
_ToPeer = Dial | HangUp | SendRegister | SendParts | SendRenew | SendRenewKeys | _OfAccess
_News = TransferChanged | TellEngine | WeightsUnknown | BlocksLacking
Action = Reply | Refuse | _ToPeer | _News | RankAction
