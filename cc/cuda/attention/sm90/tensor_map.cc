#include "cc/cuda/attention/sm90/tensor_map.h"

#include <algorithm>
#include <string>

namespace jax_magi::cuda::sm90 {
namespace {

// The driver's cuTensorMapEncodeTiled, or null.
void* FindEncodeTiled() {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t code = cudaGetDriverEntryPointByVersion(
      "cuTensorMapEncodeTiled", &entry, /*cudaVersion=*/12000, cudaEnableDefault, &found);
  return code == cudaSuccess && found == cudaDriverEntryPointSuccess ? entry : nullptr;
}

}  // namespace

Status MakeTensorMap(const char* name, DType dtype, const void* data, int64_t batch, int64_t length,
                     int64_t heads, int64_t dim, int box_rows, int box_heads, int box_bytes,
                     CUtensorMap* map) {
  // Looked up at run time, and once: if linked to the driver, the library could not be loaded
  // without one.
  static void* const entry = FindEncodeTiled();
  if (entry == nullptr) {
    return {"the CUDA driver has no cuTensorMapEncodeTiled: it is too old", __FILE__, __LINE__};
  }
  // An empty tensor is described, but never read.
  const cuuint64_t sizes[4] = {static_cast<cuuint64_t>(dim),
                               static_cast<cuuint64_t>(std::max<int64_t>(heads, 1)),
                               static_cast<cuuint64_t>(std::max<int64_t>(length, 1)),
                               static_cast<cuuint64_t>(std::max<int64_t>(batch, 1))};
  const int element_bytes = ElementBytes(dtype);
  const cuuint64_t row_bytes = element_bytes * sizes[0];
  const cuuint64_t strides[3] = {row_bytes, row_bytes * sizes[1], row_bytes * sizes[1] * sizes[2]};
  const cuuint32_t box[4] = {static_cast<cuuint32_t>(box_bytes / element_bytes),
                             static_cast<cuuint32_t>(box_heads), static_cast<cuuint32_t>(box_rows),
                             1};
  const cuuint32_t element_strides[4] = {1, 1, 1, 1};
  const CUresult result = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry)(
      map,
      dtype == DType::kF32    ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
      : dtype == DType::kBF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                              : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
      /*tensorRank=*/4, const_cast<void*>(data), sizes, strides, box, element_strides,
      CU_TENSOR_MAP_INTERLEAVE_NONE,
      box_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    return {std::string("cuTensorMapEncodeTiled refused ") + name + ": CUresult " +
                std::to_string(static_cast<int>(result)),
            __FILE__, __LINE__};
  }
  return {};
}

}  // namespace jax_magi::cuda::sm90
