/*
 * `captures` maps the core's id of each capture to what its nodes share, so that any thread that
 * queues on a stream finds it. Its lock is a leaf.
 */
#include "graph.h"

#include <ATen/core/GraphImplInterface.h>
#include <c10/core/DeviceType.h>
#include <c10/util/ScopeExit.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <map>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "device.h"
#include "gil.h"
#include "host_allocator.h"
#include "mempool.h"
#include "module.h"
#include "sanitizer.h"
#include "stream.h"

namespace torch_openreg {

std::atomic<int> capturesNow{0};

namespace {

/* Counts the resets of each device. */
std::array<std::atomic<uint64_t>, OPENREG_MAX_DEVICES> resets{};

struct Captures {
  std::mutex mutex;
  std::map<uint64_t, std::shared_ptr<CapturedGraph>> byId;
};

/* Autograd's threads may call this while the process exits. */
Captures &captures() { return leaked<Captures>(); }

/* The core's id of the capture, or 0. A stream that was destroyed gives 0 too: the next call that
 * queues on it returns the error. */
uint64_t captureOf(orStream_t stream) {
  orCaptureStatus status = orCaptureStatusNone;
  uint64_t id = 0;
  if (C10_LIKELY(capturesNow.load(std::memory_order_relaxed) == 0)) return 0;
  if (orStreamGetCaptureInfo(stream, &status, &id) != orSuccess) orGetLastError();
  return id;
}

}  // namespace

bool isCapturing(orStream_t stream) { return captureOf(stream) != 0; }

std::shared_ptr<CapturedGraph> graphBeingCaptured(orStream_t stream) {
  const uint64_t id = captureOf(stream);
  if (id == 0) return nullptr;
  std::lock_guard<std::mutex> lock(captures().mutex);
  const auto found = captures().byId.find(id);
  return found == captures().byId.end() ? nullptr : found->second;
}

std::shared_ptr<CapturedGraph> graphOfCurrentStream(c10::DeviceIndex device) {
  if (C10_LIKELY(capturesNow.load(std::memory_order_relaxed) == 0)) return nullptr;
  return graphBeingCaptured(currentStreamHandle(device));
}

bool isCurrentStreamCapturing() {
  return C10_UNLIKELY(capturesNow.load(std::memory_order_relaxed) != 0) &&
         isCapturing(currentStreamHandle(currentDevice()));
}

void refuseInCapture(const std::string &operation, orStream_t stream) {
  OPENREG_CHECK(
      orStreamRefuseCapture(stream, operation.c_str(),
                            "it makes the host wait for the device, which runs nothing "
                            "before the replay: do it before the capture or after a replay"));
}

void graphsAreReset(c10::DeviceIndex device) {
  resets[device].fetch_add(1, std::memory_order_relaxed);
}

// ---- Random numbers -----------------------------------------------------------------------------

/* mutex_ held. */
CapturedGraph::Source *CapturedGraph::find(const GeneratorStatePtr &generator) {
  const auto found = std::find_if(sources_.begin(), sources_.end(), [&](const Source &source) {
    return source.generator == generator;
  });
  return found == sources_.end() ? nullptr : &*found;
}

/* mutex_ held. */
CapturedGraph::Source &CapturedGraph::sourceOf(const GeneratorStatePtr &generator) {
  if (Source *known = find(generator)) return *known;
  Source &made = sources_.emplace_back();
  made.generator = generator;
  return made;
}

CapturedGraph::Draw CapturedGraph::draw(const std::shared_ptr<CapturedGraph> &graph,
                                        const GeneratorStatePtr &generator) {
  std::lock_guard<std::mutex> lock(graph->mutex_);
  Source &source = graph->sourceOf(generator);
  const Draw draw{graph, static_cast<size_t>(&source - graph->sources_.data()), source.position++};
  source.drawn = std::max(source.drawn, source.position);
  return draw;
}

CapturedGraph::Positions CapturedGraph::positions(const GeneratorStatePtr &generator) {
  std::lock_guard<std::mutex> lock(mutex_);
  const Source *known = find(generator);
  if (known == nullptr) return {};
  return *known;
}

void CapturedGraph::setPosition(const GeneratorStatePtr &generator, uint64_t position) {
  std::lock_guard<std::mutex> lock(mutex_);
  sourceOf(generator).position = position;
}

GeneratorState::Value CapturedGraph::Draw::now() const {
  std::lock_guard<std::mutex> lock(graph->mutex_);
  const auto [seed, counter] = graph->now_.at(source);
  return {seed, counter + position};
}

std::vector<CapturedGraph::Source> CapturedGraph::sources() {
  std::lock_guard<std::mutex> lock(mutex_);
  return sources_;
}

uint64_t CapturedGraph::prepareReplay() {
  Pending replay{0, resets[device_].load(std::memory_order_relaxed), {}};
  for (const Source &source : sources())
    replay.states.push_back(source.generator->draw(source.drawn));
  std::lock_guard<std::mutex> lock(mutex_);
  replay.number = ++prepared_;
  pending_.push_back(std::move(replay));
  return prepared_;
}

void CapturedGraph::takeBack(uint64_t replay) {
  std::vector<GeneratorState::Value> states;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = std::find_if(pending_.begin(), pending_.end(),
                                    [&](const Pending &other) { return other.number == replay; });
    if (found == pending_.end()) return;
    states = std::move(found->states);
    pending_.erase(found);
  }
  const std::vector<Source> drawn = sources();
  for (size_t i = 0; i < states.size(); ++i)
    drawn[i].generator->giveBack(states[i].counter, drawn[i].drawn);
}

