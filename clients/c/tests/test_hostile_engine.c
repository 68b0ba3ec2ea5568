/* A scheduler ends with a typed error, with nothing left open, whatever its lead says. */
#define _GNU_SOURCE
#include <string.h>
#include <unistd.h>

#include "check.h"
#include "session.h"

static const uint32_t kToken = 1;
static const kvgrpc_content kContent = {.token_ids = &kToken, .token_count = 1};

static void attach(lying_lead *lead, void *with) {
  const int count = *(const int *)with;
  int page[3];
  kv_writer first = lead_accept(lead), answer = {0};
  kv_writer_free(&first);
  put_engine_attached(&answer);
  for (int i = 0; i < count; i++) page[i] = lead_pool(4096, 4096, 0);
  lead_say_frame(lead, &answer, page, (size_t)count);
  for (int i = 0; i < count; i++) close(page[i]);
  kv_writer_free(&answer);
}

static void test_an_attach_leaves_nothing_open(void) {
  const int before = open_descriptors();
  for (int descriptors = 0; descriptors < 3; descriptors++) {
    lying_lead lead;
    liar liar;
    lead_listen(&lead);
    liar_start(&liar, &lead, attach, &descriptors);
    kvgrpc_engine *engine = NULL;
    kvgrpc_error error;
    const kvgrpc_attach_options options = {.socket_path = lead.path};
    const kvgrpc_code code = kvgrpc_engine_attach(&options, &engine, &error);
    liar_join(&liar);
    if (descriptors < 2) {
      CHECK(code == KVGRPC_OK);
      CHECK(!strcmp(kvgrpc_engine_id(engine), "engine") && kvgrpc_engine_incarnation(engine) == 7);
      CHECK(!strcmp(kvgrpc_engine_address(engine), "127.0.0.1:1"));
      CHECK(kvgrpc_engine_ticket(engine)->secret.size == 8);
    } else {
      CHECK_ERROR(code, KVGRPC_OUT_OF_RANGE, KV_LIMIT_EXCEEDED, error);
    }
    kvgrpc_engine_close(engine);
    lead_close(&lead);
  }
  CHECK(open_descriptors() == before);
}

static void test_what_is_no_event_ends_the_session_for_good(void) {
  static const struct {
    const char *bytes;
    size_t size;
    kvgrpc_code code;
    uint32_t reason;
  } rows[] = {
      {"\xff\xff\xff\xff", 4, KVGRPC_OUT_OF_RANGE, KV_LIMIT_EXCEEDED},
      {"\0\0\0\x01\xff", 5, KVGRPC_INVALID_ARGUMENT, KV_INVALID_FIELD},
      {"\0\0\0\x03\x1a\x01\x0a", 7, KVGRPC_INVALID_ARGUMENT, KV_INVALID_FIELD},             /* a batch that is cut */
      {"\0\0\0\x05\x1a\x03\x0a\x01\x2a", 9, KVGRPC_INVALID_ARGUMENT, KV_INVALID_FIELD},     /* an event that is cut */
      {"\0\0\0\x07\x1a\x05\x0a\x03\x2a\x01\x08", 11, KVGRPC_INVALID_ARGUMENT, KV_INVALID_FIELD}, /* an answer */
      {"\0\0\0\x07\x1a\x05\x0a\x03\x3a\x01\x1a", 11, KVGRPC_INVALID_ARGUMENT, KV_INVALID_FIELD}, /* layers */
      {"\0\0\0\x07\x1a\x05\x0a\x03\x4a\x01\x0a", 11, KVGRPC_INVALID_ARGUMENT, KV_INVALID_FIELD}, /* a wanted push */
      {"\0\0\0\x07\x1a\x05\x0a\x03\x1a\x01\x1a", 11, KVGRPC_INVALID_ARGUMENT, KV_INVALID_FIELD}, /* a failure */
      {"\0\0\0\x02\x3a\x00", 6, KVGRPC_UNAVAILABLE, KV_PEER_LOST},
      {"\0\0\0\x09\x1a", 5, KVGRPC_UNAVAILABLE, KV_PEER_LOST},
      {"", 0, KVGRPC_UNAVAILABLE, KV_PEER_LOST},
      /* What only a newer lead knows is no harm. */
      {"\0\0\0\0\0\0\0\x08\x1a\x06\x0a\x04\x82\x01\x01z\0\0\0\x02\x7a\0", 22, KVGRPC_UNAVAILABLE, KV_PEER_LOST},
  };
  const int before = open_descriptors();
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    lying_lead lead;
    kvgrpc_engine *engine = session_open(&lead);
    kvgrpc_event event;
    kvgrpc_error error;
    kvgrpc_transfer made = 0;
    lead_say(&lead, rows[i].bytes, rows[i].size, NULL, 0);
    lead_hang_up(&lead);
    CHECK_ERROR(kvgrpc_engine_next(engine, 5, &event, &error), rows[i].code, rows[i].reason, error);
    CHECK_ERROR(kvgrpc_engine_next(engine, 5, &event, &error), rows[i].code, rows[i].reason, error);
    CHECK_ERROR(kvgrpc_pull(engine, NULL, &kContent, (kvgrpc_bytes){"g", 1}, NULL, &made, &error), rows[i].code,
                rows[i].reason, error);
    CHECK_ERROR(kvgrpc_engine_flush(engine, &error), rows[i].code, rows[i].reason, error);
    CHECK_ERROR(kvgrpc_push(engine, NULL, &kContent, NULL, &made, &error), rows[i].code, rows[i].reason, error);
    kvgrpc_engine_close(engine);
  }
  CHECK(open_descriptors() == before);
}

