// The register tile that all products are made of, and the order in which a matrix is covered with it.
//
// A tile is four weight rows by a few activation rows: both lie along the contracted side, so nothing is repacked, and
// each step multiplies what it loads into up to 24 running sums. The order in which one sum is added up depends on
// nothing but its length: a token's result is the same, bit by bit, in whatever batch and on however many threads.
#pragma once

#include "vectors.h"

namespace moonshard {

template <class Form, class Weight>
struct Tiles {
  using V = Vectors<Form>;
  using Vec = typename V::Vec;
  static constexpr int rows = 4;
  static constexpr long cache_bytes = 256 << 10;  // of the second-level cache: for activations, and again for weights

  // Covers `num_rows` x `num_tokens`. `weight(row)` and `token(index)` say where `k` numbers each lie;
  // `emit(token, row, sums, count)` takes the sums of `count` rows from `row` on. Weights are read from memory once, as
  // long as a block of tokens holds all: in the innermost loops they are in the first-level cache.
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
          float sums[Form::tokens][rows] = {};
          multiply<Form::tokens>(size, x, w, k, sums);
          for (long t = 0; t < size; ++t) {
            for (long r = 0; r < rows && row + r * run < num_rows; ++r) emit(first + start + t, row + r * run, sums[t][r]);
          }
        }
      }
    }
  }

 private:
  template <int most>
  [[gnu::always_inline]] static inline void multiply(long size, const float* const* x, const Weight* const* w, long k,
                                                     float (*sums)[rows]) {
    if constexpr (most > 1) {
      if (size < most) return multiply<most - 1>(size, x, w, k, sums);
    }
    multiply_tile<most>(x, w, k, sums);
  }

  template <int tokens>
  [[gnu::noinline]] static void multiply_tile(const float* const* x, const Weight* const* w, long k,
                                              float (*sums)[rows]) {
    Vec total[tokens][rows] = {};
    long i = 0;
    for (; i + V::width <= k; i += V::width) {
      add(total, [&](int t) { return V::load(x[t] + i); }, [&](int r) { return V::load(w[r] + i); });
    }
    if (i < k) {
      const long left = k - i;
      add(total, [&](int t) { return V::load_some(x[t] + i, left); },
          [&](int r) { return V::load_some(w[r] + i, left); });
    }
#pragma GCC unroll 8
    for (int t = 0; t < tokens; ++t) V::sum_four(total[t], sums[t]);
  }

  // Holds all activations and one weight row at a time, so that with the sums no register too many is needed.
  template <int tokens, class LoadToken, class LoadRow>
  [[gnu::always_inline]] static inline void add(Vec (&total)[tokens][rows], LoadToken load_token, LoadRow load_row) {
    Vec token[tokens];
#pragma GCC unroll 8
    for (int t = 0; t < tokens; ++t) token[t] = load_token(t);
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
      const Vec row = load_row(r);
#pragma GCC unroll 8
      for (int t = 0; t < tokens; ++t) total[t][r] += token[t] * row;
    }
  }
};

}  // namespace moonshard
