/* A scheduler's calls: the requests of the public API, as fields of the session's Call. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "calls.h"

/* Maximum number of tokens or blocks in one call: above any request, and few enough for one frame. */
#define IDS_MAX (1u << 22)
/* A pool has at most so many groups. */
#define ROWS_MAX 256u
#define KEY_BYTES_MIN 16
#define KEY_BYTES_MAX 64
#define SECONDS_MAX 1e9
#define CANCEL_SCOPE_ON_ABORT 3

kvgrpc_code kv_invalid(kvgrpc_error *error, const char *what) {
  return kv_fail(error, KVGRPC_INVALID_ARGUMENT, KV_INVALID_FIELD, "%s", what);
}

const kvgrpc_labels *kv_labels_or_none(const kvgrpc_labels *labels) {
  static const kvgrpc_labels none;
  return labels ? labels : &none;
}

/* Names blocks of this life, as runs of consecutive ids. */
void kv_put_blocks(kv_writer *to, uint32_t field, uint64_t incarnation, const kvgrpc_blocks *blocks, size_t rows) {
  const size_t message = kv_open(to, field);
  kv_put_fixed64(to, 1, incarnation);
  for (size_t i = 0; i < rows; i++) {
    const kvgrpc_blocks *row = &blocks[i];
    if (!row->count) continue;
    const size_t group = kv_open(to, 3);
    kv_put_uint(to, 1, row->group);
    const size_t runs = kv_open(to, 2), starts = kv_open(to, 1);
    for (size_t at = 0; at < row->count; at++)
      if (!at || row->ids[at] != row->ids[at - 1] + 1u) kv_put_varint(to, row->ids[at]);
    kv_close(to, starts);
    const size_t counts = kv_open(to, 2);
    size_t first = 0;
    for (size_t at = 1; at <= row->count; at++) {
      if (at < row->count && row->ids[at] == row->ids[at - 1] + 1u) continue;
      kv_put_varint(to, at - first);
      first = at;
    }
    kv_close(to, counts);
    kv_close(to, runs);
    kv_close(to, group);
  }
  kv_close(to, message);
}

void kv_put_content(kv_writer *to, const kvgrpc_content *content) {
  if (content->opaque_id.size) {
    kv_put_bytes(to, 3, content->opaque_id);
    kv_put_uint(to, 4, content->opaque_tokens);
    return;
  }
  const size_t tokens = kv_open(to, 2);
  kv_put_packed(to, 1, content->token_ids, content->token_count);
  kv_put_text(to, 2, content->adapter);
  kv_put_text(to, 3, content->cache_salt);
  kv_close(to, tokens);
}

kvgrpc_code kv_check_content(const kvgrpc_content *content, kvgrpc_error *error) {
  if (!content) return kv_invalid(error, "a transfer needs a content: what its KV is of");
  if (content->token_count > IDS_MAX)
    return kv_fail(error, KVGRPC_OUT_OF_RANGE, KV_LIMIT_EXCEEDED, "%zu token ids in one content; at most %u",
                   content->token_count, IDS_MAX);
  if (content->opaque_id.size && (content->token_count || content->adapter || content->cache_salt))
    return kv_invalid(error, "an opaque id stands for all of a content: let it tell adapters and salts apart");
  return KVGRPC_OK;
}

kvgrpc_code kv_check_blocks(const kvgrpc_blocks *blocks, size_t rows, kvgrpc_error *error) {
  size_t count = 0;
  if (rows > ROWS_MAX)
    return kv_fail(error, KVGRPC_OUT_OF_RANGE, KV_LIMIT_EXCEEDED, "%zu rows of blocks; at most %u", rows, ROWS_MAX);
  for (size_t i = 0; i < rows; i++) {
    if (blocks[i].count > IDS_MAX || (count += blocks[i].count) > IDS_MAX)
      return kv_fail(error, KVGRPC_OUT_OF_RANGE, KV_LIMIT_EXCEEDED, "more than %u blocks in one call", IDS_MAX);
  }
  return KVGRPC_OK;
}

kvgrpc_code kv_check_seconds(double seconds, kvgrpc_error *error) {
  return seconds >= 0 && seconds <= SECONDS_MAX ? KVGRPC_OK : kv_invalid(error, "a time is in [0, 1e9] seconds");
}

/* Makes a transfer and queues its first call; with an error there is none. */
static kvgrpc_code begin(kvgrpc_engine *engine, kv_kind kind, const kvgrpc_labels *labels, uint32_t field,
                         const kv_writer *request, kvgrpc_transfer *made, kvgrpc_error *error) {
  kv_transfer *transfer = kv_transfer_new(&engine->transfers, kind);
  if (!transfer) return kv_no_memory(error);
  const kvgrpc_code code = kv_ask(engine, transfer, labels->traceparent, field, request, error);
  if (code) kv_transfer_end(&engine->transfers, transfer);
  else *made = transfer->handle;
  return code;
}

