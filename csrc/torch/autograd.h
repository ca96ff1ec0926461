/*
 * Controls when the threads of PyTorch's autograd engine start.
 *
 * The engine starts a thread for each device of each registered guard at the first backward() of a
 * process, even if that computes on the CPU alone. From then on a forked child may not call
 * backward(). A program that never uses an openreg device must not lose that: at import the engine
 * starts with no device, and it starts again when a device comes into use.
 */
#pragma once

#include "check.h"

namespace torch_openreg {

/* Starts the engine while no device is visible to it, so it starts no thread. Call it before any
 * backward(). */
void startAutogradWithoutDevices();

/* Starts the engine's device threads unless they exist. Call it before the first backward() on a
 * device. */
void startAutogradDeviceThreads();

/* Called at Python's exit, while Python still runs. No backward() on a device may follow. After
 * backward() has returned, a thread of the engine releases a graph, for which it takes the GIL.
 * While Python ends, that would unwind the thread through frames that must not be unwound, and the
 * process would abort. */
void stopAutogradDeviceThreads();

/* Whether the machine seems to have a GPU. Loads no driver. */
bool mayHaveGpu();

/* Whether the calling thread is in startAutogradWithoutDevices. */
bool hidesDevicesFromAutograd() noexcept;

}  // namespace torch_openreg
