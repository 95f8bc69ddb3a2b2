// The binding of `models/native/zeros.py`: () -> y of any shape and type, all 0, of which nothing is touched yet.
//
// XLA takes large arrays from malloc, which maps them; whether the pages behind are given back and come again as zeros
// (madvise(2), MADV_DONTNEED on private anonymous memory) is tried on the first of them, and else all is written.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

#include "library.h"

namespace moonshard {
namespace {

namespace ffi = xla::ffi;

// Whether all of [first, last), whole pages, is 0 now without being there.
bool given_back(char* first, char* last) {
  *first = 1;
  if (madvise(first, last - first, MADV_DONTNEED) != 0 || *first != 0) return false;
  madvise(first, last - first, MADV_HUGEPAGE);  // a wish: large pages come sooner, and are found sooner
  return true;
}

ffi::Error run(ffi::Result<ffi::AnyBuffer> y) {
  char* const begin = static_cast<char*>(y->untyped_data());
  char* const end = begin + y->size_bytes();
  const std::uintptr_t page = sysconf(_SC_PAGESIZE);
  char* const first = begin + (page - reinterpret_cast<std::uintptr_t>(begin) % page) % page;
  char* const last = end - reinterpret_cast<std::uintptr_t>(end) % page;
  if (first >= last || !given_back(first, last)) {
    std::memset(begin, 0, end - begin);
  } else {
    std::memset(begin, 0, first - begin);
    std::memset(last, 0, end - last);
  }
  return ffi::Error::Success();
}

XLA_FFI_Error* handle(XLA_FFI_CallFrame* frame) {
  static const auto* handler = ffi::Ffi::Bind().Ret<ffi::AnyBuffer>().To(run).release();
  return handler->Call(frame);
}

}  // namespace

const Kernel zeros{"zeros", handle, handle, handle};

}  // namespace moonshard
