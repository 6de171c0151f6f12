// The architectures that GPU kernels are written for, and the GPUs that run them.

#ifndef JAX_MAGI_ARCHITECTURE_H_
#define JAX_MAGI_ARCHITECTURE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace jax_magi {

// Named after the oldest GPUs that run the kernels. The stamp of a tile list has four bits for it.
enum class Architecture : int32_t {
  kNone = 0,
  kSm90 = 1,  // Hopper alone: wgmma, TMA and setmaxnreg.
  kSm80 = 2,  // Ampere and everything later: mma.sync, ldmatrix and cp.async.
};
constexpr Architecture kArchitectures[] = {Architecture::kSm90, Architecture::kSm80};

// The name in FFI attributes and in Python.
inline const char* NameOf(Architecture architecture) {
  switch (architecture) {
    case Architecture::kSm90:
      return "sm90";
    case Architecture::kSm80:
      return "sm80";
    case Architecture::kNone:
      break;
  }
  return "none";
}
inline std::optional<Architecture> ArchitectureOf(std::string_view name) {
  if (name == NameOf(Architecture::kNone)) return Architecture::kNone;
  for (const Architecture architecture : kArchitectures) {
    if (name == NameOf(architecture)) return architecture;
  }
  return std::nullopt;
}

// The GPUs that run the kernels, in words.
inline const char* WordsOf(Architecture architecture) {
  switch (architecture) {
    case Architecture::kSm90:
      return "Hopper (sm_90)";
    case Architecture::kSm80:
      return "sm_80 and later";
    case Architecture::kNone:
      break;
  }
  return "no GPU";
}

// Compute capabilities are 10 * major + minor.
inline bool RunsOn(Architecture architecture, int compute_capability) {
  switch (architecture) {
    case Architecture::kSm90:
      return compute_capability == 90;
    case Architecture::kSm80:
      return compute_capability >= 80;
    case Architecture::kNone:
      break;
  }
  return false;
}

// The least shared memory that a CTA may use on any GPU that runs the kernels.
constexpr int kLeastSharedMemory = 99 << 10;

// The shared memory that a CTA may use on a GPU, if there is no device to query: the opt-in maximum
// in NVIDIA's table of compute capabilities.
constexpr int SharedMemoryOf(int compute_capability) {
  const int major = compute_capability / 10;
  if (compute_capability == 80 || compute_capability == 87) return 163 << 10;
  if (9 <= major && major <= 11) return 227 << 10;
  return kLeastSharedMemory;
}

// What the choice of kernels depends on, besides the call. It is the same at trace and run time.
struct Target {
  Architecture architecture = Architecture::kNone;
  int shared_memory_bytes = kLeastSharedMemory;  // What a CTA may use.
};

}  // namespace jax_magi

#endif  // JAX_MAGI_ARCHITECTURE_H_
