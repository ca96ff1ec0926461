/*
 * Graphs (torch.accelerator.Graph): not built, and refused where one is made.
 */
#pragma once

namespace torch_openreg {

/* Tells PyTorch whom to ask for a graph. After the device type has its name. */
void registerGraph();

}  // namespace torch_openreg
