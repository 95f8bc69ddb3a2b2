// Work shared between the calling thread and XLA's own pool.
#pragma once

#include <atomic>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <thread>

namespace moonshard {

inline constexpr long min_shared_bytes = 96 << 10;  // for less no other thread is woken up; not tuned

// Runs body(stage, index) for every index below each stage's count. No item of a stage begins before all of the stages
// before it are done. Returns once everything is done.
//
// The caller may itself be a thread of the pool, and the pool may be busy or have no other thread, so nobody waits for
// a thread to begin: items are claimed from one counter by whoever is there, the caller too, and what is waited for is
// only items that somebody has claimed and therefore runs. Helpers that come late find nothing and touch nothing but
// the counters, which they own a share of. `Pool` is `xla::ffi::ThreadPool`, or the like of it.
template <class Pool, class Body>
void share(Pool& pool, bool is_worth_it, std::initializer_list<long> counts, const Body& body) {
  struct Progress {
    std::atomic<long> claimed{0}, done{0};
  };
  long total = 0;
  for (long count : counts) total += count;
  const auto progress = std::make_shared<Progress>();

  const auto wait_for = [](Progress& progress, long done) {
    for (int tries = 0; progress.done.load(std::memory_order_acquire) < done; ++tries) {
      if (tries < 2000) {
        __builtin_ia32_pause();
      } else {
        std::this_thread::yield();
      }
    }
  };
  const auto run = [&](long item) {
    long stage = 0, first = 0;
    for (const long* count = counts.begin(); item >= first + *count; ++count, ++stage) first += *count;
    wait_for(*progress, first);
    body(stage, item - first);
    progress->done.fetch_add(1, std::memory_order_release);
  };
  // `run` lies on the caller's stack, which is there as long as an item that was claimed is not done.
  const auto work = [total, run = &run](Progress& progress) {
    for (;;) {
      const long item = progress.claimed.fetch_add(1, std::memory_order_relaxed);
      if (item >= total) return;
      (*run)(item);
    }
  };

  const long num_threads = is_worth_it ? pool.num_threads() : 1;
  const long num_helpers = (num_threads < total ? num_threads : total) - 1;
  for (long i = 0; i < num_helpers; ++i) pool.Schedule([progress, work] { work(*progress); });
  work(*progress);
  wait_for(*progress, total);
}

}  // namespace moonshard
