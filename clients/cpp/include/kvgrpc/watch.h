// Watching transfers and engines over streams that break and are opened again.
//
// A watch has no thread of its own: next() does the work, on the caller's. One thread at a time calls it; cancel() may
// come from any.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "kvgrpc/client.h"

namespace kvgrpc {

// Where a watch of transfers starts: what any reply's header says.
struct WatchPosition {
  std::uint64_t event_seq = 0;
  // 0: with the present.
  std::uint64_t incarnation = 0;
};

// Every change of the transfers that match, in order, none twice.
class TransferWatch {
 public:
  explicit TransferWatch(Client client, v1::TransferFilter filter = {}, WatchPosition after = {},
                         CallOptions options = {});
  TransferWatch(TransferWatch&&) noexcept;
  TransferWatch& operator=(TransferWatch&&) noexcept;
  ~TransferWatch();

  // The next change (`transfer` is set), or word that changes are missing (`history_lost`): list the transfers then,
  // the watch goes on with later ones. Nothing when `timeout` is over.
  //
  // Throws Error: INCARNATION_CHANGED when the life that is watched is over and with it all its transfers, CANCELLED
  // after cancel(), and what the server refuses the watch with. A stream that breaks is no error: it is opened again
  // after position(), after pauses that grow from 0.1 s to 2 s.
  std::optional<v1::WatchTransfersResponse> next(Nanoseconds timeout);

  // How far the watch is.
  WatchPosition position() const;
  // Why no stream stands now; nothing while one does. For a reader that is tired of waiting.
  std::optional<Error> interruption() const;
  void cancel();

 private:
  class State;
  std::unique_ptr<State> state_;
};

// What is known of an engine: its status, or that it cannot be reached.
struct EngineUpdate {
  // Unset: unreachable.
  std::optional<v1::WatchEngineResponse> message;
  // Why it is unreachable.
  std::optional<Error> unreachable;
};

// The status of one engine, over all its lives. A message of another incarnation tells that all leases, grants and
// transfers of the one before are gone.
class EngineWatch {
 public:
  // The server tells changes at most once in `min_interval`; unset means 0.1 s.
  explicit EngineWatch(Client client, std::optional<Nanoseconds> min_interval = std::nullopt, CallOptions options = {});
  EngineWatch(EngineWatch&&) noexcept;
  EngineWatch& operator=(EngineWatch&&) noexcept;
  ~EngineWatch();

  // The next status, or, once for each time that it is lost, that the engine is unreachable: its stream broke, or said
  // nothing for Options::engine_silence. It is tried again for ever, after pauses that grow from 0.1 s to 2 s. Nothing
  // when `timeout` is over.
  //
  // Throws Error: CANCELLED after cancel(), and what the server refuses every such watch with (INVALID_ARGUMENT,
  // UNIMPLEMENTED, PERMISSION_DENIED, UNAUTHENTICATED).
  std::optional<EngineUpdate> next(Nanoseconds timeout);
  void cancel();

 private:
  class State;
  std::unique_ptr<State> state_;
};

}  // namespace kvgrpc
