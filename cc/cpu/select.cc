// Selects among the instruction-set variants of tile_kernels.cc and row_kernels.cc. CMakeLists.txt
// lists the same variants with their compiler flags.

#include "cc/cpu/select.h"

#include <iterator>

#include "cc/cpu/row_kernels.h"
#include "cc/cpu/tile_kernels.h"

namespace jax_magi::cpu {

extern const TileKernels kBaselineTileKernels;
extern const RowKernels kBaselineRowKernels;
#if defined(__x86_64__)
extern const TileKernels kAvx2TileKernels, kAvx512TileKernels;
extern const RowKernels kAvx2RowKernels, kAvx512RowKernels;
#endif

namespace {

// The variants of a table, the narrowest first.
#if defined(__x86_64__)
#define JAX_MAGI_VARIANTS(kernels) {&kBaseline##kernels, &kAvx2##kernels, &kAvx512##kernels}
const char* const kNames[] = {"baseline", "avx2", "avx512"};
#else
#define JAX_MAGI_VARIANTS(kernels) {&kBaseline##kernels}
const char* const kNames[] = {"baseline"};
#endif

// The index of the widest variant that this processor supports.
int WidestVariant() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    return 2;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return 1;
#endif
  return 0;
}

}  // namespace

const TileKernels& SelectTileKernels() {
  static const TileKernels* const variants[] = JAX_MAGI_VARIANTS(TileKernels);
  return *variants[WidestVariant()];
}

const RowKernels& SelectRowKernels() {
  static const RowKernels* const variants[] = JAX_MAGI_VARIANTS(RowKernels);
  return *variants[WidestVariant()];
}

std::vector<std::string> InstructionSets() { return {std::begin(kNames), std::end(kNames)}; }
std::string SelectedInstructionSet() { return kNames[WidestVariant()]; }

}  // namespace jax_magi::cpu
