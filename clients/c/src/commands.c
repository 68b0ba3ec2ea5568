/* A lead's commands: what each begins, and what it is answered where it is over at once. */
#include <stdlib.h>
#include <string.h>

#include "mover.h"

/* Maximum number of data paths that a lead allows, as in the report on them. */
#define ALLOWED_MAX 64
/* Fields of RankCommand. */
enum {
  COMMAND_OFFER = 1,
  COMMAND_CONNECT = 2,
  COMMAND_DISCONNECT = 3,
  COMMAND_POST = 4,
  COMMAND_AWAIT_END = 6,
  COMMAND_REKEY = 7,
  COMMAND_SUM = 8,
  COMMAND_COPY_OUT = 9,
  COMMAND_SEND = 10
};

static bool is_name(const kv_field *field, uint32_t number) {
  return kv_is(field, number, 2) && field->bytes.size <= KV_NAME_BYTES_MAX;
}

static void say(kv_mover *mover, kv_writer *made, size_t row) {
  kv_close(made, row);
  mover->report(mover->rank, kv_mover_life(mover), made);
  kv_writer_free(made);
}

/* ---- offers */

static void put_segments(kv_writer *to, const kv_memory *memory) {
  for (size_t i = 0; i < memory->count; i++) {
    const size_t segment = kv_open(to, 2);
    kv_put_uint(to, 1, memory->segments[i].address);
    kv_put_uint(to, 2, memory->segments[i].size);
    kv_put_uint(to, 3, memory->segments[i].kind);
    kv_close(to, segment);
  }
}

/* Offers reading of this process; without memory for a token, nothing. */
static void put_offer(kv_mover *mover, kv_writer *to, kvgrpc_bytes peer) {
  char name[KV_SOCKET_NAME_BYTES + 1] = "@";
  uint8_t secret[KV_TOKEN_BYTES];
  strcat(name, mover->socket_name);
  pthread_mutex_lock(&mover->lock);
  const kv_token *token = kv_token_mint(mover, peer);
  if (token) memcpy(secret, kv_token_secret(token), sizeof secret);
  pthread_mutex_unlock(&mover->lock);
  kv_put_uint(to, 1, mover->number);
  if (!token) return;
  const size_t cma = kv_open(to, 3), process = kv_open(to, 1);
  kv_put_text(to, 1, name);
  kv_put_bytes(to, 2, (kvgrpc_bytes){secret, sizeof secret});
  kv_close(to, process);
  put_segments(to, &mover->memory);
  kv_close(to, cma);
}

static bool take_offer(kv_mover *mover, kvgrpc_bytes message) {
  kv_reader from = kv_reader_of(message);
  kv_field field;
  kvgrpc_bytes key = {0}, peer = {0};
  while (kv_next(&from, &field)) {
    if (kv_is(&field, 1, 2)) key = field.bytes;
    if (kv_is(&field, 2, 2)) peer = field.bytes;
  }
  if (from.bad || key.size > KV_NAME_BYTES_MAX || peer.size > KV_NAME_BYTES_MAX) return false;
  kv_writer made = {0};
  const size_t row = kv_open(&made, 1);
  kv_put_bytes(&made, 1, key);
  const size_t endpoint = kv_open(&made, 2);
  put_offer(mover, &made, peer);
  kv_close(&made, endpoint);
  say(mover, &made, row);
  return true;
}

/* ---- connecting */

static void take_token(uint8_t into[KV_TOKEN_BYTES], kvgrpc_bytes token) {
  memset(into, 0, KV_TOKEN_BYTES); /* One of another length is no token of the peer's. */
  if (token.size) memcpy(into, token.data, token.size < KV_TOKEN_BYTES ? token.size : KV_TOKEN_BYTES);
}

