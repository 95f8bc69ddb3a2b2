// Latent attention (MLA) over pages, its keys and values expanded: `models.expanded_attention`.
#pragma once

#include "../formats/weights.h"

namespace moonshard {

struct ExpandedCall {
  const float* queries;      // [n, t, h, nope + rope]
  const void* pages;         // [num_blocks, num_layers, block_size, r + rope]: float, or bfloat16
  const int32_t* tables;     // [n, m]
  const int32_t* positions;  // [n, t]
  Weights k_up;              // [h, nope, r], one layer's
  Weights v_up;              // [h, v, r], in the same format
  float* out;                // [n, t, h, v]
  long n, t, h, nope, rope, r, v, m, num_blocks, num_layers, block_size, layer;
  float scale;
  bool is_bf16;
};

// Rows of the batch that have the same blocks: a chunk of a prompt. The table's row is one with the most blocks.
struct Chunk {
  long first_row, num_rows, table_row, num_keys;
};

// One head of a chunk, and where its expanded keys and values lie.
struct Head {
  Chunk chunk;
  long head;
  float* expanded;
};

// Keys are expanded in panels, the first with the first key; a query's softmax goes over its panels in order. So a
// result is the same, bit by bit, in whatever batch, with whatever other queries, and on however many threads.
template <class Form>
struct ExpandedAttention {
  static constexpr long panel_keys = 64;
  static constexpr long num_queries = 48;  // of an item of work, at most

  static long num_panels(long num_keys) { return (num_keys + panel_keys - 1) / panel_keys; }
  static long expanded_floats(const ExpandedCall& call, long num_keys);
  static long scratch_floats(const ExpandedCall& call);

  // Panels [begin, end) of a head.
  static void expand(const ExpandedCall& call, const Head& head, long begin, long end, float* scratch);

  // Queries [first, first + count) of the chunk's, counted over its rows.
  static void attend(const ExpandedCall& call, const Head& head, long first, long count, float* scratch);
};

}  // namespace moonshard
