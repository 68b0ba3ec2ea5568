/* A rank takes from peers' processes what is safe, whatever they answer, and keeps nothing of the rest. */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "check.h"
#include "mover.h"
#include "own_rank.h"

static const char *const kShm[] = {"shm", NULL}, *const kCma[] = {"cma", NULL};
static const char kNonce[] = "the nonce of 32 bytes of a pool.";

#define PEER_POOL_BYTES 8192
#define PAGE_BYTES 4096

typedef struct giver {
  int listener;
  int pool; /* -1: it gives none. */
  bool says_nothing; /* The answer is empty. */
} giver;

/* Answers one question with a descriptor, as a peer's process. */
static void give(lying_lead *lead, void *with) {
  const giver *given = with;
  uint8_t question[256];
  lying_lead peer = {.connection = accept4(given->listener, NULL, NULL, SOCK_CLOEXEC)};
  (void)lead;
  CHECK(peer.connection >= 0);
  CHECK(recv(peer.connection, question, sizeof question, 0) == 66); /* Token, challenge, number. */
  lead_say(&peer, "", !given->says_nothing, &given->pool, given->pool >= 0);
  lead_hang_up(&peer);
}

static int reopened(int file, int flags) {
  char path[64];
  snprintf(path, sizeof path, "/proc/self/fd/%d", file);
  const int made = open(path, flags | O_CLOEXEC);
  CHECK(made >= 0);
  close(file);
  return made;
}

static int peer_pool(size_t bytes, int seals, bool allocated, int flags) {
  const int made = memfd_create("peer", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  CHECK(made >= 0 && !ftruncate(made, (off_t)bytes) && (!allocated || !posix_fallocate(made, 0, (off_t)bytes)));
  CHECK(pwrite(made, kNonce, 32, PEER_POOL_BYTES) == 32);
  CHECK(pwrite(made, "KV", 2, 5) == 2);
  CHECK(!seals || !fcntl(made, F_ADD_SEALS, seals));
  return reopened(made, flags);
}

/* A file in huge pages, of which none is taken; -1 where the kernel makes none. */
static int huge_pool(void) {
  const int made = memfd_create("peer", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_HUGETLB);
  if (made < 0) return -1;
  CHECK(!ftruncate(made, 1 << 30) && !fcntl(made, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW));
  return reopened(made, O_RDONLY);
}

/* Makes a socket that peers ask; `name` is as an endpoint says it. */
static int listens(char name[80]) {
  static int made;
  struct sockaddr_un address = {.sun_family = AF_UNIX};
  const int length = snprintf(address.sun_path + 1, 64, "kvgrpc-test-%d-%d", getpid(), made++);
  const int listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  CHECK(!bind(listener, (struct sockaddr *)&address, (socklen_t)(sizeof(sa_family_t) + 1 + (size_t)length)));
  CHECK(!listen(listener, 8));
  snprintf(name, 80, "@%s", address.sun_path + 1);
  return listener;
}

static kv_writer pool_offer(const char *name, const char *nonce) {
  kv_writer endpoint = {0};
  const size_t part = kv_open(&endpoint, 2);
  kv_put_text(&endpoint, 1, name);
  kv_put_text(&endpoint, 2, "a token");
  kv_put_uint(&endpoint, 3, PEER_POOL_BYTES);
  kv_put_text(&endpoint, 4, nonce);
  kv_put_uint(&endpoint, 5, PEER_POOL_BYTES);
  kv_close(&endpoint, part);
  return endpoint;
}

/* Connects to a pool that is given. */
static bool connects(own_rank *rank, giver *giver, const char *name, const char *nonce, char why[256]) {
  kv_writer endpoint = pool_offer(name, nonce);
  liar liar;
  liar_start(&liar, NULL, give, giver);
  const bool connected = own_rank_connect(rank, "P", 1, &endpoint, kShm, why);
  liar_join(&liar);
  kv_writer_free(&endpoint);
  return connected;
}

static void test_only_a_pool_that_cannot_hurt_is_mapped_and_read(void) {
  const int seals = F_SEAL_SHRINK | F_SEAL_GROW;
  const size_t whole = PEER_POOL_BYTES + PAGE_BYTES;
  const int huge = huge_pool();
  const struct {
    int pool;
    const char *nonce, *why; /* NULL: it is right. */
  } rows[] = {
      {-1, kNonce, "something else than a descriptor"},
      {peer_pool(whole, seals, true, O_RDWR), kNonce, "writable"},
      {peer_pool(whole, F_SEAL_GROW, true, O_RDONLY), kNonce, "its size may change"},
      {peer_pool(whole, seals, false, O_RDONLY), kNonce, "not allocated in full"},
      {peer_pool(PEER_POOL_BYTES + 32, 0, true, O_RDONLY), kNonce, "its size may change"},
      {huge, kNonce, huge < 0 ? "descriptor" : "huge pages"},
      {peer_pool(whole, seals, true, O_RDONLY), "another nonce of as many bytes..", "another pool"},
      {peer_pool(whole, seals, true, O_RDONLY), kNonce, NULL},
  };
  own_rank rank;
  char why[256], name[80];
  giver giver = {.listener = listens(name)};
  own_rank_start(&rank, 0);
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    giver.pool = rows[i].pool;
    CHECK(connects(&rank, &giver, name, rows[i].nonce, why) == !rows[i].why);
    CHECK(!rows[i].why || strstr(why, rows[i].why));
    if (giver.pool >= 0) close(giver.pool);
  }
  const uint32_t src[] = {5, PEER_POOL_BYTES - 1}, dst[] = {8191, 0}, nbytes[] = {2, 2};
  uint64_t moved;
  own_rank_post(&rank, "P", 1, 1, src, dst, nbytes, 1, NULL);
  CHECK(own_rank_posted(&rank, &moved) && moved == 2);
  CHECK(*own_rank_at(&rank, 8191) == 'K' && *own_rank_at(&rank, 8192) == 'V');
  own_rank_post(&rank, "P", 1, 1, src, dst, nbytes, 2, NULL); /* One is behind the pool's end. */
  CHECK(!own_rank_posted(&rank, &moved));
  close(giver.listener);
  CHECK(own_rank_end(&rank) == KVGRPC_UNAVAILABLE);
}

