/* A rank: its pool, its steps, and its way back to the next lead. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "connection.h"

/* Delay between attempts to reach a new lead, in milliseconds: its process takes a second to start. */
#define RETRY_MS 50
#define NONCE_BYTES 32
/* Maximum number of accesses whose names are kept; with more, the memory is not proved to be at rest. */
#define WRITES_MAX 65536
#define LAYERS_MAX 65536

typedef struct layers_report {
  uint64_t step;
  uint32_t first;
  uint32_t count;
} layers_report;

struct kvgrpc_rank {
  uint32_t number;
  char *socket_path;
  uint8_t *secret;
  size_t secret_bytes;
  double comes_back_s;

  int memory; /* The pool's file, which the next lead asks for. */
  uint8_t *mapping;
  size_t mapped;
  size_t pool_bytes;

  pthread_mutex_t lock; /* Held while `connection` is sent to or replaced, and for the steps. */
  kv_connection connection;
  bool over; /* The engine's life is over for this rank. */
  uint64_t done;
  layers_report *layers;
  size_t layer_count;

  int stop; /* An eventfd. */
  char **writes; /* Open accesses by which peers may write into the memory. Only the serving thread looks. */
  size_t write_count;
  bool writes_lost;
};

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
  memcpy(&stated, rank->mapping + rank->mapped - page + NONCE_BYTES, sizeof stated);
  return stated == shared_bytes ? KVGRPC_OK : no_pool(error, "it states another size");
}

/* ---- steps */

static void put_step(kv_writer *to, uint64_t step, const layers_report *layers) {
  const size_t frame = kv_open(to, 4), report = kv_open(to, 1), row = kv_open(to, 4);
  kv_put_uint(to, 1, step);
  if (layers) {
    const size_t range = kv_open(to, 2);
    kv_put_uint(to, 1, layers->first);
    kv_put_uint(to, 2, layers->count);
    kv_close(to, range);
  }
  kv_close(to, row);
  kv_close(to, report);
  kv_close(to, frame);
}

static kvgrpc_code send_step(kv_connection *connection, uint64_t step, const layers_report *layers,
                             kvgrpc_error *error) {
  kv_writer message = {0}, frame = {0};
  put_step(&message, step, layers);
  kvgrpc_code code = kv_frame_of(&message, &frame, error);
  if (!code) code = kv_send(connection, frame.data, frame.size, error);
  kv_writer_free(&message);
  kv_writer_free(&frame);
  return code;
}

/* Notes a report that the next lead must get, since its count of steps begins at 0. */
static kvgrpc_code note_step(kvgrpc_rank *rank, uint64_t step, const layers_report *layers, kvgrpc_error *error) {
  if (layers) {
    if (layers->step <= rank->done) return KVGRPC_OK;
    if (rank->layer_count == LAYERS_MAX)
      return kv_fail(error, KVGRPC_OUT_OF_RANGE, KV_LIMIT_EXCEEDED, "%d layers are reported, but no step since then",
                     LAYERS_MAX);
    layers_report *rows = realloc(rank->layers, (rank->layer_count + 1) * sizeof *rows);
    if (!rows) return kv_no_memory(error);
    rank->layers = rows;
    rank->layers[rank->layer_count++] = *layers;
    return KVGRPC_OK;
  }
  if (step > rank->done) rank->done = step;
  size_t kept = 0;
  for (size_t i = 0; i < rank->layer_count; i++)
    if (rank->layers[i].step > rank->done) rank->layers[kept++] = rank->layers[i];
  rank->layer_count = kept;
  return KVGRPC_OK;
}

static kvgrpc_code report_step(kvgrpc_rank *rank, uint64_t step, const layers_report *layers, kvgrpc_error *error) {
  pthread_mutex_lock(&rank->lock);
  kvgrpc_code code = note_step(rank, step, layers, error);
  if (!code) {
    kvgrpc_error lost;
    code = send_step(&rank->connection, step, layers, &lost);
    const bool comes_back = !rank->over && rank->comes_back_s > 0;
    if (code == KVGRPC_UNAVAILABLE && comes_back) code = KVGRPC_OK;
    if (code) kv_copy_error(error, &lost);
  }
  pthread_mutex_unlock(&rank->lock);
  return code;
}

kvgrpc_code kvgrpc_rank_step_done(kvgrpc_rank *rank, uint64_t step, kvgrpc_error *error) {
  return report_step(rank, step, NULL, error);
}

kvgrpc_code kvgrpc_rank_layers_done(kvgrpc_rank *rank, uint64_t step, uint32_t first, uint32_t count,
                                    kvgrpc_error *error) {
  const layers_report layers = {step, first, count};
  if (!count) return kv_fail(error, KVGRPC_INVALID_ARGUMENT, KV_INVALID_FIELD, "a range of layers has at least one");
  return report_step(rank, step, &layers, error);
}

/* ---- attaching, for the first time and again */

