"""Fields of requests that name a thing, each with the caller who may use the thing, and fields that name nothing.

`test_names` compares both lists with the schema and fails if a field is on neither list.
"""

OWNER = "its owner"
ID = "who knows its id, of 128 random bits"
KEY = "who knows the request's transfer key"
GRANT = "who holds the grant, which its issuer signed"
PEER = "the life of a peer that opened it"
SCHEDULER = "who schedules for the pool"
OPERATOR = "an operator"
TICKET = "who has the engine's ticket"
NEW = "nobody: it is new, and one that was used is refused"
SAME_CALLER = "the caller that used it before"

NAMES = {
    "v1.BlockRuns.starts": OWNER,
    "v1.Blocks.allocation_id": OWNER,
    "v1.AllocateBlocksRequest.allocation_id": OWNER,
    "v1.FreeBlocksRequest.allocation_id": OWNER,
    "v1.PutTensorRequest.allocation_id": OWNER,
    "v1.CancelTransferRequest.free_allocation_ids": OWNER,
    "v1.PullBlocksRequest.transfer_id": OWNER,
    "v1.AcknowledgeTransfersRequest.transfer_ids": OWNER,
    "v1.FinishedBlocksRequest.transfer_key": OWNER,
    "v1.HandOver.lease_id": OWNER,
    "v1.PushPart.lease_id": OWNER,
    "v1.RequestArrivedRequest.request_id": SCHEDULER,
    "v1.MatchTokensRequest.request_id": SCHEDULER,
    "v1.BlocksAllocatedRequest.request_id": SCHEDULER,
    "v1.TokensComputedRequest.request_id": SCHEDULER,
    "v1.BlocksLoadedRequest.request_id": SCHEDULER,
    "v1.RequestPreemptedRequest.request_id": SCHEDULER,
    "v1.RequestFinishedRequest.request_id": SCHEDULER,
    "v1.AbortRequestRequest.request_id": SCHEDULER,
    "v1.PollSchedulerNewsRequest.after_seq": SCHEDULER,
    "v1.ScheduleRequest.after_seq": SCHEDULER,
    "v1.LeaseRef.lease_id": ID,
    "v1.LeaseRef.transfer_key": KEY,
    "v1.GetTransferRequest.transfer_id": ID,
    "v1.WaitTransferRequest.transfer_id": ID,
    "v1.WaitTransfersRequest.transfer_ids": ID,
    "v1.CancelTransferRequest.transfer_id": ID,
    "v1.CancelTransferRequest.transfer_key": KEY,
    "v1.GrantLeaseRequest.transfer_key": NEW,
    "v1.Intent.transfer_key": KEY,
    "v1.PullBlocksRequest.transfer_key": KEY,
    "v1.ReserveBlocksRequest.transfer_key": KEY,
    "v1.TensorName.transfer_key": KEY,
    "v1.TensorName.name": KEY,
    "v1.TensorName.part": KEY,
    "v1.ReleaseTensorsRequest.transfer_key": KEY,
    "v1.ListTensorsRequest.transfer_key": KEY,
    "v1.Grant.token": GRANT,
    "peer.v1.AccessOpening.token": GRANT,
    "peer.v1.AccessClosing.token": GRANT,
    "peer.v1.Caller.proof": PEER,
    "v1.HandshakeRequest.proof": PEER,
    "v1.HandshakeRequest.proofs": PEER,
    "v1.RenewLeasesRequest.reading_access_ids": ID,
    "peer.v1.AccessOpening.access_id": NEW,
    "peer.v1.AccessOpening.reverse_access_id": NEW,
    "peer.v1.AccessSettling.access_id": PEER,
    "peer.v1.AccessSettling.part": PEER,
    "peer.v1.AccessClosing.access_id": PEER,
    "peer.v1.PartsReadyRequest.access_id": PEER,
    "peer.v1.ChecksumBlocksRequest.access_id": PEER,
    "peer.v1.PostSendRequest.access_id": PEER,
    "peer.v1.PostSendRequest.epoch": PEER,
    "peer.v1.PostSendRequest.sequence": PEER,
    "v1.ReleaseQuarantineRequest.transfer_ids": OPERATOR,
    "v1.ForgetEngineRequest.engine_id": OPERATOR,
    "peer.v1.ConnectRankRequest.ticket": TICKET,
    "peer.v1.ConnectRankRequest.not_at_rest": TICKET,
} | {
    f"v1.{method}Request.idempotency_key": SAME_CALLER
    for method in (
        "AcknowledgeTransfers", "AllocateBlocks", "CancelDrain", "CancelTransfer", "FinishedBlocks", "FreeBlocks",
        "GrantLease", "PullBlocks", "ReclaimBlocks", "RegisterPush", "ReleaseLease", "ReleaseQuarantine",
        "ReserveBlocks", "StartDrain",
    )
}  # fmt: skip
"""Message and field -> who may use the named thing. The server checks this before it touches the thing."""

