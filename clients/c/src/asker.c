/* The thread that answers peers' questions, asks the processes of peers, and looks for their ends.
 *
 * A question and an answer are one packet each (SOCK_SEQPACKET), at a socket with an abstract name: it leaves nothing
 * behind, and both sides ask the kernel for the other's user. A client that stays silent is dropped, and few are kept.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "connection.h"
#include "mover.h"

#define BACKLOG 128
#define CLIENTS_MAX 16
/* Time for a client to send its question, in seconds. */
#define CLIENT_S 1.0
/* Time without accepting while this process may open no more files, in seconds. */
#define FULL_S 0.1
/* Questions under way at once. */
#define AT_ONCE 128
/* Maximum wait for an answer, in seconds, and that of the oldest questions while as many others wait. */
#define ANSWER_S 2.0
#define FAIR_S 0.25
/* Interval between attempts to connect while a listener's queue is full, in seconds. */
#define AGAIN_S 0.02
#define RANK_BYTES 2
#define PAYLOAD_BYTES_MAX 64
#define REASON_BYTES_MAX 200
#define ANSWERED 0
#define REFUSED 1

typedef struct client {
  int fd;
  double until;
} client;

typedef struct asking {
  kv_mover *mover;
  client clients[CLIENTS_MAX];
  size_t client_count;
  double accept_at;
  size_t waiting; /* Attempts that are not under way yet. */
  struct pollfd *rows;
  size_t row_count, row_capacity;
} asking;

static socklen_t address_of(struct sockaddr_un *address, const char *name) {
  memset(address, 0, sizeof *address);
  address->sun_family = AF_UNIX;
  const size_t size = strlen(name);
  memcpy(address->sun_path + 1, name, size);
  return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + size);
}

/* ---- clients that ask this process */

static void drop_client(asking *asker, size_t i) {
  close(asker->clients[i].fd);
  memmove(&asker->clients[i], &asker->clients[i + 1], (--asker->client_count - i) * sizeof *asker->clients);
}

static void answer_client(asking *asker, size_t i) {
  uint8_t question[KV_TOKEN_BYTES + KV_CHALLENGE_BYTES + RANK_BYTES + 1], reply[KV_REPLY_BYTES];
  kv_mover *mover = asker->mover;
  const ssize_t got = recv(asker->clients[i].fd, question, sizeof question, MSG_DONTWAIT);
  struct ucred peer = {0, 0, 0};
  socklen_t size = sizeof peer;
  if (got > 0 && !getsockopt(asker->clients[i].fd, SOL_SOCKET, SO_PEERCRED, &peer, &size)) {
    pthread_mutex_lock(&mover->lock);
    const size_t length = kv_token_answer(mover, question, (size_t)got, peer.pid, reply);
    pthread_mutex_unlock(&mover->lock);
    send(asker->clients[i].fd, reply, length, MSG_NOSIGNAL | MSG_DONTWAIT);
  }
  drop_client(asker, i);
}

static void accept_client(asking *asker, double now) {
  struct ucred peer = {0, 0, 0};
  socklen_t size = sizeof peer;
  const int fd = accept4(asker->mover->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
  if (fd < 0) { /* A client that this process cannot open a file for stays in the queue. */
    if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) asker->accept_at = now + FULL_S;
    return;
  }
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) || !kv_is_own_user(peer.uid)) {
    close(fd);
    return;
  }
  if (asker->client_count == CLIENTS_MAX) drop_client(asker, 0); /* It has been silent longest. */
  asker->clients[asker->client_count++] = (client){fd, now + CLIENT_S};
}

/* ---- questions to processes of peers */

