#define _GNU_SOURCE
#include "transfers.h"

#include <stdlib.h>
#include <string.h>

#define BUCKETS_MIN 64u

static uint32_t hash_of(const char *id, size_t size) {
  uint32_t hash = 2166136261u; /* FNV-1a */
  for (size_t i = 0; i < size; i++) hash = (hash ^ (uint8_t)id[i]) * 16777619u;
  return hash;
}

static void clear(kv_transfer *transfer) {
  kv_writer_free(&transfer->start);
  kv_writer_free(&transfer->content);
  free(transfer->cancel_message);
  kv_disown(transfer->key);
  free(transfer->request_id);
  free(transfer->traceparent);
  const uint32_t generation = transfer->generation;
  memset(transfer, 0, sizeof *transfer);
  transfer->generation = generation;
}

static bool add_slot(kv_transfers *table) {
  if (table->count == UINT32_MAX - 1) return false;
  kv_transfer *made = calloc(1, sizeof *made);
  kv_transfer **slots = realloc(table->slots, ((size_t)table->count + 1) * sizeof *slots);
  if (slots) table->slots = slots;
  if (!made || !slots) {
    free(made);
    return false;
  }
  slots[table->count++] = made;
  table->free = table->count;
  return true;
}

kv_transfer *kv_transfer_new(kv_transfers *table, kv_kind kind) {
  if (!table->free && !add_slot(table)) return NULL;
  const uint32_t index = table->free - 1;
  kv_transfer *made = table->slots[index];
  table->free = made->next;
  made->next = 0;
  made->kind = kind;
  made->generation++;
  made->handle = (uint64_t)made->generation << 32 | (index + 1);
  return made;
}

kv_transfer *kv_transfer_of(const kv_transfers *table, kvgrpc_transfer handle) {
  const uint32_t index = (uint32_t)handle;
  if (!index || index > table->count) return NULL;
  kv_transfer *found = table->slots[index - 1];
  return found->kind != KV_FREE && found->handle == handle ? found : NULL;
}

static uint32_t *bucket_of(const kv_transfers *table, const char *id, size_t size) {
  return &table->buckets[hash_of(id, size) & (table->bucket_count - 1)];
}

kv_transfer *kv_transfer_named(const kv_transfers *table, kvgrpc_bytes id) {
  if (!table->bucket_count || !id.size || id.size >= KVGRPC_ID_BYTES) return NULL;
  for (uint32_t at = *bucket_of(table, id.data, id.size); at; at = table->slots[at - 1]->next) {
    kv_transfer *found = table->slots[at - 1];
    if (strlen(found->id) == id.size && !memcmp(found->id, id.data, id.size)) return found;
  }
  return NULL;
}

static bool grow_buckets(kv_transfers *table) {
  const uint32_t count = table->bucket_count ? table->bucket_count * 2 : BUCKETS_MIN;
  uint32_t *buckets = calloc(count, sizeof *buckets), *before = table->buckets;
  if (!buckets) return false;
  const uint32_t old_count = table->bucket_count;
  table->buckets = buckets;
  table->bucket_count = count;
  for (uint32_t i = 0; i < old_count; i++) {
    uint32_t at = before[i];
    while (at) {
      kv_transfer *moved = table->slots[at - 1];
      uint32_t *bucket = bucket_of(table, moved->id, strlen(moved->id)), next = moved->next;
      moved->next = *bucket;
      *bucket = at;
      at = next;
    }
  }
  free(before);
  return true;
}

bool kv_transfer_name(kv_transfers *table, kv_transfer *transfer, kvgrpc_bytes id) {
  if (table->named >= table->bucket_count && !grow_buckets(table) && !table->bucket_count) return false;
  kv_copy_text(transfer->id, sizeof transfer->id, id);
  uint32_t *bucket = bucket_of(table, transfer->id, strlen(transfer->id));
  transfer->next = *bucket;
  *bucket = (uint32_t)transfer->handle;
  table->named++;
  return true;
}

void kv_transfer_end(kv_transfers *table, kv_transfer *transfer) {
  const uint32_t index = (uint32_t)transfer->handle;
  if (transfer->id[0]) {
    uint32_t *at = bucket_of(table, transfer->id, strlen(transfer->id));
    while (*at != index) at = &table->slots[*at - 1]->next;
    *at = transfer->next;
    table->named--;
  }
  clear(transfer);
  transfer->next = table->free;
  table->free = index;
}

void kv_transfers_free(kv_transfers *table) {
  for (uint32_t i = 0; i < table->count; i++) {
    clear(table->slots[i]);
    free(table->slots[i]);
  }
  free(table->slots);
  free(table->buckets);
  memset(table, 0, sizeof *table);
}
