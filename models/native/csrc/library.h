// What bindings share, and how a kernel makes itself known: a name, and a handler for each form.
#pragma once

#include "common/forms.h"
#include "xla/ffi/api/ffi.h"

namespace moonshard {

using Handler = XLA_FFI_Error* (*)(XLA_FFI_CallFrame*);

struct Kernel {
  const char* name;
  Handler sse4, avx2, avx512;
};

// Every kernel there is; `library.cc` lists them too.
extern const Kernel attention, expanded_attention, experts, exponential, stacked_product, zeros;

// Weights are float or bfloat16.
inline bool is_bf16(const xla::ffi::AnyBuffer& stack) { return stack.element_type() == xla::ffi::BF16; }
inline bool is_weight(const xla::ffi::AnyBuffer& stack) {
  return is_bf16(stack) || stack.element_type() == xla::ffi::F32;
}
inline long itemsize(const xla::ffi::AnyBuffer& stack) { return is_bf16(stack) ? 2 : 4; }

// Where a layer begins in a stack [layers, ...]. As a dynamic slice does it, an index that is too large is the last.
inline const void* layer_of(const xla::ffi::AnyBuffer& stack, const xla::ffi::BufferR0<xla::ffi::S32>& layer) {
  const long num_layers = stack.dimensions()[0], asked = *layer.typed_data();
  const long index = asked < 0 ? 0 : asked < num_layers ? asked : num_layers - 1;
  const long size = num_layers ? static_cast<long>(stack.element_count()) / num_layers : 0;
  return static_cast<const char*>(stack.untyped_data()) + index * size * itemsize(stack);
}

}  // namespace moonshard
