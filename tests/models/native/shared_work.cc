// Stages of work over plain memory, shared by several callers and the threads of one pool, for the thread sanitizer.
//
// Every stage reads what the stage before it wrote: a hand-over without synchronisation is a race, and an item that was
// skipped, or done twice, a wrong sum. The pool is smaller than what is asked of it, and some of its threads are late.
#include <condition_variable>
#include <cstdio>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "common/parallel.h"

namespace {

class Pool {
 public:
  explicit Pool(int count) {
    for (int i = 0; i < count; ++i) threads_.emplace_back([this] { run(); });
  }
  ~Pool() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      is_closed_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }
  long num_threads() const { return static_cast<long>(threads_.size()); }
  void Schedule(std::function<void()> task) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      tasks_.push_back(std::move(task));
    }
    changed_.notify_one();
  }

 private:
  void run() {
    for (;;) {
      std::function<void()> task;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [this] { return is_closed_ || !tasks_.empty(); });
        if (tasks_.empty()) return;
        task = std::move(tasks_.front());
        tasks_.pop_front();
      }
      task();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  std::vector<std::thread> threads_;
  bool is_closed_ = false;
};

// The sum of what the second stage read of the first one's results; `num` of each.
long sum_of_two_stages(Pool& pool, long num) {
  std::vector<long> first(num), second(num);
  moonshard::share(pool, true, {num, num}, [&](long stage, long index) {
    if (stage == 0) {
      first[index] += index + 1;
    } else {
      second[index] += first[num - 1 - index];
    }
  });
  long total = 0;
  for (const long each : second) total += each;
  return total;
}

}  // namespace

int main() {
  Pool pool(3);
  std::vector<std::thread> callers;
  std::vector<int> num_wrong(4);
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&, caller] {
      for (long round = 0; round < 300; ++round) {
        const long num = 1 + (round * 7 + caller) % 40;
        num_wrong[caller] += sum_of_two_stages(pool, num) != num * (num + 1) / 2;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  for (const int wrong : num_wrong) {
    if (wrong) return std::printf("%d rounds gave a wrong sum\n", wrong), 1;
  }
}
