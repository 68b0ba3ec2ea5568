#define _GNU_SOURCE
#include "process.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77 /* Since Linux 6.5. */
#endif
#ifndef PR_SET_PTRACER
#define PR_SET_PTRACER 0x59616d61
#endif
#define PTRACER_ANY (~0ul)
#define USERS (UINT64_C(1) << 32)

bool kv_random(void *into, size_t size) {
  uint8_t *at = into;
  while (size) {
    const ssize_t got = getrandom(at, size, 0);
    if (got < 0 && errno != EINTR) return false;
    if (got > 0) at += got, size -= (size_t)got;
  }
  return true;
}

/* Returns whether every user has a number of its own in this user namespace: the overflow uid is then a user's. */
static bool maps_all_users(void) {
  FILE *map = fopen("/proc/self/uid_map", "re");
  unsigned long long inside, outside, count, all = 0;
  if (!map) return false;
  while (fscanf(map, "%llu %llu %llu", &inside, &outside, &count) == 3) all += count;
  fclose(map);
  return all == USERS - 1;
}

bool kv_is_own_user(uid_t user) {
  unsigned long overflow = 65534;
  FILE *named = fopen("/proc/sys/kernel/overflowuid", "re");
  if (named) {
    if (fscanf(named, "%lu", &overflow) != 1) overflow = 65534;
    fclose(named);
  }
  return user == geteuid() && (user != overflow || maps_all_users());
}

/* Admits a reader besides the one admitted before (-1: none, 0: any). */
static int admit(pid_t pid, pid_t *admitted) {
  if (*admitted == 0 || *admitted == pid) return 0;
  FILE *yama = fopen("/proc/sys/kernel/yama/ptrace_scope", "re");
  const int scope = yama ? fgetc(yama) : EOF;
  if (yama) fclose(yama);
  if (scope != '1') return 0;
  const pid_t wanted = *admitted < 0 ? pid : 0;
  if (prctl(PR_SET_PTRACER, wanted ? (unsigned long)wanted : PTRACER_ANY, 0, 0, 0)) return errno;
  *admitted = wanted;
  return 0;
}

int kv_admit_reader(pid_t pid) {
  static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  static pid_t process, admitted;
  pthread_mutex_lock(&lock);
  if (process != getpid()) { /* A fork admits no one. */
    process = getpid();
    admitted = -1;
  }
  const int number = admit(pid, &admitted);
  pthread_mutex_unlock(&lock);
  return number;
}

int kv_listener(int connected, pid_t *pid, uid_t *user) {
  struct ucred peer = {0, (uid_t)-1, 0};
  socklen_t size = sizeof peer;
  int end = -1;
  *pid = 0;
  *user = (uid_t)-1;
  if (getsockopt(connected, SOL_SOCKET, SO_PEERCRED, &peer, &size)) return -1;
  *pid = peer.pid;
  *user = peer.uid;
  if (!peer.pid) return -1; /* It is not seen from this PID namespace. */
  size = sizeof end;
  if (!getsockopt(connected, SOL_SOCKET, SO_PEERPIDFD, &end, &size)) return end;
  /* An older kernel: the number may be another's by now, which the proof then shows. */
  return (int)syscall(SYS_pidfd_open, peer.pid, 0);
}

bool kv_has_ended(int pidfd) {
  struct pollfd end = {pidfd, POLLIN, 0};
  return pidfd < 0 || poll(&end, 1, 0) > 0;
}

void kv_proof(const uint8_t challenge[32], uint64_t nonce_address, const uint8_t nonce[KV_NONCE_BYTES],
              const uint8_t offered[KV_SHA256_BYTES], uint8_t into[KV_SHA256_BYTES]) {
  kv_sha256 hash;
  uint8_t address[8];
  for (size_t i = 0; i < sizeof address; i++) address[i] = (uint8_t)(nonce_address >> (8 * i));
  kv_sha256_begin(&hash);
  kv_sha256_add(&hash, "kvgrpc process", 14);
  kv_sha256_add(&hash, challenge, 32);
  kv_sha256_add(&hash, address, sizeof address);
  kv_sha256_add(&hash, nonce, KV_NONCE_BYTES);
  kv_sha256_add(&hash, offered, KV_SHA256_BYTES);
  kv_sha256_end(&hash, into);
}

