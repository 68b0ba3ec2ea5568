#define _GNU_SOURCE
#include "own_rank.h"

#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

/* The rank's process: its exit status is the code of the service. */
static void live(const own_rank *own, uint32_t number) {
  const kvgrpc_ticket ticket = {own->lead.path, {"secret", 6}, 60, OWN_BYTES};
  const kvgrpc_memory memory[OWN_SEGMENTS] = {{own->segments[0], OWN_SEGMENT_BYTES},
                                              {own->segments[1], OWN_SEGMENT_BYTES}};
  kvgrpc_rank *rank;
  kvgrpc_error error;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  for (int inherited = 3; inherited < 256; inherited++) close(inherited); /* A connection ends with its last holder. */
  CHECK(!kvgrpc_rank_attach_memory(&ticket, number, memory, OWN_SEGMENTS, &rank, &error));
  CHECK(!kvgrpc_rank_memory(rank) && kvgrpc_rank_memory_bytes(rank) == OWN_BYTES);
  const kvgrpc_code code = kvgrpc_rank_serve(rank, &error);
  kvgrpc_rank_close(rank);
  exit((int)code);
}

void own_rank_start(own_rank *rank, uint32_t number) {
  uint8_t *both = mmap(NULL, 3 * OWN_SEGMENT_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  CHECK(both != MAP_FAILED);
  rank->segments[0] = both + 2 * OWN_SEGMENT_BYTES; /* With a gap between them. */
  rank->segments[1] = both;
  lead_listen(&rank->lead);
  rank->process = fork();
  CHECK(rank->process >= 0);
  if (!rank->process) live(rank, number);
  own_rank_attach(rank, false);
}

void own_rank_attach(own_rank *rank, bool returns) {
  kv_writer first = lead_accept(&rank->lead), answer = {0};
  kv_reader from = kv_reader_of((kvgrpc_bytes){first.data, first.size});
  kv_field field, inner;
  bool is_private = false, came_back = false;
  CHECK(kv_next(&from, &field) && kv_is(&field, 2, 2));
  from = kv_reader_of(field.bytes);
  while (kv_next(&from, &inner)) {
    is_private |= kv_is(&inner, 3, 0) && inner.value == 1;
    came_back |= kv_is(&inner, 4, 0) && inner.value == 1;
    CHECK(!kv_is(&inner, 5, 2)); /* It is at rest. */
  }
  CHECK(is_private && came_back == returns);
  put_rank_attached(&answer, 0);
  lead_say_frame(&rank->lead, &answer, NULL, 0);
  kv_writer_free(&first);
  kv_writer_free(&answer);
}

kvgrpc_code own_rank_end(own_rank *rank) {
  int status = 0;
  lead_close(&rank->lead);
  CHECK(waitpid(rank->process, &status, 0) == rank->process);
  munmap(rank->segments[1], 3 * OWN_SEGMENT_BYTES);
  if (WIFSIGNALED(status)) return KVGRPC_CANCELLED;
  CHECK(WIFEXITED(status));
  return (kvgrpc_code)WEXITSTATUS(status);
}

uint8_t *own_rank_at(own_rank *rank, size_t offset) {
  return rank->segments[offset / OWN_SEGMENT_BYTES] + offset % OWN_SEGMENT_BYTES;
}

void own_rank_fill(own_rank *rank, unsigned seed) {
  for (size_t i = 0; i < OWN_BYTES; i++) *own_rank_at(rank, i) = (uint8_t)(seed + i * 7 + i / 251);
}

void own_rank_say(own_rank *rank, uint32_t field, kv_writer *message) {
  kv_writer frame = {0};
  const size_t commands = kv_open(&frame, 4), command = kv_open(&frame, 1), body = kv_open(&frame, field);
  kv_put_bytes_raw(&frame, message->data, message->size);
  kv_close(&frame, body);
  kv_close(&frame, command);
  kv_close(&frame, commands);
  lead_say_frame(&rank->lead, &frame, NULL, 0);
  kv_writer_free(&frame);
  kv_writer_free(message);
}

kv_writer own_rank_hear(own_rank *rank, uint32_t field) {
  kv_writer frame = lead_read(&rank->lead), heard = {0};
  kv_field found = {.bytes = {frame.data, frame.size}};
  const uint32_t numbers[] = {4, 1, field};
  for (size_t i = 0; i < 3; i++) {
    kv_reader from = kv_reader_of(found.bytes);
    CHECK(kv_next(&from, &found) && kv_is(&found, numbers[i], 2) && from.at == from.end);
  }
  kv_put_bytes_raw(&heard, found.bytes.data, found.bytes.size);
  kv_writer_free(&frame);
  return heard;
}

kv_writer own_rank_offer(own_rank *rank, const char *peer) {
  kv_writer ask = {0}, endpoint = {0};
  kv_put_text(&ask, 1, "key");
  kv_put_text(&ask, 2, peer);
  own_rank_say(rank, 1, &ask);
  kv_writer report = own_rank_hear(rank, 1);
  kv_reader from = kv_reader_of((kvgrpc_bytes){report.data, report.size});
  kv_field field;
  while (kv_next(&from, &field))
    if (kv_is(&field, 2, 2)) kv_put_bytes_raw(&endpoint, field.bytes.data, field.bytes.size);
  CHECK(endpoint.size);
  kv_writer_free(&report);
  return endpoint;
}

static void last_reason(kvgrpc_bytes rejected, char why[256]) {
  kv_reader from = kv_reader_of(rejected);
  kv_field field;
  while (kv_next(&from, &field))
    if (kv_is(&field, 2, 2)) kv_copy_text(why, 256, field.bytes);
}

void own_rank_ask_to_connect(own_rank *rank, const char *peer, uint32_t peer_rank, const kv_writer *endpoint,
                             const char *const *paths) {
  kv_writer ask = {0};
  kv_put_text(&ask, 1, peer);
  kv_put_bytes(&ask, 2, (kvgrpc_bytes){endpoint->data, endpoint->size});
  for (; *paths; paths++) kv_put_text(&ask, 3, *paths);
  kv_put_varint(&ask, 4 << 3);
  kv_put_varint(&ask, peer_rank);
  kv_put_uint(&ask, 5, 9);
  own_rank_say(rank, 2, &ask);
}

bool own_rank_connected(own_rank *rank, uint32_t *peer_rank, char why[256]) {
  kv_writer report = own_rank_hear(rank, 2);
  kv_reader from = kv_reader_of((kvgrpc_bytes){report.data, report.size});
  kv_field field;
  uint64_t attempt = 0;
  bool connected = false;
  why[0] = 0;
  while (kv_next(&from, &field)) {
    if (kv_is(&field, 6, 0)) attempt = field.value;
    if (kv_is(&field, 5, 0)) *peer_rank = (uint32_t)field.value;
    if (kv_is(&field, 4, 2) && !connected) last_reason(field.bytes, why);
    if (kv_is(&field, 2, 2)) {
      connected = true;
      kv_copy_text(why, 256, field.bytes);
    }
  }
  CHECK(attempt == 9);
  kv_writer_free(&report);
  return connected;
}

bool own_rank_connect(own_rank *rank, const char *peer, uint32_t peer_rank, const kv_writer *endpoint,
                      const char *const *paths, char why[256]) {
  uint32_t reported = ~peer_rank;
  own_rank_ask_to_connect(rank, peer, peer_rank, endpoint, paths);
  const bool connected = own_rank_connected(rank, &reported, why);
  CHECK(reported == peer_rank);
  return connected;
}

void own_rank_post(own_rank *rank, const char *peer, uint32_t peer_rank, uint32_t operation, const uint32_t *src,
                   const uint32_t *dst, const uint32_t *nbytes, size_t count, const kv_writer *more) {
  kv_writer post = {0};
  kv_put_text(&post, 1, "posting");
  kv_put_text(&post, 2, peer);
  kv_put_packed(&post, 3, src, count);
  kv_put_packed(&post, 4, dst, count);
  kv_put_packed(&post, 5, nbytes, count);
  kv_put_varint(&post, 6 << 3);
  kv_put_varint(&post, peer_rank);
  kv_put_uint(&post, 7, operation);
  if (more) kv_put_bytes_raw(&post, more->data, more->size);
  own_rank_say(rank, 4, &post);
}

bool own_rank_posted(own_rank *rank, uint64_t *moved) {
  kv_writer report = own_rank_hear(rank, 3);
  kv_reader from = kv_reader_of((kvgrpc_bytes){report.data, report.size});
  kv_field field;
  bool done = false, quiesced = false, has_message = false;
  *moved = 0;
  while (kv_next(&from, &field)) {
    if (kv_is(&field, 2, 0)) done = field.value != 0;
    if (kv_is(&field, 3, 0)) *moved = field.value;
    if (kv_is(&field, 5, 2)) has_message = field.bytes.size > 0;
    if (kv_is(&field, 6, 0)) quiesced = field.value != 0;
  }
  CHECK(quiesced && done != has_message);
  kv_writer_free(&report);
  return done;
}