void CapturedGraph::begin() {
  std::lock_guard<std::mutex> lock(mutex_);
  const uint64_t now = resets[device_].load(std::memory_order_relaxed);
  while (!pending_.empty() && pending_.front().resets != now) pending_.pop_front();
  if (pending_.empty()) return;
  now_ = std::move(pending_.front().states);
  pending_.pop_front();
}

/* May run on a worker, after the last replay. */
CapturedGraph::~CapturedGraph() { retirePinned(std::move(kept_)); }

void CapturedGraph::keep(const c10::Storage &storage) {
  std::lock_guard<std::mutex> lock(mutex_);
  kept_.push_back(storage);
}

// ---- at::GraphImplInterface ---------------------------------------------------------------------

namespace {

constexpr c10::MempoolId_t kNoPool{0, 0};
using Shared = std::shared_ptr<CapturedGraph>;

orError_t beginReplay(void *args) {
  (**static_cast<Shared **>(args))->begin();
  return orSuccess;
}

using Names = std::map<const void *, std::string>;

/* _variables.Variables, which any thread may release. */
using Variables = std::shared_ptr<py::object>;

void releaseVariables(py::object *variables) {
  if (!interpreterRuns()) return;
  const py::gil_scoped_acquire gil;
  delete variables;
}

/* Names the inputs of the stream's capture by the variables that hold them now, which it returns:
 * null if the capture is over. */
Variables nameInputs(orStream_t stream, uint64_t capture) {
  const py::gil_scoped_acquire gil;
  Names names;
  const auto collect = [](const void *begin, size_t, char *, void *all) {
    (*static_cast<Names *>(all))[begin];
  };
  const auto give = [](const void *begin, size_t, char name[64], void *all) {
    std::snprintf(name, 64, "%s", (*static_cast<Names *>(all))[begin].c_str());
  };
  if (orSanitizerInputs(stream, collect, &names) != orSuccess) {
    orGetLastError();  // the end of the capture returns an error of its own
    return nullptr;
  }
  py::list begins;
  for (const auto &input : names) begins.append(reinterpret_cast<uintptr_t>(input.first));
  const auto module = py::module_::import("torch_openreg.openreg.sanitizer._variables");
  Variables variables(new py::object(module.attr("Variables")(capture, begins)), &releaseVariables);
  const py::dict found = variables->attr("names")();
  for (auto &[begin, name] : names) {
    const py::int_ key(reinterpret_cast<uintptr_t>(begin));
    if (found.contains(key)) name = found[key].cast<std::string>();
  }
  OPENREG_CHECK(orSanitizerInputs(stream, give, &names));
  return variables;
}

/* The addresses of the memory that the current stream's capture uses and does not own. */
std::vector<uintptr_t> graphReads() {
  std::vector<uintptr_t> begins;
  const auto collect = [](const void *begin, size_t, char *, void *all) {
    static_cast<std::vector<uintptr_t> *>(all)->push_back(reinterpret_cast<uintptr_t>(begin));
  };
  if (orSanitizerInputs(currentStreamHandle(currentDevice()), collect, &begins) != orSuccess)
    orGetLastError();  // the end of the capture returns an error of its own
  return begins;
}

/* Before a replay: reports the inputs of which the program's variables hold others now. */
void checkVariables(const Variables &variables) {
  if (variables == nullptr) return;
  const py::gil_scoped_acquire gil;
  variables->attr("check")();
}

void dropShared(void *args) { delete *static_cast<Shared **>(args); }

/* Queues the node that gives each replay its random numbers. It precedes all branches. */
void queueBegin(orStream_t stream, const Shared &graph) {
  auto *shared = new Shared(graph);
  int queued = 0;
  orLaunch launch{};
  launch.size = sizeof(launch);
  launch.stream = stream;
  launch.fn = &beginReplay;
  launch.args = &shared;
  launch.args_size = sizeof(shared);
  launch.drop = &dropShared;
  launch.name = "openreg::graph_begin";
  launch.flags = orLaunchTold | orLaunchAnyThread;
  launch.queued = &queued;
  const orError_t error = orLaunchKernelEx(&launch);
  if (queued == 0) delete shared;
  OPENREG_CHECK(error);
}

class OpenRegGraph final : public at::GraphImplInterface, Uncopyable {
 public:
  explicit OpenRegGraph(const at::GraphImplArgs &args) : keepGraph_(args.keep_graph) {}
  ~OpenRegGraph() override { OpenRegGraph::reset(); }

