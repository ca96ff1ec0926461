#pragma once

namespace torch_openreg {

/* Tells PyTorch of our hooks, and whom to ask for a graph, once. After the device type has its
 * name. */
void registerHooks();

}  // namespace torch_openreg
