// Messages and enums that every kvgrpc service shares.
//
// Conventions of all files of this package:
//
// * Every reply starts with a ResponseHeader. A changed incarnation means that everything the caller knew of that
//   engine (leases, grants, transfers) is gone.
// * Identifiers are opaque strings that contain the incarnation: compare them, never parse them. Ids of leases,
//   transfers and allocations also contain 128 random bits, so nobody can guess one.
// * Everything that a request names has an owner: the attached engine, or the caller that created it. docs/security.md
//   says who may do what with each kind of thing. A caller without that right is refused as if the thing did not exist.
//   A scheduler in another process speaks for the attached engine: it sends the ticket of the engine's session as call
//   metadata `kvgrpc-ticket`, in hex digits.
// * No number exceeds 2^53 - 1, even where its type has 64 bits, so that languages whose only number is a double can
//   hold it. A larger number in a request is INVALID_FIELD.
// * The name of a number of things ends in `_count`. The name of a measure ends in its unit (`block_bytes`,
//   `use_tokens`).
// * Times are durations, counted by the sender at the moment of sending. A process never sends its clock reading to
//   another. The only exception is `request_time_us`, which orders requests.
// * A request field is optional unless its comment starts with "Required". A message in a reply is set unless its
//   comment says when it is unset.
// * Every mutating request but ForgetEngine has an `idempotency_key`. Calls with the same caller, method, key and body
//   get the same answer, and a call that is still running is joined. The same key with another body is ALREADY_EXISTS,
//   reason IDEMPOTENCY_KEY_REUSED. An empty key means no deduplication. A key lives as long as what its call created,
//   and at least 60 seconds. A refusal is not kept: it changed nothing, and the same call may succeed the next time.
// * `validate_only` checks everything that this server can check and changes nothing. The reply says what the call
//   would have done, without ids and grants, because they would name nothing. Messages that consist only of ids or
//   grants are unset. Every mutating request has the field, except Handshake, KeepAlive, ForgetEngine, the requests of
//   SchedulerService (their meaning depends on the calls before them) and those of TensorService (one name stands for
//   one tensor).
// * Errors carry google.rpc.ErrorInfo with domain `kvgrpc.dev` and a reason, which is a FailureReason without its
//   prefix. The metadata of ErrorInfo always has `next` (a NextStep without its prefix: what to do), `engine_id` and
//   `incarnation` (the engine that refused; the incarnation in decimal). It also has what the reason needs: `phase`,
//   `limit`, `free_block_count`, `block_count`, `group`, `engine`, as docs/protocol.md lists them. An error about a
//   field also carries google.rpc.BadRequest. An error after which the same call can succeed later also carries
//   google.rpc.RetryInfo. Clients retry only UNAVAILABLE by themselves.
// * A stream of replies sends its initial metadata at once, before the first reply.
// * JSON forms use standard base64 with padding. Readers accept both base64 alphabets, with or without padding.
// * Fields and values are added, but never removed, renumbered or given another meaning. The number and the name of a
//   field that is given up are reserved. Readers skip what they do not know.
// * In addition to the errors in its list, any call may end with INVALID_ARGUMENT INVALID_FIELD (also for a request
//   that cannot be parsed), UNAVAILABLE NO_POOL or ENGINE_LOST (the engine behind the lead changed during the call, or
//   the server is stopping), FAILED_PRECONDITION DRAINING (do not retry here: choose another engine), PERMISSION_DENIED
//   NOT_OWNER (the call uses the pool of an attached engine without speaking for it, or its ticket belongs to no
//   attached engine), UNAUTHENTICATED NOT_AUTHENTICATED (the server asks who calls), PERMISSION_DENIED ROLE_MISSING (the
//   caller has no role for the method) or POLICY_DENIED, RESOURCE_EXHAUSTED LIMIT_EXCEEDED (a table is full),
//   OUT_OF_RANGE LIMIT_EXCEEDED (a field has too many rows), ALREADY_EXISTS IDEMPOTENCY_KEY_REUSED, INTERNAL INTERNAL,
//   and INTERNAL or UNAVAILABLE INTERNAL_DEFECT (a defect ended the engine's life; UNAVAILABLE means that the next life
//   has not begun yet).
// * Texts that a server keeps (request ids, idempotency keys, addresses, names) have at most 256 bytes. A message for
//   people may be longer and is cut after 1,024 bytes.
// * A list of GroupBlocks has at most 256 rows, because a pool has at most 256 groups.
// * The server keeps a W3C traceparent from the call's metadata with what the call creates, and passes it on to peers.
//   A tracestate is not passed on.
// * Unknown enum values read as the safe case: an unknown MemoryDisposition is QUARANTINED, an unknown state is not an
//   end, an unknown reason cannot be retried.

// Code generated by protoc-gen-go. DO NOT EDIT.
// versions:
// 	protoc-gen-go v1.36.12
// 	protoc        (unknown)
// source: kvgrpc/v1/common.proto

package kvgrpcv1

import (
	protoreflect "google.golang.org/protobuf/reflect/protoreflect"
	protoimpl "google.golang.org/protobuf/runtime/protoimpl"
	durationpb "google.golang.org/protobuf/types/known/durationpb"
	reflect "reflect"
	sync "sync"
	unsafe "unsafe"
)

const (
	// Verify that this generated code is sufficiently up-to-date.
	_ = protoimpl.EnforceVersion(20 - protoimpl.MinVersion)
	// Verify that runtime/protoimpl is sufficiently up-to-date.
	_ = protoimpl.EnforceVersion(protoimpl.MaxVersion - 20)
)

// Kind of access that a grant allows.
type AccessKind int32

const (
	// Never sent.
	AccessKind_ACCESS_KIND_UNSPECIFIED AccessKind = 0
	// Reading blocks under a lease. A pull uses it.
	AccessKind_ACCESS_KIND_READ AccessKind = 1
	// Writing reserved blocks. A push uses it.
	AccessKind_ACCESS_KIND_WRITE AccessKind = 2
)

// Enum value maps for AccessKind.
var (
	AccessKind_name = map[int32]string{
		0: "ACCESS_KIND_UNSPECIFIED",
		1: "ACCESS_KIND_READ",
		2: "ACCESS_KIND_WRITE",
	}
	AccessKind_value = map[string]int32{
		"ACCESS_KIND_UNSPECIFIED": 0,
		"ACCESS_KIND_READ":        1,
		"ACCESS_KIND_WRITE":       2,
	}
)

func (x AccessKind) Enum() *AccessKind {
	p := new(AccessKind)
	*p = x
	return p
}

func (x AccessKind) String() string {
	return protoimpl.X.EnumStringOf(x.Descriptor(), protoreflect.EnumNumber(x))
}

func (AccessKind) Descriptor() protoreflect.EnumDescriptor {
	return file_kvgrpc_v1_common_proto_enumTypes[0].Descriptor()
}

func (AccessKind) Type() protoreflect.EnumType {
	return &file_kvgrpc_v1_common_proto_enumTypes[0]
}

func (x AccessKind) Number() protoreflect.EnumNumber {
	return protoreflect.EnumNumber(x)
}

// Deprecated: Use AccessKind.Descriptor instead.
func (AccessKind) EnumDescriptor() ([]byte, []int) {
	return file_kvgrpc_v1_common_proto_rawDescGZIP(), []int{0}
}

// Effect of a consumer's abort or death on the source's blocks.
type OnAbort int32

const (
	// Same as RELEASE.
	OnAbort_ON_ABORT_UNSPECIFIED OnAbort = 0
	// The consumer counts as done: no other consumer will come for its share of the blocks.
	OnAbort_ON_ABORT_RELEASE OnAbort = 1
	// The consumer does not count as done: another consumer may pull with the same grant while the lease lives.
	OnAbort_ON_ABORT_KEEP OnAbort = 2
)

// Enum value maps for OnAbort.
var (
	OnAbort_name = map[int32]string{
		0: "ON_ABORT_UNSPECIFIED",
		1: "ON_ABORT_RELEASE",
		2: "ON_ABORT_KEEP",
	}
	OnAbort_value = map[string]int32{
		"ON_ABORT_UNSPECIFIED": 0,
		"ON_ABORT_RELEASE":     1,
		"ON_ABORT_KEEP":        2,
	}
)

func (x OnAbort) Enum() *OnAbort {
	p := new(OnAbort)
	*p = x
	return p
}

func (x OnAbort) String() string {
	return protoimpl.X.EnumStringOf(x.Descriptor(), protoreflect.EnumNumber(x))
}

func (OnAbort) Descriptor() protoreflect.EnumDescriptor {
	return file_kvgrpc_v1_common_proto_enumTypes[1].Descriptor()
}

func (OnAbort) Type() protoreflect.EnumType {
	return &file_kvgrpc_v1_common_proto_enumTypes[1]
}

func (x OnAbort) Number() protoreflect.EnumNumber {
	return protoreflect.EnumNumber(x)
}

// Deprecated: Use OnAbort.Descriptor instead.
func (OnAbort) EnumDescriptor() ([]byte, []int) {
	return file_kvgrpc_v1_common_proto_rawDescGZIP(), []int{1}
}

// Way in which the blocks of one request travel.
type TransferMode int32

const (
	// The first caller chooses.
	TransferMode_TRANSFER_MODE_UNSPECIFIED TransferMode = 0
	// The destination pulls after the source handed the blocks over.
	TransferMode_TRANSFER_MODE_PULL TransferMode = 1
	// The destination reserves blocks first, then the source pushes.
	TransferMode_TRANSFER_MODE_PUSH TransferMode = 2
)

// Enum value maps for TransferMode.
var (
	TransferMode_name = map[int32]string{
		0: "TRANSFER_MODE_UNSPECIFIED",
		1: "TRANSFER_MODE_PULL",
		2: "TRANSFER_MODE_PUSH",
	}
	TransferMode_value = map[string]int32{
		"TRANSFER_MODE_UNSPECIFIED": 0,
		"TRANSFER_MODE_PULL":        1,
		"TRANSFER_MODE_PUSH":        2,
	}
)

func (x TransferMode) Enum() *TransferMode {
	p := new(TransferMode)
	*p = x
	return p
}

func (x TransferMode) String() string {
	return protoimpl.X.EnumStringOf(x.Descriptor(), protoreflect.EnumNumber(x))
}

func (TransferMode) Descriptor() protoreflect.EnumDescriptor {
	return file_kvgrpc_v1_common_proto_enumTypes[2].Descriptor()
}

func (TransferMode) Type() protoreflect.EnumType {
	return &file_kvgrpc_v1_common_proto_enumTypes[2]
}

func (x TransferMode) Number() protoreflect.EnumNumber {
	return protoreflect.EnumNumber(x)
}

// Deprecated: Use TransferMode.Descriptor instead.
func (TransferMode) EnumDescriptor() ([]byte, []int) {
	return file_kvgrpc_v1_common_proto_rawDescGZIP(), []int{2}
}

// Way in which bytes move between two ranks.
type DataPath int32

const (
	// Read an unknown value as a path that works, and show its number.
	DataPath_DATA_PATH_UNSPECIFIED DataPath = 0
	// Shared memory on one host.
	DataPath_DATA_PATH_SHM DataPath = 1
	// Cross-memory attach: the destination reads the source's private memory on one host.
	DataPath_DATA_PATH_CMA DataPath = 2
	// NIXL: RDMA and other transports, also between hosts.
	DataPath_DATA_PATH_NIXL DataPath = 3
	// NCCL or Gloo.
	DataPath_DATA_PATH_COLLECTIVE DataPath = 4
	// Within one process, for tests.
	DataPath_DATA_PATH_LOOPBACK DataPath = 5
	// GPU memory exported as file descriptors: the destination maps it read-only on one host.
	DataPath_DATA_PATH_CUDA_VMM DataPath = 6
	// Windows on one host: the source copies what it is asked for into memory that the destination alone may map.
	DataPath_DATA_PATH_WINDOW DataPath = 7
)

// Enum value maps for DataPath.
var (
	DataPath_name = map[int32]string{
		0: "DATA_PATH_UNSPECIFIED",
		1: "DATA_PATH_SHM",
		2: "DATA_PATH_CMA",
		3: "DATA_PATH_NIXL",
		4: "DATA_PATH_COLLECTIVE",
		5: "DATA_PATH_LOOPBACK",
		6: "DATA_PATH_CUDA_VMM",
		7: "DATA_PATH_WINDOW",
	}
	DataPath_value = map[string]int32{
		"DATA_PATH_UNSPECIFIED": 0,
		"DATA_PATH_SHM":         1,
		"DATA_PATH_CMA":         2,
		"DATA_PATH_NIXL":        3,
		"DATA_PATH_COLLECTIVE":  4,
		"DATA_PATH_LOOPBACK":    5,
		"DATA_PATH_CUDA_VMM":    6,
		"DATA_PATH_WINDOW":      7,
	}
)

