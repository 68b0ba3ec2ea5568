/* Digests and checksums are those of their standards, and an offset has one address. */
#include <stdio.h>
#include <string.h>

#include "check.h"
#include "memory.h"

static void test_digests_are_those_of_the_standard(void) {
  static const struct {
    const char *message, *digest;
  } rows[] = {
      {"", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
      {"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"},
      {"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
       "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"},
  };
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    uint8_t digest[KV_SHA256_BYTES];
    char text[2 * KV_SHA256_BYTES + 1];
    kv_sha256 hash;
    kv_sha256_begin(&hash);
    for (const char *at = rows[i].message; *at; at++) kv_sha256_add(&hash, at, 1);
    kv_sha256_end(&hash, digest);
    for (size_t byte = 0; byte < sizeof digest; byte++) sprintf(text + 2 * byte, "%02x", digest[byte]);
    CHECK(!strcmp(text, rows[i].digest));
  }
}

static void test_checksums_are_those_of_the_standard(void) {
  const uint8_t zeros[32] = {0};
  CHECK(kv_crc32c(0, "123456789", 9) == 0xe3069283);
  CHECK(kv_crc32c(0, zeros, sizeof zeros) == 0x8a9136aa);
  CHECK(kv_crc32c(kv_crc32c(0, "1234", 4), "56789", 5) == 0xe3069283);
}

static void test_an_offset_has_one_address(void) {
  const kv_segment rows[] = {{4096, 10, 1, 0}, {100, 1, 1, 0}, {8192, 5, 0, 0}};
  kv_memory memory;
  uint64_t left;
  CHECK(!kv_memory_make(&memory, rows, 3));
  CHECK(memory.size == 16);
  CHECK(kv_memory_at(&memory, 9, &left) == 4105 && left == 1);
  CHECK(kv_memory_at(&memory, 10, &left) == 100 && left == 1);
  CHECK(kv_memory_at(&memory, 11, &left) == 8192 && left == 5);
  CHECK(kv_memory_has(&memory, 0, 16) && kv_memory_has(&memory, 16, 0));
  CHECK(!kv_memory_has(&memory, 1, 16) && !kv_memory_has(&memory, UINT64_MAX, 1));
  CHECK(!kv_memory_has(&memory, 1, UINT64_MAX) && !kv_memory_has(&memory, 17, 0));
  kv_memory_free(&memory);
}

static void test_memory_that_makes_no_sense_is_refused(void) {
  const kv_segment rows[] = {{0, 1, 1, 0}, {1, 0, 1, 0}, {KV_ADDRESS_END, 1, 1, 0}, {1, KV_ADDRESS_END, 1, 0}, {1, 1, 3, 0}};
  kv_memory memory;
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) CHECK(kv_memory_make(&memory, &rows[i], 1));
  const kv_segment both[] = {{1, KV_ADDRESS_END - 1, 1, 0}, {1, 1, 1, 0}};
  CHECK(kv_memory_make(&memory, both, 2));
  CHECK(kv_memory_make(&memory, both, 0));
}

int main(void) {
  test_digests_are_those_of_the_standard();
  test_checksums_are_those_of_the_standard();
  test_an_offset_has_one_address();
  test_memory_that_makes_no_sense_is_refused();
  return 0;
}
