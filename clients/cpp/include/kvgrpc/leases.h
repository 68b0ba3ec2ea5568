// Leases that are kept alive.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "kvgrpc/client.h"

namespace kvgrpc {

v1::LeaseRef lease_ref(const v1::Grant& grant);
v1::LeaseRef lease_ref(const std::string& lease_id);

// What is known of a lease.
struct LeaseStatus {
  v1::LeaseState state = v1::LEASE_STATE_LIVE;
  // The reason that the lease is not renewed any more; UNSPECIFIED while it is renewed.
  v1::FailureReason reason = v1::FAILURE_REASON_UNSPECIFIED;
  // Whether the lease is over or cannot be renewed. Its holder must not rely on it then.
  bool over = false;
};

// Renews leases over one KeepAlive stream, from its own thread, each when a third of its remaining time has passed. A
// stream that breaks is opened again. A lease that is over is renewed no more, and the caller is told.
//
// The remaining time of a lease counts from when its renewal was sent, by this process's clock, so that a holder never
// relies on a lease longer than its server does. A lease that could not be renewed in time is EXPIRED.
class LeaseKeeper {
 public:
  // Is called once for each lease that is over, with its index, on the keeper's thread. It must not block or end the
  // keeper.
  using OnOver = std::function<void(std::size_t index, const LeaseStatus& status)>;

  // With `ttl` unset, each lease is renewed with the TTL that it was granted with.
  LeaseKeeper(Client client, std::vector<v1::LeaseRef> leases, std::optional<Nanoseconds> ttl = std::nullopt,
              OnOver on_over = {}, CallOptions options = {});
  LeaseKeeper(LeaseKeeper&&) noexcept;
  LeaseKeeper& operator=(LeaseKeeper&&) noexcept;
  // Stops renewing. It ends no lease.
  ~LeaseKeeper();

  LeaseStatus status(std::size_t index) const;
  // Returns as soon as the lease is over. Otherwise it returns what is known when `timeout` is over or the keeper
  // stopped.
  LeaseStatus wait_over(std::size_t index, Nanoseconds timeout) const;
  // Returns why there is no stream now; nothing while there is one.
  std::optional<Error> interruption() const;
  void stop();

 private:
  class State;
  std::unique_ptr<State> state_;
};

}  // namespace kvgrpc