func (x DataPath) Enum() *DataPath {
	p := new(DataPath)
	*p = x
	return p
}

func (x DataPath) String() string {
	return protoimpl.X.EnumStringOf(x.Descriptor(), protoreflect.EnumNumber(x))
}

func (DataPath) Descriptor() protoreflect.EnumDescriptor {
	return file_kvgrpc_v1_common_proto_enumTypes[3].Descriptor()
}

func (DataPath) Type() protoreflect.EnumType {
	return &file_kvgrpc_v1_common_proto_enumTypes[3]
}

func (x DataPath) Number() protoreflect.EnumNumber {
	return protoreflect.EnumNumber(x)
}

// Deprecated: Use DataPath.Descriptor instead.
func (DataPath) EnumDescriptor() ([]byte, []int) {
	return file_kvgrpc_v1_common_proto_rawDescGZIP(), []int{3}
}

// Phase of a transfer. A RECEIVE passes through handshake, open, queue, wire, checksum (where bytes are compared) and
// settle, in this order. It repeats handshake and open when the source has forgotten this engine. A SEND that consumers
// read has one phase, readers, from the first access to its end. A push begins with rendezvous at both ends. After that
// its SEND has handshake, open and queue, and its RECEIVE has queue, wire and settle; these phases are those of the
// push's first parts.
type TransferPhase int32

const (
	// No phase yet. Read an unknown value the same way.
	TransferPhase_TRANSFER_PHASE_UNSPECIFIED TransferPhase = 0
	// The push waits for its other half.
	TransferPhase_TRANSFER_PHASE_RENDEZVOUS TransferPhase = 1
	// The leads introduce themselves to each other.
	TransferPhase_TRANSFER_PHASE_HANDSHAKE TransferPhase = 2
	// The transfer opens its access at the access's issuer.
	TransferPhase_TRANSFER_PHASE_OPEN TransferPhase = 3
	// The access is open. The transfer waits for its blocks, for the engine's step and for its turn.
	TransferPhase_TRANSFER_PHASE_QUEUE TransferPhase = 4
	// Bytes move.
	TransferPhase_TRANSFER_PHASE_WIRE TransferPhase = 5
	// The destination compares the bytes that arrived with those that were sent.
	TransferPhase_TRANSFER_PHASE_CHECKSUM TransferPhase = 6
	// The transfer asks the other side whether the bytes are valid.
	TransferPhase_TRANSFER_PHASE_SETTLE TransferPhase = 7
	// Consumers read.
	TransferPhase_TRANSFER_PHASE_READERS TransferPhase = 8
)

// Enum value maps for TransferPhase.
var (
	TransferPhase_name = map[int32]string{
		0: "TRANSFER_PHASE_UNSPECIFIED",
		1: "TRANSFER_PHASE_RENDEZVOUS",
		2: "TRANSFER_PHASE_HANDSHAKE",
		3: "TRANSFER_PHASE_OPEN",
		4: "TRANSFER_PHASE_QUEUE",
		5: "TRANSFER_PHASE_WIRE",
		6: "TRANSFER_PHASE_CHECKSUM",
		7: "TRANSFER_PHASE_SETTLE",
		8: "TRANSFER_PHASE_READERS",
	}
	TransferPhase_value = map[string]int32{
		"TRANSFER_PHASE_UNSPECIFIED": 0,
		"TRANSFER_PHASE_RENDEZVOUS":  1,
		"TRANSFER_PHASE_HANDSHAKE":   2,
		"TRANSFER_PHASE_OPEN":        3,
		"TRANSFER_PHASE_QUEUE":       4,
		"TRANSFER_PHASE_WIRE":        5,
		"TRANSFER_PHASE_CHECKSUM":    6,
		"TRANSFER_PHASE_SETTLE":      7,
		"TRANSFER_PHASE_READERS":     8,
	}
)

func (x TransferPhase) Enum() *TransferPhase {
	p := new(TransferPhase)
	*p = x
	return p
}

func (x TransferPhase) String() string {
	return protoimpl.X.EnumStringOf(x.Descriptor(), protoreflect.EnumNumber(x))
}

func (TransferPhase) Descriptor() protoreflect.EnumDescriptor {
	return file_kvgrpc_v1_common_proto_enumTypes[4].Descriptor()
}

func (TransferPhase) Type() protoreflect.EnumType {
	return &file_kvgrpc_v1_common_proto_enumTypes[4]
}

func (x TransferPhase) Number() protoreflect.EnumNumber {
	return protoreflect.EnumNumber(x)
}

// Deprecated: Use TransferPhase.Descriptor instead.
func (TransferPhase) EnumDescriptor() ([]byte, []int) {
	return file_kvgrpc_v1_common_proto_rawDescGZIP(), []int{4}
}

// Reason of a failure. The same names without the prefix are the reasons of RPC errors. docs/protocol.md lists the gRPC
// code of each reason and what to do.
type FailureReason int32

const (
	// Never sent. Read an unknown value like INTERNAL.
	FailureReason_FAILURE_REASON_UNSPECIFIED FailureReason = 0
	// A field of the request is wrong.
	FailureReason_FAILURE_REASON_INVALID_FIELD FailureReason = 1
	// The pool has no block with this id. Ids are never clamped.
	FailureReason_FAILURE_REASON_BLOCK_OUT_OF_RANGE FailureReason = 2
	// A block is listed twice.
	FailureReason_FAILURE_REASON_BLOCK_DUPLICATE FailureReason = 3
	// Another transfer, lease or quarantine pins a block.
	FailureReason_FAILURE_REASON_BLOCK_PINNED FailureReason = 4
	// A block of a SERVER_MANAGED pool was not allocated.
	FailureReason_FAILURE_REASON_BLOCK_NOT_ALLOCATED FailureReason = 5
	// Source and destination list different numbers of blocks.
	FailureReason_FAILURE_REASON_BLOCK_COUNT_MISMATCH FailureReason = 6
	// Groups are missing, unknown or listed twice.
	FailureReason_FAILURE_REASON_GROUP_MISMATCH FailureReason = 7
	// The two pools cannot exchange blocks. The violations name the fields.
	FailureReason_FAILURE_REASON_INCOMPATIBLE_POOLS FailureReason = 8
	// The protocol ranges of the two engines do not overlap, or one engine lacks a feature that the other requires.
	FailureReason_FAILURE_REASON_PROTOCOL_UNSUPPORTED FailureReason = 9
	// No data path reaches the other side. The message lists each path with its reason.
	FailureReason_FAILURE_REASON_NO_DATA_PATH FailureReason = 10
	// This incarnation has no handshake with the caller.
	FailureReason_FAILURE_REASON_NO_HANDSHAKE FailureReason = 11
	// Another engine than the expected one answers at the address.
	FailureReason_FAILURE_REASON_WRONG_ENGINE FailureReason = 12
	// The address is not on this server's dial list.
	FailureReason_FAILURE_REASON_DIAL_REFUSED FailureReason = 13
	// The peer's lead cannot be reached.
	FailureReason_FAILURE_REASON_PEER_UNREACHABLE FailureReason = 14
	// The peer was declared dead during the transfer.
	FailureReason_FAILURE_REASON_PEER_LOST FailureReason = 15
	// The peer answered with an error of its own.
	FailureReason_FAILURE_REASON_PEER_FAILED FailureReason = 16
	// The grant is forged, truncated or not a grant.
	FailureReason_FAILURE_REASON_GRANT_INVALID FailureReason = 17
	// The grant was issued by another engine.
	FailureReason_FAILURE_REASON_GRANT_FOREIGN FailureReason = 18
	// The call needs a WRITE grant and got a READ grant, or the reverse.
	FailureReason_FAILURE_REASON_GRANT_WRONG_ACCESS FailureReason = 19
	// The engine restarted since the reference was made.
	FailureReason_FAILURE_REASON_INCARNATION_CHANGED FailureReason = 20
	// The engine re-registered its memory during the access.
	FailureReason_FAILURE_REASON_MEMORY_CHANGED FailureReason = 21
	// No lease has this id.
	FailureReason_FAILURE_REASON_LEASE_NOT_FOUND FailureReason = 22
	// The lease ran out.
	FailureReason_FAILURE_REASON_LEASE_EXPIRED FailureReason = 23
	// The lease was released, or all its consumers are done. RenewLeases and GetLease return the lease's state, which
	// tells which of the two it was.
	FailureReason_FAILURE_REASON_LEASE_RELEASED FailureReason = 24
	// The source engine took its blocks back.
	FailureReason_FAILURE_REASON_LEASE_VOIDED FailureReason = 25
	// The hand-over that would have made the lease was refused.
	FailureReason_FAILURE_REASON_LEASE_REFUSED FailureReason = 26
	// No access has this id.
	FailureReason_FAILURE_REASON_ACCESS_NOT_FOUND FailureReason = 27
	// The access id was used by another consumer or for another grant.
	FailureReason_FAILURE_REASON_ACCESS_REUSED FailureReason = 28
	// The access is closed.
	FailureReason_FAILURE_REASON_ACCESS_CLOSED FailureReason = 29
	// The KV on offer was computed from something else.
	FailureReason_FAILURE_REASON_CONTENT_MISMATCH FailureReason = 30
	// The call needs a content and has none, or the two sides use different forms of content.
	FailureReason_FAILURE_REASON_CONTENT_REQUIRED FailureReason = 31
	// A token count exceeds the offer or the consumer's own prompt, or is neither a multiple of 16 nor the whole offer.
	FailureReason_FAILURE_REASON_CONTENT_RANGE FailureReason = 32
	// The two engines run different weights, or the content names other weights than the engine runs.
	FailureReason_FAILURE_REASON_WEIGHTS_MISMATCH FailureReason = 33
	// The grant belongs to another request than the intent.
	FailureReason_FAILURE_REASON_TRANSFER_KEY_MISMATCH FailureReason = 34
	// No transfer has this id.
	FailureReason_FAILURE_REASON_TRANSFER_NOT_FOUND FailureReason = 35
	// The transfer is over.
	FailureReason_FAILURE_REASON_TRANSFER_ENDED FailureReason = 36
	// A transfer with that key exists already.
	FailureReason_FAILURE_REASON_TRANSFER_EXISTS FailureReason = 37
	// Under this transfer key blocks were handed over for readers, and now a registration or a part of a push came, or
	// the reverse.
	FailureReason_FAILURE_REASON_WAITS_FOR_MISMATCH FailureReason = 38
	// A hand-over names no blocks.
	FailureReason_FAILURE_REASON_EMPTY_FINISH FailureReason = 39
	// The transfer was cancelled.
	FailureReason_FAILURE_REASON_CANCELLED FailureReason = 40
	// The transfer waited too long for its turn or for its peer.
	FailureReason_FAILURE_REASON_QUEUE_TIMEOUT FailureReason = 41
	// The bytes took too long.
	FailureReason_FAILURE_REASON_TRANSFER_TIMEOUT FailureReason = 42
	// The peer did not confirm the access in time.
	FailureReason_FAILURE_REASON_SETTLE_TIMEOUT FailureReason = 43
	// The other half of a push did not come in time.
	FailureReason_FAILURE_REASON_REGISTRATION_TIMEOUT FailureReason = 44
	// Another bounded wait ended. Metadata `phase` names it.
	FailureReason_FAILURE_REASON_DEADLINE FailureReason = 45
	// The idempotency key was used with another body.
	FailureReason_FAILURE_REASON_IDEMPOTENCY_KEY_REUSED FailureReason = 46
	// A TTL is zero or negative.
	FailureReason_FAILURE_REASON_TTL_INVALID FailureReason = 47
	// The pool has too few free blocks, or too little memory is free.
	FailureReason_FAILURE_REASON_POOL_EXHAUSTED FailureReason = 48
	// The queue is full: retry after the delay.
	FailureReason_FAILURE_REASON_QUEUE_FULL FailureReason = 49
	// The request exceeds a limit of GetCapabilities.
	FailureReason_FAILURE_REASON_LIMIT_EXCEEDED FailureReason = 50
	// The server takes no new work: choose another engine.
	FailureReason_FAILURE_REASON_DRAINING FailureReason = 51
	// A lost transfer may still write the blocks.
	FailureReason_FAILURE_REASON_QUARANTINED FailureReason = 52
	// The engine behind the lead is gone.
	FailureReason_FAILURE_REASON_ENGINE_LOST FailureReason = 53
	// Another engine is attached to this lead.
	FailureReason_FAILURE_REASON_ENGINE_ATTACHED FailureReason = 54
	// This lead has no pool yet.
	FailureReason_FAILURE_REASON_NO_POOL FailureReason = 55
	// The call does not match who manages the pool's blocks.
	FailureReason_FAILURE_REASON_POOL_KIND_MISMATCH FailureReason = 56
	// ReadBlocks is switched off.
	FailureReason_FAILURE_REASON_READ_BLOCKS_DISABLED FailureReason = 57
	// The caller does not own what the call names, or its ticket belongs to no attached engine.
	FailureReason_FAILURE_REASON_NOT_OWNER FailureReason = 58
	// The data path reported an error.
	FailureReason_FAILURE_REASON_DATA_PATH_FAILED FailureReason = 59
	// A block arrived with other bytes than the source sent.
	FailureReason_FAILURE_REASON_CHECKSUM_MISMATCH FailureReason = 60
	// The source reported that it cannot deliver.
	FailureReason_FAILURE_REASON_SOURCE_FAILED FailureReason = 61
	// The source started the request over.
	FailureReason_FAILURE_REASON_PREEMPTED FailureReason = 62
	// The server does not offer this feature; see EngineDescription.features in GetCapabilities.
	FailureReason_FAILURE_REASON_FEATURE_UNAVAILABLE FailureReason = 63
	// Reserved and not sent: WatchTransfers sends `history_lost` instead.
	FailureReason_FAILURE_REASON_HISTORY_LOST FailureReason = 64
	// kvgrpc itself has a defect.
	FailureReason_FAILURE_REASON_INTERNAL FailureReason = 65
	// A defect of kvgrpc ended this life of the engine. The server vouches for nothing of that life, and a new life
	// begins.
	FailureReason_FAILURE_REASON_INTERNAL_DEFECT FailureReason = 66
	// The source engine needed the blocks, and no consumer had claimed the lease: no reader had come within its firm
	// time.
	FailureReason_FAILURE_REASON_LEASE_RECLAIMED FailureReason = 67
	// The caller speaks for a life of an engine without the proof that this life's handshake gave it, or another life of
	// that engine is connected.
	FailureReason_FAILURE_REASON_NOT_PROVED FailureReason = 68
	// The caller shows neither a certificate with a name nor a valid token, and the method asks who calls.
	FailureReason_FAILURE_REASON_NOT_AUTHENTICATED FailureReason = 69
	// The caller has none of the roles that the method is for.
	FailureReason_FAILURE_REASON_ROLE_MISSING FailureReason = 70
	// The server's authorization policy does not allow the call.
	FailureReason_FAILURE_REASON_POLICY_DENIED FailureReason = 71
	// The grant is bound to another consumer.
	FailureReason_FAILURE_REASON_GRANT_BOUND FailureReason = 72
	// The data path sends plain text, and the server has TLS and does not declare the peer's network private. The reason
	// of a rejected data path, and never of an error.
	FailureReason_FAILURE_REASON_NETWORK_NOT_PRIVATE FailureReason = 73
)

