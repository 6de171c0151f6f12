// The wgmma instruction: the product of 64 rows and kN columns, with a contraction of 16 elements.
//
// CUTLASS has it for all types and shapes, in 110,000 lines that each kernel would have to compile.

#ifndef JAX_MAGI_CUDA_ATTENTION_SM90_WGMMA_INSTRUCTION_CUH_
#define JAX_MAGI_CUDA_ATTENTION_SM90_WGMMA_INSTRUCTION_CUH_

#include <cstdint>
#include <type_traits>

#include "cc/cuda/attention/element.h"

namespace jax_magi::cuda::sm90 {

// Whether an operand in shared memory is contiguous along the contraction or across it. The values
// are those of the instruction.
enum class Contiguous { kAlong = 0, kAcross = 1 };

// Products of 64 rows and kN columns. A thread holds kN / 2 elements of the result, d. With a kSign
// of -1, the product is subtracted.
template <int kN>
struct WgmmaInstruction;

// The registers of the first 16 columns of a result, of the first 32, and so on: their names in the
// instruction, and their operands.
#define JAX_MAGI_NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define JAX_MAGI_NAMES_32 JAX_MAGI_NAMES_16 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define JAX_MAGI_NAMES_48 JAX_MAGI_NAMES_32 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define JAX_MAGI_NAMES_64 JAX_MAGI_NAMES_48 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define JAX_MAGI_NAMES_80 JAX_MAGI_NAMES_64 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define JAX_MAGI_NAMES_96 JAX_MAGI_NAMES_80 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define JAX_MAGI_NAMES_112 JAX_MAGI_NAMES_96 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define JAX_MAGI_NAMES_128 JAX_MAGI_NAMES_112 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define JAX_MAGI_NAMES_144 JAX_MAGI_NAMES_128 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define JAX_MAGI_NAMES_160 JAX_MAGI_NAMES_144 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define JAX_MAGI_NAMES_176 JAX_MAGI_NAMES_160 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define JAX_MAGI_NAMES_192 JAX_MAGI_NAMES_176 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define JAX_MAGI_NAMES_208 JAX_MAGI_NAMES_192 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define JAX_MAGI_NAMES_224 JAX_MAGI_NAMES_208 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define JAX_MAGI_NAMES_240 JAX_MAGI_NAMES_224 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define JAX_MAGI_NAMES_256 JAX_MAGI_NAMES_240 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define JAX_MAGI_RESULTS_8_FROM(i)                                                            \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define JAX_MAGI_RESULTS_16 JAX_MAGI_RESULTS_8_FROM(0)
#define JAX_MAGI_RESULTS_32 JAX_MAGI_RESULTS_16, JAX_MAGI_RESULTS_8_FROM(8)
#define JAX_MAGI_RESULTS_48 JAX_MAGI_RESULTS_32, JAX_MAGI_RESULTS_8_FROM(16)
#define JAX_MAGI_RESULTS_64 JAX_MAGI_RESULTS_48, JAX_MAGI_RESULTS_8_FROM(24)
#define JAX_MAGI_RESULTS_80 JAX_MAGI_RESULTS_64, JAX_MAGI_RESULTS_8_FROM(32)
#define JAX_MAGI_RESULTS_96 JAX_MAGI_RESULTS_80, JAX_MAGI_RESULTS_8_FROM(40)
#define JAX_MAGI_RESULTS_112 JAX_MAGI_RESULTS_96, JAX_MAGI_RESULTS_8_FROM(48)
#define JAX_MAGI_RESULTS_128 JAX_MAGI_RESULTS_112, JAX_MAGI_RESULTS_8_FROM(56)
#define JAX_MAGI_RESULTS_144 JAX_MAGI_RESULTS_128, JAX_MAGI_RESULTS_8_FROM(64)
#define JAX_MAGI_RESULTS_160 JAX_MAGI_RESULTS_144, JAX_MAGI_RESULTS_8_FROM(72)
#define JAX_MAGI_RESULTS_176 JAX_MAGI_RESULTS_160, JAX_MAGI_RESULTS_8_FROM(80)
#define JAX_MAGI_RESULTS_192 JAX_MAGI_RESULTS_176, JAX_MAGI_RESULTS_8_FROM(88)
#define JAX_MAGI_RESULTS_208 JAX_MAGI_RESULTS_192, JAX_MAGI_RESULTS_8_FROM(96)
#define JAX_MAGI_RESULTS_224 JAX_MAGI_RESULTS_208, JAX_MAGI_RESULTS_8_FROM(104)
#define JAX_MAGI_RESULTS_240 JAX_MAGI_RESULTS_224, JAX_MAGI_RESULTS_8_FROM(112)
#define JAX_MAGI_RESULTS_256 JAX_MAGI_RESULTS_240, JAX_MAGI_RESULTS_8_FROM(120)

// i0, i1, ... are the names of the operands after the result.
#define JAX_MAGI_WGMMA_SHARED(n, type, i0, i1, i2, i3, i4, i5, i6)                                 \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " i2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n \
               "k16.f32." type "." type " {" JAX_MAGI_NAMES_##n "}, " i0 ", " i1 ", p, " i3        \
                                                                ", " i4 ", " i5 ", " i6 ";\n}\n"   \
               : JAX_MAGI_RESULTS_##n                                                              \
               : "l"(rows), "l"(columns), "r"(int32_t{accumulate}), "n"(kSign), "n"(1),            \
                 "n"(int32_t(kRows)), "n"(int32_t(kColumns)))