LABELS = frozenset(
    {
        # A caller's statements about itself or another lead, which prove nothing.
        "peer.v1.Caller.engine_id", "v1.EngineDescription.engine_id", "v1.EngineDescription.address",
        "v1.EngineDescription.weights_revision", "v1.HandshakeRequest.expected_engine_id", "v1.PeerAddress.address",
        "v1.PeerAddress.engine_id", "v1.Grant.engine_id", "v1.Grant.address", "v1.Grant.lease_id",
        "v1.PoolDescription.fingerprint", "v1.Group.name", "v1.Group.dtype", "v1.Group.space",
        # Ways to reach a peer's own memory.
        "v1.CollectiveEndpoint.backend", "v1.CudaVmmEndpoint.socket_path", "v1.CudaVmmEndpoint.token",
        "v1.CudaVmmEndpoint.device_uuid", "v1.CudaVmmEndpoint.nonce", "v1.CudaVmmEndpoint.unavailable_reason",
        "v1.LoopbackEndpoint.key", "v1.NixlEndpoint.agent", "v1.NixlEndpoint.metadata", "v1.NixlEndpoint.backend",
        "v1.ProcessEndpoint.socket_path", "v1.ProcessEndpoint.token", "v1.ShmEndpoint.socket_path",
        "v1.ShmEndpoint.token", "v1.ShmEndpoint.nonce", "peer.v1.GroupValue.key", "peer.v1.GroupValue.value",
        # Content of the KV or of a tensor: compared, never looked up.
        "v1.Content.opaque_id", "v1.ContentChain.digests", "v1.MultimodalItem.digest", "v1.TokenContent.adapter",
        "v1.TokenContent.cache_salt", "v1.TokenContent.weights_revision", "peer.v1.ContentClaim.digest",
        "peer.v1.ContentClaim.opaque_id", "peer.v1.ContentClaim.prefix_digests", "v1.TensorDescription.dtype",
        "v1.TensorDescription.content_digest",
        "v1.ExpectedTensor.dtype", "v1.ExpectedTensor.content_digest",
        # Labels to search by, and texts for people.
        "v1.FinishedBlocksRequest.request_id", "v1.GetTensorRequest.request_id", "v1.GrantLeaseRequest.request_id",
        "v1.GrantLeaseRequest.LabelsEntry.key", "v1.GrantLeaseRequest.LabelsEntry.value", "v1.Intent.request_id",
        "v1.PullBlocksRequest.request_id", "v1.PutTensorRequest.request_id", "v1.RegisterPushRequest.request_id",
        "v1.ReserveBlocksRequest.request_id", "peer.v1.AccessOpening.request_id", "peer.v1.AccessOpening.transfer_id",
        "v1.AllocateBlocksRequest.request_id", "v1.BlocksNeededRequest.request_id",
        "v1.ReclaimBlocksRequest.request_id", "v1.AllocateBlocksRequest.label",
        "v1.AbortRequestRequest.message", "v1.CancelTransferRequest.message", "v1.ReleaseQuarantineRequest.message",
        "v1.ForgetEngineRequest.message", "v1.StartDrainRequest.reason",
        "v1.SourceFailure.message", "peer.v1.AccessClosing.message",
        # Filters and positions of lists, which show only what is there.
        "v1.ListAllocationsRequest.request_id", "v1.ListAllocationsRequest.label",
        "v1.ListAllocationsRequest.page_token",
        "v1.ListLeasesRequest.request_id", "v1.ListLeasesRequest.page_token", "v1.ListPeersRequest.page_token",
        "v1.ListAuditRecordsRequest.page_token", "v1.ListSpansRequest.page_token",
        "v1.ListSpansRequest.transfer_id", "v1.ListSpansRequest.trace_id",
        # For whom a grant is: the issuer compares the name with that of whoever comes.
        "v1.HandOver.tenant", "v1.HandOver.bound_to", "v1.GrantLeaseRequest.tenant", "v1.GrantLeaseRequest.bound_to",
        "v1.PutTensorRequest.tenant", "v1.GetTensorRequest.tenant", "v1.ReleaseTensorsRequest.tenant",
        "v1.ListPinsRequest.page_token", "v1.ListTensorsRequest.page_token", "v1.ListTransfersRequest.page_token",
        "v1.TransferFilter.request_id", "v1.TransferFilter.trace_id", "v1.TransferFilter.peer_engine_id",
        "v1.TransferFilter.transfer_ids", "v1.TransferFilter.pair_id", "v1.TransferFilter.lease_id",
        # Traces, and calls within a stream, which their own caller numbers.
        "v1.RequestArrivedRequest.traceparent", "v1.UnaryCall.traceparent", "peer.v1.PeerCall.traceparent",
        "v1.UnaryCall.method", "v1.UnaryCall.request",
    }
)  # fmt: skip
"""Message and field of each value that names nothing of this server."""

NUMBERS = frozenset({"starts", "part", "after_seq", "epoch", "sequence"})
"""Number fields that may name a thing: a block, a part, a position in a sequence."""

RANK_REPORTS = "session.v1."
"""Package whose messages come from a worker with the ticket. They name only its own rank's commands."""
