/* The source's side of a push. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "calls.h"

static bool has_blocks(const kvgrpc_blocks *blocks, size_t rows) {
  for (size_t i = 0; i < rows; i++)
    if (blocks[i].count) return true;
  return false;
}

static bool copy_labels(kv_transfer *push, const kvgrpc_labels *labels) {
  push->key = kv_own(labels->transfer_key);
  push->request_id = strdup(labels->request_id ? labels->request_id : "");
  push->traceparent = strdup(labels->traceparent ? labels->traceparent : "");
  push->priority = labels->priority;
  return push->key.data && push->request_id && push->traceparent;
}

kvgrpc_code kvgrpc_push(kvgrpc_engine *engine, const kvgrpc_labels *labels, const kvgrpc_content *content,
                        const kvgrpc_push_options *options, kvgrpc_transfer *made, kvgrpc_error *error) {
  static const kvgrpc_push_options usual;
  if (!options) options = &usual;
  kvgrpc_code code = kv_check_alive(engine, error);
  if (!code) code = kv_check_content(content, error);
  if (!code) code = kv_check_seconds(options->firm_ttl_s, error);
  if (code) return code;
  kv_transfer *push = kv_transfer_new(&engine->transfers, KV_PUSH);
  if (!push) return kv_no_memory(error);
  kv_put_content(&push->content, content);
  code = kv_check_written(&push->content, error);
  if (!code && !copy_labels(push, kv_labels_or_none(labels))) code = kv_no_memory(error);
  if (code) {
    kv_transfer_end(&engine->transfers, push);
    return code;
  }
  push->consumers = options->consumers ? options->consumers : 1;
  push->keeps = options->keeps_on_abort;
  push->firm_ttl_s = options->firm_ttl_s;
  *made = push->handle;
  return KVGRPC_OK;
}

kvgrpc_code kvgrpc_push_register(kvgrpc_engine *engine, kvgrpc_transfer handle, kvgrpc_bytes grant,
                                 kvgrpc_error *error) {
  kv_transfer *push;
  kvgrpc_code code = kv_find(engine, handle, KV_PUSH, &push, error);
  if (code) return code;
  kv_writer request = {0};
  const size_t token = kv_open(&request, 2);
  kv_put_bytes(&request, 1, grant);
  kv_close(&request, token);
  kv_put_text(&request, 3, push->request_id);
  code = kv_ask(engine, push, push->traceparent, KV_CALL_REGISTER_PUSH, &request, error);
  kv_writer_free(&request);
  return code;
}

/* Begins a FinishedBlocksRequest of a push, with its job. */
static size_t open_job(kv_writer *request, const kv_transfer *push, uint32_t job) {
  kv_put_bytes(request, 2, push->key);
  kv_put_text(request, 3, push->request_id);
  return kv_open(request, job);
}

kvgrpc_code kvgrpc_push_part(kvgrpc_engine *engine, kvgrpc_transfer handle, const kvgrpc_part *part,
                             kvgrpc_error *error) {
  kv_transfer *push;
  kvgrpc_code code = kv_find(engine, handle, KV_PUSH, &push, error);
  if (!code) code = kv_check_blocks(part->blocks, part->rows, error);
  if (code) return code;
  kv_writer request = {0};
  const size_t job = open_job(&request, push, 5);
  if (has_blocks(part->blocks, part->rows))
    kv_put_blocks(&request, 1, engine->incarnation, part->blocks, part->rows);
  // Later parts are of the same prompt.
  if (!push->parted) kv_put_bytes(&request, 2, (kvgrpc_bytes){push->content.data, push->content.size});
  if (part->layers) {
    const size_t layers = kv_open(&request, 3);
    kv_put_uint(&request, 1, part->first_layer);
    kv_put_uint(&request, 2, part->layers);
    kv_close(&request, layers);
  }
  kv_put_uint(&request, 4, push->epoch);
  kv_put_uint(&request, 5, part->last);
  kv_put_uint(&request, 7, push->consumers);
  kv_put_uint(&request, 8, push->keeps ? ON_ABORT_KEEP : ON_ABORT_RELEASE);
  kv_put_uint(&request, 9, part->after_step);
  kv_put_int32(&request, 11, push->priority);
  if (push->firm_ttl_s > 0) kv_put_duration(&request, 12, push->firm_ttl_s);
  kv_close(&request, job);
  code = kv_ask(engine, push, push->traceparent, KV_CALL_FINISHED_BLOCKS, &request, error);
  kv_writer_free(&request);
  if (!code) push->parted = true;
  return code;
}

kvgrpc_code kvgrpc_push_start_over(kvgrpc_engine *engine, kvgrpc_transfer handle, kvgrpc_error *error) {
  kv_transfer *push;
  const kvgrpc_code code = kv_find(engine, handle, KV_PUSH, &push, error);
  if (code) return code;
  push->epoch += push->parted;
  push->parted = false;
  return KVGRPC_OK;
}

kvgrpc_code kvgrpc_push_fail(kvgrpc_engine *engine, kvgrpc_transfer handle, const char *message, kvgrpc_error *error) {
  kv_transfer *push;
  kvgrpc_code code = kv_find(engine, handle, KV_PUSH, &push, error);
  if (code) return code;
  kv_writer request = {0};
  const size_t job = open_job(&request, push, 6);
  kv_put_text(&request, 1, message);
  kv_close(&request, job);
  code = kv_ask(engine, push, push->traceparent, KV_CALL_FINISHED_BLOCKS, &request, error);
  kv_writer_free(&request);
  return code;
}

kvgrpc_code kvgrpc_push_expect(kvgrpc_engine *engine, kvgrpc_bytes transfer_key, kvgrpc_error *error) {
  kv_writer request = {0};
  kv_put_bytes(&request, 2, transfer_key);
  kv_close(&request, kv_open(&request, 8));
  const kvgrpc_code code = kv_ask(engine, NULL, NULL, KV_CALL_FINISHED_BLOCKS, &request, error);
  kv_writer_free(&request);
  return code;
}
