// The JSON of one line: what the demo's router says to an engine.
#pragma once

#include <map>
#include <stdexcept>
#include <string>

struct Malformed : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A value: text, a number, a truth, or an object. A member that is not there reads as empty.
struct Json {
  std::string text;
  double number = 0;
  bool truth = false;
  std::map<std::string, Json> members;

  bool has(const std::string& name) const { return members.count(name) > 0; }
  const Json& operator[](const std::string& name) const;
};

// Reads one value. Throws Malformed; also for a list that is not empty.
Json parse(const std::string& line);
std::string quoted(const std::string& text);
