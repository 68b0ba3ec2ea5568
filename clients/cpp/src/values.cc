#include "kvgrpc/values.h"

#include <algorithm>
#include <random>

namespace kvgrpc {

using std::chrono::duration_cast;
using std::chrono::seconds;

google::protobuf::Duration to_duration(Nanoseconds value) {
  google::protobuf::Duration made;
  const auto whole = duration_cast<seconds>(value);
  made.set_seconds(whole.count());
  made.set_nanos(static_cast<std::int32_t>((value - whole).count()));
  return made;
}

Nanoseconds from_duration(const google::protobuf::Duration& value) {
  // A Duration may be 292 times as long as 64 bits of nanoseconds can hold.
  constexpr std::int64_t kMost = duration_cast<seconds>(Nanoseconds::max()).count() - 1;
  return seconds(std::clamp<std::int64_t>(value.seconds(), -kMost, kMost)) + Nanoseconds(value.nanos());
}

std::string random_bytes(std::size_t count) {
  std::random_device source;
  std::string made(count, '\0');
  for (char& byte : made) byte = static_cast<char>(source());
  return made;
}

std::string random_key() {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string made;
  for (const char byte : random_bytes(16)) {
    const auto value = static_cast<unsigned char>(byte);
    made += kDigits[value >> 4];
    made += kDigits[value & 15];
  }
  return made;
}

v1::Content token_content(const std::vector<std::uint32_t>& token_ids) {
  v1::Content made;
  made.mutable_tokens()->mutable_token_ids()->Add(token_ids.begin(), token_ids.end());
  return made;
}

v1::BlockRuns block_runs(const std::vector<std::uint32_t>& ids) {
  v1::BlockRuns runs;
  std::uint64_t expected = 0;
  for (const std::uint32_t id : ids) {
    const int last = runs.counts_size() - 1;
    if (last >= 0 && id == expected) {
      runs.set_counts(last, runs.counts(last) + 1);
    } else {
      runs.add_starts(id);
      runs.add_counts(1);
    }
    expected = std::uint64_t{id} + 1;
  }
  return runs;
}

std::vector<std::uint32_t> block_ids(const v1::BlockRuns& runs) {
  std::vector<std::uint32_t> ids;
  for (int i = 0; i < std::min(runs.starts_size(), runs.counts_size()); ++i) {
    for (std::uint32_t k = 0; k < runs.counts(i); ++k) ids.push_back(runs.starts(i) + k);
  }
  return ids;
}

std::uint64_t block_count(const v1::Blocks& blocks) {
  std::uint64_t count = 0;
  for (const auto& group : blocks.groups()) {
    for (const std::uint32_t run : group.runs().counts()) count += run;
  }
  return count;
}

}  // namespace kvgrpc
