// The binding of `stacked_product.h`: x [n, g, k] float, stack [l, g, out, k] or transposed [l, g, k, out], layer []
// -> y [n, g, out] float.
#include "stacked_product.h"

#include <algorithm>
#include <atomic>

#include "library.h"
#include "common/parallel.h"
#include "common/scratch.h"

namespace moonshard {
namespace {

namespace ffi = xla::ffi;

// What a thread packed last. Each packs for itself what it multiplies: to write where another core has read costs more
// than to pack twice.
struct OwnPacked {
  Scratch room;
  uint64_t call = 0;
  long group = 0;
};

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
  // Some panels for each thread, so that one that is interrupted leaves its share to the others; not more, for every
  // panel begins with a wait for memory.
  const long wanted = groups * out / (4 * std::max<long>(1, pool.num_threads()));
  const long whole = is_transposed ? 64 : 4;  // columns of a register tile, the widest form's
  const long most = std::min(wanted, (128 << 10) / std::max(1L, row_bytes));
  const long panel = std::clamp(most / whole * whole, whole, out + whole);
  const long num_panels = (out + panel - 1) / panel;
  const bool is_worth_it = groups * out * row_bytes * std::max(1L, n / 4) >= min_shared_bytes;
  static std::atomic<uint64_t> num_calls{0};
  const uint64_t number = ++num_calls;
  share(pool, is_worth_it, {groups * num_panels}, [&](long, long index) {
    static thread_local OwnPacked own;
    const long group = index / num_panels, begin = index % num_panels * panel;
    float* const packed = own.room.room_for(StackedProduct<Form>::packed_floats(call));
    if (own.call != number || own.group != group) StackedProduct<Form>::pack(call, group, packed);
    own.call = number, own.group = group;
    StackedProduct<Form>::columns(call, packed, group, begin, std::min(out, begin + panel));
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
