// Room that a thread keeps between calls.
#pragma once

#include <cstdint>
#include <memory>

namespace moonshard {

// Floats that a thread keeps from call to call, so that they are mapped once. They begin on a cache line.
class Scratch {
 public:
  float* room_for(long count) {
    if (count > size_) {
      floats_.reset();
      floats_.reset(new float[count + line]);
      size_ = count;
    }
    const auto address = reinterpret_cast<uintptr_t>(floats_.get()) / sizeof(float);
    return floats_.get() + (line - address % line) % line;
  }

 private:
  static constexpr long line = 16;
  std::unique_ptr<float[]> floats_;
  long size_ = 0;
};

}  // namespace moonshard
