// Carries out the requests of the conformance runner, one JSON object a line; see clients/conformance/README.md. It
// knows no case and judges nothing.
#include <cstdlib>
#include <functional>
#include <future>
#include <iostream>
#include <map>
#include <mutex>
#include <set>

#include "json.h"
#include "streams.h"

namespace executor {
namespace {

using kvgrpc::Client;

template <auto Method>
struct Unary;
template <class Stub, class Request, class Response,
          grpc::Status (Stub::*Method)(grpc::ClientContext*, const Request&, Response*)>
struct Unary<Method> {
  static std::string call(const Client& client, const Struct& fields) {
    Request request;
    read_message(fields, "request", request);
    return to_json(client.call(Method, request, call_options(fields)));
  }
  static std::string redacted(const Struct& fields) {
    Request request;
    read_message(fields, "request", request);
    return kvgrpc::redacted(request);
  }
};

struct NamedMethod {
  std::string (*call)(const Client&, const Struct&);
  std::string (*redacted)(const Struct&);
};

#define KVGRPC_UNARY(stem, method) \
  {                                                                             \
    "kvgrpc.v1." #stem "Service/" #method, {                                    \
      Unary<&kvgrpc::stem##Stub::method>::call, Unary<&kvgrpc::stem##Stub::method>::redacted \
    }                                                                           \
  }

const std::map<std::string, NamedMethod> kUnary = {
    KVGRPC_UNARY(Admin, GetStatus),
    KVGRPC_UNARY(Admin, ListPeers),
    KVGRPC_UNARY(Admin, ListPins),
    KVGRPC_UNARY(Admin, StartDrain),
    KVGRPC_UNARY(Admin, CancelDrain),
    KVGRPC_UNARY(Admin, GetDrain),
    KVGRPC_UNARY(Admin, ReleaseQuarantine),
    KVGRPC_UNARY(Admin, ListAuditRecords),
    KVGRPC_UNARY(Admin, ListSpans),
    KVGRPC_UNARY(Admin, ForgetEngine),
    KVGRPC_UNARY(Fleet, ListEngines),
    KVGRPC_UNARY(Fleet, PickPair),
    KVGRPC_UNARY(Handoff, FinishedBlocks),
    KVGRPC_UNARY(Handoff, PullBlocks),
    KVGRPC_UNARY(Handoff, ReserveBlocks),
    KVGRPC_UNARY(Handoff, RegisterPush),
    KVGRPC_UNARY(Handshake, GetCapabilities),
    KVGRPC_UNARY(Handshake, GetEngine),
    KVGRPC_UNARY(Handshake, Handshake),
    KVGRPC_UNARY(Handshake, CheckCompatibility),
    KVGRPC_UNARY(Handshake, ConnectPeer),
    KVGRPC_UNARY(Lease, GrantLease),
    KVGRPC_UNARY(Lease, RenewLeases),
    KVGRPC_UNARY(Lease, ReleaseLease),
    KVGRPC_UNARY(Lease, FindOffers),
    KVGRPC_UNARY(Lease, GetLease),
    KVGRPC_UNARY(Lease, ListLeases),
    KVGRPC_UNARY(Pool, DescribePools),
    KVGRPC_UNARY(Pool, AllocateBlocks),
    KVGRPC_UNARY(Pool, FreeBlocks),
    KVGRPC_UNARY(Pool, ReclaimBlocks),
    KVGRPC_UNARY(Pool, ListAllocations),
    KVGRPC_UNARY(Pool, GetPoolStatus),
    KVGRPC_UNARY(Pool, ReadBlocks),
    KVGRPC_UNARY(Scheduler, RequestArrived),
    KVGRPC_UNARY(Scheduler, MatchTokens),
    KVGRPC_UNARY(Scheduler, BlocksAllocated),
    KVGRPC_UNARY(Scheduler, TokensComputed),
    KVGRPC_UNARY(Scheduler, BlocksLoaded),
    KVGRPC_UNARY(Scheduler, RequestPreempted),
    KVGRPC_UNARY(Scheduler, RequestFinished),
    KVGRPC_UNARY(Scheduler, BlocksNeeded),
    KVGRPC_UNARY(Scheduler, AbortRequest),
    KVGRPC_UNARY(Scheduler, PollSchedulerNews),
    KVGRPC_UNARY(Tensor, PutTensor),
    KVGRPC_UNARY(Tensor, GetTensor),
    KVGRPC_UNARY(Tensor, ReleaseTensors),
    KVGRPC_UNARY(Tensor, ListTensors),
    KVGRPC_UNARY(Tensor, GetStagingStatus),
    KVGRPC_UNARY(Transfer, GetTransfer),
    KVGRPC_UNARY(Transfer, WaitTransfer),
    KVGRPC_UNARY(Transfer, WaitTransfers),
    KVGRPC_UNARY(Transfer, ListTransfers),
    KVGRPC_UNARY(Transfer, AcknowledgeTransfers),
    KVGRPC_UNARY(Transfer, CancelTransfer),
};

// Objects that requests name.
template <class Thing>
class Named {
 public:
  Thing get(const std::string& name) {
    const std::lock_guard lock(mutex_);
    const auto found = things_.find(name);
    if (found == things_.end()) throw Unable("nothing is called " + name);
    return found->second;
  }
  void put(const std::string& name, Thing thing) {
    const std::lock_guard lock(mutex_);
    things_.insert_or_assign(name, std::move(thing));
  }
  void drop(const std::string& name) {
    const std::lock_guard lock(mutex_);
    things_.erase(name);
  }

