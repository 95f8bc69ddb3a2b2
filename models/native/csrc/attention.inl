// The work of `attention.h`, for the units in forms/.
//
// A row here is a query position and a head. Rows are packed in panels of R, queries as [feature / width][row][lane]
// and scores, then weights, as [key][row]: so both products, queries x keys and weights x keys, run over the rows of a
// panel with each key in a register. Keys are read where they lie, a tile at a time, once from memory: the second
// product, and the other panels, find them in the second-level cache.
// Sources: FlashAttention (arXiv 2205.14135), section 3.1; parts of equal length and one merge as in Flash-Decoding.
#pragma once

#include "attention.h"
#include "common/exponential.h"

namespace moonshard {

template <class Form>
struct AttentionOf {
  using V = Vectors<Form>;
  using Vec = typename V::Vec;
  using Words = typename Form::Words;
  typedef int32_t Ints __attribute__((vector_size(sizeof(Vec))));
  static constexpr long width = V::width;
  static constexpr long tile_keys = 64, key_pad = 4;  // a tile's keys are as many as all register tiles can take
  static constexpr long line = 16;                    // floats of a cache line
  // From here on bfloat16 keys are made floats once for both products and all panels.
  static constexpr long min_rows_to_widen = width == 16 ? 32 : 8;
  static constexpr float unseen = -3.4028235e38f;     // the peak before any key: finite, so that no inf - inf occurs

  struct Sizes {
    long num_rows, panel_rows, num_panels, padded_features;
    long columns;     // r, in whole registers
    long row_floats;  // of a partial softmax: the columns, then peak and total
    bool widens;

    // The rows of a panel follow from the heads alone, for the order in which totals are added up follows from them.
    Sizes(const AttentionCall& call, long count)
        : num_rows(count * call.h),
          panel_rows(call.h <= 4 || width == 4 ? 4 : 8),
          num_panels((num_rows + panel_rows - 1) / panel_rows),
          padded_features(V::whole(call.f, width)),
          columns(V::whole(call.r, width)),
          row_floats(V::whole(columns + 2, line)),
          widens(call.is_bf16 && num_rows >= min_rows_to_widen) {}

    long queries() const { return V::whole(num_panels * panel_rows * padded_features, line); }
    long positions() const { return V::whole(num_panels * width, line); }
    long state() const { return V::whole(num_panels * (panel_rows + width), line); }
    long scores() const { return V::whole(tile_keys * panel_rows, line); }
    long wide() const { return widens ? V::whole(tile_keys * padded_features, line) : 0; }
    long partial() const { return num_panels * panel_rows * row_floats; }
    long scratch() const { return queries() + positions() + state() + scores() + wide() + 2 * partial(); }
  };

  // The rows of some queries, packed, and what is known of their softmax within a part.
  struct Rows {
    float* queries;
    int32_t* positions;  // [panel][key][row], less the key's index in its register
    float* state;        // [panel]: a peak for each row, then a register of totals
    float* scores;       // of one panel
    float* wide;         // a tile's keys as floats
    long first_position;  // up to which every row sees every key
  };

  [[gnu::always_inline]] static inline long smaller(long a, long b) { return a < b ? a : b; }
  // Into the second-level cache.
  [[gnu::always_inline]] static inline void fetch(const void* from) { __builtin_prefetch(from, 0, 2); }
  template <class Source>
  [[gnu::always_inline]] static inline bool begins_line(long feature) {
    constexpr long per_line = 64 / sizeof(Source);
    return width >= per_line || feature % per_line == 0;
  }