/* Sends the question once the process is held: one that answers was there all the time. */
static void send_question(kv_mover *mover, kv_attempt *attempt) {
  uint8_t packet[KV_TOKEN_BYTES + KV_CHALLENGE_BYTES + RANK_BYTES];
  const kv_path path = attempt->paths[attempt->at];
  uid_t user;
  attempt->end = kv_listener(attempt->fd, &attempt->pid, &user);
  if (!kv_is_own_user(user)) {
    kv_attempt_rejected(mover, attempt, "the peer's process is another user's");
    return;
  }
  memcpy(packet, attempt->endpoint.token[path], KV_TOKEN_BYTES);
  memcpy(packet + KV_TOKEN_BYTES, attempt->challenge, KV_CHALLENGE_BYTES);
  packet[sizeof packet - 2] = (uint8_t)(mover->number >> 8);
  packet[sizeof packet - 1] = (uint8_t)mover->number;
  /* An older peer, whose ranks are asked only by ranks of the same number, does not understand a number. */
  const size_t size = sizeof packet - (mover->number == attempt->rank ? RANK_BYTES : 0);
  if (send(attempt->fd, packet, size, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)size) attempt->sent = true;
  else kv_attempt_rejected(mover, attempt, "the peer's socket takes no question");
}

/* Returns what speaks against asking by the attempt's path, or NULL. */
static const char *check_offer(const kv_mover *mover, const kv_attempt *attempt) {
  const kv_endpoint *offer = &attempt->endpoint;
  const kv_path path = attempt->paths[attempt->at];
  if (mover->number > 4095) return "ranks of this path have numbers below 4,096";
  if (!offer->given[path] && path == KV_SHM) return "the peer offers no shared pool";
  if (!offer->given[path]) return "the peer offers no reading of its memory";
  if (offer->socket[path][0] != '@' || !offer->socket[path][1]) return "this names no socket";
  if (path == KV_CMA) return offer->segment_count ? NULL : "the peer's list of its memory makes no sense";
  const bool right = offer->shm_nonce_right && offer->shm_bytes && offer->shm_bytes <= offer->shm_nonce_offset;
  return right ? NULL : "the peer's description of its pool contradicts itself";
}

static void begin_question(kv_mover *mover, kv_attempt *attempt, double now) {
  const char *why = check_offer(mover, attempt);
  attempt->began = now;
  if (!why && !kv_random(attempt->challenge, sizeof attempt->challenge)) why = "the kernel gives no random bytes";
  if (!why) attempt->fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (!why && attempt->fd < 0) why = "this process may open no more files";
  if (why) kv_attempt_rejected(mover, attempt, why);
}

/* Connects, sends, or gives up. A unix socket with a full queue cannot be waited for: it is tried again. */
static void go_on(kv_mover *mover, kv_attempt *attempt, double answer_s, double now) {
  struct sockaddr_un address;
  char why[KV_WHY_BYTES];
  const char *name = attempt->endpoint.socket[attempt->paths[attempt->at]];
  if (now - attempt->began > answer_s) {
    snprintf(why, sizeof why, "no answer at %.107s within %g s", name, answer_s);
    kv_attempt_rejected(mover, attempt, why);
    return;
  }
  if (attempt->sent) return;
  const socklen_t size = address_of(&address, name + 1);
  if (!connect(attempt->fd, (struct sockaddr *)&address, size)) {
    send_question(mover, attempt);
  } else if (errno != EAGAIN && errno != EINTR) {
    snprintf(why, sizeof why, "%.107s cannot be reached from here: %s", name, strerror(errno));
    kv_attempt_rejected(mover, attempt, why);
  }
}

