/* The ranks of peers that this one reaches, and is about to reach. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "mover.h"

#define LINKS_MAX 8192
#define ATTEMPTS_MAX 4096
/* f_type of files in huge pages. */
#define HUGETLBFS 0x958458f6u

/* ---- links */

static kv_link **find(kv_mover *mover, kvgrpc_bytes peer, uint32_t rank) {
  kv_link **at = &mover->links;
  while (*at && ((*at)->rank != rank || !kv_same((*at)->peer, peer))) at = &(*at)->next;
  return at;
}

static void free_link(kv_link *link) {
  kv_memory_free(&link->source);
  if (link->mapping) munmap(link->mapping, link->mapped);
  if (link->process.end >= 0) close(link->process.end);
  kv_disown(link->peer);
  free(link);
}

void kv_link_let_go(kv_link *link) {
  if (!--link->holders) free_link(link);
}

static void unlink_at(kv_mover *mover, kv_link **at) {
  kv_link *link = *at;
  *at = link->next;
  mover->link_count--;
  kv_link_let_go(link);
}

kv_link *kv_peers_hold(kv_mover *mover, kvgrpc_bytes peer, uint32_t rank) {
  pthread_mutex_lock(&mover->lock);
  kv_link *link = *find(mover, peer, rank);
  if (link) link->holders++;
  pthread_mutex_unlock(&mover->lock);
  return link;
}

void kv_peers_let_go(kv_mover *mover, kv_link *link) {
  pthread_mutex_lock(&mover->lock);
  kv_link_let_go(link);
  pthread_mutex_unlock(&mover->lock);
}

void kv_peers_disconnect(kv_mover *mover, kvgrpc_bytes peer, const uint32_t *rank, bool watch, bool gone) {
  pthread_mutex_lock(&mover->lock);
  if (gone) kv_tokens_revoke(mover, &peer);
  for (kv_awaited *row = mover->awaited; row && !watch; row = row->next)
    if (kv_same(row->peer, peer) && (!rank || *rank == row->rank)) row->dropped = true;
  for (kv_attempt *row = mover->attempts; row; row = row->next)
    if (kv_same(row->peer, peer) && (!rank || *rank == row->rank)) row->cancelled = true;
  for (kv_link **at = &mover->links; *at;) {
    if (kv_same((*at)->peer, peer) && (!rank || *rank == (*at)->rank)) unlink_at(mover, at);
    else at = &(*at)->next;
  }
  pthread_mutex_unlock(&mover->lock);
  kv_mover_wake(mover);
}

/* Begins to await the end of a link's process, under the lock. An end that cannot be seen is never reported. */
static void await_end(kv_mover *mover, kv_link *link) {
  if (link->awaited || link->process.end < 0) return;
  kv_awaited *row = calloc(1, sizeof *row);
  if (!row) return;
  row->peer = kv_own(link->peer);
  row->end = row->peer.data ? fcntl(link->process.end, F_DUPFD_CLOEXEC, 0) : -1;
  if (row->end < 0) {
    kv_disown(row->peer);
    free(row);
    return;
  }
  for (kv_awaited *before = mover->awaited; before; before = before->next)
    if (before->rank == link->rank && kv_same(before->peer, link->peer)) before->dropped = true;
  row->life = mover->life;
  row->rank = link->rank;
  row->next = mover->awaited;
  mover->awaited = row;
  link->awaited = true;
}

void kv_peers_await_end(kv_mover *mover, kvgrpc_bytes peer) {
  pthread_mutex_lock(&mover->lock);
  for (kv_link *link = mover->links; link; link = link->next)
    if (kv_same(link->peer, peer)) await_end(mover, link);
  pthread_mutex_unlock(&mover->lock);
  kv_mover_wake(mover);
}

void kv_peers_end(kv_mover *mover) {
  for (kv_awaited *row = mover->awaited; row; row = row->next) row->dropped = true;
  for (kv_attempt *row = mover->attempts; row; row = row->next) row->cancelled = true;
  while (mover->links) unlink_at(mover, &mover->links);
}

/* ---- attempts */

void kv_attempt_free(kv_attempt *attempt) {
  if (attempt->fd >= 0) close(attempt->fd);
  if (attempt->end >= 0) close(attempt->end);
  kv_writer_free(&attempt->rejected);
  kv_disown(attempt->peer);
  free(attempt->endpoint.segments);
  free(attempt);
}

