/* A grant survives the object that routers relay, and no other text is one. */
#include <string.h>

#include "check.h"
#include "kvgrpc_engine.h"

static void test_a_grant_is_read_back_whatever_its_length(void) {
  uint8_t grant[70], back[70];
  for (size_t i = 0; i < sizeof grant; i++) grant[i] = (uint8_t)(i * 37 + 200);
  for (size_t size = 1; size <= sizeof grant; size++) {
    char json[300];
    const size_t length = kvgrpc_grant_to_json((kvgrpc_bytes){grant, size}, true, json, sizeof json);
    CHECK(length == strlen(json));
    const char *text = strstr(json, "kvgrpc_grant\": \"") + 16;
    CHECK(kvgrpc_grant_from_text(text, (size_t)(strchr(text, '"') - text), back, sizeof back) == size);
    CHECK(!memcmp(grant, back, size));
  }
}

static void test_a_text_that_does_not_fit_is_cut_and_counted(void) {
  char json[8];
  CHECK(kvgrpc_grant_to_json((kvgrpc_bytes){"abc", 3}, false, json, sizeof json) > sizeof json);
  CHECK(strlen(json) == 7);
  CHECK(kvgrpc_grant_to_json((kvgrpc_bytes){"abc", 3}, false, NULL, 0) > 0);
}

static void test_what_is_no_base64_is_no_grant(void) {
  static const char *const bad[] = {"", "A", "AB", "ABC", "AB=C", "A===", "====", "AB+/", "AB\nC", "ABC\x01", "AB=="};
  uint8_t into[8];
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) CHECK(!kvgrpc_grant_from_text(bad[i], strlen(bad[i]), into, 8));
  CHECK(!kvgrpc_grant_from_text("AAAA\0AAA", 8, into, 8));
  CHECK(!kvgrpc_grant_from_text("AAAAAAAAAAAA", 12, into, 8));
}

int main(void) {
  test_a_grant_is_read_back_whatever_its_length();
  test_a_text_that_does_not_fit_is_cut_and_counted();
  test_what_is_no_base64_is_no_grant();
  return 0;
}
