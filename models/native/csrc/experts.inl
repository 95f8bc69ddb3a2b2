// The work of `experts.h`, for the units in forms/.
#pragma once

#include "experts.h"
#include "common/exponential.h"
#include "common/tiles.h"

namespace moonshard {

template <class Form, class Weight>
struct ExpertsOf {
  using Packs = Packed<Form, Weight>;
  static constexpr long max_columns = Experts<Form>::max_columns, max_tokens = 48;  // 48: whole tiles of every form

  static void pack(const ExpertsCall& call, long begin, long end) {
    const long length = Packs::length(call.d);
    for (long token = begin; token < end; ++token)
      Packs::pack(call.x + token * call.d, call.d, call.packed + token * length);
  }

  static long room_floats(const ExpertsCall& call) {
    return Tiles<Form, Weight>::room_floats(call.d > call.f ? call.d : call.f);
  }

  static void hidden(const ExpertsCall& call, long expert, long begin, long end, float* room) {
    const long d = call.d, f = call.f, length = Packs::length(d);
    const Matrix<Form, Weight> gate(call.gate_up, 2 * expert), up(call.gate_up, 2 * expert + 1);
    for (long first = call.first_pair[expert]; first < call.first_pair[expert + 1]; first += max_tokens) {
      const long left = call.first_pair[expert + 1] - first, count = left < max_tokens ? left : max_tokens;
      const auto token = [&](long index) { return call.packed + call.pairs[first + index].token * length; };
      float gates[max_tokens][max_columns], ups[max_tokens][max_columns];
      product(gate, begin, end, count, d, token, gates, room);
      product(up, begin, end, count, d, token, ups, room);
      for (long t = 0; t < count; ++t) {
        gate_in_place(gates[t], ups[t], end - begin);
        Packs::pack(gates[t], end - begin, call.hidden + (first + t) * Packs::length(f) + begin);
      }
    }
  }

  static void out(const ExpertsCall& call, long begin, long end, float* room) {
    const long d = call.d, f = call.f, length = Packs::length(f);
    for (long token = 0; token < call.num_tokens; ++token)
      for (long i = begin; i < end; ++i) call.out[token * d + i] = 0;
    for (long expert = 0; expert < call.num_experts; ++expert) {
      const long first = call.first_pair[expert], count = call.first_pair[expert + 1] - first;
      const Matrix<Form, Weight> weight(call.down, expert);
      Tiles<Form, Weight>::cover(
          end - begin, count, f, [&](long row) { return weight.row(begin + row); },
          [&](long index) { return call.hidden + (first + index) * length; },
          [&](long index, long row, float sum) {
            const Pair& pair = call.pairs[first + index];
            call.out[pair.token * d + begin + row] += pair.weight * sum;
          },
          room);
    }
  }

 private:
  // silu(gate) * up, in whole registers, which there is room for. e^88 is as good as more.
  static void gate_in_place(float* gates, const float* ups, long count) {
    using V = Vectors<Form>;
    for (long i = 0; i < count; i += V::width) {
      const auto gate = V::load(gates + i), clamped = V::larger(gate, V::splat(-88));
      V::store(gates + i, gate * V::load(ups + i) / (1.0f + exponential<Form>(-clamped)));
    }
  }

  template <class TokenOf>
  [[gnu::noinline]] static void product(const Matrix<Form, Weight>& weight, long begin, long end, long count, long k,
                                        TokenOf token, float (*to)[max_columns], float* room) {
    Tiles<Form, Weight>::cover(
        end - begin, count, k, [&](long row) { return weight.row(begin + row); }, token,
        [&](long index, long row, float sum) { to[index][row] = sum; }, room);
  }
};

template <class Form>
void Experts<Form>::pack(const ExpertsCall& call, long begin, long end) {
  with_weight(call.gate_up.format, [&](auto weight) {
    ExpertsOf<Form, decltype(weight)>::pack(call, begin, end);
  });
}

template <class Form>
void Experts<Form>::hidden(const ExpertsCall& call, long expert, long begin, long end, float* room) {
  with_weight(call.gate_up.format, [&](auto weight) {
    ExpertsOf<Form, decltype(weight)>::hidden(call, expert, begin, end, room);
  });
}

template <class Form>
void Experts<Form>::out(const ExpertsCall& call, long begin, long end, float* room) {
  with_weight(call.gate_up.format, [&](auto weight) {
    ExpertsOf<Form, decltype(weight)>::out(call, begin, end, room);
  });
}

template <class Form>
long Experts<Form>::room_floats(const ExpertsCall& call) {
  return with_weight(call.gate_up.format, [&](auto weight) {
    return ExpertsOf<Form, decltype(weight)>::room_floats(call);
  });
}

}  // namespace moonshard
