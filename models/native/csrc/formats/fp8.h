// FP8 (E4M3): a code's value times its scale, rounded once.
//
// The code's bits, shifted, are those of a half-precision number 2^8 times as small, which F16C widens, subnormal or
// not, whatever the thread does with subnormal floats. SSE4 has no such instruction and computes with normal floats.
#pragma once

#include "scales.h"

namespace moonshard {

template <class Form>
struct Fp8Codes : PlainScales<Form> {
  using V = Vectors<Form>;
  using Vec = typename V::Vec;
  using Words = typename Form::Words;
  using Halves = typename Form::Halves;
  using Weight = Fp8;
  static constexpr int registers = 2;

  static constexpr long bytes(long i) { return i; }

  // The even codes, then the odd ones.
  [[gnu::always_inline]] static inline void load(const uint8_t* codes, float scale, Vec (&to)[registers]) {
    Halves pairs;
    __builtin_memcpy(&pairs, codes, sizeof pairs);
    if constexpr (V::width == 4) {
      const Words words = V::widen(pairs);
      to[0] = widened(words & 0xffu) * scale;
      to[1] = widened(words >> 8) * scale;
    } else {
      to[0] = widened(pairs << 8) * scale;
      to[1] = widened(pairs) * scale;
    }
  }

  static float number(const uint8_t* codes, long i, float scale) {
    const int exponent = codes[i] >> 3 & 15, fraction = codes[i] & 7;
    const uint32_t bits = (exponent + 120) << 23 | fraction << 20;
    float magnitude = fraction * 0x1p-9f;
    if (exponent) __builtin_memcpy(&magnitude, &bits, sizeof bits);
    return (codes[i] & 0x80 ? -magnitude : magnitude) * scale;
  }

 private:
  // Of the codes in the upper bytes: the sign keeps its place, and the others move below a bit of the exponent, 0.
  [[gnu::always_inline]] static inline Vec widened(Halves upper) {
    typedef int16_t Signed __attribute__((vector_size(sizeof(Halves))));
    const Halves bits = (Halves)((Signed)upper >> 1) & (uint16_t)0xbf80;
    if constexpr (V::width == 16) {
      return (Vec)_mm512_cvtph_ps((__m256i)bits) * 256.0f;
    } else if constexpr (V::width == 8) {
      return (Vec)_mm256_cvtph_ps((__m128i)bits) * 256.0f;
    } else {
      return Vec{};
    }
  }

  // Of the codes in the lowest bytes. Read as if normal, a subnormal code is y = 2^-7 (1 + f) instead of 2^-6 f, which
  // is 2y - 2^-6; for every other y that is no less than y.
  [[gnu::always_inline]] static inline Vec widened(Words codes) {
    const Vec y = (Vec)(((codes & 0x7fu) << 20) + (120u << 23)), less = y + y - 0x1p-6f;
    return (Vec)((Words)(less < y ? less : y) | (codes & 0x80u) << 24);
  }
};

}  // namespace moonshard
