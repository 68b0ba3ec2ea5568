/* The mover of a rank that brings its memory: it offers the memory, reaches peers, and copies what its lead commands.
 *
 * The thread that serves the rank takes commands, checks them and queues what copies. One thread copies, in order: a
 * posting is over when its last call returned. Another thread answers peers that ask this process for a proof, asks
 * theirs, and looks for their ends. Both read memory of peers' processes, and nothing bounds that wait: a peer of this
 * user whose memory is a mapping of a file, or that sends a descriptor of one, stops the thread for as long as the daemon
 * of its file system (FUSE) does not answer. Every other wait for a peer has a bound.
 *
 * One lock guards all tables. It is never held while a report is sent, a proof is read or a byte is copied.
 */
#ifndef KV_MOVER_H
#define KV_MOVER_H

#include <pthread.h>
#include <stdatomic.h>

#include "failure.h"
#include "process.h"

typedef struct kv_mover kv_mover;
/* Sends one RankReport, unless its life is over. Any thread calls it, without the lock. */
typedef void (*kv_report)(void *rank, uint64_t life, const kv_writer *report);

/* Makes a mover, whose threads begin. The caller's memory is used until kv_mover_free returns. */
kv_mover *kv_mover_make(uint32_t number, const kvgrpc_memory *memory, size_t count, kv_report report, void *rank,
                        kvgrpc_error *error);
/* The session that commands it: a number that grows with each. */
uint64_t kv_mover_life(const kv_mover *mover);
/* Performs one RankCommand, or begins it. Returns false for one that cannot be read or is none of this schema. */
bool kv_mover_command(kv_mover *mover, kvgrpc_bytes command);
/* Ends the session's life: nothing that it began goes on, beyond the call at work. Returns whether that call ended
 * within the timeout, so that the memory is at rest. */
bool kv_mover_end(kv_mover *mover, double timeout_s);
/* Waits for the call at work of either thread, however long it takes: then no access to the memory follows, and peers
 * that hold this process for it find another nonce. NULL is allowed. */
void kv_mover_free(kv_mover *mover);

/* ---- for the files of the mover */

#define KV_CHALLENGE_BYTES 32
#define KV_TOKEN_BYTES 32
#define KV_SOCKET_NAME_BYTES 108
/* Maximum length of the names that a lead gives to peers, postings and sums, in bytes. */
#define KV_NAME_BYTES_MAX 1024

typedef enum kv_path { KV_SHM, KV_CMA, KV_PATHS } kv_path;

/* A connected rank of a peer. It is let go with its last holder: the table, or a posting. */
typedef struct kv_link {
  struct kv_link *next;
  size_t holders;
  kvgrpc_bytes peer;
  uint32_t rank;
  kv_memory source; /* By addresses of the peer's process, or of a mapping here. */
  void *mapping;    /* NULL: the process is read. */
  size_t mapped;
  kv_process process;
  bool awaited;
} kv_link;

/* What a peer says of its rank. */
typedef struct kv_endpoint {
  bool given[KV_PATHS];
  char socket[KV_PATHS][KV_SOCKET_NAME_BYTES];
  uint8_t token[KV_PATHS][KV_TOKEN_BYTES];
  uint64_t shm_bytes;
  uint64_t shm_nonce_offset;
  uint8_t shm_nonce[KV_NONCE_BYTES];
  bool shm_nonce_right; /* It has the right length. */
  kv_segment *segments;
  size_t segment_count;
} kv_endpoint;

/* An attempt to reach a peer's rank. The peers' thread works on it; others begin and cancel it, under the lock. */
typedef struct kv_attempt {
  struct kv_attempt *next;
  uint64_t life;
  kvgrpc_bytes peer;
  uint32_t rank;
  uint64_t number;
  bool cancelled;
  kv_endpoint endpoint;
  kv_path paths[KV_PATHS]; /* Those to try, in order. */
  size_t path_count, at;
  kv_writer rejected; /* RejectedPath rows of the report. */
  /* The question under way. */
  int fd;
  bool sent;
  pid_t pid;
  int end;
  double began;
  uint8_t challenge[KV_CHALLENGE_BYTES];
} kv_attempt;