#define JAX_MAGI_WGMMA_REGISTERS(n, type, i0, i1, i2, i3, i4, i5, i6, i7, i8)                      \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " i5 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n \
               "k16.f32." type "." type " {" JAX_MAGI_NAMES_##n                                    \
               "}, {" i0 ", " i1 ", " i2 ", " i3 "}, " i4 ", p, " i6 ", " i7 ", " i8 ";\n}\n"      \
               : JAX_MAGI_RESULTS_##n                                                              \
               : "r"(rows[0]), "r"(rows[1]), "r"(rows[2]), "r"(rows[3]), "l"(columns),             \
                 "r"(int32_t{accumulate}), "n"(kSign), "n"(1), "n"(int32_t(kColumns)))

#define JAX_MAGI_WGMMA(n, i0, i1, i2, i3, i4, i5, i6, i7, i8)                                \
  template <>                                                                                \
  struct WgmmaInstruction<n> {                                                               \
    /* Rows and columns in shared memory, as descriptors. */                                 \
    template <typename Element, int kSign, Contiguous kRows, Contiguous kColumns>            \
    static __device__ __forceinline__ void Shared(uint64_t rows, uint64_t columns,           \
                                                  float (&d)[n / 2], bool accumulate) {      \
      if constexpr (std::is_same_v<Element, half_t>) {                                       \
        JAX_MAGI_WGMMA_SHARED(n, "f16", i0, i1, i2, i3, i4, i5, i6);                         \
      } else {                                                                               \
        JAX_MAGI_WGMMA_SHARED(n, "bf16", i0, i1, i2, i3, i4, i5, i6);                        \
      }                                                                                      \
    }                                                                                        \
    /* Rows in registers, as packed pairs. */                                                \
    template <typename Element, int kSign, Contiguous kColumns>                              \
    static __device__ __forceinline__ void Registers(const uint32_t* rows, uint64_t columns, \
                                                     float (&d)[n / 2], bool accumulate) {   \
      if constexpr (std::is_same_v<Element, half_t>) {                                       \
        JAX_MAGI_WGMMA_REGISTERS(n, "f16", i0, i1, i2, i3, i4, i5, i6, i7, i8);              \
      } else {                                                                               \
        JAX_MAGI_WGMMA_REGISTERS(n, "bf16", i0, i1, i2, i3, i4, i5, i6, i7, i8);             \
      }                                                                                      \
    }                                                                                        \
  }

JAX_MAGI_WGMMA(32, "%16", "%17", "%18", "%19", "%20", "%21", "%22", "%23", "%24");
JAX_MAGI_WGMMA(48, "%24", "%25", "%26", "%27", "%28", "%29", "%30", "%31", "%32");
JAX_MAGI_WGMMA(64, "%32", "%33", "%34", "%35", "%36", "%37", "%38", "%39", "%40");
JAX_MAGI_WGMMA(80, "%40", "%41", "%42", "%43", "%44", "%45", "%46", "%47", "%48");
JAX_MAGI_WGMMA(96, "%48", "%49", "%50", "%51", "%52", "%53", "%54", "%55", "%56");
JAX_MAGI_WGMMA(112, "%56", "%57", "%58", "%59", "%60", "%61", "%62", "%63", "%64");
JAX_MAGI_WGMMA(128, "%64", "%65", "%66", "%67", "%68", "%69", "%70", "%71", "%72");
JAX_MAGI_WGMMA(192, "%96", "%97", "%98", "%99", "%100", "%101", "%102", "%103", "%104");
JAX_MAGI_WGMMA(256, "%128", "%129", "%130", "%131", "%132", "%133", "%134", "%135", "%136");

#undef JAX_MAGI_WGMMA
#undef JAX_MAGI_WGMMA_REGISTERS
#undef JAX_MAGI_WGMMA_SHARED

}  // namespace jax_magi::cuda::sm90

#endif  // JAX_MAGI_CUDA_ATTENTION_SM90_WGMMA_INSTRUCTION_CUH_
