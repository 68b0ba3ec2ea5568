// The steps of a scheduler, over one stream.
#pragma once

#include <memory>
#include <optional>

#include "kvgrpc/client.h"

namespace kvgrpc {

// Sends a scheduler's steps over one stream, one at a time, from any thread. When the stream is lost, another one is
// opened and the step is sent again, which is safe.
class Steps {
 public:
  // The options hold for all steps: the deadline of each, the metadata of the streams, and the trace context of the
  // requests that arrive and state none.
  explicit Steps(Client client, CallOptions options = {});
  Steps(Steps&&) noexcept;
  Steps& operator=(Steps&&) noexcept;
  ~Steps();

  // Sends a step and returns its answer. A refused call of the step says so in its answer, and the other calls take
  // effect. The deadline, `timeout` or otherwise that of a unary call, includes the wait for earlier steps and all
  // attempts. Throws Error.
  v1::ScheduleResponse step(v1::ScheduleRequest request, std::optional<Nanoseconds> timeout = std::nullopt);

 private:
  class State;
  std::unique_ptr<State> state_;
};

}  // namespace kvgrpc