static void take_answer(kv_mover *mover, kv_attempt *attempt) {
  uint8_t answer[1 + REASON_BYTES_MAX];
  union {
    struct cmsghdr align;
    char bytes[CMSG_SPACE(sizeof(int))];
  } control;
  struct iovec into = {answer, sizeof answer};
  struct msghdr message = {
      .msg_iov = &into, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
  const ssize_t got = recvmsg(attempt->fd, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
  int found[2] = {-1, -1}; /* Alignment leaves room for one too many. They come with an empty message, too. */
  size_t count = 0;
  struct cmsghdr *row = got >= 0 ? CMSG_FIRSTHDR(&message) : NULL;
  if (row && row->cmsg_level == SOL_SOCKET && row->cmsg_type == SCM_RIGHTS)
    for (; count < 2 && (count + 1) * sizeof(int) <= row->cmsg_len - CMSG_LEN(0); count++)
      memcpy(&found[count], CMSG_DATA(row) + count * sizeof(int), sizeof(int));
  const bool all = count < 2 && got > 0 && !(message.msg_flags & MSG_CTRUNC);
  char why[KV_WHY_BYTES];
  if (all && answer[0] == ANSWERED && got <= 1 + PAYLOAD_BYTES_MAX) {
    kv_attempt_answered(mover, attempt, answer + 1, (size_t)got - 1, found[0]);
  } else {
    if (got > 1 && answer[0] == REFUSED) snprintf(why, sizeof why, "the peer refused: %.*s", (int)got - 1, answer + 1);
    else snprintf(why, sizeof why, "the peer answered with something else than it was asked for");
    kv_attempt_rejected(mover, attempt, why);
  }
  for (size_t i = 0; i < count; i++) close(found[i]);
}

/* ---- the thread */

static bool watch(asking *asker, int fd, short events) {
  if (asker->row_count == asker->row_capacity) {
    const size_t capacity = asker->row_capacity ? asker->row_capacity * 2 : 64;
    struct pollfd *rows = realloc(asker->rows, capacity * sizeof *rows);
    if (!rows) return false;
    asker->rows = rows;
    asker->row_capacity = capacity;
  }
  asker->rows[asker->row_count++] = (struct pollfd){fd, events, 0};
  return true;
}

/* Frees what was cancelled, and returns the first attempts, which only this thread ends. */
static size_t sort_out(asking *asker, kv_attempt *under_way[AT_ONCE]) {
  kv_mover *mover = asker->mover;
  kv_attempt *cancelled = NULL;
  size_t count = 0;
  pthread_mutex_lock(&mover->lock);
  for (kv_attempt **at = &mover->attempts; *at;) {
    kv_attempt *row = *at;
    if (row->cancelled) {
      *at = row->next;
      row->next = cancelled;
      cancelled = row;
      mover->attempt_count--;
      continue;
    }
    if (count < AT_ONCE) under_way[count++] = row;
    at = &row->next;
  }
  asker->waiting = mover->attempt_count - count;
  for (kv_awaited **at = &mover->awaited; *at;) {
    kv_awaited *row = *at;
    if (!row->dropped) {
      at = &row->next;
      continue;
    }
    *at = row->next;
    close(row->end);
    kv_disown(row->peer);
    free(row);
  }
  pthread_mutex_unlock(&mover->lock);
  while (cancelled) {
    kv_attempt *next = cancelled->next;
    kv_attempt_refused(mover, cancelled, "disconnected before it was connected");
    cancelled = next;
  }
  return count;
}

/* Reports the processes that are gone. */
static void look_for_ends(kv_mover *mover) {
  for (;;) {
    kv_writer made = {0};
    uint64_t life = 0;
    pthread_mutex_lock(&mover->lock);
    kv_awaited *row = mover->awaited;
    while (row && (row->dropped || !kv_has_ended(row->end))) row = row->next;
    if (row) {
      const size_t report = kv_open(&made, 5);
      kv_put_bytes(&made, 1, row->peer);
      kv_put_varint(&made, 3 << 3); /* A rank 0 is stated, too. */
      kv_put_varint(&made, row->rank);
      kv_close(&made, report);
      life = row->life;
      row->dropped = true;
    }
    pthread_mutex_unlock(&mover->lock);
    if (!row) return;
    mover->report(mover->rank, life, &made);
    kv_writer_free(&made);
  }
}

/* Returns how long the attempt at a place among those under way, the oldest first, may wait for its answer. */
static double answer_s(const asking *asker, size_t i) { return i < asker->waiting ? FAIR_S : ANSWER_S; }

static int timeout_ms(const asking *asker, kv_attempt *const *under_way, size_t count, bool whole, double now) {
  double until = KV_FOREVER;
  if (!whole) until = now + AGAIN_S; /* There was no memory to watch all. */
  if (asker->accept_at > now) until = asker->accept_at;
  if (asker->client_count && asker->clients[0].until < until) until = asker->clients[0].until;
  for (size_t i = 0; i < count; i++) {
    const double next = under_way[i]->sent ? under_way[i]->began + answer_s(asker, i) : now + AGAIN_S;
    if (next < until) until = next;
  }
  if (until >= KV_FOREVER) return -1;
  return until > now ? (int)((until - now) * 1e3) + 1 : 0;
}

static void turn(asking *asker) {
  kv_mover *mover = asker->mover;
  kv_attempt *under_way[AT_ONCE];
  size_t count = sort_out(asker, under_way);
  const double began = kv_now();
  for (size_t i = 0; i < count; i++)
    if (!under_way[i]->began) begin_question(mover, under_way[i], began);
  count = sort_out(asker, under_way); /* Some have ended. */
  for (size_t i = 0; i < count; i++)
    if (under_way[i]->fd >= 0) go_on(mover, under_way[i], answer_s(asker, i), began);
  count = sort_out(asker, under_way);
  asker->row_count = 0;
  bool whole = watch(asker, mover->wake, POLLIN) && watch(asker, mover->listener, POLLIN);
  if (!whole) return;
  if (asker->accept_at > began) asker->rows[1].fd = -1;
  for (size_t i = 0; i < asker->client_count; i++) whole = watch(asker, asker->clients[i].fd, POLLIN) && whole;
  const size_t clients = asker->client_count;
  for (size_t i = 0; i < count; i++) whole = watch(asker, under_way[i]->sent ? under_way[i]->fd : -1, POLLIN) && whole;
  const size_t first_end = asker->row_count;
  pthread_mutex_lock(&mover->lock);
  for (const kv_awaited *row = mover->awaited; row; row = row->next) whole = watch(asker, row->end, POLLIN) && whole;
  pthread_mutex_unlock(&mover->lock);
  if (poll(asker->rows, (nfds_t)asker->row_count, timeout_ms(asker, under_way, count, whole, began)) < 0) return;
  uint64_t woken;
  if (asker->rows[0].revents && read(mover->wake, &woken, sizeof woken) < 0) woken = 0;
  const double now = kv_now();
  bool ended = !whole;
  for (size_t i = first_end; i < asker->row_count; i++) ended |= asker->rows[i].revents != 0;
  if (ended) look_for_ends(mover);
  for (size_t i = 0; i < count && 2 + clients + i < first_end; i++)
    if (asker->rows[2 + clients + i].revents) take_answer(mover, under_way[i]);
  for (size_t i = clients; i > 0; i--)
    if (2 + i - 1 < asker->row_count && asker->rows[2 + i - 1].revents) answer_client(asker, i - 1);
  while (asker->client_count && asker->clients[0].until <= now) drop_client(asker, 0);
  if (asker->rows[1].revents) accept_client(asker, now);
}

static void *run(void *given) {
  asking asker = {.mover = given};
  while (!asker.mover->closing) turn(&asker);
  while (asker.client_count) drop_client(&asker, 0);
  free(asker.rows);
  return NULL;
}

bool kv_asker_start(kv_mover *mover) {
  struct sockaddr_un address;
  uint8_t random[16];
  mover->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  mover->listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (mover->wake < 0 || mover->listener < 0 || !kv_random(random, sizeof random)) return false;
  size_t size = (size_t)sprintf(mover->socket_name, "kvgrpc-");
  for (size_t i = 0; i < sizeof random; i++) size += (size_t)sprintf(mover->socket_name + size, "%02x", random[i]);
  const socklen_t length = address_of(&address, mover->socket_name);
  if (bind(mover->listener, (struct sockaddr *)&address, length) || listen(mover->listener, BACKLOG)) return false;
  mover->has_asker = !pthread_create(&mover->asker, NULL, run, mover);
  return mover->has_asker;
}
