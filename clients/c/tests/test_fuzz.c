/* Frames of a lead with some of their bytes changed, cut or repeated: events or a typed error, never a crash.
 *
 * `test_fuzz SECONDS SEED` runs longer, and elsewhere; the seed is printed first. */
#define _GNU_SOURCE
#include <string.h>
#include <time.h>

#include "check.h"
#include "session.h"

#define ROUNDS 20000
#define EVENTS_MAX 40

static uint64_t state;

static uint32_t pick(uint32_t below) {
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return (uint32_t)(state >> 33) % below;
}

static const uint32_t kIds[] = {1, 2, 3};
static const kvgrpc_content kContent = {.token_ids = kIds, .token_count = 3};
static const kvgrpc_blocks kBlocks = {0, kIds, 3};
static const kvgrpc_labels kLabels = {.transfer_key = {"0123456789abcdef", 16}};

static kvgrpc_transfer begin(kvgrpc_engine *engine, uint32_t kind) {
  kvgrpc_transfer made = 0;
  const kvgrpc_part part = {.blocks = &kBlocks, .rows = 1};
  if (kind == 0) kvgrpc_hand_over(engine, &kLabels, &kContent, &kBlocks, 1, NULL, &made, NULL);
  if (kind == 1) kvgrpc_pull(engine, &kLabels, &kContent, (kvgrpc_bytes){"g", 1}, NULL, &made, NULL);
  if (kind == 2) kvgrpc_reserve(engine, &kLabels, &kContent, &kBlocks, 1, NULL, &made, NULL);
  if (kind == 3) kvgrpc_push(engine, &kLabels, &kContent, NULL, &made, NULL);
  if (made && kind == 1) kvgrpc_pull_start(engine, made, &kBlocks, 1, 0, 0, NULL);
  if (made && kind == 3) kvgrpc_push_part(engine, made, &part, NULL);
  if (made && !pick(4)) kvgrpc_cancel(engine, made, "no", NULL);
  return made;
}

static void put_body(kv_writer *to, uint32_t kind, kvgrpc_transfer call) {
  static const uint32_t replies[] = {3, 4, 11, 12};
  if (kind != 5) {
    kv_put_text(to, 1, pick(2) ? "t" : "u");
    if (kind == 7) {
      const size_t range = kv_open(to, 3);
      kv_put_uint(to, 2, 3);
      kv_close(to, range);
    } else if (kind == 3) {
      const size_t failure = kv_open(to, 3);
      kv_put_uint(to, 1, pick(90));
      kv_put_text(to, 6, "why");
      kv_close(to, failure);
    } else {
      kv_put_uint(to, 3, 5);
    }
    return;
  }
  kv_put_uint(to, 1, call);
  if (!pick(3)) kv_close(to, kv_open(to, 2));
  const size_t reply = kv_open(to, replies[pick(4)]);
  for (uint32_t field = 2; field < 5; field++) {
    const size_t named = kv_open(to, field);
    kv_put_text(to, 1, pick(2) ? "t" : "u");
    kv_put_uint(to, 4, pick(4));
    kv_close(to, named);
  }
  kv_close(to, reply);
}

/* Changes a frame, in place, and returns its length. */
static size_t change(uint8_t *data, size_t size) {
  for (uint32_t times = pick(4); times && size > 4; times--) {
    const size_t at = pick((uint32_t)size);
    switch (pick(4)) {
      case 0:
        data[at] ^= (uint8_t)(1u << pick(8));
        break;
      case 1:
        data[at] = (uint8_t)pick(256);
        break;
      case 2:
        size = at > 4 ? at : size;
        break;
      default:
        memmove(data + at, data + at / 2, size - at);
    }
  }
  if (pick(8)) { /* Most have the right length: what is in them is what is to be read. */
    const size_t length = size - 4;
    for (int i = 0; i < 4; i++) data[i] = (uint8_t)(length >> (24 - 8 * i));
  }
  return size;
}

static void one_round(void) {
  lying_lead lead;
  kvgrpc_engine *engine = session_open(&lead);
  kvgrpc_transfer made[4];
  for (uint32_t kind = 0; kind < 4; kind++) made[kind] = begin(engine, kind);
  engine->calls.size = 0;
  for (uint32_t frames = 1 + pick(6); frames; frames--) {
    kv_writer message = {0}, frame = {0};
    size_t marks[2];
    const uint32_t kind = 2 + pick(8);
    const size_t body = session_event(&message, pick(100), marks, kind);
    put_body(&message, kind, made[pick(4)]);
    kv_close(&message, body);
    kv_close(&message, marks[1]);
    kv_close(&message, marks[0]);
    CHECK(!kv_frame_of(&message, &frame, NULL));
    lead_say(&lead, frame.data, change(frame.data, frame.size), NULL, 0);
    kv_writer_free(&message);
    kv_writer_free(&frame);
  }
  kvgrpc_event event;
  kvgrpc_error error = {0};
  for (int events = 0; events < EVENTS_MAX; events++) {
    const kvgrpc_code code = kvgrpc_engine_next(engine, 0, &event, &error);
    if (code) CHECK(error.code == code && error.message[0]);
    if (code || event.kind == KVGRPC_EVENT_NONE) break;
    engine->calls.size = 0;
  }
  lead_hang_up(&lead);
  kvgrpc_engine_close(engine);
}

int main(int count, char **arguments) {
  const double seconds = count > 1 ? atof(arguments[1]) : 0;
  const uint64_t seed = count > 2 ? strtoull(arguments[2], NULL, 10) : 1;
  state = seed * 0x9e3779b97f4a7c15u + 1;
  fprintf(stderr, "seed %llu\n", (unsigned long long)seed);
  const double end = kv_now() + seconds;
  long rounds = 0;
  while (rounds < ROUNDS || kv_now() < end) {
    one_round();
    rounds++;
  }
  printf("%ld rounds\n", rounds);
  return 0;
}
