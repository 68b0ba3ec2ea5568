/* Grants as text, in the object that routers relay. */
#include <string.h>

#include "kvgrpc_engine.h"

static const char kDigits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";

/* Counts and writes text; what does not fit is only counted. */
typedef struct text {
  char *into;
  size_t capacity;
  size_t length;
} text;

static void put(text *to, char character) {
  if (to->length + 1 < to->capacity) to->into[to->length] = character;
  to->length++;
}

static void put_all(text *to, const char *characters) {
  while (*characters) put(to, *characters++);
}

size_t kvgrpc_grant_to_json(kvgrpc_bytes grant, bool is_read, char *into, size_t capacity) {
  text to = {into, capacity, 0};
  const uint8_t *data = grant.data;
  put_all(&to, is_read ? "{\"do_remote_prefill\": true, \"do_remote_decode\": false, \"kvgrpc_grant\": \""
                       : "{\"do_remote_prefill\": false, \"do_remote_decode\": true, \"kvgrpc_grant\": \"");
  for (size_t at = 0; at < grant.size; at += 3) {
    const size_t left = grant.size - at;
    const uint32_t three = (uint32_t)data[at] << 16 | (left > 1 ? (uint32_t)data[at + 1] << 8 : 0) |
                           (left > 2 ? data[at + 2] : 0);
    put(&to, kDigits[three >> 18]);
    put(&to, kDigits[three >> 12 & 63]);
    put(&to, left > 1 ? kDigits[three >> 6 & 63] : '=');
    put(&to, left > 2 ? kDigits[three & 63] : '=');
  }
  put_all(&to, "\"}");
  if (capacity) into[to.length < capacity ? to.length : capacity - 1] = 0;
  return to.length;
}

size_t kvgrpc_grant_from_text(const char *characters, size_t length, uint8_t *into, size_t capacity) {
  size_t size = 0;
  uint32_t bits = 0;
  unsigned count = 0;
  if (length % 4) return 0;
  size_t padding = 0;
  while (padding < 2 && padding < length && characters[length - 1 - padding] == '=') padding++;
  for (size_t at = 0; at < length - padding; at++) {
    const char *digit = characters[at] ? strchr(kDigits, characters[at]) : NULL;
    if (!digit) return 0;
    bits = bits << 6 | (uint32_t)(digit - kDigits);
    count += 6;
    if (count < 8) continue;
    count -= 8;
    if (size == capacity) return 0;
    into[size++] = (uint8_t)(bits >> count);
    bits &= (1u << count) - 1;
  }
  return bits ? 0 : size;
}