static void test_events_of_strangers_are_no_news(void) {
  lying_lead lead;
  kvgrpc_engine *engine = session_open(&lead);
  kvgrpc_event event;
  for (uint32_t kind = 2; kind <= 8; kind++) {
    if (kind == 5) continue;
    kv_writer frame = {0};
    size_t marks[2];
    const size_t row = session_event(&frame, kind, marks, kind);
    kv_put_text(&frame, 1, "t-unknown");
    session_say(&lead, &frame, marks, row);
  }
  const uint64_t strangers[] = {1, UINT64_MAX, (uint64_t)1 << 32, 1ull << 32 | 1};
  for (size_t i = 0; i < sizeof strangers / sizeof *strangers; i++)
    session_name(&lead, 9, strangers[i], KV_CALL_PULL_BLOCKS, "t");
  CHECK(!kvgrpc_engine_next(engine, 0, &event, NULL) && event.kind == KVGRPC_EVENT_NONE);
  lead_hang_up(&lead);
  kvgrpc_engine_close(engine);
}

static void test_a_lead_that_gives_names_that_are_none_or_twice_breaks_nothing(void) {
  lying_lead lead;
  kvgrpc_engine *engine = session_open(&lead);
  kvgrpc_event event;
  kvgrpc_transfer made[3];
  for (int i = 0; i < 3; i++) {
    CHECK(!kvgrpc_pull(engine, NULL, &kContent, (kvgrpc_bytes){"g", 1}, NULL, &made[i], NULL));
    session_name(&lead, 1, made[i], KV_CALL_PULL_BLOCKS, i == 2 ? "" : "the same");
  }
  for (int round = 0; round < 3; round++) {
    kv_writer frame = {0};
    size_t marks[2];
    const size_t row = session_event(&frame, 2, marks, 4);
    kv_put_text(&frame, 1, "the same");
    session_say(&lead, &frame, marks, row);
  }
  for (int i = 0; i < 2; i++)
    CHECK(!kvgrpc_engine_next(engine, 0, &event, NULL) && event.kind == KVGRPC_EVENT_BLOCKS_RETURNED);
  CHECK(!kvgrpc_engine_next(engine, 0, &event, NULL) && event.kind == KVGRPC_EVENT_NONE);
  kv_writer frame = {0};
  size_t marks[2];
  const size_t answer = session_event(&frame, 5, marks, 5);
  kv_put_uint(&frame, 1, made[2]);
  const size_t reply = kv_open(&frame, KV_CALL_PULL_BLOCKS), named = kv_open(&frame, 2);
  kv_put_bytes(&frame, 1, (kvgrpc_bytes){"\0x", 2});
  kv_close(&frame, named);
  kv_close(&frame, reply);
  session_say(&lead, &frame, marks, answer);
  kvgrpc_error error;
  CHECK(!kvgrpc_pull(engine, NULL, &kContent, (kvgrpc_bytes){"g", 1}, NULL, &made[0], NULL));
  CHECK_ERROR(kvgrpc_engine_next(engine, 0, &event, &error), KVGRPC_INVALID_ARGUMENT, KV_INVALID_FIELD, error);
  lead_hang_up(&lead);
  kvgrpc_engine_close(engine);
}

static void test_a_frame_that_comes_byte_by_byte_is_one_frame(void) {
  lying_lead lead;
  kvgrpc_engine *engine = session_open(&lead);
  kvgrpc_event event;
  static const char said[] = "\0\0\0\x08\x1a\x06\x0a\x04\x08\x03\x4a\x00";
  for (size_t i = 0; i + 1 < sizeof said; i++) {
    CHECK(!kvgrpc_engine_next(engine, 0, &event, NULL) && event.kind == KVGRPC_EVENT_NONE);
    lead_say(&lead, said + i, 1, NULL, 0);
  }
  CHECK(!kvgrpc_engine_next(engine, 5, &event, NULL) && event.kind == KVGRPC_EVENT_PUSH_WANTED);
  lead_hang_up(&lead);
  kvgrpc_engine_close(engine);
}

static void test_what_a_lead_said_before_it_died_is_heard(void) {
  lying_lead lead;
  kvgrpc_engine *engine = session_open(&lead);
  kvgrpc_event event;
  kvgrpc_error error;
  kvgrpc_transfer made = 0;
  CHECK(!kvgrpc_pull(engine, NULL, &kContent, (kvgrpc_bytes){"g", 1}, NULL, &made, NULL));
  session_name(&lead, 1, made, KV_CALL_PULL_BLOCKS, "t");
  kv_writer frame = {0};
  size_t marks[2];
  const size_t row = session_event(&frame, 2, marks, 2);
  kv_put_text(&frame, 1, "t");
  session_say(&lead, &frame, marks, row);
  lead_hang_up(&lead);
  CHECK(!kvgrpc_engine_next(engine, 5, &event, &error) && event.kind == KVGRPC_EVENT_RECEIVED);
  CHECK_ERROR(kvgrpc_engine_next(engine, 5, &event, &error), KVGRPC_UNAVAILABLE, KV_PEER_LOST, error);
  kvgrpc_engine_close(engine);
}

int main(void) {
  test_an_attach_leaves_nothing_open();
  test_what_is_no_event_ends_the_session_for_good();
  test_events_of_strangers_are_no_news();
  test_a_lead_that_gives_names_that_are_none_or_twice_breaks_nothing();
  test_a_frame_that_comes_byte_by_byte_is_one_frame();
  test_what_a_lead_said_before_it_died_is_heard();
  return 0;
}
