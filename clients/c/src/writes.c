/* The open accesses by which peers may write into a shared pool: only the rank knows them when a lead dies. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "rank.h"

/* Maximum number of accesses whose names are kept; with more, the memory is not proved to be at rest. */
#define WRITES_MAX 65536

static void forget_write(kvgrpc_rank *rank, const char *access) {
  for (size_t i = 0; i < rank->write_count; i++) {
    if (strcmp(rank->writes[i], access)) continue;
    free(rank->writes[i]);
    rank->writes[i] = rank->writes[--rank->write_count];
    return;
  }
}

static void note_write(kvgrpc_rank *rank, const char *access) {
  forget_write(rank, access);
  char **writes = NULL, *name = NULL;
  if (rank->write_count < WRITES_MAX) writes = realloc(rank->writes, (rank->write_count + 1) * sizeof *writes);
  if (writes) rank->writes = writes;
  if (writes) name = strdup(access);
  if (name) writes[rank->write_count++] = name;
  else rank->writes_lost = true;
}

bool kv_writes_take(kvgrpc_rank *rank, kvgrpc_bytes message) {
  kv_reader from = kv_reader_of(message);
  kv_field field;
  kvgrpc_bytes access = {0};
  bool open = false, writes = false;
  while (kv_next(&from, &field)) {
    if (kv_is(&field, 1, 2)) access = field.bytes;
    if (kv_is(&field, 2, 0)) open = field.value != 0;
    if (kv_is(&field, 3, 0)) writes = field.value != 0;
  }
  if (from.bad || access.size >= KVGRPC_ID_BYTES) return false;
  char name[KVGRPC_ID_BYTES];
  kv_copy_text(name, sizeof name, access);
  if (writes && open) note_write(rank, name);
  else if (writes) forget_write(rank, name);
  return true;
}

void kv_writes_free(kvgrpc_rank *rank) {
  while (rank->write_count) free(rank->writes[--rank->write_count]);
  free(rank->writes);
}
