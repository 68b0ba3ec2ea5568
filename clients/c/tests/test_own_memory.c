/* Ranks in processes of their own move bytes of their own memory, as their lead commands, and nothing else. */
#define _GNU_SOURCE
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>

#include "check.h"
#include "memory.h"
#include "own_rank.h"

static const char *const kCma[] = {"shm", "nixl", "cma", NULL};
enum { READ = 1, WRITE = 2, REPACK = 3 };

/* In place of libc's, as it is in a locale that is not UTF-8. */
char *strerror(int number) {
  static char text[] = "Datei oder Verzeichnis f\xfcr ...";
  (void)number;
  return text;
}

typedef struct pair {
  own_rank source, destination;
} pair;

static void pair_start(pair *pair) {
  char why[256];
  own_rank_start(&pair->source, 0);
  own_rank_start(&pair->destination, 3);
  own_rank_fill(&pair->source, 5);
  kv_writer endpoint = own_rank_offer(&pair->source, "D");
  CHECK(own_rank_connect(&pair->destination, "P", 0, &endpoint, kCma, why));
  CHECK(!strcmp(why, "cma"));
  kv_writer_free(&endpoint);
}

static void pair_end(pair *pair) {
  CHECK(own_rank_end(&pair->source) == KVGRPC_UNAVAILABLE);
  CHECK(own_rank_end(&pair->destination) == KVGRPC_UNAVAILABLE);
}

static uint32_t crc_of(own_rank *rank, size_t offset, size_t size) {
  uint32_t value = 0;
  for (size_t i = 0; i < size; i++) value = kv_crc32c(value, own_rank_at(rank, offset + i), 1);
  return value;
}

