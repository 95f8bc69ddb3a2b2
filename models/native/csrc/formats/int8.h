// INT8: a code is a signed byte, and a value the code times its scale, rounded once.
#pragma once

#include "scales.h"

namespace moonshard {

template <class Form>
struct Int8Codes : PlainScales<Form> {
  using V = Vectors<Form>;
  using Vec = typename V::Vec;
  using Weight = Int8;
  static constexpr int registers = 2;

  static constexpr long bytes(long i) { return i; }

  // In the order of the row.
  [[gnu::always_inline]] static inline void load(const uint8_t* codes, float scale, Vec (&to)[registers]) {
    for (int r = 0; r < registers; ++r) to[r] = whole_numbers(codes + r * V::width) * scale;
  }

  static float number(const uint8_t* codes, long i, float scale) { return static_cast<int8_t>(codes[i]) * scale; }

 private:
  [[gnu::always_inline]] static inline Vec whole_numbers(const uint8_t* from) {
    if constexpr (V::width == 16) {
      __m128i bytes;
      __builtin_memcpy(&bytes, from, 16);
      return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
    } else if constexpr (V::width == 8) {
      long long bytes;
      __builtin_memcpy(&bytes, from, 8);
      return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(bytes)));
    } else {
      int bytes;
      __builtin_memcpy(&bytes, from, 4);
      return (Vec)_mm_cvtepi32_ps(_mm_cvtepi8_epi32(_mm_cvtsi32_si128(bytes)));
    }
  }
};

}  // namespace moonshard
