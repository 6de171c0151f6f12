// Which instruction sets the CPU kernels are built for, for those who ask what a build has.

#ifndef JAX_MAGI_CPU_SELECT_H_
#define JAX_MAGI_CPU_SELECT_H_

#include <string>
#include <vector>

namespace jax_magi::cpu {

// Narrowest first. This processor runs all up to the one that SelectedInstructionSet names.
std::vector<std::string> InstructionSets();
std::string SelectedInstructionSet();

}  // namespace jax_magi::cpu

#endif  // JAX_MAGI_CPU_SELECT_H_
