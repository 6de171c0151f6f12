// The instruction sets that the CPU kernels are built for, to report what a build contains.

#ifndef JAX_MAGI_CPU_SELECT_H_
#define JAX_MAGI_CPU_SELECT_H_

#include <string>
#include <vector>

namespace jax_magi::cpu {

// The narrowest first. This processor supports all up to the one that SelectedInstructionSet names.
std::vector<std::string> InstructionSets();
std::string SelectedInstructionSet();

}  // namespace jax_magi::cpu

#endif  // JAX_MAGI_CPU_SELECT_H_
