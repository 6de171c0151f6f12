#include "cc/ffi/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>

namespace jax_magi {
namespace {

namespace ffi = xla::ffi;

struct FreeDeleter {
  void operator()(float* p) const { std::free(p); }
};
using AlignedFloats = std::unique_ptr<float, FreeDeleter>;

AlignedFloats AllocateAligned(int64_t num_floats) {
  const int64_t num_bytes = (num_floats * sizeof(float) + 63) / 64 * 64;
  return AlignedFloats(
      static_cast<float*>(std::aligned_alloc(64, std::max<int64_t>(num_bytes, 64))));
}

// Work that threads fetch from one counter. The pool may start a thread after all work is done and
// the handler has returned, so threads share ownership, and access `work` only for a valid task.
struct SharedLoop {
  int64_t num_tasks;
  int64_t scratch_floats;
  const std::function<void(int64_t, float*)>* work;
  std::atomic<int64_t> next{0};
  std::mutex mutex;
  std::condition_variable all_done;
  int64_t num_done = 0;

  void Run(float* scratch) {
    int64_t num_own = 0;
    for (int64_t i; (i = next.fetch_add(1)) < num_tasks; ++num_own) (*work)(i, scratch);
    std::lock_guard<std::mutex> lock(mutex);
    num_done += num_own;
    if (num_done == num_tasks) all_done.notify_all();
  }
};

// ParallelFor on XLA's pool. The caller takes part, so progress never waits for a free thread.
bool RunOnPool(ffi::ThreadPool& pool, int64_t num_tasks, int64_t scratch_floats,
               const std::function<void(int64_t, float*)>& work) {
  AlignedFloats own_scratch = AllocateAligned(scratch_floats);
  if (own_scratch == nullptr) return false;
  auto loop = std::make_shared<SharedLoop>();
  loop->num_tasks = num_tasks;
  loop->scratch_floats = scratch_floats;
  loop->work = &work;
  const int64_t num_helpers = std::min(pool.num_threads(), num_tasks) - 1;
  for (int64_t i = 0; i < num_helpers; ++i) {
    pool.Schedule([loop] {
      if (loop->next.load() >= loop->num_tasks) return;
      // A helper that gets no memory leaves its share to the others.
      if (AlignedFloats scratch = AllocateAligned(loop->scratch_floats)) loop->Run(scratch.get());
    });
  }
  loop->Run(own_scratch.get());
  std::unique_lock<std::mutex> lock(loop->mutex);
  loop->all_done.wait(lock, [&] { return loop->num_done == num_tasks; });
  return true;
}

}  // namespace

cpu::ParallelFor OnPool(ffi::ThreadPool& pool) {
  return [&pool](int64_t num_tasks, int64_t scratch_floats,
                 const std::function<void(int64_t, float*)>& work) {
    return RunOnPool(pool, num_tasks, scratch_floats, work);
  };
}

ffi::Error Finish(const char* context, bool done) {
  if (done) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kResourceExhausted,
                    std::string(context) + ": out of host memory");
}

}  // namespace jax_magi
