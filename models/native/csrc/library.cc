// What the library exports: its version, the forms that this processor runs, and the kernels' handlers.
//
// `models/native/library.py` calls these, and knows the same version.
#include "library.h"

#include <cstring>
#include <string>

namespace moonshard {
namespace {

constexpr int version = 5;
const Kernel* const kernels[] = {&attention,   &expanded_attention, &experts,
                                 &exponential, &stacked_product,    &zeros};

}  // namespace
}  // namespace moonshard

extern "C" {

// Of what is called and how: another one for every change of a kernel's arguments or results.
[[gnu::visibility("default")]] int moonshard_version() { return moonshard::version; }

// The forms that this processor runs, the best first, separated by spaces.
[[gnu::visibility("default")]] const char* moonshard_forms() {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("sse4.2") || !__builtin_cpu_supports("popcnt")) return "";
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") ||
      !__builtin_cpu_supports("f16c"))
    return "sse4";
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
    return "avx2 sse4";
  return "avx512 avx2 sse4";
}

// The names of all kernels, separated by spaces.
[[gnu::visibility("default")]] const char* moonshard_kernels() {
  static const std::string names = [] {
    std::string joined;
    for (const moonshard::Kernel* known : moonshard::kernels)
      joined += (joined.empty() ? "" : " ") + std::string(known->name);
    return joined;
  }();
  return names.c_str();
}

// The handler of a kernel in a form; null where there is none.
[[gnu::visibility("default")]] moonshard::Handler moonshard_handler(const char* kernel, const char* form) {
  for (const moonshard::Kernel* known : moonshard::kernels) {
    if (std::strcmp(known->name, kernel) != 0) continue;
    if (std::strcmp(form, moonshard::Sse4::name) == 0) return known->sse4;
    if (std::strcmp(form, moonshard::Avx2::name) == 0) return known->avx2;
    if (std::strcmp(form, moonshard::Avx512::name) == 0) return known->avx512;
  }
  return nullptr;
}
}
