/* A rank: its memory, its session, and its way back to the next lead. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "rank.h"

/* Delay between attempts to reach a new lead, in milliseconds: its process takes a second to start. */
#define RETRY_MS 50
/* Time for the copy at work after the end of a session, in seconds. */
#define REST_S 2.0

/* ---- the pool */

static kvgrpc_code no_pool(kvgrpc_error *error, const char *why) {
  return kv_fail(error, KVGRPC_FAILED_PRECONDITION, KV_POOL_KIND_MISMATCH,
                 "the descriptor is not a pool to write into: %s", why);
}

/* Maps the pool. A file that could shrink is refused: a read behind its end would kill this process. */
static kvgrpc_code map_pool(kvgrpc_rank *rank, int descriptor, uint64_t shared_bytes, kvgrpc_error *error) {
  struct stat found;
  const size_t page = (size_t)sysconf(_SC_PAGESIZE);
  const int wanted = F_SEAL_SHRINK | F_SEAL_GROW;
  if (descriptor < 0) return kv_fail(error, KVGRPC_UNAVAILABLE, KV_NO_POOL, "the lead sent no memory");
  rank->memory = descriptor;
  const int seals = fcntl(descriptor, F_GET_SEALS);
  if (seals < 0 || (seals & wanted) != wanted) return no_pool(error, "its size may change");
  if (fstat(descriptor, &found) < 0 || !S_ISREG(found.st_mode)) return no_pool(error, "it is no file");
  if (!kv_is_allocated(&found)) return no_pool(error, "it is not allocated in full");
  const uint64_t size = (uint64_t)found.st_size;
  if (size > SIZE_MAX || size < page || shared_bytes == 0 || shared_bytes > size - page ||
      size != (shared_bytes + page - 1) / page * page + page)
    return no_pool(error, "its size is not that of the pool");
  void *mapping = mmap(NULL, (size_t)size, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (mapping == MAP_FAILED) return no_pool(error, strerror(errno));
  rank->mapping = mapping;
  rank->mapped = (size_t)size;
  rank->pool_bytes = (size_t)shared_bytes;
  uint64_t stated; /* Behind the pool: a nonce, then the pool's bytes. */
  memcpy(&stated, rank->mapping + rank->mapped - page + KV_NONCE_BYTES, sizeof stated);
  return stated == shared_bytes ? KVGRPC_OK : no_pool(error, "it states another size");
}

/* ---- attaching, for the first time and again */

/* Returns why the memory may still be accessed; empty: it is at rest. */
static const char *not_at_rest(const kvgrpc_rank *rank) {
  if (!rank->at_rest) return "a data path may still use it";
  return rank->write_count || rank->writes_lost ? "a peer may still write into it" : "";
}

static void put_attach(kv_writer *to, const kvgrpc_rank *rank, bool returns) {
  const size_t attach = kv_open(to, 2);
  kv_put_bytes(to, 1, rank->secret);
  kv_put_uint(to, 2, rank->number);
  kv_put_uint(to, 3, rank->mover != NULL);
  kv_put_uint(to, 4, returns);
  if (returns) kv_put_text(to, 5, not_at_rest(rank));
  kv_close(to, attach);
}

static kvgrpc_code read_attached(const kv_field *answer, uint64_t *shared_bytes, kvgrpc_error *error) {
  kv_reader from = kv_reader_of(answer->bytes);
  kv_field field;
  if (answer->number != 2) from.bad = true;
  while (kv_next(&from, &field))
    if (kv_is(&field, 2, 0)) *shared_bytes = field.value;
  if (from.bad)
    return kv_fail(error, KVGRPC_INVALID_ARGUMENT, KV_INVALID_FIELD, "the lead's answer is none to a rank's attach");
  return KVGRPC_OK;
}

static kvgrpc_code attach(kvgrpc_rank *rank, kv_connection *connection, bool returns, double timeout_s,
                          kvgrpc_error *error) {
  kvgrpc_code code = kv_connect(connection, rank->socket_path, error);
  if (code) return code;
  kv_writer message = {0};
  kv_field answer;
  uint64_t shared_bytes = 0;
  put_attach(&message, rank, returns);
  code = kv_attach(connection, &message, rank->memory, timeout_s, returns ? rank->stop : -1, &answer, error);
  kv_writer_free(&message);
  if (!code) code = read_attached(&answer, &shared_bytes, error);
  if (!code && !returns && !rank->mover) code = map_pool(rank, kv_take_descriptor(connection), shared_bytes, error);
  if (code) kv_disconnect(connection);
  return code;
}

static bool copy_ticket(kvgrpc_rank *rank, const kvgrpc_ticket *ticket) {
  rank->socket_path = strdup(ticket->socket_path);
  rank->secret = kv_own(ticket->secret);
  rank->comes_back_s = ticket->comes_back_s > 0 ? ticket->comes_back_s : 0;
  return rank->socket_path && rank->secret.data;
}

/* Makes a rank that is not attached. */
static kvgrpc_code make(const kvgrpc_ticket *ticket, uint32_t number, kvgrpc_rank **made, kvgrpc_error *error) {
  if (!ticket || !ticket->socket_path)
    return kv_fail(error, KVGRPC_INVALID_ARGUMENT, KV_INVALID_FIELD, "a rank needs a ticket with a socket's path");
  kvgrpc_rank *rank = calloc(1, sizeof *rank);
  if (!rank) return kv_no_memory(error);
  if (pthread_mutex_init(&rank->lock, NULL)) {
    free(rank);
    return kv_no_memory(error);
  }
  rank->number = number;
  rank->memory = -1;
  rank->at_rest = true;
  kv_connection_init(&rank->connection);
  rank->stop = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (rank->stop >= 0 && copy_ticket(rank, ticket)) {
    *made = rank;
    return KVGRPC_OK;
  }
  kvgrpc_rank_close(rank);
  return kv_no_memory(error);
}

/* Attaches a rank for the first time, with its mover or to be given a pool. */
static kvgrpc_code begin(kvgrpc_rank *rank, kvgrpc_rank **made, kvgrpc_error *error) {
  const kvgrpc_code code = attach(rank, &rank->connection, false, KV_ATTACH_TIMEOUT_S, error);
  if (code) kvgrpc_rank_close(rank);
  else *made = rank;
  return code;
}

kvgrpc_code kvgrpc_rank_attach(const kvgrpc_ticket *ticket, uint32_t number, kvgrpc_rank **made, kvgrpc_error *error) {
  kvgrpc_rank *rank;
  const kvgrpc_code code = make(made ? ticket : NULL, number, &rank, error);
  return code ? code : begin(rank, made, error);
}

kvgrpc_code kvgrpc_rank_attach_memory(const kvgrpc_ticket *ticket, uint32_t number, const kvgrpc_memory *memory,
                                      size_t count, kvgrpc_rank **made, kvgrpc_error *error) {
  kvgrpc_rank *rank;
  kvgrpc_error why;
  kvgrpc_code code = make(made ? ticket : NULL, number, &rank, error);
  if (code) return code;
  rank->mover = kv_mover_make(number, memory, count, kv_rank_report, rank, &why);
  if (!rank->mover) {
    code = kv_copy_error(error, &why);
  } else {
    rank->pool_bytes = (size_t)rank->mover->memory.size;
    if (ticket->memory_bytes && ticket->memory_bytes != rank->pool_bytes)
      code = kv_fail(error, KVGRPC_FAILED_PRECONDITION, KV_POOL_KIND_MISMATCH,
                     "this memory has %zu bytes; the pool has %llu on each rank", rank->pool_bytes,
                     (unsigned long long)ticket->memory_bytes);
  }
  if (!code) return begin(rank, made, error);
  kvgrpc_rank_close(rank);
  return code;
}

void *kvgrpc_rank_memory(const kvgrpc_rank *rank) { return rank->mapping; }

size_t kvgrpc_rank_memory_bytes(const kvgrpc_rank *rank) { return rank->pool_bytes; }

/* ---- the lead's commands */

/* Of a lead's commands only this one is for a rank whose memory is shared: the others ask it to move bytes. */
static bool take_shared(kvgrpc_rank *rank, kvgrpc_bytes command) {
  kv_reader from = kv_reader_of(command);
  kv_field field;
  while (kv_next(&from, &field))
    if (kv_is(&field, 5, 2) && !kv_writes_take(rank, field.bytes)) return false;
  return !from.bad;
}

static bool take_commands(kvgrpc_rank *rank, kvgrpc_bytes message) {
  kv_reader batch = kv_reader_of(message);
  kv_field command;
  while (kv_next(&batch, &command)) {
    if (!kv_is(&command, 1, 2)) continue;
    if (!(rank->mover ? kv_mover_command(rank->mover, command.bytes) : take_shared(rank, command.bytes))) return false;
  }
  return !batch.bad;
}

/* Reads one frame. `last`: the engine's life is over. */
static kvgrpc_code take_frame(kvgrpc_rank *rank, kvgrpc_bytes message, bool *last, kvgrpc_error *error) {
  kv_reader from = kv_reader_of(message);
  kv_field field;
  bool right = true;
  while (right && !*last && kv_next(&from, &field)) {
    if (kv_is(&field, 7, 2)) *last = true;
    else if (kv_is(&field, 4, 2)) right = take_commands(rank, field.bytes);
  }
  if (right && !from.bad) return KVGRPC_OK;
  *last = true;
  return kv_fail(error, KVGRPC_INVALID_ARGUMENT, KV_INVALID_FIELD, "the lead sent a frame that cannot be read");
}

/* Takes what the lead says until the session ends. `last`: no other lead takes over. */
static kvgrpc_code obey(kvgrpc_rank *rank, bool *last, kvgrpc_error *error) {
  for (;;) {
    kvgrpc_bytes message;
    kvgrpc_code code = kv_receive(&rank->connection, false, KV_FOREVER, rank->stop, &message, error);
    /* What breaks the rules, or has no memory here, is no lead's death. */
    *last = code && code != KVGRPC_UNAVAILABLE;
    if (!code) code = take_frame(rank, message, last, error);
    if (code) return code;
    if (*last)
      return kv_fail(error, KVGRPC_UNAVAILABLE, KV_PEER_LOST,
                     "the session is over: the scheduler, or another worker, is gone");
  }
}

/* Returns whether a lead can still come: the folder of its socket goes with its engine. */
static bool may_come_back(const kvgrpc_rank *rank) {
  const char *slash = strrchr(rank->socket_path, '/');
  struct stat found;
  if (!slash || slash == rank->socket_path) return true;
  char *folder = strndup(rank->socket_path, (size_t)(slash - rank->socket_path));
  const bool there = folder && !stat(folder, &found);
  free(folder);
  return there;
}

/* Waits for an attempt. Returns false when the rank is stopped. */
static bool pause_before_retry(const kvgrpc_rank *rank) {
  struct pollfd stop = {rank->stop, POLLIN, 0};
  return poll(&stop, 1, RETRY_MS) <= 0;
}

static kvgrpc_code replace_connection(kvgrpc_rank *rank, kv_connection *next, kvgrpc_error *error) {
  pthread_mutex_lock(&rank->lock);
  const kvgrpc_code code = kv_steps_repeat(rank, next, error);
  kv_connection before = rank->connection;
  rank->connection = *next;
  pthread_mutex_unlock(&rank->lock);
  kv_disconnect(&before);
  return code == KVGRPC_UNAVAILABLE ? KVGRPC_OK : code; /* That lead died, too: `obey` sees it. */
}

/* Attaches to the next lead. `error` has the reason why this rank is not back. */
static kvgrpc_code come_back(kvgrpc_rank *rank, kvgrpc_error *error) {
  const double deadline = kv_now() + rank->comes_back_s;
  kvgrpc_code code = KVGRPC_UNAVAILABLE;
  while (kv_now() < deadline && may_come_back(rank)) {
    if (!pause_before_retry(rank)) return kv_fail(error, KVGRPC_CANCELLED, 0, "the caller stopped this");
    kv_connection next;
    code = attach(rank, &next, true, deadline - kv_now(), error);
    if (!code) return replace_connection(rank, &next, error);
    const bool waits =
        code == KVGRPC_UNAVAILABLE || code == KVGRPC_PERMISSION_DENIED || code == KVGRPC_RESOURCE_EXHAUSTED;
    if (!waits) return code;
  }
  return kv_fail(error, KVGRPC_UNAVAILABLE, KV_PEER_LOST, "the session is over: the lead is gone, and no other came");
}

static bool stopped(const kvgrpc_rank *rank) {
  struct pollfd stop = {rank->stop, POLLIN, 0};
  return poll(&stop, 1, 0) > 0;
}

kvgrpc_code kvgrpc_rank_serve(kvgrpc_rank *rank, kvgrpc_error *error) {
  kvgrpc_error why = {0};
  kvgrpc_code code = KVGRPC_OK;
  bool last = false;
  while (!code && !stopped(rank)) {
    code = obey(rank, &last, &why);
    if (code == KVGRPC_CANCELLED) break;
    if (rank->mover) rank->at_rest = kv_mover_end(rank->mover, REST_S) && rank->at_rest;
    if (!last && rank->comes_back_s > 0) code = come_back(rank, &why);
  }
  if (code == KVGRPC_OK || (code == KVGRPC_CANCELLED && stopped(rank))) return KVGRPC_OK;
  pthread_mutex_lock(&rank->lock);
  rank->over = true;
  kv_disconnect(&rank->connection);
  pthread_mutex_unlock(&rank->lock);
  return kv_copy_error(error, &why);
}

void kvgrpc_rank_stop(kvgrpc_rank *rank) {
  const uint64_t one = 1;
  const int before = errno; /* In a signal handler errno is the interrupted code's. */
  while (write(rank->stop, &one, sizeof one) < 0 && errno == EINTR) continue;
  errno = before;
}

void kvgrpc_rank_close(kvgrpc_rank *rank) {
  if (!rank) return;
  pthread_mutex_lock(&rank->lock); /* Threads of the mover report. */
  kv_disconnect(&rank->connection);
  pthread_mutex_unlock(&rank->lock);
  kv_mover_free(rank->mover);
  if (rank->mapping) munmap(rank->mapping, rank->mapped);
  if (rank->memory >= 0) close(rank->memory);
  if (rank->stop >= 0) close(rank->stop);
  kv_writes_free(rank);
  free(rank->layers);
  kv_disown(rank->secret);
  free(rank->socket_path);
  pthread_mutex_destroy(&rank->lock);
  free(rank);
}
