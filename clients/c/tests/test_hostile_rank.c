/* A rank ends with a typed error, with nothing left open, whatever its lead says. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "check.h"
#include "lying_lead.h"

#define POOL_BYTES 10000
#define SEALS (F_SEAL_SHRINK | F_SEAL_GROW)

typedef struct answer {
  kv_writer message;
  int descriptors[8];
  size_t count;
} answer;

static void say_answer(lying_lead *lead, void *with) {
  const answer *said = with;
  kv_writer first = lead_accept(lead);
  kv_writer_free(&first);
  lead_say_frame(lead, &said->message, said->descriptors, said->count);
}

/* Attaches to a lead that gives that answer, which is let go. */
static kvgrpc_code attach_to(answer *said, kvgrpc_rank **rank, kvgrpc_error *error) {
  lying_lead lead;
  liar liar;
  lead_listen(&lead);
  const kvgrpc_ticket ticket = {lead.path, {"secret", 6}, 0};
  liar_start(&liar, &lead, say_answer, said);
  const kvgrpc_code code = kvgrpc_rank_attach(&ticket, 0, rank, error);
  liar_join(&liar);
  lead_close(&lead);
  for (size_t i = 0; i < said->count; i++) close(said->descriptors[i]);
  kv_writer_free(&said->message);
  return code;
}

static void test_a_pool_that_is_none_is_refused(void) {
  static const struct {
    size_t bytes;
    uint64_t stated;
    int seals;
    uint64_t shared_bytes;
  } rows[] = {
      {POOL_BYTES, POOL_BYTES, 0, POOL_BYTES},             /* its file may shrink */
      {POOL_BYTES, POOL_BYTES, F_SEAL_GROW, POOL_BYTES},   /* the same */
      {POOL_BYTES, POOL_BYTES, SEALS, 0},                  /* no size */
      {POOL_BYTES, POOL_BYTES, SEALS, POOL_BYTES * 2},     /* longer than the file */
      {POOL_BYTES, POOL_BYTES, SEALS, UINT64_MAX},         /* longer than any file */
      {POOL_BYTES, POOL_BYTES, SEALS, UINT64_MAX - 4095},  /* the same, in pages */
      {POOL_BYTES, POOL_BYTES + 1, SEALS, POOL_BYTES},     /* another size behind it */
      {POOL_BYTES, POOL_BYTES, SEALS | F_SEAL_WRITE, POOL_BYTES},
  };
  const int before = open_descriptors();
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    kvgrpc_rank *rank = NULL;
    kvgrpc_error error;
    answer said = {{0}, {lead_pool(rows[i].bytes, rows[i].stated, rows[i].seals)}, 1};
    put_rank_attached(&said.message, rows[i].shared_bytes);
    CHECK_ERROR(attach_to(&said, &rank, &error), KVGRPC_FAILED_PRECONDITION, KV_POOL_KIND_MISMATCH, error);
    CHECK(!rank);
  }
  int ends[2];
  CHECK(!pipe2(ends, O_CLOEXEC));
  const int punched = lead_pool(POOL_BYTES, POOL_BYTES, SEALS); /* A page of it is missing. */
  CHECK(!fallocate(punched, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096));
  const int others[] = {ends[0], punched};
  for (size_t i = 0; i < 2; i++) {
    kvgrpc_rank *rank = NULL;
    kvgrpc_error error;
    answer said = {{0}, {others[i]}, 1};
    put_rank_attached(&said.message, POOL_BYTES);
    CHECK_ERROR(attach_to(&said, &rank, &error), KVGRPC_FAILED_PRECONDITION, KV_POOL_KIND_MISMATCH, error);
  }
  close(ends[1]);
  CHECK(open_descriptors() == before);
}

