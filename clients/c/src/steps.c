/* What a rank reports: the engine's steps, and what its mover did. */
#include <stdlib.h>
#include <sys/socket.h>

#include "rank.h"

#define LAYERS_MAX 65536

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

kvgrpc_code kv_steps_repeat(const kvgrpc_rank *rank, kv_connection *next, kvgrpc_error *error) {
  kvgrpc_code code = KVGRPC_OK;
  if (rank->done) code = send_step(next, rank->done, NULL, error);
  for (size_t i = 0; !code && i < rank->layer_count; i++)
    code = send_step(next, rank->layers[i].step, &rank->layers[i], error);
  return code;
}

void kv_rank_report(void *given, uint64_t life, const kv_writer *report) {
  kvgrpc_rank *rank = given;
  kv_writer message = {0}, frame = {0};
  const size_t batch = kv_open(&message, 4), row = kv_open(&message, 1);
  kv_put_bytes_raw(&message, report->data, report->size);
  message.failed |= report->failed;
  message.not_text |= report->not_text;
  kv_close(&message, row);
  kv_close(&message, batch);
  const bool whole = !kv_frame_of(&message, &frame, NULL);
  pthread_mutex_lock(&rank->lock);
  if (life == kv_mover_life(rank->mover) && rank->connection.fd >= 0) {
    /* Without this report the lead would wait for ever. */
    if (whole) kv_send(&rank->connection, frame.data, frame.size, NULL);
    else shutdown(rank->connection.fd, SHUT_RDWR);
  }
  pthread_mutex_unlock(&rank->lock);
  kv_writer_free(&message);
  kv_writer_free(&frame);
}
