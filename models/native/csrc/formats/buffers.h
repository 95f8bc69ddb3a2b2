// What bindings make `Weights` of: a stack of layers, and its scales.
#pragma once

#include <algorithm>

#include "../library.h"
#include "weights.h"

namespace moonshard {

// The matrices of a layer, as they lie behind each other, and the values that share a scale.
struct Shape {
  long num_matrices, rows, columns, block_rows, block_columns;
};

struct Buffers {
  const xla::ffi::AnyBuffer& values;  // [layers, ..., rows, items of a row]
  const xla::ffi::AnyBuffer& scales;  // [layers, ..., blocks of rows, blocks of columns]; of floats nothing is read
};

// One layer of a stack. As a dynamic slice does it, an index that is too large is the last.
inline xla::ffi::ErrorOr<Weights> layer_of(const Buffers& stack, const xla::ffi::BufferR0<xla::ffi::S32>& layer,
                                           const Shape& shape) {
  using xla::ffi::DataType, xla::ffi::Error;
  Weights of{};
  long scale_bytes = 0;
  of.rows = shape.rows, of.columns = shape.columns;
  switch (stack.values.element_type()) {
    case DataType::F32:
      of.format = Format::f32, of.row_bytes = 4 * of.columns;
      break;
    case DataType::BF16:
      of.format = Format::bf16, of.row_bytes = 2 * of.columns;
      break;
    case DataType::S32:
      of.format = Format::int4, of.row_bytes = (of.columns + 7) / 8 * 4, scale_bytes = 2;
      break;
    case DataType::F8E4M3FN:
      of.format = Format::fp8, of.row_bytes = of.columns, scale_bytes = 4;
      break;
    case DataType::S8:
      of.format = Format::int8, of.row_bytes = of.columns, scale_bytes = 4;
      break;
    default:
      return Error::InvalidArgument("weights are float, bfloat16, INT4 in int32, FP8 (E4M3FN) or INT8");
  }
  const auto of_values = stack.values.dimensions(), of_scales = stack.scales.dimensions();
  const long num_layers = of_values.front(), asked = *layer.typed_data();
  const long index = std::clamp(asked, 0L, std::max(0L, num_layers - 1));
  const long layer_bytes = shape.num_matrices * of.rows * of.row_bytes;
  if (static_cast<long>(stack.values.size_bytes()) != num_layers * layer_bytes)
    return Error::InvalidArgument("weights were given in a shape that does not fit the others");
  of.values = static_cast<const char*>(stack.values.untyped_data()) + index * layer_bytes;
  if (scale_bytes == 0) return of;
  of.block_rows = std::max(1L, shape.block_rows), of.block_columns = std::max(1L, shape.block_columns);
  if (of.format == Format::int4 && std::min(of.block_columns, of.columns) > 32)
    return Error::InvalidArgument("INT4 has a scale to 32 columns or to fewer");
  of.scale_rows = (of.rows + of.block_rows - 1) / of.block_rows;
  of.scale_columns = (of.columns + of.block_columns - 1) / of.block_columns;
  const long num_scales = shape.num_matrices * of.scale_rows * of.scale_columns;
  const DataType wanted = scale_bytes == 2 ? DataType::BF16 : DataType::F32;
  if (of_scales.size() != of_values.size() || stack.scales.element_type() != wanted ||
      static_cast<long>(stack.scales.element_count()) != num_layers * num_scales)
    return Error::InvalidArgument("weights were given scales of another type than their format has, or another shape");
  of.scales = static_cast<const char*>(stack.scales.untyped_data()) + index * num_scales * scale_bytes;
  return of;
}

}  // namespace moonshard
