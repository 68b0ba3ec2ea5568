/* Protobuf's wire format: what the session's messages need of it. No I/O.
 *
 * A writer grows; when memory runs out, it stays failed and the caller asks once, at the end. A reader looks only at the
 * bytes that it was given, whatever they claim, and is `bad` after the first that is wrong.
 */
#ifndef KV_WIRE_H
#define KV_WIRE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kvgrpc_engine.h"

/* Copies bytes to keep. Returns no data without memory; of nothing it makes one byte. */
kvgrpc_bytes kv_own(kvgrpc_bytes bytes);
void kv_disown(kvgrpc_bytes bytes);

typedef struct kv_writer {
  uint8_t *data;
  size_t size;
  size_t capacity;
  bool failed;
  bool not_text; /* A text was not UTF-8: a lead would end the session for it. */
} kv_writer;

void kv_writer_free(kv_writer *to);
void kv_put_bytes_raw(kv_writer *to, const void *data, size_t size);

void kv_put_varint(kv_writer *to, uint64_t value);
/* These write nothing for 0, as proto3 does. */
void kv_put_uint(kv_writer *to, uint32_t field, uint64_t value);
void kv_put_fixed64(kv_writer *to, uint32_t field, uint64_t value);
void kv_put_int32(kv_writer *to, uint32_t field, int32_t value);
void kv_put_text(kv_writer *to, uint32_t field, const char *text);
/* Writes the words of a peer or of libc, which may be no UTF-8: what is no printable ASCII becomes "?". */
void kv_put_why(kv_writer *to, uint32_t field, const char *why);
void kv_put_bytes(kv_writer *to, uint32_t field, kvgrpc_bytes bytes);
void kv_put_packed(kv_writer *to, uint32_t field, const uint32_t *values, size_t count);
/* Writes a google.protobuf.Duration. */
void kv_put_duration(kv_writer *to, uint32_t field, double seconds);

/* Begins a message within the message, and ends it. A message without fields is written too. */
size_t kv_open(kv_writer *to, uint32_t field);
void kv_close(kv_writer *to, size_t mark);

typedef struct kv_reader {
  const uint8_t *at;
  const uint8_t *end;
  bool bad;
} kv_reader;

typedef struct kv_field {
  uint32_t number;
  uint32_t wire;  /* 0: value; 1 and 5: fixed, in value; 2: bytes. */
  uint64_t value;
  kvgrpc_bytes bytes;
} kv_field;

kv_reader kv_reader_of(kvgrpc_bytes bytes);
/* Reads the next field. Returns false at the end, or if what follows is no field. */
bool kv_next(kv_reader *from, kv_field *field);
/* Reads the next varint of a packed field. */
bool kv_next_varint(kv_reader *from, uint64_t *value);
bool kv_is(const kv_field *field, uint32_t number, uint32_t wire);
/* Copies bytes as text, cut where it does not fit or has a NUL. */
void kv_copy_text(char *into, size_t capacity, kvgrpc_bytes text);

#endif