static void test_descriptors_that_are_missing_or_too_many_are_refused_and_closed(void) {
  const int before = open_descriptors();
  kvgrpc_rank *rank = NULL;
  kvgrpc_error error;
  answer none = {{0}, {0}, 0};
  put_rank_attached(&none.message, POOL_BYTES);
  CHECK_ERROR(attach_to(&none, &rank, &error), KVGRPC_UNAVAILABLE, KV_NO_POOL, error);
  for (size_t count = 2; count <= 8; count++) {
    answer many = {{0}, {0}, count};
    for (size_t i = 0; i < count; i++) many.descriptors[i] = lead_pool(POOL_BYTES, POOL_BYTES, SEALS);
    put_rank_attached(&many.message, POOL_BYTES);
    CHECK_ERROR(attach_to(&many, &rank, &error), KVGRPC_OUT_OF_RANGE, KV_LIMIT_EXCEEDED, error);
  }
  CHECK(!rank && open_descriptors() == before);
}

static void test_an_answer_that_is_none_ends_the_attach(void) {
  static const struct {
    const char *bytes;
    size_t size;
    kvgrpc_code code;
    uint32_t reason;
  } rows[] = {
      {"", 0, KVGRPC_INVALID_ARGUMENT, KV_INVALID_FIELD},             /* empty */
      {"\xff\xff\xff", 3, KVGRPC_INVALID_ARGUMENT, KV_INVALID_FIELD}, /* no message */
      {"\x0a\x00", 2, KVGRPC_INVALID_ARGUMENT, KV_INVALID_FIELD},     /* the answer to a scheduler */
      {"\x22\x00", 2, KVGRPC_INVALID_ARGUMENT, KV_INVALID_FIELD},     /* commands */
      {"\x7a\x00", 2, KVGRPC_INVALID_ARGUMENT, KV_INVALID_FIELD},     /* a kind that nobody knows */
      {"\x12\x02\x10\x80", 4, KVGRPC_INVALID_ARGUMENT, KV_INVALID_FIELD}, /* a size that is cut */
      {"\x2a\x02\x0a\x09", 4, KVGRPC_INVALID_ARGUMENT, KV_INVALID_FIELD}, /* a refusal that is cut */
      {"\x32\x00", 2, KVGRPC_UNAVAILABLE, KV_PEER_LOST},              /* memory is asked of a new rank */
      {"\x3a\x00", 2, KVGRPC_UNAVAILABLE, KV_PEER_LOST},              /* the end */
  };
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    kvgrpc_rank *rank = NULL;
    kvgrpc_error error;
    answer said = {{0}, {0}, 0};
    kv_put_bytes_raw(&said.message, rows[i].bytes, rows[i].size);
    CHECK_ERROR(attach_to(&said, &rank, &error), rows[i].code, rows[i].reason, error);
    CHECK(!rank);
  }
}

static void test_a_refusal_is_the_lead_s(void) {
  answer said = {{0}, {0}, 0};
  const size_t refused = kv_open(&said.message, 5);
  kv_put_text(&said.message, 1, "ALREADY_EXISTS");
  kv_put_uint(&said.message, 2, 54);
  kv_put_text(&said.message, 3, "rank 0 has a worker already");
  kv_close(&said.message, refused);
  kvgrpc_rank *rank = NULL;
  kvgrpc_error error;
  CHECK_ERROR(attach_to(&said, &rank, &error), KVGRPC_ALREADY_EXISTS, 54, error);
  CHECK(!strcmp(error.message, "rank 0 has a worker already"));
  CHECK(!strcmp(kvgrpc_reason_name(error.reason), "ENGINE_ATTACHED"));
}

