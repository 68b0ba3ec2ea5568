/* Errors of the library, and those that a lead states. */
#ifndef KV_FAILURE_H
#define KV_FAILURE_H

#include "wire.h"

/* Numbers of kvgrpc.v1.FailureReason that the library itself gives. */
enum {
  KV_INVALID_FIELD = 1,
  KV_PEER_UNREACHABLE = 14,
  KV_PEER_LOST = 15,
  KV_TRANSFER_ENDED = 36,
  KV_TRANSFER_EXISTS = 37,
  KV_DEADLINE = 45,
  KV_POOL_EXHAUSTED = 48,
  KV_LIMIT_EXCEEDED = 50,
  KV_NO_POOL = 55,
  KV_POOL_KIND_MISMATCH = 56,
  KV_DATA_PATH_FAILED = 59,
  KV_INTERNAL = 65
};

/* Fills an error, which may be NULL, and returns `code`. */
kvgrpc_code kv_fail(kvgrpc_error *error, kvgrpc_code code, uint32_t reason, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
/* Returns the code of a name on the wire; UNKNOWN for others. */
kvgrpc_code kv_code_of(kvgrpc_bytes name);
kvgrpc_code kv_copy_error(kvgrpc_error *to, const kvgrpc_error *from);
kvgrpc_code kv_no_memory(kvgrpc_error *error);
/* Returns whether a writer holds a whole message. */
kvgrpc_code kv_check_written(const kv_writer *message, kvgrpc_error *error);
/* Reads a kvgrpc.v1.Failure. */
bool kv_read_failure(kvgrpc_bytes message, kvgrpc_error *into);
/* Reads a RefusedResponse. Returns false for one that states no refusal. */
bool kv_read_refused(kvgrpc_bytes message, kvgrpc_error *into);

#endif
