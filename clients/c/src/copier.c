/* The thread that copies: postings and checksums, in the order of the lead's commands. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "columns.h"
#include "connection.h"
#include "mover.h"

/* Bytes after which a copy, or a sum, looks whether it is still wanted. */
#define PIECE_BYTES (UINT64_C(8) << 20)
/* Maximum number of jobs that wait, and of bytes that they take. */
#define JOBS_MAX 4096
#define JOB_BYTES_MAX (UINT64_C(512) << 20)
/* Numbers of PostOperation. */
enum { OPERATION_READ = 1, OPERATION_WRITE = 2, OPERATION_READ_AND_REPACK = 3 };

typedef struct job_sums {
  bool wanted;
  kvgrpc_bytes name;
  kv_column offsets, nbytes, counts;
} job_sums;

struct kv_job {
  kv_job *next;
  uint64_t life;
  size_t size; /* Of its numbers, in bytes. */
  bool posts;
  kvgrpc_bytes id, peer;
  uint32_t peer_rank;
  uint64_t operation;
  kv_column src, dst, nbytes;
  uint64_t total;
  bool repacks;
  kv_repack repack;
  job_sums sums;
  kv_link *link;
};

static void free_job(kv_job *job) {
  kv_disown(job->id);
  kv_disown(job->peer);
  kv_disown(job->sums.name);
  kv_column *const columns[] = {&job->src, &job->dst, &job->nbytes, &job->sums.offsets, &job->sums.nbytes,
                                &job->sums.counts};
  for (size_t i = 0; i < sizeof columns / sizeof *columns; i++) kv_column_free(columns[i]);
  kv_repack_free(&job->repack);
  free(job);
}

/* ---- reports */

static void report_end(kv_mover *mover, const kv_job *job, uint64_t nbytes, double wire_s, const char *why) {
  kv_writer made = {0};
  const size_t row = kv_open(&made, 3);
  kv_put_bytes(&made, 1, job->id);
  kv_put_uint(&made, 2, !why);
  kv_put_uint(&made, 3, nbytes);
  kv_put_duration(&made, 4, wire_s);
  kv_put_why(&made, 5, why);
  kv_put_uint(&made, 6, 1); /* No call follows the one that returned. */
  kv_put_uint(&made, 7, 1);
  kv_put_duration(&made, 8, wire_s);
  kv_close(&made, row);
  mover->report(mover->rank, job->life, &made);
  kv_writer_free(&made);
}

static void report_sums(kv_mover *mover, const kv_job *job, const uint32_t *values, const char *why) {
  kv_writer made = {0};
  const size_t row = kv_open(&made, 7);
  kv_put_bytes(&made, 1, job->sums.name);
  if (!why && job->sums.counts.count) {
    const size_t column = kv_open(&made, 2);
    for (size_t i = 0; i < job->sums.counts.count; i++) {
      const uint8_t bytes[4] = {(uint8_t)values[i], (uint8_t)(values[i] >> 8), (uint8_t)(values[i] >> 16),
                                (uint8_t)(values[i] >> 24)};
      kv_put_bytes_raw(&made, bytes, sizeof bytes);
    }
    kv_close(&made, column);
  }
  kv_put_why(&made, 3, why);
  kv_close(&made, row);
  mover->report(mover->rank, job->life, &made);
  kv_writer_free(&made);
}

static void refuse(kv_mover *mover, kv_job *job, const char *why) {
  if (job->link) kv_peers_let_go(mover, job->link);
  if (job->posts) report_end(mover, job, 0, 0, why);
  else report_sums(mover, job, NULL, why);
  free_job(job);
}

/* ---- what is checked before anything begins */

static bool check_sums(const kv_mover *mover, const job_sums *sums) {
  uint64_t pieces = 0;
  if (sums->offsets.count != sums->nbytes.count) return false;
  for (size_t i = 0; i < sums->counts.count; i++)
    if (sums->counts.rows[i] > KV_COLUMN_MAX || (pieces += sums->counts.rows[i]) > sums->offsets.count) return false;
  for (size_t i = 0; i < sums->offsets.count; i++)
    if (!kv_memory_has(&mover->memory, sums->offsets.rows[i], sums->nbytes.rows[i])) return false;
  return pieces == sums->offsets.count;
}

