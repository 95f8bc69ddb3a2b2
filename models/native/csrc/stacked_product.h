// y = x W^T or x W, with W one layer of a stack that is never cut. Of several groups (heads) each has its own x, W, y.
#pragma once

namespace moonshard {

struct StackedProductCall {
  const float* x;     // [n, groups, k]
  const void* layer;  // [groups, out, k], or [groups, k, out], of the stack's numbers: float, or bfloat16
  float* y;           // [n, groups, out]
  long n, groups, k, out;
  bool is_bf16, is_transposed;  // [groups, k, out]
};

template <class Form>
struct StackedProduct {
  // Before a group's columns: its rows of x as the weights want them, and how many floats these are. A layer that is
  // transposed wants none.
  static void pack(const StackedProductCall& call, long group, float* packed);
  static long packed_floats(const StackedProductCall& call);
  // The columns [begin, end) of a group's y, from as many rows, or columns, of its weight.
  static void columns(const StackedProductCall& call, const float* packed, long group, long begin, long end);
};

}  // namespace moonshard