kvgrpc_code kv_find(const kvgrpc_engine *engine, kvgrpc_transfer handle, kv_kind kind, kv_transfer **found,
                    kvgrpc_error *error) {
  const kvgrpc_code code = kv_check_alive(engine, error);
  if (code) return code;
  *found = kv_transfer_of(&engine->transfers, handle);
  if (*found && (kind == KV_FREE || (*found)->kind == kind)) return KVGRPC_OK;
  return kv_fail(error, KVGRPC_FAILED_PRECONDITION, KV_TRANSFER_ENDED, "%s",
                 *found ? "this transfer is of another kind" : "this transfer is over");
}

kvgrpc_code kvgrpc_hand_over(kvgrpc_engine *engine, const kvgrpc_labels *labels, const kvgrpc_content *content,
                             const kvgrpc_blocks *blocks, size_t rows, const kvgrpc_hand_over_options *options,
                             kvgrpc_transfer *made, kvgrpc_error *error) {
  static const kvgrpc_hand_over_options usual;
  if (!options) options = &usual;
  labels = kv_labels_or_none(labels);
  kvgrpc_code code = kv_check_content(content, error);
  if (!code) code = kv_check_blocks(blocks, rows, error);
  if (!code) code = kv_check_seconds(options->ttl_s, error);
  if (!code) code = kv_check_seconds(options->firm_ttl_s, error);
  if (code) return code;
  kv_writer request = {0};
  kv_put_bytes(&request, 2, labels->transfer_key);
  kv_put_text(&request, 3, labels->request_id);
  const size_t job = kv_open(&request, 4);
  kv_put_blocks(&request, 1, engine->incarnation, blocks, rows);
  const size_t inner = kv_open(&request, 2);
  kv_put_content(&request, content);
  kv_close(&request, inner);
  if (options->ttl_s > 0) kv_put_duration(&request, 3, options->ttl_s);
  kv_put_uint(&request, 4, options->consumers ? options->consumers : 1);
  kv_put_uint(&request, 5, options->keeps_on_abort ? ON_ABORT_KEEP : ON_ABORT_RELEASE);
  kv_put_uint(&request, 6, options->after_step);
  kv_put_int32(&request, 8, labels->priority);
  if (options->firm_ttl_s > 0) kv_put_duration(&request, 9, options->firm_ttl_s);
  kv_put_uint(&request, 10, labels->request_time_us);
  kv_put_uint(&request, 11, options->takes_registrations);
  kv_close(&request, job);
  code = begin(engine, KV_HAND_OVER, labels, KV_CALL_FINISHED_BLOCKS, &request, made, error);
  kv_writer_free(&request);
  return code;
}

kvgrpc_code kvgrpc_pull(kvgrpc_engine *engine, const kvgrpc_labels *labels, const kvgrpc_content *content,
                        kvgrpc_bytes grant, const kvgrpc_pull_options *options, kvgrpc_transfer *made,
                        kvgrpc_error *error) {
  static const kvgrpc_pull_options usual;
  if (!options) options = &usual;
  labels = kv_labels_or_none(labels);
  kvgrpc_code code = kv_check_content(content, error);
  if (code) return code;
  kv_writer request = {0};
  const size_t token = kv_open(&request, 2);
  kv_put_bytes(&request, 1, grant);
  kv_close(&request, token);
  const size_t inner = kv_open(&request, 4);
  kv_put_content(&request, content);
  kv_close(&request, inner);
  kv_put_uint(&request, 5, options->use_tokens);
  kv_put_bytes(&request, 7, labels->transfer_key);
  kv_put_text(&request, 8, labels->request_id);
  kv_put_int32(&request, 9, labels->priority);
  kv_put_uint(&request, 15, labels->request_time_us);
  kv_put_uint(&request, 16, options->allow_prefix);
  code = begin(engine, KV_PULL, labels, KV_CALL_PULL_BLOCKS, &request, made, error);
  kv_writer_free(&request);
  return code;
}

kvgrpc_code kv_start_named(kvgrpc_engine *engine, kv_transfer *pull, kvgrpc_error *error) {
  kv_writer request = {0};
  kv_put_text(&request, 3, pull->id);
  kv_put_bytes_raw(&request, pull->start.data, pull->start.size);
  const kvgrpc_code code = kv_ask(engine, pull, NULL, KV_CALL_PULL_BLOCKS, &request, error);
  kv_writer_free(&request);
  if (!code) kv_writer_free(&pull->start);
  return code;
}

