/* What a lead tells a scheduler: answers and events, one at a time, to the events of the caller.
 *
 * A transfer is told one end: KVGRPC_EVENT_RECEIVED, or KVGRPC_EVENT_BLOCKS_RETURNED, before which
 * KVGRPC_EVENT_FAILED comes once at most.
 */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "engine.h"

#define MEMORY_RETURNED 2
/* Maximum number of ranges of layers in one event; no pool has more layers. */
#define RANGES_MAX 65536

typedef struct answer_row {
  uint64_t call_id;
  bool refused;
  kvgrpc_error failure;
  kvgrpc_bytes transfer_id;
  uint64_t memory;
  kvgrpc_bytes transfer_failure;
  kvgrpc_bytes grant;
} answer_row;

static void about(kvgrpc_event *event, kvgrpc_event_kind kind, const kv_transfer *transfer) {
  event->kind = kind;
  event->transfer = transfer->handle;
  memcpy(event->transfer_id, transfer->id, sizeof event->transfer_id);
}

/* Tells a failure, once: later failures of the same transfer are no news. */
static void tell_failed(kvgrpc_event *event, kv_transfer *transfer, const kvgrpc_error *failure, bool cancelled) {
  if (transfer->failed) return;
  transfer->failed = true;
  about(event, KVGRPC_EVENT_FAILED, transfer);
  event->failure = *failure;
  event->cancelled = cancelled;
}

/* Tells a transfer's last event, now or after what is told already. */
static void tell_returned(kvgrpc_engine *engine, kvgrpc_event *event, kv_transfer *transfer) {
  if (event->kind != KVGRPC_EVENT_NONE) {
    engine->returned = transfer->handle;
    return;
  }
  about(event, KVGRPC_EVENT_BLOCKS_RETURNED, transfer);
  kv_transfer_end(&engine->transfers, transfer);
}

/* ---- answers */

static bool read_transfer(kvgrpc_bytes message, answer_row *into) {
  kv_reader from = kv_reader_of(message);
  kv_field field;
  while (kv_next(&from, &field)) {
    if (kv_is(&field, 1, 2)) into->transfer_id = field.bytes;
    if (kv_is(&field, 4, 0)) into->memory = field.value;
    if (kv_is(&field, 17, 2)) into->transfer_failure = field.bytes;
  }
  const kvgrpc_bytes id = into->transfer_id;
  return !from.bad && id.size < KVGRPC_ID_BYTES && !(id.size && memchr(id.data, 0, id.size));
}

static bool read_grant(kvgrpc_bytes message, answer_row *into) {
  kv_reader from = kv_reader_of(message);
  kv_field field;
  while (kv_next(&from, &field))
    if (kv_is(&field, 1, 2)) into->grant = field.bytes;
  return !from.bad;
}

/* Reads a reply that names a transfer, in field `transfer`, and perhaps a grant, in the next one. */
static bool read_reply(kvgrpc_bytes message, uint32_t transfer, answer_row *into) {
  kv_reader from = kv_reader_of(message);
  kv_field field;
  bool right = true;
  while (right && kv_next(&from, &field)) {
    if (kv_is(&field, transfer, 2)) right = read_transfer(field.bytes, into);
    else if (kv_is(&field, transfer + 1, 2)) right = read_grant(field.bytes, into);
  }
  return right && !from.bad;
}

static bool read_answer(kvgrpc_bytes message, answer_row *into) {
  kv_reader from = kv_reader_of(message);
  kv_field field;
  bool right = true;
  kvgrpc_bytes code = {0};
  memset(into, 0, sizeof *into);
  while (right && kv_next(&from, &field)) {
    if (kv_is(&field, 1, 0)) into->call_id = field.value;
    if (kv_is(&field, 13, 2)) code = field.bytes;
    if (kv_is(&field, 2, 2)) {
      into->refused = true;
      right = kv_read_failure(field.bytes, &into->failure);
    }
    if (kv_is(&field, KV_CALL_FINISHED_BLOCKS, 2)) right = read_reply(field.bytes, 3, into);
    if (kv_is(&field, KV_CALL_RESERVE_BLOCKS, 2) || kv_is(&field, KV_CALL_PULL_BLOCKS, 2) ||
        kv_is(&field, KV_CALL_REGISTER_PUSH, 2))
      right = read_reply(field.bytes, 2, into);
  }
  if (into->refused && code.size) into->failure.code = kv_code_of(code);
  return right && !from.bad;
}

