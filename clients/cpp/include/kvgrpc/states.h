// Questions about states and reasons. A value that this library does not know is read as the safe case: an unknown
// state is not an end, an unknown memory disposition is QUARANTINED, an unknown reason is not retried.
//
// Ask these instead of comparing values: enums are open on the wire, so a server may send any number.
#pragma once

#include <string>

#include "kvgrpc/v1/common.pb.h"
#include "kvgrpc/v1/handshake.pb.h"
#include "kvgrpc/v1/lease.pb.h"
#include "kvgrpc/v1/transfer.pb.h"

namespace kvgrpc {

// Whether a transfer has ended, one way or another. Says nothing about its memory.
bool is_over(v1::TransferState state);
bool is_over(const v1::Transfer& transfer);
// Whether a lease has ended.
bool is_over(v1::LeaseState state);
// Whether the transfer ended with the KV in its blocks (RECEIVE), or with its consumers done (SEND).
bool has_succeeded(const v1::Transfer& transfer);

// The disposition of a transfer's memory: HELD, RETURNED or QUARANTINED.
v1::MemoryDisposition disposition(const v1::Transfer& transfer);
// Whether this engine's blocks of the transfer may be used for something else.
bool may_reuse_memory(const v1::Transfer& transfer);
// What a cancel found. Unknown: CANCELLED_IN_FLIGHT.
v1::CancelOutcome outcome(const v1::CancelTransferResponse& reply);

// Whether an engine takes new work.
bool takes_work(v1::Admission admission);
bool takes_work(const v1::EngineStatus& status);

// The reason, or INTERNAL for one that is unknown.
v1::FailureReason known_reason(v1::FailureReason reason);
// Whether the same request may be made again: at the same engine, or with another consumer.
bool may_retry_here(const v1::Failure& failure);
bool may_retry_elsewhere(const v1::Failure& failure);

// Names without their prefix: "LEASE_EXPIRED". Unspecified gives "", an unknown value its number.
std::string name_of(v1::FailureReason value);
std::string name_of(v1::NextStep value);
std::string name_of(v1::LeaseState value);
std::string name_of(v1::TransferState value);
std::string name_of(v1::MemoryDisposition value);
// In lower case, as errors name a phase: "wire".
std::string name_of(v1::TransferPhase value);
std::string name_of(v1::CancelOutcome value);

}  // namespace kvgrpc
