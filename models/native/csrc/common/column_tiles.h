// The other register tile: of a matrix whose rows lie along the contracted side, so that sums are registers of columns.
//
// For y = x W with W [k, columns], as absorbed queries want W_uk. Each number of x is spread over a register and meets
// some registers of a row of W, whose order, where they are bfloat16s (`Packed`), is mended in the sums. A sum is added
// up in the order of k, whatever else is multiplied with it: a token's result is the same, bit by bit, in whatever
// batch and on however many threads.
#pragma once

#include "../formats/matrix.h"

namespace moonshard {

template <class Form, class Weight>
struct ColumnTiles {
  using V = Vectors<Form>;
  using Vec = typename V::Vec;
  using Of = Row<Form, Weight>;
  static constexpr int registers = Of::registers;  // of sums, of a block of weights
  static constexpr long block = Of::block;         // columns
  static constexpr int most_blocks = registers > 2 ? 1 : 2;                             // beside some tokens
  static constexpr int most_blocks_of_one = (V::width == 16 ? 16 : 8) / registers;  // beside one

  // y[token][column] of `num_tokens` tokens and the columns [begin, end), which begin with a block; `x_stride` and
  // `y_stride` numbers are from one token's to the next one's.
  static void cover(const float* x, long x_stride, long num_tokens, const Matrix<Form, Weight>& weight, long k,
                    float* y, long y_stride, long begin, long end) {
    const Job job{x, x_stride, weight, k, y, y_stride};
    long column = begin;
    // Long parts of rows, that is: the shorter, the longer memory takes.
    for (; num_tokens == 1 && column + most_blocks_of_one * block <= end; column += most_blocks_of_one * block)
      multiply_tile<most_blocks_of_one, 1>(job, 0, column, block);
    for (; column + most_blocks * block <= end; column += most_blocks * block)
      rows<most_blocks>(job, num_tokens, column, block);
    for (; column < end; column += block)
      rows<1>(job, num_tokens, column, end - column < block ? end - column : block);
  }

 private:
  struct Job {
    const float* x;
    long x_stride;
    const Matrix<Form, Weight>& weight;
    long k;
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
    Vec total[tokens][registers * blocks] = {};
    const float* x = job.x + first * job.x_stride;
    if (last == block) {
      for (long i = 0; i < job.k; ++i) {
        const Of row = job.weight.row(i);
        // The next tile's columns: a row's few are no run that the processor sees coming.
        if (first == 0 && tokens > 1) fetch(row, column + blocks * block, blocks * block);
        add_row<blocks, tokens>(
            x + i, job.x_stride, [&](int b, Vec(&of)[registers]) { row.load(column + b * block, of); }, total);
      }
    } else if constexpr (blocks == 1) {  // the last block of all is a tile of its own
      for (long i = 0; i < job.k; ++i) {
        const Of row = job.weight.row(i);
        add_row<blocks, tokens>(
            x + i, job.x_stride, [&](int, Vec(&of)[registers]) { row.load_some(column, last, of); }, total);
      }
    }
    for (int t = 0; t < tokens; ++t) {
      float* y = job.y + (first + t) * job.y_stride + column;
      for (int b = 0; b < blocks; ++b, y += block) emit(total[t] + registers * b, b < blocks - 1 ? block : last, y);
    }
  }

  template <int blocks, int tokens, class Load>
  [[gnu::always_inline]] static inline void add_row(const float* x, long x_stride, Load load,
                                                    Vec (&total)[tokens][registers * blocks]) {
    Vec row[blocks][registers];
#pragma GCC unroll 8
    for (int b = 0; b < blocks; ++b) load(b, row[b]);
#pragma GCC unroll 8
    for (int t = 0; t < tokens; ++t) {
      const Vec own = Vec{} + x[t * x_stride];
#pragma GCC unroll 16
      for (int r = 0; r < registers * blocks; ++r) total[t][r] += own * row[r / registers][r % registers];
    }
  }

  [[gnu::always_inline]] static inline void fetch(const Of& row, long column, long count) {
    const char *from = row.address(column), *to = row.address(column + count);
    for (; from < to; from += 64) __builtin_prefetch(from);
  }

  // The first `count` sums of a block in the order of their columns.
  [[gnu::always_inline]] static inline void emit(const Vec* total, long count, float* y) {
    Vec of[registers];
    for (int r = 0; r < registers; ++r) of[r] = total[r];
    float sums[block];
    Packed<Form, Weight>::unpack_block(of, sums);
    __builtin_memcpy(y, sums, count * sizeof(float));
  }
};

}  // namespace moonshard
