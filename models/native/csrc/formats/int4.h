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
  alignas(64) uint32_t floats[width == 16 ? 128 : 1][16] = {};
  alignas(64) uint8_t bytes[width == 16 ? 1 : 128][32] = {};

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

template <class Form>
struct Int4Codes {
  using V = Vectors<Form>;
  using Vec = typename V::Vec;
  using Words = typename Form::Words;
  using Weight = Int4;
  using Scale = Bf16;
  static constexpr int registers = 32 / V::width;

  static constexpr long bytes(long i) { return i / 2; }

  // The even codes, then the odd ones; of narrower registers see `Packed`.
  [[gnu::always_inline]] static inline void load(const uint8_t* codes, Scale scale, Vec (&to)[registers]) {
    const float power = as_float(scale.bits & 0xff80u);
    const int fraction = scale.bits & 0x7f;
    if constexpr (V::width == 16) {
      const __m512 table = (__m512)(load_floats(tables.floats[fraction]) * power);
      __m128i bytes;
      __builtin_memcpy(&bytes, codes, 16);
      const __m512i lower = _mm512_cvtepu8_epi32(bytes);  // of an index four bits count
      to[0] = (Vec)_mm512_permutexvar_ps(lower, table);
      to[1] = (Vec)_mm512_permutexvar_ps(_mm512_srli_epi32(lower, 4), table);
    } else if constexpr (V::width == 8) {
      load_avx2(codes, tables.bytes[fraction], power, to);
    } else {
      load_sse4(codes, tables.bytes[fraction], power, to);
    }
  }

  static float number(const uint8_t* codes, long i, Scale scale) {
    const int code = codes[i / 2] >> i % 2 * 4 & 15;
    return as_float(Int4Tables<V::width>::product(code, scale.bits & 0x7f)) * as_float(scale.bits & 0xff80u);
  }

 private:
  static constexpr Int4Tables<V::width> tables{};

  // Of a bfloat16's bits.
  [[gnu::always_inline]] static inline float as_float(uint32_t bits) {
    bits <<= 16;
    float found;
    __builtin_memcpy(&found, &bits, sizeof found);
    return found;
  }
  [[gnu::always_inline]] static inline Vec load_floats(const uint32_t* from) {
    Vec loaded;
    __builtin_memcpy(&loaded, from, sizeof loaded);
    return loaded;
  }

  // A register of bfloat16s is two of floats, as `Vectors::load_half` has it.
  [[gnu::always_inline]] static inline void widen(Words pairs, float power, Vec& evens, Vec& odds) {
    evens = (Vec)(pairs << 16) * power;
    odds = (Vec)(pairs & 0xffff0000u) * power;
  }

  // The even codes in the lower half of a register, the odd ones in the upper: each finds its bfloat16's bytes.
  [[gnu::always_inline]] static inline void load_avx2(const uint8_t* codes, const uint8_t* table, float power,
                                                      Vec (&to)[registers]) {
    const __m256i pairs = twice(codes), lower = twice(table), upper = twice(table + 16);
    const __m256i shifts = _mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4);
    const __m256i each = _mm256_and_si256(_mm256_srlv_epi32(pairs, shifts), _mm256_set1_epi8(15));
    const __m256i low = _mm256_shuffle_epi8(lower, each), high = _mm256_shuffle_epi8(upper, each);
    widen((Words)_mm256_unpacklo_epi8(low, high), power, to[0], to[1]);
    widen((Words)_mm256_unpackhi_epi8(low, high), power, to[2], to[3]);
  }
  [[gnu::always_inline]] static inline auto twice(const uint8_t* from) {
    __m128i bytes;
    __builtin_memcpy(&bytes, from, 16);
    return _mm256_broadcastsi128_si256(bytes);
  }

  [[gnu::always_inline]] static inline void load_sse4(const uint8_t* codes, const uint8_t* table, float power,
                                                      Vec (&to)[registers]) {
    __m128i pairs, lower, upper;
    __builtin_memcpy(&pairs, codes, 16);
    __builtin_memcpy(&lower, table, 16);
    __builtin_memcpy(&upper, table + 16, 16);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const __m128i each = _mm_and_si128(half ? _mm_srli_epi32(pairs, 4) : pairs, _mm_set1_epi8(15));
      const __m128i low = _mm_shuffle_epi8(lower, each), high = _mm_shuffle_epi8(upper, each);
      widen((Words)_mm_unpacklo_epi8(low, high), power, to[half], to[2 + half]);
      widen((Words)_mm_unpackhi_epi8(low, high), power, to[4 + half], to[6 + half]);
    }
  }
};

}  // namespace moonshard
