#include "wire.h"

#include <stdlib.h>
#include <string.h>

#define VARINT_BYTES_MAX 10
#define FIELD_MAX ((1u << 29) - 1)

kvgrpc_bytes kv_own(kvgrpc_bytes bytes) {
  void *data = malloc(bytes.size ? bytes.size : 1);
  if (data && bytes.size) memcpy(data, bytes.data, bytes.size);
  return (kvgrpc_bytes){data, bytes.size};
}

void kv_disown(kvgrpc_bytes bytes) { free((void *)bytes.data); }

static bool grow(kv_writer *to, size_t more) {
  if (to->failed) return false;
  if (more <= to->capacity - to->size) return true;
  if (more > SIZE_MAX / 4 - to->size) {
    to->failed = true;
    return false;
  }
  size_t capacity = to->capacity ? to->capacity : 256;
  while (capacity - to->size < more) capacity *= 2;
  uint8_t *data = realloc(to->data, capacity);
  if (!data) {
    to->failed = true;
    return false;
  }
  to->data = data;
  to->capacity = capacity;
  return true;
}

void kv_writer_free(kv_writer *to) {
  free(to->data);
  memset(to, 0, sizeof *to);
}

void kv_put_bytes_raw(kv_writer *to, const void *data, size_t size) {
  if (!size || !grow(to, size)) return;
  memcpy(to->data + to->size, data, size);
  to->size += size;
}

static size_t varint(uint64_t value, uint8_t into[VARINT_BYTES_MAX]) {
  size_t size = 0;
  while (value >= 0x80) {
    into[size++] = (uint8_t)(value | 0x80);
    value >>= 7;
  }
  into[size++] = (uint8_t)value;
  return size;
}

void kv_put_varint(kv_writer *to, uint64_t value) {
  uint8_t bytes[VARINT_BYTES_MAX];
  kv_put_bytes_raw(to, bytes, varint(value, bytes));
}

static void put_tag(kv_writer *to, uint32_t field, uint32_t wire) { kv_put_varint(to, (uint64_t)field << 3 | wire); }

void kv_put_uint(kv_writer *to, uint32_t field, uint64_t value) {
  if (!value) return;
  put_tag(to, field, 0);
  kv_put_varint(to, value);
}

void kv_put_fixed64(kv_writer *to, uint32_t field, uint64_t value) {
  if (!value) return;
  put_tag(to, field, 1);
  uint8_t bytes[8];
  for (int i = 0; i < 8; i++) bytes[i] = (uint8_t)(value >> (8 * i));
  kv_put_bytes_raw(to, bytes, sizeof bytes);
}

void kv_put_int32(kv_writer *to, uint32_t field, int32_t value) { kv_put_uint(to, field, (uint64_t)(int64_t)value); }

/* Returns the bytes of the character at `at`; 0 if it is none. */
static size_t character(const uint8_t *at) {
  static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
  if (at[0] < 0x80) return 1;
  const size_t size = at[0] >> 5 == 6 ? 2 : at[0] >> 4 == 14 ? 3 : at[0] >> 3 == 30 ? 4 : 0;
  uint32_t value = size ? at[0] & (0xffu >> (size + 1)) : 0;
  for (size_t i = 1; i < size; i++) {
    if (at[i] >> 6 != 2) return 0; /* A final NUL, too. */
    value = value << 6 | (at[i] & 0x3f);
  }
  const bool right = value >= least[size] && value <= 0x10ffff && (value < 0xd800 || value > 0xdfff);
  return right ? size : 0;
}

void kv_put_text(kv_writer *to, uint32_t field, const char *text) {
  for (const uint8_t *at = (const uint8_t *)text; at && *at;) {
    const size_t size = character(at);
    if (!size) {
      to->not_text = true;
      return;
    }
    at += size;
  }
  if (text) kv_put_bytes(to, field, (kvgrpc_bytes){text, strlen(text)});
}

void kv_put_why(kv_writer *to, uint32_t field, const char *why) {
  const size_t size = why ? strlen(why) : 0;
  kv_put_bytes(to, field, (kvgrpc_bytes){why, size});
  for (size_t i = to->failed ? 0 : size; i; i--) {
    uint8_t *at = to->data + to->size - i;
    if (*at < ' ' || *at > '~') *at = '?';
  }
}