/* Returns what speaks against a posting whose link is held, or NULL. */
static const char *check_post(const kv_mover *mover, kv_job *job) {
  const kv_memory *source = &job->link->source;
  const uint64_t room = job->repacks ? job->repack.staging_bytes : mover->memory.size;
  if (job->operation == OPERATION_WRITE) return "by this path no rank writes another's memory: the destination reads";
  if (job->repacks && job->sums.wanted) return "no checksums are computed on the way to a re-pack";
  if (job->repacks && room > KV_STAGING_BYTES_MAX) return "a re-pack does not fit into its rank's staging: post less";
  if (job->src.count != job->dst.count || job->src.count != job->nbytes.count)
    return "runs have sources, destinations and lengths of different number";
  for (size_t i = 0; i < job->src.count; i++) {
    const uint64_t size = job->nbytes.rows[i];
    if (!kv_memory_has(source, job->src.rows[i], size)) return "a run lies outside the source's memory";
    if (size > room || job->dst.rows[i] > room - size) return "a run lies outside the destination's memory";
    if (__builtin_add_overflow(job->total, size, &job->total)) return "the runs have more bytes than there are";
  }
  if (job->repacks && !kv_repack_check(&job->repack, &mover->memory)) return "a strip of the re-pack makes no sense";
  return !job->sums.wanted || check_sums(mover, &job->sums) ? NULL : "a checksum is not of this rank's memory";
}

static size_t size_of(const kv_job *job) {
  size_t numbers = job->src.count + job->dst.count + job->nbytes.count + job->sums.offsets.count +
                   job->sums.nbytes.count + job->sums.counts.count;
  for (size_t i = 0; i < job->repack.count; i++)
    numbers += job->repack.strips[i].src.count + job->repack.strips[i].dst.count + sizeof(kv_strip) / 8;
  return sizeof *job + numbers * sizeof(uint64_t);
}

static void queue(kv_mover *mover, kv_job *job) {
  job->size = size_of(job);
  pthread_mutex_lock(&mover->lock);
  const bool full = mover->job_count >= JOBS_MAX || job->size > JOB_BYTES_MAX - mover->job_bytes;
  if (!full) {
    *mover->last_job = job;
    mover->last_job = &job->next;
    mover->job_count++;
    mover->job_bytes += job->size;
    pthread_cond_signal(&mover->queued);
  }
  pthread_mutex_unlock(&mover->lock);
  if (full) refuse(mover, job, "too much is queued at this rank");
}

void kv_copier_drop_queue(kv_mover *mover) {
  while (mover->jobs) {
    kv_job *job = mover->jobs;
    mover->jobs = job->next;
    if (job->link) kv_link_let_go(job->link);
    free_job(job);
  }
  mover->last_job = &mover->jobs;
  mover->job_count = 0;
  mover->job_bytes = 0;
}

/* ---- commands */

static bool take_name(kvgrpc_bytes *into, const kv_field *field) {
  if (field->bytes.size > KV_NAME_BYTES_MAX) return false;
  kv_disown(*into);
  *into = kv_own(field->bytes);
  return into->data != NULL;
}

static bool read_sums(job_sums *into, kvgrpc_bytes message) {
  kv_reader from = kv_reader_of(message);
  kv_field field;
  bool right = true;
  into->wanted = true;
  while (right && kv_next(&from, &field)) {
    if (kv_is(&field, 1, 2)) right = take_name(&into->name, &field);
    if (field.number == 2) right = kv_column_take(&into->offsets, &field);
    if (field.number == 3) right = kv_column_take(&into->nbytes, &field);
    if (field.number == 4) right = kv_column_take(&into->counts, &field);
  }
  return right && !from.bad;
}

