/* A rank, for the files that share it. */
#ifndef KV_RANK_H
#define KV_RANK_H

#include <pthread.h>

#include "connection.h"
#include "mover.h"

typedef struct layers_report {
  uint64_t step;
  uint32_t first;
  uint32_t count;
} layers_report;

struct kvgrpc_rank {
  uint32_t number;
  char *socket_path;
  kvgrpc_bytes secret;
  double comes_back_s;

  int memory; /* The shared pool's file, which the next lead asks for. */
  kv_mover *mover; /* Of a rank that brings its memory; else NULL. */
  bool at_rest;    /* Nothing that an earlier lead commanded is under way. */

  uint8_t *mapping;
  size_t mapped;
  size_t pool_bytes;

  pthread_mutex_t lock; /* Held while `connection` is sent to or replaced, and for the steps. */
  kv_connection connection;
  bool over; /* The engine's life is over for this rank. */
  uint64_t done;
  layers_report *layers;
  size_t layer_count;

  int stop; /* An eventfd. */
  char **writes; /* Open accesses by which peers may write into the memory. Only the serving thread looks. */
  size_t write_count;
  bool writes_lost;
};

/* steps.c */
/* Sends all steps that were reported, over a new connection. */
kvgrpc_code kv_steps_repeat(const kvgrpc_rank *rank, kv_connection *next, kvgrpc_error *error);
/* Sends a report of the mover, unless its life is over. */
void kv_rank_report(void *rank, uint64_t life, const kv_writer *report);

/* writes.c */
/* Takes an ExpectCommand. Returns false for one that cannot be read. */
bool kv_writes_take(kvgrpc_rank *rank, kvgrpc_bytes message);
void kv_writes_free(kvgrpc_rank *rank);

#endif
