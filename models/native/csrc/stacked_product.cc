// The binding of `stacked_product.h`: x [n, g, k] float, stack [l, g, out, k] or transposed [l, g, k, out], layer []
// -> y [n, g, out] float.
#include "stacked_product.h"

#include <algorithm>

#include "library.h"
#include "common/parallel.h"

namespace moonshard {
namespace {

namespace ffi = xla::ffi;

template <class Form>
ffi::Error run(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer stack, ffi::BufferR0<ffi::S32> layer,
               ffi::Result<ffi::Buffer<ffi::F32>> y, bool is_transposed) {
  const auto of = stack.dimensions(), of_x = x.dimensions(), of_y = y->dimensions();
  const int out_at = is_transposed ? 3 : 2, k_at = is_transposed ? 2 : 3;
  if (of.size() != 4 || of_x.size() != 3 || of_y.size() != 3 || of_x[1] != of[1] || of_x[2] != of[k_at] ||
      of_y[0] != of_x[0] || of_y[1] != of[1] || of_y[2] != of[out_at])
    return ffi::Error::InvalidArgument("stacked_product makes [n, g, out] of [n, g, k] and a stack [l, g, out, k], "
                                       "or of one that is transposed, [l, g, k, out]");
  if (!is_weight(stack)) return ffi::Error::InvalidArgument("stacked_product takes weights of float or bfloat16");
  const long n = of_x[0], groups = of[1], out = of[out_at], k = of[k_at], row_bytes = k * itemsize(stack);
  const StackedProductCall call{x.typed_data(), layer_of(stack, layer), y->typed_data(), n, groups, k, out,
                                is_bf16(stack), is_transposed};
  // Some panels for each thread, so that one that is interrupted leaves its share to the others.
  const long wanted = groups * out / (8 * std::max<long>(1, pool.num_threads()));
  const long whole = is_transposed ? 64 : 4;  // columns of a register tile, the widest form's
  const long panel = std::clamp(std::min(wanted, (128 << 10) / std::max(1L, row_bytes)) / whole * whole, whole, out + whole);
  const long num_panels = (out + panel - 1) / panel;
  const bool is_worth_it = groups * out * row_bytes * std::max(1L, n / 4) >= min_shared_bytes;
  share(pool, is_worth_it, {groups * num_panels}, [&](long, long index) {
    const long begin = index % num_panels * panel;
    StackedProduct<Form>::columns(call, index / num_panels, begin, std::min(out, begin + panel));
  });
  return ffi::Error::Success();
}

template <class Form>
XLA_FFI_Error* handle(XLA_FFI_CallFrame* frame) {
  static const auto* handler = ffi::Ffi::Bind()
                                   .Ctx<ffi::ThreadPool>()
                                   .Arg<ffi::Buffer<ffi::F32>>()
                                   .Arg<ffi::AnyBuffer>()
                                   .Arg<ffi::BufferR0<ffi::S32>>()
                                   .Ret<ffi::Buffer<ffi::F32>>()
                                   .template Attr<bool>("is_transposed")
                                   .To(run<Form>)
                                   .release();
  return handler->Call(frame);
}

}  // namespace

const Kernel stacked_product{"stacked_product", handle<Sse4>, handle<Avx2>, handle<Avx512>};

}  // namespace moonshard