static void test_no_lead_is_no_crash(void) {
  kvgrpc_rank *rank = NULL;
  kvgrpc_error error;
  const kvgrpc_ticket nobody = {"/nowhere/lead.sock", {"", 0}, 0};
  CHECK_ERROR(kvgrpc_rank_attach(&nobody, 0, &rank, &error), KVGRPC_UNAVAILABLE, KV_PEER_UNREACHABLE, error);
  char path[300];
  memset(path, 'a', sizeof path - 1);
  path[sizeof path - 1] = 0;
  const kvgrpc_ticket longer = {path, {"", 0}, 0};
  CHECK_ERROR(kvgrpc_rank_attach(&longer, 0, &rank, &error), KVGRPC_INVALID_ARGUMENT, KV_INVALID_FIELD, error);
  CHECK(kvgrpc_rank_attach(NULL, 0, &rank, NULL) == KVGRPC_INVALID_ARGUMENT);
  CHECK(kvgrpc_rank_attach(&nobody, 0, NULL, NULL) == KVGRPC_INVALID_ARGUMENT);
}

static void test_memory_that_is_none_is_refused_before_the_lead_hears_of_it(void) {
  char bytes[16];
  const kvgrpc_ticket nobody = {"/nowhere/lead.sock", {"", 0}, 0, sizeof bytes};
  const kvgrpc_memory whole = {bytes, sizeof bytes}, none = {NULL, 16}, empty = {bytes, 0}, part = {bytes, 15};
  kvgrpc_rank *rank = NULL;
  kvgrpc_error error;
  const int before = open_descriptors();
  CHECK_ERROR(kvgrpc_rank_attach_memory(&nobody, 0, &none, 1, &rank, &error), KVGRPC_INVALID_ARGUMENT,
              KV_INVALID_FIELD, error);
  CHECK_ERROR(kvgrpc_rank_attach_memory(&nobody, 0, &empty, 1, &rank, &error), KVGRPC_INVALID_ARGUMENT,
              KV_INVALID_FIELD, error);
  CHECK_ERROR(kvgrpc_rank_attach_memory(&nobody, 0, &whole, 0, &rank, &error), KVGRPC_INVALID_ARGUMENT,
              KV_INVALID_FIELD, error);
  CHECK_ERROR(kvgrpc_rank_attach_memory(&nobody, 0, &part, 1, &rank, &error), KVGRPC_FAILED_PRECONDITION,
              KV_POOL_KIND_MISMATCH, error);
  CHECK_ERROR(kvgrpc_rank_attach_memory(&nobody, 0, &whole, 1, &rank, &error), KVGRPC_UNAVAILABLE,
              KV_PEER_UNREACHABLE, error);
  CHECK(!rank && open_descriptors() == before);
}

/* ---- after the attach */

typedef struct speech {
  const char *bytes;
  size_t size;
} speech;

static void attach_and_say(lying_lead *lead, void *with) {
  const speech *said = with;
  answer good = {{0}, {lead_pool(POOL_BYTES, POOL_BYTES, SEALS)}, 1};
  put_rank_attached(&good.message, POOL_BYTES);
  say_answer(lead, &good);
  close(good.descriptors[0]);
  kv_writer_free(&good.message);
  lead_say(lead, said->bytes, said->size, NULL, 0);
  lead_hang_up(lead);
}

