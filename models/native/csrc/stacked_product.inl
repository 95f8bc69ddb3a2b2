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

  static long room_floats(const StackedProductCall& call) {
    return call.n * Packed<Form, Weight>::length(call.k) + Tiles<Form, Weight>::room_floats(call.k);
  }

  static void columns(const StackedProductCall& call, float* room, long group, long begin, long end) {
    const Matrix<Form, Weight> weight(call.layer, group);
    float* y = call.y + group * call.out;
    const long length = Packed<Form, Weight>::length(call.k), stride = call.groups * call.out;
    if (call.is_transposed) {
      const float* x = call.x + group * call.k;
      return ColumnTiles<Form, Weight>::cover(x, call.groups * call.k, call.n, weight, call.k, y, stride, begin, end);
    }
    Tiles<Form, Weight>::cover(
        end - begin, call.n, call.k, [&](long row) { return weight.row(begin + row); },
        [&](long token) { return room + token * length; },
        [&](long token, long row, float sum) { y[token * stride + begin + row] = sum; }, room + call.n * length);
  }
};

template <class Form>
long StackedProduct<Form>::room_floats(const StackedProductCall& call) {
  if (call.is_transposed) return 0;
  return with_weight(call.layer.format, [&](auto weight) {
    return StackedProductOf<Form, decltype(weight)>::room_floats(call);
  });
}

template <class Form>
void StackedProduct<Form>::pack(const StackedProductCall& call, long group, float* room) {
  if (call.is_transposed) return;
  with_weight(call.layer.format, [&](auto weight) {
    StackedProductOf<Form, decltype(weight)>::pack(call, group, room);
  });
}

template <class Form>
void StackedProduct<Form>::columns(const StackedProductCall& call, float* room, long group, long begin, long end) {
  with_weight(call.layer.format, [&](auto weight) {
    StackedProductOf<Form, decltype(weight)>::columns(call, room, group, begin, end);
  });
}

}  // namespace moonshard
