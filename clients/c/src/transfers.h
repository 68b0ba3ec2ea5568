/* The transfers of an engine that are not over: by their handles, and by the lead's names for them. No I/O.
 *
 * A handle has a slot's index below, and the slot's generation above: a stale one names nothing.
 */
#ifndef KV_TRANSFERS_H
#define KV_TRANSFERS_H

#include "failure.h"

typedef enum kv_kind { KV_FREE = 0, KV_HAND_OVER, KV_PULL, KV_RESERVATION, KV_PUSH } kv_kind;

typedef struct kv_transfer {
  kv_kind kind;
  uint32_t generation;
  uint32_t next; /* In its bucket, or in the list of free slots: index + 1; 0: none. */
  kvgrpc_transfer handle;
  char id[KVGRPC_ID_BYTES]; /* The lead's name; empty until it answered. */
  uint32_t asked;           /* Number of calls about it that have no answer yet. */
  bool failed;
  bool started;   /* A pull that has its blocks. */
  bool cancelled; /* It is cancelled once the lead has named it. */
  char *cancel_message;
  kv_writer start; /* Destination of a pull, until the lead has named it. */
  /* Of a push. */
  kv_writer content;
  kvgrpc_bytes key;
  char *request_id;
  char *traceparent;
  int32_t priority;
  uint32_t consumers;
  uint32_t epoch;
  bool parted; /* This epoch has a part. */
  bool keeps;
  double firm_ttl_s;
} kv_transfer;

typedef struct kv_transfers {
  kv_transfer **slots;
  uint32_t count;
  uint32_t free;
  uint32_t *buckets;
  uint32_t bucket_count; /* A power of two. */
  uint32_t named;
} kv_transfers;

/* Returns NULL without memory. */
kv_transfer *kv_transfer_new(kv_transfers *table, kv_kind kind);
kv_transfer *kv_transfer_of(const kv_transfers *table, kvgrpc_transfer handle);
kv_transfer *kv_transfer_named(const kv_transfers *table, kvgrpc_bytes id);
/* Gives a transfer its name. Returns false without memory. */
bool kv_transfer_name(kv_transfers *table, kv_transfer *transfer, kvgrpc_bytes id);
void kv_transfer_end(kv_transfers *table, kv_transfer *transfer);
void kv_transfers_free(kv_transfers *table);

#endif