// Enum value maps for FailureReason.
var (
	FailureReason_name = map[int32]string{
		0:  "FAILURE_REASON_UNSPECIFIED",
		1:  "FAILURE_REASON_INVALID_FIELD",
		2:  "FAILURE_REASON_BLOCK_OUT_OF_RANGE",
		3:  "FAILURE_REASON_BLOCK_DUPLICATE",
		4:  "FAILURE_REASON_BLOCK_PINNED",
		5:  "FAILURE_REASON_BLOCK_NOT_ALLOCATED",
		6:  "FAILURE_REASON_BLOCK_COUNT_MISMATCH",
		7:  "FAILURE_REASON_GROUP_MISMATCH",
		8:  "FAILURE_REASON_INCOMPATIBLE_POOLS",
		9:  "FAILURE_REASON_PROTOCOL_UNSUPPORTED",
		10: "FAILURE_REASON_NO_DATA_PATH",
		11: "FAILURE_REASON_NO_HANDSHAKE",
		12: "FAILURE_REASON_WRONG_ENGINE",
		13: "FAILURE_REASON_DIAL_REFUSED",
		14: "FAILURE_REASON_PEER_UNREACHABLE",
		15: "FAILURE_REASON_PEER_LOST",
		16: "FAILURE_REASON_PEER_FAILED",
		17: "FAILURE_REASON_GRANT_INVALID",
		18: "FAILURE_REASON_GRANT_FOREIGN",
		19: "FAILURE_REASON_GRANT_WRONG_ACCESS",
		20: "FAILURE_REASON_INCARNATION_CHANGED",
		21: "FAILURE_REASON_MEMORY_CHANGED",
		22: "FAILURE_REASON_LEASE_NOT_FOUND",
		23: "FAILURE_REASON_LEASE_EXPIRED",
		24: "FAILURE_REASON_LEASE_RELEASED",
		25: "FAILURE_REASON_LEASE_VOIDED",
		26: "FAILURE_REASON_LEASE_REFUSED",
		27: "FAILURE_REASON_ACCESS_NOT_FOUND",
		28: "FAILURE_REASON_ACCESS_REUSED",
		29: "FAILURE_REASON_ACCESS_CLOSED",
		30: "FAILURE_REASON_CONTENT_MISMATCH",
		31: "FAILURE_REASON_CONTENT_REQUIRED",
		32: "FAILURE_REASON_CONTENT_RANGE",
		33: "FAILURE_REASON_WEIGHTS_MISMATCH",
		34: "FAILURE_REASON_TRANSFER_KEY_MISMATCH",
		35: "FAILURE_REASON_TRANSFER_NOT_FOUND",
		36: "FAILURE_REASON_TRANSFER_ENDED",
		37: "FAILURE_REASON_TRANSFER_EXISTS",
		38: "FAILURE_REASON_WAITS_FOR_MISMATCH",
		39: "FAILURE_REASON_EMPTY_FINISH",
		40: "FAILURE_REASON_CANCELLED",
		41: "FAILURE_REASON_QUEUE_TIMEOUT",
		42: "FAILURE_REASON_TRANSFER_TIMEOUT",
		43: "FAILURE_REASON_SETTLE_TIMEOUT",
		44: "FAILURE_REASON_REGISTRATION_TIMEOUT",
		45: "FAILURE_REASON_DEADLINE",
		46: "FAILURE_REASON_IDEMPOTENCY_KEY_REUSED",
		47: "FAILURE_REASON_TTL_INVALID",
		48: "FAILURE_REASON_POOL_EXHAUSTED",
		49: "FAILURE_REASON_QUEUE_FULL",
		50: "FAILURE_REASON_LIMIT_EXCEEDED",
		51: "FAILURE_REASON_DRAINING",
		52: "FAILURE_REASON_QUARANTINED",
		53: "FAILURE_REASON_ENGINE_LOST",
		54: "FAILURE_REASON_ENGINE_ATTACHED",
		55: "FAILURE_REASON_NO_POOL",
		56: "FAILURE_REASON_POOL_KIND_MISMATCH",
		57: "FAILURE_REASON_READ_BLOCKS_DISABLED",
		58: "FAILURE_REASON_NOT_OWNER",
		59: "FAILURE_REASON_DATA_PATH_FAILED",
		60: "FAILURE_REASON_CHECKSUM_MISMATCH",
		61: "FAILURE_REASON_SOURCE_FAILED",
		62: "FAILURE_REASON_PREEMPTED",
		63: "FAILURE_REASON_FEATURE_UNAVAILABLE",
		64: "FAILURE_REASON_HISTORY_LOST",
		65: "FAILURE_REASON_INTERNAL",
		66: "FAILURE_REASON_INTERNAL_DEFECT",
		67: "FAILURE_REASON_LEASE_RECLAIMED",
		68: "FAILURE_REASON_NOT_PROVED",
		69: "FAILURE_REASON_NOT_AUTHENTICATED",
		70: "FAILURE_REASON_ROLE_MISSING",
		71: "FAILURE_REASON_POLICY_DENIED",
		72: "FAILURE_REASON_GRANT_BOUND",
		73: "FAILURE_REASON_NETWORK_NOT_PRIVATE",
	}
	FailureReason_value = map[string]int32{
		"FAILURE_REASON_UNSPECIFIED":            0,
		"FAILURE_REASON_INVALID_FIELD":          1,
		"FAILURE_REASON_BLOCK_OUT_OF_RANGE":     2,
		"FAILURE_REASON_BLOCK_DUPLICATE":        3,
		"FAILURE_REASON_BLOCK_PINNED":           4,
		"FAILURE_REASON_BLOCK_NOT_ALLOCATED":    5,
		"FAILURE_REASON_BLOCK_COUNT_MISMATCH":   6,
		"FAILURE_REASON_GROUP_MISMATCH":         7,
		"FAILURE_REASON_INCOMPATIBLE_POOLS":     8,
		"FAILURE_REASON_PROTOCOL_UNSUPPORTED":   9,
		"FAILURE_REASON_NO_DATA_PATH":           10,
		"FAILURE_REASON_NO_HANDSHAKE":           11,
		"FAILURE_REASON_WRONG_ENGINE":           12,
		"FAILURE_REASON_DIAL_REFUSED":           13,
		"FAILURE_REASON_PEER_UNREACHABLE":       14,
		"FAILURE_REASON_PEER_LOST":              15,
		"FAILURE_REASON_PEER_FAILED":            16,
		"FAILURE_REASON_GRANT_INVALID":          17,
		"FAILURE_REASON_GRANT_FOREIGN":          18,
		"FAILURE_REASON_GRANT_WRONG_ACCESS":     19,
		"FAILURE_REASON_INCARNATION_CHANGED":    20,
		"FAILURE_REASON_MEMORY_CHANGED":         21,
		"FAILURE_REASON_LEASE_NOT_FOUND":        22,
		"FAILURE_REASON_LEASE_EXPIRED":          23,
		"FAILURE_REASON_LEASE_RELEASED":         24,
		"FAILURE_REASON_LEASE_VOIDED":           25,
		"FAILURE_REASON_LEASE_REFUSED":          26,
		"FAILURE_REASON_ACCESS_NOT_FOUND":       27,
		"FAILURE_REASON_ACCESS_REUSED":          28,
		"FAILURE_REASON_ACCESS_CLOSED":          29,
		"FAILURE_REASON_CONTENT_MISMATCH":       30,
		"FAILURE_REASON_CONTENT_REQUIRED":       31,
		"FAILURE_REASON_CONTENT_RANGE":          32,
		"FAILURE_REASON_WEIGHTS_MISMATCH":       33,
		"FAILURE_REASON_TRANSFER_KEY_MISMATCH":  34,
		"FAILURE_REASON_TRANSFER_NOT_FOUND":     35,
		"FAILURE_REASON_TRANSFER_ENDED":         36,
		"FAILURE_REASON_TRANSFER_EXISTS":        37,
		"FAILURE_REASON_WAITS_FOR_MISMATCH":     38,
		"FAILURE_REASON_EMPTY_FINISH":           39,
		"FAILURE_REASON_CANCELLED":              40,
		"FAILURE_REASON_QUEUE_TIMEOUT":          41,
		"FAILURE_REASON_TRANSFER_TIMEOUT":       42,
		"FAILURE_REASON_SETTLE_TIMEOUT":         43,
		"FAILURE_REASON_REGISTRATION_TIMEOUT":   44,
		"FAILURE_REASON_DEADLINE":               45,
		"FAILURE_REASON_IDEMPOTENCY_KEY_REUSED": 46,
		"FAILURE_REASON_TTL_INVALID":            47,
		"FAILURE_REASON_POOL_EXHAUSTED":         48,
		"FAILURE_REASON_QUEUE_FULL":             49,
		"FAILURE_REASON_LIMIT_EXCEEDED":         50,
		"FAILURE_REASON_DRAINING":               51,
		"FAILURE_REASON_QUARANTINED":            52,
		"FAILURE_REASON_ENGINE_LOST":            53,
		"FAILURE_REASON_ENGINE_ATTACHED":        54,
		"FAILURE_REASON_NO_POOL":                55,
		"FAILURE_REASON_POOL_KIND_MISMATCH":     56,
		"FAILURE_REASON_READ_BLOCKS_DISABLED":   57,
		"FAILURE_REASON_NOT_OWNER":              58,
		"FAILURE_REASON_DATA_PATH_FAILED":       59,
		"FAILURE_REASON_CHECKSUM_MISMATCH":      60,
		"FAILURE_REASON_SOURCE_FAILED":          61,
		"FAILURE_REASON_PREEMPTED":              62,
		"FAILURE_REASON_FEATURE_UNAVAILABLE":    63,
		"FAILURE_REASON_HISTORY_LOST":           64,
		"FAILURE_REASON_INTERNAL":               65,
		"FAILURE_REASON_INTERNAL_DEFECT":        66,
		"FAILURE_REASON_LEASE_RECLAIMED":        67,
		"FAILURE_REASON_NOT_PROVED":             68,
		"FAILURE_REASON_NOT_AUTHENTICATED":      69,
		"FAILURE_REASON_ROLE_MISSING":           70,
		"FAILURE_REASON_POLICY_DENIED":          71,
		"FAILURE_REASON_GRANT_BOUND":            72,
		"FAILURE_REASON_NETWORK_NOT_PRIVATE":    73,
	}
)

