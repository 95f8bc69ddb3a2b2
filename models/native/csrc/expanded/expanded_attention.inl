// The work of `expanded_attention.h`, for the units in forms/.
//
// A panel holds keys as [feature][key] and values as [key][column]: so scores are registers of keys and results are
// registers of columns, and what a query gives to either product is one number, spread over a register. Of a panel's
// queries a few are held in registers at a time; the panel stays in the first-level caches meanwhile.
// Source: FlashAttention (arXiv 2205.14135), section 3.1.
#pragma once

#include "expanded_attention.h"
#include "../attention.inl"
#include "../common/tiles.h"

namespace moonshard {

template <class Form>
struct ExpandedAttentionOf {
  using V = Vectors<Form>;
  using Vec = typename V::Vec;
  using Plain = AttentionOf<Form>;
  using Call = ExpandedCall;
  static constexpr long width = V::width;
  static constexpr long keys = ExpandedAttention<Form>::panel_keys;
  static constexpr long rows = 6;                       // queries of a register tile
  static constexpr long columns = width == 16 ? 4 : 2;  // registers of a tile beside each of its queries

  static long padded(long count) { return V::whole(count, width); }
  // A head's panel: keys without their rotary part, which follows the same way, then values.
  static long panel_floats(const Call& call) { return keys * (call.nope + call.rope + padded(call.v)); }

  // ---- making panels

  // Where the latents of a panel's keys lie; a block that is none is the last.
  template <class Source>
  static const Source* latent(const Call& call, const Chunk& chunk, long key) {
    const long asked = call.tables[chunk.table_row * call.m + key / call.block_size];
    const long block = asked < 0 ? 0 : Plain::smaller(asked, call.num_blocks - 1);
    const long token = (block * call.num_layers + call.layer) * call.block_size + key % call.block_size;
    return static_cast<const Source*>(call.pages) + token * (call.r + call.rope);
  }

  template <class Weight, class Source>
  static void expand_panel(const Call& call, const Head& head, long first, float* panel, float* scratch) {
    const long count = Plain::smaller(keys, head.chunk.num_keys - first), f = call.r + call.rope;
    const float *latents[keys], *packed[keys];
    float* room = scratch;
    for (long key = 0; key < count; ++key) {
      const Source* from = latent<Source>(call, head.chunk, first + key);
      if constexpr (sizeof(Source) == sizeof(float)) {
        latents[key] = from;
      } else {
        V::widen_all(from, f, room);
        latents[key] = room;
        room += padded(f);
      }
      Packed<Form, Weight>::pack(latents[key], call.r, room);
      packed[key] = room;
      room += Packed<Form, Weight>::length(call.r);
    }
    float *rotated = panel + keys * call.nope, *values = rotated + keys * call.rope;
    const long stride = padded(call.v);
    if (count < keys || stride > call.v) __builtin_memset(panel, 0, panel_floats(call) * sizeof(float));
    for (long i = 0; i < call.rope; ++i) {
      for (long key = 0; key < count; ++key) rotated[i * keys + key] = latents[key][call.r + i];
    }
    const auto token = [&](long key) { return packed[key]; };
    product(Matrix<Form, Weight>(call.k_up, head.head), call.nope, count, call.r, token,
            [&](long key, long i, float sum) { panel[i * keys + key] = sum; }, room);
    product(Matrix<Form, Weight>(call.v_up, head.head), call.v, count, call.r, token,
            [&](long key, long i, float sum) { values[key * stride + i] = sum; }, room);
  }

  template <class Weight, class TokenOf, class Emit>
  [[gnu::noinline]] static void product(const Matrix<Form, Weight>& weight, long num_rows, long count, long k,
                                        TokenOf token, Emit emit, float* room) {
    Tiles<Form, Weight>::cover(num_rows, count, k, [&](long row) { return weight.row(row); }, token, emit, room);
  }

  template <class Weight>
  static void expand_panel(const Call& call, const Head& head, long first, float* panel, float* scratch) {
    if (call.is_bf16) {
      expand_panel<Weight, Bf16>(call, head, first, panel, scratch);
    } else {
      expand_panel<Weight, float>(call, head, first, panel, scratch);
    }
  }

  // ---- attending

  // What is known of some queries' softmaxes: for each the results so far, then a register of totals, then its peak.
  struct Queries {
    const float* queries[rows];  // those that are not there repeat the last
    long positions[rows];
    float* state[rows];
    long count, last;  // the highest position
  };

