/*
 * Texts of errors, which Python lays out with the program's names and lines
 * (torch_openreg/openreg/_texts.py).
 */
#pragma once

#include <c10/core/Device.h>

#include <string>
#include <vector>

#include "stacks.h"

namespace torch_openreg {

/* The core's text of an error. */
std::string errorText(const std::string &text);

/* What follows on the text of a kernel's own error: which kernel raised it, where it was queued,
 * and under as_cuda() the words of CUDA's error, if there are any. Two lines at least. */
std::vector<std::string> failureLines(const std::string &kernel, c10::Device device,
                                      unsigned others, const PythonStack &stack,
                                      const std::string &words);

/* What follows on the text of an error for want of memory: who has how much. */
std::string memoryText(c10::DeviceIndex device);

}  // namespace torch_openreg
