// Activations in the order in which weights come out of memory.
//
// A register of bfloat16 weights is a register of pairs: the second of each pair is a float once the first is masked
// away, and the first once it is shifted up. That is cheaper than to spread them over two registers in their order, so
// activations are put into the weights' order instead, once for all rows of the matrix: of each block of two registers
// the even numbers, then the odd ones. Beside floats they stay as they are.
#pragma once

#include "vectors.h"

namespace moonshard {

template <class Form, class Weight>
struct Packed {
  using V = Vectors<Form>;
  static constexpr long block = 2 * V::width;

  // Numbers that `k` of them take: whole blocks, the last one filled up with zeros.
  static long length(long k) { return (k + block - 1) / block * block; }

  static void pack(const float* from, long k, float* to) {
    long first = 0;
    for (; first + block <= k; first += block) pack_block(from + first, to + first);
    if (first == k) return;
    float padded[block] = {};
    __builtin_memcpy(padded, from + first, (k - first) * sizeof(float));
    pack_block(padded, to + first);
  }

 private:
  [[gnu::always_inline]] static inline void pack_block(const float* from, float* to) {
    const auto a = V::load(from), b = V::load(from + V::width);
    constexpr bool is_float = sizeof(Weight) == sizeof(float);
    V::store(to, is_float ? a : V::evens(a, b));
    V::store(to + V::width, is_float ? b : V::odds(a, b));
  }
};

}  // namespace moonshard