static bool read_post(kv_job *job, kvgrpc_bytes message) {
  kv_reader from = kv_reader_of(message);
  kv_field field;
  bool right = true;
  while (right && kv_next(&from, &field)) {
    if (kv_is(&field, 1, 2)) right = take_name(&job->id, &field);
    if (kv_is(&field, 2, 2)) right = take_name(&job->peer, &field);
    if (field.number == 3) right = kv_column_take(&job->src, &field);
    if (field.number == 4) right = kv_column_take(&job->dst, &field);
    if (field.number == 5) right = kv_column_take(&job->nbytes, &field);
    if (kv_is(&field, 6, 0)) job->peer_rank = (uint32_t)field.value;
    if (kv_is(&field, 7, 0)) job->operation = field.value;
    if (kv_is(&field, 8, 2)) right = !job->sums.wanted && read_sums(&job->sums, field.bytes);
    if (kv_is(&field, 9, 2)) {
      right = !job->repacks && kv_repack_read(&job->repack, field.bytes);
      job->repacks = true;
    }
  }
  const bool known = job->operation >= OPERATION_READ && job->operation <= OPERATION_READ_AND_REPACK;
  return right && !from.bad && known && job->repacks == (job->operation == OPERATION_READ_AND_REPACK);
}

static kv_job *new_job(kv_mover *mover) {
  kv_job *job = calloc(1, sizeof *job);
  if (!job) return NULL;
  job->life = mover->life;
  job->peer_rank = mover->number;
  return job;
}

bool kv_copier_post(kv_mover *mover, kvgrpc_bytes command) {
  kv_job *job = new_job(mover);
  if (!job || !read_post(job, command)) {
    if (job) free_job(job);
    return false;
  }
  job->posts = true;
  job->link = kv_peers_hold(mover, job->peer, job->peer_rank);
  const char *why = job->link ? check_post(mover, job) : "that rank of the peer is not connected";
  if (why) refuse(mover, job, why);
  else queue(mover, job);
  return true;
}

bool kv_copier_sum(kv_mover *mover, kvgrpc_bytes command) {
  kv_job *job = new_job(mover);
  if (!job || !read_sums(&job->sums, command)) {
    if (job) free_job(job);
    return false;
  }
  if (check_sums(mover, &job->sums)) queue(mover, job);
  else refuse(mover, job, "a checksum is not of this rank's memory");
  return true;
}

/* ---- the thread */

/* Runs that are copied by one call. */
typedef struct copy_batch {
  struct iovec local[KV_IOV_MAX], remote[KV_IOV_MAX];
  size_t count;
  uint64_t nbytes;
} copy_batch;

static bool over(const kv_mover *mover, const kv_job *job) { return mover->life != job->life; }

static bool flush(const kv_mover *mover, const kv_job *job, copy_batch *batch, char why[KV_WHY_BYTES]) {
  bool right = true;
  if (over(mover, job)) {
    snprintf(why, KV_WHY_BYTES, "the session is over");
    right = false;
  } else if (job->link->mapping) {
    for (size_t i = 0; i < batch->count; i++)
      memcpy(batch->local[i].iov_base, batch->remote[i].iov_base, batch->local[i].iov_len);
  } else {
    right = kv_process_read(job->link->process.pid, batch->local, batch->remote, batch->count, why);
  }
  batch->count = 0;
  batch->nbytes = 0;
  return right;
}

/* Copies the runs of a posting into `destination`. */
static bool copy_runs(const kv_mover *mover, const kv_job *job, const kv_memory *destination, char why[KV_WHY_BYTES]) {
  copy_batch batch;
  batch.count = 0;
  batch.nbytes = 0;
  for (size_t i = 0; i < job->src.count; i++) {
    uint64_t src = job->src.rows[i], dst = job->dst.rows[i], size = job->nbytes.rows[i];
    while (size) {
      uint64_t there, here, part = PIECE_BYTES - batch.nbytes;
      const uint64_t from = kv_memory_at(&job->link->source, src, &there);
      const uint64_t into = kv_memory_at(destination, dst, &here);
      if (part > size) part = size;
      if (part > there) part = there;
      if (part > here) part = here;
      batch.local[batch.count] = (struct iovec){(void *)(uintptr_t)into, (size_t)part};
      batch.remote[batch.count++] = (struct iovec){(void *)(uintptr_t)from, (size_t)part};
      batch.nbytes += part;
      src += part, dst += part, size -= part;
      if ((batch.count == KV_IOV_MAX || batch.nbytes == PIECE_BYTES) && !flush(mover, job, &batch, why)) return false;
    }
  }
  return !batch.count || flush(mover, job, &batch, why);
}