  // scores[key][row] = <query of row, key>, of `rows` rows from the panel's `row` on and `num` keys.
  // Meanwhile the next tile's keys, which lie `ahead`, are fetched from memory, a share by each run through these. In
  // the second product it would cost more than it hides, measured.
  template <long R, long rows, long num, class Key, class Source>
  [[gnu::always_inline]] static inline void score(const float* queries, long row, const Key* const* keys,
                                                  const Source* const* ahead, long f, float* scores) {
    static_assert(rows * num % width == 0 && key_pad % num == 0);
    Vec sums[num * rows] = {}, key[num];
    queries += row * width;
    const long num_whole = f / width * width;
    if (num_whole < f) {  // first, while nothing is in registers yet
#pragma GCC unroll 16
      for (long i = 0; i < num; ++i) key[i] = V::load_some(keys[i] + num_whole, f - num_whole);
      add_products<R, rows, num>(queries + num_whole * R, key, sums);
    }
    for (long feature = 0; feature < num_whole; feature += width) {
#pragma GCC unroll 16
      for (long i = 0; i < num; ++i) key[i] = V::load(keys[i] + feature);
      if (begins_line<Source>(feature)) {
#pragma GCC unroll 16
        for (long i = row * num / R; i < (row + rows) * num / R; ++i) fetch(ahead[i] + feature);
      }
      add_products<R, rows, num>(queries + feature * R, key, sums);
    }
    float found[num * rows];
#pragma GCC unroll 16
    for (long i = 0; i < num * rows; i += width) V::store(found + i, V::sum_each(sums + i));
#pragma GCC unroll 16
    for (long i = 0; i < num; ++i) __builtin_memcpy(scores + i * R + row, found + i * rows, rows * sizeof(float));
  }

  template <long R, long rows, long num>
  [[gnu::always_inline]] static inline void add_products(const float* queries, const Vec* key, Vec* sums) {
#pragma GCC unroll 16
    for (long row = 0; row < rows; ++row) {
      Vec query = V::load(queries + row * width);
      __asm__("" : "+v"(query));  // loaded once: GCC would read it from memory for every key
#pragma GCC unroll 16
      for (long i = 0; i < num; ++i) sums[i * rows + row] += query * key[i];
    }
  }

  // Register tiles as measured: it counts how often a panel's queries are read, and how often floats are made of keys.
  template <long R, class Key, class Source>
  [[gnu::always_inline]] static inline void score_tile(const float* queries, const Key* const* keys,
                                                       const Source* const* ahead, long num_keys, long f,
                                                       float* scores) {
    constexpr bool is_wide = width == 16 && R == 8 && sizeof(Key) == 2;
    constexpr long rows = is_wide ? 8 : 4, num = width == 16 && !is_wide ? 4 : 2;
    for (long key = 0; key < num_keys; key += num) {
#pragma GCC unroll 2
      for (long row = 0; row < R; row += rows)
        score<R, rows, num>(queries, row, keys + key, ahead + key, f, scores + key * R);
    }
  }

  // Scales and masks a panel's scores, makes weights of them and updates peaks and totals: `decay` is what was summed
  // up before has to be multiplied with. A row sees keys up to its position; `first` is the first key's.
  template <long R, bool is_masked>
  static void weigh(float* scores, long num_keys, float scale, long first, const int32_t* positions, float* state,
                    float* decay) {
    constexpr long together = width / R;  // keys of a register
    Ints last;
    __builtin_memcpy(&last, positions, sizeof last);
    Vec highest = V::splat(unseen);
    for (long i = 0; i < num_keys * R; i += width) {
      Vec x = V::load(scores + i) * scale;
      if constexpr (is_masked) x = last >= static_cast<int32_t>(first + i / R) ? x : V::splat(-__builtin_inff());
      V::store(scores + i, x);
      highest = V::larger(highest, x);
    }
    float lanes[width], old_peaks[width], peaks[width];
    V::store(lanes, highest);
    for (long row = 0; row < R; ++row) {
      float peak = state[row];
      for (long i = row; i < width; i += R) peak = lanes[i] > peak ? lanes[i] : peak;
      for (long i = 0; i < together; ++i) old_peaks[i * R + row] = state[row], peaks[i * R + row] = peak;
    }
    const Vec peak = V::load(peaks), factor = exponential<Form>(V::load(old_peaks) - peak);
    Vec total = V::load(state + R) * factor;
    for (long i = 0; i < num_keys * R; i += width) {
      const Vec weight = exponential<Form>(V::load(scores + i) - peak);
      V::store(scores + i, weight);
      total += weight;
    }
    V::store(state + R, total);
    V::store(lanes, factor);
    for (long row = 0; row < R; ++row) state[row] = peaks[row], decay[row] = lanes[row];
  }

