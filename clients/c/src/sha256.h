/* SHA-256 (FIPS 180-4), by which a process proves that its memory is what it offered. */
#ifndef KV_SHA256_H
#define KV_SHA256_H

#include <stddef.h>
#include <stdint.h>

#define KV_SHA256_BYTES 32

typedef struct kv_sha256 {
  uint32_t state[8];
  uint64_t size;
  uint8_t block[64];
} kv_sha256;

void kv_sha256_begin(kv_sha256 *hash);
void kv_sha256_add(kv_sha256 *hash, const void *data, size_t size);
void kv_sha256_end(kv_sha256 *hash, uint8_t into[KV_SHA256_BYTES]);

#endif
