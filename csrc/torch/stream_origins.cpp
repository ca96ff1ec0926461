/*
 * Keeps the origins of streams. `mutex` guards `origins`, which has at most the pools' streams,
 * because only those are noted.
 */
#include <Python.h>

#include "stream_origins.h"

#include <pybind11/pybind11.h>

#include <mutex>
#include <unordered_map>

#include "gil.h"
#include "module.h"

namespace py = pybind11;

namespace torch_openreg {

namespace {

std::mutex mutex;
using Origins = std::unordered_map<orStream_t, StreamOrigin>;
Origins &origins() { return leaked<Origins>(); }

void nameStream(orStream_t stream, const std::string &name) {
  std::lock_guard<std::mutex> lock(mutex);
  origins()[stream].name = name;
}

[[maybe_unused]] const bool added =
    addBinder([](py::module_ &m) { m.def("_name_stream", &nameStream); });

}  // namespace

void noteStreamMade(orStream_t stream) {
  StreamOrigin origin;
  try {
    if (mayBeInPython()) origin.stack = gatherStack();
  } catch (...) {  // a stream without a line
  }
  std::lock_guard<std::mutex> lock(mutex);
  std::swap(origins()[stream], origin);
}

StreamOrigin streamOrigin(orStream_t stream) {
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = origins().find(stream);
  return found == origins().end() ? StreamOrigin{} : found->second;
}

}  // namespace torch_openreg
