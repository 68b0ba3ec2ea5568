/* Commands of a lead with some of their bytes changed, cut or repeated: reports, never a crash or a byte elsewhere.
 *
 * `test_fuzz_commands SECONDS SEED` runs longer, and elsewhere; the seed is printed first. */
#define _GNU_SOURCE
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "check.h"
#include "connection.h"
#include "mover.h"

#define ROUNDS 20000
#define MEMORY_BYTES 4096
#define PEERS 0xa5

static uint64_t state;
static _Atomic unsigned long reports;

static uint32_t pick(uint32_t below) {
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return (uint32_t)(state >> 33) % below;
}

static void count_report(void *rank, uint64_t life, const kv_writer *report) {
  (void)rank;
  (void)life;
  CHECK(!report->failed && !report->not_text);
  reports++;
}

static void put_numbers(kv_writer *to, uint32_t field) {
  uint32_t rows[4];
  const size_t count = pick(4);
  for (size_t i = 0; i < count; i++) rows[i] = pick(3) ? pick(MEMORY_BYTES) : pick(UINT32_MAX);
  kv_put_packed(to, field, rows, count);
}

/* Columns of one length, of runs that lie within the memory. */
static void put_runs(kv_writer *to) {
  uint32_t rows[3];
  const size_t count = 1 + pick(3);
  for (uint32_t field = 3; field < 6; field++) {
    for (size_t i = 0; i < count; i++) rows[i] = field < 5 ? pick(MEMORY_BYTES / 2) : 1 + pick(64);
    kv_put_packed(to, field, rows, count);
  }
}

static void put_sum(kv_writer *to) {
  kv_put_text(to, 1, "s");
  for (uint32_t field = 2; field < 5; field++) put_numbers(to, field);
}

static void put_post(kv_writer *to) {
  kv_put_text(to, 1, "p");
  kv_put_text(to, 2, "P");
  if (pick(2)) put_runs(to);
  else for (uint32_t field = 3; field < 6; field++) put_numbers(to, field);
  kv_put_uint(to, 6, pick(3));
  const uint32_t operation = pick(4);
  kv_put_uint(to, 7, operation);
  if (!pick(3)) {
    const size_t sum = kv_open(to, 8);
    put_sum(to);
    kv_close(to, sum);
  }
  if (operation != 3) return;
  const size_t repack = kv_open(to, 9), strip = kv_open(to, 1);
  for (uint32_t field = 1; field < 6; field++) put_numbers(to, field);
  kv_put_uint(to, 6, pick(64));
  kv_close(to, strip);
  kv_put_uint(to, 2, pick(MEMORY_BYTES));
  kv_close(to, repack);
}

static void put_connect(kv_writer *to, const kv_mover *mover) {
  static const char *const paths[] = {"shm", "cma", "nixl"};
  char name[KV_SOCKET_NAME_BYTES + 1];
  snprintf(name, sizeof name, "@%s", pick(2) ? mover->socket_name : "kvgrpc-nobody");
  kv_put_text(to, 1, "P");
  const size_t endpoint = kv_open(to, 2), part = kv_open(to, 2 + pick(2)), process = kv_open(to, 1);
  kv_put_text(to, 1, name);
  kv_put_text(to, 2, "token");
  kv_close(to, process);
  const size_t segment = kv_open(to, 2);
  kv_put_uint(to, 1, pick(UINT32_MAX));
  kv_put_uint(to, 2, pick(UINT32_MAX));
  kv_close(to, segment);
  kv_close(to, part);
  kv_close(to, endpoint);
  for (uint32_t i = pick(4); i; i--) kv_put_text(to, 3, paths[pick(3)]);
  kv_put_uint(to, 4, pick(3));
}

static void put_command(kv_writer *to, const kv_mover *mover) {
  const uint32_t kind = 1 + pick(11);
  const size_t body = kv_open(to, kind);
  if (kind == 2) put_connect(to, mover);
  else if (kind == 4) put_post(to);
  else if (kind == 8) put_sum(to);
  else kv_put_text(to, 1, "P");
  kv_close(to, body);
}

static void change(uint8_t *data, size_t *size) {
  for (uint32_t times = pick(3); times && *size; times--) {
    const size_t at = pick((uint32_t)*size);
    if (pick(4)) data[at] = (uint8_t)pick(256);
    else *size = at;
  }
}

/* Connects a rank to memory of this process, as if it were a peer's: postings then copy. */
static void link_here(kv_mover *mover, uint8_t *memory) {
  kv_link *link = calloc(1, sizeof *link);
  const kv_segment whole = {(uint64_t)(uintptr_t)memory, MEMORY_BYTES, 1, 0};
  CHECK(link && !kv_memory_make(&link->source, &whole, 1));
  link->peer = kv_own((kvgrpc_bytes){"P", 1});
  link->holders = 1;
  link->process.pid = getpid();
  link->process.end = (int)syscall(SYS_pidfd_open, getpid(), 0);
  CHECK(link->process.end >= 0);
  link->process.nonce_address = whole.address;
  pthread_mutex_lock(&mover->lock);
  link->next = mover->links;
  mover->links = link;
  mover->link_count++;
  pthread_mutex_unlock(&mover->lock);
}

int main(int count, char **arguments) {
  const double seconds = count > 1 ? atof(arguments[1]) : 0;
  const uint64_t seed = count > 2 ? strtoull(arguments[2], NULL, 10) : 1;
  state = seed * 0x9e3779b97f4a7c15u + 1;
  fprintf(stderr, "seed %llu\n", (unsigned long long)seed);
  uint8_t *source = calloc(1, MEMORY_BYTES), *own = calloc(1, MEMORY_BYTES);
  const kvgrpc_memory memory[] = {{own, 1000}, {own + 1000, MEMORY_BYTES - 1000}};
  CHECK(source && own);
  /* The start is the peer's nonce; no other byte of it is zero. */
  memset(source + KV_NONCE_BYTES, PEERS, MEMORY_BYTES - KV_NONCE_BYTES);
  kv_mover *mover = kv_mover_make(0, memory, 2, count_report, NULL, NULL);
  CHECK(mover);
  const double end = kv_now() + seconds;
  long rounds = 0, read = 0;
  for (; rounds < ROUNDS || kv_now() < end; rounds++) {
    kv_writer command = {0};
    if (!pick(16)) link_here(mover, source);
    put_command(&command, mover);
    if (pick(2)) change(command.data, &command.size);
    read += kv_mover_command(mover, (kvgrpc_bytes){command.data, command.size});
    kv_writer_free(&command);
    if (!pick(500)) CHECK(kv_mover_end(mover, 60));
  }
  kv_mover_free(mover);
  CHECK(memchr(own, PEERS, MEMORY_BYTES)); /* Some postings copied. */
  free(source);
  free(own);
  printf("%ld rounds, %ld commands, %lu reports\n", rounds, read, (unsigned long)reports);
  return 0;
}
