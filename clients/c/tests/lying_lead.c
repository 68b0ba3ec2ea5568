#define _GNU_SOURCE
#include "lying_lead.h"

#include <dirent.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "check.h"

#define DESCRIPTORS_MAX 16

void lead_listen(lying_lead *lead) {
  struct sockaddr_un address = {.sun_family = AF_UNIX};
  strcpy(lead->folder, "/tmp/kvgrpc-c-XXXXXX");
  CHECK(mkdtemp(lead->folder));
  snprintf(lead->path, sizeof lead->path, "%s/lead.sock", lead->folder);
  strcpy(address.sun_path, lead->path);
  lead->listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  CHECK(lead->listener >= 0);
  CHECK(!bind(lead->listener, (struct sockaddr *)&address, sizeof address));
  CHECK(!listen(lead->listener, 8));
  lead->connection = -1;
}

static bool read_all(int from, void *into, size_t size) {
  uint8_t *at = into;
  while (size) {
    const ssize_t got = recv(from, at, size, 0);
    if (got <= 0) return false;
    at += got;
    size -= (size_t)got;
  }
  return true;
}

kv_writer lead_read(lying_lead *lead) {
  uint8_t head[4], body[65536];
  kv_writer message = {0};
  if (!read_all(lead->connection, head, sizeof head)) return message;
  const size_t size = (size_t)head[2] << 8 | head[3];
  CHECK(!head[0] && !head[1] && read_all(lead->connection, body, size));
  kv_put_bytes_raw(&message, body, size);
  return message;
}

kv_writer lead_accept(lying_lead *lead) {
  lead->connection = accept4(lead->listener, NULL, NULL, SOCK_CLOEXEC);
  CHECK(lead->connection >= 0);
  return lead_read(lead);
}

void lead_say(lying_lead *lead, const void *data, size_t size, const int *descriptors, size_t count) {
  union {
    struct cmsghdr align;
    char bytes[CMSG_SPACE(DESCRIPTORS_MAX * sizeof(int))];
  } control = {{0}};
  struct iovec said = {(void *)data, size};
  struct msghdr message = {.msg_iov = &said, .msg_iovlen = 1};
  if (count) {
    message.msg_control = &control;
    message.msg_controllen = CMSG_SPACE(count * sizeof(int));
    struct cmsghdr *row = CMSG_FIRSTHDR(&message);
    row->cmsg_level = SOL_SOCKET;
    row->cmsg_type = SCM_RIGHTS;
    row->cmsg_len = CMSG_LEN(count * sizeof(int));
    memcpy(CMSG_DATA(row), descriptors, count * sizeof(int));
  }
  const ssize_t sent = sendmsg(lead->connection, &message, MSG_NOSIGNAL);
  if (sent > 0 && (size_t)sent < size) send(lead->connection, (const char *)data + sent, size - (size_t)sent, MSG_NOSIGNAL);
}

void lead_say_frame(lying_lead *lead, const kv_writer *message, const int *descriptors, size_t count) {
  kv_writer frame = {0};
  CHECK(!kv_frame_of(message, &frame, NULL));
  lead_say(lead, frame.data, frame.size, descriptors, count);
  kv_writer_free(&frame);
}

void lead_hang_up(lying_lead *lead) {
  if (lead->connection >= 0) close(lead->connection);
  lead->connection = -1;
}

void lead_close(lying_lead *lead) {
  lead_hang_up(lead);
  close(lead->listener);
  unlink(lead->path);
  rmdir(lead->folder);
}

int lead_pool(size_t bytes, uint64_t stated, int seals) {
  const size_t page = (size_t)sysconf(_SC_PAGESIZE), size = (bytes + page - 1) / page * page + page;
  const int made = memfd_create("pool", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  CHECK(made >= 0 && !ftruncate(made, (off_t)size));
  CHECK(!posix_fallocate(made, 0, (off_t)size));
  CHECK(pwrite(made, &stated, sizeof stated, (off_t)(size - page + 32)) == sizeof stated);
  CHECK(!seals || !fcntl(made, F_ADD_SEALS, seals));
  return made;
}

void put_rank_attached(kv_writer *to, uint64_t shared_bytes) {
  const size_t attached = kv_open(to, 2);
  kv_put_uint(to, 2, shared_bytes);
  kv_close(to, attached);
}

void put_engine_attached(kv_writer *to) {
  const size_t attached = kv_open(to, 1), header = kv_open(to, 1);
  kv_put_text(to, 1, "engine");
  kv_put_fixed64(to, 2, 7);
  kv_close(to, header);
  kv_put_text(to, 3, "a ticket");
  kv_put_text(to, 6, "127.0.0.1:1");
  kv_close(to, attached);
}

int open_descriptors(void) {
  int count = 0;
  DIR *all = opendir("/proc/self/fd");
  CHECK(all);
  while (readdir(all)) count++;
  closedir(all);
  return count;
}

static void *run(void *given) {
  liar *liar = given;
  liar->lie(liar->lead, liar->with);
  return NULL;
}

void liar_start(liar *liar, lying_lead *lead, void (*lie)(lying_lead *, void *), void *with) {
  liar->lie = lie;
  liar->lead = lead;
  liar->with = with;
  CHECK(!pthread_create(&liar->thread, NULL, run, liar));
}

void liar_join(liar *liar) { CHECK(!pthread_join(liar->thread, NULL)); }
