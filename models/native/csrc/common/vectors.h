// Registers full of floats, in the vector extensions that GCC and Clang share: one source for every instruction set.
#pragma once

#include <immintrin.h>

#include "../formats/weights.h"
#include "forms.h"

namespace moonshard {

template <class Form>
struct Vectors {
  static constexpr int width = Form::width;
  using Vec = typename Form::Vec;

  [[gnu::always_inline]] static inline Vec load(const float* from) {
    Vec loaded;
    __builtin_memcpy(&loaded, from, sizeof loaded);
    return loaded;
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

  // A bfloat16 is the upper half of a float.
  [[gnu::always_inline]] static inline Vec load(const Bf16* from) {
    typename Form::Halves halves;
    __builtin_memcpy(&halves, from, sizeof halves);
    return (Vec)(widen(halves) << 16);
  }

  [[gnu::always_inline]] static inline void store(float* to, Vec x) { __builtin_memcpy(to, &x, sizeof x); }
  [[gnu::always_inline]] static inline Vec splat(float x) { return Vec{} + x; }
  [[gnu::always_inline]] static inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }

  static constexpr long whole(long count, long multiple) { return (count + multiple - 1) / multiple * multiple; }

  // The first `count` of a register, zeros behind them; nothing beyond is read.
  template <class Number>
  [[gnu::always_inline]] static inline Vec load_some(const Number* from, long count) {
    Number padded[width] = {};
    __builtin_memcpy(padded, from, count * sizeof(Number));
    return load(padded);
  }

  // `count` numbers as floats, and zeros up to a whole register.
  template <class Number>
  static void widen_all(const Number* from, long count, float* to) {
    long i = 0;
    for (; i + width <= count; i += width) store(to + i, load(from + i));
    if (i < count) store(to + i, load_some(from + i, count - i));
  }

  // One of the two registers of floats that a block of 2 * width weights makes: the first or the second half of floats,
  // the even or the odd ones of bfloat16s.
  template <int which>
  [[gnu::always_inline]] static inline Vec load_half(const float* block) {
    return load(block + which * width);
  }
  template <int which>
  [[gnu::always_inline]] static inline Vec load_half(const Bf16* block) {
    typename Form::Words pairs;
    __builtin_memcpy(&pairs, block, sizeof pairs);
    if constexpr (which == 1 && width == 16) return (Vec)(pairs & 0xffff0000u);
    if constexpr (which == 1) {  // without a register for a mask, of which there are few
      pairs >>= 16;
      __asm__("" : "+x"(pairs));  // or GCC would mask after all
    }
    return (Vec)(pairs << 16);
  }

  // Of two registers' numbers the even ones, the odd ones; and of those in turns the first half, the second half.
  [[gnu::always_inline]] static inline Vec evens(Vec a, Vec b) {
    if constexpr (width == 16) {
      return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    } else if constexpr (width == 8) {
      return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14);
    } else {
      return __builtin_shufflevector(a, b, 0, 2, 4, 6);
    }
  }
  [[gnu::always_inline]] static inline Vec odds(Vec a, Vec b) {
    if constexpr (width == 16) {
      return __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    } else if constexpr (width == 8) {
      return __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15);
    } else {
      return __builtin_shufflevector(a, b, 1, 3, 5, 7);
    }
  }
  [[gnu::always_inline]] static inline Vec first_in_turns(Vec a, Vec b) {
    if constexpr (width == 16) {
      return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    } else if constexpr (width == 8) {
      return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
    } else {
      return __builtin_shufflevector(a, b, 0, 4, 1, 5);
    }
  }
  [[gnu::always_inline]] static inline Vec second_in_turns(Vec a, Vec b) {
    if constexpr (width == 16) {
      return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    } else if constexpr (width == 8) {
      return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
    } else {
      return __builtin_shufflevector(a, b, 2, 6, 3, 7);
    }
  }

  // Of each of `count` registers the sum of its lanes, in a lane each; `of` is overwritten. Registers are folded into
  // each other, so that many cost little more than one, and a sum is added up in the same order whichever it is.
  template <int count = width, int lanes = width>
  [[gnu::always_inline]] static inline Vec sum_each(Vec* of) {
    if constexpr (lanes == 1) {
      return of[0];
    } else {
      constexpr int left = (count + 1) / 2;
#pragma GCC unroll 8
      for (int i = 0; i < left; ++i) of[i] = neighbours(of[2 * i], of[2 * i + 1 < count ? 2 * i + 1 : 2 * i]);
      return sum_each<left, lanes / 2>(of);
    }
  }

 private:
  // Of two registers one: the sums of lanes beside each other, the first's and then the second's.
  [[gnu::always_inline]] static inline Vec neighbours(Vec a, Vec b) {
    if constexpr (width == 8) {  // within halves, and one permutation: shorter than two that cross halves
      const Vec sum = __builtin_shufflevector(a, b, 0, 2, 8, 10, 4, 6, 12, 14) +
                      __builtin_shufflevector(a, b, 1, 3, 9, 11, 5, 7, 13, 15);
      return __builtin_shufflevector(sum, sum, 0, 1, 4, 5, 2, 3, 6, 7);
    } else {
      return evens(a, b) + odds(a, b);
    }
  }
};

}  // namespace moonshard