static bool read_shm(kv_endpoint *into, kvgrpc_bytes message) {
  kv_reader from = kv_reader_of(message);
  kv_field field;
  into->given[KV_SHM] = true;
  while (kv_next(&from, &field)) {
    if (kv_is(&field, 1, 2)) kv_copy_text(into->socket[KV_SHM], KV_SOCKET_NAME_BYTES, field.bytes);
    if (kv_is(&field, 2, 2)) take_token(into->token[KV_SHM], field.bytes);
    if (kv_is(&field, 3, 0)) into->shm_bytes = field.value;
    if (kv_is(&field, 4, 2)) {
      into->shm_nonce_right = field.bytes.size == KV_NONCE_BYTES;
      if (into->shm_nonce_right) memcpy(into->shm_nonce, field.bytes.data, KV_NONCE_BYTES);
    }
    if (kv_is(&field, 5, 0)) into->shm_nonce_offset = field.value;
  }
  return !from.bad;
}

static bool read_segment(kv_segment *into, kvgrpc_bytes message) {
  kv_reader from = kv_reader_of(message);
  kv_field field;
  while (kv_next(&from, &field)) {
    if (kv_is(&field, 1, 0)) into->address = field.value;
    if (kv_is(&field, 2, 0)) into->size = field.value;
    if (kv_is(&field, 3, 0)) into->kind = field.value > UINT32_MAX ? UINT32_MAX : (uint32_t)field.value;
    if (kv_is(&field, 4, 0)) into->device = (uint32_t)field.value;
  }
  return !from.bad;
}

static bool read_process(kv_endpoint *into, kvgrpc_bytes message) {
  kv_reader from = kv_reader_of(message);
  kv_field field;
  while (kv_next(&from, &field)) {
    if (kv_is(&field, 1, 2)) kv_copy_text(into->socket[KV_CMA], KV_SOCKET_NAME_BYTES, field.bytes);
    if (kv_is(&field, 2, 2)) take_token(into->token[KV_CMA], field.bytes);
  }
  return !from.bad;
}

static bool read_cma(kv_endpoint *into, kvgrpc_bytes message) {
  kv_reader from = kv_reader_of(message);
  kv_field field;
  size_t count = 0;
  into->given[KV_CMA] = true;
  while (kv_next(&from, &field)) count += kv_is(&field, 2, 2);
  if (from.bad || count > KV_SEGMENTS_MAX || into->segments) return false;
  into->segments = calloc(count ? count : 1, sizeof *into->segments);
  if (!into->segments) return false;
  from = kv_reader_of(message);
  while (kv_next(&from, &field)) {
    if (kv_is(&field, 1, 2) && !read_process(into, field.bytes)) return false;
    if (kv_is(&field, 2, 2) && !read_segment(&into->segments[into->segment_count++], field.bytes)) return false;
  }
  return true;
}

static bool read_endpoint(kv_endpoint *into, kvgrpc_bytes message) {
  kv_reader from = kv_reader_of(message);
  kv_field field;
  while (kv_next(&from, &field)) {
    if (kv_is(&field, 2, 2) && !read_shm(into, field.bytes)) return false;
    if (kv_is(&field, 3, 2) && !read_cma(into, field.bytes)) return false;
  }
  return !from.bad;
}

static bool is_text(kvgrpc_bytes bytes, const char *text) {
  return kv_same(bytes, (kvgrpc_bytes){text, strlen(text)});
}

static void allow(kv_attempt *attempt, kvgrpc_bytes name) {
  const bool shm = is_text(name, "shm"), known = shm || is_text(name, "cma");
  const kv_path path = shm ? KV_SHM : KV_CMA;
  for (size_t i = 0; known && i < attempt->path_count; i++)
    if (attempt->paths[i] == path) return;
  if (known) attempt->paths[attempt->path_count++] = path;
  else kv_attempt_put_rejected(attempt, name, "this rank has no such data path");
}

static bool read_connect(kv_attempt *attempt, kvgrpc_bytes message) {
  kv_reader from = kv_reader_of(message);
  kv_field field;
  size_t allowed = 0;
  while (kv_next(&from, &field)) {
    if (is_name(&field, 1)) {
      kv_disown(attempt->peer);
      attempt->peer = kv_own(field.bytes);
      if (!attempt->peer.data) return false;
    } else if (kv_is(&field, 1, 2)) {
      return false;
    }
    if (kv_is(&field, 2, 2) && !read_endpoint(&attempt->endpoint, field.bytes)) return false;
    if (kv_is(&field, 3, 2)) {
      if (allowed++ == ALLOWED_MAX || field.bytes.size > KV_NAME_BYTES_MAX) return false;
      allow(attempt, field.bytes);
    }
    if (kv_is(&field, 4, 0)) attempt->rank = (uint32_t)field.value;
    if (kv_is(&field, 5, 0)) attempt->number = field.value;
  }
  return !from.bad;
}

