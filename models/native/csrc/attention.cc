// The binding of `attention.h`: queries [n, t, h, f] float, pages [blocks, layers, block_size, f], layer [],
// block_tables [n, m], positions [n, t] -> out [n, t, h, r] float. And that of its exponential, for tests.
#include "attention.h"

#include <algorithm>
#include <vector>

#include "library.h"
#include "common/parallel.h"
#include "common/scratch.h"

namespace moonshard {
namespace {

namespace ffi = xla::ffi;

constexpr long max_rows = 128;        // query positions times heads of an item, unless one position has more heads
constexpr long items_per_thread = 4;  // so that a thread that is interrupted leaves its share to the others
constexpr long max_partial_floats = 8 << 20;  // beyond, what could be cut over threads is not

// Parts of some queries' keys: all of them, or those of one item among several, whose softmaxes are merged afterwards.
struct Item {
  Queries queries;
  long begin, end;
  float* partials;  // of all parts; null for all
};

struct Merge {
  Queries queries;
  long row;
  float* partials;
};

std::vector<Queries> queries_of(const AttentionCall& call, long n) {
  const long most = std::max(1L, max_rows / call.h);
  std::vector<Queries> all;
  for (long row = 0; row < n; ++row) {
    for (long first = 0, count; first < call.t; first += count) {
      count = std::min(most, call.t - first);
      const int32_t* positions = call.positions + row * call.t + first;
      // Padding behind a row's tokens is an item of its own, which looks at no key.
      const auto is_padding = [&](long query) { return positions[query] < 0; };
      for (const bool begins_so = is_padding(0); is_padding(count - 1) != begins_so;) --count;
      const long last = *std::max_element(positions, positions + count);
      all.push_back({row, first, count, std::max(0L, std::min(last + 1, call.m * call.block_size))});
    }
  }
  return all;
}

template <class Form>
void attend_all(ffi::ThreadPool& pool, const AttentionCall& call, long n) {
  static thread_local Scratch kept_partials;
  const std::vector<Queries> all = queries_of(call, n);
  long num_parts = 0, num_keys = 0;
  for (const Queries& queries : all) {
    num_parts += Attention<Form>::num_parts(queries);
    num_keys += queries.num_keys * queries.count;
  }
  const long fair = std::max(1L, num_parts / (items_per_thread * std::max<long>(1, pool.num_threads())));
  std::vector<Item> items;
  std::vector<Merge> merges;
  std::vector<long> offsets;
  long partial_floats = 0;
  for (const Queries& queries : all) {
    const long parts = Attention<Form>::num_parts(queries);
    const long floats = parts * Attention<Form>::partial_floats(call, queries.count);
    const bool is_cut = parts > fair && partial_floats + floats <= max_partial_floats;
    const long step = is_cut ? fair : parts;
    for (long begin = 0; begin < parts; begin += step) {
      items.push_back({queries, begin, std::min(parts, begin + step), nullptr});
      offsets.push_back(is_cut ? partial_floats : -1);
    }
    if (is_cut) partial_floats += floats;
  }
  float* const partials = kept_partials.room_for(partial_floats);
  for (size_t i = 0; i < items.size(); ++i) {
    if (offsets[i] < 0) continue;
    items[i].partials = partials + offsets[i];
    if (items[i].begin > 0) continue;
    for (long row = 0; row < items[i].queries.count * call.h; ++row)
      merges.push_back({items[i].queries, row, items[i].partials});
  }
  const bool is_worth_it = num_keys * call.h * call.f * 2 >= min_shared_bytes * 8;
  const std::initializer_list<long> counts{static_cast<long>(items.size()), static_cast<long>(merges.size())};
  share(pool, is_worth_it, counts, [&](long stage, long index) {
    if (stage == 1) {
      const Merge& merge = merges[index];
      return Attention<Form>::merge(call, merge.queries, merge.row, merge.partials);
    }
    static thread_local Scratch kept;
    const Item& item = items[index];
    float* const scratch = kept.room_for(Attention<Form>::scratch_floats(call, item.queries.count));
    if (item.partials == nullptr) return Attention<Form>::attend(call, item.queries, scratch);
    Attention<Form>::attend_parts(call, item.queries, item.begin, item.end, scratch, item.partials);
  });
}

template <class Form>
ffi::Error run(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> queries, ffi::AnyBuffer pages,
               ffi::BufferR0<ffi::S32> layer, ffi::Buffer<ffi::S32> tables, ffi::Buffer<ffi::S32> positions,
               ffi::Result<ffi::Buffer<ffi::F32>> out, float scale) {
  const auto q = queries.dimensions(), of = pages.dimensions(), m = tables.dimensions(), at = positions.dimensions(),
             to = out->dimensions();
  if (q.size() != 4 || of.size() != 4 || m.size() != 2 || at.size() != 2 || to.size() != 4)
    return ffi::Error::InvalidArgument("attention takes queries [n, t, h, f], pages [blocks, layers, block_size, f], "
                                       "block tables [n, m] and positions [n, t], and gives [n, t, h, r]");
  if (of[3] != q[3] || m[0] != q[0] || at[0] != q[0] || at[1] != q[1] || to[0] != q[0] || to[1] != q[1] ||
      to[2] != q[2] || to[3] > q[3])
    return ffi::Error::InvalidArgument("attention was given shapes that do not fit each other");
  if (!is_float(pages)) return ffi::Error::InvalidArgument("attention takes pages of float or bfloat16");
  if (out->element_count() == 0) return ffi::Error::Success();
  if (pages.element_count() == 0) return ffi::Error::InvalidArgument("attention takes pages of one block at least");
  AttentionCall call;
  call.queries = queries.typed_data();
  call.pages = pages.untyped_data();
  call.tables = tables.typed_data();
  call.positions = positions.typed_data();
  call.out = out->typed_data();
  call.t = q[1], call.h = q[2], call.f = q[3], call.r = to[3], call.m = m[1];
  call.num_blocks = of[0], call.num_layers = of[1], call.block_size = of[2];
  call.layer = std::clamp<long>(*layer.typed_data(), 0, call.num_layers - 1);
  call.scale = scale;
  call.is_bf16 = is_bf16(pages);
  attend_all<Form>(pool, call, q[0]);
  return ffi::Error::Success();
}

template <class Form>
XLA_FFI_Error* handle(XLA_FFI_CallFrame* frame) {
  static const auto* handler = ffi::Ffi::Bind()
                                   .Ctx<ffi::ThreadPool>()
                                   .Arg<ffi::Buffer<ffi::F32>>()
                                   .Arg<ffi::AnyBuffer>()
                                   .Arg<ffi::BufferR0<ffi::S32>>()
                                   .Arg<ffi::Buffer<ffi::S32>>()
                                   .Arg<ffi::Buffer<ffi::S32>>()
                                   .Ret<ffi::Buffer<ffi::F32>>()
                                   .template Attr<float>("scale")
                                   .To(run<Form>)
                                   .release();
  return handler->Call(frame);
}

template <class Form>
ffi::Error run_exponential(ffi::Buffer<ffi::F32> x, ffi::Result<ffi::Buffer<ffi::F32>> y) {
  if (x.element_count() % 16 != 0) return ffi::Error::InvalidArgument("exponential takes a multiple of 16 numbers");
  Exponential<Form>::apply(x.typed_data(), y->typed_data(), x.element_count());
  return ffi::Error::Success();
}

template <class Form>
XLA_FFI_Error* handle_exponential(XLA_FFI_CallFrame* frame) {
  static const auto* handler = ffi::Ffi::Bind()
                                   .Arg<ffi::Buffer<ffi::F32>>()
                                   .Ret<ffi::Buffer<ffi::F32>>()
                                   .To(run_exponential<Form>)
                                   .release();
  return handler->Call(frame);
}

}  // namespace

const Kernel attention{"attention", handle<Sse4>, handle<Avx2>, handle<Avx512>};
const Kernel exponential{"exponential", handle_exponential<Sse4>, handle_exponential<Avx2>, handle_exponential<Avx512>};

}  // namespace moonshard
