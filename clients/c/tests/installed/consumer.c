#include <kvgrpc_engine.h>

int main(void) {
  kvgrpc_error error;
  kvgrpc_rank *rank = NULL;
  const kvgrpc_ticket ticket = {"/nowhere/lead.sock", {"", 0}, 0};
  return kvgrpc_rank_attach(&ticket, 0, &rank, &error) != KVGRPC_UNAVAILABLE;
}