  void capture_begin(c10::MempoolId_t pool, at::GraphCaptureMode mode) override {
    TORCH_CHECK(!stream_ && captured().graph == 0,
                "this graph has been captured already: reset() it, or capture another");
    const OpenRegStream stream = getCurrentOpenRegStream();
    const orStream_t handle = stream.stream();
    getDefaultGenerator(stream.device_index());  // creates it: a later one would take any seed
    OPENREG_CHECK(orStreamBeginCapture(handle));
    stream_ = stream;
    strict_ = mode == at::GraphCaptureMode::Global || mode == at::GraphCaptureMode::ThreadLocal;
    begun_by_ = std::this_thread::get_id();
    capturesNow.fetch_add(1, std::memory_order_relaxed);
    id_ = captureOf(handle);
    const Shared shared = std::make_shared<CapturedGraph>(stream.device_index());
    {
      std::lock_guard<std::mutex> lock(captures().mutex);
      captures().byId[id_] = shared;
    }
    {
      std::lock_guard<std::mutex> lock(mutex_);
      captured_.shared = shared;
      captured_.device = stream.device_index();
    }
    try {
      queueBegin(handle, shared);
      allocateFrom(pool == kNoPool ? newMemPoolId(false) : pool);
    } catch (...) {
      reset();
      throw;
    }
  }

  void capture_end() override {
    TORCH_CHECK(stream_, "capture_end() without a capture_begin() before it");
    const OpenRegStream stream = *stream_;
    TORCH_CHECK(getCurrentOpenRegStream(stream.device_index()) == stream,
                "a capture must end on the stream on which it began: make it the current one");
    TORCH_CHECK(!strict_ || begun_by_ == std::this_thread::get_id(),
                "capture_end() on another thread than capture_begin(), which only the mode "
                "\"relaxed\" allows");
    Variables variables;
    if (sanitizerActive()) variables = nameInputs(stream.stream(), id_);
    orGraph_t graph = 0;
    const orError_t error = orStreamEndCapture(stream.stream(), &graph);
    endCapture();
    if (error != orSuccess) {
      reset();
      throwError(error, {__func__, __FILE__, __LINE__});
    }
    {
      std::lock_guard<std::mutex> lock(mutex_);
      captured_.graph = graph;
      captured_.variables = std::move(variables);
    }
    size_t nodes = 0;
    OPENREG_CHECK(orGraphGetNodeCount(graph, &nodes));
    if (nodes <= 1)  // only the node that begins a replay
      TORCH_WARN("this graph is empty: nothing was queued on the stream that was captured, one of ",
                 stream.device());
  }

  void instantiate() override {
    TORCH_CHECK(captured().graph != 0, "instantiate() needs a graph that has been captured");
  }

  void replay() override {
    const Captured now = hold();
    const auto letGo = c10::make_scope_exit([&] { releasePool(now.device, now.pool); });
    DeviceSwitch device(now.device);
    if (sanitizerActive()) checkVariables(now.variables);
    const uint64_t replay = now.shared->prepareReplay();
    const orError_t error = orGraphReplay(now.graph, currentStreamHandle(now.device));
    if (C10_UNLIKELY(error != orSuccess)) now.shared->takeBack(replay);
    OPENREG_CHECK(error);
    if (sanitizerActive()) raiseRaces();
  }

