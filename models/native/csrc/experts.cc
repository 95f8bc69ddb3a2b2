// The binding of `experts.h`: x [t, d] float, experts [t, k], weights [t, k] float, valid [t], gate_up [l, e, 2, f, d],
// down [l, e, d, f], each with its scales, layer [] -> out [t, d] float, and room: for x, [t, d'], and for what is
// between the two products, [t * k, f'], where d' and f' are whole blocks.
#include "experts.h"

#include <algorithm>
#include <vector>

#include "library.h"
#include "common/parallel.h"
#include "common/scratch.h"
#include "formats/buffers.h"

namespace moonshard {
namespace {

namespace ffi = xla::ffi;

constexpr long pack_floats = 8 << 10;  // of an item: what few tokens have is one thread's

// Sorts what valid tokens chose by expert, by counting. An expert that is not among them is another device's.
std::vector<Pair> sort_pairs(ffi::Buffer<ffi::S32> experts, const float* weights, const bool* valid,
                             std::vector<long>& first_pair) {
  const long t = experts.dimensions()[0], k = experts.dimensions()[1], e = static_cast<long>(first_pair.size()) - 1;
  const int32_t* chosen = experts.typed_data();
  const auto counts = [&](long index) { return valid[index / k] && chosen[index] >= 0 && chosen[index] < e; };
  for (long i = 0; i < t * k; ++i)
    if (counts(i)) ++first_pair[chosen[i] + 1];
  for (long i = 0; i < e; ++i) first_pair[i + 1] += first_pair[i];
  std::vector<Pair> pairs(first_pair[e]);
  std::vector<long> next(first_pair);
  for (long i = 0; i < t * k; ++i)
    if (counts(i)) pairs[next[chosen[i]]++] = {static_cast<int>(i / k), weights[i]};
  return pairs;
}

// Columns of an item of work: some items for each thread, each of whole blocks.
long panel_of(long columns, long num_items_wanted, long block, long most) {
  const long panel = columns / std::max(1L, num_items_wanted) / block * block;
  return std::clamp(panel, block, most);
}

template <class Form>
ffi::Error run(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::S32> experts,
               ffi::Buffer<ffi::F32> weights, ffi::Buffer<ffi::PRED> valid, ffi::AnyBuffer gate_up,
               ffi::AnyBuffer gate_up_scales, ffi::AnyBuffer down, ffi::AnyBuffer down_scales,
               ffi::BufferR0<ffi::S32> layer, ffi::Result<ffi::Buffer<ffi::F32>> out,
               ffi::Result<ffi::Buffer<ffi::F32>> packed, ffi::Result<ffi::Buffer<ffi::F32>> hidden,
               int64_t gate_up_rows, int64_t gate_up_columns, int64_t down_rows, int64_t down_columns) {
  const auto of = gate_up.dimensions(), of_down = down.dimensions(), of_x = x.dimensions();
  if (of.size() != 5 || of_down.size() != 4 || of_x.size() != 2 || experts.dimensions().size() != 2)
    return ffi::Error::InvalidArgument("experts takes x [t, d], experts [t, k], [l, e, 2, f, d] and [l, e, d, f]");
  constexpr long block = Experts<Form>::block_columns;
  const auto whole = [](size_t count) { return (count + block - 1) / block * block; };
  const long t = of_x[0], d = of_x[1], e = of[1], f = of[3];
  if (of[2] != 2 || of_down[0] != of[0] || of_down[1] != e || of_down[2] != d ||
      experts.dimensions()[0] != t || weights.element_count() != experts.element_count() ||
      valid.dimensions().front() != t ||
      packed->element_count() != t * whole(d) || hidden->element_count() != experts.element_count() * whole(f))
    return ffi::Error::InvalidArgument("experts was given shapes that do not fit each other");
  if (gate_up.element_type() != down.element_type())
    return ffi::Error::InvalidArgument("experts takes weights of one format");
  const auto of_hidden = layer_of({gate_up, gate_up_scales}, layer, {2 * e, f, d, gate_up_rows, gate_up_columns});
  const auto of_out = layer_of({down, down_scales}, layer, {e, d, f, down_rows, down_columns});
  if (of_hidden.has_error()) return of_hidden.error();
  if (of_out.has_error()) return of_out.error();

  std::vector<long> first_pair(e + 1);
  const std::vector<Pair> pairs = sort_pairs(experts, weights.typed_data(), valid.typed_data(), first_pair);
  std::vector<long> chosen;
  for (long expert = 0; expert < e; ++expert)
    if (first_pair[expert] < first_pair[expert + 1]) chosen.push_back(expert);

  const ExpertsCall call{x.typed_data(),     *of_hidden,           *of_out,              pairs.data(),
                         first_pair.data(),  packed->typed_data(), hidden->typed_data(), out->typed_data(),
                         t,                  e,                    d,                    f};
  const long num_chosen = static_cast<long>(chosen.size()), num_items = 8 * std::max<long>(1, pool.num_threads());
  const long first_panel = panel_of(f, num_items / std::max(1L, num_chosen), block, Experts<Form>::max_columns);
  const long per_expert = (f + first_panel - 1) / first_panel, panel = panel_of(d, num_items / 2, 16, 128);
  const long pack_tokens = std::max(1L, pack_floats / std::max(1L, d));
  const bool is_worth_it = num_chosen * 3 * f * of_hidden->row_bytes >= min_shared_bytes;
  const std::initializer_list<long> counts{(t + pack_tokens - 1) / pack_tokens, num_chosen * per_expert,
                                           (d + panel - 1) / panel};
  share(pool, is_worth_it, counts, [&](long stage, long index) {
    static thread_local Scratch kept;
    float* const room = kept.room_for(Experts<Form>::room_floats(call));
    if (stage == 0) {
      Experts<Form>::pack(call, index * pack_tokens, std::min(t, (index + 1) * pack_tokens));
    } else if (stage == 1) {
      const long begin = index % per_expert * first_panel;
      Experts<Form>::hidden(call, chosen[index / per_expert], begin, std::min(f, begin + first_panel), room);
    } else {
      Experts<Form>::out(call, index * panel, std::min(d, (index + 1) * panel), room);
    }
  });
  return ffi::Error::Success();
}

template <class Form>
XLA_FFI_Error* handle(XLA_FFI_CallFrame* frame) {
  static const auto* handler = ffi::Ffi::Bind()
                                   .Ctx<ffi::ThreadPool>()
                                   .Arg<ffi::Buffer<ffi::F32>>()
                                   .Arg<ffi::Buffer<ffi::S32>>()
                                   .Arg<ffi::Buffer<ffi::F32>>()
                                   .Arg<ffi::Buffer<ffi::PRED>>()
                                   .Arg<ffi::AnyBuffer>()
                                   .Arg<ffi::AnyBuffer>()
                                   .Arg<ffi::AnyBuffer>()
                                   .Arg<ffi::AnyBuffer>()
                                   .Arg<ffi::BufferR0<ffi::S32>>()
                                   .Ret<ffi::Buffer<ffi::F32>>()
                                   .Ret<ffi::Buffer<ffi::F32>>()
                                   .Ret<ffi::Buffer<ffi::F32>>()
                                   .template Attr<int64_t>("gate_up_rows")
                                   .template Attr<int64_t>("gate_up_columns")
                                   .template Attr<int64_t>("down_rows")
                                   .template Attr<int64_t>("down_columns")
                                   .To(run<Form>)
                                   .release();
  return handler->Call(frame);
}

}  // namespace

const Kernel experts{"experts", handle<Sse4>, handle<Avx2>, handle<Avx512>};

}  // namespace moonshard
