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
  // Why it is not renewed any more; UNSPECIFIED while it is.
  v1::FailureReason reason = v1::FAILURE_REASON_UNSPECIFIED;
  // It is over, or cannot be renewed: it is not to be relied on.
  bool over = false;
};

// Renews leases over one KeepAlive stream, from a thread of its own, each at a third of what is left of it. A stream
// that breaks is opened again. A lease that is over leaves the renewals, and the caller is told.
//
// What is left of a lease counts from when its renewal was sent, by this process's clock, so that a holder never
// believes in a lease longer than its server does. One that could not be renewed in time is EXPIRED.
class LeaseKeeper {
 public:
  // Called once for each lease that is over, by its index, on the keeper's thread. It must not block or end the keeper.
  using OnOver = std::function<void(std::size_t index, const LeaseStatus& status)>;

  // `ttl`: unset takes the one that each lease was granted with.
  LeaseKeeper(Client client, std::vector<v1::LeaseRef> leases, std::optional<Nanoseconds> ttl = std::nullopt,
              OnOver on_over = {}, CallOptions options = {});
  LeaseKeeper(LeaseKeeper&&) noexcept;
  LeaseKeeper& operator=(LeaseKeeper&&) noexcept;
  // Stops renewing; ends no lease.
  ~LeaseKeeper();

  LeaseStatus status(std::size_t index) const;
  // Returns as soon as the lease is over, else what is known when `timeout` is over or the keeper was stopped.
  LeaseStatus wait_over(std::size_t index, Nanoseconds timeout) const;
  // Why no stream stands now; nothing while one does.
  std::optional<Error> interruption() const;
  void stop();

 private:
  class State;
  std::unique_ptr<State> state_;
};

}  // namespace kvgrpc