typedef struct kv_awaited {
  struct kv_awaited *next;
  uint64_t life;
  kvgrpc_bytes peer;
  uint32_t rank;
  int end;
  bool dropped;
} kv_awaited;

typedef struct kv_token kv_token;
typedef struct kv_job kv_job;

struct kv_mover {
  uint32_t number;
  kv_memory memory;
  uint8_t offered[KV_SHA256_BYTES];
  kv_report report;
  void *rank;
  _Atomic uint64_t life;
  _Atomic bool closing;

  pthread_mutex_t lock;
  uint8_t *nonce; /* At an address that stays. */
  kv_token *tokens; /* The oldest first. */
  size_t token_count;
  kv_link *links;
  size_t link_count;
  kv_attempt *attempts; /* The oldest first. */
  size_t attempt_count;
  kv_awaited *awaited;

  kv_job *jobs, **last_job;
  size_t job_count;
  size_t job_bytes;
  bool copying;
  pthread_cond_t queued; /* There is a job, or an end. */
  pthread_cond_t rested; /* No job is at work. */
  pthread_t copier;
  bool has_copier;

  char socket_name[KV_SOCKET_NAME_BYTES]; /* Without the "@" that begins it. */
  int listener;
  int wake; /* An eventfd. */
  pthread_t asker;
  bool has_asker;
};

bool kv_same(kvgrpc_bytes one, kvgrpc_bytes two);
void kv_mover_wake(kv_mover *mover);

/* tokens.c, under the lock. */
const kv_token *kv_token_mint(kv_mover *mover, kvgrpc_bytes peer);
const uint8_t *kv_token_secret(const kv_token *token);
/* Invalidates the tokens of a peer; of all peers without one. */
void kv_tokens_revoke(kv_mover *mover, const kvgrpc_bytes *peer);
#define KV_REPLY_BYTES 256
/* Answers the question of a process. Returns the length of the reply. */
size_t kv_token_answer(kv_mover *mover, const uint8_t *question, size_t size, pid_t pid, uint8_t reply[KV_REPLY_BYTES]);

/* peers.c */
bool kv_peers_connect(kv_mover *mover, kv_attempt *attempt); /* It takes the attempt. */
void kv_peers_disconnect(kv_mover *mover, kvgrpc_bytes peer, const uint32_t *rank, bool watch, bool gone);
void kv_peers_await_end(kv_mover *mover, kvgrpc_bytes peer);
/* Returns a connected rank, held for the caller; NULL: there is none. */
kv_link *kv_peers_hold(kv_mover *mover, kvgrpc_bytes peer, uint32_t rank);
void kv_peers_let_go(kv_mover *mover, kv_link *link);
void kv_link_let_go(kv_link *link); /* Under the lock. */
void kv_peers_end(kv_mover *mover); /* Under the lock. */
void kv_attempt_free(kv_attempt *attempt);
/* Ends the try of the attempt's path, with an answer or with a reason. */
void kv_attempt_answered(kv_mover *mover, kv_attempt *attempt, const uint8_t *payload, size_t size, int descriptor);
void kv_attempt_rejected(kv_mover *mover, kv_attempt *attempt, const char *why);
/* Reports why the paths that are left were not tried, and ends the attempt. */
void kv_attempt_refused(kv_mover *mover, kv_attempt *attempt, const char *why);
void kv_attempt_put_rejected(kv_attempt *attempt, kvgrpc_bytes path, const char *why);

/* asker.c */
bool kv_asker_start(kv_mover *mover);

/* copier.c */
bool kv_copier_start(kv_mover *mover);
void kv_copier_drop_queue(kv_mover *mover); /* Under the lock. */
/* Take a PostCommand and a SumCommand. */
bool kv_copier_post(kv_mover *mover, kvgrpc_bytes command);
bool kv_copier_sum(kv_mover *mover, kvgrpc_bytes command);

#endif
