// Chooses among the instruction-set variants of tile_kernels.cc. CMakeLists.txt lists the same
// variants with their compiler flags.

#include "cc/cpu/tile_kernels.h"

namespace jax_magi::cpu {

extern const TileKernels kBaselineTileKernels;
#if defined(__x86_64__)
extern const TileKernels kAvx2TileKernels;
extern const TileKernels kAvx512TileKernels;
#endif

const TileKernels& SelectTileKernels() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    return kAvx512TileKernels;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return kAvx2TileKernels;
#endif
  return kBaselineTileKernels;
}

}  // namespace jax_magi::cpu
