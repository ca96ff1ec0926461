/*
 * Kernels that an extension in C++ registers for CUDA's keys (TORCH_LIBRARY_IMPL(ns, CUDA, m)),
 * under as_cuda(): the device's, too.
 */
#pragma once

namespace torch_openreg {

/* Its mangled name, and what is called in its place. */
inline constexpr const char *kRegisterImpl =
    "_ZN3c1010Dispatcher12registerImplENS_12OperatorNameESt8optionalINS_11DispatchKeyEENS_"
    "14KernelFunctionES2_INS_4impl12CppSignatureEESt10unique_ptrINS_14FunctionSchemaESt14default_"
    "deleteISA_EENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE";
void *replacementOfRegisterImpl();

}  // namespace torch_openreg
