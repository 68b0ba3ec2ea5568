#include "memory.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* st_blocks is in units of it. */
#define STAT_BLOCK_BYTES 512
/* Numbers of kvgrpc.v1.MemoryKind. */
enum { KIND_PINNED_HOST = 2, KIND_CUDA = 3 };

const char *kv_memory_make(kv_memory *memory, const kv_segment *segments, size_t count) {
  memset(memory, 0, sizeof *memory);
  if (!count || count > KV_SEGMENTS_MAX) return "memory has 1 to 8,192 segments";
  memory->segments = malloc(count * sizeof *segments);
  memory->ends = malloc(count * sizeof *memory->ends);
  const char *why = memory->segments && memory->ends ? NULL : "this process has no memory left";
  for (size_t i = 0; !why && i < count; i++) {
    const kv_segment *row = &segments[i];
    if (!row->address || row->address >= KV_ADDRESS_END || !row->size || row->size >= KV_ADDRESS_END - memory->size)
      why = "a list of memory makes no sense";
    else if (row->kind >= KIND_CUDA) why = "memory of one side is on a device";
    else memory->ends[i] = memory->size += row->size;
  }
  if (why) {
    kv_memory_free(memory);
    return why;
  }
  memcpy(memory->segments, segments, count * sizeof *segments);
  memory->count = count;
  return NULL;
}

void kv_memory_free(kv_memory *memory) {
  free(memory->segments);
  free(memory->ends);
  memset(memory, 0, sizeof *memory);
}

bool kv_memory_has(const kv_memory *memory, uint64_t offset, uint64_t size) {
  return size <= memory->size && offset <= memory->size - size;
}

uint64_t kv_memory_at(const kv_memory *memory, uint64_t offset, uint64_t *left) {
  size_t low = 0, high = memory->count - 1; /* The first segment that ends behind the offset. */
  while (low < high) {
    const size_t middle = low + (high - low) / 2;
    if (memory->ends[middle] > offset) high = middle;
    else low = middle + 1;
  }
  const kv_segment *found = &memory->segments[low];
  *left = memory->ends[low] - offset;
  return found->address + (found->size - *left);
}

bool kv_is_allocated(const struct stat *file) {
  return file->st_blocks * STAT_BLOCK_BYTES >= file->st_size;
}

void kv_memory_digest(const kv_memory *memory, uint8_t into[KV_SHA256_BYTES]) {
  kv_sha256 hash;
  kv_sha256_begin(&hash);
  for (size_t i = 0; i < memory->count; i++) {
    const kv_segment *row = &memory->segments[i];
    char text[96];
    const int size = snprintf(text, sizeof text, "|%" PRIu64 ",%" PRIu64 ",%s,%" PRIu32, row->address, row->size,
                              row->kind == KIND_PINNED_HOST ? "pinned_host" : "host", row->device);
    kv_sha256_add(&hash, text, (size_t)size);
  }
  kv_sha256_end(&hash, into);
}

/* ---- CRC-32C, eight bytes at a time */

static uint32_t table[8][256];

static void make_table(void) {
  for (uint32_t i = 0; i < 256; i++) {
    uint32_t value = i;
    for (int bit = 0; bit < 8; bit++) value = value >> 1 ^ (value & 1 ? 0x82f63b78u : 0);
    table[0][i] = value;
  }
  for (uint32_t i = 0; i < 256; i++)
    for (size_t row = 1; row < 8; row++) table[row][i] = table[row - 1][i] >> 8 ^ table[0][table[row - 1][i] & 0xff];
}

uint32_t kv_crc32c(uint32_t before, const void *data, size_t size) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, make_table);
  const uint8_t *at = data;
  uint32_t crc = ~before;
  for (; size >= 8; size -= 8, at += 8) {
    const uint32_t low = crc ^ ((uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24);
    crc = table[7][low & 0xff] ^ table[6][low >> 8 & 0xff] ^ table[5][low >> 16 & 0xff] ^ table[4][low >> 24] ^
          table[3][at[4]] ^ table[2][at[5]] ^ table[1][at[6]] ^ table[0][at[7]];
  }
  while (size--) crc = crc >> 8 ^ table[0][(crc ^ *at++) & 0xff];
  return ~crc;
}