static bool read_and_repack(const kv_mover *mover, const kv_job *job, char why[KV_WHY_BYTES]) {
  const uint64_t size = job->repack.staging_bytes ? job->repack.staging_bytes : 1;
  uint8_t *buffer = calloc(1, (size_t)size);
  kv_memory staging = {0};
  const kv_segment whole = {(uint64_t)(uintptr_t)buffer, size, 1, 0};
  bool right = buffer && !kv_memory_make(&staging, &whole, 1);
  if (!right) snprintf(why, KV_WHY_BYTES, "this process has no memory left");
  right = right && copy_runs(mover, job, &staging, why);
  /* The source is checked before a byte of this rank's memory is changed. */
  right = right && (job->link->mapping || kv_process_check(&job->link->process, why));
  for (size_t i = 0; right && i < job->repack.count; i++) {
    kv_strip_copy(&job->repack.strips[i], buffer, &mover->memory, &mover->life, job->life);
    right = !over(mover, job);
  }
  kv_memory_free(&staging);
  free(buffer);
  return right;
}

/* Sums one piece up. Returns false if the sum is not wanted any more. */
static bool sum_piece(const kv_mover *mover, const kv_job *job, size_t piece, uint32_t *value) {
  uint64_t offset = job->sums.offsets.rows[piece], size = job->sums.nbytes.rows[piece], here;
  while (size && !over(mover, job)) {
    const void *at = (const void *)(uintptr_t)kv_memory_at(&mover->memory, offset, &here);
    uint64_t part = size < here ? size : here;
    if (part > PIECE_BYTES) part = PIECE_BYTES;
    *value = kv_crc32c(*value, at, (size_t)part);
    offset += part, size -= part;
  }
  return !size;
}

static void perform_sums(kv_mover *mover, const kv_job *job) {
  const job_sums *sums = &job->sums;
  uint32_t *values = calloc(sums->counts.count + 1, sizeof *values);
  size_t piece = 0;
  bool wanted = true; /* No report of an earlier life is sent. */
  for (size_t i = 0; values && wanted && i < sums->counts.count; i++)
    for (uint64_t left = sums->counts.rows[i]; wanted && left; left--)
      wanted = sum_piece(mover, job, piece++, &values[i]);
  report_sums(mover, job, values, values ? NULL : "this process has no memory left");
  free(values);
}

static void perform_post(kv_mover *mover, const kv_job *job) {
  char why[KV_WHY_BYTES] = "";
  const double began = kv_now();
  bool right;
  if (job->repacks) right = read_and_repack(mover, job, why);
  else right = copy_runs(mover, job, &mover->memory, why) &&
               (job->link->mapping || kv_process_check(&job->link->process, why));
  const uint64_t moved = job->repacks ? kv_repack_bytes(&job->repack) : job->total;
  report_end(mover, job, right ? moved : 0, kv_now() - began, right ? NULL : why);
  if (right && job->sums.wanted) perform_sums(mover, job);
}

static void *run(void *given) {
  kv_mover *mover = given;
  pthread_mutex_lock(&mover->lock);
  for (;;) {
    while (!mover->jobs && !mover->closing) pthread_cond_wait(&mover->queued, &mover->lock);
    kv_job *job = mover->jobs;
    if (mover->closing) break;
    mover->jobs = job->next;
    if (!mover->jobs) mover->last_job = &mover->jobs;
    mover->job_count--;
    mover->job_bytes -= job->size;
    mover->copying = true;
    pthread_mutex_unlock(&mover->lock);
    if (job->posts) perform_post(mover, job);
    else perform_sums(mover, job);
    if (job->link) kv_peers_let_go(mover, job->link);
    free_job(job);
    pthread_mutex_lock(&mover->lock);
    mover->copying = false;
    pthread_cond_signal(&mover->rested);
  }
  pthread_mutex_unlock(&mover->lock);
  return NULL;
}

bool kv_copier_start(kv_mover *mover) {
  mover->has_copier = !pthread_create(&mover->copier, NULL, run, mover);
  return mover->has_copier;
}