static void check_sum(own_rank *rank, uint32_t wanted) {
  kv_writer report = own_rank_hear(rank, 7);
  kv_reader from = kv_reader_of((kvgrpc_bytes){report.data, report.size});
  kv_field field;
  bool found = false;
  while (kv_next(&from, &field)) {
    if (!kv_is(&field, 2, 2)) continue;
    const uint8_t *at = field.bytes.data;
    found = field.bytes.size == 4 &&
            ((uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24) == wanted;
  }
  CHECK(found);
  kv_writer_free(&report);
}

static void test_runs_move_across_segments_and_are_summed_up(void) {
  pair pair;
  pair_start(&pair);
  const uint32_t src[] = {8000, 0, 4}, dst[] = {100, 8190, 16384}, nbytes[] = {1000, 7, 0};
  const uint32_t offsets[] = {100, 8190}, lengths[] = {1000, 7}, counts[] = {2};
  kv_writer more = {0};
  const size_t sum = kv_open(&more, 8);
  kv_put_text(&more, 1, "sum");
  kv_put_packed(&more, 2, offsets, 2);
  kv_put_packed(&more, 3, lengths, 2);
  kv_put_packed(&more, 4, counts, 1);
  kv_close(&more, sum);
  uint64_t moved;
  own_rank_post(&pair.destination, "P", 0, READ, src, dst, nbytes, 3, &more);
  CHECK(own_rank_posted(&pair.destination, &moved) && moved == 1007);
  for (size_t run = 0; run < 3; run++)
    for (size_t i = 0; i < nbytes[run]; i++)
      CHECK(*own_rank_at(&pair.destination, dst[run] + i) == *own_rank_at(&pair.source, src[run] + i));
  CHECK(!*own_rank_at(&pair.destination, 99) && !*own_rank_at(&pair.destination, 1100));
  uint32_t wanted = crc_of(&pair.source, 8000, 1000);
  for (size_t i = 0; i < 7; i++) wanted = kv_crc32c(wanted, own_rank_at(&pair.source, i), 1);
  check_sum(&pair.destination, wanted);
  /* The source is asked for the same by a command. */
  kv_writer ask = {0};
  const uint32_t there[] = {8000, 0};
  kv_put_text(&ask, 1, "sum");
  kv_put_packed(&ask, 2, there, 2);
  kv_put_packed(&ask, 3, lengths, 2);
  kv_put_packed(&ask, 4, counts, 1);
  own_rank_say(&pair.source, 8, &ask);
  check_sum(&pair.source, wanted);
  kv_writer_free(&more);
  pair_end(&pair);
}

static void put_strip(kv_writer *to, const uint32_t rows[4][2], uint32_t run_bytes, uint32_t src, uint32_t dst) {
  const size_t strip = kv_open(to, 1);
  kv_put_packed(to, 1, &src, 1);
  kv_put_packed(to, 2, &dst, 1);
  for (uint32_t i = 0; i < 3; i++) kv_put_packed(to, 3 + i, rows[i], 2);
  kv_put_uint(to, 6, run_bytes);
  kv_close(to, strip);
}

static void test_strips_go_from_the_buffer_to_their_places(void) {
  static const uint32_t rows[4][2] = {{2, 3}, {30, 10}, {4096, 100}}; /* shape, steps in the buffer and the memory */
  static const uint32_t far[4][2] = {{2, 3}, {30, 10}, {16384, 100}}, wide[4][2] = {{2, 3}, {60, 10}, {0, 100}};
  const uint32_t src[] = {1000}, dst[] = {0}, nbytes[] = {60};
  pair pair;
  uint64_t moved;
  pair_start(&pair);
  for (size_t round = 0; round < 3; round++) {
    kv_writer more = {0};
    const size_t repack = kv_open(&more, 9);
    put_strip(&more, round == 0 ? far : round == 1 ? wide : rows, 10, 0, 8100);
    kv_put_uint(&more, 2, 60);
    kv_close(&more, repack);
    own_rank_post(&pair.destination, "P", 0, REPACK, src, dst, nbytes, 1, &more);
    CHECK(own_rank_posted(&pair.destination, &moved) == (round == 2));
    CHECK(moved == (round == 2 ? 60 : 0));
    if (round < 2)
      for (size_t i = 0; i < OWN_BYTES; i++) CHECK(!*own_rank_at(&pair.destination, i));
    kv_writer_free(&more);
  }
  for (size_t i = 0; i < 60; i++) {
    const size_t at = 8100 + i / 30 * 4096 + i % 30 / 10 * 100 + i % 10;
    CHECK(*own_rank_at(&pair.destination, at) == *own_rank_at(&pair.source, 1000 + i));
  }
  pair_end(&pair);
}

static void test_a_posting_that_makes_no_sense_moves_nothing(void) {
  static const struct {
    const char *peer;
    uint32_t peer_rank, operation, src, dst, nbytes;
    size_t count;
  } rows[] = {
      {"P", 0, READ, OWN_BYTES - 3, 0, 4, 1},  /* behind the source's end */
      {"P", 0, READ, 0, OWN_BYTES - 3, 4, 1},  /* behind this memory's end */
      {"P", 0, READ, UINT32_MAX, 0, 1, 1},
      {"P", 0, READ, 0, 0, UINT32_MAX, 1},
      {"P", 0, WRITE, 0, 0, 4, 1},
      {"P", 1, READ, 0, 0, 4, 1},              /* another rank of the peer */
      {"Q", 0, READ, 0, 0, 4, 1},              /* another peer */
  };
  pair pair;
  uint64_t moved;
  pair_start(&pair);
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    own_rank_post(&pair.destination, rows[i].peer, rows[i].peer_rank, rows[i].operation, &rows[i].src, &rows[i].dst,
                  &rows[i].nbytes, 1, NULL);
    CHECK(!own_rank_posted(&pair.destination, &moved) && !moved);
  }
  for (size_t i = 0; i < OWN_BYTES; i++) CHECK(!*own_rank_at(&pair.destination, i));
  pair_end(&pair);
}

