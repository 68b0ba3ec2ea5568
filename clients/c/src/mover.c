#define _GNU_SOURCE
#include "mover.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "connection.h"

bool kv_same(kvgrpc_bytes one, kvgrpc_bytes two) {
  return one.size == two.size && (!one.size || !memcmp(one.data, two.data, one.size));
}

void kv_mover_wake(kv_mover *mover) {
  const uint64_t one = 1;
  while (write(mover->wake, &one, sizeof one) < 0 && errno == EINTR) continue;
}

uint64_t kv_mover_life(const kv_mover *mover) { return mover->life; }

static kvgrpc_code take_memory(kv_mover *mover, const kvgrpc_memory *memory, size_t count, kvgrpc_error *error) {
  if (!memory || !count || count > KV_SEGMENTS_MAX)
    return kv_fail(error, KVGRPC_INVALID_ARGUMENT, KV_INVALID_FIELD, "a rank's memory has 1 to %u segments",
                   KV_SEGMENTS_MAX);
  kv_segment *rows = calloc(count, sizeof *rows);
  if (!rows) return kv_no_memory(error);
  for (size_t i = 0; i < count; i++)
    rows[i] = (kv_segment){(uint64_t)(uintptr_t)memory[i].data, memory[i].size, 1, 0};
  const char *why = kv_memory_make(&mover->memory, rows, count);
  free(rows);
  if (why) return kv_fail(error, KVGRPC_INVALID_ARGUMENT, KV_INVALID_FIELD, "this rank's memory: %s", why);
  kv_memory_digest(&mover->memory, mover->offered);
  return KVGRPC_OK;
}

static bool make_conditions(kv_mover *mover) {
  pthread_condattr_t monotonic;
  if (pthread_condattr_init(&monotonic)) return false;
  pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
  const bool made = !pthread_mutex_init(&mover->lock, NULL) && !pthread_cond_init(&mover->queued, NULL) &&
                    !pthread_cond_init(&mover->rested, &monotonic);
  pthread_condattr_destroy(&monotonic);
  return made;
}

/* Starts the threads, in which no signal of the engine's is handled. */
static bool start(kv_mover *mover) {
  sigset_t all, before;
  sigfillset(&all);
  if (pthread_sigmask(SIG_SETMASK, &all, &before)) return false;
  const bool started = kv_asker_start(mover) && kv_copier_start(mover);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  return started;
}

kv_mover *kv_mover_make(uint32_t number, const kvgrpc_memory *memory, size_t count, kv_report report, void *rank,
                        kvgrpc_error *error) {
  kv_mover *mover = calloc(1, sizeof *mover);
  if (!mover || !make_conditions(mover)) {
    free(mover);
    kv_no_memory(error);
    return NULL;
  }
  mover->number = number;
  mover->report = report;
  mover->rank = rank;
  mover->life = 1;
  mover->listener = mover->wake = -1;
  mover->last_job = &mover->jobs;
  mover->nonce = malloc(KV_NONCE_BYTES);
  kvgrpc_code code = take_memory(mover, memory, count, error);
  if (!code && (!mover->nonce || !kv_random(mover->nonce, KV_NONCE_BYTES) || !start(mover)))
    code = kv_fail(error, KVGRPC_RESOURCE_EXHAUSTED, KV_POOL_EXHAUSTED,
                   "this process cannot make a socket and threads");
  if (!code) return mover;
  kv_mover_free(mover);
  return NULL;
}

bool kv_mover_end(kv_mover *mover, double timeout_s) {
  struct timespec until;
  clock_gettime(CLOCK_MONOTONIC, &until);
  until.tv_sec += (time_t)timeout_s;
  pthread_mutex_lock(&mover->lock);
  mover->life++; /* Work of an earlier life ends after the call at work, and reports nothing. */
  kv_tokens_revoke(mover, NULL);
  kv_peers_end(mover);
  kv_copier_drop_queue(mover);
  /* Peers that hold this process for its earlier life find another nonce. */
  const bool changed = kv_random(mover->nonce, KV_NONCE_BYTES);
  int late = 0;
  while (mover->copying && !late) late = pthread_cond_timedwait(&mover->rested, &mover->lock, &until);
  const bool rests = !mover->copying && changed;
  pthread_mutex_unlock(&mover->lock);
  kv_mover_wake(mover);
  return rests;
}

void kv_mover_free(kv_mover *mover) {
  if (!mover) return;
  pthread_mutex_lock(&mover->lock);
  mover->closing = true;
  mover->life++;
  kv_peers_end(mover);
  kv_tokens_revoke(mover, NULL);
  kv_copier_drop_queue(mover);
  /* The engine frees its memory next: a peer that still reads it finds another nonce after its last byte. */
  if (mover->nonce && !kv_random(mover->nonce, KV_NONCE_BYTES)) memset(mover->nonce, 0, KV_NONCE_BYTES);
  pthread_cond_signal(&mover->queued);
  pthread_mutex_unlock(&mover->lock);
  if (mover->wake >= 0) kv_mover_wake(mover);
  if (mover->has_copier) pthread_join(mover->copier, NULL);
  if (mover->has_asker) pthread_join(mover->asker, NULL);
  while (mover->attempts) {
    kv_attempt *next = mover->attempts->next;
    kv_attempt_free(mover->attempts);
    mover->attempts = next;
  }
  while (mover->awaited) {
    kv_awaited *next = mover->awaited->next;
    close(mover->awaited->end);
    kv_disown(mover->awaited->peer);
    free(mover->awaited);
    mover->awaited = next;
  }
  kv_peers_end(mover); /* What the asker connected last. */
  if (mover->listener >= 0) close(mover->listener);
  if (mover->wake >= 0) close(mover->wake);
  kv_memory_free(&mover->memory);
  free(mover->nonce);
  pthread_mutex_destroy(&mover->lock);
  pthread_cond_destroy(&mover->queued);
  pthread_cond_destroy(&mover->rested);
  free(mover);
}
