// The register tile that all products are made of, and the order in which a matrix is covered with it.
//
// A tile is four weight rows by a few activation rows: both lie along the contracted side, so weights are never
// repacked, and each step multiplies what it loads into up to 24 running sums. The order in which one sum is added up
// depends on nothing but its length: a token's result is the same, bit by bit, in whatever batch and on however many
// threads.
#pragma once

#include "../formats/matrix.h"

namespace moonshard {

template <class Form, class Weight>
struct Tiles {
  using V = Vectors<Form>;
  using Vec = typename V::Vec;
  using Of = Row<Form, Weight>;
  static constexpr int rows = 4;
  static constexpr long cache_bytes = 256 << 10;  // of the second-level cache: for activations, and again for weights

  // Beside more tokens packed rows are widened into memory, where they stay in the caches: once for each block of tokens,
  // which holds fewer the longer rows are. Beside these they are unpacked once, and their rows multiplied by all tokens:
  // fewer at once, the more tokens there are, so that sums stay in registers.
  static constexpr int most_tokens = Of::is_packed ? (V::width == 16 ? 3 : V::width == 8 ? 4 : 1) : Form::tokens;
  static constexpr int rows_at_once(int tokens) { return Of::is_packed && V::width == 8 && tokens > 2 ? 2 : rows; }

  // Room that `cover` needs.
  static long room_floats(long k) { return Of::is_packed ? rows * Packed<Form, Weight>::length(k) : 0; }

  // Covers `num_rows` x `num_tokens`. `weight(row)` is a `Row` of `k` numbers, `token(index)` where `k` of them lie
  // `Packed`; `emit(token, row, sum)` takes the results. Weights are read from memory once, as long as a block of
  // tokens holds all: in the innermost loops they are in the first-level cache.
  template <class WeightOf, class TokenOf, class Emit>
  [[gnu::always_inline]] static inline void cover(long num_rows, long num_tokens, long k, WeightOf weight,
                                                  TokenOf token, Emit emit, float* room) {
    const long fit = cache_bytes / (4 * k + 1) / Form::tokens * Form::tokens;
    const long block = fit < Form::tokens ? Form::tokens : fit;
    for (long first = 0; first < num_tokens; first += block) {
      const long count = num_tokens - first < block ? num_tokens - first : block;
      // The four rows of a tile lie far apart, so that all are read in four long runs, which the processor sees coming.
      const long run = (num_rows + rows - 1) / rows;
      for (long row = 0; row < run; ++row) {
        Of w[rows];
        for (int r = 0; r < rows; ++r) w[r] = weight(row + r * run < num_rows ? row + r * run : row);
        const auto take = [&](long index, int r, float sum) {
          if (row + r * run < num_rows) emit(first + index, row + r * run, sum);
        };
        const auto from = [&](long index) { return token(first + index); };
        if constexpr (Of::is_packed) {
          if (count > most_tokens) {
            Row<Form, float> wide[rows];
            widen(w, k, room, wide);
            Tiles<Form, float>::cover_rows(wide, count, Packed<Form, Weight>::length(k), from, take);
            continue;
          }
        }
        cover_rows(w, count, k, from, take);
      }
    }
  }

  // Four rows and all of some tokens, in tiles of about equal size: for eight tokens two of four, not one of six and one
  // of two.
  template <class TokenOf, class Take>
  [[gnu::always_inline]] static inline void cover_rows(const Of (&w)[rows], long count, long k, TokenOf token,
                                                       Take take) {
    const long num_tiles = (count + most_tokens - 1) / most_tokens;
    for (long tile = 0; tile < num_tiles; ++tile) {
      const long start = count * tile / num_tiles, size = count * (tile + 1) / num_tiles - start;
      const float* x[most_tokens];
      for (long t = 0; t < size; ++t) x[t] = token(start + t);
      float sums[whole_registers(most_tokens * rows)];
      multiply<most_tokens>(size, x, w, k, sums);
      for (long t = 0; t < size; ++t) {
        for (int r = 0; r < rows; ++r) take(start + t, r, sums[t * rows + r]);
      }
    }
  }

 private:
  static constexpr int whole_registers(int count) { return (count + V::width - 1) / V::width * V::width; }

  // As `Packed` has activations.
  static void widen(const Of (&w)[rows], long k, float* room, Row<Form, float> (&wide)[rows]) {
    const long length = Packed<Form, Weight>::length(k);
    for (int r = 0; r < rows; ++r) wide[r] = {room + r * length};
    const auto store = [&](long i, int r, const Vec(&of)[Of::registers]) {
      for (int each = 0; each < Of::registers; ++each) V::store(room + r * length + i + each * V::width, of[each]);
    };
    long i = whole_blocks<rows>(w, k, [&](long at, auto load) {
#pragma GCC unroll 4
      for (int r = 0; r < rows; ++r) {
        Vec of[Of::registers];
        load(r, of);
        store(at, r, of);
      }
    });
    for (; i < k; i += Of::block) {
      for (int r = 0; r < rows; ++r) {
        Vec of[Of::registers];
        w[r].load_some(i, k - i < Of::block ? k - i : Of::block, of);
        store(i, r, of);
      }
    }
  }

