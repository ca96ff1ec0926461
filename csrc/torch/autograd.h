/*
 * When the threads of PyTorch's autograd engine start.
 *
 * The engine starts a thread for each device of each registered guard at the first backward() of a
 * process, also of one that computes on the CPU alone, and from then on a forked child may not call
 * backward(). A program that never uses an openreg device must not be hindered so: at import the
 * engine makes its start with no device, and makes it again when a device comes into use.
 */
#pragma once

#include "check.h"

namespace torch_openreg {

/* Lets the engine start while it sees no device. Starts no thread. Before any backward(). */
void startAutogradWithoutDevices();

/* Starts the engine's device threads if they are not there. Before the first backward() on a
 * device. */
void startAutogradDeviceThreads();

/* At Python's exit, while it still runs: no backward() on a device may follow. A thread of the
 * engine lets go of a graph after backward() has returned, for which it takes the GIL; while Python
 * ends, that unwinds the thread through frames that may not be unwound, and the process aborts. */
void stopAutogradDeviceThreads();

/* Whether the machine seems to have a GPU. Loads no driver. */
bool mayHaveGpu();

/* Whether the calling thread is in startAutogradWithoutDevices. */
bool hidesDevicesFromAutograd() noexcept;

}  // namespace torch_openreg
