// Latent attention (MLA), absorbed, over pages: `models.attention.latent_attention`.
#pragma once

#include <cstdint>

namespace moonshard {

struct AttentionCall {
  const float* queries;      // [n, t, h, f]
  const void* pages;         // [num_blocks, num_layers, block_size, f]: float, or bfloat16
  const int32_t* tables;     // [n, m]
  const int32_t* positions;  // [n, t]
  float* out;                // [n, t, h, r]
  long t, h, f, r, m, num_blocks, num_layers, block_size, layer;
  float scale;
  bool is_bf16;
};

// Some query positions of one row of the batch, with all heads. They see no more than the first `num_keys` keys.
struct Queries {
  long row, first, count, num_keys;
};

// A query's keys are cut into parts of equal length, counted from the first. A part is one online softmax over tiles of
// keys; the parts' softmaxes are merged in order. So a result is the same, bit by bit, in whatever batch, with whatever
// other queries of its row, and on however many threads.
template <class Form>
struct Attention {
  static constexpr long part_keys = 256;

  static constexpr long num_parts(const Queries& queries) {
    return queries.num_keys <= part_keys ? 1 : (queries.num_keys + part_keys - 1) / part_keys;
  }

  // Room that `attend` and `attend_parts` need, on a cache line's boundary, and what one part's softmax takes.
  static long scratch_floats(const AttentionCall& call, long count);
  static long partial_floats(const AttentionCall& call, long count);

  static void attend(const AttentionCall& call, const Queries& queries, float* scratch);

  // As `attend` in two steps: parts [begin, end), each into its place among `partials`; then row by row of [count, h].
  static void attend_parts(const AttentionCall& call, const Queries& queries, long begin, long end, float* scratch,
                           float* partials);
  static void merge(const AttentionCall& call, const Queries& queries, long row, float* partials);
};

// For tests: e^x, of x up to 0, as the softmax takes it; `count` fills whole registers.
template <class Form>
struct Exponential {
  static void apply(const float* x, float* y, long count);
};

}  // namespace moonshard