  template <int most>
  [[gnu::always_inline]] static inline void multiply(long size, const float* const* x, const Of* w, long k,
                                                     float* sums) {
    if constexpr (most > 1) {
      if (size < most) return multiply<most - 1>(size, x, w, k, sums);
    }
    multiply_tile<most>(x, w, k, sums);
  }

  // sums[token][row], in whole registers.
  template <int tokens>
  [[gnu::noinline]] static void multiply_tile(const float* const* x, const Of* w, long k, float* sums) {
    constexpr int count = rows_at_once(tokens);
    for (int first = 0; first < rows; first += count) {
      Vec total[tokens * count] = {};
      multiply_rows<tokens, count>(x, w + first, k, total);
      if constexpr (count == rows) {
        store_sums<tokens * rows>(total, sums);
      } else {
        float own[whole_registers(tokens * count)];
        store_sums<tokens * count>(total, own);
        for (int t = 0; t < tokens; ++t) __builtin_memcpy(sums + t * rows + first, own + t * count, 4 * count);
      }
    }
  }

  // total[token][row]
  template <int tokens, int count>
  [[gnu::always_inline]] static inline void multiply_rows(const float* const* x, const Of* w, long k, Vec* total) {
    long i = 0;
    if constexpr (Of::is_packed) {
      Of own[count];
      for (int r = 0; r < count; ++r) own[r] = w[r];
      i = whole_blocks<count>(own, k, [&](long at, auto load) { add_packed<tokens, count>(x, at, load, total); });
    } else {
      for (; i + Of::block <= k; i += Of::block) {
        add_half<0, tokens>(x, w, i, total);
        add_half<1, tokens>(x, w, i, total);
      }
    }
    for (; i < k; i += Of::block) {
      const long left = k - i;
      add_packed<tokens, count>(
          x, i, [&](int r, Vec(&of)[Of::registers]) { w[r].load_some(i, left < Of::block ? left : Of::block, of); },
          total);
    }
  }

  // act(i, load) of every whole block, from `i` on, of rows of one matrix, where load(row, registers); how many numbers
  // these were: fewer where scales do not let them be read so.
  template <int count, class Act>
  [[gnu::always_inline]] static inline long whole_blocks(const Of (&w)[count], long k, Act act) {
    const long whole = k / Of::block * Of::block, span = w[0].span();
    if (span < Of::block) return 0;
    typename Of::Prepared prepared[count];
    long i = 0;
    for (long first = 0; i < whole; first += Of::Prepared::most) {
      const long left = w[0].num_scales(whole - i), num = left < Of::Prepared::most ? left : Of::Prepared::most;
      for (int r = 0; r < count; ++r)
        if (!w[r].prepare(first, num, prepared[r])) return i;
      for (long scale = 0; scale < num; ++scale) {
        if constexpr (Of::has_scale_to_a_block) {  // and it takes registers, so a row's at a time
          act(i, [&](int r, Vec(&of)[Of::registers]) { w[r].load(i, Of::factor(prepared[r], scale), of); });
          i += Of::block;
        } else {
          typename Of::Factor factors[count];
#pragma GCC unroll 4
          for (int r = 0; r < count; ++r) factors[r] = Of::factor(prepared[r], scale);
          const long end = whole - i < span ? whole : i + span;
          for (; i < end; i += Of::block)
            act(i, [&](int r, Vec(&of)[Of::registers]) { w[r].load(i, factors[r], of); });
        }
      }
    }
    return i;
  }

  // Holds all activations and one weight row at a time, so that with the sums no register too many is needed.
  template <int which, int tokens>
  [[gnu::always_inline]] static inline void add_half(const float* const* x, const Of* w, long i, Vec* total) {
    Vec token[tokens];
#pragma GCC unroll 8
    for (int t = 0; t < tokens; ++t) token[t] = V::load(x[t] + i + which * V::width);
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r) {
      const Vec row = w[r].template half<which>(i);
#pragma GCC unroll 8
      for (int t = 0; t < tokens; ++t) total[t * rows + r] += token[t] * row;
    }
  }

  // Of all registers that a block of a row is unpacked into, one row at a time.
  template <int tokens, int count, class Load>
  [[gnu::always_inline]] static inline void add_packed(const float* const* x, long i, Load load, Vec* total) {
#pragma GCC unroll 4
    for (int r = 0; r < count; ++r) {
      Vec row[Of::registers];
      load(r, row);
#pragma GCC unroll 8
      for (int each = 0; each < Of::registers; ++each) {
#pragma GCC unroll 8
        for (int t = 0; t < tokens; ++t) total[t * count + r] += V::load(x[t] + i + each * V::width) * row[each];
      }
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
