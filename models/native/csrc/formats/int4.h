// INT4 in groups of 32: two codes to a byte, the even one in its lower half; a value is (code - 8) times the group's
// scale, a bfloat16, rounded to bfloat16.
//
// A group has 16 values at most. How they round depends on the 7 bits of its scale's fraction alone, as long as none is
// subnormal, so a table has them for each fraction, and a power of two is what is left to multiply with. A scale below
// 2^-126 counts as zero, as it does wherever XLA computes on CPUs.
#pragma once

#include "../common/vectors.h"

namespace moonshard {

// The products (code - 8) * (1 + fraction / 128), rounded to bfloat16, ties to even: as floats, or as the lower and the
// upper bytes of bfloat16s.
template <int width>
struct Int4Tables {
  alignas(64) uint8_t bytes[width == 16 ? 1 : 128][32] = {};
  alignas(64) uint32_t floats[width == 16 ? 128 : 1][16] = {};

  constexpr Int4Tables() {
    for (int fraction = 0; fraction < 128; ++fraction) {
      for (int code = 0; code < 16; ++code) {
        const uint32_t bits = product(code, fraction);
        if constexpr (width == 16) {
          floats[fraction][code] = bits << 16;
        } else {
          bytes[fraction][code] = bits & 0xff;
          bytes[fraction][16 + code] = bits >> 8;
        }
      }
    }
  }

  static constexpr uint32_t product(int code, int fraction) {
    const int wide = (code < 8 ? 8 - code : code - 8) * (128 + fraction);  // in 128ths: of 8 to 11 bits, or 0
    if (wide == 0) return 0;
    int lost_bits = 0;
    while (wide >> lost_bits >= 256) ++lost_bits;
    const int step = 1 << lost_bits, lost = wide % step;
    int kept = wide / step;
    if (2 * lost > step || (2 * lost == step && kept % 2)) ++kept;
    const int exponent = 127 + lost_bits;
    return (code < 8 ? 0x8000 : 0) + (exponent << 7) + (kept - 128);  // 256 carries into the exponent
  }
};

// What a scale makes of the codes: a register of floats, or the bytes of bfloat16s, twice where a register has two
// halves, and what is left to multiply with.
template <class Form, int width = Form::width>
struct Int4Factor {
  typename Form::Words lower, upper;
  typename Form::Vec power;
};
template <class Form>
struct Int4Factor<Form, 16> {
  typename Form::Vec table;
};

template <class Form>
struct Int4Codes {
  using V = Vectors<Form>;
  using Vec = typename V::Vec;
  using Words = typename Form::Words;
  using Weight = Int4;
  using Scale = Bf16;
  using Factor = Int4Factor<Form>;
  static constexpr long group = 32;
  static constexpr int registers = group / V::width;

  static constexpr long bytes(long i) { return i / 2; }

  [[gnu::always_inline]] static inline Factor factor(Scale scale) {
    const Vec power = (Vec)((Words{} + (scale.bits | scale.bits << 16)) & powers());
    const long fraction = scale.bits & 0x7f;
    if constexpr (V::width == 16) {
      Vec floats;
      __builtin_memcpy(&floats, tables.floats[fraction], sizeof floats);
      return {floats * power};
    } else {
      return {table(tables.bytes[fraction]), table(tables.bytes[fraction] + 16), power};
    }
  }

  // The even codes, then the odd ones; of narrower registers see `Packed`.
  [[gnu::always_inline]] static inline void load(const uint8_t* codes, const Factor& factor, Vec (&to)[registers]) {
    if constexpr (V::width == 16) {
      __m128i bytes;
      __builtin_memcpy(&bytes, codes, 16);
      const __m512i lower = _mm512_cvtepu8_epi32(bytes);  // of an index four bits count
      to[0] = (Vec)_mm512_permutexvar_ps(lower, (__m512)factor.table);
      to[1] = (Vec)_mm512_permutexvar_ps(_mm512_srli_epi32(lower, 4), (__m512)factor.table);
    } else if constexpr (V::width == 8) {
      load_avx2(codes, factor, to);
    } else {
      load_sse4(codes, factor, to);
    }
  }

  static float number(const uint8_t* codes, long i, Scale scale) {
    const int code = codes[i / 2] >> i % 2 * 4 & 15;
    return as_float(Int4Tables<V::width>::product(code, scale.bits & 0x7f)) * as_float(scale.bits & 0xff80u);
  }

 private:
  static constexpr Int4Tables<V::width> tables{};

  // Of a bfloat16's bits.
  static float as_float(uint32_t bits) {
    bits <<= 16;
    float found;
    __builtin_memcpy(&found, &bits, sizeof found);
    return found;
  }

  // 16 bytes, in each half of a register.
  [[gnu::always_inline]] static inline Words table(const uint8_t* from) {
    __m128i bytes;
    __builtin_memcpy(&bytes, from, 16);
    if constexpr (V::width == 8) {
      return (Words)_mm256_broadcastsi128_si256(bytes);
    } else {
      return (Words)bytes;
    }
  }

  // A register of bfloat16s is two of floats, as `Vectors::load_half` has it.
  [[gnu::always_inline]] static inline void widen(Words pairs, Vec power, Vec& evens, Vec& odds) {
    evens = (Vec)(pairs << 16) * power;
    odds = (Vec)(pairs & upper_halves()) * power;
  }

  // The even codes in the lower half of a register, the odd ones in the upper: each finds its bfloat16's bytes.
  [[gnu::always_inline]] static inline void load_avx2(const uint8_t* codes, const Factor& factor,
                                                      Vec (&to)[registers]) {
    const __m256i pairs = (__m256i)table(codes), shifts = _mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4);
    const __m256i each = _mm256_and_si256(_mm256_srlv_epi32(pairs, shifts), (__m256i)lower_nibbles());
    const __m256i low = _mm256_shuffle_epi8((__m256i)factor.lower, each);
    const __m256i high = _mm256_shuffle_epi8((__m256i)factor.upper, each);
    widen((Words)_mm256_unpacklo_epi8(low, high), factor.power, to[0], to[1]);
    widen((Words)_mm256_unpackhi_epi8(low, high), factor.power, to[2], to[3]);
  }

  [[gnu::always_inline]] static inline void load_sse4(const uint8_t* codes, const Factor& factor,
                                                      Vec (&to)[registers]) {
    const __m128i pairs = (__m128i)table(codes);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const __m128i each = _mm_and_si128(half ? _mm_srli_epi32(pairs, 4) : pairs, (__m128i)lower_nibbles());
      const __m128i low = _mm_shuffle_epi8((__m128i)factor.lower, each);
      const __m128i high = _mm_shuffle_epi8((__m128i)factor.upper, each);
      widen((Words)_mm_unpacklo_epi8(low, high), factor.power, to[half], to[2 + half]);
      widen((Words)_mm_unpackhi_epi8(low, high), factor.power, to[4 + half], to[6 + half]);
    }
  }

  [[gnu::always_inline]] static inline Words lower_nibbles() { return Words{} + 0x0f0f0f0fu; }
  [[gnu::always_inline]] static inline Words powers() { return Words{} + 0xff800000u; }
  [[gnu::always_inline]] static inline Words upper_halves() { return Words{} + 0xffff0000u; }
};

}  // namespace moonshard
