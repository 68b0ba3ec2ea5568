#include "columns.h"

#include <stdlib.h>
#include <string.h>

#define STEPS_END (UINT64_C(1) << 62)

bool kv_column_take(kv_column *column, const kv_field *field) {
  size_t more = 1;
  if (field->wire == 2) {
    const uint8_t *data = field->bytes.data;
    more = 0;
    for (size_t i = 0; i < field->bytes.size; i++) more += !(data[i] & 0x80);
  } else if (field->wire != 0) {
    return false;
  }
  if (more > KV_COLUMN_MAX - column->count) return false;
  if (!more) return !field->bytes.size;
  uint64_t *rows = realloc(column->rows, (column->count + more) * sizeof *rows);
  if (!rows) return false;
  column->rows = rows;
  kv_reader from = kv_reader_of(field->bytes);
  for (size_t i = 0; i < more; i++, column->count++) {
    if (field->wire == 0) rows[column->count] = field->value;
    else if (!kv_next_varint(&from, &rows[column->count])) return false;
  }
  return from.at == from.end;
}

void kv_column_free(kv_column *column) {
  free(column->rows);
  memset(column, 0, sizeof *column);
}

static bool take_few(const kv_column *column, uint64_t into[KV_DIMENSIONS_MAX], size_t *count) {
  if (column->count > KV_DIMENSIONS_MAX) return false;
  if (column->count) memcpy(into, column->rows, column->count * sizeof *into);
  *count = column->count;
  return true;
}

static bool read_strip(kv_strip *strip, kvgrpc_bytes message) {
  kv_reader from = kv_reader_of(message);
  kv_field field;
  kv_column few[3] = {{0}, {0}, {0}}; /* shape, src_steps, dst_steps */
  size_t counts[3];
  bool right = true;
  while (right && kv_next(&from, &field)) {
    if (field.number == 1) right = kv_column_take(&strip->src, &field);
    if (field.number == 2) right = kv_column_take(&strip->dst, &field);
    if (field.number >= 3 && field.number <= 5) right = kv_column_take(&few[field.number - 3], &field);
    if (kv_is(&field, 6, 0)) strip->run_bytes = field.value;
  }
  right = right && !from.bad && take_few(&few[0], strip->shape, &counts[0]) &&
          take_few(&few[1], strip->src_steps, &counts[1]) && take_few(&few[2], strip->dst_steps, &counts[2]) &&
          counts[0] == counts[1] && counts[0] == counts[2];
  if (right) strip->dimensions = counts[0];
  for (size_t i = 0; i < 3; i++) kv_column_free(&few[i]);
  return right;
}

bool kv_repack_read(kv_repack *repack, kvgrpc_bytes message) {
  kv_reader from = kv_reader_of(message);
  kv_field field;
  size_t count = 0;
  while (kv_next(&from, &field)) {
    count += kv_is(&field, 1, 2);
    if (kv_is(&field, 2, 0)) repack->staging_bytes = field.value;
  }
  if (from.bad || count > KV_STRIPS_MAX) return false;
  repack->strips = calloc(count ? count : 1, sizeof *repack->strips);
  if (!repack->strips) return false;
  from = kv_reader_of(message);
  while (kv_next(&from, &field))
    if (kv_is(&field, 1, 2) && !read_strip(&repack->strips[repack->count++], field.bytes)) return false;
  return true;
}

void kv_repack_free(kv_repack *repack) {
  for (size_t i = 0; i < repack->count; i++) {
    kv_column_free(&repack->strips[i].src);
    kv_column_free(&repack->strips[i].dst);
  }
  free(repack->strips);
  memset(repack, 0, sizeof *repack);
}

/* Returns whether all copies lie below `limit` on the side with these places and steps. */
static bool within(const kv_strip *strip, const kv_column *places, const uint64_t *steps, uint64_t limit) {
  uint64_t extent = strip->run_bytes, reach;
  for (size_t i = 0; i < strip->dimensions; i++) {
    if (steps[i] >= STEPS_END || __builtin_mul_overflow(strip->shape[i] - 1, steps[i], &reach) ||
        __builtin_add_overflow(extent, reach, &extent))
      return false;
  }
  if (extent > limit) return false;
  for (size_t i = 0; i < places->count; i++)
    if (places->rows[i] > limit - extent) return false;
  return true;
}

static bool runs_of(const kv_strip *strip, uint64_t *runs) {
  *runs = strip->src.count;
  for (size_t i = 0; i < strip->dimensions; i++)
    if (!strip->shape[i] || __builtin_mul_overflow(*runs, strip->shape[i], runs)) return false;
  return *runs && *runs <= KV_STRIP_RUNS_MAX;
}

bool kv_repack_check(const kv_repack *repack, const kv_memory *memory) {
  uint64_t all = 0, written = 0, runs, nbytes;
  for (size_t i = 0; i < repack->count; i++) {
    const kv_strip *strip = &repack->strips[i];
    if (strip->src.count != strip->dst.count || !strip->run_bytes || !runs_of(strip, &runs) ||
        __builtin_mul_overflow(runs, strip->run_bytes, &nbytes) || __builtin_add_overflow(written, nbytes, &written) ||
        (all += runs) > KV_STRIP_RUNS_MAX || written > memory->size ||
        !within(strip, &strip->src, strip->src_steps, repack->staging_bytes) ||
        !within(strip, &strip->dst, strip->dst_steps, memory->size))
      return false;
  }
  return true;
}

uint64_t kv_repack_bytes(const kv_repack *repack) {
  uint64_t nbytes = 0, runs = 0;
  for (size_t i = 0; i < repack->count; i++)
    if (runs_of(&repack->strips[i], &runs)) nbytes += runs * repack->strips[i].run_bytes;
  return nbytes;
}

static void copy_run(const uint8_t *from, const kv_memory *memory, uint64_t to, uint64_t size) {
  while (size) {
    uint64_t left;
    void *into = (void *)(uintptr_t)kv_memory_at(memory, to, &left);
    const uint64_t part = size < left ? size : left;
    memcpy(into, from, (size_t)part);
    from += part;
    to += part;
    size -= part;
  }
}

typedef struct strip_copy {
  const kv_strip *strip;
  const kv_memory *memory;
  const _Atomic uint64_t *life;
  uint64_t wanted;
} strip_copy;

/* Copies the runs of the dimensions from `at` on. */
static void copy_from(const strip_copy *copy, size_t at, const uint8_t *from, uint64_t to) {
  const kv_strip *strip = copy->strip;
  if (at == strip->dimensions) {
    copy_run(from, copy->memory, to, strip->run_bytes);
    return;
  }
  for (uint64_t i = 0; i < strip->shape[at] && *copy->life == copy->wanted; i++)
    copy_from(copy, at + 1, from + i * strip->src_steps[at], to + i * strip->dst_steps[at]);
}

void kv_strip_copy(const kv_strip *strip, const uint8_t *buffer, const kv_memory *memory, const _Atomic uint64_t *life,
                   uint64_t wanted) {
  const strip_copy copy = {strip, memory, life, wanted};
  for (size_t i = 0; i < strip->src.count && *life == wanted; i++)
    copy_from(&copy, 0, buffer + strip->src.rows[i], strip->dst.rows[i]);
}