  // mixed[row][column] = mixed * decay + weights x keys, of `rows` rows and `num` registers of columns.
  template <long R, long rows, long num, bool is_whole, class Key>
  [[gnu::always_inline]] static inline void mix(const float* weights, const float* decay, const Key* const* keys,
                                                long num_keys, long f, long column, float* mixed, long stride) {
    Vec sums[rows * num];
#pragma GCC unroll 16
    for (long row = 0; row < rows; ++row) {
#pragma GCC unroll 4
      for (long i = 0; i < num; ++i)
        sums[row * num + i] = V::load(mixed + row * stride + column + i * width) * decay[row];
    }
    for (long key = 0; key < num_keys; ++key, weights += R) {
      Vec value[num];
#pragma GCC unroll 4
      for (long i = 0; i < num; ++i) {
        const Key* from = keys[key] + column + i * width;
        value[i] = is_whole ? V::load(from) : V::load_some(from, f - column - i * width);
      }
#pragma GCC unroll 16
      for (long row = 0; row < rows; ++row) {
        const Vec weight = V::splat(weights[row]);
#pragma GCC unroll 4
        for (long i = 0; i < num; ++i) sums[row * num + i] += weight * value[i];
      }
    }
#pragma GCC unroll 16
    for (long row = 0; row < rows; ++row) {
#pragma GCC unroll 4
      for (long i = 0; i < num; ++i) V::store(mixed + row * stride + column + i * width, sums[row * num + i]);
    }
  }

  template <long R, long num, bool is_whole, class Key>
  static void mix_columns(const float* weights, const float* decay, const Key* const* keys, long num_keys, long f,
                          long column, float* mixed, long stride) {
    constexpr long rows = width == 16 ? R : 4;
#pragma GCC unroll 2
    for (long row = 0; row < R; row += rows)
      mix<R, rows, num, is_whole>(weights + row, decay + row, keys, num_keys, f, column, mixed + row * stride, stride);
  }

  template <long R, class Key>
  static void mix_tile(const float* weights, const float* decay, const Key* const* keys, long num_keys, long f,
                       long columns, float* mixed, long stride) {
    constexpr long num = width == 16 ? 3 : 2;  // as many sums as registers hold without spilling
    // Registers that end within a key, if only among what is no value any more; less than a register is left.
    const long num_whole = columns <= f ? columns : columns - width;
    long column = 0;
    for (; column + num * width <= num_whole; column += num * width)
      mix_columns<R, num, true>(weights, decay, keys, num_keys, f, column, mixed, stride);
    for (; column < num_whole; column += width)
      mix_columns<R, 1, true>(weights, decay, keys, num_keys, f, column, mixed, stride);
    if (column < columns) mix_columns<R, 1, false>(weights, decay, keys, num_keys, f, column, mixed, stride);
  }

  // All rows against one tile of keys, into the partial softmax `part`. Pointers to keys are good up to `key_pad`.
  template <long R, class Key, class Source>
  [[gnu::noinline]] static void attend_tile(const AttentionCall& call, const Sizes& sizes, const Rows& rows,
                                            const Key* const* keys, const Source* const* ahead, long num_keys,
                                            long first, float* part) {
    const long num_padded = V::whole(num_keys, key_pad);
    const bool is_masked = first + num_padded - 1 > rows.first_position;
    for (long panel = 0; panel < sizes.num_panels; ++panel) {
      score_tile<R>(rows.queries + panel * R * sizes.padded_features, keys, ahead, num_padded, call.f, rows.scores);
      const int32_t* positions = rows.positions + panel * width;
      float *state = rows.state + panel * (R + width), decay[R];
      if (is_masked) {
        weigh<R, true>(rows.scores, num_padded, call.scale, first, positions, state, decay);
      } else {
        weigh<R, false>(rows.scores, num_padded, call.scale, first, positions, state, decay);
      }
      mix_tile<R>(rows.scores, decay, keys, num_keys, call.f, sizes.columns, part + panel * R * sizes.row_floats,
                  sizes.row_floats);
    }
  }

