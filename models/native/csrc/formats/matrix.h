// A matrix of weights, and a row of it, as register tiles read them: `Row::load` makes floats of a block in registers.
//
// Of floats and bfloat16s a tile takes one register at a time (`half`), so that others hold activations; what is packed
// comes a block at once, for the bytes that several of its registers are made of are read and unpacked together.
#pragma once

#include "../common/packed.h"
#include "fp8.h"
#include "int4.h"
#include "int8.h"

namespace moonshard {

template <class Form, class Weight>
struct Row {
  using V = Vectors<Form>;
  static constexpr bool is_packed = false;
  static constexpr int registers = 2;
  static constexpr long block = registers * V::width;

  const Weight* at;

  const char* address(long i) const { return reinterpret_cast<const char*>(at + i); }
  template <int which>
  [[gnu::always_inline]] inline typename V::Vec half(long i) const {
    return V::template load_half<which>(at + i);
  }
  [[gnu::always_inline]] inline void load(long i, typename V::Vec (&to)[registers]) const {
    to[0] = half<0>(i);
    to[1] = half<1>(i);
  }
  // Of `count` numbers, fewer than a block, and zeros behind them.
  [[gnu::always_inline]] inline void load_some(long i, long count, typename V::Vec (&to)[registers]) const {
    Weight padded[block] = {};
    __builtin_memcpy(padded, at + i, count * sizeof(Weight));
    Row{padded}.load(0, to);
  }
};

// Of codes: bytes, and scales that some of them share, of which there is one to every 2^shift columns. A row whose
// scales change within a block of registers is read number by number.
//
// `Prepared` are some of a row's scales, `Factor` is what one of them is to its codes.
template <class Form, class Codes>
struct PackedRow {
  using V = Vectors<Form>;
  using Vec = typename V::Vec;
  static constexpr bool is_packed = true;
  using Scale = typename Codes::Scale;
  using Prepared = typename Codes::Prepared;
  using Factor = typename Codes::Factor;
  static constexpr int registers = Codes::registers;
  static constexpr long block = registers * V::width;
  static constexpr bool has_scale_to_a_block = Codes::has_one_to_a_block;

  const uint8_t* codes;
  const Scale* scales;
  long block_columns;
  int shift;  // below 0: read number by number

  const char* address(long i) const { return reinterpret_cast<const char*>(codes + Codes::bytes(i)); }
  // Columns that share a scale, or fewer than a block of registers where those of one do not.
  [[gnu::always_inline]] inline long span() const { return shift < 0 ? 0 : 1L << shift; }
  // Of so many columns, at least one.
  [[gnu::always_inline]] inline long num_scales(long columns) const { return ((columns - 1) >> shift) + 1; }
  // `count` scales from `first` on. False where only `load_some` reads their columns.
  [[gnu::always_inline]] inline bool prepare(long first, long count, Prepared& to) const {
    return Codes::prepare(scales + first, count, to);
  }
  [[gnu::always_inline]] static inline Factor factor(const Prepared& prepared, long index) {
    return Codes::factor(prepared, index);
  }
  [[gnu::always_inline]] inline void load(long i, const Factor& factor, Vec (&to)[registers]) const {
    Codes::load(codes + Codes::bytes(i), factor, to);
  }
  [[gnu::always_inline]] inline void load(long i, Vec (&to)[registers]) const {
    Prepared prepared;
    if (__builtin_expect(shift < 0 || !prepare(i >> shift, 1, prepared), false)) {
      Vec apart[registers];  // what a call is given has no place in registers
      load_some(i, block, apart);
      for (int r = 0; r < registers; ++r) to[r] = apart[r];
    } else {
      load(i, factor(prepared, 0), to);
    }
  }
  [[gnu::noinline]] void load_some(long i, long count, Vec (&to)[registers]) const {
    alignas(64) float numbers[block] = {}, ordered[block];
    for (long j = 0; j < count; ++j) numbers[j] = Codes::number(codes, i + j, scales[(i + j) / block_columns]);
    Packed<Form, typename Codes::Weight>::pack(numbers, block, ordered);
    for (int r = 0; r < registers; ++r) to[r] = V::load(ordered + r * V::width);
  }
};

template <class Form>
struct Row<Form, Int4> : PackedRow<Form, Int4Codes<Form>> {};
template <class Form>
struct Row<Form, Fp8> : PackedRow<Form, Fp8Codes<Form>> {};
template <class Form>
struct Row<Form, Int8> : PackedRow<Form, Int8Codes<Form>> {};

template <class Form, class Weight>
struct Matrix {
  // The matrix `index` of those that lie behind each other.
  Matrix(const Weights& of, long index) : of_(of) {
    values_ = static_cast<const uint8_t*>(of.values) + index * of.rows * of.row_bytes;
    first_scale_ = index * of.scale_rows * of.scale_columns;
    const bool has_one = of.block_columns >= of.columns, is_power = !(of.block_columns & (of.block_columns - 1));
    shift_ = has_one ? 62 : is_power && of.block_columns >= 32 ? __builtin_ctzl(of.block_columns) : -1;
  }

  [[gnu::always_inline]] inline Row<Form, Weight> row(long index) const {
    const uint8_t* values = values_ + index * of_.row_bytes;
    if constexpr (!Row<Form, Weight>::is_packed) {
      return {reinterpret_cast<const Weight*>(values)};
    } else {
      using Scale = typename Row<Form, Weight>::Scale;
      const long block_row = of_.block_rows == 1 ? index : index / of_.block_rows;
      const Scale* scales = static_cast<const Scale*>(of_.scales) + first_scale_ + block_row * of_.scale_columns;
      return {{values, scales, of_.block_columns, shift_}};
    }
  }

 private:
  const Weights& of_;
  const uint8_t* values_;
  long first_scale_;
  int shift_;
};

}  // namespace moonshard
