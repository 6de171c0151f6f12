// FFI handlers of the CPU kernels: decode, check, call.

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <memory>
#include <mutex>

#include "cc/cpu/attention.h"
#include "cc/ffi/attention_bindings.h"
#include "cc/ffi/attention_checks.h"
#include "cc/ffi/handlers.h"

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

// Work that threads take from one counter. The pool may start a thread after all work is done and
// the handler has returned, so threads share ownership, and touch `work` only under a valid task.
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
      // Without memory a helper only leaves its share to the others.
      if (AlignedFloats scratch = AllocateAligned(loop->scratch_floats)) loop->Run(scratch.get());
    });
  }
  loop->Run(own_scratch.get());
  std::unique_lock<std::mutex> lock(loop->mutex);
  loop->all_done.wait(lock, [&] { return loop->num_done == num_tasks; });
  return true;
}

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

ffi::Error Forward(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                   ffi::AnyBuffer slices, ffi::AnyBuffer sink, ffi::AnyBuffer /*plan*/,
                   ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> lse,
                   ffi::Result<ffi::AnyBuffer> max_logits,
                   ffi::Result<ffi::AnyBuffer> /*workspace*/, float softmax_scale, float softcap,
                   int32_t /*sm_margin*/) {
  ForwardArgs args;
  JAX_MAGI_RETURN_IF_ERROR(
      DecodeForward(q, k, v, slices, sink, *out, *lse, *max_logits, softmax_scale, softcap, &args));
  return Finish("jax_magi attention forward", cpu::AttentionForward(args, OnPool(pool)));
}

ffi::Error Backward(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                    ffi::AnyBuffer dout, ffi::AnyBuffer lse, ffi::AnyBuffer delta,
                    ffi::AnyBuffer slices, ffi::AnyBuffer /*plan*/, ffi::Result<ffi::AnyBuffer> dq,
                    ffi::Result<ffi::AnyBuffer> dk, ffi::Result<ffi::AnyBuffer> dv,
                    ffi::Result<ffi::AnyBuffer> /*workspace*/, float softmax_scale, float softcap,
                    bool /*deterministic: always*/, int32_t /*sm_margin*/) {
  BackwardArgs args;
  JAX_MAGI_RETURN_IF_ERROR(DecodeBackward(q, k, v, dout, lse, delta, slices, *dq, *dk, *dv,
                                          softmax_scale, softcap, &args, /*num_splits=*/nullptr));
  return Finish("jax_magi attention backward",
                cpu::AttentionBackward(args, pool.num_threads(), OnPool(pool)));
}

}  // namespace
}  // namespace jax_magi

// At global scope: inside the namespace, gcc would not give them the visibility of handlers.h.
namespace ffi = xla::ffi;

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_magi_cpu_attention_forward, jax_magi::Forward,
                              jax_magi::ForwardBinding<ffi::ThreadPool>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_magi_cpu_attention_backward, jax_magi::Backward,
                              jax_magi::BackwardBinding<ffi::ThreadPool>());