static void test_what_is_no_frame_ends_the_service(void) {
  static const struct {
    speech said;
    kvgrpc_code code;
    uint32_t reason;
  } rows[] = {
      {{"\xff\xff\xff\xff", 4}, KVGRPC_OUT_OF_RANGE, KV_LIMIT_EXCEEDED},   /* 4 GiB */
      {{"\x04\x00\x00\x01", 4}, KVGRPC_OUT_OF_RANGE, KV_LIMIT_EXCEEDED},   /* one byte too long */
      {{"\0\0\0\x02\xff\xff", 6}, KVGRPC_INVALID_ARGUMENT, KV_INVALID_FIELD},
      {{"\0\0\0\x04\x22\x02\x0a\x05", 8}, KVGRPC_INVALID_ARGUMENT, KV_INVALID_FIELD}, /* a command that is cut */
      {{"\0\0\0\x08\x22\x06\x0a\x04\x2a\x02\x0a\x09", 12}, KVGRPC_INVALID_ARGUMENT, KV_INVALID_FIELD},
      {{"\0\0\0\x64\x22", 5}, KVGRPC_UNAVAILABLE, KV_PEER_LOST},           /* death in a frame */
      {{"\0\0", 2}, KVGRPC_UNAVAILABLE, KV_PEER_LOST},                     /* death in a length */
      {{"", 0}, KVGRPC_UNAVAILABLE, KV_PEER_LOST},                         /* death */
      {{"\0\0\0\x02\x3a\x00", 6}, KVGRPC_UNAVAILABLE, KV_PEER_LOST},       /* the end of the engine's life */
      {{"\0\0\0\x00\0\0\0\x02\x7a\x00\0\0\0\x06\x22\x04\x0a\x02\x7a\x00", 20}, KVGRPC_UNAVAILABLE, KV_PEER_LOST},
  };
  const int before = open_descriptors();
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    lying_lead lead;
    liar liar;
    lead_listen(&lead);
    const kvgrpc_ticket ticket = {lead.path, {"secret", 6}, 0};
    liar_start(&liar, &lead, attach_and_say, (void *)&rows[i].said);
    kvgrpc_rank *rank = NULL;
    kvgrpc_error error;
    CHECK(!kvgrpc_rank_attach(&ticket, 0, &rank, &error));
    memset(kvgrpc_rank_memory(rank), 1, kvgrpc_rank_memory_bytes(rank));
    CHECK_ERROR(kvgrpc_rank_serve(rank, &error), rows[i].code, rows[i].reason, error);
    /* The end is told on every call, and the memory is still there. */
    CHECK_ERROR(kvgrpc_rank_step_done(rank, 1, &error), KVGRPC_UNAVAILABLE, KV_PEER_LOST, error);
    CHECK(((char *)kvgrpc_rank_memory(rank))[POOL_BYTES - 1] == 1);
    liar_join(&liar);
    kvgrpc_rank_close(rank);
    lead_close(&lead);
  }
  CHECK(open_descriptors() == before);
}

typedef struct stopper {
  speech nothing;
  kvgrpc_rank *rank; /* Read once the rank has come back, so after it was made. */
} stopper;

/* Dies, takes the rank that comes back, gives no answer, and stops it. */
static void die_and_stop(lying_lead *lead, void *with) {
  stopper *given = with;
  attach_and_say(lead, &given->nothing);
  kv_writer second = lead_accept(lead);
  kv_writer_free(&second);
  kvgrpc_rank_stop(given->rank);
}

static void test_a_stop_ends_the_wait_for_the_next_lead(void) {
  lying_lead lead;
  liar liar;
  stopper given = {{"", 0}, NULL};
  kvgrpc_error error;
  lead_listen(&lead);
  const kvgrpc_ticket ticket = {lead.path, {"secret", 6}, 60};
  liar_start(&liar, &lead, die_and_stop, &given);
  CHECK(!kvgrpc_rank_attach(&ticket, 0, &given.rank, &error));
  CHECK(kvgrpc_rank_serve(given.rank, &error) == KVGRPC_OK);
  CHECK(kvgrpc_rank_serve(given.rank, &error) == KVGRPC_OK); /* Later, too. */
  liar_join(&liar);
  kvgrpc_rank_close(given.rank);
  lead_close(&lead);
}

int main(void) {
  test_a_pool_that_is_none_is_refused();
  test_descriptors_that_are_missing_or_too_many_are_refused_and_closed();
  test_an_answer_that_is_none_ends_the_attach();
  test_a_refusal_is_the_lead_s();
  test_no_lead_is_no_crash();
  test_memory_that_is_none_is_refused_before_the_lead_hears_of_it();
  test_what_is_no_frame_ends_the_service();
  test_a_stop_ends_the_wait_for_the_next_lead();
  return 0;
}
