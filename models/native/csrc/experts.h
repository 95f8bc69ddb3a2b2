// The routed experts of one layer, on the tokens that chose them.
#pragma once

#include "formats/weights.h"

namespace moonshard {

// A token that chose an expert. Pairs are sorted by expert; those of one expert by token.
struct Pair {
  int token;
  float weight;
};

struct ExpertsCall {
  const float* x;       // [t, d]
  Weights gate_up;  // [e, 2, f, d], one layer's
  Weights down;     // [e, d, f]
  const Pair* pairs;
  const long* first_pair;  // [e + 1]: where each expert's pairs begin
  float* packed;           // room for x, packed: [t, packed d]
  float* hidden;           // room for silu(gate) * up, packed: [pairs, packed f]
  float* out;              // [t, d]
  long num_tokens, num_experts, d, f;
};

template <class Form>
struct Experts {
  // The tokens [begin, end) of x, packed.
  static void pack(const ExpertsCall& call, long begin, long end);
  // The columns [begin, end) of `hidden`, at most `max_columns`, of all pairs of one expert.
  // `begin` is a multiple of `block_columns`, which are whole blocks of `Packed` in every form.
  static constexpr long max_columns = 64, block_columns = 32;
  static void hidden(const ExpertsCall& call, long expert, long begin, long end, float* room);
  // The columns [begin, end) of `out`, of all tokens. Experts are added in order, whoever computes which columns.
  static void out(const ExpertsCall& call, long begin, long end, float* room);
  // Of the thread, for `hidden` and `out`.
  static long room_floats(const ExpertsCall& call);
};

}  // namespace moonshard
