/* A rank that brings its memory, in a process of its own, and the test as its lead. */
#ifndef OWN_RANK_H
#define OWN_RANK_H

#include <sys/types.h>

#include "lying_lead.h"

#define OWN_SEGMENTS 2
#define OWN_SEGMENT_BYTES 8192
#define OWN_BYTES (OWN_SEGMENTS * OWN_SEGMENT_BYTES)

typedef struct own_rank {
  lying_lead lead;
  pid_t process;
  /* The segments, which the test sees too: not in the order of their offsets. */
  uint8_t *segments[OWN_SEGMENTS];
} own_rank;

void own_rank_start(own_rank *rank, uint32_t number);
/* Takes an attach of the rank: the first one, or that of one that comes back with its memory at rest. */
void own_rank_attach(own_rank *rank, bool returns);
/* Ends the session, and returns the code with which kvgrpc_rank_serve ended. */
kvgrpc_code own_rank_end(own_rank *rank);
uint8_t *own_rank_at(own_rank *rank, size_t offset);
/* Fills the memory with bytes that follow from `seed`. */
void own_rank_fill(own_rank *rank, unsigned seed);

/* Sends one command, whose message is in field `field` of RankCommand. It frees the message. */
void own_rank_say(own_rank *rank, uint32_t field, kv_writer *message);
/* Reads one report, which is in field `field` of RankReport. The caller frees it. */
kv_writer own_rank_hear(own_rank *rank, uint32_t field);

/* Asks for an offer and returns its endpoint, for the caller to free. */
kv_writer own_rank_offer(own_rank *rank, const char *peer);
/* Connects to an endpoint by paths (NULL ends them), and returns the path in `why` or the last reason against one. */
bool own_rank_connect(own_rank *rank, const char *peer, uint32_t peer_rank, const kv_writer *endpoint,
                      const char *const *paths, char why[256]);
/* The two halves of it. The second one takes the next report of an attempt, whichever it is of. */
void own_rank_ask_to_connect(own_rank *rank, const char *peer, uint32_t peer_rank, const kv_writer *endpoint,
                             const char *const *paths);
bool own_rank_connected(own_rank *rank, uint32_t *peer_rank, char why[256]);
/* Begins a posting. */
void own_rank_post(own_rank *rank, const char *peer, uint32_t peer_rank, uint32_t operation, const uint32_t *src,
                   const uint32_t *dst, const uint32_t *nbytes, size_t count, const kv_writer *more);
/* Waits for the end of a posting. Returns whether all bytes came; it is quiesced. */
bool own_rank_posted(own_rank *rank, uint64_t *moved);

#endif
