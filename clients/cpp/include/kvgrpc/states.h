// Questions about states and reasons. A value that this library does not know reads as the safe case: an unknown state
// is not an end, an unknown memory disposition is QUARANTINED, and an unknown reason is not retried.
//
// Use these functions instead of comparing values: enums are open on the wire, so a server may send any number.
#pragma once

#include <string>

#include "kvgrpc/v1/common.pb.h"
#include "kvgrpc/v1/handshake.pb.h"
#include "kvgrpc/v1/lease.pb.h"
#include "kvgrpc/v1/transfer.pb.h"

namespace kvgrpc {

// Returns whether a transfer has ended, whatever the outcome. It says nothing about the memory of the transfer.
bool is_over(v1::TransferState state);
bool is_over(const v1::Transfer& transfer);
// Returns whether a lease has ended.
bool is_over(v1::LeaseState state);
// Returns whether the transfer ended with the KV in its blocks (RECEIVE), or with its consumers done (SEND).
bool has_succeeded(const v1::Transfer& transfer);

// Returns the disposition of a transfer's memory: HELD, RETURNED or QUARANTINED.
v1::MemoryDisposition disposition(const v1::Transfer& transfer);
// Returns whether this engine's blocks of the transfer may be used for something else.
bool may_reuse_memory(const v1::Transfer& transfer);
// Returns the outcome of a cancel. An unknown outcome is CANCELLED_IN_FLIGHT.
v1::CancelOutcome outcome(const v1::CancelTransferResponse& reply);

// Returns whether an engine takes new work.
bool takes_work(v1::Admission admission);
bool takes_work(const v1::EngineStatus& status);

// Returns the reason, or INTERNAL for an unknown one.
v1::FailureReason known_reason(v1::FailureReason reason);
// Returns whether the same request may be made again: at the same engine, or with another consumer.
bool may_retry_here(const v1::Failure& failure);
bool may_retry_elsewhere(const v1::Failure& failure);

// Returns the name without its prefix: "LEASE_EXPIRED". Unspecified gives "", and an unknown value its number.
std::string name_of(v1::FailureReason value);
std::string name_of(v1::NextStep value);
std::string name_of(v1::LeaseState value);
std::string name_of(v1::TransferState value);
std::string name_of(v1::MemoryDisposition value);
// Returns the name in lower case, as errors name a phase: "wire".
std::string name_of(v1::TransferPhase value);
std::string name_of(v1::CancelOutcome value);

}  // namespace kvgrpc
