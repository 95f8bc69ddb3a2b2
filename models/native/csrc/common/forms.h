// The instruction sets that every kernel is compiled for: a kernel is a template over one of these.
//
// Each is compiled in a translation unit of its own (forms/*.cc), with its own flags. What such a unit defines must be a
// template over the form, or in an anonymous namespace: the linker merges equal inline functions of several units, and
// might keep the one with instructions that this processor lacks. So these units include nothing of the standard
// library, and bindings and threads are compiled once, for every processor.
#pragma once

#include <cstdint>

namespace moonshard {

// A register as floats, as words, and half of one. `tokens`: activations of a register tile beside its four weight rows,
// as many as leave all sums in registers (16 of them, 32 with AVX-512).
struct Sse4 {
  static constexpr const char* name = "sse4";
  typedef float Vec __attribute__((vector_size(16)));
  typedef uint32_t Words __attribute__((vector_size(16)));
  typedef uint16_t Halves __attribute__((vector_size(8)));
  static constexpr int width = 4, tokens = 2;
};
struct Avx2 {
  static constexpr const char* name = "avx2";
  typedef float Vec __attribute__((vector_size(32)));
  typedef uint32_t Words __attribute__((vector_size(32)));
  typedef uint16_t Halves __attribute__((vector_size(16)));
  static constexpr int width = 8, tokens = 3;
};
struct Avx512 {
  static constexpr const char* name = "avx512";
  typedef float Vec __attribute__((vector_size(64)));
  typedef uint32_t Words __attribute__((vector_size(64)));
  typedef uint16_t Halves __attribute__((vector_size(32)));
  static constexpr int width = 16, tokens = 6;
};

}  // namespace moonshard
