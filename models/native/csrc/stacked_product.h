// y = x W^T or x W, with W one layer of a stack that is never cut. Of several groups (heads) each has its own x, W, y.
#pragma once

namespace moonshard {

struct StackedProductCall {
  const float* x;     // [n, groups, k]
  const void* layer;  // [groups, out, k], or [groups, k, out], of the stack's numbers: float, or bfloat16
  float* y;           // [n, groups, out]
  float* packed;      // room for `pack`; not used where the layer is transposed
  long n, groups, k, out;
  bool is_bf16, is_transposed;  // [groups, k, out]
};

template <class Form>
struct StackedProduct {
  // Before all columns: the rows [begin, end) of x [n * groups, k], into `packed`, and what one of them takes there.
  static void pack(const StackedProductCall& call, long begin, long end);
  static long packed_floats(const StackedProductCall& call);
  // The columns [begin, end) of a group's y, from as many rows, or columns, of its weight.
  static void columns(const StackedProductCall& call, long group, long begin, long end);
};

}  // namespace moonshard