bool kv_equal(const void *one, const void *two, size_t size) {
  const uint8_t *left = one, *right = two;
  unsigned different = 0;
  for (size_t i = 0; i < size; i++) different |= left[i] ^ right[i];
  return !different;
}

static bool read_bytes(pid_t pid, uint64_t address, void *into, size_t size, char why[KV_WHY_BYTES]) {
  struct iovec local = {into, size}, remote = {(void *)(uintptr_t)address, size};
  return kv_process_read(pid, &local, &remote, 1, why);
}

bool kv_prove(kv_process *process, uint64_t proof_address, const uint8_t challenge[32],
              const uint8_t offered[KV_SHA256_BYTES], char why[KV_WHY_BYTES]) {
  uint8_t shown[KV_SHA256_BYTES], wanted[KV_SHA256_BYTES];
  if (!proof_address || proof_address >= KV_ADDRESS_END || !process->nonce_address ||
      process->nonce_address >= KV_ADDRESS_END) {
    snprintf(why, KV_WHY_BYTES, "the peer's process names addresses that make no sense");
    return false;
  }
  if (!read_bytes(process->pid, proof_address, shown, sizeof shown, why) ||
      !read_bytes(process->pid, process->nonce_address, process->nonce, sizeof process->nonce, why))
    return false;
  kv_proof(challenge, process->nonce_address, process->nonce, offered, wanted);
  if (kv_equal(shown, wanted, sizeof wanted)) return kv_process_check(process, why);
  snprintf(why, KV_WHY_BYTES, "process %d is not the peer: it shows another answer than was asked for", process->pid);
  return false;
}

bool kv_process_check(const kv_process *process, char why[KV_WHY_BYTES]) {
  uint8_t nonce[KV_NONCE_BYTES];
  if (!read_bytes(process->pid, process->nonce_address, nonce, sizeof nonce, why)) return false;
  if (!kv_equal(nonce, process->nonce, sizeof nonce)) {
    snprintf(why, KV_WHY_BYTES, "process %d has not the peer's memory any more: it shows another nonce", process->pid);
    return false;
  }
  if (!kv_has_ended(process->end)) return true;
  snprintf(why, KV_WHY_BYTES, "the peer's process %d has ended", process->pid);
  return false;
}

static const char *meaning(int number) {
  switch (number) {
    case EPERM:
      return "the kernel forbids it: another user, a protected process, a seccomp filter, or Yama";
    case ESRCH:
      return "there is no such process, or not in this process's PID namespace";
    case EFAULT:
      return "memory that the peer named is not mapped in its process or in this one";
    case ENOSYS:
      return "this kernel does not have the call";
    default:
      return "unexpected";
  }
}

bool kv_process_read(pid_t pid, struct iovec *local, struct iovec *remote, size_t count, char why[KV_WHY_BYTES]) {
  size_t at = 0;
  while (at < count) {
    const ssize_t copied = process_vm_readv(pid, local + at, count - at, remote + at, count - at, 0);
    if (copied <= 0) {
      const int number = errno;
      if (copied)
        snprintf(why, KV_WHY_BYTES, "cannot read process %d: %s (%s)", pid, strerror(number), meaning(number));
      else
        snprintf(why, KV_WHY_BYTES, "process %d gave no byte at %p", pid, remote[at].iov_base);
      return false;
    }
    size_t left = (size_t)copied;
    while (left && left >= local[at].iov_len) left -= local[at++].iov_len;
    if (left) { /* The rest of this run follows. */
      local[at].iov_base = (char *)local[at].iov_base + left;
      remote[at].iov_base = (char *)remote[at].iov_base + left;
      local[at].iov_len = remote[at].iov_len -= left;
    }
  }
  return true;
}
