#include "kvgrpc/states.h"

#include <cctype>

namespace kvgrpc {
namespace {

// Returns the name without `prefix`, with which all values of the enum begin.
template <class Enum>
std::string short_name(Enum value, const std::string& name, std::size_t prefix) {
  if (value == Enum{}) return "";
  return name.empty() ? std::to_string(static_cast<int>(value)) : name.substr(prefix);
}

}  // namespace

bool is_over(v1::TransferState state) {
  return state == v1::TRANSFER_STATE_SUCCEEDED || state == v1::TRANSFER_STATE_FAILED ||
         state == v1::TRANSFER_STATE_CANCELLED;
}

bool is_over(const v1::Transfer& transfer) { return is_over(transfer.state()); }

bool is_over(v1::LeaseState state) {
  return state == v1::LEASE_STATE_EXPIRED || state == v1::LEASE_STATE_RELEASED || state == v1::LEASE_STATE_DONE ||
         state == v1::LEASE_STATE_VOIDED || state == v1::LEASE_STATE_LOST || state == v1::LEASE_STATE_RECLAIMED;
}

bool has_succeeded(const v1::Transfer& transfer) { return transfer.state() == v1::TRANSFER_STATE_SUCCEEDED; }

v1::MemoryDisposition disposition(const v1::Transfer& transfer) {
  const auto memory = transfer.memory();
  const bool known = memory == v1::MEMORY_DISPOSITION_HELD || memory == v1::MEMORY_DISPOSITION_RETURNED;
  return known ? memory : v1::MEMORY_DISPOSITION_QUARANTINED;
}

bool may_reuse_memory(const v1::Transfer& transfer) {
  return is_over(transfer) && disposition(transfer) == v1::MEMORY_DISPOSITION_RETURNED;
}

v1::CancelOutcome outcome(const v1::CancelTransferResponse& reply) {
  const bool known = v1::CancelOutcome_IsValid(reply.outcome()) && reply.outcome() != v1::CANCEL_OUTCOME_UNSPECIFIED;
  return known ? reply.outcome() : v1::CANCEL_OUTCOME_CANCELLED_IN_FLIGHT;
}

bool takes_work(v1::Admission admission) { return admission == v1::ADMISSION_OPEN; }
bool takes_work(const v1::EngineStatus& status) { return takes_work(status.admission()); }

v1::FailureReason known_reason(v1::FailureReason reason) {
  const bool known = v1::FailureReason_IsValid(reason) && reason != v1::FAILURE_REASON_UNSPECIFIED;
  return known ? reason : v1::FAILURE_REASON_INTERNAL;
}

bool may_retry_here(const v1::Failure& failure) {
  return known_reason(failure.reason()) == failure.reason() && failure.next() == v1::NEXT_STEP_RETRY_HERE;
}

bool may_retry_elsewhere(const v1::Failure& failure) {
  return known_reason(failure.reason()) == failure.reason() && failure.next() == v1::NEXT_STEP_RETRY_OTHER_CONSUMER;
}

std::string name_of(v1::FailureReason value) {
  return short_name(value, v1::FailureReason_Name(value), sizeof("FAILURE_REASON_") - 1);
}
std::string name_of(v1::NextStep value) {
  return short_name(value, v1::NextStep_Name(value), sizeof("NEXT_STEP_") - 1);
}
std::string name_of(v1::LeaseState value) {
  return short_name(value, v1::LeaseState_Name(value), sizeof("LEASE_STATE_") - 1);
}
std::string name_of(v1::TransferState value) {
  return short_name(value, v1::TransferState_Name(value), sizeof("TRANSFER_STATE_") - 1);
}
std::string name_of(v1::TransferPhase value) {
  std::string name = short_name(value, v1::TransferPhase_Name(value), sizeof("TRANSFER_PHASE_") - 1);
  for (char& letter : name) letter = static_cast<char>(std::tolower(static_cast<unsigned char>(letter)));
  return name;
}
std::string name_of(v1::MemoryDisposition value) {
  return short_name(value, v1::MemoryDisposition_Name(value), sizeof("MEMORY_DISPOSITION_") - 1);
}
std::string name_of(v1::CancelOutcome value) {
  return short_name(value, v1::CancelOutcome_Name(value), sizeof("CANCEL_OUTCOME_") - 1);
}

}  // namespace kvgrpc
