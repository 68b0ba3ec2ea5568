/* A scheduler's session: its attach, what it sends, and its end. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine.h"

#define GROUPS_MAX 256
#define REGIONS_MAX 4096
/* Maximum number of events that are read but not acknowledged while nothing else is sent: an acknowledgement alone
 * would wake the lead. */
#define UNSAID_MAX 64
#define POOL_KIND_ENGINE_MANAGED 2
#define POOL_MEMORY_SHARED 1
#define POOL_MEMORY_PRIVATE 2

static void put_group(kv_writer *to, const kvgrpc_group *group) {
  const size_t row = kv_open(to, 2);
  kv_put_text(to, 1, group->name);
  kv_put_uint(to, 2, group->kind);
  kv_put_uint(to, 3, group->layers);
  kv_put_uint(to, 4, group->block_tokens);
  kv_put_uint(to, 5, group->blocks);
  kv_put_uint(to, 6, group->kv_heads);
  kv_put_uint(to, 7, group->head_dim);
  kv_put_text(to, 8, group->dtype);
  kv_put_uint(to, 9, group->order);
  kv_put_uint(to, 10, group->window_tokens);
  kv_put_text(to, 11, group->space);
  kv_put_uint(to, 12, group->total_kv_heads);
  kv_close(to, row);
}

static void put_region(kv_writer *to, const kvgrpc_region *region) {
  const size_t row = kv_open(to, 3);
  kv_put_uint(to, 1, region->group);
  kv_put_uint(to, 2, region->first_layer);
  kv_put_uint(to, 3, region->layers);
  kv_put_uint(to, 4, region->offset);
  kv_put_uint(to, 5, region->stride_bytes);
  kv_put_uint(to, 6, region->block_bytes);
  kv_put_uint(to, 7, region->tensor);
  if (region->strides) {
    const size_t strides = kv_open(to, 8);
    kv_put_uint(to, 1, region->strides->layer_bytes);
    kv_put_uint(to, 2, region->strides->values_bytes);
    kv_put_uint(to, 3, region->strides->head_bytes);
    kv_put_uint(to, 4, region->strides->token_bytes);
    kv_put_uint(to, 5, region->strides->key_element_bytes);
    kv_close(to, strides);
  }
  kv_put_uint(to, 9, region->stage);
  kv_close(to, row);
}

static void put_pool(kv_writer *to, const kvgrpc_pool *pool) {
  const size_t description = kv_open(to, 3);
  kv_put_uint(to, 1, POOL_KIND_ENGINE_MANAGED);
  for (size_t i = 0; i < pool->group_count; i++) put_group(to, &pool->groups[i]);
  for (size_t i = 0; i < pool->region_count; i++) put_region(to, &pool->regions[i]);
  kv_put_uint(to, 4, pool->total_bytes);
  kv_close(to, description);
}

static void put_attach(kv_writer *to, const kvgrpc_attach_options *options) {
  const size_t attach = kv_open(to, 1);
  kv_put_text(to, 1, options->engine_id);
  kv_put_uint(to, 2, POOL_KIND_ENGINE_MANAGED);
  if (options->pool) put_pool(to, options->pool);
  kv_put_uint(to, 4, options->private_memory ? POOL_MEMORY_PRIVATE : POOL_MEMORY_SHARED);
  kv_put_uint(to, 5, options->world_size);
  kv_put_text(to, 6, options->weights_revision);
  kv_put_uint(to, 7, options->cannot_set_aside);
  kv_put_uint(to, 9, options->expects_pushes);
  kv_close(to, attach);
}

static bool read_header(kvgrpc_engine *engine, kvgrpc_bytes message) {
  kv_reader from = kv_reader_of(message);
  kv_field field;
  while (kv_next(&from, &field)) {
    if (kv_is(&field, 1, 2)) kv_copy_text(engine->id, sizeof engine->id, field.bytes);
    if (kv_is(&field, 2, 1)) engine->incarnation = field.value;
  }
  return !from.bad;
}

