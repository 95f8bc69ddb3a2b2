// The other register tile: of a matrix whose rows lie along the contracted side, so that sums are registers of columns.
//
// For y = x W with W [k, columns], as absorbed queries want W_uk. Each number of x is spread over a register and meets
// some registers of a row of W. A sum is added up in the order of k, whatever else is multiplied with it: a token's
// result is the same, bit by bit, in whatever batch and on however many threads.
#pragma once

#include "vectors.h"

namespace moonshard {

template <class Form, class Weight>
struct ColumnTiles {
  using V = Vectors<Form>;
  using Vec = typename V::Vec;
  static constexpr int most = 4;  // registers of columns

  // y[token][column] of `num_tokens` tokens and `num_columns` columns; `stride` numbers are from one row of W to the
  // next, and `x_stride` and `y_stride` from one token's to the next one's.
  static void cover(const float* x, long x_stride, long num_tokens, const Weight* weight, long stride, long k, float* y,
                    long y_stride, long num_columns) {
    long column = 0;
    for (; column + most * V::width <= num_columns; column += most * V::width)
      rows<most>(x, x_stride, num_tokens, weight + column, stride, k, y + column, y_stride, V::width);
    for (; column < num_columns; column += V::width) {
      const long left = num_columns - column, last = left < V::width ? left : V::width;
      rows<1>(x, x_stride, num_tokens, weight + column, stride, k, y + column, y_stride, last);
    }
  }

 private:
  // `last`: columns of the last register.
  template <int registers>
  static void rows(const float* x, long x_stride, long num_tokens, const Weight* weight, long stride, long k, float* y,
                   long y_stride, long last) {
    const long num_tiles = (num_tokens + Form::tokens - 1) / Form::tokens;
    for (long tile = 0; tile < num_tiles; ++tile) {
      const long start = num_tokens * tile / num_tiles, size = num_tokens * (tile + 1) / num_tiles - start;
      multiply<registers, Form::tokens>(size, x + start * x_stride, x_stride, weight, stride, k, y + start * y_stride,
                                        y_stride, last);
    }
  }

  template <int registers, int tokens>
  [[gnu::always_inline]] static inline void multiply(long size, const float* x, long x_stride, const Weight* weight,
                                                     long stride, long k, float* y, long y_stride, long last) {
    if constexpr (tokens > 1) {
      if (size < tokens)
        return multiply<registers, tokens - 1>(size, x, x_stride, weight, stride, k, y, y_stride, last);
    }
    multiply_tile<registers, tokens>(x, x_stride, weight, stride, k, y, y_stride, last);
  }

  template <int registers, int tokens>
  [[gnu::noinline]] static void multiply_tile(const float* x, long x_stride, const Weight* weight, long stride, long k,
                                              float* y, long y_stride, long last) {
    Vec total[tokens][registers] = {};
    for (long i = 0; i < k; ++i, weight += stride) {
      Vec row[registers];
#pragma GCC unroll 4
      for (int r = 0; r < registers; ++r) {
        const Weight* from = weight + r * V::width;
        row[r] = r < registers - 1 || last == V::width ? V::load(from) : V::load_some(from, last);
      }
#pragma GCC unroll 8
      for (int t = 0; t < tokens; ++t) {
        const Vec own = Vec{} + x[t * x_stride + i];
#pragma GCC unroll 4
        for (int r = 0; r < registers; ++r) total[t][r] += own * row[r];
      }
    }
    for (int t = 0; t < tokens; ++t) {
      for (int r = 0; r < registers; ++r) {
        const long count = r < registers - 1 ? V::width : last;
        __builtin_memcpy(y + t * y_stride + r * V::width, &total[t][r], count * sizeof(float));
      }
    }
  }
};

}  // namespace moonshard
