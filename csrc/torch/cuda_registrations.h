/*
 * Under as_cuda(), registers an extension's C++ kernels for CUDA's keys (TORCH_LIBRARY_IMPL(ns,
 * CUDA, m)) for the device as well.
 */
#pragma once

namespace torch_openreg {

/* Its mangled name, and the function that replaces it. */
inline constexpr const char *kRegisterImpl =
    "_ZN3c1010Dispatcher12registerImplENS_12OperatorNameESt8optionalINS_11DispatchKeyEENS_"
    "14KernelFunctionES2_INS_4impl12CppSignatureEESt10unique_ptrINS_14FunctionSchemaESt14default_"
    "deleteISA_EENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE";
void *replacementOfRegisterImpl();

}  // namespace torch_openreg
