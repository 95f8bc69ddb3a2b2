// Scales that are factors as they are, one to as many columns as a matrix says: FP8's and INT8's.
#pragma once

#include "../common/vectors.h"

namespace moonshard {

template <class Form>
struct PlainScales {
  using Scale = float;
  using Factor = float;
  static constexpr bool has_one_to_a_block = false;

  struct Prepared {
    static constexpr long most = 1L << 62;
    const float* scales;
  };

  [[gnu::always_inline]] static inline bool prepare(const float* scales, long, Prepared& to) {
    to.scales = scales;
    return true;
  }
  [[gnu::always_inline]] static inline float factor(const Prepared& prepared, long index) {
    return prepared.scales[index];
  }
};

}  // namespace moonshard
