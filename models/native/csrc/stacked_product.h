// y = x W^T, with W one layer of a stack that is never cut. Of several groups (heads) each has its own x, W and y.
#pragma once

namespace moonshard {

struct StackedProductCall {
  const float* x;     // [n, groups, k]
  const void* layer;  // [groups, out, k], of the stack's numbers: float, or bfloat16
  float* y;           // [n, groups, out]
  long n, groups, k, out;
  bool is_bf16;
};

template <class Form>
struct StackedProduct {
  // The columns [begin, end) of a group's y, from as many rows of its weight.
  static void columns(const StackedProductCall& call, long group, long begin, long end);
};

}  // namespace moonshard
