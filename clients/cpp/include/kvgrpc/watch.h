// Watches of transfers and engines, over streams that break and are opened again.
//
// A watch has no thread: next() does the work on the caller's thread. One thread at a time calls next(). Any thread may
// call cancel().
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "kvgrpc/client.h"

namespace kvgrpc {

// The point at which a watch of transfers starts. The header of any reply states one.
struct WatchPosition {
  std::uint64_t event_seq = 0;
  // Incarnation of the engine. 0 starts with the present.
  std::uint64_t incarnation = 0;
};

// Every change of the matching transfers, in order, and none twice.
class TransferWatch {
 public:
  explicit TransferWatch(Client client, v1::TransferFilter filter = {}, WatchPosition after = {},
                         CallOptions options = {});
  TransferWatch(TransferWatch&&) noexcept;
  TransferWatch& operator=(TransferWatch&&) noexcept;
  ~TransferWatch();

  // Returns the next change (`transfer` is set), or a message that changes are missing (`history_lost`): list the
  // transfers then; the watch continues with later changes. It returns nothing when `timeout` is over.
  //
  // Throws Error: INCARNATION_CHANGED when the watched life is over and its transfers are gone, CANCELLED after
  // cancel(), and the error with which the server refuses the watch. A stream that breaks is not an error: it is opened
  // again after position(), after pauses that grow from 0.1 s to 2 s.
  std::optional<v1::WatchTransfersResponse> next(Nanoseconds timeout);

  // Returns how far the watch has got.
  WatchPosition position() const;
  // Returns why there is no stream now; nothing while there is one. A reader may give up because of it.
  std::optional<Error> interruption() const;
  void cancel();

 private:
  class State;
  std::unique_ptr<State> state_;
};

// What is known of an engine: its status, or that it cannot be reached.
struct EngineUpdate {
  // The status. Unset means that the engine is unreachable.
  std::optional<v1::WatchEngineResponse> message;
  // The error that makes the engine unreachable.
  std::optional<Error> unreachable;
};

// The status of one engine, over all its lives. A message with another incarnation says that all leases, grants and
// transfers of the previous life are gone.
class EngineWatch {
 public:
  // With `min_interval` unset, the server reports changes at most once in 0.1 s.
  explicit EngineWatch(Client client, std::optional<Nanoseconds> min_interval = std::nullopt, CallOptions options = {});
  EngineWatch(EngineWatch&&) noexcept;
  EngineWatch& operator=(EngineWatch&&) noexcept;
  ~EngineWatch();

  // Returns the next status, or that the engine is unreachable. An engine is unreachable when its stream broke or was
  // silent for Options::engine_silence, and that is reported once for each outage. The watch retries without limit,
  // after pauses that grow from 0.1 s to 2 s. It returns nothing when `timeout` is over.
  //
  // Throws Error: CANCELLED after cancel(), and the error with which the server refuses every such watch
  // (INVALID_ARGUMENT, UNIMPLEMENTED, PERMISSION_DENIED, UNAUTHENTICATED).
  std::optional<EngineUpdate> next(Nanoseconds timeout);
  void cancel();

 private:
  class State;
  std::unique_ptr<State> state_;
};

}  // namespace kvgrpc
