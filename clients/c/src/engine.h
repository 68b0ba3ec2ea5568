/* A scheduler's session, for the files that share it. */
#ifndef KV_ENGINE_H
#define KV_ENGINE_H

#include "connection.h"
#include "transfers.h"

struct kvgrpc_engine {
  kv_connection connection;
  kvgrpc_error over; /* Why the session is over; its code is KVGRPC_OK before. */
  char *socket_path;
  kvgrpc_ticket ticket;
  char id[KVGRPC_ID_BYTES];
  char address[KVGRPC_ID_BYTES];
  uint64_t incarnation;
  kv_transfers transfers;

  kv_writer calls; /* Calls that wait to be sent, as the rows of a CallBatch. */
  uint64_t read_event;         /* The last event that the caller was told. */
  uint64_t acknowledged_event; /* The last one that the lead knows about. */

  kv_reader frame; /* The frame that is being read. */
  kv_reader batch; /* The events in it. */
  kvgrpc_transfer returned; /* Its blocks are told as returned by the next event. */
  kvgrpc_layer_range *layers;
  size_t layer_capacity;
};

/* Queues one call, whose request is `request` in field `field` of Call. `about`: its transfer, or NULL. */
kvgrpc_code kv_ask(kvgrpc_engine *engine, kv_transfer *about, const char *traceparent, uint32_t field,
                   const kv_writer *request, kvgrpc_error *error);
kvgrpc_code kv_check_alive(const kvgrpc_engine *engine, kvgrpc_error *error);
/* Ends the session for a reason. */
kvgrpc_code kv_end_session(kvgrpc_engine *engine, const kvgrpc_error *why, kvgrpc_error *error);

/* Fields of Call. */
enum {
  KV_CALL_FINISHED_BLOCKS = 3,
  KV_CALL_PULL_BLOCKS = 4,
  KV_CALL_CANCEL_TRANSFER = 5,
  KV_CALL_RESERVE_BLOCKS = 11,
  KV_CALL_REGISTER_PUSH = 12,
  KV_CALL_STEP_DONE = 13
};

/* Number of a call whose answer nobody hears: a transfer may end while it is cancelled. */
#define KV_UNHEARD UINT64_MAX

/* Do what waited for the transfer's name. */
kvgrpc_code kv_start_named(kvgrpc_engine *engine, kv_transfer *pull, kvgrpc_error *error);
kvgrpc_code kv_cancel_named(kvgrpc_engine *engine, const kv_transfer *transfer, const char *message,
                            kvgrpc_error *error);

#endif
