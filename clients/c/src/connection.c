#define _GNU_SOURCE
#include "connection.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define LENGTH_BYTES 4
#define READ_BYTES (64u * 1024)
/* Timeout for a send, in seconds. A lead reads at once: one that has not read for this long is stopped or dead. */
#define SEND_TIMEOUT_S 10.0
/* Longest wait of one poll(), which is repeated. */
#define WAIT_MS_MAX 1000000000
/* Room for more descriptors than a lead may send, so that what should not come is seen, and closed. */
#define DESCRIPTORS_MAX 4

double kv_now(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

void kv_connection_init(kv_connection *connection) {
  memset(connection, 0, sizeof *connection);
  connection->fd = connection->descriptor = -1;
}

static kvgrpc_code lost(kvgrpc_error *error) {
  return kv_fail(error, KVGRPC_UNAVAILABLE, KV_PEER_LOST,
                 "the session is over: the lead, or a worker of this engine, is gone");
}

kvgrpc_code kv_connect(kv_connection *connection, const char *path, kvgrpc_error *error) {
  struct sockaddr_un address = {.sun_family = AF_UNIX};
  kv_connection_init(connection);
  if (!path || strlen(path) >= sizeof address.sun_path)
    return kv_fail(error, KVGRPC_INVALID_ARGUMENT, KV_INVALID_FIELD, "a socket's path has less than %zu bytes",
                   sizeof address.sun_path);
  memcpy(address.sun_path, path, strlen(path) + 1);
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  /* A lead that is stopped lets its backlog fill, and connect() waits for a place in it as long as a send would. */
  const struct timeval timeout = {(time_t)SEND_TIMEOUT_S, 0};
  if (fd >= 0) setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof timeout);
  if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof address) < 0) {
    const int why = errno;
    if (fd >= 0) close(fd);
    return kv_fail(error, KVGRPC_UNAVAILABLE, KV_PEER_UNREACHABLE, "no lead listens at %s: %s", path, strerror(why));
  }
  connection->fd = fd;
  return KVGRPC_OK;
}

int kv_take_descriptor(kv_connection *connection) {
  const int descriptor = connection->descriptor;
  connection->descriptor = -1;
  return descriptor;
}

void kv_disconnect(kv_connection *connection) {
  const int descriptor = kv_take_descriptor(connection);
  if (connection->fd >= 0) close(connection->fd);
  if (descriptor >= 0) close(descriptor);
  free(connection->in);
  kv_connection_init(connection);
}

/* Waits for one of two descriptors. Returns false when the deadline is over, or when poll() fails for good. */
static bool wait_for(int fd, short events, int stop, double deadline, bool *stopped) {
  for (;;) {
    struct pollfd rows[2] = {{fd, events, 0}, {stop, POLLIN, 0}}; /* poll() leaves out a negative descriptor. */
    const double left_s = deadline - kv_now();
    const double wait_ms = left_s > 0 ? left_s * 1e3 + 1 : 0;
    const int timeout_ms = deadline >= KV_FOREVER ? -1 : wait_ms < WAIT_MS_MAX ? (int)wait_ms : WAIT_MS_MAX;
    const int ready = poll(rows, 2, timeout_ms);
    if (ready < 0 && errno != EINTR) return false;
    if (ready > 0) {
      *stopped = rows[1].revents != 0;
      return true;
    }
    if (ready == 0 && left_s <= 0) return false;
  }
}

kvgrpc_code kv_frame_of(const kv_writer *message, kv_writer *frame, kvgrpc_error *error) {
  const kvgrpc_code code = kv_check_written(message, error);
  if (code) return code;
  if (message->size > KV_FRAME_BYTES_MAX)
    return kv_fail(error, KVGRPC_OUT_OF_RANGE, KV_LIMIT_EXCEEDED, "a frame of %zu bytes; the limit is %u",
                   message->size, KV_FRAME_BYTES_MAX);
  uint8_t length[LENGTH_BYTES];
  for (int i = 0; i < LENGTH_BYTES; i++) length[i] = (uint8_t)(message->size >> (8 * (LENGTH_BYTES - 1 - i)));
  kv_put_bytes_raw(frame, length, sizeof length);
  kv_put_bytes_raw(frame, message->data, message->size);
  return frame->failed ? kv_no_memory(error) : KVGRPC_OK;
}

