#pragma once

namespace torch_openreg {

/* Registers the hooks and the factory of graphs with PyTorch, once, after the device type has its
 * name. */
void registerHooks();

}  // namespace torch_openreg