static int descriptors_of(pid_t process) {
  char path[64];
  int count = 0;
  snprintf(path, sizeof path, "/proc/%d/fd", process);
  DIR *all = opendir(path);
  CHECK(all);
  while (readdir(all)) count++;
  closedir(all);
  return count;
}

static void test_a_descriptor_that_comes_with_an_empty_answer_is_closed(void) {
  own_rank rank;
  char why[256], name[80], nobody[80];
  giver giver = {.listener = listens(name), .pool = open("/dev/null", O_RDONLY | O_CLOEXEC), .says_nothing = true};
  own_rank_start(&rank, 0);
  close(listens(nobody));
  kv_writer endpoint = pool_offer(nobody, kNonce);
  const int before = descriptors_of(rank.process);
  for (int i = 0; i < 3; i++) CHECK(!connects(&rank, &giver, name, kNonce, why));
  /* The thread that asks is done with an answer once it takes the next question. */
  CHECK(!own_rank_connect(&rank, "P", 1, &endpoint, kShm, why) && strstr(why, "cannot be reached"));
  CHECK(descriptors_of(rank.process) == before);
  kv_writer_free(&endpoint);
  close(giver.pool);
  close(giver.listener);
  CHECK(own_rank_end(&rank) == KVGRPC_UNAVAILABLE);
}

static void test_peers_that_say_nothing_do_not_hold_up_one_that_answers(void) {
  enum { SILENT = 128, HONEST = 1000 }; /* As many as are asked at once. */
  own_rank rank, source;
  char why[256], name[80];
  uint32_t reported = 0;
  int before = 0;
  const int silent = listens(name);
  own_rank_start(&rank, 0);
  own_rank_start(&source, 1);
  kv_writer nothing = pool_offer(name, kNonce), endpoint = own_rank_offer(&source, "D");
  for (uint32_t i = 0; i < SILENT; i++) own_rank_ask_to_connect(&rank, "S", i, &nothing, kShm);
  own_rank_ask_to_connect(&rank, "P", HONEST, &endpoint, kCma);
  for (; !own_rank_connected(&rank, &reported, why); before++)
    CHECK(reported != HONEST && before < SILENT && strstr(why, "no answer"));
  CHECK(reported == HONEST && before < SILENT);
  kv_writer_free(&nothing);
  kv_writer_free(&endpoint);
  close(silent);
  CHECK(own_rank_end(&rank) == KVGRPC_UNAVAILABLE);
  CHECK(own_rank_end(&source) == KVGRPC_UNAVAILABLE);
}

static void hear(void *rank, uint64_t life, const kv_writer *report) {
  (void)life;
  *(bool *)rank = report->failed;
}

static void test_a_report_without_its_reasons_is_no_whole_report(void) {
  bool failed = false;
  kv_mover mover = {.report = hear, .rank = &failed};
  kv_attempt *attempt = calloc(1, sizeof *attempt);
  CHECK(attempt);
  attempt->fd = attempt->end = -1;
  attempt->rejected.failed = true; /* There was no memory for one. */
  kv_attempt_refused(&mover, attempt, "disconnected");
  CHECK(failed);
}

static void test_the_nonce_of_a_closed_rank_is_found_no_more(void) {
  uint8_t bytes[16], before[16], after[16];
  const kvgrpc_memory memory = {bytes, sizeof bytes};
  kvgrpc_error error;
  kv_mover *mover = kv_mover_make(0, &memory, 1, hear, NULL, &error);
  CHECK(mover);
  const uint8_t *half = mover->nonce + 16; /* In the first one the allocator may write. */
  memcpy(before, half, sizeof before);
  struct iovec local = {after, sizeof after}, remote = {(void *)(uintptr_t)half, sizeof after};
  kv_mover_free(mover);
  /* The memory was freed, and only a read by address, as a peer's, still finds it. */
  CHECK(process_vm_readv(getpid(), &local, 1, &remote, 1, 0) == sizeof after);
  CHECK(memcmp(before, after, sizeof after));
}

int main(void) {
  signal(SIGPIPE, SIG_IGN);
  test_only_a_pool_that_cannot_hurt_is_mapped_and_read();
  test_a_descriptor_that_comes_with_an_empty_answer_is_closed();
  test_peers_that_say_nothing_do_not_hold_up_one_that_answers();
  test_a_report_without_its_reasons_is_no_whole_report();
  test_the_nonce_of_a_closed_rank_is_found_no_more();
  return 0;
}
