// Pulls and pushes that wait for their end, and one call that moves the KV of a prompt. A transfer that ends without
// its KV is an error here. At the server it is not an error of a call.
#pragma once

#include <optional>
#include <string>

#include "kvgrpc/transfers.h"

namespace kvgrpc {

// Default time of a move. It exceeds the sum of a server's defaults for queue, transfer and settle.
constexpr std::chrono::seconds kMoveTimeout(90);

// Throws Error where a transfer has ended without its KV, FAILED or CANCELLED. The code of the error is ABORTED, its
// reason and next step are those of the failure, and its metadata has `transfer_id` and `phase`.
void check(const v1::Transfer& transfer);

// Makes a pull whose destination is stated, and waits for its end. It returns the transfer once the KV is in its
// blocks. Throws Error: the one that refuses the call, or the one of `check`. When the time is over, it is
// DEADLINE_EXCEEDED: then the transfer continues, and CancelTransfer ends it. Set `wait.until` to wait for the return
// of the memory as well.
v1::Transfer pull(const Client& client, v1::PullBlocksRequest request, Nanoseconds timeout = kMoveTimeout);

// Reserves blocks for what the request's source will push, and waits for it as `pull` does.
v1::Transfer receive(const Client& client, v1::ReserveBlocksRequest request, Nanoseconds timeout = kMoveTimeout);

// Options of a move.
struct Moving {
  // Label of the transfer at both engines.
  std::string request_id = {};
  // Destination blocks. Unset: as many blocks are allocated at the destination as the source has, group by group.
  std::optional<v1::Blocks> into = std::nullopt;
  Nanoseconds timeout = kMoveTimeout;
};

// The result of a move.
struct Moved {
  // The RECEIVE at the destination.
  v1::Transfer transfer;
  // The destination's blocks. Blocks that the move allocated are freed by their allocation id.
  v1::Blocks blocks;
};

// Copies the KV of a prompt from blocks of one engine to another engine, and waits until the KV is there. It allocates
// blocks at the destination, hands the source's blocks over for reading, and lets the destination pull. Both servers
// must manage their pools. The caller keeps the source's blocks. A move that fails leaves nothing behind: it is
// cancelled at both sides, and what it allocated is freed. Throws Error.
Moved move(const Client& source, const Client& destination, const v1::Blocks& blocks, const v1::Content& content,
           const Moving& moving = {});

}  // namespace kvgrpc
