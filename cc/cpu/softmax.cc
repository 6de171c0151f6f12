#include "cc/cpu/softmax.h"

#include <algorithm>

#include "cc/cpu/row_kernels.h"

namespace jax_magi::cpu {
namespace {

// Rows per task: enough that fetching a task from the counter costs nothing in comparison.
constexpr int64_t kTaskElements = 1 << 15;

template <typename Args>
bool ForEachRow(const Args& args, void (*kernel)(const Args&, int64_t, float*),
                const ParallelFor& parallel_for) {
  const int64_t num_rows = args.shape.num_rows(), k_len = args.shape.k_len;
  const int64_t rows_per_task = std::max<int64_t>(kTaskElements / std::max<int64_t>(k_len, 1), 1);
  const int64_t num_tasks = (num_rows + rows_per_task - 1) / rows_per_task;
  return parallel_for(num_tasks, RowScratch(k_len), [&](int64_t task, float* scratch) {
    const int64_t begin = task * rows_per_task;
    const int64_t end = std::min(begin + rows_per_task, num_rows);
    for (int64_t row = begin; row < end; ++row) kernel(args, row, scratch);
  });
}

}  // namespace

bool SoftmaxForward(const SoftmaxForwardArgs& args, const ParallelFor& parallel_for) {
  return ForEachRow(args, SelectRowKernels().forward, parallel_for);
}

bool SoftmaxBackward(const SoftmaxBackwardArgs& args, const ParallelFor& parallel_for) {
  return ForEachRow(args, SelectRowKernels().backward, parallel_for);
}

}  // namespace jax_magi::cpu
