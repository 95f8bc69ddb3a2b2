// The work of `stacked_product.h`, for the units in forms/.
#pragma once

#include "stacked_product.h"
#include "common/column_tiles.h"
#include "common/tiles.h"

namespace moonshard {

template <class Form, class Weight>
struct StackedProductOf {
  static void pack(const StackedProductCall& call, long begin, long end) {
    const long length = Packed<Form, Weight>::length(call.k);
    for (long row = begin; row < end; ++row)
      Packed<Form, Weight>::pack(call.x + row * call.k, call.k, call.packed + row * length);
  }

  static void columns(const StackedProductCall& call, long group, long begin, long end) {
    if (call.is_transposed) return columns_of_transposed(call, group, begin, end);
    const Weight* weight = static_cast<const Weight*>(call.layer) + (group * call.out + begin) * call.k;
    const long length = Packed<Form, Weight>::length(call.k);
    const float* x = call.packed + group * length;
    float* y = call.y + group * call.out + begin;
    Tiles<Form, Weight>::cover(
        end - begin, call.n, call.k, [&](long row) { return weight + row * call.k; },
        [&](long token) { return x + token * call.groups * length; },
        [&](long token, long row, float sum) { y[token * call.groups * call.out + row] = sum; });
  }

  static void columns_of_transposed(const StackedProductCall& call, long group, long begin, long end) {
    const Weight* weight = static_cast<const Weight*>(call.layer) + group * call.k * call.out + begin;
    ColumnTiles<Form, Weight>::cover(call.x + group * call.k, call.groups * call.k, call.n, weight, call.out, call.k,
                                     call.y + group * call.out + begin, call.groups * call.out, end - begin);
  }
};

template <class Form>
long StackedProduct<Form>::packed_floats(const StackedProductCall& call) {
  return Packed<Form, float>::length(call.k);  // the same beside all weights
}

template <class Form>
void StackedProduct<Form>::pack(const StackedProductCall& call, long begin, long end) {
  if (call.is_bf16) {
    StackedProductOf<Form, Bf16>::pack(call, begin, end);
  } else {
    StackedProductOf<Form, float>::pack(call, begin, end);
  }
}

template <class Form>
void StackedProduct<Form>::columns(const StackedProductCall& call, long group, long begin, long end) {
  if (call.is_bf16) {
    StackedProductOf<Form, Bf16>::columns(call, group, begin, end);
  } else {
    StackedProductOf<Form, float>::columns(call, group, begin, end);
  }
}

}  // namespace moonshard
