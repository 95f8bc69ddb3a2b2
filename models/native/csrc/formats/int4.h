// INT4 in groups of 32: two codes to a byte, the even one in its lower half; a value is (code - 8) times the group's
// scale, a bfloat16, rounded to bfloat16.
//
// A group has 16 values at most. How they round depends on the 7 bits of its scale's fraction alone, as long as none is
// subnormal, so a table has them for each fraction, and a power of two is what is left to multiply with: as floats, or by
// subtracting it from the bits of two bfloat16s at once, saturated, so that what is zero stays zero. A scale below 2^-126
// counts as zero, as it does wherever XLA computes on CPUs.
#pragma once

#include "../common/vectors.h"

namespace moonshard {

// Bytes in tables stand for 2^this times the products: as much as the largest of them allows, for powers are subtracted.
inline constexpr uint32_t int4_shifted = 123;

// The products (code - 8) * (1 + fraction / 128), rounded to bfloat16, ties to even: as floats, or as the lower and the
// upper bytes of bfloat16s.
template <int width>
struct Int4Tables {
  alignas(64) uint8_t bytes[width == 16 ? 1 : 256][32] = {};  // behind the products of positive scales, of negative ones
  alignas(64) uint32_t floats[width == 16 ? 128 : 1][16] = {};

  constexpr Int4Tables() {
    for (int fraction = 0; fraction < 128; ++fraction) {
      for (int code = 0; code < 16; ++code) {
        const uint32_t bits = product(code, fraction);
        if constexpr (width == 16) {
          floats[fraction][code] = bits << 16;
        } else {
          const uint32_t shifted = bits ? bits + (int4_shifted << 7) : 0, turned = bits ? shifted ^ 0x8000 : 0;
          bytes[fraction][code] = shifted & 0xff;
          bytes[fraction][16 + code] = shifted >> 8;
          bytes[128 + fraction][code] = turned & 0xff;
          bytes[128 + fraction][16 + code] = turned >> 8;
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
// halves, and what is subtracted from each of these.
template <class Form, int width = Form::width>
struct Int4Factor {
  typename Form::Words lower, upper, less;
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
  static constexpr int registers = 32 / V::width;
  static constexpr bool has_one_to_a_block = true;  // a scale to a block of registers

  static constexpr long bytes(long i) { return i / 2; }

  // Where the bytes of a scale's fraction lie, and what is subtracted from each of two bfloat16s: worked out for many
  // scales at once.
  struct Prepared {
    static constexpr long most = 64;
    const Scale* scales;
    alignas(32) uint16_t at[V::width == 16 ? 1 : most];
    alignas(32) uint32_t less[V::width == 16 ? 1 : most];
  };

  // False where a scale is so small that it counts as zero, or so large that values might be infinite.
  [[gnu::always_inline]] static inline bool prepare(const Scale* scales, long count, Prepared& to) {
    to.scales = scales;
    if constexpr (V::width == 16) return true;
    Words beyond{};
    for (long i = 0; i < count; i += V::width) {
      typename Form::Halves bits = typename Form::Halves{} + (uint16_t)first_plain;
      if (count - i >= V::width) {
        __builtin_memcpy(&bits, scales + i, sizeof bits);
      } else {
        __builtin_memcpy(&bits, scales + i, (count - i) * sizeof(Scale));
      }
      const typename Form::Halves which = (bits & (uint16_t)0x7f) | (bits >> 8 & (uint16_t)0x80);
      const typename Form::Halves at = which * (uint16_t)sizeof tables.bytes[0];
      const Words wide = V::widen(bits) & 0x7fffu, less = last_plain - (wide | 0x7fu), both = less << 16 | less;
      __builtin_memcpy(to.at + i, &at, sizeof at);
      __builtin_memcpy(to.less + i, &both, sizeof both);
      beyond |= (Words)(wide - first_plain > Words{} + (last_plain - first_plain));
    }
    uint64_t parts[V::width / 2], any = 0;
    __builtin_memcpy(parts, &beyond, sizeof beyond);
    for (const uint64_t part : parts) any |= part;
    return !any;
  }

  [[gnu::always_inline]] static inline Factor factor(const Prepared& prepared, long index) {
    if constexpr (V::width == 16) {
      const Scale scale = prepared.scales[index];
      Vec floats;
      __builtin_memcpy(&floats, tables.floats[scale.bits & 0x7f], sizeof floats);
      return {floats * as_float(scale.bits & 0xff80u)};
    } else {
      const uint8_t* bytes = tables.bytes[0] + prepared.at[index];
      return {table(bytes), table(bytes + 16), Words{} + prepared.less[index]};
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
  // The bits, without sign, of scales that the tables serve.
  static constexpr uint32_t first_plain = 1 << 7, last_plain = (127 + int4_shifted) << 7 | 0x7f;

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
  [[gnu::always_inline]] static inline void widen(Words pairs, Vec& evens, Vec& odds) {
    evens = (Vec)(pairs << 16);
    odds = (Vec)(pairs & (Words{} + 0xffff0000u));
  }

  // The even codes in the lower half of a register, the odd ones in the upper: each finds its bfloat16's bytes.
  [[gnu::always_inline]] static inline void load_avx2(const uint8_t* codes, const Factor& factor,
                                                      Vec (&to)[registers]) {
    const __m256i pairs = (__m256i)table(codes), shifts = _mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4);
    const __m256i each = _mm256_and_si256(_mm256_srlv_epi32(pairs, shifts), _mm256_set1_epi8(15));
    const __m256i low = _mm256_shuffle_epi8((__m256i)factor.lower, each);
    const __m256i high = _mm256_shuffle_epi8((__m256i)factor.upper, each);
    const __m256i less = (__m256i)factor.less;
    widen((Words)_mm256_subs_epu16(_mm256_unpacklo_epi8(low, high), less), to[0], to[1]);
    widen((Words)_mm256_subs_epu16(_mm256_unpackhi_epi8(low, high), less), to[2], to[3]);
  }

  [[gnu::always_inline]] static inline void load_sse4(const uint8_t* codes, const Factor& factor,
                                                      Vec (&to)[registers]) {
    const __m128i pairs = (__m128i)table(codes), less = (__m128i)factor.less;
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const __m128i each = _mm_and_si128(half ? _mm_srli_epi32(pairs, 4) : pairs, _mm_set1_epi8(15));
      const __m128i low = _mm_shuffle_epi8((__m128i)factor.lower, each);
      const __m128i high = _mm_shuffle_epi8((__m128i)factor.upper, each);
      widen((Words)_mm_subs_epu16(_mm_unpacklo_epi8(low, high), less), to[half], to[2 + half]);
      widen((Words)_mm_subs_epu16(_mm_unpackhi_epi8(low, high), less), to[4 + half], to[6 + half]);
    }
  }
};

}  // namespace moonshard