  static long state_floats(const Call& call) { return padded(call.v) + width + Plain::line; }

  static Queries queries_of(const Call& call, const Head& head, long first, long count, float* state) {
    Queries found;
    found.count = count, found.last = -1;
    for (long row = 0; row < rows; ++row) {
      const long index = head.chunk.first_row * call.t + first + Plain::smaller(row, count - 1);
      found.queries[row] = call.queries + (index * call.h + head.head) * (call.nope + call.rope);
      found.positions[row] = Plain::smaller(call.positions[index], head.chunk.num_keys - 1);
      found.state[row] = state + row * state_floats(call);
      if (found.positions[row] > found.last) found.last = found.positions[row];
    }
    return found;
  }

  // scores[row][key] = <query of row, key>, of `columns` registers of keys from `key` on.
  [[gnu::noinline]] static void score(const Queries& queries, const float* panel, long num_features, long key,
                                      float* scores) {
    Vec sums[rows][columns] = {};
    const float *a = queries.queries[0], *b = queries.queries[1], *c = queries.queries[2], *d = queries.queries[3],
                *e = queries.queries[4], *f = queries.queries[5];
    for (long i = 0; i < num_features; ++i) {
      const float* const from = panel + i * keys + key;
      add(from, sums, {a[i], b[i], c[i], d[i], e[i], f[i]});
    }
    for (long row = 0; row < rows; ++row) {
      for (long j = 0; j < columns; ++j) V::store(scores + row * keys + key + j * width, sums[row][j]);
    }
  }

  struct Numbers {
    float of[rows];
  };

  [[gnu::always_inline]] static inline void add(const float* from, Vec (&sums)[rows][columns], Numbers numbers) {
    Vec loaded[columns];
#pragma GCC unroll 4
    for (long j = 0; j < columns; ++j) loaded[j] = V::load(from + j * width);
#pragma GCC unroll 6
    for (long row = 0; row < rows; ++row) {
      const Vec number = V::splat(numbers.of[row]);
#pragma GCC unroll 4
      for (long j = 0; j < columns; ++j) sums[row][j] += number * loaded[j];
    }
  }

  // Makes weights of a row's scores, masked beyond its position; returns what was summed up before has to be
  // multiplied with.
  static float weigh(const Call& call, long first, long position, float* scores, float* state) {
    float *total = state + padded(call.v), *peak = total + width;
    const long num_seen = position - first + 1;
    Vec highest = V::splat(Plain::unseen);
    for (long i = 0; i < keys; i += width) {
      Vec x = V::load(scores + i) * call.scale;
      if (i + width > num_seen) {
        float lanes[width];
        V::store(lanes, x);
        for (long lane = 0; lane < width; ++lane)
          if (i + lane >= num_seen) lanes[lane] = -__builtin_inff();
        x = V::load(lanes);
      }
      V::store(scores + i, x);
      highest = V::larger(highest, x);
    }
    float lanes[width], above = *peak;
    V::store(lanes, highest);
    for (long lane = 0; lane < width; ++lane) above = lanes[lane] > above ? lanes[lane] : above;
    const float decay = exponential<Form>(V::splat(*peak - above))[0];
    Vec sum = V::load(total) * decay;
    const Vec peaks = V::splat(above);
    for (long i = 0; i < keys; i += width) {
      const Vec weight = exponential<Form>(V::load(scores + i) - peaks);
      V::store(scores + i, weight);
      sum += weight;
    }
    V::store(total, sum);
    *peak = above;
    return decay;
  }

  // state[row][column] = state * decay + weights x values, of `num` registers of columns.
  template <long num>
  [[gnu::noinline]] static void mix(const Queries& queries, const float* scores, const float* decay,
                                    const float* values, long num_keys, long stride, long column) {
    Vec sums[rows][num];
#pragma GCC unroll 6
    for (long row = 0; row < rows; ++row) {
#pragma GCC unroll 4
      for (long j = 0; j < num; ++j) sums[row][j] = V::load(queries.state[row] + column + j * width) * decay[row];
    }
    values += column;
    for (long key = 0; key < num_keys; ++key, values += stride) {
      Vec value[num];
#pragma GCC unroll 4
      for (long j = 0; j < num; ++j) value[j] = V::load(values + j * width);
#pragma GCC unroll 6
      for (long row = 0; row < rows; ++row) {
        const Vec weight = V::splat(scores[row * keys + key]);
#pragma GCC unroll 4
        for (long j = 0; j < num; ++j) sums[row][j] += weight * value[j];
      }
    }
    for (long row = 0; row < queries.count; ++row) {
      for (long j = 0; j < num; ++j) V::store(queries.state[row] + column + j * width, sums[row][j]);
    }
  }