 private:
  std::mutex mutex_;
  std::map<std::string, Thing> things_;
};

Named<Client> clients;
Named<std::shared_ptr<Source>> streams;
Named<std::shared_ptr<kvgrpc::LeaseKeeper>> keepers;

Client client_of(const Struct& request) { return clients.get(text(request, "server")); }
std::shared_ptr<Source> stream_of(const Struct& request) { return streams.get(text(request, "stream")); }
kvgrpc::Nanoseconds timeout_of(const Struct& request) {
  return seconds(request, "timeoutS").value_or(std::chrono::seconds(10));
}

const NamedMethod& method_of(const Struct& request) {
  const auto method = kUnary.find(text(request, "method"));
  if (method == kUnary.end()) throw Unable("no unary method is called " + text(request, "method"));
  return method->second;
}

std::string call(const Struct& request) {
  return "{\"reply\":" + method_of(request).call(client_of(request), request) + "}";
}

std::string redacted(const Struct& request) {
  return "{\"text\":" + quoted(method_of(request).redacted(request)) + "}";
}

std::string pull(const Struct& request) {
  kvgrpc::v1::PullBlocksRequest asked;
  read_message(request, "request", asked);
  return "{\"transfer\":" + to_json(kvgrpc::pull(client_of(request), asked, timeout_of(request))) + "}";
}

std::string move(const Struct& request) {
  kvgrpc::v1::HandOver asked;
  read_message(request, "request", asked);
  kvgrpc::Moving moving;
  moving.request_id = text(request, "requestId", "");
  moving.timeout = timeout_of(request);
  const auto moved = kvgrpc::move(client_of(request), clients.get(text(request, "to")), asked.blocks(),
                                  asked.content(), moving);
  return "{\"transfer\":" + to_json(moved.transfer) + ",\"blocks\":" + to_json(moved.blocks) + "}";
}

std::string open(const Struct& request) {
  const auto stream = open_stream(client_of(request), text(request, "method"), request);
  streams.put(text(request, "stream"), stream);
  return "{\"metadata\":" + stream->metadata() + "}";
}

std::string wait(const Struct& request) {
  const auto until = text(request, "until", "ENDED") == "RETURNED" ? kvgrpc::v1::WAIT_CONDITION_RETURNED
                                                                   : kvgrpc::v1::WAIT_CONDITION_ENDED;
  const auto waited = kvgrpc::wait(client_of(request), text(request, "transferId"), until, timeout_of(request));
  return "{\"transfer\":" + to_json(waited.transfer) +
         ",\"conditionMet\":" + (waited.condition_met ? "true" : "false") + "}";
}

std::string keep_alive(const Struct& request) {
  std::vector<kvgrpc::v1::LeaseRef> leases;
  for (const auto& row : field(request, "leases").list_value().values()) {
    from_json(to_json(row), leases.emplace_back());
  }
  keepers.put(text(request, "keeper"),
              std::make_shared<kvgrpc::LeaseKeeper>(client_of(request), leases, seconds(request, "ttlS")));
  return "{}";
}

std::string kept(const Struct& request) {
  const auto keeper = keepers.get(text(request, "keeper"));
  const auto* index = find(request, "index");
  const auto status =
      keeper->wait_over(index ? static_cast<std::size_t>(index->number_value()) : 0, timeout_of(request));
  const auto state = kvgrpc::name_of(status.state);
  return "{\"state\":" + quoted(state.empty() ? "UNSPECIFIED" : state) + "}";
}

std::string clean_up(const Struct& request) {
  std::vector<kvgrpc::CleanUpSide> sides;
  for (const auto& row : field(request, "sides").list_value().values()) {
    Struct side = row.struct_value();
    const auto client = client_of(side);
    side.mutable_fields()->erase("server");
    kvgrpc::v1::CancelTransferRequest target;  // has all other fields of a side, and their JSON mapping
    from_json(to_json(side), target);
    const auto& ids = target.free_allocation_ids();
    sides.push_back({client, target.transfer_key(), target.transfer_id(), {ids.begin(), ids.end()}});
  }
  std::string outcomes;
  for (const auto& row : kvgrpc::clean_up(sides, text(request, "message", ""))) {
    std::string outcome;
    if (row.reply) {
      outcome = kvgrpc::name_of(kvgrpc::outcome(*row.reply));
    } else {
      outcome = row.error->reason_name().empty() ? kvgrpc::name_of(row.error->code()) : row.error->reason_name();
    }
    outcomes += (outcomes.empty() ? "" : ",") + quoted(outcome);
  }
  return "{\"outcomes\":[" + outcomes + "]}";
}

kvgrpc::Options options_of(const Struct& request) {
  kvgrpc::Options options;
  if (const Value* tls = find(request, "tls")) {
    const Struct& paths = tls->struct_value();
    options.tls = kvgrpc::TlsFiles{text(paths, "dir", ""), text(paths, "cert", ""), text(paths, "key", ""),
                                   text(paths, "ca", "")};
  }
  options.token = text(request, "token", "");
  options.token_file = text(request, "tokenFile", "");
  return options;
}

const std::map<std::string, std::function<std::string(const Struct&)>> kOperations = {
    {"hello",
     [](const Struct&) { return "{\"language\":\"cpp\",\"version\":" + quoted("C++17, GCC " __VERSION__) + "}"; }},
    {"connect",
     [](const Struct& request) {
       clients.put(text(request, "server"), kvgrpc::connect(text(request, "address"), options_of(request)));
       return "{}";
     }},
    {"close", [](const Struct& request) { return clients.drop(text(request, "server")), "{}"; }},
    {"call", call},
    {"open", open},
    {"send", [](const Struct& request) { return stream_of(request)->send(request), "{}"; }},
    {"finish", [](const Struct& request) { return stream_of(request)->finish(), "{}"; }},
    {"next", [](const Struct& request) { return stream_of(request)->next(timeout_of(request)); }},
    {"cancel", [](const Struct& request) { return stream_of(request)->cancel(), "{}"; }},
    {"wait", wait},
    {"pull", pull},
    {"move", move},
    {"redacted", redacted},
    {"watch",
     [](const Struct& request) {
       streams.put(text(request, "stream"), watch_transfers(client_of(request), request));
       return "{}";
     }},
    {"watchEngine",
     [](const Struct& request) {
       streams.put(text(request, "stream"), watch_engine(client_of(request), request));
       return "{}";
     }},
    {"keepAlive", keep_alive},
    {"kept", kept},
    {"stopKeeping", [](const Struct& request) { return keepers.get(text(request, "keeper"))->stop(), "{}"; }},
    {"cleanUp", clean_up},
};

std::string answer(const Struct& request) {
  const Value* id = find(request, "id");
  const std::string head = "{\"id\":" + (id ? to_json(*id) : "null") + ",";
  try {
    const auto operation = kOperations.find(text(request, "op"));
    if (operation == kOperations.end()) throw Unable("no op is called " + text(request, "op"));
    return head + "\"ok\":" + operation->second(request) + "}";
  } catch (const kvgrpc::Error& error) {
    return head + "\"error\":" + error_json(error) + "}";
  } catch (const std::exception& error) {
    return head + "\"error\":" + error_json(Unable(error.what())) + "}";
  }
}

// Requests that never wait. They are answered in their order, so that one may build on another.
const std::set<std::string> kAtOnce = {"hello", "connect", "close", "watch", "watchEngine", "keepAlive", "cancel"};

// Runs the executor. Every other request has its own thread, so that a waiting call delays no other.
int run() {
  std::mutex output;
  std::vector<std::future<void>> requests;
  std::string line;
  while (std::getline(std::cin, line)) {
    Struct request;
    try {
      from_json(line, request);
    } catch (const Unable& error) {
      std::cerr << "not a request: " << error.what() << std::endl;
      continue;
    }
    const auto handle = [request, &output] {
      const std::string reply = answer(request);
      const std::lock_guard lock(output);
      std::cout << reply << std::endl;
    };
    if (kAtOnce.count(text(request, "op", ""))) {
      handle();
    } else {
      requests.push_back(std::async(std::launch::async, handle));
    }
  }
  const auto until = kvgrpc::Clock::now() + std::chrono::seconds(1);
  for (const auto& request : requests) request.wait_until(until);
  std::_Exit(0);  // waiting calls, watches and keepers end with the process
}

}  // namespace
}  // namespace executor

int main() { return executor::run(); }
