// The other register tile: of a matrix whose rows lie along the contracted side, so that sums are registers of columns.
//
// For y = x W with W [k, columns], as absorbed queries want W_uk. Each number of x is spread over a register and meets
// some registers of a row of W, whose order, where they are bfloat16s (`Packed`), is mended in the sums. A sum is added
// up in the order of k, whatever else is multiplied with it: a token's result is the same, bit by bit, in whatever
// batch and on however many threads.
#pragma once

#include "packed.h"

namespace moonshard {

template <class Form, class Weight>
struct ColumnTiles {
  using V = Vectors<Form>;
  using Vec = typename V::Vec;
  static constexpr long block = Packed<Form, Weight>::block;  // columns of a block of weights: two registers of sums
  static constexpr int most_blocks = 2, most_blocks_of_one = V::width == 16 ? 8 : 4;  // beside some tokens; beside one

  // y[token][column] of `num_tokens` tokens and `num_columns` columns; `stride` numbers are from one row of W to the
  // next, and `x_stride` and `y_stride` from one token's to the next one's.
  static void cover(const float* x, long x_stride, long num_tokens, const Weight* weight, long stride, long k, float* y,
                    long y_stride, long num_columns) {
    const Job job{x, x_stride, weight, stride, k, y, y_stride};
    long column = 0;
    // Long parts of rows, that is: the shorter, the longer memory takes.
    for (; num_tokens == 1 && column + most_blocks_of_one * block <= num_columns; column += most_blocks_of_one * block)
      multiply_tile<most_blocks_of_one, 1>(job, 0, column, block);
    for (; column + most_blocks * block <= num_columns; column += most_blocks * block)
      rows<most_blocks>(job, num_tokens, column, block);
    for (; column < num_columns; column += block)
      rows<1>(job, num_tokens, column, num_columns - column < block ? num_columns - column : block);
  }

 private:
  struct Job {
    const float* x;
    long x_stride;
    const Weight* weight;
    long stride, k;
    float* y;
    long y_stride;
  };

  // Columns from `column` on, `last` of them in the last block.
  template <int blocks>
  static void rows(const Job& job, long num_tokens, long column, long last) {
    const long num_tiles = (num_tokens + Form::tokens - 1) / Form::tokens;
    for (long tile = 0; tile < num_tiles; ++tile) {
      const long start = num_tokens * tile / num_tiles, size = num_tokens * (tile + 1) / num_tiles - start;
      multiply<blocks, Form::tokens>(size, job, start, column, last);
    }
  }

  template <int blocks, int tokens>
  [[gnu::always_inline]] static inline void multiply(long size, const Job& job, long first, long column, long last) {
    if constexpr (tokens > 1) {
      if (size < tokens) return multiply<blocks, tokens - 1>(size, job, first, column, last);
    }
    multiply_tile<blocks, tokens>(job, first, column, last);
  }

  template <int blocks, int tokens>
  [[gnu::noinline]] static void multiply_tile(const Job& job, long first, long column, long last) {
    Vec total[tokens][2 * blocks] = {};
    const float* x = job.x + first * job.x_stride;
    const Weight* weight = job.weight + column;
    if (last == block) {
      for (long i = 0; i < job.k; ++i, weight += job.stride) {
        // The next tile's columns: a row's few are no run that the processor sees coming.
        if (first == 0 && tokens > 1) fetch<blocks>(weight + blocks * block);
        add_row<blocks, tokens>(x + i, job.x_stride, weight, total);
      }
    } else if constexpr (blocks == 1) {  // the last block of all is a tile of its own
      for (long i = 0; i < job.k; ++i, weight += job.stride) {
        Weight padded[block] = {};
        __builtin_memcpy(padded, weight, last * sizeof(Weight));
        add_row<blocks, tokens>(x + i, job.x_stride, padded, total);
      }
    }
    for (int t = 0; t < tokens; ++t) {
      float* y = job.y + (first + t) * job.y_stride + column;
      for (int b = 0; b < blocks; ++b, y += block)
        emit(total[t][2 * b], total[t][2 * b + 1], b < blocks - 1 ? block : last, y);
    }
  }

  template <int blocks, int tokens>
  [[gnu::always_inline]] static inline void add_row(const float* x, long x_stride, const Weight* weight,
                                                    Vec (&total)[tokens][2 * blocks]) {
    Vec row[2 * blocks];
#pragma GCC unroll 8
    for (int b = 0; b < blocks; ++b) {
      row[2 * b] = V::template load_half<0>(weight + b * block);
      row[2 * b + 1] = V::template load_half<1>(weight + b * block);
    }
#pragma GCC unroll 8
    for (int t = 0; t < tokens; ++t) {
      const Vec own = Vec{} + x[t * x_stride];
#pragma GCC unroll 16
      for (int r = 0; r < 2 * blocks; ++r) total[t][r] += own * row[r];
    }
  }

  template <int blocks>
  [[gnu::always_inline]] static inline void fetch(const Weight* from) {
    const char* bytes = reinterpret_cast<const char*>(from);
    for (long at = 0; at < blocks * block * long(sizeof(Weight)); at += 64) __builtin_prefetch(bytes + at);
  }

  // The first `count` sums of a block in the order of their columns.
  [[gnu::always_inline]] static inline void emit(Vec a, Vec b, long count, float* y) {
    constexpr bool is_float = sizeof(Weight) == sizeof(float);
    float sums[block];
    V::store(sums, is_float ? a : V::first_in_turns(a, b));
    V::store(sums + V::width, is_float ? b : V::second_in_turns(a, b));
    __builtin_memcpy(y, sums, count * sizeof(float));
  }
};

}  // namespace moonshard
