/* What a scheduler is told of its transfers: one end each, in an order that it can rely on. */
#define _GNU_SOURCE
#include <string.h>

#include "check.h"
#include "session.h"

static const uint32_t kTokens[] = {1, 2, 3};
static const kvgrpc_content kContent = {.token_ids = kTokens, .token_count = 3};
static const uint32_t kIds[] = {4, 5, 6, 9};
static const kvgrpc_blocks kBlocks = {0, kIds, 4};
static const kvgrpc_labels kLabels = {.transfer_key = {"0123456789abcdef", 16}, .request_id = "r"};

static kvgrpc_event next(kvgrpc_engine *engine, kvgrpc_event_kind wanted) {
  kvgrpc_event event;
  kvgrpc_error error;
  CHECK(!kvgrpc_engine_next(engine, wanted == KVGRPC_EVENT_NONE ? 0 : 5, &event, &error));
  CHECK(event.kind == wanted);
  return event;
}

static void end(kvgrpc_engine *engine, lying_lead *lead) {
  lead_hang_up(lead);
  kvgrpc_engine_close(engine);
}

/* Says that a call is refused. */
static void refuse(lying_lead *lead, kvgrpc_transfer call, uint32_t reason) {
  kv_writer frame = {0};
  size_t marks[2];
  const size_t answer = session_event(&frame, 1, marks, 5);
  kv_put_uint(&frame, 1, call);
  const size_t failure = kv_open(&frame, 2);
  kv_put_uint(&frame, 1, reason);
  kv_put_text(&frame, 6, "no");
  kv_close(&frame, failure);
  kv_put_text(&frame, 13, "FAILED_PRECONDITION");
  session_say(lead, &frame, marks, answer);
}

/* Says an event about a named transfer. */
static void say_of(lying_lead *lead, uint32_t kind, const char *id) {
  kv_writer frame = {0};
  size_t marks[2];
  const size_t row = session_event(&frame, 2, marks, kind);
  kv_put_text(&frame, 1, id);
  if (kind == 2 || kind == 6) kv_put_uint(&frame, 3, 48);
  session_say(lead, &frame, marks, row);
}

static void test_blocks_are_named_as_runs(void) {
  lying_lead lead;
  kvgrpc_engine *engine = session_open(&lead);
  kvgrpc_transfer pull = 0;
  CHECK(!kvgrpc_pull(engine, NULL, &kContent, (kvgrpc_bytes){"g", 1}, NULL, &pull, NULL));
  CHECK(!kvgrpc_pull_start(engine, pull, &kBlocks, 1, 0, 0, NULL));
  const kv_transfer *found = kv_transfer_of(&engine->transfers, pull);
  CHECK(memmem(found->start.data, found->start.size, "\x0a\x02\x04\x09\x12\x02\x03\x01", 8));
  end(engine, &lead);
}

static void test_a_pull_gives_its_blocks_once_it_is_named(void) {
  lying_lead lead;
  kvgrpc_engine *engine = session_open(&lead);
  kvgrpc_transfer pull = 0;
  kvgrpc_error error;
  CHECK(!kvgrpc_pull(engine, &kLabels, &kContent, (kvgrpc_bytes){"g", 1}, NULL, &pull, &error));
  CHECK(!kvgrpc_pull_start(engine, pull, &kBlocks, 1, 0, 0, &error));
  CHECK_ERROR(kvgrpc_pull_start(engine, pull, &kBlocks, 1, 0, 0, &error), KVGRPC_FAILED_PRECONDITION,
              KV_TRANSFER_EXISTS, error);
  next(engine, KVGRPC_EVENT_NONE);
  kv_writer asked = lead_read(&lead);
  CHECK(!memmem(asked.data, asked.size, "t-1", 3));
  kv_writer_free(&asked);
  session_name(&lead, 1, pull, KV_CALL_PULL_BLOCKS, "t-1");
  next(engine, KVGRPC_EVENT_NONE);
  kv_writer given = lead_read(&lead);
  CHECK(memmem(given.data, given.size, "\x1a\x03t-1", 5) && memmem(given.data, given.size, "\x0a\x02\x04\x09", 4));
  kv_writer_free(&given);
  say_of(&lead, 2, "t-1");
  CHECK(next(engine, KVGRPC_EVENT_RECEIVED).use_tokens == 48);
  CHECK_ERROR(kvgrpc_cancel(engine, pull, "", &error), KVGRPC_FAILED_PRECONDITION, KV_TRANSFER_ENDED, error);
  end(engine, &lead);
}

static void test_a_refused_call_fails_and_returns_its_blocks(void) {
  lying_lead lead;
  kvgrpc_engine *engine = session_open(&lead);
  kvgrpc_transfer made = 0;
  CHECK(!kvgrpc_hand_over(engine, &kLabels, &kContent, &kBlocks, 1, NULL, &made, NULL));
  CHECK(!kvgrpc_engine_flush(engine, NULL));
  refuse(&lead, made, 4);
  const kvgrpc_event failed = next(engine, KVGRPC_EVENT_FAILED);
  CHECK(failed.transfer == made && failed.failure.reason == 4 && failed.failure.code == KVGRPC_FAILED_PRECONDITION);
  CHECK(!strcmp(failed.failure.message, "no"));
  CHECK(next(engine, KVGRPC_EVENT_BLOCKS_RETURNED).transfer == made);
  next(engine, KVGRPC_EVENT_NONE);
  end(engine, &lead);
}

