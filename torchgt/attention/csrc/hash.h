// The counter hash of the dropout masks: the same arithmetic as hashing.py, bit for bit.
#pragma once

#include <cstdint>

namespace torchgt {

constexpr uint64_t kGolden64 = 0x9E3779B97F4A7C15ull;
constexpr uint32_t kGolden32 = 0x9E3779B9u;

inline uint64_t mix64(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

// Independent of the token, so it is computed once for a call.
inline uint64_t seed_key(int64_t seed) { return mix64(static_cast<uint64_t>(seed) + kGolden64); }

inline uint64_t row_key(uint64_t seed_key, int64_t row) {
  return mix64(seed_key + static_cast<uint64_t>(row) * kGolden64);
}

inline uint64_t pair_key(uint64_t row_key, int64_t j) {
  return mix64(row_key + (static_cast<uint64_t>(j) + 1) * kGolden64);
}

typedef uint32_t U32x8 __attribute__((vector_size(32)));

// 32 uniform bits for the counters first, first + 1, ..., first + 7.
inline __attribute__((always_inline)) U32x8 hash32(uint64_t key, uint32_t first) {
  const U32x8 lane = {0, 1, 2, 3, 4, 5, 6, 7};
  U32x8 x = (lane + first) * kGolden32 + static_cast<uint32_t>(key);
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x ^= static_cast<uint32_t>(key >> 32);
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return x ^ (x >> 16);
}

}  // namespace torchgt
