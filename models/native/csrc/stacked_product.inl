// The work of `stacked_product.h`, for the units in forms/.
#pragma once

#include "stacked_product.h"
#include "common/column_tiles.h"
#include "common/tiles.h"

namespace moonshard {

template <class Form, class Weight>
struct StackedProductOf {
  static void pack(const StackedProductCall& call, long group, float* packed) {
    const long length = Packed<Form, Weight>::length(call.k);
    for (long row = 0; row < call.n; ++row)
      Packed<Form, Weight>::pack(call.x + (row * call.groups + group) * call.k, call.k, packed + row * length);
  }

  static void columns(const StackedProductCall& call, const float* packed, long group, long begin, long end) {
    if (call.is_transposed) return columns_of_transposed(call, group, begin, end);
    const Weight* weight = static_cast<const Weight*>(call.layer) + (group * call.out + begin) * call.k;
    const long length = Packed<Form, Weight>::length(call.k);
    float* y = call.y + group * call.out + begin;
    Tiles<Form, Weight>::cover(
        end - begin, call.n, call.k, [&](long row) { return weight + row * call.k; },
        [&](long token) { return packed + token * length; },
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
  return call.is_transposed ? 0 : call.n * Packed<Form, float>::length(call.k);  // the same beside all weights
}

template <class Form>
void StackedProduct<Form>::pack(const StackedProductCall& call, long group, float* packed) {
  if (call.is_transposed) return;
  if (call.is_bf16) {
    StackedProductOf<Form, Bf16>::pack(call, group, packed);
  } else {
    StackedProductOf<Form, float>::pack(call, group, packed);
  }
}

template <class Form>
void StackedProduct<Form>::columns(const StackedProductCall& call, const float* packed, long group, long begin,
                                   long end) {
  if (call.is_bf16) {
    StackedProductOf<Form, Bf16>::columns(call, packed, group, begin, end);
  } else {
    StackedProductOf<Form, float>::columns(call, packed, group, begin, end);
  }
}

}  // namespace moonshard
