// The demo's engine as a process: the JSON lines of examples/minimal_engine/__main__.py, without conversations.
//
//   minimal-engine [--session-socket PATH [--own-memory]]
#include <poll.h>
#include <unistd.h>

#include <iostream>

#include "engine.h"
#include "json.h"

namespace {

Bytes grant_of(const Json& params) {
  const std::string& text = params["kvgrpc_grant"].text;
  Bytes grant(text.size());
  grant.resize(kvgrpc_grant_from_text(text.data(), text.size(), grant.data(), grant.size()));
  if (grant.empty()) throw TransferFailed("GRANT_INVALID: kv_transfer_params has no kvgrpc_grant");
  return grant;
}

std::string params_of(const Bytes& grant, bool is_read) {
  const kvgrpc_bytes bytes{grant.data(), grant.size()};
  std::string json(kvgrpc_grant_to_json(bytes, is_read, nullptr, 0), 0);
  kvgrpc_grant_to_json(bytes, is_read, json.data(), json.size() + 1);
  return json;
}

constexpr double COUNT_MAX = 4096;  // Maximum number of tokens of one answer.

Labels labels_of(const Json& line) {
  Labels labels{"", line["request_id"].text, line["traceparent"].text};
  const std::string& hex = line["transfer_key"].text;
  for (size_t at = 0; at + 1 < hex.size(); at += 2)
    labels.transfer_key += static_cast<char>(std::stoi(hex.substr(at, 2), nullptr, 16));
  return labels;
}

// What the router asks of an engine, one method each.
class Operations {
 public:
  explicit Operations(Engine& engine) : engine_(engine) {}

  std::string answer(const Json& line) {
    const std::string& op = line["op"].text;
    const bool moves = op == "prefill" || op == "reserve" || (op == "decode" && line.has("kv_transfer_params"));
    if (moves && engine_.fileno() < 0) throw TransferFailed("PEER_LOST: this engine has no lead");
    if (op == "prefill") return prefill(line);
    if (op == "reserve") return reserve(line);
    if (op == "decode") return decode(line);
    if (op == "generate") return generate(line);
    if (op == "forget") return "{}";  // there is no prefix cache
    if (op == "usage") return usage();
    throw Malformed("no such op");
  }

 private:
  std::string prefill(const Json& line) {
    Request request = engine_.begin(line["prompt"].text);
    std::string told;
    try {
      if (line.has("push_to")) {
        engine_.push(request, labels_of(line), grant_of(line["push_to"]), line["layerwise"].truth);
      } else {
        const Bytes grant = engine_.prefill(request, labels_of(line), line["ttl_s"].number);
        told = "\"kv_transfer_params\": " + params_of(grant, true) + ", ";
      }
    } catch (...) {
      engine_.release(request);
      throw;
    }
    return "{" + told + "\"prefilled_s\": " + std::to_string(engine_.prefilled_s) + "}";
  }

  std::string reserve(const Json& line) {
    Request request = engine_.begin(line["prompt"].text);
    Bytes grant;
    try {
      const kvgrpc_transfer made = engine_.reserve(request, labels_of(line), grant);
      reserved_[line["transfer_key"].text] = {request, made};
    } catch (...) {
      engine_.release(request);
      throw;
    }
    return "{\"kv_transfer_params\": " + params_of(grant, false) + "}";
  }

  std::string decode(const Json& line) {
    Request request;
    std::string id;
    try {
      if (line.has("kv_transfer_params")) {
        request = engine_.begin(line["prompt"].text);
        id = engine_.pull(request, labels_of(line), grant_of(line["kv_transfer_params"]));
      } else {
        const auto found = reserved_.extract(line["transfer_key"].text);
        if (!found) throw TransferFailed("TRANSFER_NOT_FOUND: nothing is reserved under this key");
        request = found.mapped().first;
        id = engine_.receive(request, found.mapped().second);
      }
    } catch (...) {
      engine_.release(request);
      throw;
    }
    if (line["corrupt"].truth) engine_.corrupt(request);
    const std::string tokens = generated(request, line);
    return "{\"tokens\": " + tokens + ", \"transfer_id\": " + quoted(id) +
           ", \"received_s\": " + std::to_string(engine_.received_s) + "}";
  }

  std::string generate(const Json& line) {
    Request request = engine_.begin(line["prompt"].text);
    return "{\"tokens\": " + generated(request, line) + "}";
  }

  std::string usage() {
    if (engine_.fileno() >= 0) engine_.step();
    return "{\"used_blocks\": " + std::to_string(engine_.used_blocks()) + "}";
  }

  std::string generated(Request& request, const Json& line) {
    Tokens made;
    try {
      const double count = line["count"].number;
      if (!(count >= 0 && count <= COUNT_MAX)) throw Malformed("too many tokens, or less than none");
      made = engine_.decode(request, static_cast<size_t>(count));
    } catch (...) {
      engine_.release(request);
      throw;
    }
    engine_.release(request);
    std::string list;
    for (const uint32_t token : made) list += (list.empty() ? "" : ", ") + std::to_string(token);
    return "[" + list + "]";
  }

  Engine& engine_;
  std::map<std::string, std::pair<Request, kvgrpc_transfer>> reserved_;
};

// Serves lines until the input ends.
void serve(Engine& engine) {
  Operations operations(engine);
  std::string input;
  for (;;) {
    pollfd rows[2] = {{STDIN_FILENO, POLLIN, 0}, {engine.fileno(), POLLIN, 0}};
    poll(rows, 2, -1);
    if (rows[1].revents) engine.step();
    if (!rows[0].revents) continue;
    char data[65536];
    const ssize_t got = read(STDIN_FILENO, data, sizeof data);
    if (got <= 0) return;
    input.append(data, static_cast<size_t>(got));
    for (size_t end; (end = input.find('\n')) != std::string::npos; input.erase(0, end + 1)) {
      std::string reply;
      try {
        reply = operations.answer(parse(input.substr(0, end)));
      } catch (const std::exception& error) {
        reply = "{\"error\": " + quoted(error.what()) + "}";
      }
      std::cout << reply << std::endl;
    }
  }
}

}  // namespace

int main(int count, char** arguments) {
  const bool own_memory = count == 4 && std::string(arguments[3]) == "--own-memory";
  const bool attaches = (count == 3 || own_memory) && std::string(arguments[1]) == "--session-socket";
  if (count != 1 && !attaches) {
    std::cerr << "minimal-engine [--session-socket PATH [--own-memory]]\n";
    return 2;
  }
  try {
    Engine engine(attaches ? arguments[2] : "", own_memory);
    std::cout << "{\"ready\": true}" << std::endl;
    serve(engine);
  } catch (const std::exception& error) {
    std::cerr << "minimal-engine: " << error.what() << "\n";
    return 1;
  }
}