func (x FailureReason) Enum() *FailureReason {
	p := new(FailureReason)
	*p = x
	return p
}

func (x FailureReason) String() string {
	return protoimpl.X.EnumStringOf(x.Descriptor(), protoreflect.EnumNumber(x))
}

func (FailureReason) Descriptor() protoreflect.EnumDescriptor {
	return file_kvgrpc_v1_common_proto_enumTypes[5].Descriptor()
}

func (FailureReason) Type() protoreflect.EnumType {
	return &file_kvgrpc_v1_common_proto_enumTypes[5]
}

func (x FailureReason) Number() protoreflect.EnumNumber {
	return protoreflect.EnumNumber(x)
}

// Deprecated: Use FailureReason.Descriptor instead.
func (FailureReason) EnumDescriptor() ([]byte, []int) {
	return file_kvgrpc_v1_common_proto_rawDescGZIP(), []int{5}
}

// Step that helps after a failure.
type NextStep int32

const (
	// The step is unknown: do not retry automatically.
	NextStep_NEXT_STEP_UNSPECIFIED NextStep = 0
	// Send the same call to the same engine again, after the delay where one is stated.
	NextStep_NEXT_STEP_RETRY_HERE NextStep = 1
	// Send the same call to another engine in place of this one: the same grant works at another consumer.
	NextStep_NEXT_STEP_RETRY_OTHER_CONSUMER NextStep = 2
	// What the request names is lost: start over by computing the KV.
	NextStep_NEXT_STEP_RECOMPUTE NextStep = 3
	// The request is wrong: it fails at every engine.
	NextStep_NEXT_STEP_FIX_REQUEST NextStep = 4
)

// Enum value maps for NextStep.
var (
	NextStep_name = map[int32]string{
		0: "NEXT_STEP_UNSPECIFIED",
		1: "NEXT_STEP_RETRY_HERE",
		2: "NEXT_STEP_RETRY_OTHER_CONSUMER",
		3: "NEXT_STEP_RECOMPUTE",
		4: "NEXT_STEP_FIX_REQUEST",
	}
	NextStep_value = map[string]int32{
		"NEXT_STEP_UNSPECIFIED":          0,
		"NEXT_STEP_RETRY_HERE":           1,
		"NEXT_STEP_RETRY_OTHER_CONSUMER": 2,
		"NEXT_STEP_RECOMPUTE":            3,
		"NEXT_STEP_FIX_REQUEST":          4,
	}
)

func (x NextStep) Enum() *NextStep {
	p := new(NextStep)
	*p = x
	return p
}

func (x NextStep) String() string {
	return protoimpl.X.EnumStringOf(x.Descriptor(), protoreflect.EnumNumber(x))
}

func (NextStep) Descriptor() protoreflect.EnumDescriptor {
	return file_kvgrpc_v1_common_proto_enumTypes[6].Descriptor()
}

func (NextStep) Type() protoreflect.EnumType {
	return &file_kvgrpc_v1_common_proto_enumTypes[6]
}

func (x NextStep) Number() protoreflect.EnumNumber {
	return protoreflect.EnumNumber(x)
}

// Deprecated: Use NextStep.Descriptor instead.
func (NextStep) EnumDescriptor() ([]byte, []int) {
	return file_kvgrpc_v1_common_proto_rawDescGZIP(), []int{6}
}

// Side of a transfer on which a failure happened.
type Side int32

const (
	// The side is unknown.
	Side_SIDE_UNSPECIFIED Side = 0
	// The engine whose blocks are read.
	Side_SIDE_SOURCE Side = 1
	// The engine whose blocks are filled.
	Side_SIDE_DESTINATION Side = 2
)

// Enum value maps for Side.
var (
	Side_name = map[int32]string{
		0: "SIDE_UNSPECIFIED",
		1: "SIDE_SOURCE",
		2: "SIDE_DESTINATION",
	}
	Side_value = map[string]int32{
		"SIDE_UNSPECIFIED": 0,
		"SIDE_SOURCE":      1,
		"SIDE_DESTINATION": 2,
	}
)

func (x Side) Enum() *Side {
	p := new(Side)
	*p = x
	return p
}

func (x Side) String() string {
	return protoimpl.X.EnumStringOf(x.Descriptor(), protoreflect.EnumNumber(x))
}

func (Side) Descriptor() protoreflect.EnumDescriptor {
	return file_kvgrpc_v1_common_proto_enumTypes[7].Descriptor()
}

func (Side) Type() protoreflect.EnumType {
	return &file_kvgrpc_v1_common_proto_enumTypes[7]
}

func (x Side) Number() protoreflect.EnumNumber {
	return protoreflect.EnumNumber(x)
}

// Deprecated: Use Side.Descriptor instead.
func (Side) EnumDescriptor() ([]byte, []int) {
	return file_kvgrpc_v1_common_proto_rawDescGZIP(), []int{7}
}

// The engine that answered, its life, and the number of its events so far. Field 1 of every reply.
type ResponseHeader struct {
	state protoimpl.MessageState `protogen:"open.v1"`
	// Id of the engine whose lead answered.
	EngineId string `protobuf:"bytes,1,opt,name=engine_id,json=engineId,proto3" json:"engine_id,omitempty"`
	// Random number of this life of the engine, from 1 to 2^53 - 1. A new number means a restart: start over from the
	// hand-over.
	Incarnation uint64 `protobuf:"fixed64,2,opt,name=incarnation,proto3" json:"incarnation,omitempty"`
	// Sequence number of the newest event. It grows with every change of a transfer of this incarnation. A list is a
	// snapshot at this number. What any reply says about transfers is at least as new as this number, so a watch that
	// resumes after it reports every change that the reply lacks.
	EventSeq      uint64 `protobuf:"varint,3,opt,name=event_seq,json=eventSeq,proto3" json:"event_seq,omitempty"`
	unknownFields protoimpl.UnknownFields
	sizeCache     protoimpl.SizeCache
}

func (x *ResponseHeader) Reset() {
	*x = ResponseHeader{}
	mi := &file_kvgrpc_v1_common_proto_msgTypes[0]
	ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
	ms.StoreMessageInfo(mi)
}

func (x *ResponseHeader) String() string {
	return protoimpl.X.MessageStringOf(x)
}

func (*ResponseHeader) ProtoMessage() {}

func (x *ResponseHeader) ProtoReflect() protoreflect.Message {
	mi := &file_kvgrpc_v1_common_proto_msgTypes[0]
	if x != nil {
		ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
		if ms.LoadMessageInfo() == nil {
			ms.StoreMessageInfo(mi)
		}
		return ms
	}
	return mi.MessageOf(x)
}

// Deprecated: Use ResponseHeader.ProtoReflect.Descriptor instead.
func (*ResponseHeader) Descriptor() ([]byte, []int) {
	return file_kvgrpc_v1_common_proto_rawDescGZIP(), []int{0}
}

func (x *ResponseHeader) GetEngineId() string {
	if x != nil {
		return x.EngineId
	}
	return ""
}

func (x *ResponseHeader) GetIncarnation() uint64 {
	if x != nil {
		return x.Incarnation
	}
	return 0
}

func (x *ResponseHeader) GetEventSeq() uint64 {
	if x != nil {
		return x.EventSeq
	}
	return 0
}

// Block ids as maximal runs, in order. Run i is starts[i], starts[i] + 1, ... (counts[i] ids). The order of the ids is
// the order of the tokens. 8,192 consecutive blocks take a few bytes. An id is below 2^31.
type BlockRuns struct {
	state protoimpl.MessageState `protogen:"open.v1"`
	// First id of each run.
	Starts []uint32 `protobuf:"varint,1,rep,packed,name=starts,proto3" json:"starts,omitempty"`
	// Number of ids in each run, at least 1. The list is as long as `starts`.
	Counts        []uint32 `protobuf:"varint,2,rep,packed,name=counts,proto3" json:"counts,omitempty"`
	unknownFields protoimpl.UnknownFields
	sizeCache     protoimpl.SizeCache
}

func (x *BlockRuns) Reset() {
	*x = BlockRuns{}
	mi := &file_kvgrpc_v1_common_proto_msgTypes[1]
	ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
	ms.StoreMessageInfo(mi)
}

func (x *BlockRuns) String() string {
	return protoimpl.X.MessageStringOf(x)
}

func (*BlockRuns) ProtoMessage() {}

func (x *BlockRuns) ProtoReflect() protoreflect.Message {
	mi := &file_kvgrpc_v1_common_proto_msgTypes[1]
	if x != nil {
		ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
		if ms.LoadMessageInfo() == nil {
			ms.StoreMessageInfo(mi)
		}
		return ms
	}
	return mi.MessageOf(x)
}

// Deprecated: Use BlockRuns.ProtoReflect.Descriptor instead.
func (*BlockRuns) Descriptor() ([]byte, []int) {
	return file_kvgrpc_v1_common_proto_rawDescGZIP(), []int{1}
}

func (x *BlockRuns) GetStarts() []uint32 {
	if x != nil {
		return x.Starts
	}
	return nil
}

func (x *BlockRuns) GetCounts() []uint32 {
	if x != nil {
		return x.Counts
	}
	return nil
}

// Blocks of one group, in token order.
type GroupBlocks struct {
	state protoimpl.MessageState `protogen:"open.v1"`
	// Index of the group in the pool's description.
	Group uint32 `protobuf:"varint,1,opt,name=group,proto3" json:"group,omitempty"`
	// The blocks, by the engine's logical ids.
	Runs          *BlockRuns `protobuf:"bytes,2,opt,name=runs,proto3" json:"runs,omitempty"`
	unknownFields protoimpl.UnknownFields
	sizeCache     protoimpl.SizeCache
}

func (x *GroupBlocks) Reset() {
	*x = GroupBlocks{}
	mi := &file_kvgrpc_v1_common_proto_msgTypes[2]
	ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
	ms.StoreMessageInfo(mi)
}

func (x *GroupBlocks) String() string {
	return protoimpl.X.MessageStringOf(x)
}

func (*GroupBlocks) ProtoMessage() {}

func (x *GroupBlocks) ProtoReflect() protoreflect.Message {
	mi := &file_kvgrpc_v1_common_proto_msgTypes[2]
	if x != nil {
		ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
		if ms.LoadMessageInfo() == nil {
			ms.StoreMessageInfo(mi)
		}
		return ms
	}
	return mi.MessageOf(x)
}

// Deprecated: Use GroupBlocks.ProtoReflect.Descriptor instead.
func (*GroupBlocks) Descriptor() ([]byte, []int) {
	return file_kvgrpc_v1_common_proto_rawDescGZIP(), []int{2}
}

func (x *GroupBlocks) GetGroup() uint32 {
	if x != nil {
		return x.Group
	}
	return 0
}

func (x *GroupBlocks) GetRuns() *BlockRuns {
	if x != nil {
		return x.Runs
	}
	return nil
}

// Blocks of one life of one engine. AllocateBlocks returns this message, and every call that names blocks takes it.
// Pass the whole message on unchanged. A block id alone names nothing, because other requests had the same id before
// and will have it again.
type Blocks struct {
	state protoimpl.MessageState `protogen:"open.v1"`
	// Required. Life of the engine that the ids belong to. After a restart the same ids are another request's blocks, so
	// the server refuses the call with INCARNATION_CHANGED before it checks anything else.
	Incarnation uint64 `protobuf:"fixed64,1,opt,name=incarnation,proto3" json:"incarnation,omitempty"`
	// Id of the allocation that all the blocks belong to; empty where the engine manages its own blocks. A stated id is
	// checked: blocks that were freed since then are refused with BLOCK_NOT_ALLOCATED, even if they are allocated again.
	AllocationId string `protobuf:"bytes,2,opt,name=allocation_id,json=allocationId,proto3" json:"allocation_id,omitempty"`
	// The blocks, one entry per group. No block is listed in two groups of one block space (Group.space).
	Groups        []*GroupBlocks `protobuf:"bytes,3,rep,name=groups,proto3" json:"groups,omitempty"`
	unknownFields protoimpl.UnknownFields
	sizeCache     protoimpl.SizeCache
}

func (x *Blocks) Reset() {
	*x = Blocks{}
	mi := &file_kvgrpc_v1_common_proto_msgTypes[3]
	ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
	ms.StoreMessageInfo(mi)
}

func (x *Blocks) String() string {
	return protoimpl.X.MessageStringOf(x)
}

func (*Blocks) ProtoMessage() {}

func (x *Blocks) ProtoReflect() protoreflect.Message {
	mi := &file_kvgrpc_v1_common_proto_msgTypes[3]
	if x != nil {
		ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
		if ms.LoadMessageInfo() == nil {
			ms.StoreMessageInfo(mi)
		}
		return ms
	}
	return mi.MessageOf(x)
}

