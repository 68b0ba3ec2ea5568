// Growing pauses between attempts.
#pragma once

#include <algorithm>
#include <optional>
#include <random>

#include "kvgrpc/values.h"

namespace kvgrpc::detail {

class Pause {
 public:
  static constexpr std::chrono::milliseconds kFirst{100};
  static constexpr std::chrono::milliseconds kLongest{2'000};

  // Returns the next pause. The server's wish counts where it is longer. Jitter keeps the callers of one server from
  // coming back all at once.
  Nanoseconds next(std::optional<Nanoseconds> asked = std::nullopt) {
    const double share = std::uniform_real_distribution<>(0.5, 1.0)(random_);
    const auto pause = std::chrono::duration_cast<Nanoseconds>(current_ * share);
    current_ = std::min<Nanoseconds>(2 * current_, kLongest);
    return std::max(pause, asked.value_or(Nanoseconds(0)));
  }

  // Records that an attempt worked for this time. Only one that worked for long enough counts as a recovery.
  void worked(Nanoseconds lived) {
    if (lived >= kLongest) current_ = kFirst;
  }

 private:
  Nanoseconds current_ = kFirst;
  std::minstd_rand random_{std::random_device{}()};
};

}  // namespace kvgrpc::detail
