// Activations in the order in which weights come out of memory.
//
// A register of bfloat16 weights is a register of pairs: the second of each pair is a float once the first is masked
// away, and the first once it is shifted up. That is cheaper than to spread them over two registers in their order, so
// activations are put into the weights' order instead, once for all rows of the matrix: of each block of two registers
// the even numbers, then the odd ones. Of FP8 the same order is the cheapest, and of INT4 one that goes on so: codes are
// even and odd within bytes, and their bfloat16s within a register. Beside floats and INT8 numbers stay as they are.
#pragma once

#include "vectors.h"

namespace moonshard {

template <class Form, class Weight>
struct Packed {
  using V = Vectors<Form>;
  using Vec = typename V::Vec;
  static constexpr bool is_int4 = is_same<Weight, Int4>, stays = is_same<Weight, float> || is_same<Weight, Int8>;
  static constexpr int registers = is_int4 ? 32 / V::width : 2;
  static constexpr long block = registers * V::width;

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

  // A block in the row's order again.
  [[gnu::always_inline]] static inline void unpack_block(const Vec (&from)[registers], float* to) {
    Vec of[registers];
    for (int r = 0; r < registers; ++r) of[r] = from[r];
    if constexpr (turns_twice) turn<false, second>(of);
    if constexpr (!stays) turn<false, 1>(of);
    for (int r = 0; r < registers; ++r) V::store(to + r * V::width, of[r]);
  }

 private:
  static constexpr bool turns_twice = is_int4 && V::width < 16;
  static constexpr int second = V::width == 8 ? 1 : 2;  // how far apart the registers are that turn then

  [[gnu::always_inline]] static inline void pack_block(const float* from, float* to) {
    Vec of[registers];
    for (int r = 0; r < registers; ++r) of[r] = V::load(from + r * V::width);
    if constexpr (!stays) turn<true, 1>(of);
    if constexpr (turns_twice) turn<true, second>(of);
    for (int r = 0; r < registers; ++r) V::store(to + r * V::width, of[r]);
  }

  // Of two registers' numbers the even ones and the odd ones, or both in turns again.
  template <bool apart, int distance>
  [[gnu::always_inline]] static inline void turn(Vec (&of)[registers]) {
#pragma GCC unroll 8
    for (int r = 0; r < registers; ++r) {
      if (r & distance) continue;
      const Vec a = of[r], b = of[r + distance];
      of[r] = apart ? V::evens(a, b) : V::first_in_turns(a, b);
      of[r + distance] = apart ? V::odds(a, b) : V::second_in_turns(a, b);
    }
  }
};

}  // namespace moonshard