// Deprecated: Use Blocks.ProtoReflect.Descriptor instead.
func (*Blocks) Descriptor() ([]byte, []int) {
	return file_kvgrpc_v1_common_proto_rawDescGZIP(), []int{3}
}

func (x *Blocks) GetIncarnation() uint64 {
	if x != nil {
		return x.Incarnation
	}
	return 0
}

func (x *Blocks) GetAllocationId() string {
	if x != nil {
		return x.AllocationId
	}
	return ""
}

func (x *Blocks) GetGroups() []*GroupBlocks {
	if x != nil {
		return x.Groups
	}
	return nil
}

// A range of layers within every group.
type LayerRange struct {
	state protoimpl.MessageState `protogen:"open.v1"`
	// First layer, from 0.
	First uint32 `protobuf:"varint,1,opt,name=first,proto3" json:"first,omitempty"`
	// Number of layers; at least 1.
	Count         uint32 `protobuf:"varint,2,opt,name=count,proto3" json:"count,omitempty"`
	unknownFields protoimpl.UnknownFields
	sizeCache     protoimpl.SizeCache
}

func (x *LayerRange) Reset() {
	*x = LayerRange{}
	mi := &file_kvgrpc_v1_common_proto_msgTypes[4]
	ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
	ms.StoreMessageInfo(mi)
}

func (x *LayerRange) String() string {
	return protoimpl.X.MessageStringOf(x)
}

func (*LayerRange) ProtoMessage() {}

func (x *LayerRange) ProtoReflect() protoreflect.Message {
	mi := &file_kvgrpc_v1_common_proto_msgTypes[4]
	if x != nil {
		ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
		if ms.LoadMessageInfo() == nil {
			ms.StoreMessageInfo(mi)
		}
		return ms
	}
	return mi.MessageOf(x)
}

// Deprecated: Use LayerRange.ProtoReflect.Descriptor instead.
func (*LayerRange) Descriptor() ([]byte, []int) {
	return file_kvgrpc_v1_common_proto_rawDescGZIP(), []int{4}
}

func (x *LayerRange) GetFirst() uint32 {
	if x != nil {
		return x.First
	}
	return 0
}

func (x *LayerRange) GetCount() uint32 {
	if x != nil {
		return x.Count
	}
	return 0
}

// Identity of the KV: the tokens, the adapter, the salt and the weights that it was computed from. It keeps KV from
// being used for a different prompt. The two sides of a transfer compare digests, never tokens. docs/protocol.md
// defines the digest chain, and proto/vectors/content.json has test vectors.
type Content struct {
	state protoimpl.MessageState `protogen:"open.v1"`
	// Form of the content. Both sides of one transfer use `chain` or `tokens`, which compare as equal, or both use
	// `opaque_id`.
	//
	// Types that are valid to be assigned to Form:
	//
	//	*Content_Chain
	//	*Content_Tokens
	//	*Content_OpaqueId
	Form isContent_Form `protobuf_oneof:"form"`
	// Number of tokens that an `opaque_id` stands for; 0 with the other forms.
	OpaqueTokens  uint32 `protobuf:"varint,4,opt,name=opaque_tokens,json=opaqueTokens,proto3" json:"opaque_tokens,omitempty"`
	unknownFields protoimpl.UnknownFields
	sizeCache     protoimpl.SizeCache
}

func (x *Content) Reset() {
	*x = Content{}
	mi := &file_kvgrpc_v1_common_proto_msgTypes[5]
	ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
	ms.StoreMessageInfo(mi)
}

func (x *Content) String() string {
	return protoimpl.X.MessageStringOf(x)
}

func (*Content) ProtoMessage() {}

func (x *Content) ProtoReflect() protoreflect.Message {
	mi := &file_kvgrpc_v1_common_proto_msgTypes[5]
	if x != nil {
		ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
		if ms.LoadMessageInfo() == nil {
			ms.StoreMessageInfo(mi)
		}
		return ms
	}
	return mi.MessageOf(x)
}

// Deprecated: Use Content.ProtoReflect.Descriptor instead.
func (*Content) Descriptor() ([]byte, []int) {
	return file_kvgrpc_v1_common_proto_rawDescGZIP(), []int{5}
}

func (x *Content) GetForm() isContent_Form {
	if x != nil {
		return x.Form
	}
	return nil
}

func (x *Content) GetChain() *ContentChain {
	if x != nil {
		if x, ok := x.Form.(*Content_Chain); ok {
			return x.Chain
		}
	}
	return nil
}

func (x *Content) GetTokens() *TokenContent {
	if x != nil {
		if x, ok := x.Form.(*Content_Tokens); ok {
			return x.Tokens
		}
	}
	return nil
}

func (x *Content) GetOpaqueId() []byte {
	if x != nil {
		if x, ok := x.Form.(*Content_OpaqueId); ok {
			return x.OpaqueId
		}
	}
	return nil
}

func (x *Content) GetOpaqueTokens() uint32 {
	if x != nil {
		return x.OpaqueTokens
	}
	return 0
}

type isContent_Form interface {
	isContent_Form()
}

type Content_Chain struct {
	// Digests that the caller computed.
	Chain *ContentChain `protobuf:"bytes,1,opt,name=chain,proto3,oneof"`
}

type Content_Tokens struct {
	// Token ids. The server computes the digest chain from them and forgets them.
	Tokens *TokenContent `protobuf:"bytes,2,opt,name=tokens,proto3,oneof"`
}

type Content_OpaqueId struct {
	// Any identifier of at most 64 bytes, for engines that have no token ids. It is compared as a whole, so it has no
	// prefixes.
	OpaqueId []byte `protobuf:"bytes,3,opt,name=opaque_id,json=opaqueId,proto3,oneof"`
}

func (*Content_Chain) isContent_Form() {}

func (*Content_Tokens) isContent_Form() {}

func (*Content_OpaqueId) isContent_Form() {}

// A digest chain over units of 16 tokens.
type ContentChain struct {
	state protoimpl.MessageState `protogen:"open.v1"`
	// Digests h_1, h_2, ... of 32 bytes each, concatenated. There are ceil(token_count / 16) digests. The last unit may
	// be short.
	Digests []byte `protobuf:"bytes,1,opt,name=digests,proto3" json:"digests,omitempty"`
	// Number of tokens that the chain covers.
	TokenCount    uint32 `protobuf:"varint,2,opt,name=token_count,json=tokenCount,proto3" json:"token_count,omitempty"`
	unknownFields protoimpl.UnknownFields
	sizeCache     protoimpl.SizeCache
}

func (x *ContentChain) Reset() {
	*x = ContentChain{}
	mi := &file_kvgrpc_v1_common_proto_msgTypes[6]
	ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
	ms.StoreMessageInfo(mi)
}

func (x *ContentChain) String() string {
	return protoimpl.X.MessageStringOf(x)
}

func (*ContentChain) ProtoMessage() {}

func (x *ContentChain) ProtoReflect() protoreflect.Message {
	mi := &file_kvgrpc_v1_common_proto_msgTypes[6]
	if x != nil {
		ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
		if ms.LoadMessageInfo() == nil {
			ms.StoreMessageInfo(mi)
		}
		return ms
	}
	return mi.MessageOf(x)
}

// Deprecated: Use ContentChain.ProtoReflect.Descriptor instead.
func (*ContentChain) Descriptor() ([]byte, []int) {
	return file_kvgrpc_v1_common_proto_rawDescGZIP(), []int{6}
}

func (x *ContentChain) GetDigests() []byte {
	if x != nil {
		return x.Digests
	}
	return nil
}

func (x *ContentChain) GetTokenCount() uint32 {
	if x != nil {
		return x.TokenCount
	}
	return 0
}

// Inputs of the digest chain.
type TokenContent struct {
	state protoimpl.MessageState `protogen:"open.v1"`
	// Token ids in order, at most 1,048,576. For computed KV the list has exactly the tokens whose KV is in the blocks.
	TokenIds []uint32 `protobuf:"varint,1,rep,packed,name=token_ids,json=tokenIds,proto3" json:"token_ids,omitempty"`
	// Name and revision of the adapter (LoRA) in use; empty means none.
	Adapter string `protobuf:"bytes,2,opt,name=adapter,proto3" json:"adapter,omitempty"`
	// Cache salt of the request; empty means none.
	CacheSalt string `protobuf:"bytes,3,opt,name=cache_salt,json=cacheSalt,proto3" json:"cache_salt,omitempty"`
	// Revision of the weights; empty means the revision that this engine stated for its pool.
	WeightsRevision string `protobuf:"bytes,4,opt,name=weights_revision,json=weightsRevision,proto3" json:"weights_revision,omitempty"`
	// Items that occupy token positions but that token ids do not tell apart; at most 8,192.
	MultimodalItems []*MultimodalItem `protobuf:"bytes,5,rep,name=multimodal_items,json=multimodalItems,proto3" json:"multimodal_items,omitempty"`
	unknownFields   protoimpl.UnknownFields
	sizeCache       protoimpl.SizeCache
}

func (x *TokenContent) Reset() {
	*x = TokenContent{}
	mi := &file_kvgrpc_v1_common_proto_msgTypes[7]
	ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
	ms.StoreMessageInfo(mi)
}

func (x *TokenContent) String() string {
	return protoimpl.X.MessageStringOf(x)
}

func (*TokenContent) ProtoMessage() {}

func (x *TokenContent) ProtoReflect() protoreflect.Message {
	mi := &file_kvgrpc_v1_common_proto_msgTypes[7]
	if x != nil {
		ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
		if ms.LoadMessageInfo() == nil {
			ms.StoreMessageInfo(mi)
		}
		return ms
	}
	return mi.MessageOf(x)
}

// Deprecated: Use TokenContent.ProtoReflect.Descriptor instead.
func (*TokenContent) Descriptor() ([]byte, []int) {
	return file_kvgrpc_v1_common_proto_rawDescGZIP(), []int{7}
}

func (x *TokenContent) GetTokenIds() []uint32 {
	if x != nil {
		return x.TokenIds
	}
	return nil
}

func (x *TokenContent) GetAdapter() string {
	if x != nil {
		return x.Adapter
	}
	return ""
}

func (x *TokenContent) GetCacheSalt() string {
	if x != nil {
		return x.CacheSalt
	}
	return ""
}

func (x *TokenContent) GetWeightsRevision() string {
	if x != nil {
		return x.WeightsRevision
	}
	return ""
}

func (x *TokenContent) GetMultimodalItems() []*MultimodalItem {
	if x != nil {
		return x.MultimodalItems
	}
	return nil
}

// One image, audio clip or similar item inside a prompt.
type MultimodalItem struct {
	state protoimpl.MessageState `protogen:"open.v1"`
	// Digest of the item's data, at most 64 bytes.
	Digest []byte `protobuf:"bytes,1,opt,name=digest,proto3" json:"digest,omitempty"`
	// First token position that the item occupies.
	Offset uint32 `protobuf:"varint,2,opt,name=offset,proto3" json:"offset,omitempty"`
	// Number of token positions that the item occupies.
	Length        uint32 `protobuf:"varint,3,opt,name=length,proto3" json:"length,omitempty"`
	unknownFields protoimpl.UnknownFields
	sizeCache     protoimpl.SizeCache
}

func (x *MultimodalItem) Reset() {
	*x = MultimodalItem{}
	mi := &file_kvgrpc_v1_common_proto_msgTypes[8]
	ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
	ms.StoreMessageInfo(mi)
}

func (x *MultimodalItem) String() string {
	return protoimpl.X.MessageStringOf(x)
}

func (*MultimodalItem) ProtoMessage() {}

func (x *MultimodalItem) ProtoReflect() protoreflect.Message {
	mi := &file_kvgrpc_v1_common_proto_msgTypes[8]
	if x != nil {
		ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
		if ms.LoadMessageInfo() == nil {
			ms.StoreMessageInfo(mi)
		}
		return ms
	}
	return mi.MessageOf(x)
}

// Deprecated: Use MultimodalItem.ProtoReflect.Descriptor instead.
func (*MultimodalItem) Descriptor() ([]byte, []int) {
	return file_kvgrpc_v1_common_proto_rawDescGZIP(), []int{8}
}

func (x *MultimodalItem) GetDigest() []byte {
	if x != nil {
		return x.Digest
	}
	return nil
}

func (x *MultimodalItem) GetOffset() uint32 {
	if x != nil {
		return x.Offset
	}
	return 0
}

func (x *MultimodalItem) GetLength() uint32 {
	if x != nil {
		return x.Length
	}
	return 0
}