static void test_a_part_that_is_refused_ends_the_push_when_its_last_call_is_answered(void) {
  lying_lead lead;
  kvgrpc_engine *engine = session_open(&lead);
  kvgrpc_transfer push = 0;
  CHECK(!kvgrpc_push(engine, &kLabels, &kContent, NULL, &push, NULL));
  const kvgrpc_part part = {.blocks = &kBlocks, .rows = 1, .last = true};
  CHECK(!kvgrpc_push_part(engine, push, &part, NULL) && !kvgrpc_push_part(engine, push, &part, NULL));
  refuse(&lead, push, 3);
  next(engine, KVGRPC_EVENT_FAILED);
  next(engine, KVGRPC_EVENT_NONE);
  session_name(&lead, 3, push, KV_CALL_FINISHED_BLOCKS, "t-9");
  next(engine, KVGRPC_EVENT_NONE);
  kv_writer first = lead_read(&lead), cancels = lead_read(&lead);
  CHECK(memmem(cancels.data, cancels.size, "t-9", 3)); /* It has begun after all, and is cancelled. */
  kv_writer_free(&first);
  kv_writer_free(&cancels);
  say_of(&lead, 3, "t-9");
  say_of(&lead, 4, "t-9");
  CHECK(next(engine, KVGRPC_EVENT_BLOCKS_RETURNED).transfer == push);
  end(engine, &lead);
}

/* Returns a push whose only part was refused, and that has told its failure. */
static kvgrpc_transfer refused_push(kvgrpc_engine *engine, lying_lead *lead, const kvgrpc_part *part) {
  kvgrpc_transfer push = 0;
  CHECK(!kvgrpc_push(engine, &kLabels, &kContent, NULL, &push, NULL));
  CHECK(!kvgrpc_push_part(engine, push, part, NULL) && !kvgrpc_engine_flush(engine, NULL));
  refuse(lead, push, 3);
  next(engine, KVGRPC_EVENT_FAILED);
  return push;
}

static void test_a_part_after_a_refusal_keeps_its_blocks_until_it_is_answered(void) {
  lying_lead lead;
  kvgrpc_engine *engine = session_open(&lead);
  const kvgrpc_part part = {.blocks = &kBlocks, .rows = 1, .last = true};
  const kvgrpc_transfer push = refused_push(engine, &lead, &part);
  CHECK(!kvgrpc_push_part(engine, push, &part, NULL));
  next(engine, KVGRPC_EVENT_NONE);
  refuse(&lead, push, 3);
  CHECK(next(engine, KVGRPC_EVENT_BLOCKS_RETURNED).transfer == push);
  end(engine, &lead);
}

static void test_a_cancel_after_a_refusal_leaves_the_return_of_the_blocks(void) {
  lying_lead lead;
  kvgrpc_engine *engine = session_open(&lead);
  const kvgrpc_part part = {.blocks = &kBlocks, .rows = 1, .last = true};
  const kvgrpc_transfer push = refused_push(engine, &lead, &part);
  CHECK(!kvgrpc_cancel(engine, push, "", NULL));
  CHECK(next(engine, KVGRPC_EVENT_BLOCKS_RETURNED).transfer == push);
  end(engine, &lead);
}

static void test_a_cancel_waits_for_the_name(void) {
  lying_lead lead;
  kvgrpc_engine *engine = session_open(&lead);
  kvgrpc_transfer made = 0, idle = 0;
  kvgrpc_error error;
  CHECK(!kvgrpc_reserve(engine, &kLabels, &kContent, &kBlocks, 1, NULL, &made, &error));
  CHECK(!kvgrpc_cancel(engine, made, "gone", &error) && !kvgrpc_cancel(engine, made, "gone", &error));
  session_name(&lead, 1, made, KV_CALL_RESERVE_BLOCKS, "t-2");
  const kvgrpc_event granted = next(engine, KVGRPC_EVENT_GRANTED);
  CHECK(granted.grant.size == 7 && !memcmp(granted.grant.data, "a grant", 7) && !strcmp(granted.transfer_id, "t-2"));
  next(engine, KVGRPC_EVENT_NONE);
  kv_writer reserved = lead_read(&lead), cancels = lead_read(&lead);
  CHECK(memmem(cancels.data, cancels.size, "\x12\x03t-2", 5) && memmem(cancels.data, cancels.size, "gone", 4));
  kv_writer_free(&reserved);
  kv_writer_free(&cancels);
  /* A push of which nothing was sent is over at once. */
  CHECK(!kvgrpc_push(engine, &kLabels, &kContent, NULL, &idle, &error) && !kvgrpc_cancel(engine, idle, "", &error));
  CHECK_ERROR(kvgrpc_push_fail(engine, idle, "", &error), KVGRPC_FAILED_PRECONDITION, KV_TRANSFER_ENDED, error);
  end(engine, &lead);
}

