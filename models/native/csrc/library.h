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

// Pages are float or bfloat16.
inline bool is_bf16(const xla::ffi::AnyBuffer& stack) { return stack.element_type() == xla::ffi::BF16; }
inline bool is_float(const xla::ffi::AnyBuffer& stack) {
  return is_bf16(stack) || stack.element_type() == xla::ffi::F32;
}

}  // namespace moonshard