  // One part of the keys of all rows, into `part`.
  template <long R, class Key>
  static void attend_part(const AttentionCall& call, const Queries& queries, const Sizes& sizes, const Rows& rows,
                          long begin, long end, float* part) {
    __builtin_memset(part, 0, sizes.partial() * sizeof(float));
    for (long panel = 0; panel < sizes.num_panels; ++panel) {
      float* state = rows.state + panel * (R + width);
      for (long row = 0; row < R; ++row) state[row] = unseen;
      V::store(state + R, Vec{});
    }
    const Key* both[2][tile_keys];
    if (begin < end) find_keys(call, queries, begin, smaller(tile_keys, end - begin), both[0]);
    for (long first = begin, tile = 0; first < end; first += tile_keys, ++tile) {
      const long num_keys = smaller(tile_keys, end - first), next = first + tile_keys;
      const Key *const *keys = both[tile % 2], **ahead = both[(tile + 1) % 2];
      if (next < queries.num_keys) find_keys(call, queries, next, smaller(tile_keys, queries.num_keys - next), ahead);
      else __builtin_memcpy(ahead, keys, sizeof both[0]);
      if (sizeof(Key) < sizeof(float) && sizes.widens) {
        const float* wide[tile_keys];
        for (long key = 0; key < V::whole(num_keys, key_pad); ++key) {
          float* to = rows.wide + smaller(key, num_keys - 1) * sizes.padded_features;
          if (key < num_keys) V::widen_all(keys[key], call.f, to);
          wide[key] = to;
        }
        attend_tile<R>(call, sizes, rows, wide, ahead, num_keys, first, part);
      } else {
        attend_tile<R>(call, sizes, rows, keys, ahead, num_keys, first, part);
      }
    }
    for (long row = 0; row < sizes.num_panels * R; ++row) {
      const float* state = rows.state + row / R * (R + width);
      float total = 0;
      for (long lane = row % R; lane < width; lane += R) total += state[R + lane];
      part[row * sizes.row_floats + sizes.columns] = state[row % R];
      part[row * sizes.row_floats + sizes.columns + 1] = total;
    }
  }

  // Where a tile's keys lie; after the last of them its address some more times. A block that is none is the last.
  template <class Key>
  static void find_keys(const AttentionCall& call, const Queries& queries, long first, long num_keys,
                        const Key** keys) {
    const int32_t* table = call.tables + queries.row * call.m;
    long key = 0;
    while (key < num_keys) {
      const long column = (first + key) / call.block_size, offset = (first + key) % call.block_size;
      const long asked = table[column], block = asked < 0 ? 0 : smaller(asked, call.num_blocks - 1);
      const Key* from = static_cast<const Key*>(call.pages) +
                        ((block * call.num_layers + call.layer) * call.block_size + offset) * call.f;
      for (const long end = smaller(num_keys, key + call.block_size - offset); key < end; ++key, from += call.f)
        keys[key] = from;
    }
    for (; key < tile_keys; ++key) keys[key] = keys[num_keys - 1];
  }

  static Rows pack(const AttentionCall& call, const Queries& queries, const Sizes& sizes, float* scratch) {
    Rows rows;
    rows.queries = scratch;
    rows.positions = reinterpret_cast<int32_t*>(rows.queries + sizes.queries());
    rows.state = rows.queries + sizes.queries() + sizes.positions();
    rows.scores = rows.state + sizes.state();
    rows.wide = rows.scores + sizes.scores();
    const float* from = call.queries + (queries.row * call.t + queries.first) * call.h * call.f;
    const int32_t* positions = call.positions + queries.row * call.t + queries.first;
    const long R = sizes.panel_rows;
    rows.first_position = positions[0];
    for (long row = 0; row < sizes.num_panels * R; ++row) {
      const bool is_there = row < sizes.num_rows;
      float* to = rows.queries + row / R * R * sizes.padded_features + row % R * width;
      for (long feature = 0; feature < call.f; feature += width, to += R * width) {
        const long count = smaller(width, call.f - feature);
        const bool is_whole = is_there && count == width;
        V::store(to, is_whole ? V::load(from + feature) : is_there ? V::load_some(from + feature, count) : Vec{});
      }
      from += call.f;
      const long asked = is_there ? smaller(positions[row / call.h], queries.num_keys - 1) : -1;
      const int32_t position = static_cast<int32_t>(asked < 0 ? -1 : asked);
      for (long i = 0; i * R < width; ++i) rows.positions[row / R * width + i * R + row % R] = position - i;
      if (is_there) rows.first_position = smaller(rows.first_position, position);
    }
    return rows;
  }

  template <class Key>
  static void attend_part(const AttentionCall& call, const Queries& queries, const Sizes& sizes, const Rows& rows,
                          long index, float* part) {
    const long begin = index * Attention<Form>::part_keys;
    const long end = smaller(queries.num_keys, begin + Attention<Form>::part_keys);
    if (sizes.panel_rows == 4) {
      attend_part<4, Key>(call, queries, sizes, rows, begin, end, part);
    } else if constexpr (width > 4) {
      attend_part<8, Key>(call, queries, sizes, rows, begin, end, part);
    }
  }

