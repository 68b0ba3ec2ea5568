/* One connection to a lead: frames out, frames in, a descriptor beside the answer to the attach.
 *
 * A frame is a 4-byte big-endian length, then a message. Every wait has a deadline. After an error of the connection
 * nothing more can be sent or received.
 */
#ifndef KV_CONNECTION_H
#define KV_CONNECTION_H

#include "failure.h"

#define KV_FRAME_BYTES_MAX (64u * 1024 * 1024)
/* Timeout for the answer to an attach, in seconds: to make and populate a large pool takes several. */
#define KV_ATTACH_TIMEOUT_S 30.0
#define KV_FOREVER 1e12

typedef struct kv_connection {
  int fd;
  int descriptor; /* Came with the last frame of an attach; -1: none. */
  uint8_t *in;
  size_t have;
  size_t capacity;
  size_t taken; /* Bytes of frames that were returned. */
} kv_connection;

/* Time of CLOCK_MONOTONIC in seconds. */
double kv_now(void);

void kv_connection_init(kv_connection *connection);
kvgrpc_code kv_connect(kv_connection *connection, const char *path, kvgrpc_error *error);
void kv_disconnect(kv_connection *connection);
/* Returns the descriptor that came, which the caller closes; -1: none. */
int kv_take_descriptor(kv_connection *connection);

/* Makes the bytes of a frame out of a message. */
kvgrpc_code kv_frame_of(const kv_writer *message, kv_writer *frame, kvgrpc_error *error);
kvgrpc_code kv_send(kv_connection *connection, const void *data, size_t size, kvgrpc_error *error);
/* Returns the next frame's message, which lives until the next call. `passing`: keeps a descriptor beside it.
 * DEADLINE_EXCEEDED: none came until `deadline`. CANCELLED: `stop`, a descriptor or -1, became readable. */
kvgrpc_code kv_receive(kv_connection *connection, bool passing, double deadline, int stop, kvgrpc_bytes *message,
                       kvgrpc_error *error);

/* Sends the first frame, and returns the one field of its answer. It gives `memory` (-1: none) to a lead that asks for
 * it. Its errors are those of the connection, and the lead's refusal. */
kvgrpc_code kv_attach(kv_connection *connection, const kv_writer *message, int memory, double timeout_s, int stop,
                      kv_field *answer, kvgrpc_error *error);

#endif