// An unforgeable capability of at most 512 bytes that routers relay unread. A holder trusts only `token`. The other
// fields repeat the token's contents for people and routers. A grant is a bearer right within its tenant: treat it like
// a password. docs/protocol.md defines its JSON form for routers that carry `kv_transfer_params`, and
// proto/vectors/grant.json has examples.
type Grant struct {
	state protoimpl.MessageState `protogen:"open.v1"`
	// The signed token. Only its issuer can verify it.
	Token []byte `protobuf:"bytes,1,opt,name=token,proto3" json:"token,omitempty"`
	// Kind of access that the grant allows.
	Access AccessKind `protobuf:"varint,2,opt,name=access,proto3,enum=kvgrpc.v1.AccessKind" json:"access,omitempty"`
	// Id of the issuing engine.
	EngineId string `protobuf:"bytes,3,opt,name=engine_id,json=engineId,proto3" json:"engine_id,omitempty"`
	// Life of the issuing engine. After a restart the grant is refused with INCARNATION_CHANGED.
	Incarnation uint64 `protobuf:"fixed64,4,opt,name=incarnation,proto3" json:"incarnation,omitempty"`
	// gRPC address of the issuer's lead, as peers dial it.
	Address string `protobuf:"bytes,5,opt,name=address,proto3" json:"address,omitempty"`
	// Id of the lease (READ) or of the target (WRITE) that the grant stands on. RenewLeases and ReleaseLease take it.
	LeaseId string `protobuf:"bytes,6,opt,name=lease_id,json=leaseId,proto3" json:"lease_id,omitempty"`
	// TTL at the time of minting. It is a hint: GetLease returns the remaining time.
	Ttl *durationpb.Duration `protobuf:"bytes,7,opt,name=ttl,proto3" json:"ttl,omitempty"`
	// Number of blocks of all groups together.
	BlockCount uint32 `protobuf:"varint,8,opt,name=block_count,json=blockCount,proto3" json:"block_count,omitempty"`
	// Number of tokens on offer.
	TokenCount    uint32 `protobuf:"varint,9,opt,name=token_count,json=tokenCount,proto3" json:"token_count,omitempty"`
	unknownFields protoimpl.UnknownFields
	sizeCache     protoimpl.SizeCache
}

func (x *Grant) Reset() {
	*x = Grant{}
	mi := &file_kvgrpc_v1_common_proto_msgTypes[9]
	ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
	ms.StoreMessageInfo(mi)
}

func (x *Grant) String() string {
	return protoimpl.X.MessageStringOf(x)
}

func (*Grant) ProtoMessage() {}

func (x *Grant) ProtoReflect() protoreflect.Message {
	mi := &file_kvgrpc_v1_common_proto_msgTypes[9]
	if x != nil {
		ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
		if ms.LoadMessageInfo() == nil {
			ms.StoreMessageInfo(mi)
		}
		return ms
	}
	return mi.MessageOf(x)
}

// Deprecated: Use Grant.ProtoReflect.Descriptor instead.
func (*Grant) Descriptor() ([]byte, []int) {
	return file_kvgrpc_v1_common_proto_rawDescGZIP(), []int{9}
}

func (x *Grant) GetToken() []byte {
	if x != nil {
		return x.Token
	}
	return nil
}

func (x *Grant) GetAccess() AccessKind {
	if x != nil {
		return x.Access
	}
	return AccessKind_ACCESS_KIND_UNSPECIFIED
}

func (x *Grant) GetEngineId() string {
	if x != nil {
		return x.EngineId
	}
	return ""
}

func (x *Grant) GetIncarnation() uint64 {
	if x != nil {
		return x.Incarnation
	}
	return 0
}

func (x *Grant) GetAddress() string {
	if x != nil {
		return x.Address
	}
	return ""
}

func (x *Grant) GetLeaseId() string {
	if x != nil {
		return x.LeaseId
	}
	return ""
}

func (x *Grant) GetTtl() *durationpb.Duration {
	if x != nil {
		return x.Ttl
	}
	return nil
}

func (x *Grant) GetBlockCount() uint32 {
	if x != nil {
		return x.BlockCount
	}
	return 0
}

func (x *Grant) GetTokenCount() uint32 {
	if x != nil {
		return x.TokenCount
	}
	return 0
}

// Instructions of a router to an engine about one request. The intent travels inside the engine's own request. Its JSON
// form is Protobuf's JSON mapping under `kvgrpc_intent`. docs/protocol.md defines it together with the grant's JSON
// form, and proto/vectors/intent.json has examples.
type Intent struct {
	state protoimpl.MessageState `protogen:"open.v1"`
	// Required. Transfer key: at least 16 random bytes that pair the two sides of a transfer. The key is secret, because
	// a caller that knows it can cancel the transfer. The bytes must be impossible to guess, because RenewLeases and
	// CancelTransfer tell whether anything exists under a key.
	TransferKey []byte `protobuf:"bytes,1,opt,name=transfer_key,json=transferKey,proto3" json:"transfer_key,omitempty"`
	// Id of the LLM request. It is a label to search by and is never matched.
	RequestId string `protobuf:"bytes,2,opt,name=request_id,json=requestId,proto3" json:"request_id,omitempty"`
	// Pull or push.
	Mode TransferMode `protobuf:"varint,3,opt,name=mode,proto3,enum=kvgrpc.v1.TransferMode" json:"mode,omitempty"`
	// Number of consumers that will come for the blocks; 0 means 1.
	ConsumerCount uint32 `protobuf:"varint,4,opt,name=consumer_count,json=consumerCount,proto3" json:"consumer_count,omitempty"`
	// Lease duration to ask for.
	Ttl *durationpb.Duration `protobuf:"bytes,5,opt,name=ttl,proto3" json:"ttl,omitempty"`
	// Priority: a higher one goes first. 0 is normal.
	Priority int32 `protobuf:"varint,6,opt,name=priority,proto3" json:"priority,omitempty"`
	// Effect of a consumer's abort.
	OnAbort OnAbort `protobuf:"varint,7,opt,name=on_abort,json=onAbort,proto3,enum=kvgrpc.v1.OnAbort" json:"on_abort,omitempty"`
	// Address of the other side, if the router knows it.
	Peer *PeerAddress `protobuf:"bytes,8,opt,name=peer,proto3" json:"peer,omitempty"`
	// Time for which the source keeps the blocks even if no consumer has come, as in HandOver.
	FirmTtl *durationpb.Duration `protobuf:"bytes,9,opt,name=firm_ttl,json=firmTtl,proto3" json:"firm_ttl,omitempty"`
	// Time at which the request began, in microseconds since the Unix epoch, as in HandOver. 0 means the time at which
	// the engine heard of the request. Each engine clamps the value to the 10 minutes before it heard of the request.
	RequestTimeUs uint64 `protobuf:"varint,10,opt,name=request_time_us,json=requestTimeUs,proto3" json:"request_time_us,omitempty"`
	unknownFields protoimpl.UnknownFields
	sizeCache     protoimpl.SizeCache
}

func (x *Intent) Reset() {
	*x = Intent{}
	mi := &file_kvgrpc_v1_common_proto_msgTypes[10]
	ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
	ms.StoreMessageInfo(mi)
}

func (x *Intent) String() string {
	return protoimpl.X.MessageStringOf(x)
}

func (*Intent) ProtoMessage() {}

func (x *Intent) ProtoReflect() protoreflect.Message {
	mi := &file_kvgrpc_v1_common_proto_msgTypes[10]
	if x != nil {
		ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
		if ms.LoadMessageInfo() == nil {
			ms.StoreMessageInfo(mi)
		}
		return ms
	}
	return mi.MessageOf(x)
}

// Deprecated: Use Intent.ProtoReflect.Descriptor instead.
func (*Intent) Descriptor() ([]byte, []int) {
	return file_kvgrpc_v1_common_proto_rawDescGZIP(), []int{10}
}

func (x *Intent) GetTransferKey() []byte {
	if x != nil {
		return x.TransferKey
	}
	return nil
}

func (x *Intent) GetRequestId() string {
	if x != nil {
		return x.RequestId
	}
	return ""
}

func (x *Intent) GetMode() TransferMode {
	if x != nil {
		return x.Mode
	}
	return TransferMode_TRANSFER_MODE_UNSPECIFIED
}

func (x *Intent) GetConsumerCount() uint32 {
	if x != nil {
		return x.ConsumerCount
	}
	return 0
}

func (x *Intent) GetTtl() *durationpb.Duration {
	if x != nil {
		return x.Ttl
	}
	return nil
}

func (x *Intent) GetPriority() int32 {
	if x != nil {
		return x.Priority
	}
	return 0
}

func (x *Intent) GetOnAbort() OnAbort {
	if x != nil {
		return x.OnAbort
	}
	return OnAbort_ON_ABORT_UNSPECIFIED
}

func (x *Intent) GetPeer() *PeerAddress {
	if x != nil {
		return x.Peer
	}
	return nil
}

func (x *Intent) GetFirmTtl() *durationpb.Duration {
	if x != nil {
		return x.FirmTtl
	}
	return nil
}

func (x *Intent) GetRequestTimeUs() uint64 {
	if x != nil {
		return x.RequestTimeUs
	}
	return 0
}

// Address of an engine's lead.
type PeerAddress struct {
	state protoimpl.MessageState `protogen:"open.v1"`
	// gRPC address, `host:port`.
	Address string `protobuf:"bytes,1,opt,name=address,proto3" json:"address,omitempty"`
	// Id of the engine expected there; checked when stated.
	EngineId      string `protobuf:"bytes,2,opt,name=engine_id,json=engineId,proto3" json:"engine_id,omitempty"`
	unknownFields protoimpl.UnknownFields
	sizeCache     protoimpl.SizeCache
}

func (x *PeerAddress) Reset() {
	*x = PeerAddress{}
	mi := &file_kvgrpc_v1_common_proto_msgTypes[11]
	ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
	ms.StoreMessageInfo(mi)
}

func (x *PeerAddress) String() string {
	return protoimpl.X.MessageStringOf(x)
}

func (*PeerAddress) ProtoMessage() {}

func (x *PeerAddress) ProtoReflect() protoreflect.Message {
	mi := &file_kvgrpc_v1_common_proto_msgTypes[11]
	if x != nil {
		ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
		if ms.LoadMessageInfo() == nil {
			ms.StoreMessageInfo(mi)
		}
		return ms
	}
	return mi.MessageOf(x)
}

// Deprecated: Use PeerAddress.ProtoReflect.Descriptor instead.
func (*PeerAddress) Descriptor() ([]byte, []int) {
	return file_kvgrpc_v1_common_proto_rawDescGZIP(), []int{11}
}

func (x *PeerAddress) GetAddress() string {
	if x != nil {
		return x.Address
	}
	return ""
}

func (x *PeerAddress) GetEngineId() string {
	if x != nil {
		return x.EngineId
	}
	return ""
}

// Failure of a transfer, for programs and for people.
type Failure struct {
	state protoimpl.MessageState `protogen:"open.v1"`
	// Reason of the failure.
	Reason FailureReason `protobuf:"varint,1,opt,name=reason,proto3,enum=kvgrpc.v1.FailureReason" json:"reason,omitempty"`
	// Phase in which the transfer failed.
	Phase TransferPhase `protobuf:"varint,2,opt,name=phase,proto3,enum=kvgrpc.v1.TransferPhase" json:"phase,omitempty"`
	// Side on which the failure happened.
	Side Side `protobuf:"varint,3,opt,name=side,proto3,enum=kvgrpc.v1.Side" json:"side,omitempty"`
	// Rank that failed, where one did.
	Rank *uint32 `protobuf:"varint,4,opt,name=rank,proto3,oneof" json:"rank,omitempty"`
	// Step that helps now.
	Next NextStep `protobuf:"varint,5,opt,name=next,proto3,enum=kvgrpc.v1.NextStep" json:"next,omitempty"`
	// One sentence for people.
	Message       string `protobuf:"bytes,6,opt,name=message,proto3" json:"message,omitempty"`
	unknownFields protoimpl.UnknownFields
	sizeCache     protoimpl.SizeCache
}

func (x *Failure) Reset() {
	*x = Failure{}
	mi := &file_kvgrpc_v1_common_proto_msgTypes[12]
	ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
	ms.StoreMessageInfo(mi)
}

func (x *Failure) String() string {
	return protoimpl.X.MessageStringOf(x)
}

func (*Failure) ProtoMessage() {}

func (x *Failure) ProtoReflect() protoreflect.Message {
	mi := &file_kvgrpc_v1_common_proto_msgTypes[12]
	if x != nil {
		ms := protoimpl.X.MessageStateOf(protoimpl.Pointer(x))
		if ms.LoadMessageInfo() == nil {
			ms.StoreMessageInfo(mi)
		}
		return ms
	}
	return mi.MessageOf(x)
}

// Deprecated: Use Failure.ProtoReflect.Descriptor instead.
func (*Failure) Descriptor() ([]byte, []int) {
	return file_kvgrpc_v1_common_proto_rawDescGZIP(), []int{12}
}

