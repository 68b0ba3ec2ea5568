// The sources that `next` reads from: a stream of the generated code, or a watch of the wrapper.
#pragma once

#include <memory>
#include <string>

#include "json.h"

namespace executor {

class Source {
 public:
  virtual ~Source() = default;
  // Returns the object of `ok`. Throws kvgrpc::Error.
  virtual std::string next(kvgrpc::Nanoseconds timeout) = 0;
  virtual void cancel() = 0;
  // Returns the initial metadata. Only a stream of the generated code has any.
  virtual std::string metadata() { throw Unable("a watch has no metadata"); }
  virtual void send(const Struct&) { throw Unable("the client sends nothing on this stream"); }
  virtual void finish() { throw Unable("the client sends nothing on this stream"); }
};

// Opens a stream of the generated code by `request` (the fields of the op `open`).
std::shared_ptr<Source> open_stream(const kvgrpc::Client& client, const std::string& method, const Struct& request);
std::shared_ptr<Source> watch_transfers(const kvgrpc::Client& client, const Struct& request);
std::shared_ptr<Source> watch_engine(const kvgrpc::Client& client, const Struct& request);

}  // namespace executor
