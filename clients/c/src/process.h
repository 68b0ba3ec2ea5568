/* Processes of one host and user: who may ask, and what a peer's process proves.
 *
 * A peer's statements prove nothing. The process is the one that listens at its socket, by the kernel's word. It is
 * held by a pidfd from before it is asked, and alive after the last byte. A challenge of our own is found in its
 * memory, by the call that reads the blocks, in a digest over what it offered. */
#ifndef KV_PROCESS_H
#define KV_PROCESS_H

#include <sys/types.h>
#include <sys/uio.h>

#include "memory.h"

#define KV_NONCE_BYTES 32
#define KV_WHY_BYTES 256
/* Maximum number of runs of one call on either side (UIO_MAXIOV). */
#define KV_IOV_MAX 1024

typedef struct kv_process {
  pid_t pid;
  int end; /* A pidfd; -1: none. */
  uint64_t nonce_address;
  uint8_t nonce[KV_NONCE_BYTES];
} kv_process;

/* Fills bytes at random. */
bool kv_random(void *into, size_t size);
/* Returns whether a user that the kernel names is that of this process, and of no other. */
bool kv_is_own_user(uid_t user);
/* Compares in a time that does not depend on where the bytes differ. */
bool kv_equal(const void *one, const void *two, size_t size);
/* Lets a process read this one where Yama lets only parents read: from the second one on, any of this user. What was
 * let is kept once for all ranks of this process, as the kernel keeps it. Returns an errno. */
int kv_admit_reader(pid_t pid);
/* Returns a pidfd of the process that listens at the other end of a socket, and its id; -1 if it cannot be held. */
int kv_listener(int connected, pid_t *pid, uid_t *user);
bool kv_has_ended(int pidfd);

void kv_proof(const uint8_t challenge[32], uint64_t nonce_address, const uint8_t nonce[KV_NONCE_BYTES],
              const uint8_t offered[KV_SHA256_BYTES], uint8_t into[KV_SHA256_BYTES]);
/* Finds the proof in the memory of a held process. Returns false, with the reason, if it is not there. */
bool kv_prove(kv_process *process, uint64_t proof_address, const uint8_t challenge[32],
              const uint8_t offered[KV_SHA256_BYTES], char why[KV_WHY_BYTES]);
/* Returns whether the process still has that memory, and is alive after that. */
bool kv_process_check(const kv_process *process, char why[KV_WHY_BYTES]);
/* Copies at most KV_IOV_MAX runs, whose lengths are equal on both sides. It changes them. */
bool kv_process_read(pid_t pid, struct iovec *local, struct iovec *remote, size_t count, char why[KV_WHY_BYTES]);

#endif
