#include "json.h"

#include <cstdint>
#include <cstdlib>

namespace {

constexpr int kDepthMax = 8;

class Reader {
 public:
  explicit Reader(const std::string& line) : at_(line.c_str()), end_(at_ + line.size()) {}

  Json whole() {
    Json made = value(0);
    if (peek()) throw Malformed("more than one value");
    return made;
  }

 private:
  char peek() {
    while (at_ < end_ && (*at_ == ' ' || *at_ == '\t' || *at_ == '\n' || *at_ == '\r')) at_++;
    return at_ < end_ ? *at_ : 0;
  }

  void take(char wanted) {
    if (peek() != wanted) throw Malformed(std::string("expected ") + wanted);
    at_++;
  }

  bool word(const std::string& wanted) {
    const bool found = static_cast<size_t>(end_ - at_) >= wanted.size() && wanted.compare(0, wanted.size(), at_, wanted.size()) == 0;
    if (found) at_ += wanted.size();
    return found;
  }

  Json value(int depth) {
    Json made;
    const char first = peek();
    if (first == '"') {
      made.text = text();
    } else if (first == '{') {
      if (depth == kDepthMax) throw Malformed("too deep");
      object(made, depth);
    } else if (word("true")) {
      made.truth = true;
    } else if (first == '[') {
      take('[');  // the routers' list of blocks, which is empty
      take(']');
    } else if (!word("false") && !word("null")) {
      char* after = nullptr;
      made.number = std::strtod(at_, &after);
      if (after == at_) throw Malformed("expected a value");
      at_ = after;
    }
    return made;
  }

  void object(Json& made, int depth) {
    take('{');
    if (peek() == '}') {
      at_++;
      return;
    }
    for (;;) {
      if (peek() != '"') throw Malformed("expected a name");
      const std::string name = text();
      take(':');
      made.members[name] = value(depth + 1);
      if (peek() == '}') break;
      take(',');
    }
    at_++;
  }

  uint32_t four() {
    uint32_t made = 0;
    for (int i = 0; i < 4; i++, at_++) {
      const char digit = at_ < end_ ? *at_ : 0;
      if (digit >= '0' && digit <= '9') made = made << 4 | static_cast<uint32_t>(digit - '0');
      else if (digit >= 'a' && digit <= 'f') made = made << 4 | static_cast<uint32_t>(digit - 'a' + 10);
      else if (digit >= 'A' && digit <= 'F') made = made << 4 | static_cast<uint32_t>(digit - 'A' + 10);
      else throw Malformed("expected four hex digits");
    }
    return made;
  }

  void escaped(std::string& into) {
    const char kind = at_ < end_ ? *at_++ : 0;
    if (kind != 'u') {
      const std::string from = "\"\\/bfnrt", to = "\"\\/\b\f\n\r\t";
      const size_t found = from.find(kind);
      if (!kind || found == std::string::npos) throw Malformed("no such escape");
      into += to[found];
      return;
    }
    uint32_t code = four();
    if (code >= 0xd800 && code < 0xdc00) {
      if (!word("\\u")) throw Malformed("half a character");
      code = 0x10000 + ((code - 0xd800) << 10 | (four() - 0xdc00));
    }
    const auto put = [&into](uint32_t byte) { into += static_cast<char>(byte); };
    if (code < 0x80) return put(code);
    if (code < 0x800) {
      put(0xc0 | code >> 6);
    } else {
      if (code < 0x10000) put(0xe0 | code >> 12);
      else put(0xf0 | (code >> 18 & 7)), put(0x80 | (code >> 12 & 63));
      put(0x80 | (code >> 6 & 63));
    }
    put(0x80 | (code & 63));
  }

  std::string text() {
    std::string made;
    for (at_++; at_ < end_ && *at_ != '"';) {
      if (*at_ == '\\') at_++, escaped(made);
      else made += *at_++;
    }
    if (at_ == end_) throw Malformed("a text that does not end");
    at_++;
    return made;
  }

  const char *at_, *end_;
};

}  // namespace

const Json& Json::operator[](const std::string& name) const {
  static const Json none;
  const auto found = members.find(name);
  return found == members.end() ? none : found->second;
}

Json parse(const std::string& line) { return Reader(line).whole(); }

std::string quoted(const std::string& text) {
  std::string made = "\"";
  for (const char character : text) {
    if (character == '"' || character == '\\') made += '\\';
    made += static_cast<unsigned char>(character) < 0x20 ? ' ' : character;
  }
  return made + '"';
}