  static void attend_part(const AttentionCall& call, const Queries& queries, const Sizes& sizes, const Rows& rows,
                          long index, float* part) {
    if (call.is_bf16) {
      attend_part<Bf16>(call, queries, sizes, rows, index, part);
    } else {
      attend_part<float>(call, queries, sizes, rows, index, part);
    }
  }

  // Merges one row's softmax over later keys into that over earlier ones.
  [[gnu::noinline]] static void fold(const Sizes& sizes, float* earlier, const float* later) {
    float *peak = earlier + sizes.columns, *total = peak + 1;
    const float own = *peak, other = later[sizes.columns], highest = own > other ? own : other;
    const Vec keep = exponential<Form>(V::splat(own - highest)), add = exponential<Form>(V::splat(other - highest));
    for (long i = 0; i < sizes.columns; i += width)
      V::store(earlier + i, V::load(earlier + i) * keep + V::load(later + i) * add);
    *total = *total * keep[0] + later[sizes.columns + 1] * add[0];
    *peak = highest;
  }

  static void finish(const AttentionCall& call, const Queries& queries, const Sizes& sizes, long row,
                     const float* softmax) {
    float* out = call.out + ((queries.row * call.t + queries.first) * call.h + row) * call.r;
    const float total = softmax[sizes.columns + 1];
    const float factor = total > 0 ? 1 / total : 0;  // no key was seen: all columns are 0
    long i = 0;
    for (; i + width <= call.r; i += width) V::store(out + i, V::load(softmax + i) * factor);
    for (; i < call.r; ++i) out[i] = softmax[i] * factor;
  }
};

template <class Form>
long Attention<Form>::scratch_floats(const AttentionCall& call, long count) {
  return typename AttentionOf<Form>::Sizes(call, count).scratch();
}

template <class Form>
long Attention<Form>::partial_floats(const AttentionCall& call, long count) {
  return typename AttentionOf<Form>::Sizes(call, count).partial();
}

template <class Form>
void Attention<Form>::attend(const AttentionCall& call, const Queries& queries, float* scratch) {
  using Of = AttentionOf<Form>;
  const typename Of::Sizes sizes(call, queries.count);
  const auto rows = Of::pack(call, queries, sizes, scratch);
  float *softmax = rows.wide + sizes.wide(), *part = softmax + sizes.partial();
  Of::attend_part(call, queries, sizes, rows, 0, softmax);
  for (long index = 1; index < num_parts(queries); ++index) {
    Of::attend_part(call, queries, sizes, rows, index, part);
    for (long row = 0; row < sizes.num_rows; ++row)
      Of::fold(sizes, softmax + row * sizes.row_floats, part + row * sizes.row_floats);
  }
  for (long row = 0; row < sizes.num_rows; ++row)
    Of::finish(call, queries, sizes, row, softmax + row * sizes.row_floats);
}

template <class Form>
void Attention<Form>::attend_parts(const AttentionCall& call, const Queries& queries, long begin, long end,
                                   float* scratch, float* partials) {
  using Of = AttentionOf<Form>;
  const typename Of::Sizes sizes(call, queries.count);
  const auto rows = Of::pack(call, queries, sizes, scratch);
  for (long index = begin; index < end; ++index)
    Of::attend_part(call, queries, sizes, rows, index, partials + index * sizes.partial());
}

template <class Form>
void Attention<Form>::merge(const AttentionCall& call, const Queries& queries, long row, float* partials) {
  using Of = AttentionOf<Form>;
  const typename Of::Sizes sizes(call, queries.count);
  float* softmax = partials + row * sizes.row_floats;
  for (long index = 1; index < num_parts(queries); ++index) Of::fold(sizes, softmax, softmax + index * sizes.partial());
  Of::finish(call, queries, sizes, row, softmax);
}

template <class Form>
void Exponential<Form>::apply(const float* x, float* y, long count) {
  using Of = AttentionOf<Form>;
  for (long i = 0; i < count; i += Of::width) Of::V::store(y + i, exponential<Form>(Of::V::load(x + i)));
}

}  // namespace moonshard