static kvgrpc_code read_attached(kvgrpc_engine *engine, const kv_field *answer, kvgrpc_error *error) {
  kv_reader from = kv_reader_of(answer->bytes);
  kv_field field;
  kvgrpc_bytes ticket = {0};
  if (answer->number != 1) from.bad = true;
  while (kv_next(&from, &field)) {
    if (kv_is(&field, 1, 2) && !read_header(engine, field.bytes)) from.bad = true;
    if (kv_is(&field, 3, 2)) ticket = field.bytes;
    if (kv_is(&field, 6, 2)) kv_copy_text(engine->address, sizeof engine->address, field.bytes);
  }
  if (from.bad || !ticket.size)
    return kv_fail(error, KVGRPC_INVALID_ARGUMENT, KV_INVALID_FIELD, "the lead's answer is none to an engine's attach");
  void *secret = malloc(ticket.size);
  if (!secret) return kv_no_memory(error);
  memcpy(secret, ticket.data, ticket.size);
  engine->ticket.secret = (kvgrpc_bytes){secret, ticket.size};
  return KVGRPC_OK;
}

static kvgrpc_code check_options(const kvgrpc_attach_options *options, kvgrpc_error *error) {
  if (!options || !options->socket_path)
    return kv_fail(error, KVGRPC_INVALID_ARGUMENT, KV_INVALID_FIELD, "an engine needs the path of its lead's socket");
  const kvgrpc_pool *pool = options->pool;
  if (options->private_memory && !pool)
    return kv_fail(error, KVGRPC_INVALID_ARGUMENT, KV_INVALID_FIELD,
                   "memory that ranks bring needs a pool's description");
  if (pool && (pool->group_count > GROUPS_MAX || pool->region_count > REGIONS_MAX))
    return kv_fail(error, KVGRPC_OUT_OF_RANGE, KV_LIMIT_EXCEEDED, "a pool has at most %d groups and %d regions",
                   GROUPS_MAX, REGIONS_MAX);
  return KVGRPC_OK;
}

/* Returns whether ranks of different pipeline stages may have memory of different sizes. */
static bool has_stages(const kvgrpc_pool *pool) {
  for (size_t i = 0; i < pool->region_count; i++)
    if (pool->regions[i].stage) return true;
  return false;
}

kvgrpc_code kvgrpc_engine_attach(const kvgrpc_attach_options *options, kvgrpc_engine **made, kvgrpc_error *error) {
  kvgrpc_code code = check_options(options, error);
  if (code) return code;
  kvgrpc_engine *engine = calloc(1, sizeof *engine);
  if (!engine) return kv_no_memory(error);
  kv_connection_init(&engine->connection);
  engine->frame = engine->batch = kv_reader_of((kvgrpc_bytes){0});
  engine->socket_path = strdup(options->socket_path);
  engine->ticket.socket_path = engine->socket_path;
  kv_writer message = {0};
  put_attach(&message, options);
  kv_field answer;
  code = engine->socket_path ? kv_connect(&engine->connection, options->socket_path, error) : kv_no_memory(error);
  if (!code) code = kv_attach(&engine->connection, &message, -1, KV_ATTACH_TIMEOUT_S, -1, &answer, error);
  if (!code) code = read_attached(engine, &answer, error);
  if (!code && options->private_memory && !has_stages(options->pool))
    engine->ticket.memory_bytes = options->pool->total_bytes;
  kv_writer_free(&message);
  /* The void page, by which an engine takes handed-over blocks back at once: this library cancels and waits. */
  const int page = kv_take_descriptor(&engine->connection);
  if (page >= 0) close(page);
  if (code) kvgrpc_engine_close(engine);
  else *made = engine;
  return code;
}

const kvgrpc_ticket *kvgrpc_engine_ticket(const kvgrpc_engine *engine) { return &engine->ticket; }

const char *kvgrpc_engine_id(const kvgrpc_engine *engine) { return engine->id; }

const char *kvgrpc_engine_address(const kvgrpc_engine *engine) { return engine->address; }

