/* A lead that says what a test tells it to: real sockets, and no truth. */
#ifndef LYING_LEAD_H
#define LYING_LEAD_H

#include <pthread.h>

#include "engine.h"

typedef struct lying_lead {
  char folder[64];
  char path[96];
  int listener;
  int connection; /* To the one that attached; -1: none. */
} lying_lead;

void lead_listen(lying_lead *lead);
/* Takes the next connection and its first frame, whose message it returns for the caller to free. */
kv_writer lead_accept(lying_lead *lead);
/* Reads one frame of the connection. */
kv_writer lead_read(lying_lead *lead);
void lead_say(lying_lead *lead, const void *data, size_t size, const int *descriptors, size_t count);
/* Says a message in a frame of the right length. */
void lead_say_frame(lying_lead *lead, const kv_writer *message, const int *descriptors, size_t count);
void lead_hang_up(lying_lead *lead);
void lead_close(lying_lead *lead);

/* Makes the file of a pool of `bytes`, as a lead does; `stated` stands behind it. */
int lead_pool(size_t bytes, uint64_t stated, int seals);
/* Writes the answer to a rank's attach, or to an engine's. */
void put_rank_attached(kv_writer *to, uint64_t shared_bytes);
void put_engine_attached(kv_writer *to);

/* Number of descriptors that this process has open. */
int open_descriptors(void);

/* Runs `lie` in a thread, with `lead`. */
typedef struct liar {
  pthread_t thread;
  void (*lie)(lying_lead *, void *);
  lying_lead *lead;
  void *with;
} liar;
void liar_start(liar *liar, lying_lead *lead, void (*lie)(lying_lead *, void *), void *with);
void liar_join(liar *liar);

#endif
