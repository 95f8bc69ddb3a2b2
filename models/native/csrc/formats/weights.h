// Weight matrices as a binding describes them, whatever their number format.
//
// The formats are `models/formats`: a value is a code times the scale of its block, rounded as the format has it.
#pragma once

#include <cstdint>

namespace moonshard {

enum class Format { f32, bf16, int4, fp8, int8 };

// What a kernel is a template over, beside float: the numbers of a row in memory.
struct Bf16 {
  uint16_t bits;
};
struct Int4 {};
struct Fp8 {};
struct Int8 {};

template <class A, class B>
inline constexpr bool is_same = false;
template <class A>
inline constexpr bool is_same<A, A> = true;

// Matrices of equal shape that lie behind each other, and their scales, which do so too.
struct Weights {
  const void* values;
  const void* scales;  // bfloat16 of INT4, float of FP8 and INT8; of floats there are none
  Format format;
  long rows, columns;               // of a matrix; a row is whole items of its format
  long row_bytes, scale_columns;    // from one row to the next: of values, of blocks that share a scale
  long scale_rows;                  // of a matrix
  long block_rows, block_columns;   // of a matrix's values, share a scale
};

// act(Weight{}), of the type that a format's kernels are compiled for.
template <class Act>
[[gnu::always_inline]] inline auto with_weight(Format format, const Act& act) {
  switch (format) {
    case Format::bf16:
      return act(Bf16{});
    case Format::int4:
      return act(Int4{});
    case Format::fp8:
      return act(Fp8{});
    case Format::int8:
      return act(Int8{});
    default:
      return act(float{});
  }
}

}  // namespace moonshard
