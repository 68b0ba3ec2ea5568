// Small values that every program needs: durations, random keys, blocks, contents.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "kvgrpc/v1/common.pb.h"

namespace kvgrpc {

using Nanoseconds = std::chrono::nanoseconds;
using Clock = std::chrono::steady_clock;

google::protobuf::Duration to_duration(Nanoseconds value);
Nanoseconds from_duration(const google::protobuf::Duration& value);

// Returns random bytes from the operating system. 16 of them make a transfer key.
std::string random_bytes(std::size_t count);
// Returns 128 random bits as 32 hex digits: an idempotency key.
std::string random_key();

// Returns the content of KV of these tokens, with no adapter and no salt, under the weights that the engine stated.
v1::Content token_content(const std::vector<std::uint32_t>& token_ids);

// Returns block ids as maximal runs, in their order.
v1::BlockRuns block_runs(const std::vector<std::uint32_t>& ids);
// Returns the ids of runs, in their order. If the two lists differ in length, the shorter one counts.
std::vector<std::uint32_t> block_ids(const v1::BlockRuns& runs);
// Returns the number of blocks of all groups together.
std::uint64_t block_count(const v1::Blocks& blocks);

}  // namespace kvgrpc