void kv_put_bytes(kv_writer *to, uint32_t field, kvgrpc_bytes bytes) {
  if (!bytes.size) return;
  put_tag(to, field, 2);
  kv_put_varint(to, bytes.size);
  kv_put_bytes_raw(to, bytes.data, bytes.size);
}

void kv_put_packed(kv_writer *to, uint32_t field, const uint32_t *values, size_t count) {
  if (!count) return;
  const size_t mark = kv_open(to, field);
  for (size_t i = 0; i < count; i++) kv_put_varint(to, values[i]);
  kv_close(to, mark);
}

void kv_put_duration(kv_writer *to, uint32_t field, double seconds) {
  const size_t mark = kv_open(to, field);
  const uint64_t whole = (uint64_t)seconds;
  kv_put_uint(to, 1, whole);
  kv_put_uint(to, 2, (uint64_t)((seconds - (double)whole) * 1e9));
  kv_close(to, mark);
}

size_t kv_open(kv_writer *to, uint32_t field) {
  put_tag(to, field, 2);
  return to->size;
}

void kv_close(kv_writer *to, size_t mark) {
  uint8_t bytes[VARINT_BYTES_MAX];
  if (to->failed) return;
  const size_t size = to->size - mark, head = varint(size, bytes);
  if (!grow(to, head)) return;
  memmove(to->data + mark + head, to->data + mark, size);
  memcpy(to->data + mark, bytes, head);
  to->size += head;
}

kv_reader kv_reader_of(kvgrpc_bytes bytes) {
  static const uint8_t nothing[1];
  const uint8_t *data = bytes.size ? bytes.data : nothing;
  return (kv_reader){data, data + bytes.size, false};
}

bool kv_next_varint(kv_reader *from, uint64_t *value) {
  uint64_t found = 0;
  for (int i = 0; i < VARINT_BYTES_MAX && from->at < from->end; i++) {
    const uint8_t byte = *from->at++;
    found |= (uint64_t)(byte & 0x7f) << (7 * i);
    if (!(byte & 0x80)) {
      *value = found;
      return true;
    }
  }
  from->bad = true;
  return false;
}

static bool read_fixed(kv_reader *from, size_t size, uint64_t *value) {
  if ((size_t)(from->end - from->at) < size) return false;
  *value = 0;
  for (size_t i = 0; i < size; i++) *value |= (uint64_t)from->at[i] << (8 * i);
  from->at += size;
  return true;
}

static bool read_value(kv_reader *from, kv_field *field) {
  switch (field->wire) {
    case 0:
      return kv_next_varint(from, &field->value);
    case 1:
      return read_fixed(from, 8, &field->value);
    case 5:
      return read_fixed(from, 4, &field->value);
    case 2:
      if (!kv_next_varint(from, &field->value) || field->value > (uint64_t)(from->end - from->at)) return false;
      field->bytes = (kvgrpc_bytes){from->at, (size_t)field->value};
      from->at += field->value;
      return true;
    default: /* Groups, which no schema of kvgrpc has, and numbers that mean nothing. */
      return false;
  }
}

bool kv_next(kv_reader *from, kv_field *field) {
  uint64_t tag = 0;
  memset(field, 0, sizeof *field);
  if (from->bad || from->at == from->end || !kv_next_varint(from, &tag)) return false;
  field->wire = (uint32_t)(tag & 7);
  if (tag >> 3 == 0 || tag >> 3 > FIELD_MAX) {
    from->bad = true;
    return false;
  }
  field->number = (uint32_t)(tag >> 3);
  if (!read_value(from, field)) from->bad = true;
  return !from->bad;
}

bool kv_is(const kv_field *field, uint32_t number, uint32_t wire) {
  return field->number == number && field->wire == wire;
}

void kv_copy_text(char *into, size_t capacity, kvgrpc_bytes text) {
  size_t size = text.size < capacity - 1 ? text.size : capacity - 1;
  const void *end = size ? memchr(text.data, 0, size) : NULL;
  if (end) size = (size_t)((const char *)end - (const char *)text.data);
  if (size) memcpy(into, text.data, size);
  into[size] = 0;
}
