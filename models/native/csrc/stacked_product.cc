// The binding of `stacked_product.h`: x [n, g, k] float, stack [l, g, out, k] or transposed [l, g, k, out] and its
// scales, layer [] -> y [n, g, out] float.
#include "stacked_product.h"

#include <algorithm>
#include <atomic>

#include "library.h"
#include "common/parallel.h"
#include "common/scratch.h"
#include "formats/buffers.h"

namespace moonshard {
namespace {

namespace ffi = xla::ffi;

// What a thread packed last. Each packs for itself what it multiplies: with one thread's for all, calls of 8 rows took up
// to a third longer (two cores).
struct OwnPacked {
  Scratch room;
  uint64_t call = 0;
  long group = 0;
};

template <class Form>
ffi::Error run(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer stack, ffi::AnyBuffer scales,
               ffi::BufferR0<ffi::S32> layer, ffi::Result<ffi::Buffer<ffi::F32>> y, bool is_transposed,
               int64_t block_rows, int64_t block_columns) {
  const auto of = stack.dimensions(), of_x = x.dimensions(), of_y = y->dimensions();
  if (of.size() != 4 || of_x.size() != 3 || of_y.size() != 3 || of_x[1] != of[1] || of_y[0] != of_x[0] ||
      of_y[1] != of[1] || of[2] != (is_transposed ? of_x[2] : of_y[2]))
    return ffi::Error::InvalidArgument("stacked_product makes [n, g, out] of [n, g, k] and a stack [l, g, out, k], "
                                       "or of one that is transposed, [l, g, k, out]");
  const long n = of_x[0], groups = of[1], out = of_y[2], k = of_x[2];
  const auto found = layer_of({stack, scales}, layer,
                              {groups, of[2], is_transposed ? out : k, block_rows, block_columns});
  if (found.has_error()) return found.error();
  const Weights weights = *found;
  const StackedProductCall call{x.typed_data(), weights, y->typed_data(), n, groups, k, out, is_transposed};
  const long out_bytes = is_transposed ? weights.row_bytes * k / std::max(1L, out) : weights.row_bytes;
  // Some panels for each thread, so that one that is interrupted leaves its share to the others; not more, for every
  // panel begins with a wait for memory.
  const long wanted = groups * out / (4 * std::max<long>(1, pool.num_threads()));
  const long whole = is_transposed ? StackedProduct<Form>::block_columns : 4;  // columns of a register tile
  const long most = std::min(wanted, (128 << 10) / std::max(1L, out_bytes));
  const long panel = std::clamp(most / whole * whole, whole, out + whole);
  const long num_panels = (out + panel - 1) / panel;
  const bool is_worth_it = groups * out * out_bytes * std::max(1L, n / 4) >= min_shared_bytes;
  static std::atomic<uint64_t> num_calls{0};
  const uint64_t number = ++num_calls;
  share(pool, is_worth_it, {groups * num_panels}, [&](long, long index) {
    static thread_local OwnPacked own;
    const long group = index / num_panels, begin = index % num_panels * panel;
    float* const room = own.room.room_for(StackedProduct<Form>::room_floats(call));
    if (own.call != number || own.group != group) StackedProduct<Form>::pack(call, group, room);
    own.call = number, own.group = group;
    StackedProduct<Form>::columns(call, room, group, begin, std::min(out, begin + panel));
  });
  return ffi::Error::Success();
}

template <class Form>
XLA_FFI_Error* handle(XLA_FFI_CallFrame* frame) {
  static const auto* handler = ffi::Ffi::Bind()
                                   .Ctx<ffi::ThreadPool>()
                                   .Arg<ffi::Buffer<ffi::F32>>()
                                   .Arg<ffi::AnyBuffer>()
                                   .Arg<ffi::AnyBuffer>()
                                   .Arg<ffi::BufferR0<ffi::S32>>()
                                   .Ret<ffi::Buffer<ffi::F32>>()
                                   .template Attr<bool>("is_transposed")
                                   .template Attr<int64_t>("block_rows")
                                   .template Attr<int64_t>("block_columns")
                                   .To(run<Form>)
                                   .release();
  return handler->Call(frame);
}

}  // namespace

const Kernel stacked_product{"stacked_product", handle<Sse4>, handle<Avx2>, handle<Avx512>};

}  // namespace moonshard
