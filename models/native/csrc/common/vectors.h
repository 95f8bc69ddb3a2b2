// Registers full of floats, in the vector extensions that GCC and Clang share: one source for every instruction set.
#pragma once

#include <immintrin.h>

#include "forms.h"

namespace moonshard {

struct Bf16 {
  uint16_t bits;
};

template <class Form>
struct Vectors {
  static constexpr int width = Form::width;
  using Vec = typename Form::Vec;

  [[gnu::always_inline]] static inline Vec load(const float* from) {
    Vec loaded;
    __builtin_memcpy(&loaded, from, sizeof loaded);
    return loaded;
  }

  // A bfloat16 is the upper half of a float.
  [[gnu::always_inline]] static inline Vec load(const Bf16* from) {
    typename Form::Halves halves;
    __builtin_memcpy(&halves, from, sizeof halves);
    return (Vec)(widen(halves) << 16);
  }

  // The first `count` of a register, zeros behind them; nothing beyond is read.
  template <class Number>
  [[gnu::always_inline]] static inline Vec load_some(const Number* from, long count) {
    Number padded[width] = {};
    __builtin_memcpy(padded, from, count * sizeof(Number));
    return load(padded);
  }

  // sums[i] = the sum of of[i]'s lanes. Registers are folded into each other, so that four cost little more than one.
  [[gnu::always_inline]] static inline void sum_four(const Vec (&of)[4], float* sums) {
    if constexpr (width == 16) {
      const Vec ab = halves(of[0], of[1]), cd = halves(of[2], of[3]);
      const Vec all = within_four(
          __builtin_shufflevector(ab, cd, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
          __builtin_shufflevector(ab, cd, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31));
      sums[0] = all[0], sums[1] = all[4], sums[2] = all[8], sums[3] = all[12];
    } else if constexpr (width == 8) {
      const Vec ab = within_four(halves(of[0], of[1])), cd = within_four(halves(of[2], of[3]));
      sums[0] = ab[0], sums[1] = ab[4], sums[2] = cd[0], sums[3] = cd[4];
    } else {
      for (int i = 0; i < 4; ++i) sums[i] = within_four(of[i])[0];
    }
  }

  // The sums of a register full of registers, each of its lanes.
  [[gnu::always_inline]] static inline Vec sum_each(Vec* of) {
#pragma GCC unroll 4
    for (int count = width; count > 1; count /= 2) {
#pragma GCC unroll 8
      for (int i = 0; i < count / 2; ++i) of[i] = neighbours(of[2 * i], of[2 * i + 1]);
    }
    return of[0];
  }

 private:
  // Of two registers one: the sums of lanes beside each other, the first's and then the second's.
  [[gnu::always_inline]] static inline Vec neighbours(Vec a, Vec b) {
    if constexpr (width == 16) {
      return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
             __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    } else if constexpr (width == 8) {
      return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14) +
             __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15);
    } else {
      return __builtin_shufflevector(a, b, 0, 2, 4, 6) + __builtin_shufflevector(a, b, 1, 3, 5, 7);
    }
  }

  // One instruction, which GCC 12 does not find by itself but for the widest registers.
  [[gnu::always_inline]] static inline typename Form::Words widen(typename Form::Halves halves) {
    if constexpr (width == 16) {
      return __builtin_convertvector(halves, typename Form::Words);
    } else if constexpr (width == 8) {
      return (typename Form::Words)_mm256_cvtepu16_epi32((__m128i)halves);
    } else {
      return (typename Form::Words)_mm_cvtepu16_epi32(_mm_set_epi64x(0, (long long)halves));
    }
  }

  // Of two registers one: the halves of the first added up, then those of the second.
  [[gnu::always_inline]] static inline Vec halves(Vec a, Vec b) {
    if constexpr (width == 16) {
      return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
             __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    } else {
      return __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11) +
             __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
    }
  }

  // Every lane becomes the sum of the four lanes that it is among.
  [[gnu::always_inline]] static inline Vec within_four(Vec v) {
    if constexpr (width == 16) {
      v += __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
      return v + __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
    } else if constexpr (width == 8) {
      v += __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5);
      return v + __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6);
    } else {
      v += __builtin_shufflevector(v, v, 2, 3, 0, 1);
      return v + __builtin_shufflevector(v, v, 1, 0, 3, 2);
    }
  }
};

}  // namespace moonshard