kvgrpc_code kv_send(kv_connection *connection, const void *data, size_t size, kvgrpc_error *error) {
  const double deadline = kv_now() + SEND_TIMEOUT_S;
  const uint8_t *at = data;
  bool stopped = false;
  while (size && connection->fd >= 0) {
    const ssize_t sent = send(connection->fd, at, size, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent > 0) {
      at += sent;
      size -= (size_t)sent;
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      if (!wait_for(connection->fd, POLLOUT, -1, deadline, &stopped)) break;
    } else if (errno != EINTR) {
      break;
    }
  }
  if (!size && connection->fd >= 0) return KVGRPC_OK;
  /* A part of the frame may be sent: no other frame can follow. The receiver is woken. */
  if (connection->fd >= 0) shutdown(connection->fd, SHUT_RDWR);
  return lost(error);
}

/* Takes the descriptors of a message. All of them are closed if there is more than the one that is wanted. */
static kvgrpc_code take_descriptors(kv_connection *connection, struct msghdr *message, kvgrpc_error *error) {
  int found[DESCRIPTORS_MAX + 1], count = connection->descriptor >= 0;
  bool many = (message->msg_flags & MSG_CTRUNC) != 0;
  found[0] = kv_take_descriptor(connection);
  for (struct cmsghdr *row = CMSG_FIRSTHDR(message); row; row = CMSG_NXTHDR(message, row)) {
    if (row->cmsg_level != SOL_SOCKET || row->cmsg_type != SCM_RIGHTS) continue;
    const size_t given = (row->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < given; i++) {
      int descriptor;
      memcpy(&descriptor, CMSG_DATA(row) + i * sizeof(int), sizeof descriptor);
      if (count <= DESCRIPTORS_MAX) found[count++] = descriptor;
      else close(descriptor);
    }
  }
  if (count == 1 && !many) {
    connection->descriptor = found[0];
    return KVGRPC_OK;
  }
  for (int i = 0; i < count; i++) close(found[i]);
  if (!count && !many) return KVGRPC_OK;
  return kv_fail(error, KVGRPC_OUT_OF_RANGE, KV_LIMIT_EXCEEDED, "the lead sent more descriptors than one");
}