static bool take_connect(kv_mover *mover, kvgrpc_bytes message) {
  kv_attempt *attempt = calloc(1, sizeof *attempt);
  if (!attempt) return false;
  attempt->fd = attempt->end = -1;
  attempt->life = kv_mover_life(mover);
  attempt->rank = mover->number;
  if (read_connect(attempt, message)) return kv_peers_connect(mover, attempt);
  kv_attempt_free(attempt);
  return false;
}

static bool take_disconnect(kv_mover *mover, kvgrpc_bytes message) {
  kv_reader from = kv_reader_of(message);
  kv_field field;
  kvgrpc_bytes peer = {0};
  uint32_t rank = 0;
  bool one = false, watch = false, gone = false;
  while (kv_next(&from, &field)) {
    if (kv_is(&field, 1, 2)) peer = field.bytes;
    if (kv_is(&field, 2, 0)) rank = (uint32_t)field.value, one = true;
    if (kv_is(&field, 3, 0)) watch = field.value != 0;
    if (kv_is(&field, 4, 0)) gone = field.value != 0;
  }
  if (from.bad) return false;
  kv_peers_disconnect(mover, peer, one ? &rank : NULL, watch, gone);
  return true;
}

/* Reads the first text of a command, or none. */
static bool read_first(kvgrpc_bytes message, kvgrpc_bytes *text) {
  kv_reader from = kv_reader_of(message);
  kv_field field;
  *text = (kvgrpc_bytes){0};
  while (kv_next(&from, &field))
    if (kv_is(&field, 1, 2)) *text = field.bytes;
  return !from.bad && text->size <= KV_NAME_BYTES_MAX;
}

/* Answers a command that this rank cannot perform, in a report whose name is its first field. */
static bool answer(kv_mover *mover, kvgrpc_bytes message, uint32_t report, uint32_t field, const char *why) {
  kvgrpc_bytes name;
  if (!read_first(message, &name)) return false;
  kv_writer made = {0};
  const size_t row = kv_open(&made, report);
  kv_put_bytes(&made, 1, name);
  kv_put_text(&made, field, why);
  say(mover, &made, row);
  return true;
}

static bool perform(kv_mover *mover, const kv_field *command) {
  kvgrpc_bytes peer;
  kv_writer made = {0};
  if (command->wire != 2) return true;
  switch (command->number) {
    case COMMAND_OFFER:
      return take_offer(mover, command->bytes);
    case COMMAND_CONNECT:
      return take_connect(mover, command->bytes);
    case COMMAND_DISCONNECT:
      return take_disconnect(mover, command->bytes);
    case COMMAND_POST:
      return kv_copier_post(mover, command->bytes);
    case COMMAND_SUM:
      return kv_copier_sum(mover, command->bytes);
    case COMMAND_AWAIT_END:
      if (!read_first(command->bytes, &peer)) return false;
      kv_peers_await_end(mover, peer);
      return true;
    case COMMAND_REKEY: /* By no path of this rank a peer writes: nothing has to end. */
      say(mover, &made, kv_open(&made, 6));
      return true;
    case COMMAND_COPY_OUT:
      return answer(mover, command->bytes, 8, 2, "this rank's memory is no mirror");
    case COMMAND_SEND:
      return answer(mover, command->bytes, 10, 3, "this rank has no data path by which it sends");
    default: /* Peers read without turns of this rank, which expects nothing; and a newer lead may say more. */
      return true;
  }
}

bool kv_mover_command(kv_mover *mover, kvgrpc_bytes command) {
  kv_reader from = kv_reader_of(command);
  kv_field field, last = {0};
  while (kv_next(&from, &field)) last = field; /* Of a choice the last one counts. */
  return !from.bad && perform(mover, &last);
}