static void test_a_disconnected_rank_is_not_read_until_it_is_connected_again(void) {
  const uint32_t zero = 0, size = 64;
  pair pair;
  char why[256];
  uint64_t moved;
  pair_start(&pair);
  kv_writer end = {0}, endpoint = own_rank_offer(&pair.source, "D");
  CHECK(!own_rank_connect(&pair.destination, "P", 0, &endpoint, kCma, why)); /* It is connected. */
  kv_put_text(&end, 1, "P");
  own_rank_say(&pair.destination, 3, &end);
  own_rank_post(&pair.destination, "P", 0, READ, &zero, &zero, &size, 1, NULL);
  CHECK(!own_rank_posted(&pair.destination, &moved));
  CHECK(own_rank_connect(&pair.destination, "P", 0, &endpoint, kCma, why));
  own_rank_post(&pair.destination, "P", 0, READ, &zero, &zero, &size, 1, NULL);
  CHECK(own_rank_posted(&pair.destination, &moved) && moved == size);
  kv_put_text(&end, 1, "P");
  own_rank_say(&pair.destination, 3, &end);
  CHECK(!own_rank_connect(&pair.destination, "P", 0, &endpoint, kCma, why)); /* The token was used. */
  CHECK(strstr(why, "used or expired"));
  kv_writer_free(&endpoint);
  pair_end(&pair);
}

static void test_the_end_of_a_peer_s_process_is_reported_and_fails_what_follows(void) {
  const uint32_t zero = 0, size = 64;
  pair pair;
  uint64_t moved;
  pair_start(&pair);
  kv_writer ask = {0};
  kv_put_text(&ask, 1, "P");
  own_rank_say(&pair.destination, 6, &ask);
  CHECK(!kill(pair.source.process, SIGKILL));
  kv_writer report = own_rank_hear(&pair.destination, 5);
  kv_writer_free(&report);
  own_rank_post(&pair.destination, "P", 0, READ, &zero, &zero, &size, 1, NULL);
  CHECK(!own_rank_posted(&pair.destination, &moved));
  CHECK(own_rank_end(&pair.source) == KVGRPC_CANCELLED);
  CHECK(own_rank_end(&pair.destination) == KVGRPC_UNAVAILABLE);
}

static void test_a_reason_in_another_encoding_ends_no_session(void) {
  const uint32_t zero = 0, size = 64;
  pair pair;
  uint64_t moved;
  pair_start(&pair);
  CHECK(!kill(pair.source.process, SIGKILL));
  CHECK(own_rank_end(&pair.source) == KVGRPC_CANCELLED); /* Its process is gone. */
  own_rank_post(&pair.destination, "P", 0, READ, &zero, &zero, &size, 1, NULL);
  CHECK(!own_rank_posted(&pair.destination, &moved));
  CHECK(own_rank_end(&pair.destination) == KVGRPC_UNAVAILABLE);
}

static void test_a_rank_comes_back_and_what_an_earlier_lead_offered_is_void(void) {
  const uint32_t zero = 0, size = 64;
  pair pair;
  char why[256];
  uint64_t moved;
  pair_start(&pair);
  kv_writer before = own_rank_offer(&pair.source, "Q");
  lead_hang_up(&pair.source.lead);
  own_rank_attach(&pair.source, true);
  own_rank_post(&pair.destination, "P", 0, READ, &zero, &zero, &size, 1, NULL);
  CHECK(!own_rank_posted(&pair.destination, &moved)); /* Its nonce is another one. */
  CHECK(!own_rank_connect(&pair.destination, "Q", 0, &before, kCma, why) && strstr(why, "used or expired"));
  kv_writer endpoint = own_rank_offer(&pair.source, "D");
  CHECK(own_rank_connect(&pair.destination, "Q", 0, &endpoint, kCma, why));
  own_rank_post(&pair.destination, "Q", 0, READ, &zero, &zero, &size, 1, NULL);
  CHECK(own_rank_posted(&pair.destination, &moved) && moved == size);
  kv_writer_free(&before);
  kv_writer_free(&endpoint);
  pair_end(&pair);
}

