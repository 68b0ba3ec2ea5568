// Pulls and pushes whose end is waited for, and one call that moves the KV of a prompt. A transfer that ends without its
// KV is an error here; to a server it is none of a call.
#pragma once

#include <optional>
#include <string>

#include "kvgrpc/transfers.h"

namespace kvgrpc {

// More than a server's defaults for queue, transfer and settle together.
constexpr std::chrono::seconds kMoveTimeout(90);

// Throws Error where a transfer has ended without its KV, FAILED or CANCELLED: its code is ABORTED, its reason and step
// are those of the failure, and its metadata has `transfer_id` and `phase`.
void check(const v1::Transfer& transfer);

// Makes a pull whose destination is stated, and waits for its end: the transfer once the KV is in its blocks. Throws
// Error: what refuses the call, what `check` throws, or DEADLINE_EXCEEDED when the time is over. The transfer goes on
// then; CancelTransfer ends it. Set `wait.until` to wait for the return of the memory, too.
v1::Transfer pull(const Client& client, v1::PullBlocksRequest request, Nanoseconds timeout = kMoveTimeout);

// As `pull`, for a push: reserves blocks for what the request's source is to send.
v1::Transfer receive(const Client& client, v1::ReserveBlocksRequest request, Nanoseconds timeout = kMoveTimeout);

// How a move is made.
struct Moving {
  // A label at both engines.
  std::string request_id = {};
  // Where the KV goes. Unset: as many blocks are allocated at the destination, group by group, as the source has.
  std::optional<v1::Blocks> into = std::nullopt;
  Nanoseconds timeout = kMoveTimeout;
};

// Where the KV is now.
struct Moved {
  // The RECEIVE at the destination.
  v1::Transfer transfer;
  // The destination's blocks; those that were allocated for it are freed by their allocation id.
  v1::Blocks blocks;
};

// Copies the KV of a prompt from blocks of one engine to another one, and waits until it is there: blocks are allocated
// at the destination, those of the source are handed over to be read, and the destination pulls. Both servers manage
// their pools; the source's blocks stay the caller's. A move that fails leaves nothing behind: it is cancelled at both
// sides, and what it allocated is freed. Throws Error.
Moved move(const Client& source, const Client& destination, const v1::Blocks& blocks, const v1::Content& content,
           const Moving& moving = {});

}  // namespace kvgrpc