static kvgrpc_code read_some(kv_connection *connection, bool passing, kvgrpc_error *error) {
  if (connection->capacity - connection->have < READ_BYTES) {
    const size_t capacity = connection->have + (connection->have > READ_BYTES ? connection->have : READ_BYTES);
    uint8_t *in = realloc(connection->in, capacity);
    if (!in) return kv_no_memory(error);
    connection->in = in;
    connection->capacity = capacity;
  }
  union {
    struct cmsghdr align;
    char bytes[CMSG_SPACE(DESCRIPTORS_MAX * sizeof(int))];
  } control;
  struct iovec into = {connection->in + connection->have, connection->capacity - connection->have};
  struct msghdr message = {.msg_iov = &into, .msg_iovlen = 1};
  if (passing) {
    message.msg_control = &control;
    message.msg_controllen = sizeof control;
  }
  const ssize_t got = recvmsg(connection->fd, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  if (got < 0 && (errno == EINTR || errno == EAGAIN || errno == EWOULDBLOCK)) return KVGRPC_OK;
  if (got <= 0) return lost(error);
  connection->have += (size_t)got;
  return passing ? take_descriptors(connection, &message, error) : KVGRPC_OK;
}

/* Returns whether a whole frame is there. */
static kvgrpc_code frame_there(kv_connection *connection, kvgrpc_bytes *message, bool *there, kvgrpc_error *error) {
  const uint8_t *at = connection->in + connection->taken;
  const size_t have = connection->have - connection->taken;
  *there = false;
  if (have < LENGTH_BYTES) return KVGRPC_OK;
  const size_t length = (size_t)at[0] << 24 | (size_t)at[1] << 16 | (size_t)at[2] << 8 | at[3];
  if (length > KV_FRAME_BYTES_MAX)
    return kv_fail(error, KVGRPC_OUT_OF_RANGE, KV_LIMIT_EXCEEDED, "the lead sent a frame of %zu bytes; the limit is %u",
                   length, KV_FRAME_BYTES_MAX);
  *there = have - LENGTH_BYTES >= length;
  if (*there) {
    *message = (kvgrpc_bytes){at + LENGTH_BYTES, length};
    connection->taken += LENGTH_BYTES + length;
  }
  return KVGRPC_OK;
}

kvgrpc_code kv_receive(kv_connection *connection, bool passing, double deadline, int stop, kvgrpc_bytes *message,
                       kvgrpc_error *error) {
  for (;;) {
    bool there = false, stopped = false;
    kvgrpc_code code = KVGRPC_OK;
    if (connection->in) code = frame_there(connection, message, &there, error);
    if (code || there) return code;
    if (connection->taken) { /* The last frame is read: what follows moves to the front. */
      memmove(connection->in, connection->in + connection->taken, connection->have - connection->taken);
      connection->have -= connection->taken;
      connection->taken = 0;
    }
    if (connection->fd < 0) return lost(error);
    if (!wait_for(connection->fd, POLLIN, stop, deadline, &stopped))
      return kv_fail(error, KVGRPC_DEADLINE_EXCEEDED, KV_DEADLINE, "the lead said nothing in time");
    if (stopped) return kv_fail(error, KVGRPC_CANCELLED, 0, "the caller stopped this");
    code = read_some(connection, passing, error);
    if (code) return code;
  }
}

/* Sends a descriptor into the socket that the lead passed for it. */
static kvgrpc_code give(kv_connection *connection, int memory, kvgrpc_error *error) {
  const int to = kv_take_descriptor(connection);
  union {
    struct cmsghdr align;
    char bytes[CMSG_SPACE(sizeof(int))];
  } control = {{0}};
  struct iovec dot = {".", 1};
  struct msghdr message = {
      .msg_iov = &dot, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
  struct cmsghdr *row = CMSG_FIRSTHDR(&message);
  row->cmsg_level = SOL_SOCKET;
  row->cmsg_type = SCM_RIGHTS;
  row->cmsg_len = CMSG_LEN(sizeof memory);
  memcpy(CMSG_DATA(row), &memory, sizeof memory);
  const bool given = to >= 0 && memory >= 0 && sendmsg(to, &message, MSG_NOSIGNAL | MSG_DONTWAIT) == 1;
  if (to >= 0) close(to);
  return given ? KVGRPC_OK : lost(error);
}

static kvgrpc_code read_answer(kvgrpc_bytes message, kv_field *answer, kvgrpc_error *error) {
  kv_reader from = kv_reader_of(message);
  kv_field field;
  memset(answer, 0, sizeof *answer);
  while (kv_next(&from, &field))
    if (field.wire == 2) *answer = field; /* The last one counts. */
  if (from.bad || !answer->number)
    return kv_fail(error, KVGRPC_INVALID_ARGUMENT, KV_INVALID_FIELD, "a frame does not hold the message expected");
  kvgrpc_error refused;
  if (answer->number == 5) {
    if (!kv_read_refused(answer->bytes, &refused))
      return kv_fail(error, KVGRPC_INVALID_ARGUMENT, KV_INVALID_FIELD, "the lead's refusal cannot be read");
    return kv_copy_error(error, &refused);
  }
  if (answer->number == 7) return lost(error);
  return KVGRPC_OK;
}

kvgrpc_code kv_attach(kv_connection *connection, const kv_writer *message, int memory, double timeout_s, int stop,
                      kv_field *answer, kvgrpc_error *error) {
  kv_writer frame = {0};
  kvgrpc_code code = kv_frame_of(message, &frame, error);
  if (!code) code = kv_send(connection, frame.data, frame.size, error);
  kv_writer_free(&frame);
  const double deadline = kv_now() + timeout_s;
  while (!code) {
    kvgrpc_bytes came;
    code = kv_receive(connection, true, deadline, stop, &came, error);
    if (code == KVGRPC_DEADLINE_EXCEEDED)
      return kv_fail(error, KVGRPC_UNAVAILABLE, KV_DEADLINE, "the lead did not answer the attach in time");
    if (!code) code = read_answer(came, answer, error);
    if (code || answer->number != 6) break;
    code = give(connection, memory, error);
  }
  return code;
}
