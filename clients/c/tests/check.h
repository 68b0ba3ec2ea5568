/* Checks that name what failed, and end the test. */
#ifndef CHECK_H
#define CHECK_H

#include <stdio.h>
#include <stdlib.h>

#define CHECK(what)                                                                \
  do {                                                                             \
    if (!(what)) {                                                                 \
      fprintf(stderr, "%s:%d: %s: not so: %s\n", __FILE__, __LINE__, __func__, #what); \
      abort();                                                                     \
    }                                                                              \
  } while (0)

/* Checks the code and the reason of an error, and that it has a sentence. */
#define CHECK_ERROR(returned, wanted_code, wanted_reason, error)                                           \
  do {                                                                                                     \
    const kvgrpc_code check_code = (returned);                                                             \
    if (check_code != (wanted_code) || (error).reason != (wanted_reason) || !(error).message[0]) {         \
      fprintf(stderr, "%s:%d: %s: %s (%s): %s\n", __FILE__, __LINE__, __func__, kvgrpc_code_name(check_code), \
              kvgrpc_reason_name((error).reason), (error).message);                                        \
      abort();                                                                                             \
    }                                                                                                      \
  } while (0)

#endif
