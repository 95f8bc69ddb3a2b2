// The binding of `expanded_attention.h`: queries [n, t, h, nope + rope] float, pages [blocks, layers, block_size,
// r + rope], layer [], block_tables [n, m], positions [n, t], k_up [l, h, nope, r], v_up [l, h, v, r], each with its
// scales, their layer [] -> out [n, t, h, v] float.
#include "expanded_attention.h"

#include <algorithm>
#include <vector>

#include "../common/parallel.h"
#include "../common/scratch.h"
#include "../formats/buffers.h"

namespace moonshard {
namespace {

namespace ffi = xla::ffi;

constexpr long panels_per_item = 4;
constexpr long max_expanded_floats = 2 << 20;  // at a time, unless one head of one chunk has more; 8 << 20 is no faster

long num_keys_of(const ExpandedCall& call, long row) {
  const int32_t* positions = call.positions + row * call.t;
  const long last = *std::max_element(positions, positions + call.t);
  return std::clamp(last + 1, 0L, call.m * call.block_size);
}

// Consecutive rows whose blocks are the same, as far as both have any, are one chunk.
std::vector<Chunk> chunks_of(const ExpandedCall& call) {
  std::vector<Chunk> found;
  for (long row = 0; row < call.n; ++row) {
    const long num_keys = num_keys_of(call, row);
    if (!found.empty()) {
      Chunk& chunk = found.back();
      const long columns = (std::min(num_keys, chunk.num_keys) + call.block_size - 1) / call.block_size;
      const int32_t *own = call.tables + row * call.m, *others = call.tables + chunk.table_row * call.m;
      if (std::equal(own, own + columns, others)) {
        if (num_keys > chunk.num_keys) chunk.num_keys = num_keys, chunk.table_row = row;
        ++chunk.num_rows;
        continue;
      }
    }
    found.push_back({row, 1, row, num_keys});
  }
  return found;
}

// Expands some heads and attends with them.
template <class Form>
void attend_heads(ffi::ThreadPool& pool, const ExpandedCall& call, const std::vector<Head>& heads) {
  using Kernel = ExpandedAttention<Form>;
  struct Item {
    const Head* head;
    long begin, end;
  };
  std::vector<Item> expands, attends;
  for (const Head& head : heads) {
    const long num_panels = Kernel::num_panels(head.chunk.num_keys), num_queries = head.chunk.num_rows * call.t;
    for (long begin = 0; begin < num_panels; begin += panels_per_item)
      expands.push_back({&head, begin, std::min(num_panels, begin + panels_per_item)});
    for (long begin = 0; begin < num_queries; begin += Kernel::num_queries)
      attends.push_back({&head, begin, std::min(num_queries, begin + Kernel::num_queries)});
  }
  // The longest work, of a chunk's last queries, begins first.
  std::stable_sort(attends.begin(), attends.end(), [](const Item& a, const Item& b) { return a.begin > b.begin; });
  const std::initializer_list<long> counts{static_cast<long>(expands.size()), static_cast<long>(attends.size())};
  share(pool, true, counts, [&](long stage, long index) {
    static thread_local Scratch kept;
    float* const scratch = kept.room_for(Kernel::scratch_floats(call));
    const Item& item = (stage == 0 ? expands : attends)[index];
    if (stage == 0) {
      Kernel::expand(call, *item.head, item.begin, item.end, scratch);
    } else {
      Kernel::attend(call, *item.head, item.begin, item.end - item.begin, scratch);
    }
  });
}

template <class Form>
void attend_all(ffi::ThreadPool& pool, const ExpandedCall& call) {
  static thread_local Scratch kept_expanded;
  std::vector<Head> heads;
  std::vector<long> offsets;
  long used = 0;
  const auto run = [&] {
    float* const expanded = kept_expanded.room_for(used);
    for (size_t i = 0; i < heads.size(); ++i) heads[i].expanded = expanded + offsets[i];
    attend_heads<Form>(pool, call, heads);
    heads.clear(), offsets.clear(), used = 0;
  };
  for (const Chunk& chunk : chunks_of(call)) {
    const long floats = ExpandedAttention<Form>::expanded_floats(call, chunk.num_keys);
    for (long head = 0; head < call.h; ++head) {
      if (!heads.empty() && used + floats > max_expanded_floats) run();
      heads.push_back({chunk, head, nullptr});
      offsets.push_back(used);
      used += floats;
    }
  }
  if (!heads.empty()) run();
}

template <class Form>
ffi::Error run(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> queries, ffi::AnyBuffer pages,
               ffi::BufferR0<ffi::S32> layer, ffi::Buffer<ffi::S32> tables, ffi::Buffer<ffi::S32> positions,
               ffi::AnyBuffer k_up, ffi::AnyBuffer k_up_scales, ffi::AnyBuffer v_up, ffi::AnyBuffer v_up_scales,
               ffi::BufferR0<ffi::S32> up_layer, ffi::Result<ffi::Buffer<ffi::F32>> out, float scale,
               int64_t k_up_rows, int64_t k_up_columns, int64_t v_up_rows, int64_t v_up_columns) {
  const auto q = queries.dimensions(), of = pages.dimensions(), m = tables.dimensions(), at = positions.dimensions(),
             up_k = k_up.dimensions(), up_v = v_up.dimensions(), to = out->dimensions();
  if (q.size() != 4 || of.size() != 4 || m.size() != 2 || at.size() != 2 || to.size() != 4 || up_k.size() != 4 ||
      up_v.size() != 4)
    return ffi::Error::InvalidArgument(
        "expanded_attention takes queries [n, t, h, k], pages [blocks, layers, block_size, f], block tables [n, m], "
        "positions [n, t], k_up [l, h, nope, r] and v_up [l, h, v, r], and gives [n, t, h, v]");
  const long rope = q[3] - up_k[2], r = of[3] - rope;
  if (m[0] != q[0] || at[0] != q[0] || at[1] != q[1] || to[0] != q[0] || to[1] != q[1] || to[2] != q[2] ||
      up_k[1] != q[2] || up_v[1] != q[2] || up_v[0] != up_k[0] || up_v[2] != to[3] || rope < 0 || r < 0)
    return ffi::Error::InvalidArgument("expanded_attention was given shapes that do not fit each other");
  if (!is_float(pages) || k_up.element_type() != v_up.element_type())
    return ffi::Error::InvalidArgument("expanded_attention takes pages of float or bfloat16, weights of one format");
  const auto of_k = layer_of({k_up, k_up_scales}, up_layer, {q[2], up_k[2], r, k_up_rows, k_up_columns});
  const auto of_v = layer_of({v_up, v_up_scales}, up_layer, {q[2], up_v[2], r, v_up_rows, v_up_columns});
  if (of_k.has_error()) return of_k.error();
  if (of_v.has_error()) return of_v.error();
  if (out->element_count() == 0) return ffi::Error::Success();
  if (pages.element_count() == 0 || k_up.element_count() == 0)
    return ffi::Error::InvalidArgument("expanded_attention takes pages of one block, and weights of one layer "
                                       "at least");
  ExpandedCall call;
  call.queries = queries.typed_data();
  call.pages = pages.untyped_data();
  call.tables = tables.typed_data();
  call.positions = positions.typed_data();
  call.k_up = *of_k;
  call.v_up = *of_v;
  call.out = out->typed_data();
  call.n = q[0], call.t = q[1], call.h = q[2], call.nope = up_k[2], call.rope = rope, call.r = r, call.v = to[3];
  call.m = m[1], call.num_blocks = of[0], call.num_layers = of[1], call.block_size = of[2];
  call.layer = std::clamp<long>(*layer.typed_data(), 0, call.num_layers - 1);
  call.scale = scale;
  call.is_bf16 = is_bf16(pages);
  attend_all<Form>(pool, call);
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
                                   .Arg<ffi::AnyBuffer>()
                                   .Arg<ffi::AnyBuffer>()
                                   .Arg<ffi::AnyBuffer>()
                                   .Arg<ffi::AnyBuffer>()
                                   .Arg<ffi::BufferR0<ffi::S32>>()
                                   .Ret<ffi::Buffer<ffi::F32>>()
                                   .template Attr<float>("scale")
                                   .template Attr<int64_t>("k_up_rows")
                                   .template Attr<int64_t>("k_up_columns")
                                   .template Attr<int64_t>("v_up_rows")
                                   .template Attr<int64_t>("v_up_columns")
                                   .To(run<Form>)
                                   .release();
  return handler->Call(frame);
}

}  // namespace

const Kernel expanded_attention{"expanded_attention", handle<Sse4>, handle<Avx2>, handle<Avx512>};

}  // namespace moonshard
