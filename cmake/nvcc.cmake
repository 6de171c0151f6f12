# The oldest nvcc with which all kernels were built and tested. A spill stops the build, and whether
# one spills is for ptxas to decide: older ones may, and were not tried.
set(JAX_MAGI_LEAST_NVCC 13.0)

# Sets `result` to what keeps `nvcc` from building the kernels: nothing, if nothing does.
function(jax_magi_nvcc_obstacle nvcc result)
  execute_process(COMMAND ${nvcc} --version OUTPUT_VARIABLE text ERROR_QUIET RESULT_VARIABLE status)
  set(obstacle "")
  if(NOT status EQUAL 0 OR NOT text MATCHES "release ([0-9]+\\.[0-9]+)")
    set(obstacle "${nvcc} does not tell its version")
  elseif(CMAKE_MATCH_1 VERSION_LESS JAX_MAGI_LEAST_NVCC)
    set(obstacle "${nvcc} is of CUDA ${CMAKE_MATCH_1}, and the kernels were tested with \
${JAX_MAGI_LEAST_NVCC} and later (an older ptxas may spill registers, which is an error)")
  endif()
  set(${result} "${obstacle}" PARENT_SCOPE)
endfunction()

# Removes from the list `architectures` those that `nvcc` cannot compile for.
function(jax_magi_keep_known_architectures nvcc architectures)
  execute_process(COMMAND ${nvcc} --list-gpu-code OUTPUT_VARIABLE known ERROR_QUIET)
  string(REPLACE "\n" ";" known "${known}")
  set(kept "")
  foreach(architecture IN LISTS ${architectures})
    string(REGEX REPLACE "-.*" "" number "${architecture}")
    if("sm_${number}" IN_LIST known)
      list(APPEND kept ${architecture})
    endif()
  endforeach()
  set(${architectures} "${kept}" PARENT_SCOPE)
endfunction()

# Sets what `target` is compiled for. Architectures that match `alike` share one pass of the
# compiler up to PTX. Their machine code is the same as with a pass for each, and takes less time.
function(jax_magi_set_architectures target alike)
  set(others ${ARGN})
  list(FILTER others EXCLUDE REGEX "^(${alike})(-|$)")
  set(codes "")
  foreach(architecture IN LISTS ARGN)
    if(architecture MATCHES "^(${alike})(-real)?$")
      list(APPEND codes sm_${CMAKE_MATCH_1})
    endif()
    if(architecture MATCHES "^80(-virtual)?$")
      list(APPEND codes compute_80)
    endif()
  endforeach()
  if(codes)
    list(JOIN codes "," codes)
    target_compile_options(
      ${target} PRIVATE
      "$<$<COMPILE_LANGUAGE:CUDA>:--generate-code=arch=compute_80$<COMMA>code=[${codes}]>")
  endif()
  if(NOT others)
    set(others OFF)
  endif()
  set_target_properties(${target} PROPERTIES CUDA_ARCHITECTURES "${others}")
endfunction()
