#define _GNU_SOURCE
#include "session.h"

#include <string.h>
#include <sys/socket.h>

#include "check.h"

kvgrpc_engine *session_open(lying_lead *lead) {
  int ends[2];
  kvgrpc_engine *engine = calloc(1, sizeof *engine);
  CHECK(engine && !socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends));
  kv_connection_init(&engine->connection);
  engine->connection.fd = ends[0];
  engine->frame = engine->batch = kv_reader_of((kvgrpc_bytes){0});
  engine->incarnation = 7;
  lead->connection = ends[1];
  return engine;
}

size_t session_event(kv_writer *frame, uint64_t number, size_t marks[2], uint32_t kind) {
  marks[0] = kv_open(frame, 3);
  marks[1] = kv_open(frame, 1);
  kv_put_uint(frame, 1, number);
  return kv_open(frame, kind);
}

void session_say(lying_lead *lead, kv_writer *frame, size_t marks[2], size_t kind) {
  kv_close(frame, kind);
  kv_close(frame, marks[1]);
  kv_close(frame, marks[0]);
  lead_say_frame(lead, frame, NULL, 0);
  kv_writer_free(frame);
}

void session_name(lying_lead *lead, uint64_t number, kvgrpc_transfer transfer, uint32_t reply, const char *id) {
  kv_writer frame = {0};
  size_t marks[2];
  const size_t answer = session_event(&frame, number, marks, 5);
  kv_put_uint(&frame, 1, transfer);
  const size_t response = kv_open(&frame, reply);
  const size_t named = kv_open(&frame, reply == KV_CALL_FINISHED_BLOCKS ? 3 : 2);
  kv_put_text(&frame, 1, id);
  kv_close(&frame, named);
  if (reply == KV_CALL_FINISHED_BLOCKS || reply == KV_CALL_RESERVE_BLOCKS) {
    const size_t grant = kv_open(&frame, reply == KV_CALL_FINISHED_BLOCKS ? 4 : 3);
    kv_put_text(&frame, 1, "a grant");
    kv_close(&frame, grant);
  }
  kv_close(&frame, response);
  session_say(lead, &frame, marks, answer);
}