static kvgrpc_code begin(kvgrpc_engine *engine, kv_transfer *transfer, const answer_row *answer, kvgrpc_event *event,
                         kvgrpc_error *error) {
  if (!answer->transfer_id.size) {
    if (transfer->kind == KV_PUSH && !transfer->asked) tell_returned(engine, event, transfer);
    return KVGRPC_OK; /* Given up before there was anything to move. */
  }
  if (!kv_transfer_name(&engine->transfers, transfer, answer->transfer_id)) return kv_no_memory(error);
  if (transfer->kind == KV_PUSH && answer->memory == MEMORY_RETURNED) {
    kvgrpc_error failure;
    if (!kv_read_failure(answer->transfer_failure, &failure))
      return kv_fail(error, KVGRPC_INVALID_ARGUMENT, KV_INVALID_FIELD, "the failure of a push cannot be read");
    tell_failed(event, transfer, &failure, false);
    tell_returned(engine, event, transfer);
    return KVGRPC_OK;
  }
  if (transfer->kind == KV_HAND_OVER || transfer->kind == KV_RESERVATION) {
    about(event, KVGRPC_EVENT_GRANTED, transfer);
    event->grant = answer->grant;
  }
  kvgrpc_code code = KVGRPC_OK;
  if (transfer->start.size) code = kv_start_named(engine, transfer, error);
  if (!code && transfer->cancelled) code = kv_cancel_named(engine, transfer, transfer->cancel_message, error);
  if (!code && transfer->failed)
    code = kv_cancel_named(engine, transfer, "an earlier part of it was refused", error);
  return code;
}

static kvgrpc_code take_answer(kvgrpc_engine *engine, const answer_row *answer, kvgrpc_event *event,
                               kvgrpc_error *error) {
  if (!answer->call_id) {
    if (answer->refused) {
      event->kind = KVGRPC_EVENT_REFUSED;
      event->failure = answer->failure;
    }
    return KVGRPC_OK;
  }
  kv_transfer *transfer = kv_transfer_of(&engine->transfers, answer->call_id);
  if (!transfer || !transfer->asked) return KVGRPC_OK;
  transfer->asked--;
  const bool known = transfer->id[0] != 0;
  if (!answer->refused) return known ? KVGRPC_OK : begin(engine, transfer, answer, event, error);
  if (!known) {
    tell_failed(event, transfer, &answer->failure, false);
    /* Another call about it that waits for its answer may still begin it: its end then brings the blocks back. */
    if (!transfer->asked) tell_returned(engine, event, transfer);
    return KVGRPC_OK;
  }
  if (transfer->failed) return KVGRPC_OK;
  /* The blocks were refused: without blocks the transfer would hold its source until the cap. */
  tell_failed(event, transfer, &answer->failure, false);
  return kv_cancel_named(engine, transfer, "its blocks were refused", error);
}

/* ---- events */

typedef struct news_row {
  kvgrpc_bytes transfer_id;
  uint32_t use_tokens;
  bool cancelled;
  kvgrpc_bytes failure;
  size_t layers;
} news_row;

static bool read_range(kvgrpc_bytes message, kvgrpc_layer_range *into) {
  kv_reader from = kv_reader_of(message);
  kv_field field;
  *into = (kvgrpc_layer_range){0};
  while (kv_next(&from, &field)) {
    if (kv_is(&field, 1, 0)) into->first = (uint32_t)field.value;
    if (kv_is(&field, 2, 0)) into->count = (uint32_t)field.value;
  }
  return !from.bad;
}

static bool add_range(kvgrpc_engine *engine, kvgrpc_bytes message, size_t at) {
  if (at == RANGES_MAX) return false;
  if (at == engine->layer_capacity) {
    const size_t capacity = at ? at * 2 : 16;
    kvgrpc_layer_range *layers = realloc(engine->layers, capacity * sizeof *layers);
    if (!layers) return false;
    engine->layers = layers;
    engine->layer_capacity = capacity;
  }
  return read_range(message, &engine->layers[at]);
}

/* Reads an event about one transfer. All of them have its id in field 1. */
static bool read_news(kvgrpc_engine *engine, kvgrpc_bytes message, uint32_t kind, news_row *into) {
  kv_reader from = kv_reader_of(message);
  kv_field field;
  bool right = true;
  memset(into, 0, sizeof *into);
  while (right && kv_next(&from, &field)) {
    if (kv_is(&field, 1, 2)) into->transfer_id = field.bytes;
    if ((kind == 2 || kind == 6) && kv_is(&field, 3, 0)) into->use_tokens = (uint32_t)field.value;
    if (kind == 3 && kv_is(&field, 3, 2)) into->failure = field.bytes;
    if (kind == 3 && kv_is(&field, 4, 0)) into->cancelled = field.value != 0;
    if (kind == 7 && kv_is(&field, 3, 2)) right = add_range(engine, field.bytes, into->layers++);
  }
  return right && !from.bad;
}