func (x *Failure) GetReason() FailureReason {
	if x != nil {
		return x.Reason
	}
	return FailureReason_FAILURE_REASON_UNSPECIFIED
}

func (x *Failure) GetPhase() TransferPhase {
	if x != nil {
		return x.Phase
	}
	return TransferPhase_TRANSFER_PHASE_UNSPECIFIED
}

func (x *Failure) GetSide() Side {
	if x != nil {
		return x.Side
	}
	return Side_SIDE_UNSPECIFIED
}

func (x *Failure) GetRank() uint32 {
	if x != nil && x.Rank != nil {
		return *x.Rank
	}
	return 0
}

func (x *Failure) GetNext() NextStep {
	if x != nil {
		return x.Next
	}
	return NextStep_NEXT_STEP_UNSPECIFIED
}

func (x *Failure) GetMessage() string {
	if x != nil {
		return x.Message
	}
	return ""
}

var File_kvgrpc_v1_common_proto protoreflect.FileDescriptor

const file_kvgrpc_v1_common_proto_rawDesc = "" +
	"\n" +
	"\x16kvgrpc/v1/common.proto\x12\tkvgrpc.v1\x1a\x1egoogle/protobuf/duration.proto\"l\n" +
	"\x0eResponseHeader\x12\x1b\n" +
	"\tengine_id\x18\x01 \x01(\tR\bengineId\x12 \n" +
	"\vincarnation\x18\x02 \x01(\x06R\vincarnation\x12\x1b\n" +
	"\tevent_seq\x18\x03 \x01(\x04R\beventSeq\";\n" +
	"\tBlockRuns\x12\x16\n" +
	"\x06starts\x18\x01 \x03(\rR\x06starts\x12\x16\n" +
	"\x06counts\x18\x02 \x03(\rR\x06counts\"M\n" +
	"\vGroupBlocks\x12\x14\n" +
	"\x05group\x18\x01 \x01(\rR\x05group\x12(\n" +
	"\x04runs\x18\x02 \x01(\v2\x14.kvgrpc.v1.BlockRunsR\x04runs\"\x7f\n" +
	"\x06Blocks\x12 \n" +
	"\vincarnation\x18\x01 \x01(\x06R\vincarnation\x12#\n" +
	"\rallocation_id\x18\x02 \x01(\tR\fallocationId\x12.\n" +
	"\x06groups\x18\x03 \x03(\v2\x16.kvgrpc.v1.GroupBlocksR\x06groups\"8\n" +
	"\n" +
	"LayerRange\x12\x14\n" +
	"\x05first\x18\x01 \x01(\rR\x05first\x12\x14\n" +
	"\x05count\x18\x02 \x01(\rR\x05count\"\xb9\x01\n" +
	"\aContent\x12/\n" +
	"\x05chain\x18\x01 \x01(\v2\x17.kvgrpc.v1.ContentChainH\x00R\x05chain\x121\n" +
	"\x06tokens\x18\x02 \x01(\v2\x17.kvgrpc.v1.TokenContentH\x00R\x06tokens\x12\x1d\n" +
	"\topaque_id\x18\x03 \x01(\fH\x00R\bopaqueId\x12#\n" +
	"\ropaque_tokens\x18\x04 \x01(\rR\fopaqueTokensB\x06\n" +
	"\x04form\"I\n" +
	"\fContentChain\x12\x18\n" +
	"\adigests\x18\x01 \x01(\fR\adigests\x12\x1f\n" +
	"\vtoken_count\x18\x02 \x01(\rR\n" +
	"tokenCount\"\xd5\x01\n" +
	"\fTokenContent\x12\x1b\n" +
	"\ttoken_ids\x18\x01 \x03(\rR\btokenIds\x12\x18\n" +
	"\aadapter\x18\x02 \x01(\tR\aadapter\x12\x1d\n" +
	"\n" +
	"cache_salt\x18\x03 \x01(\tR\tcacheSalt\x12)\n" +
	"\x10weights_revision\x18\x04 \x01(\tR\x0fweightsRevision\x12D\n" +
	"\x10multimodal_items\x18\x05 \x03(\v2\x19.kvgrpc.v1.MultimodalItemR\x0fmultimodalItems\"X\n" +
	"\x0eMultimodalItem\x12\x16\n" +
	"\x06digest\x18\x01 \x01(\fR\x06digest\x12\x16\n" +
	"\x06offset\x18\x02 \x01(\rR\x06offset\x12\x16\n" +
	"\x06length\x18\x03 \x01(\rR\x06length\"\xb4\x02\n" +
	"\x05Grant\x12\x19\n" +
	"\x05token\x18\x01 \x01(\fB\x03\x80\x01\x01R\x05token\x12-\n" +
	"\x06access\x18\x02 \x01(\x0e2\x15.kvgrpc.v1.AccessKindR\x06access\x12\x1b\n" +
	"\tengine_id\x18\x03 \x01(\tR\bengineId\x12 \n" +
	"\vincarnation\x18\x04 \x01(\x06R\vincarnation\x12\x18\n" +
	"\aaddress\x18\x05 \x01(\tR\aaddress\x12\x19\n" +
	"\blease_id\x18\x06 \x01(\tR\aleaseId\x12+\n" +
	"\x03ttl\x18\a \x01(\v2\x19.google.protobuf.DurationR\x03ttl\x12\x1f\n" +
	"\vblock_count\x18\b \x01(\rR\n" +
	"blockCount\x12\x1f\n" +
	"\vtoken_count\x18\t \x01(\rR\n" +
	"tokenCount\"\xa5\x03\n" +
	"\x06Intent\x12&\n" +
	"\ftransfer_key\x18\x01 \x01(\fB\x03\x80\x01\x01R\vtransferKey\x12\x1d\n" +
	"\n" +
	"request_id\x18\x02 \x01(\tR\trequestId\x12+\n" +
	"\x04mode\x18\x03 \x01(\x0e2\x17.kvgrpc.v1.TransferModeR\x04mode\x12%\n" +
	"\x0econsumer_count\x18\x04 \x01(\rR\rconsumerCount\x12+\n" +
	"\x03ttl\x18\x05 \x01(\v2\x19.google.protobuf.DurationR\x03ttl\x12\x1a\n" +
	"\bpriority\x18\x06 \x01(\x05R\bpriority\x12-\n" +
	"\bon_abort\x18\a \x01(\x0e2\x12.kvgrpc.v1.OnAbortR\aonAbort\x12*\n" +
	"\x04peer\x18\b \x01(\v2\x16.kvgrpc.v1.PeerAddressR\x04peer\x124\n" +
	"\bfirm_ttl\x18\t \x01(\v2\x19.google.protobuf.DurationR\afirmTtl\x12&\n" +
	"\x0frequest_time_us\x18\n" +
	" \x01(\x04R\rrequestTimeUs\"D\n" +
	"\vPeerAddress\x12\x18\n" +
	"\aaddress\x18\x01 \x01(\tR\aaddress\x12\x1b\n" +
	"\tengine_id\x18\x02 \x01(\tR\bengineId\"\xf5\x01\n" +
	"\aFailure\x120\n" +
	"\x06reason\x18\x01 \x01(\x0e2\x18.kvgrpc.v1.FailureReasonR\x06reason\x12.\n" +
	"\x05phase\x18\x02 \x01(\x0e2\x18.kvgrpc.v1.TransferPhaseR\x05phase\x12#\n" +
	"\x04side\x18\x03 \x01(\x0e2\x0f.kvgrpc.v1.SideR\x04side\x12\x17\n" +
	"\x04rank\x18\x04 \x01(\rH\x00R\x04rank\x88\x01\x01\x12'\n" +
	"\x04next\x18\x05 \x01(\x0e2\x13.kvgrpc.v1.NextStepR\x04next\x12\x18\n" +
	"\amessage\x18\x06 \x01(\tR\amessageB\a\n" +
	"\x05_rank*V\n" +
	"\n" +
	"AccessKind\x12\x1b\n" +
	"\x17ACCESS_KIND_UNSPECIFIED\x10\x00\x12\x14\n" +
	"\x10ACCESS_KIND_READ\x10\x01\x12\x15\n" +
	"\x11ACCESS_KIND_WRITE\x10\x02*L\n" +
	"\aOnAbort\x12\x18\n" +
	"\x14ON_ABORT_UNSPECIFIED\x10\x00\x12\x14\n" +
	"\x10ON_ABORT_RELEASE\x10\x01\x12\x11\n" +
	"\rON_ABORT_KEEP\x10\x02*]\n" +
	"\fTransferMode\x12\x1d\n" +
	"\x19TRANSFER_MODE_UNSPECIFIED\x10\x00\x12\x16\n" +
	"\x12TRANSFER_MODE_PULL\x10\x01\x12\x16\n" +
	"\x12TRANSFER_MODE_PUSH\x10\x02*\xbf\x01\n" +
	"\bDataPath\x12\x19\n" +
	"\x15DATA_PATH_UNSPECIFIED\x10\x00\x12\x11\n" +
	"\rDATA_PATH_SHM\x10\x01\x12\x11\n" +
	"\rDATA_PATH_CMA\x10\x02\x12\x12\n" +
	"\x0eDATA_PATH_NIXL\x10\x03\x12\x18\n" +
	"\x14DATA_PATH_COLLECTIVE\x10\x04\x12\x16\n" +
	"\x12DATA_PATH_LOOPBACK\x10\x05\x12\x16\n" +
	"\x12DATA_PATH_CUDA_VMM\x10\x06\x12\x14\n" +
	"\x10DATA_PATH_WINDOW\x10\a*\x8c\x02\n" +
	"\rTransferPhase\x12\x1e\n" +
	"\x1aTRANSFER_PHASE_UNSPECIFIED\x10\x00\x12\x1d\n" +
	"\x19TRANSFER_PHASE_RENDEZVOUS\x10\x01\x12\x1c\n" +
	"\x18TRANSFER_PHASE_HANDSHAKE\x10\x02\x12\x17\n" +
	"\x13TRANSFER_PHASE_OPEN\x10\x03\x12\x18\n" +
	"\x14TRANSFER_PHASE_QUEUE\x10\x04\x12\x17\n" +
	"\x13TRANSFER_PHASE_WIRE\x10\x05\x12\x1b\n" +
	"\x17TRANSFER_PHASE_CHECKSUM\x10\x06\x12\x19\n" +
	"\x15TRANSFER_PHASE_SETTLE\x10\a\x12\x1a\n" +
	"\x16TRANSFER_PHASE_READERS\x10\b*\xb6\x14\n" +
	"\rFailureReason\x12\x1e\n" +
	"\x1aFAILURE_REASON_UNSPECIFIED\x10\x00\x12 \n" +
	"\x1cFAILURE_REASON_INVALID_FIELD\x10\x01\x12%\n" +
	"!FAILURE_REASON_BLOCK_OUT_OF_RANGE\x10\x02\x12\"\n" +
	"\x1eFAILURE_REASON_BLOCK_DUPLICATE\x10\x03\x12\x1f\n" +
	"\x1bFAILURE_REASON_BLOCK_PINNED\x10\x04\x12&\n" +
	"\"FAILURE_REASON_BLOCK_NOT_ALLOCATED\x10\x05\x12'\n" +
	"#FAILURE_REASON_BLOCK_COUNT_MISMATCH\x10\x06\x12!\n" +
	"\x1dFAILURE_REASON_GROUP_MISMATCH\x10\a\x12%\n" +
	"!FAILURE_REASON_INCOMPATIBLE_POOLS\x10\b\x12'\n" +
	"#FAILURE_REASON_PROTOCOL_UNSUPPORTED\x10\t\x12\x1f\n" +
	"\x1bFAILURE_REASON_NO_DATA_PATH\x10\n" +
	"\x12\x1f\n" +
	"\x1bFAILURE_REASON_NO_HANDSHAKE\x10\v\x12\x1f\n" +
	"\x1bFAILURE_REASON_WRONG_ENGINE\x10\f\x12\x1f\n" +
	"\x1bFAILURE_REASON_DIAL_REFUSED\x10\r\x12#\n" +
	"\x1fFAILURE_REASON_PEER_UNREACHABLE\x10\x0e\x12\x1c\n" +
	"\x18FAILURE_REASON_PEER_LOST\x10\x0f\x12\x1e\n" +
	"\x1aFAILURE_REASON_PEER_FAILED\x10\x10\x12 \n" +
	"\x1cFAILURE_REASON_GRANT_INVALID\x10\x11\x12 \n" +
	"\x1cFAILURE_REASON_GRANT_FOREIGN\x10\x12\x12%\n" +
	"!FAILURE_REASON_GRANT_WRONG_ACCESS\x10\x13\x12&\n" +
	"\"FAILURE_REASON_INCARNATION_CHANGED\x10\x14\x12!\n" +
	"\x1dFAILURE_REASON_MEMORY_CHANGED\x10\x15\x12\"\n" +
	"\x1eFAILURE_REASON_LEASE_NOT_FOUND\x10\x16\x12 \n" +
	"\x1cFAILURE_REASON_LEASE_EXPIRED\x10\x17\x12!\n" +
	"\x1dFAILURE_REASON_LEASE_RELEASED\x10\x18\x12\x1f\n" +
	"\x1bFAILURE_REASON_LEASE_VOIDED\x10\x19\x12 \n" +
	"\x1cFAILURE_REASON_LEASE_REFUSED\x10\x1a\x12#\n" +
	"\x1fFAILURE_REASON_ACCESS_NOT_FOUND\x10\x1b\x12 \n" +
	"\x1cFAILURE_REASON_ACCESS_REUSED\x10\x1c\x12 \n" +
	"\x1cFAILURE_REASON_ACCESS_CLOSED\x10\x1d\x12#\n" +
	"\x1fFAILURE_REASON_CONTENT_MISMATCH\x10\x1e\x12#\n" +
	"\x1fFAILURE_REASON_CONTENT_REQUIRED\x10\x1f\x12 \n" +
	"\x1cFAILURE_REASON_CONTENT_RANGE\x10 \x12#\n" +
	"\x1fFAILURE_REASON_WEIGHTS_MISMATCH\x10!\x12(\n" +
	"$FAILURE_REASON_TRANSFER_KEY_MISMATCH\x10\"\x12%\n" +
	"!FAILURE_REASON_TRANSFER_NOT_FOUND\x10#\x12!\n" +
	"\x1dFAILURE_REASON_TRANSFER_ENDED\x10$\x12\"\n" +
	"\x1eFAILURE_REASON_TRANSFER_EXISTS\x10%\x12%\n" +
	"!FAILURE_REASON_WAITS_FOR_MISMATCH\x10&\x12\x1f\n" +
	"\x1bFAILURE_REASON_EMPTY_FINISH\x10'\x12\x1c\n" +
	"\x18FAILURE_REASON_CANCELLED\x10(\x12 \n" +
	"\x1cFAILURE_REASON_QUEUE_TIMEOUT\x10)\x12#\n" +
	"\x1fFAILURE_REASON_TRANSFER_TIMEOUT\x10*\x12!\n" +
	"\x1dFAILURE_REASON_SETTLE_TIMEOUT\x10+\x12'\n" +
	"#FAILURE_REASON_REGISTRATION_TIMEOUT\x10,\x12\x1b\n" +
	"\x17FAILURE_REASON_DEADLINE\x10-\x12)\n" +
	"%FAILURE_REASON_IDEMPOTENCY_KEY_REUSED\x10.\x12\x1e\n" +
	"\x1aFAILURE_REASON_TTL_INVALID\x10/\x12!\n" +
	"\x1dFAILURE_REASON_POOL_EXHAUSTED\x100\x12\x1d\n" +
	"\x19FAILURE_REASON_QUEUE_FULL\x101\x12!\n" +
	"\x1dFAILURE_REASON_LIMIT_EXCEEDED\x102\x12\x1b\n" +
	"\x17FAILURE_REASON_DRAINING\x103\x12\x1e\n" +
	"\x1aFAILURE_REASON_QUARANTINED\x104\x12\x1e\n" +
	"\x1aFAILURE_REASON_ENGINE_LOST\x105\x12\"\n" +
	"\x1eFAILURE_REASON_ENGINE_ATTACHED\x106\x12\x1a\n" +
	"\x16FAILURE_REASON_NO_POOL\x107\x12%\n" +
	"!FAILURE_REASON_POOL_KIND_MISMATCH\x108\x12'\n" +
	"#FAILURE_REASON_READ_BLOCKS_DISABLED\x109\x12\x1c\n" +
	"\x18FAILURE_REASON_NOT_OWNER\x10:\x12#\n" +
	"\x1fFAILURE_REASON_DATA_PATH_FAILED\x10;\x12$\n" +
	" FAILURE_REASON_CHECKSUM_MISMATCH\x10<\x12 \n" +
	"\x1cFAILURE_REASON_SOURCE_FAILED\x10=\x12\x1c\n" +
	"\x18FAILURE_REASON_PREEMPTED\x10>\x12&\n" +
	"\"FAILURE_REASON_FEATURE_UNAVAILABLE\x10?\x12\x1f\n" +
	"\x1bFAILURE_REASON_HISTORY_LOST\x10@\x12\x1b\n" +
	"\x17FAILURE_REASON_INTERNAL\x10A\x12\"\n" +
	"\x1eFAILURE_REASON_INTERNAL_DEFECT\x10B\x12\"\n" +
	"\x1eFAILURE_REASON_LEASE_RECLAIMED\x10C\x12\x1d\n" +
	"\x19FAILURE_REASON_NOT_PROVED\x10D\x12$\n" +
	" FAILURE_REASON_NOT_AUTHENTICATED\x10E\x12\x1f\n" +
	"\x1bFAILURE_REASON_ROLE_MISSING\x10F\x12 \n" +
	"\x1cFAILURE_REASON_POLICY_DENIED\x10G\x12\x1e\n" +
	"\x1aFAILURE_REASON_GRANT_BOUND\x10H\x12&\n" +
	"\"FAILURE_REASON_NETWORK_NOT_PRIVATE\x10I*\x97\x01\n" +
	"\bNextStep\x12\x19\n" +
	"\x15NEXT_STEP_UNSPECIFIED\x10\x00\x12\x18\n" +
	"\x14NEXT_STEP_RETRY_HERE\x10\x01\x12\"\n" +
	"\x1eNEXT_STEP_RETRY_OTHER_CONSUMER\x10\x02\x12\x17\n" +
	"\x13NEXT_STEP_RECOMPUTE\x10\x03\x12\x19\n" +
	"\x15NEXT_STEP_FIX_REQUEST\x10\x04*C\n" +
	"\x04Side\x12\x14\n" +
	"\x10SIDE_UNSPECIFIED\x10\x00\x12\x0f\n" +
	"\vSIDE_SOURCE\x10\x01\x12\x14\n" +
	"\x10SIDE_DESTINATION\x10\x02BH\n" +
	"\rdev.kvgrpc.v1B\vCommonProtoP\x01Z(kvgrpc.dev/kvgrpc/gen/kvgrpc/v1;kvgrpcv1b\x06proto3"