uint64_t kvgrpc_engine_incarnation(const kvgrpc_engine *engine) { return engine->incarnation; }

int kvgrpc_engine_fileno(const kvgrpc_engine *engine) { return engine->connection.fd; }

kvgrpc_code kv_check_alive(const kvgrpc_engine *engine, kvgrpc_error *error) {
  return engine->over.code ? kv_copy_error(error, &engine->over) : KVGRPC_OK;
}

kvgrpc_code kv_end_session(kvgrpc_engine *engine, const kvgrpc_error *why, kvgrpc_error *error) {
  engine->over = *why;
  kv_disconnect(&engine->connection);
  engine->frame = engine->batch = kv_reader_of((kvgrpc_bytes){0});
  return kv_copy_error(error, why);
}

kvgrpc_code kv_ask(kvgrpc_engine *engine, kv_transfer *about, const char *traceparent, uint32_t field,
                   const kv_writer *request, kvgrpc_error *error) {
  kvgrpc_code code = kv_check_alive(engine, error);
  if (code) return code;
  kv_writer call = {0};
  const size_t row = kv_open(&call, 1);
  kv_put_uint(&call, 1, about ? about->handle : field == KV_CALL_CANCEL_TRANSFER ? KV_UNHEARD : 0);
  kv_put_text(&call, 2, traceparent);
  const size_t body = kv_open(&call, field);
  kv_put_bytes_raw(&call, request->data, request->size);
  kv_close(&call, body);
  kv_close(&call, row);
  code = kv_check_written(request, error);
  if (!code) code = kv_check_written(&call, error);
  if (code) {
    /* Nothing is queued. */
  } else if (call.size > KV_FRAME_BYTES_MAX / 2) {
    code = kv_fail(error, KVGRPC_OUT_OF_RANGE, KV_LIMIT_EXCEEDED, "a call of %zu bytes; the limit is %u", call.size,
                   KV_FRAME_BYTES_MAX / 2);
  } else {
    if (engine->calls.size + call.size > KV_FRAME_BYTES_MAX / 2) code = kvgrpc_engine_flush(engine, error);
    const size_t before = engine->calls.size;
    if (!code) kv_put_bytes_raw(&engine->calls, call.data, call.size);
    if (engine->calls.failed) {
      engine->calls.size = before; /* What was queued before is whole. */
      engine->calls.failed = false;
      code = kv_no_memory(error);
    }
  }
  kv_writer_free(&call);
  if (!code && about) about->asked++;
  return code;
}

kvgrpc_code kvgrpc_engine_flush(kvgrpc_engine *engine, kvgrpc_error *error) {
  kvgrpc_code code = kv_check_alive(engine, error);
  if (code) return code;
  if (!engine->calls.size && engine->read_event - engine->acknowledged_event < UNSAID_MAX) return KVGRPC_OK;
  kv_writer message = {0}, frame = {0};
  const size_t batch = kv_open(&message, 3);
  kv_put_bytes_raw(&message, engine->calls.data, engine->calls.size);
  kv_put_uint(&message, 2, engine->read_event);
  kv_close(&message, batch);
  code = kv_frame_of(&message, &frame, error);
  kv_writer_free(&message);
  if (!code) {
    kvgrpc_error lost;
    code = kv_send(&engine->connection, frame.data, frame.size, &lost);
    if (code == KVGRPC_OK) {
      engine->acknowledged_event = engine->read_event;
      engine->calls.size = 0;
    } else {
      kv_copy_error(error, &lost); /* The lead's last frames are still to be read: kvgrpc_engine_next ends the session. */
    }
  }
  kv_writer_free(&frame);
  return code;
}

void kvgrpc_engine_close(kvgrpc_engine *engine) {
  if (!engine) return;
  kv_disconnect(&engine->connection);
  kv_writer_free(&engine->calls);
  kv_transfers_free(&engine->transfers);
  free(engine->layers);
  free((void *)engine->ticket.secret.data);
  free(engine->socket_path);
  free(engine);
}
