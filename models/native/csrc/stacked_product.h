// y = x W^T or x W, with W one layer of a stack that is never cut. Of several groups (heads) each has its own x, W, y.
#pragma once

#include "formats/weights.h"

namespace moonshard {

struct StackedProductCall {
  const float* x;  // [n, groups, k]
  Weights layer;   // [groups, out, k], or transposed: [groups, k, out]
  float* y;        // [n, groups, out]
  long n, groups, k, out;
  bool is_transposed;
};

template <class Form>
struct StackedProduct {
  // Before a group's columns: its rows of x as the weights want them, into the thread's room, which `columns` then finds
  // there and uses the rest of. A layer that is transposed needs neither.
  static void pack(const StackedProductCall& call, long group, float* room);
  static long room_floats(const StackedProductCall& call);
  // The columns [begin, end) of a group's y, from as many rows, or columns, of its weight. `begin` is a multiple of
  // `block_columns` where the layer is transposed: whole blocks of every form.
  static constexpr long block_columns = 64;
  static void columns(const StackedProductCall& call, float* room, long group, long begin, long end);
};

}  // namespace moonshard
