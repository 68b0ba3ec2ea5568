// Waiting for a transfer, and cleaning up after one.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "kvgrpc/client.h"

namespace kvgrpc {

// A transfer as it was when the wait ended.
struct Waited {
  v1::Transfer transfer;
  // False: the time was over first.
  bool condition_met = false;
};

// Waits until a transfer is over (ENDED), or over with its memory back (RETURNED), by as many calls as that takes. A
// server that is away, silent or full in between is asked again while time is left, and so it is where a connection was
// cut or a proxy failed. Returns at the latest one Options::call_timeout after `timeout`. Throws Error: what the server
// refused with, or, when the time is over, why the last call had no answer.
Waited wait(const Client& client, const std::string& transfer_id, v1::WaitCondition until, Nanoseconds timeout,
            const CallOptions& options = {});

// What to clean up at one server.
struct CleanUpSide {
  Client client;
  // Which transfer: one of the two. By key all transfers of the request end at that server, also those still to come.
  std::string transfer_key;
  std::string transfer_id;
  // Allocations to free as well.
  std::vector<std::string> free_allocation_ids = {};
};

// What one server said: one of the two.
struct CleanedUp {
  std::optional<v1::CancelTransferResponse> reply;
  std::optional<Error> error;
};

// Cancels the transfers of a failed request, and frees its blocks, at all sides at once. A side that fails keeps no
// other from being told. `message` is for logs and for the failure of the transfers. Returns one row a side, in order.
std::vector<CleanedUp> clean_up(const std::vector<CleanUpSide>& sides, const std::string& message,
                                const CallOptions& options = {});

}  // namespace kvgrpc
