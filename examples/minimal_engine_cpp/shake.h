// SHAKE256 (FIPS 202), from which the weights are drawn.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

std::vector<uint8_t> shake256(const std::string& message, size_t bytes);