kvgrpc_code kvgrpc_pull_start(kvgrpc_engine *engine, kvgrpc_transfer handle, const kvgrpc_blocks *blocks, size_t rows,
                              uint32_t have_tokens, uint64_t after_step, kvgrpc_error *error) {
  kv_transfer *pull;
  kvgrpc_code code = kv_find(engine, handle, KV_PULL, &pull, error);
  if (!code) code = kv_check_blocks(blocks, rows, error);
  if (code) return code;
  if (pull->started)
    return kv_fail(error, KVGRPC_FAILED_PRECONDITION, KV_TRANSFER_EXISTS, "this pull has its blocks already");
  const size_t destination = kv_open(&pull->start, 6);
  kv_put_blocks(&pull->start, 1, engine->incarnation, blocks, rows);
  kv_put_uint(&pull->start, 2, have_tokens);
  kv_close(&pull->start, destination);
  kv_put_uint(&pull->start, 10, after_step);
  if (pull->start.failed) code = kv_no_memory(error);
  else if (pull->id[0]) code = kv_start_named(engine, pull, error);
  if (code) kv_writer_free(&pull->start);
  pull->started = !code;
  return code;
}

kvgrpc_code kvgrpc_reserve(kvgrpc_engine *engine, const kvgrpc_labels *labels, const kvgrpc_content *content,
                           const kvgrpc_blocks *blocks, size_t rows, const kvgrpc_reserve_options *options,
                           kvgrpc_transfer *made, kvgrpc_error *error) {
  static const kvgrpc_reserve_options usual;
  if (!options) options = &usual;
  labels = kv_labels_or_none(labels);
  kvgrpc_code code = kv_check_content(content, error);
  if (!code) code = kv_check_blocks(blocks, rows, error);
  if (code) return code;
  kv_writer request = {0};
  kv_put_bytes(&request, 2, labels->transfer_key);
  kv_put_text(&request, 3, labels->request_id);
  kv_put_blocks(&request, 4, engine->incarnation, blocks, rows);
  kv_put_uint(&request, 5, options->have_tokens);
  const size_t inner = kv_open(&request, 6);
  kv_put_content(&request, content);
  kv_close(&request, inner);
  kv_put_uint(&request, 7, options->use_tokens);
  if (options->source_address && *options->source_address) {
    const size_t source = kv_open(&request, 8);
    kv_put_text(&request, 1, options->source_address);
    kv_put_text(&request, 2, options->source_engine_id);
    kv_close(&request, source);
  }
  kv_put_uint(&request, 9, options->after_step);
  kv_put_int32(&request, 11, labels->priority);
  kv_put_uint(&request, 14, options->allow_prefix);
  code = begin(engine, KV_RESERVATION, labels, KV_CALL_RESERVE_BLOCKS, &request, made, error);
  kv_writer_free(&request);
  return code;
}

/* ---- ends */

kvgrpc_code kv_cancel_named(kvgrpc_engine *engine, const kv_transfer *transfer, const char *message,
                            kvgrpc_error *error) {
  kv_writer request = {0};
  kv_put_text(&request, 2, transfer->id);
  kv_put_text(&request, 4, message);
  kv_put_uint(&request, 5, CANCEL_SCOPE_ON_ABORT);
  const kvgrpc_code code = kv_ask(engine, NULL, NULL, KV_CALL_CANCEL_TRANSFER, &request, error);
  kv_writer_free(&request);
  return code;
}

kvgrpc_code kvgrpc_cancel(kvgrpc_engine *engine, kvgrpc_transfer handle, const char *message, kvgrpc_error *error) {
  kv_transfer *transfer;
  kvgrpc_code code = kv_find(engine, handle, KV_FREE, &transfer, error);
  if (code) return code;
  if (transfer->id[0]) return kv_cancel_named(engine, transfer, message, error);
  if (transfer->kind == KV_PUSH && !transfer->asked && !transfer->failed) {
    kv_transfer_end(&engine->transfers, transfer); /* The lead has not heard of it. */
    return KVGRPC_OK;
  }
  if (transfer->cancelled) return KVGRPC_OK;
  kv_writer checked = {0};
  kv_put_text(&checked, 4, message);
  code = kv_check_written(&checked, error);
  kv_writer_free(&checked);
  if (code) return code;
  transfer->cancel_message = strdup(message ? message : "");
  if (!transfer->cancel_message) return kv_no_memory(error);
  transfer->cancelled = true;
  return KVGRPC_OK;
}

kvgrpc_code kvgrpc_cancel_key(kvgrpc_engine *engine, kvgrpc_bytes transfer_key, const char *message,
                              kvgrpc_error *error) {
  if (transfer_key.size < KEY_BYTES_MIN || transfer_key.size > KEY_BYTES_MAX)
    return kv_invalid(error, "a transfer key has 16 to 64 random bytes");
  kv_writer request = {0};
  kv_put_bytes(&request, 3, transfer_key);
  kv_put_text(&request, 4, message);
  const kvgrpc_code code = kv_ask(engine, NULL, NULL, KV_CALL_CANCEL_TRANSFER, &request, error);
  kv_writer_free(&request);
  return code;
}

kvgrpc_code kvgrpc_step_done(kvgrpc_engine *engine, uint64_t step, kvgrpc_error *error) {
  kv_writer request = {0};
  kv_put_uint(&request, 1, step);
  const kvgrpc_code code = kv_ask(engine, NULL, NULL, KV_CALL_STEP_DONE, &request, error);
  kv_writer_free(&request);
  return code;
}
