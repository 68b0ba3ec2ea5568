#include "failure.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static const char *const kCodes[] = {
    "OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS",
    "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED",
    "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED"};

/* Names of kvgrpc.v1.FailureReason, by number. */
static const char *const kReasons[] = {
    "UNSPECIFIED", "INVALID_FIELD", "BLOCK_OUT_OF_RANGE", "BLOCK_DUPLICATE", "BLOCK_PINNED", "BLOCK_NOT_ALLOCATED",
    "BLOCK_COUNT_MISMATCH", "GROUP_MISMATCH", "INCOMPATIBLE_POOLS", "PROTOCOL_UNSUPPORTED", "NO_DATA_PATH",
    "NO_HANDSHAKE", "WRONG_ENGINE", "DIAL_REFUSED", "PEER_UNREACHABLE", "PEER_LOST", "PEER_FAILED", "GRANT_INVALID",
    "GRANT_FOREIGN", "GRANT_WRONG_ACCESS", "INCARNATION_CHANGED", "MEMORY_CHANGED", "LEASE_NOT_FOUND",
    "LEASE_EXPIRED", "LEASE_RELEASED", "LEASE_VOIDED", "LEASE_REFUSED", "ACCESS_NOT_FOUND", "ACCESS_REUSED",
    "ACCESS_CLOSED", "CONTENT_MISMATCH", "CONTENT_REQUIRED", "CONTENT_RANGE", "WEIGHTS_MISMATCH",
    "TRANSFER_KEY_MISMATCH", "TRANSFER_NOT_FOUND", "TRANSFER_ENDED", "TRANSFER_EXISTS", "WAITS_FOR_MISMATCH",
    "EMPTY_FINISH", "CANCELLED", "QUEUE_TIMEOUT", "TRANSFER_TIMEOUT", "SETTLE_TIMEOUT", "REGISTRATION_TIMEOUT",
    "DEADLINE", "IDEMPOTENCY_KEY_REUSED", "TTL_INVALID", "POOL_EXHAUSTED", "QUEUE_FULL", "LIMIT_EXCEEDED", "DRAINING",
    "QUARANTINED", "ENGINE_LOST", "ENGINE_ATTACHED", "NO_POOL", "POOL_KIND_MISMATCH", "READ_BLOCKS_DISABLED",
    "NOT_OWNER", "DATA_PATH_FAILED", "CHECKSUM_MISMATCH", "SOURCE_FAILED", "PREEMPTED", "FEATURE_UNAVAILABLE",
    "HISTORY_LOST", "INTERNAL", "INTERNAL_DEFECT", "LEASE_RECLAIMED", "NOT_PROVED", "NOT_AUTHENTICATED",
    "ROLE_MISSING", "POLICY_DENIED", "GRANT_BOUND", "NETWORK_NOT_PRIVATE"};

#define COUNT(table) (sizeof(table) / sizeof *(table))

const char *kvgrpc_code_name(kvgrpc_code code) {
  return (size_t)code < COUNT(kCodes) ? kCodes[code] : kCodes[KVGRPC_UNKNOWN];
}

const char *kvgrpc_reason_name(uint32_t reason) { return reason < COUNT(kReasons) ? kReasons[reason] : "UNKNOWN"; }

const char *kvgrpc_engine_version(void) { return KVGRPC_ENGINE_VERSION; }

kvgrpc_code kv_fail(kvgrpc_error *error, kvgrpc_code code, uint32_t reason, const char *format, ...) {
  if (error) {
    error->code = code;
    error->reason = reason;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error->message, sizeof error->message, format, arguments);
    va_end(arguments);
  }
  return code;
}

kvgrpc_code kv_no_memory(kvgrpc_error *error) {
  return kv_fail(error, KVGRPC_RESOURCE_EXHAUSTED, KV_POOL_EXHAUSTED, "this process has no memory left");
}

kvgrpc_code kv_check_written(const kv_writer *message, kvgrpc_error *error) {
  if (message->failed) return kv_no_memory(error);
  if (message->not_text)
    return kv_fail(error, KVGRPC_INVALID_ARGUMENT, KV_INVALID_FIELD, "a text of the call is not UTF-8");
  return KVGRPC_OK;
}

kvgrpc_code kv_copy_error(kvgrpc_error *to, const kvgrpc_error *from) {
  if (to) *to = *from;
  return from->code;
}

kvgrpc_code kv_code_of(kvgrpc_bytes name) {
  for (size_t i = 1; i < COUNT(kCodes); i++)
    if (strlen(kCodes[i]) == name.size && !memcmp(kCodes[i], name.data, name.size)) return (kvgrpc_code)i;
  return KVGRPC_UNKNOWN;
}

bool kv_read_failure(kvgrpc_bytes message, kvgrpc_error *into) {
  kv_reader from = kv_reader_of(message);
  kv_field field;
  memset(into, 0, sizeof *into);
  into->code = KVGRPC_ABORTED; /* A transfer that failed is one that was aborted, as in the clients. */
  while (kv_next(&from, &field)) {
    if (kv_is(&field, 1, 0)) into->reason = (uint32_t)field.value;
    if (kv_is(&field, 6, 2)) kv_copy_text(into->message, sizeof into->message, field.bytes);
  }
  return !from.bad;
}

bool kv_read_refused(kvgrpc_bytes message, kvgrpc_error *into) {
  kv_reader from = kv_reader_of(message);
  kv_field field;
  memset(into, 0, sizeof *into);
  into->code = KVGRPC_UNKNOWN;
  while (kv_next(&from, &field)) {
    if (kv_is(&field, 1, 2)) into->code = kv_code_of(field.bytes);
    if (kv_is(&field, 2, 0)) into->reason = (uint32_t)field.value;
    if (kv_is(&field, 3, 2)) kv_copy_text(into->message, sizeof into->message, field.bytes);
  }
  return !from.bad;
}
