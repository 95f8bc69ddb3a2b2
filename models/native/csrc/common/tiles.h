// The register tile that all products are made of, and the order in which a matrix is covered with it.
//
// A tile is four weight rows by a few activation rows: both lie along the contracted side, so weights are never
// repacked, and each step multiplies what it loads into up to 24 running sums. The order in which one sum is added up
// depends on nothing but its length: a token's result is the same, bit by bit, in whatever batch and on however many
// threads.
#pragma once

#include "packed.h"

namespace moonshard {

template <class Form, class Weight>
struct Tiles {
  using V = Vectors<Form>;
  using Vec = typename V::Vec;
  static constexpr int rows = 4;
  static constexpr long cache_bytes = 256 << 10;  // of the second-level cache: for activations, and again for weights

  // Covers `num_rows` x `num_tokens`. `weight(row)` says where `k` numbers lie, `token(index)` where `k` of them lie
  // `Packed`; `emit(token, row, sum)` takes the results. Weights are read from memory once, as long as a block of
  // tokens holds all: in the innermost loops they are in the first-level cache.
  template <class WeightOf, class TokenOf, class Emit>
  [[gnu::always_inline]] static inline void cover(long num_rows, long num_tokens, long k, WeightOf weight,
                                                  TokenOf token, Emit emit) {
    const long fit = cache_bytes / (4 * k + 1) / Form::tokens * Form::tokens;
    const long block = fit < Form::tokens ? Form::tokens : fit;
    for (long first = 0; first < num_tokens; first += block) {
      const long count = num_tokens - first < block ? num_tokens - first : block;
      // The four rows of a tile lie far apart, so that all are read in four long runs, which the processor sees coming.
      const long run = (num_rows + rows - 1) / rows;
      for (long row = 0; row < run; ++row) {
        const Weight* w[rows];
        for (int r = 0; r < rows; ++r) w[r] = weight(row + r * run < num_rows ? row + r * run : row);
        // Tiles of about equal size: for eight tokens two of four, not one of six and one of two.
        const long num_tiles = (count + Form::tokens - 1) / Form::tokens;
        for (long tile = 0; tile < num_tiles; ++tile) {
          const long start = count * tile / num_tiles, size = count * (tile + 1) / num_tiles - start;
          const float* x[Form::tokens];
          for (long t = 0; t < size; ++t) x[t] = token(first + start + t);
          float sums[whole_registers(Form::tokens * rows)];
          multiply<Form::tokens>(size, x, w, k, sums);
          for (long t = 0; t < size; ++t) {
            for (long r = 0; r < rows && row + r * run < num_rows; ++r)
              emit(first + start + t, row + r * run, sums[t * rows + r]);
          }
        }
      }
    }
  }

 private:
  static constexpr int whole_registers(int count) { return (count + V::width - 1) / V::width * V::width; }

  template <int most>
  [[gnu::always_inline]] static inline void multiply(long size, const float* const* x, const Weight* const* w, long k,
                                                     float* sums) {
    if constexpr (most > 1) {
      if (size < most) return multiply<most - 1>(size, x, w, k, sums);
    }
    multiply_tile<most>(x, w, k, sums);
  }

  // sums[token][row], in whole registers.
  template <int tokens>
  [[gnu::noinline]] static void multiply_tile(const float* const* x, const Weight* const* w, long k, float* sums) {
    constexpr long block = Packed<Form, Weight>::block;
    Vec total[tokens * rows] = {};
    long i = 0;
    for (; i + block <= k; i += block) add_block<tokens>(x, i, [&](int r) { return w[r] + i; }, total);
    if (i < k) {
      Weight padded[rows][block] = {};
      for (int r = 0; r < rows; ++r) __builtin_memcpy(padded[r], w[r] + i, (k - i) * sizeof(Weight));
      add_block<tokens>(x, i, [&](int r) { return padded[r]; }, total);
    }
    store_sums<tokens * rows>(total, sums);
  }

  template <int tokens, class BlockOf>
  [[gnu::always_inline]] static inline void add_block(const float* const* x, long i, BlockOf block_of, Vec* total) {
    add_half<0, tokens>(x, i, block_of, total);
    add_half<1, tokens>(x, i, block_of, total);
  }

  // Holds all activations and one weight row at a time, so that with the sums no register too many is needed.
  template <int which, int tokens, class BlockOf>
  [[gnu::always_inline]] static inline void add_half(const float* const* x, long i, BlockOf block_of, Vec* total) {
    Vec token[tokens];
#pragma GCC unroll 8
    for (int t = 0; t < tokens; ++t) token[t] = V::load(x[t] + i + which * V::width);
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r) {
      const Vec row = V::template load_half<which>(block_of(r));
#pragma GCC unroll 8
      for (int t = 0; t < tokens; ++t) total[t * rows + r] += token[t] * row;
    }
  }

  template <int count>
  [[gnu::always_inline]] static inline void store_sums(Vec* total, float* sums) {
    if constexpr (count > V::width) {
      V::store(sums, V::sum_each(total));
      store_sums<count - V::width>(total + V::width, sums + V::width);
    } else {
      V::store(sums, V::template sum_each<count>(total));
    }
  }
};

}  // namespace moonshard