  void reset() noexcept override {
    if (orInForkedChild()) return;  // nothing can be released there
    if (stream_) {
      orGraph_t abandoned = 0;
      const OpenRegStream stream = *stream_;
      endCapture();
      if (orStreamEndCapture(static_cast<orStream_t>(stream.id()), &abandoned) == orSuccess)
        orGraphDestroy(abandoned);
      else
        orGetLastError();
    }
    Captured last;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      std::swap(last, captured_);
    }
    if (last.graph != 0 && orGraphDestroy(last.graph) != orSuccess) orGetLastError();
    if (last.pool != kNoPool) releasePool(last.device, last.pool);
  }

  c10::MempoolId_t pool() const override {
    const Captured now = captured();
    TORCH_CHECK(now.graph != 0, "pool() needs a graph that has been captured");
    return now.pool;
  }

  void enable_debug_mode() override { debug_ = true; }

  void debug_dump(const std::string &path) override {
    const Captured now = captured();
    TORCH_CHECK(now.graph != 0, "debug_dump() needs a graph that has been captured");
    if (!debug_ && !keepGraph_) { /* as CUDA's, which has no more than what it launches */
      TORCH_WARN("debug_dump(\"", path,
                 "\") writes nothing: call enable_debug_mode() first, or make the graph with "
                 "keep_graph=True");
      return;
    }
    const py::gil_scoped_acquire gil;
    const auto pictures = py::module_::import("torch_openreg.openreg._graph_pictures");
    pictures.attr("picture_path")(path); /* refuses a path that is the picture's */
    OPENREG_CHECK(orGraphDebugDotPrint(now.graph, path.c_str()));
    pictures.attr("draw")(path);
  }

 private:
  /* What a replay launches, and what a reset releases. */
  struct Captured {
    orGraph_t graph = 0;
    Shared shared;
    Variables variables;  // null: the sanitizer was off
    c10::MempoolId_t pool = kNoPool;
    c10::DeviceIndex device = -1;
  };

  Captured captured() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return captured_;
  }

  /* Holds the graph with its pool; the caller releases the pool. A launch may sleep until a full
   * stream has room. A reset at that time gives back memory without seeing the launch. */
  Captured hold() const {
    std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK(captured_.graph != 0, "replay() needs a graph that has been captured");
    retainPool(captured_.device, captured_.pool);
    return captured_;
  }

  void allocateFrom(c10::MempoolId_t pool) {
    const c10::DeviceIndex device = stream_->device_index();
    retainPool(device, pool);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      captured_.pool = pool;
    }
    beginAllocateToPool(device, pool, [id = id_](orStream_t on) { return captureOf(on) == id; });
    allocates_ = true;
  }

  void endCapture() {
    stream_.reset();
    if (orInForkedChild()) return;  // another thread's locks may be held for ever
    const Captured now = captured();
    if (allocates_) endAllocateToPool(now.device, now.pool);
    allocates_ = false;
    {
      std::lock_guard<std::mutex> lock(captures().mutex);
      captures().byId.erase(id_);
    }
    capturesNow.fetch_sub(1, std::memory_order_relaxed);
  }

  const bool keepGraph_;
  bool debug_ = false;
  std::optional<OpenRegStream> stream_;  // while it captures
  bool strict_ = false;                  // the thread that began it ends it
  std::thread::id begun_by_;
  uint64_t id_ = 0;
  bool allocates_ = false;    // the capture allocates from the pool
  mutable std::mutex mutex_;  // before the pools': one thread may replay what another resets
  Captured captured_;
};

/* Registered under both names of the device: before and after it is renamed. */
[[maybe_unused]] const bool added = addBinder([](py::module_ &m) {
  /* A capture of the current stream, whose owner compares its inputs' addresses at each replay. */
  m.def("_graph_inputs_checked",
        [] { OPENREG_CHECK(orSanitizerInputsChecked(currentStreamHandle(currentDevice()))); });
  m.def("_graph_reads", &graphReads);
  m.def("_graph_input_replaced", [](uint64_t capture, uintptr_t begin) {
    OPENREG_CHECK(orSanitizerInputReplaced(capture, reinterpret_cast<const void *>(begin)));
  });
});

[[maybe_unused]] const bool registered = [] {
  const auto create = [](const at::GraphImplArgs &args) -> std::unique_ptr<at::GraphImplInterface> {
    return std::make_unique<OpenRegGraph>(args);
  };
  for (const char *name : {"OPENREG", "PRIVATEUSEONE"})
    at::GraphImplRegistry()->Register(name, create);
  return true;
}();

}  // namespace

}  // namespace torch_openreg
