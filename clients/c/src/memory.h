/* Memory of a rank: segments with addresses, through which linear offsets run in order. */
#ifndef KV_MEMORY_H
#define KV_MEMORY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "sha256.h"

struct stat;

/* Maximum number of segments of a rank, as in the schema. */
#define KV_SEGMENTS_MAX 8192u
/* Exclusive bound of addresses and lengths, so that a sum of two fits 64 bits. */
#define KV_ADDRESS_END (UINT64_C(1) << 62)

typedef struct kv_segment {
  uint64_t address;
  uint64_t size;
  uint32_t kind;   /* Number of a kvgrpc.v1.MemoryKind. */
  uint32_t device;
} kv_segment;

typedef struct kv_memory {
  kv_segment *segments;
  uint64_t *ends; /* Offset at which each segment ends. */
  size_t count;
  uint64_t size;
} kv_memory;

/* Copies segments. Returns why they make no memory, or NULL. */
const char *kv_memory_make(kv_memory *memory, const kv_segment *segments, size_t count);
void kv_memory_free(kv_memory *memory);
/* Returns whether bytes lie within the memory, whatever the numbers are. */
bool kv_memory_has(const kv_memory *memory, uint64_t offset, uint64_t size);
/* Returns the address of an offset within the memory, and how many bytes of its segment follow. */
uint64_t kv_memory_at(const kv_memory *memory, uint64_t offset, uint64_t *left);
/* Returns whether all pages of a file are there. A read of a missing one could kill the reader. */
bool kv_is_allocated(const struct stat *file);
/* Digest of an offer of this memory. */
void kv_memory_digest(const kv_memory *memory, uint8_t into[KV_SHA256_BYTES]);
/* Returns the CRC-32C (Castagnoli) of bytes that follow those with the sum `before` (0: none). */
uint32_t kv_crc32c(uint32_t before, const void *data, size_t size);

#endif