static void test_an_offer_that_was_changed_proves_nothing(void) {
  own_rank source, destination;
  char why[256];
  own_rank_start(&source, 0);
  own_rank_start(&destination, 1);
  kv_writer honest = own_rank_offer(&source, "D"), own = own_rank_offer(&destination, "D");
  /* The last byte is of a segment's kind, and the third from the end of its length. */
  for (size_t back = 1; back <= 3; back += 2) {
    kv_writer changed = {0}, offered = own_rank_offer(&source, "D");
    kv_put_bytes_raw(&changed, offered.data, offered.size);
    changed.data[changed.size - back] ^= 3;
    CHECK(!own_rank_connect(&destination, "P", 0, &changed, kCma, why) && strstr(why, "another answer"));
    kv_writer_free(&changed);
    kv_writer_free(&offered);
  }
  CHECK(!own_rank_connect(&destination, "P", 0, &own, kCma, why) && strstr(why, "this very process"));
  CHECK(own_rank_connect(&destination, "P", 0, &honest, kCma, why));
  kv_writer_free(&honest);
  kv_writer_free(&own);
  CHECK(own_rank_end(&source) == KVGRPC_UNAVAILABLE);
  CHECK(own_rank_end(&destination) == KVGRPC_UNAVAILABLE);
}

static void test_a_long_sum_ends_with_its_session(void) {
  enum { PIECES = 1 << 20 }; /* One sum of 16 GiB: the whole memory, again and again. */
  static uint32_t offsets[PIECES], lengths[PIECES];
  const uint32_t zero = 0, size = 64, counts[] = {PIECES};
  pair pair;
  uint64_t moved;
  kv_writer more = {0};
  pair_start(&pair);
  for (size_t i = 0; i < PIECES; i++) lengths[i] = OWN_BYTES;
  const size_t sum = kv_open(&more, 8);
  kv_put_text(&more, 1, "sum");
  kv_put_packed(&more, 2, offsets, PIECES);
  kv_put_packed(&more, 3, lengths, PIECES);
  kv_put_packed(&more, 4, counts, 1);
  kv_close(&more, sum);
  own_rank_post(&pair.destination, "P", 0, READ, &zero, &zero, &size, 1, &more);
  CHECK(own_rank_posted(&pair.destination, &moved)); /* The sum follows. */
  lead_hang_up(&pair.destination.lead);
  own_rank_attach(&pair.destination, true); /* Its memory is at rest. */
  kv_writer_free(&more);
  pair_end(&pair);
}

static void test_commands_that_cannot_be_read_end_the_service(void) {
  static const struct {
    uint32_t field;
    const char *bytes;
    size_t size;
  } rows[] = {
      {1, "\x0a\x09", 2},                 /* an offer that is cut */
      {2, "\x12\x02\x1a\x05", 4},         /* an endpoint that is cut */
      {3, "\x0a\x01", 2},
      {4, "\x0a\x01" "a", 3},             /* a posting in no direction */
      {4, "\x38\x09", 2},                 /* in one that nobody knows */
      {4, "\x38\x03", 2},                 /* a re-pack without strips */
      {4, "\x38\x01\x4a\x00", 4},         /* strips without a re-pack */
      {4, "\x38\x01\x1a\x01\x80", 5},     /* a number that is cut */
      {6, "\x0a\x01", 2},
      {8, "\x12\x02\x80\x80", 4},
  };
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    own_rank rank;
    kv_writer message = {0};
    own_rank_start(&rank, 0);
    kv_put_bytes_raw(&message, rows[i].bytes, rows[i].size);
    own_rank_say(&rank, rows[i].field, &message);
    kv_writer nothing = lead_read(&rank.lead);
    CHECK(!nothing.size);
    CHECK(own_rank_end(&rank) == KVGRPC_INVALID_ARGUMENT);
  }
}

int main(void) {
  signal(SIGPIPE, SIG_IGN);
  test_runs_move_across_segments_and_are_summed_up();
  test_strips_go_from_the_buffer_to_their_places();
  test_a_posting_that_makes_no_sense_moves_nothing();
  test_a_disconnected_rank_is_not_read_until_it_is_connected_again();
  test_the_end_of_a_peer_s_process_is_reported_and_fails_what_follows();
  test_a_reason_in_another_encoding_ends_no_session();
  test_a_rank_comes_back_and_what_an_earlier_lead_offered_is_void();
  test_an_offer_that_was_changed_proves_nothing();
  test_a_long_sum_ends_with_its_session();
  test_commands_that_cannot_be_read_end_the_service();
  return 0;
}
