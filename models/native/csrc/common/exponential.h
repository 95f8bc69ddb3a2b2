// e^x, of a register full of numbers.
#pragma once

#include "vectors.h"

namespace moonshard {

// For x up to 88, within 2 ulp; 0 below -87.33, where a float would be subnormal.
// x = n ln 2 + s with |s| <= ln 2 / 2 (ln 2 in two parts, after Cody and Waite), and e^s as its Taylor polynomial of
// degree 7, whose remainder is below 0.3466^8 / 8! * sqrt 2 = 7.4e-9 of e^s, an eighth of half an ulp.
template <class Form>
[[gnu::always_inline]] inline typename Form::Vec exponential(typename Form::Vec x) {
  using V = Vectors<Form>;
  using Vec = typename Form::Vec;
  using Words = typename Form::Words;
  const Vec lowest = V::splat(-87.33f), shift = V::splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to whole numbers
  const Vec clamped = V::larger(x, lowest);
  const Vec shifted = clamped * 1.44269504f + shift;
  const Vec n = shifted - shift;
  const Vec s = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  Vec p = V::splat(1.0f / 5040);
  p = p * s + 1.0f / 720;
  p = p * s + 1.0f / 120;
  p = p * s + 1.0f / 24;
  p = p * s + 1.0f / 6;
  p = p * s + 0.5f;
  p = p * (s * s) + s;
  p = p + 1.0f;
  const Words power = ((Words)shifted - 0x4B400000u + 127u) << 23;
  return x < lowest ? Vec{} : p * (Vec)power;
}

}  // namespace moonshard
