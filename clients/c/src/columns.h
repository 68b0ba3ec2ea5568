/* Columns of numbers, and strips: what a lead says of bytes to copy. Everything is bounded before it is made. */
#ifndef KV_COLUMNS_H
#define KV_COLUMNS_H

#include "memory.h"
#include "wire.h"

/* Maximum number of numbers in one column: more than the runs of any posting. */
#define KV_COLUMN_MAX (1u << 22)
#define KV_STRIPS_MAX 131072u
#define KV_DIMENSIONS_MAX 4
/* Maximum runs of one re-pack. */
#define KV_STRIP_RUNS_MAX (UINT64_C(1) << 22)
/* Maximum bytes of a staging buffer. */
#define KV_STAGING_BYTES_MAX (UINT64_C(64) << 20)

typedef struct kv_column {
  uint64_t *rows;
  size_t count;
} kv_column;

/* Takes a field of a column: packed, or one number. Returns false for what is none, and for too many. */
bool kv_column_take(kv_column *column, const kv_field *field);
void kv_column_free(kv_column *column);

/* Copies of one shape at many places. */
typedef struct kv_strip {
  kv_column src;
  kv_column dst;
  size_t dimensions;
  uint64_t shape[KV_DIMENSIONS_MAX];
  uint64_t src_steps[KV_DIMENSIONS_MAX];
  uint64_t dst_steps[KV_DIMENSIONS_MAX];
  uint64_t run_bytes;
} kv_strip;

typedef struct kv_repack {
  kv_strip *strips;
  size_t count;
  uint64_t staging_bytes;
} kv_repack;

/* Reads a RepackCommand. Returns false for what is none, and for more than allowed. */
bool kv_repack_read(kv_repack *repack, kvgrpc_bytes message);
void kv_repack_free(kv_repack *repack);
/* Returns whether every strip reads within the buffer and writes within the memory. */
bool kv_repack_check(const kv_repack *repack, const kv_memory *memory);
uint64_t kv_repack_bytes(const kv_repack *repack);
/* Copies one checked strip out of the buffer, as long as `*life` is `wanted`: it looks before each run. */
void kv_strip_copy(const kv_strip *strip, const uint8_t *buffer, const kv_memory *memory, const _Atomic uint64_t *life,
                   uint64_t wanted);

#endif