var (
	file_kvgrpc_v1_common_proto_rawDescOnce sync.Once
	file_kvgrpc_v1_common_proto_rawDescData []byte
)

func file_kvgrpc_v1_common_proto_rawDescGZIP() []byte {
	file_kvgrpc_v1_common_proto_rawDescOnce.Do(func() {
		file_kvgrpc_v1_common_proto_rawDescData = protoimpl.X.CompressGZIP(unsafe.Slice(unsafe.StringData(file_kvgrpc_v1_common_proto_rawDesc), len(file_kvgrpc_v1_common_proto_rawDesc)))
	})
	return file_kvgrpc_v1_common_proto_rawDescData
}

var file_kvgrpc_v1_common_proto_enumTypes = make([]protoimpl.EnumInfo, 8)
var file_kvgrpc_v1_common_proto_msgTypes = make([]protoimpl.MessageInfo, 13)
var file_kvgrpc_v1_common_proto_goTypes = []any{
	(AccessKind)(0),             // 0: kvgrpc.v1.AccessKind
	(OnAbort)(0),                // 1: kvgrpc.v1.OnAbort
	(TransferMode)(0),           // 2: kvgrpc.v1.TransferMode
	(DataPath)(0),               // 3: kvgrpc.v1.DataPath
	(TransferPhase)(0),          // 4: kvgrpc.v1.TransferPhase
	(FailureReason)(0),          // 5: kvgrpc.v1.FailureReason
	(NextStep)(0),               // 6: kvgrpc.v1.NextStep
	(Side)(0),                   // 7: kvgrpc.v1.Side
	(*ResponseHeader)(nil),      // 8: kvgrpc.v1.ResponseHeader
	(*BlockRuns)(nil),           // 9: kvgrpc.v1.BlockRuns
	(*GroupBlocks)(nil),         // 10: kvgrpc.v1.GroupBlocks
	(*Blocks)(nil),              // 11: kvgrpc.v1.Blocks
	(*LayerRange)(nil),          // 12: kvgrpc.v1.LayerRange
	(*Content)(nil),             // 13: kvgrpc.v1.Content
	(*ContentChain)(nil),        // 14: kvgrpc.v1.ContentChain
	(*TokenContent)(nil),        // 15: kvgrpc.v1.TokenContent
	(*MultimodalItem)(nil),      // 16: kvgrpc.v1.MultimodalItem
	(*Grant)(nil),               // 17: kvgrpc.v1.Grant
	(*Intent)(nil),              // 18: kvgrpc.v1.Intent
	(*PeerAddress)(nil),         // 19: kvgrpc.v1.PeerAddress
	(*Failure)(nil),             // 20: kvgrpc.v1.Failure
	(*durationpb.Duration)(nil), // 21: google.protobuf.Duration
}
var file_kvgrpc_v1_common_proto_depIdxs = []int32{
	9,  // 0: kvgrpc.v1.GroupBlocks.runs:type_name -> kvgrpc.v1.BlockRuns
	10, // 1: kvgrpc.v1.Blocks.groups:type_name -> kvgrpc.v1.GroupBlocks
	14, // 2: kvgrpc.v1.Content.chain:type_name -> kvgrpc.v1.ContentChain
	15, // 3: kvgrpc.v1.Content.tokens:type_name -> kvgrpc.v1.TokenContent
	16, // 4: kvgrpc.v1.TokenContent.multimodal_items:type_name -> kvgrpc.v1.MultimodalItem
	0,  // 5: kvgrpc.v1.Grant.access:type_name -> kvgrpc.v1.AccessKind
	21, // 6: kvgrpc.v1.Grant.ttl:type_name -> google.protobuf.Duration
	2,  // 7: kvgrpc.v1.Intent.mode:type_name -> kvgrpc.v1.TransferMode
	21, // 8: kvgrpc.v1.Intent.ttl:type_name -> google.protobuf.Duration
	1,  // 9: kvgrpc.v1.Intent.on_abort:type_name -> kvgrpc.v1.OnAbort
	19, // 10: kvgrpc.v1.Intent.peer:type_name -> kvgrpc.v1.PeerAddress
	21, // 11: kvgrpc.v1.Intent.firm_ttl:type_name -> google.protobuf.Duration
	5,  // 12: kvgrpc.v1.Failure.reason:type_name -> kvgrpc.v1.FailureReason
	4,  // 13: kvgrpc.v1.Failure.phase:type_name -> kvgrpc.v1.TransferPhase
	7,  // 14: kvgrpc.v1.Failure.side:type_name -> kvgrpc.v1.Side
	6,  // 15: kvgrpc.v1.Failure.next:type_name -> kvgrpc.v1.NextStep
	16, // [16:16] is the sub-list for method output_type
	16, // [16:16] is the sub-list for method input_type
	16, // [16:16] is the sub-list for extension type_name
	16, // [16:16] is the sub-list for extension extendee
	0,  // [0:16] is the sub-list for field type_name
}

func init() { file_kvgrpc_v1_common_proto_init() }
func file_kvgrpc_v1_common_proto_init() {
	if File_kvgrpc_v1_common_proto != nil {
		return
	}
	file_kvgrpc_v1_common_proto_msgTypes[5].OneofWrappers = []any{
		(*Content_Chain)(nil),
		(*Content_Tokens)(nil),
		(*Content_OpaqueId)(nil),
	}
	file_kvgrpc_v1_common_proto_msgTypes[12].OneofWrappers = []any{}
	type x struct{}
	out := protoimpl.TypeBuilder{
		File: protoimpl.DescBuilder{
			GoPackagePath: reflect.TypeOf(x{}).PkgPath(),
			RawDescriptor: unsafe.Slice(unsafe.StringData(file_kvgrpc_v1_common_proto_rawDesc), len(file_kvgrpc_v1_common_proto_rawDesc)),
			NumEnums:      8,
			NumMessages:   13,
			NumExtensions: 0,
			NumServices:   0,
		},
		GoTypes:           file_kvgrpc_v1_common_proto_goTypes,
		DependencyIndexes: file_kvgrpc_v1_common_proto_depIdxs,
		EnumInfos:         file_kvgrpc_v1_common_proto_enumTypes,
		MessageInfos:      file_kvgrpc_v1_common_proto_msgTypes,
	}.Build()
	File_kvgrpc_v1_common_proto = out.File
	file_kvgrpc_v1_common_proto_goTypes = nil
	file_kvgrpc_v1_common_proto_depIdxs = nil
}
