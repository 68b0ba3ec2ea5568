/* What is written is what protobuf writes, and what is no protobuf is refused, whatever it claims. */
#include <string.h>

#include "check.h"
#include "wire.h"

static kv_reader reader_of(const char *bytes, size_t size) { return kv_reader_of((kvgrpc_bytes){bytes, size}); }

static void test_numbers_and_messages_are_written_as_protobuf_does(void) {
  kv_writer to = {0};
  kv_put_uint(&to, 1, 300);
  kv_put_uint(&to, 2, 0);
  kv_put_int32(&to, 3, -1);
  const size_t inner = kv_open(&to, 4);
  kv_put_text(&to, 1, "ab");
  kv_close(&to, inner);
  kv_close(&to, kv_open(&to, 5));
  kv_put_fixed64(&to, 6, 1);
  kv_put_duration(&to, 7, 1.5);
  static const uint8_t wanted[] = {
      0x08, 0xac, 0x02, 0x18, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01, 0x22, 0x04, 0x0a, 0x02,
      'a',  'b',  0x2a, 0x00, 0x31, 1,    0,    0,    0,    0,    0,    0,    0,    0x3a, 0x08, 0x08, 0x01, 0x10,
      0x80, 0xca, 0xb5, 0xee, 0x01};
  CHECK(to.size == sizeof wanted && !memcmp(to.data, wanted, sizeof wanted));
  kv_writer_free(&to);
}

static void test_a_long_message_has_a_long_length(void) {
  kv_writer to = {0};
  static uint32_t ids[70000];
  const size_t outer = kv_open(&to, 1);
  kv_put_packed(&to, 1, ids, 70000);
  kv_close(&to, outer);
  kv_reader from = kv_reader_of((kvgrpc_bytes){to.data, to.size});
  kv_field field;
  CHECK(kv_next(&from, &field) && kv_is(&field, 1, 2) && field.bytes.size == 70004);
  CHECK(!kv_next(&from, &field) && !from.bad);
  kv_writer_free(&to);
}

static void test_what_is_cut_or_no_field_is_bad(void) {
  static const struct {
    const char *bytes;
    size_t size;
  } rows[] = {
      {"\x08", 1},                                              /* a value that is missing */
      {"\x08\x80", 2},                                          /* a number that is cut */
      {"\x08\x80\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01", 12}, /* a number that is too long */
      {"\x0a\x05" "ab", 4},                                     /* bytes that are cut */
      {"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", 11},     /* a length beyond any memory */
      {"\x09\x01\x02", 3},                                      /* 8 bytes that are cut */
      {"\x0d\x01", 2},                                          /* 4 bytes that are cut */
      {"\x0b\x0c", 2},                                          /* a group */
      {"\x0e", 1},                                              /* a kind that there is not */
      {"\x00\x01", 2},                                          /* field 0 */
      {"\xf8\xff\xff\xff\xff\xff\xff\xff\xff\x01\x01", 11},     /* a field beyond the last */
  };
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    kv_reader from = reader_of(rows[i].bytes, rows[i].size);
    kv_field field;
    CHECK(!kv_next(&from, &field) && from.bad);
    CHECK(!kv_next(&from, &field) && from.bad);
  }
}

static void test_text_that_is_no_utf8_is_not_written(void) {
  static const char *const bad[] = {"\xff", "\xc0\xaf", "\xe0\x80\x80", "\xed\xa0\x80", "\xf4\x90\x80\x80", "\xe2\x82"};
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    kv_writer to = {0};
    kv_put_text(&to, 1, bad[i]);
    CHECK(to.not_text && !to.size);
    kv_writer_free(&to);
  }
  kv_writer to = {0};
  kv_put_text(&to, 1, "a \xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80");
  CHECK(!to.not_text && to.size == 15);
  kv_writer_free(&to);
}

static void test_text_is_cut_to_its_place(void) {
  char into[4];
  kv_copy_text(into, sizeof into, (kvgrpc_bytes){"abcdef", 6});
  CHECK(!strcmp(into, "abc"));
  kv_copy_text(into, sizeof into, (kvgrpc_bytes){"a\0b", 3});
  CHECK(!strcmp(into, "a"));
  kv_copy_text(into, sizeof into, (kvgrpc_bytes){NULL, 0});
  CHECK(!into[0]);
}

int main(void) {
  test_numbers_and_messages_are_written_as_protobuf_does();
  test_a_long_message_has_a_long_length();
  test_what_is_cut_or_no_field_is_bad();
  test_text_that_is_no_utf8_is_not_written();
  test_text_is_cut_to_its_place();
  return 0;
}