static void test_bad_input_queues_nothing(void) {
  lying_lead lead;
  kvgrpc_engine *engine = session_open(&lead);
  kvgrpc_error error;
  kvgrpc_transfer made = 0;
  const kvgrpc_hand_over_options late = {.ttl_s = -1}, never = {.ttl_s = 0.0 / 0.0};
  const kvgrpc_blocks many = {0, kIds, (1u << 22) + 1};
  const kvgrpc_labels no_text = {.request_id = "\xff"};
  const kvgrpc_content both = {.token_ids = kTokens, .token_count = 3, .opaque_id = {"o", 1}};
#define REFUSED(...) CHECK(kvgrpc_hand_over(engine, __VA_ARGS__, &made, &error) != KVGRPC_OK && error.message[0])
  REFUSED(&kLabels, &kContent, &kBlocks, 1, &late);
  REFUSED(&kLabels, &kContent, &kBlocks, 1, &never);
  REFUSED(&kLabels, &kContent, &many, 1, NULL);
  REFUSED(&kLabels, &both, &kBlocks, 1, NULL);
  REFUSED(&kLabels, NULL, &kBlocks, 1, NULL);
  REFUSED(&no_text, &kContent, &kBlocks, 1, NULL);
  CHECK(kvgrpc_push(engine, &no_text, &kContent, NULL, &made, NULL) == KVGRPC_OK);
  const kvgrpc_part part = {.blocks = &kBlocks, .rows = 1};
  CHECK(kvgrpc_push_part(engine, made, &part, NULL) == KVGRPC_INVALID_ARGUMENT);
  CHECK(kvgrpc_cancel_key(engine, (kvgrpc_bytes){"short", 5}, "", NULL) == KVGRPC_INVALID_ARGUMENT);
  const kvgrpc_blocks none[257] = {{0, NULL, 0}};
  REFUSED(&kLabels, &kContent, none, 257, NULL);
  CHECK(!engine->calls.size);
  CHECK(!kvgrpc_pull(engine, NULL, &kContent, (kvgrpc_bytes){"g", 1}, NULL, &made, NULL));
  CHECK(kvgrpc_cancel(engine, made, "\xff", NULL) == KVGRPC_INVALID_ARGUMENT);
  end(engine, &lead);
}

static void test_many_transfers_are_told_apart(void) {
  enum { MANY = 3000 };
  static kvgrpc_transfer made[MANY];
  lying_lead lead;
  kvgrpc_engine *engine = session_open(&lead);
  char id[16];
  for (uint64_t round = 0; round < 2; round++) {
    for (int i = 0; i < MANY; i++) {
      CHECK(!kvgrpc_pull(engine, NULL, &kContent, (kvgrpc_bytes){"g", 1}, NULL, &made[i], NULL));
      engine->calls.size = 0; /* Nobody reads them here. */
      snprintf(id, sizeof id, "t-%d", i);
      session_name(&lead, 0, made[i], KV_CALL_PULL_BLOCKS, id);
      next(engine, KVGRPC_EVENT_NONE);
    }
    for (int i = MANY - 1; i >= 0; i--) {
      snprintf(id, sizeof id, "t-%d", i);
      say_of(&lead, i % 2 ? 2 : 4, id);
      CHECK(next(engine, i % 2 ? KVGRPC_EVENT_RECEIVED : KVGRPC_EVENT_BLOCKS_RETURNED).transfer == made[i]);
    }
    CHECK(!engine->transfers.named && engine->transfers.count == MANY);
  }
  end(engine, &lead);
}

static void test_what_was_read_is_acknowledged_before_it_is_much(void) {
  lying_lead lead;
  kvgrpc_engine *engine = session_open(&lead);
  for (uint64_t number = 1; number <= 65; number++) {
    kv_writer frame = {0};
    size_t marks[2];
    const size_t wanted = session_event(&frame, number, marks, 9);
    kv_put_text(&frame, 1, "0123456789abcdef");
    session_say(&lead, &frame, marks, wanted);
    const kvgrpc_event event = next(engine, KVGRPC_EVENT_PUSH_WANTED);
    CHECK(event.transfer_key.size == 16);
  }
  kv_writer said = lead_read(&lead);
  CHECK(said.size == 4 && !memcmp(said.data, "\x1a\x02\x10\x40", 4)); /* calls.read_events: 64 */
  kv_writer_free(&said);
  end(engine, &lead);
}

int main(void) {
  test_blocks_are_named_as_runs();
  test_a_pull_gives_its_blocks_once_it_is_named();
  test_a_refused_call_fails_and_returns_its_blocks();
  test_a_part_that_is_refused_ends_the_push_when_its_last_call_is_answered();
  test_a_part_after_a_refusal_keeps_its_blocks_until_it_is_answered();
  test_a_cancel_after_a_refusal_leaves_the_return_of_the_blocks();
  test_a_cancel_waits_for_the_name();
  test_bad_input_queues_nothing();
  test_many_transfers_are_told_apart();
  test_what_was_read_is_acknowledged_before_it_is_much();
  return 0;
}