static void put_attach(kv_writer *to, const kvgrpc_rank *rank, bool returns, bool at_rest) {
  const size_t attach = kv_open(to, 2);
  kv_put_bytes(to, 1, (kvgrpc_bytes){rank->secret, rank->secret_bytes});
  kv_put_uint(to, 2, rank->number);
  kv_put_uint(to, 4, returns);
  kv_put_text(to, 5, at_rest ? "" : "a peer may still write into it");
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
  put_attach(&message, rank, returns, !rank->write_count && !rank->writes_lost);
  code = kv_attach(connection, &message, rank->memory, timeout_s, returns ? rank->stop : -1, &answer, error);
  kv_writer_free(&message);
  if (!code) code = read_attached(&answer, &shared_bytes, error);
  if (!code && !returns) code = map_pool(rank, kv_take_descriptor(connection), shared_bytes, error);
  if (code) kv_disconnect(connection);
  return code;
}

static bool copy_ticket(kvgrpc_rank *rank, const kvgrpc_ticket *ticket) {
  rank->socket_path = strdup(ticket->socket_path);
  rank->secret = malloc(ticket->secret.size ? ticket->secret.size : 1);
  if (!rank->socket_path || !rank->secret) return false;
  if (ticket->secret.size) memcpy(rank->secret, ticket->secret.data, ticket->secret.size);
  rank->secret_bytes = ticket->secret.size;
  rank->comes_back_s = ticket->comes_back_s > 0 ? ticket->comes_back_s : 0;
  return true;
}

kvgrpc_code kvgrpc_rank_attach(const kvgrpc_ticket *ticket, uint32_t number, kvgrpc_rank **made, kvgrpc_error *error) {
  if (!ticket || !ticket->socket_path || !made)
    return kv_fail(error, KVGRPC_INVALID_ARGUMENT, KV_INVALID_FIELD, "a rank needs a ticket with a socket's path");
  kvgrpc_rank *rank = calloc(1, sizeof *rank);
  if (!rank) return kv_no_memory(error);
  if (pthread_mutex_init(&rank->lock, NULL)) {
    free(rank);
    return kv_no_memory(error);
  }
  rank->number = number;
  rank->memory = -1;
  kv_connection_init(&rank->connection);
  rank->stop = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  kvgrpc_code code = rank->stop < 0 || !copy_ticket(rank, ticket) ? kv_no_memory(error) : KVGRPC_OK;
  if (!code) code = attach(rank, &rank->connection, false, KV_ATTACH_TIMEOUT_S, error);
  if (code) kvgrpc_rank_close(rank);
  else *made = rank;
  return code;
}

void *kvgrpc_rank_memory(const kvgrpc_rank *rank) { return rank->mapping; }

size_t kvgrpc_rank_memory_bytes(const kvgrpc_rank *rank) { return rank->pool_bytes; }

/* ---- the lead's commands */

static void forget_write(kvgrpc_rank *rank, const char *access) {
  for (size_t i = 0; i < rank->write_count; i++) {
    if (strcmp(rank->writes[i], access)) continue;
    free(rank->writes[i]);
    rank->writes[i] = rank->writes[--rank->write_count];
    return;
  }
}

static void note_write(kvgrpc_rank *rank, const char *access) {
  forget_write(rank, access);
  char **writes = NULL, *name = NULL;
  if (rank->write_count < WRITES_MAX) writes = realloc(rank->writes, (rank->write_count + 1) * sizeof *writes);
  if (writes) rank->writes = writes;
  if (writes) name = strdup(access);
  if (name) writes[rank->write_count++] = name;
  else rank->writes_lost = true;
}

static bool take_expect(kvgrpc_rank *rank, kvgrpc_bytes message) {
  kv_reader from = kv_reader_of(message);
  kv_field field;
  kvgrpc_bytes access = {0};
  bool open = false, writes = false;
  while (kv_next(&from, &field)) {
    if (kv_is(&field, 1, 2)) access = field.bytes;
    if (kv_is(&field, 2, 0)) open = field.value != 0;
    if (kv_is(&field, 3, 0)) writes = field.value != 0;
  }
  if (from.bad || access.size >= KVGRPC_ID_BYTES) return false;
  char name[KVGRPC_ID_BYTES];
  kv_copy_text(name, sizeof name, access);
  if (writes && open) note_write(rank, name);
  else if (writes) forget_write(rank, name);
  return true;
}

/* Of a lead's commands only this one is for a rank whose memory is shared: the others ask it to move bytes. */
static bool take_commands(kvgrpc_rank *rank, kvgrpc_bytes message) {
  kv_reader batch = kv_reader_of(message);
  kv_field command, field;
  while (kv_next(&batch, &command)) {
    if (!kv_is(&command, 1, 2)) continue;
    kv_reader from = kv_reader_of(command.bytes);
    while (kv_next(&from, &field))
      if (kv_is(&field, 5, 2) && !take_expect(rank, field.bytes)) return false;
    if (from.bad) return false;
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
  kvgrpc_code code = KVGRPC_OK;
  pthread_mutex_lock(&rank->lock);
  if (rank->done) code = send_step(next, rank->done, NULL, error);
  for (size_t i = 0; !code && i < rank->layer_count; i++)
    code = send_step(next, rank->layers[i].step, &rank->layers[i], error);
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
  kv_disconnect(&rank->connection);
  if (rank->mapping) munmap(rank->mapping, rank->mapped);
  if (rank->memory >= 0) close(rank->memory);
  if (rank->stop >= 0) close(rank->stop);
  while (rank->write_count) free(rank->writes[--rank->write_count]);
  free(rank->writes);
  free(rank->layers);
  free(rank->secret);
  free(rank->socket_path);
  pthread_mutex_destroy(&rank->lock);
  free(rank);
}