void kv_attempt_put_rejected(kv_attempt *attempt, kvgrpc_bytes path, const char *why) {
  const size_t row = kv_open(&attempt->rejected, 4);
  kv_put_bytes(&attempt->rejected, 1, path);
  kv_put_why(&attempt->rejected, 2, why);
  kv_close(&attempt->rejected, row);
}

static kvgrpc_bytes name_of(kv_path path) {
  return path == KV_SHM ? (kvgrpc_bytes){"shm", 3} : (kvgrpc_bytes){"cma", 3};
}

/* Reports the end of an attempt that no table has any more, and frees it. `path`: the one that connected, or NULL. */
static void report(kv_mover *mover, kv_attempt *attempt, const kv_path *path, const char *why) {
  kv_writer made = {0};
  const size_t row = kv_open(&made, 2);
  kv_put_bytes(&made, 1, attempt->peer);
  if (path) kv_put_bytes(&made, 2, name_of(*path));
  if (path) kv_put_text(&made, 3, why);
  kv_put_bytes_raw(&made, attempt->rejected.data, attempt->rejected.size);
  made.failed |= attempt->rejected.failed;
  kv_put_varint(&made, 5 << 3); /* A rank 0 is stated, too. */
  kv_put_varint(&made, attempt->rank);
  kv_put_uint(&made, 6, attempt->number);
  kv_close(&made, row);
  mover->report(mover->rank, attempt->life, &made);
  kv_writer_free(&made);
  kv_attempt_free(attempt);
}

void kv_attempt_refused(kv_mover *mover, kv_attempt *attempt, const char *why) {
  for (; attempt->at < attempt->path_count; attempt->at++)
    kv_attempt_put_rejected(attempt, name_of(attempt->paths[attempt->at]), why);
  report(mover, attempt, NULL, NULL);
}

/* Takes an attempt out of its table, under the lock. */
static void take_out(kv_mover *mover, const kv_attempt *attempt) {
  kv_attempt **at = &mover->attempts;
  while (*at != attempt) at = &(*at)->next;
  *at = attempt->next;
  mover->attempt_count--;
}

bool kv_peers_connect(kv_mover *mover, kv_attempt *attempt) {
  const char *why = NULL;
  pthread_mutex_lock(&mover->lock);
  kv_attempt **at = &mover->attempts;
  bool taken = *find(mover, attempt->peer, attempt->rank) != NULL;
  for (; *at; at = &(*at)->next)
    taken |= !(*at)->cancelled && (*at)->rank == attempt->rank && kv_same((*at)->peer, attempt->peer);
  if (taken) why = "that rank of the peer is connected, or about to be: disconnect it first";
  else if (mover->attempt_count >= ATTEMPTS_MAX) why = "too many ranks are about to be connected";
  else if (mover->link_count >= LINKS_MAX) why = "too many ranks are connected";
  else if (!attempt->path_count) why = "no data path is allowed";
  if (!why) {
    *at = attempt;
    mover->attempt_count++;
  }
  pthread_mutex_unlock(&mover->lock);
  if (why) kv_attempt_refused(mover, attempt, why);
  else kv_mover_wake(mover);
  return true;
}

static void end_question(kv_attempt *attempt) {
  if (attempt->fd >= 0) close(attempt->fd);
  if (attempt->end >= 0) close(attempt->end);
  attempt->fd = attempt->end = -1;
  attempt->sent = false;
  attempt->began = 0;
}

void kv_attempt_rejected(kv_mover *mover, kv_attempt *attempt, const char *why) {
  kv_attempt_put_rejected(attempt, name_of(attempt->paths[attempt->at++]), why);
  end_question(attempt);
  if (attempt->at < attempt->path_count) return;
  pthread_mutex_lock(&mover->lock);
  take_out(mover, attempt);
  pthread_mutex_unlock(&mover->lock);
  report(mover, attempt, NULL, NULL);
}