  // Some queries against one panel.
  static void attend_panel(const Call& call, const Queries& queries, long first, const float* panel) {
    alignas(64) float scores[rows * keys];
    float decay[rows];
    const long num_features = call.nope + call.rope, stride = padded(call.v);
    const long num_keys = Plain::smaller(keys, queries.last - first + 1);
    for (long key = 0; key < num_keys; key += columns * width) score(queries, panel, num_features, key, scores);
    for (long row = 0; row < rows; ++row) {
      if (row < queries.count) {
        decay[row] = weigh(call, first, queries.positions[row], scores + row * keys, queries.state[row]);
      } else {
        decay[row] = 0;
      }
    }
    const float* values = panel + keys * num_features;
    long column = 0;
    for (; column + columns * width <= stride; column += columns * width)
      mix<columns>(queries, scores, decay, values, num_keys, stride, column);
    for (; column < stride; column += width) mix<1>(queries, scores, decay, values, num_keys, stride, column);
  }

  static void finish(const Call& call, const Head& head, long query, const float* state) {
    float* out = call.out + ((head.chunk.first_row * call.t + query) * call.h + head.head) * call.v;
    float total = 0;
    for (long lane = 0; lane < width; ++lane) total += state[padded(call.v) + lane];
    const float factor = total > 0 ? 1 / total : 0;  // no key was seen: all columns are 0
    for (long i = 0; i < call.v; ++i) out[i] = state[i] * factor;
  }
};

template <class Form>
long ExpandedAttention<Form>::expanded_floats(const ExpandedCall& call, long num_keys) {
  return num_panels(num_keys) * ExpandedAttentionOf<Form>::panel_floats(call);
}

template <class Form>
long ExpandedAttention<Form>::scratch_floats(const ExpandedCall& call) {
  using Of = ExpandedAttentionOf<Form>;
  const long wide = with_weight(call.k_up.format, [&](auto weight) {
    using Weight = decltype(weight);
    const long packed = Packed<Form, Weight>::length(call.r);
    return panel_keys * (Of::padded(call.r + call.rope) + packed) + Tiles<Form, Weight>::room_floats(call.r);
  });
  const long states = num_queries * Of::state_floats(call);
  return wide > states ? wide : states;
}

template <class Form>
void ExpandedAttention<Form>::expand(const ExpandedCall& call, const Head& head, long begin, long end, float* scratch) {
  using Of = ExpandedAttentionOf<Form>;
  for (long index = begin; index < end; ++index) {
    float* panel = head.expanded + index * Of::panel_floats(call);
    with_weight(call.k_up.format, [&](auto weight) {
      Of::template expand_panel<decltype(weight)>(call, head, index * panel_keys, panel, scratch);
    });
  }
}

template <class Form>
void ExpandedAttention<Form>::attend(const ExpandedCall& call, const Head& head, long first, long count,
                                     float* scratch) {
  using Of = ExpandedAttentionOf<Form>;
  const long floats = Of::state_floats(call), num_tiles = (count + Of::rows - 1) / Of::rows;
  typename Of::Queries tiles[num_queries / Of::rows];
  long last = -1;
  __builtin_memset(scratch, 0, count * floats * sizeof(float));
  for (long tile = 0; tile < num_tiles; ++tile) {
    const long start = tile * Of::rows, size = Of::Plain::smaller(Of::rows, count - start);
    tiles[tile] = Of::queries_of(call, head, first + start, size, scratch + start * floats);
    if (tiles[tile].last > last) last = tiles[tile].last;
  }
  for (long query = 0; query < count; ++query)
    scratch[query * floats + Of::padded(call.v) + Of::width] = Of::Plain::unseen;
  for (long index = 0; index * panel_keys <= last; ++index) {
    const float* panel = head.expanded + index * Of::panel_floats(call);
    for (long tile = 0; tile < num_tiles; ++tile) {
      if (tiles[tile].last >= index * panel_keys) Of::attend_panel(call, tiles[tile], index * panel_keys, panel);
    }
  }
  for (long query = 0; query < count; ++query) Of::finish(call, head, first + query, scratch + query * floats);
}

}  // namespace moonshard
