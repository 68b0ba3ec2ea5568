// Waits for a transfer, and cleans up after one.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "kvgrpc/client.h"

namespace kvgrpc {

// A transfer as it was when the wait ended.
struct Waited {
  v1::Transfer transfer;
  // Whether the condition was met. False means that the time was over first.
  bool condition_met = false;
};

// Waits until a transfer is over (ENDED), or over with its memory returned (RETURNED), by as many calls as that takes.
// While time is left, the call is repeated when the server is away, silent or full, when a connection was cut, and when
// a proxy failed. It returns at the latest one Options::call_timeout after `timeout`. Throws Error: the refusal of the
// server or, when the time is over, why the last call had no answer.
Waited wait(const Client& client, const std::string& transfer_id, v1::WaitCondition until, Nanoseconds timeout,
            const CallOptions& options = {});

// What to clean up at one server.
struct CleanUpSide {
  Client client;
  // The transfers: set one of the two fields. By key all transfers of the request end at that server, later ones
  // included.
  std::string transfer_key;
  std::string transfer_id;
  // Allocations to free as well.
  std::vector<std::string> free_allocation_ids = {};
};

// The result of one server: one of the two fields is set.
struct CleanedUp {
  std::optional<v1::CancelTransferResponse> reply;
  std::optional<Error> error;
};

// Cancels the transfers of a failed request and frees its blocks, at all sides in parallel. A side that fails does not
// stop the others. `message` is for logs and for the failure of the transfers. Returns one row for each side, in order.
std::vector<CleanedUp> clean_up(const std::vector<CleanUpSide>& sides, const std::string& message,
                                const CallOptions& options = {});

}  // namespace kvgrpc
