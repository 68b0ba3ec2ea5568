#include "shake.h"

#include <algorithm>
#include <array>

namespace {

using State = std::array<uint64_t, 25>;  // lane x, y at x + 5 * y
constexpr size_t kRateBytes = 136;
constexpr int kRounds = 24;

uint64_t rotate(uint64_t value, unsigned bits) { return bits ? value << bits | value >> (64 - bits) : value; }

// The round constants' bits come from a linear feedback shift register.
uint64_t round_constant(uint8_t& shifted) {
  uint64_t constant = 0;
  for (unsigned j = 0; j < 7; j++) {
    if (shifted & 1) constant |= uint64_t{1} << ((1u << j) - 1);
    shifted = static_cast<uint8_t>(shifted & 0x80 ? shifted << 1 ^ 0x71 : shifted << 1);
  }
  return constant;
}

void permute(State& state) {
  uint8_t shifted = 1;
  for (int round = 0; round < kRounds; round++) {
    std::array<uint64_t, 5> parity{};
    for (unsigned i = 0; i < 25; i++) parity[i % 5] ^= state[i];
    for (unsigned i = 0; i < 25; i++) state[i] ^= parity[(i + 4) % 5] ^ rotate(parity[(i + 1) % 5], 1);
    unsigned x = 1, y = 0;
    uint64_t moving = state[x];
    for (unsigned t = 0; t < 24; t++) {
      const unsigned next = (2 * x + 3 * y) % 5;
      x = y;
      y = next;
      std::swap(moving, state[x + 5 * y]);
      state[x + 5 * y] = rotate(state[x + 5 * y], (t + 1) * (t + 2) / 2 % 64);
    }
    for (unsigned row = 0; row < 25; row += 5) {
      std::array<uint64_t, 5> old;
      std::copy_n(state.begin() + row, 5, old.begin());
      for (unsigned i = 0; i < 5; i++) state[row + i] = old[i] ^ (~old[(i + 1) % 5] & old[(i + 2) % 5]);
    }
    state[0] ^= round_constant(shifted);
  }
}

void add(State& state, size_t at, uint8_t byte) { state[at / 8] ^= uint64_t{byte} << (at % 8 * 8); }

}  // namespace

std::vector<uint8_t> shake256(const std::string& message, size_t bytes) {
  State state{};
  size_t at = 0;
  for (const char character : message) {
    add(state, at++, static_cast<uint8_t>(character));
    if (at == kRateBytes) {
      permute(state);
      at = 0;
    }
  }
  add(state, at, 0x1f);
  add(state, kRateBytes - 1, 0x80);
  std::vector<uint8_t> made(bytes);
  for (size_t i = 0; i < bytes; i++) {
    if (i % kRateBytes == 0) permute(state);
    made[i] = static_cast<uint8_t>(state[i % kRateBytes / 8] >> (i % 8 * 8));
  }
  return made;
}