/* Maps the pool that a peer gave, if it is safe to read and is the one offered. */
static const char *map_shared(kv_link *link, const kv_endpoint *endpoint, int descriptor) {
  const int seals = F_SEAL_SHRINK | F_SEAL_GROW, flags = fcntl(descriptor, F_GETFL);
  const int found = fcntl(descriptor, F_GET_SEALS);
  struct stat file;
  struct statfs system;
  if (descriptor < 0) return "the peer answered with something else than a descriptor";
  if (flags < 0 || (flags & O_ACCMODE) != O_RDONLY) return "the peer's descriptor is not a pool to map: it is writable";
  if (found < 0 || (found & seals) != seals) return "the peer's descriptor is not a pool to map: its size may change";
  /* Its owner can still take pages out of it. Others come in their place, but huge ones may have run out. */
  if (fstatfs(descriptor, &system) || (uint32_t)system.f_type == HUGETLBFS)
    return "the peer's descriptor is not a pool to map: it is in huge pages";
  if (fstat(descriptor, &file) || !kv_is_allocated(&file))
    return "the peer's descriptor is not a pool to map: it is not allocated in full";
  const uint64_t size = (uint64_t)file.st_size, offset = endpoint->shm_nonce_offset;
  if (size < KV_NONCE_BYTES || offset > size - KV_NONCE_BYTES || size >= KV_ADDRESS_END)
    return "the peer's descriptor is not a pool to map: it has fewer bytes than the peer spoke of";
  void *mapping = mmap(NULL, (size_t)size, PROT_READ, MAP_SHARED, descriptor, 0);
  if (mapping == MAP_FAILED) return "the peer's pool cannot be mapped";
  link->mapping = mapping;
  link->mapped = (size_t)size;
  if (!kv_equal((const char *)mapping + offset, endpoint->shm_nonce, KV_NONCE_BYTES))
    return "the mapping is of another pool than the peer spoke of";
  const kv_segment whole = {(uint64_t)(uintptr_t)mapping, endpoint->shm_bytes, 1, 0};
  return kv_memory_make(&link->source, &whole, 1);
}

/* Proves that the process that answered made the offer. */
static const char *prove(kv_link *link, kv_attempt *attempt, const uint8_t *payload, size_t size, char *room) {
  uint64_t addresses[2] = {0, 0};
  uint8_t offered[KV_SHA256_BYTES];
  if (attempt->pid == getpid()) return "the peer names this very process: give each a process of its own";
  if (size != sizeof addresses) return "the peer's process proves nothing";
  if (link->process.end < 0) return "the peer's process is gone, or not in this process's PID namespace";
  for (size_t i = 0; i < size; i++) addresses[i / 8] |= (uint64_t)payload[i] << (8 * (i % 8));
  const char *why = kv_memory_make(&link->source, attempt->endpoint.segments, attempt->endpoint.segment_count);
  if (why) return why;
  kv_memory_digest(&link->source, offered);
  link->process.nonce_address = addresses[1];
  return kv_prove(&link->process, addresses[0], attempt->challenge, offered, room) ? NULL : room;
}

void kv_attempt_answered(kv_mover *mover, kv_attempt *attempt, const uint8_t *payload, size_t size, int descriptor) {
  char room[KV_WHY_BYTES];
  const kv_path path = attempt->paths[attempt->at];
  kv_link *link = calloc(1, sizeof *link);
  const char *why = NULL;
  if (link) link->process = (kv_process){.pid = attempt->pid, .end = attempt->end};
  if (link) attempt->end = -1;
  if (link) link->peer = kv_own(attempt->peer);
  if (!link || !link->peer.data) why = "this process has no memory left";
  else if (path == KV_SHM) why = map_shared(link, &attempt->endpoint, descriptor);
  else why = prove(link, attempt, payload, size, room);
  if (why) {
    if (link) free_link(link);
    kv_attempt_rejected(mover, attempt, why);
    return;
  }
  link->rank = attempt->rank;
  link->holders = 1;
  if (path == KV_SHM) snprintf(room, sizeof room, "same host: the peer's pool of %llu bytes is mapped read-only",
                               (unsigned long long)link->source.size);
  else snprintf(room, sizeof room, "same host and user: %llu bytes of process %d are read (process_vm_readv)",
                (unsigned long long)link->source.size, (int)link->process.pid);
  end_question(attempt);
  pthread_mutex_lock(&mover->lock);
  take_out(mover, attempt);
  const bool late = attempt->cancelled;
  if (late) {
    free_link(link);
  } else {
    link->next = mover->links;
    mover->links = link;
    mover->link_count++;
  }
  pthread_mutex_unlock(&mover->lock);
  if (late) kv_attempt_refused(mover, attempt, "disconnected before it was connected");
  else report(mover, attempt, &path, room);
}