static bool take_news(kvgrpc_engine *engine, kvgrpc_bytes message, uint32_t kind, kvgrpc_event *event) {
  news_row row;
  kvgrpc_error failure;
  if (!read_news(engine, message, kind, &row) || (kind == 3 && !kv_read_failure(row.failure, &failure))) return false;
  kv_transfer *transfer = kv_transfer_named(&engine->transfers, row.transfer_id);
  if (!transfer) return true;
  const bool fills = transfer->kind == KV_PULL || transfer->kind == KV_RESERVATION;
  if (kind == 6 && transfer->kind == KV_PULL) about(event, KVGRPC_EVENT_OPENED, transfer);
  if (kind == 8 && transfer->kind == KV_PUSH) about(event, KVGRPC_EVENT_PARTS_RETURNED, transfer);
  if (kind == 7 && transfer->kind == KV_RESERVATION) {
    about(event, KVGRPC_EVENT_LAYERS, transfer);
    event->layers = engine->layers;
    event->layer_count = row.layers;
  }
  if (kind == 3) tell_failed(event, transfer, &failure, row.cancelled);
  if (kind == 4) tell_returned(engine, event, transfer);
  event->use_tokens = row.use_tokens;
  if (kind == 2 && fills) {
    about(event, KVGRPC_EVENT_RECEIVED, transfer);
    kv_transfer_end(&engine->transfers, transfer);
  }
  return true;
}

static bool take_push_wanted(kvgrpc_bytes message, kvgrpc_event *event) {
  kv_reader from = kv_reader_of(message);
  kv_field field;
  event->kind = KVGRPC_EVENT_PUSH_WANTED;
  while (kv_next(&from, &field))
    if (kv_is(&field, 1, 2)) event->transfer_key = field.bytes;
  return !from.bad;
}

static kvgrpc_code unreadable(kvgrpc_error *error) {
  return kv_fail(error, KVGRPC_INVALID_ARGUMENT, KV_INVALID_FIELD, "the lead sent a frame that cannot be read");
}

static kvgrpc_code take_event(kvgrpc_engine *engine, kvgrpc_bytes message, kvgrpc_event *event, kvgrpc_error *error) {
  kv_reader from = kv_reader_of(message);
  kv_field field, kind = {0};
  while (kv_next(&from, &field)) {
    if (kv_is(&field, 1, 0)) engine->read_event = field.value;
    else if (field.wire == 2) kind = field; /* Of a choice the last one counts. */
  }
  if (from.bad) return unreadable(error);
  answer_row answer;
  switch (kind.number) {
    case 5:
      return read_answer(kind.bytes, &answer) ? take_answer(engine, &answer, event, error) : unreadable(error);
    case 9:
      return take_push_wanted(kind.bytes, event) ? KVGRPC_OK : unreadable(error);
    case 2:
    case 3:
    case 4:
    case 6:
    case 7:
    case 8:
      return take_news(engine, kind.bytes, kind.number, event) ? KVGRPC_OK : unreadable(error);
    default: /* Only a newer lead knows this kind. */
      return KVGRPC_OK;
  }
}

/* Reads on in the frame that is here, up to an event for the caller, or its end. */
static kvgrpc_code read_on(kvgrpc_engine *engine, kvgrpc_event *event, kvgrpc_error *error) {
  kv_field field;
  for (;;) {
    while (event->kind == KVGRPC_EVENT_NONE && kv_next(&engine->batch, &field)) {
      if (!kv_is(&field, 1, 2)) continue;
      const kvgrpc_code code = take_event(engine, field.bytes, event, error);
      if (code) return code;
    }
    if (engine->batch.bad) return unreadable(error);
    if (event->kind != KVGRPC_EVENT_NONE) return KVGRPC_OK;
    if (!kv_next(&engine->frame, &field)) return engine->frame.bad ? unreadable(error) : KVGRPC_OK;
    if (kv_is(&field, 3, 2)) engine->batch = kv_reader_of(field.bytes);
    if (kv_is(&field, 7, 2))
      return kv_fail(error, KVGRPC_UNAVAILABLE, KV_PEER_LOST, "the session is over: a worker of this engine is gone");
  }
}

kvgrpc_code kvgrpc_engine_next(kvgrpc_engine *engine, double timeout_s, kvgrpc_event *event, kvgrpc_error *error) {
  const double deadline = kv_now() + (timeout_s > 0 ? timeout_s : 0);
  kvgrpc_error why;
  kvgrpc_code code = kv_check_alive(engine, error);
  memset(event, 0, sizeof *event);
  if (code) return code;
  kv_transfer *returned = kv_transfer_of(&engine->transfers, engine->returned);
  engine->returned = 0;
  if (returned && (returned->id[0] || !returned->asked)) { /* A later call may still begin it: its answer ends it. */
    tell_returned(engine, event, returned);
    return KVGRPC_OK;
  }
  for (;;) {
    code = read_on(engine, event, &why);
    if (code) return kv_end_session(engine, &why, error);
    if (event->kind != KVGRPC_EVENT_NONE) return KVGRPC_OK;
    /* A lead that is gone may have said something before: its last frames are read in any case. */
    code = kvgrpc_engine_flush(engine, &why);
    if (code && code != KVGRPC_UNAVAILABLE) return kv_copy_error(error, &why);
    kvgrpc_bytes message;
    code = kv_receive(&engine->connection, false, deadline, -1, &message, &why);
    if (code == KVGRPC_DEADLINE_EXCEEDED) return KVGRPC_OK;
    if (code) return kv_end_session(engine, &why, error);
    engine->frame = kv_reader_of(message);
  }
}
