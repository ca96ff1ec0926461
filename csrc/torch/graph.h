/*
 * Graphs for PyTorch: at::GraphImplInterface over the core's graphs (openreg_graph.h), for
 * torch.accelerator.Graph and torch.openreg.graph.
 */
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Storage.h>
#include <openreg_graph.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "check.h"
#include "generator.h"

namespace torch_openreg {

/* The number of captures. While it is 0, no call searches for one. */
extern std::atomic<int> capturesNow;

/* What a graph's nodes share, and need while one of them may run.
 *
 * Random numbers: a captured call does not advance its generator; it gets a position, a count. A
 * replay takes from each generator as many draws as the capture made, which advances it as the
 * calls would have. It passes the generator's earlier value to its nodes through `pending`, of
 * which the first node takes the oldest. Replays of a graph run one after the other, so `now`
 * belongs to the running one. A state that is read in a capture and set again there, as a
 * checkpoint does, is a position.
 *
 * `mutex_` is a leaf: a generator's mutex may be held. */
class CapturedGraph : Uncopyable {
 public:
  explicit CapturedGraph(c10::DeviceIndex device) : device_(device) {}
  ~CapturedGraph();

  struct Draw {
    std::shared_ptr<CapturedGraph> graph;
    size_t source = 0;      // which generator
    uint64_t position = 0;  // of this graph's

    /* On the worker, in a replay: returns the generator's seed and counter for this draw. */
    GeneratorState::Value now() const;
  };

  /* Called by a captured call. The generator does not change. */
  static Draw draw(const std::shared_ptr<CapturedGraph> &graph, const GeneratorStatePtr &generator);
  /* A generator's positions in the capture: the current one, and the furthest so far. */
  struct Positions {
    uint64_t position = 0, drawn = 0;
  };
  Positions positions(const GeneratorStatePtr &generator);
  void setPosition(const GeneratorStatePtr &generator, uint64_t position);
  /* Keeps the host memory of a queued copy. */
  void keep(const c10::Storage &storage);

  /* Called before a launch: draws from the generators, and returns the replay's number. */
  uint64_t prepareReplay();
  /* Called after a failed launch: returns the draws, unless the replay has begun. */
  void takeBack(uint64_t replay);
  /* Called by the first node of a replay. */
  void begin();

 private:
  struct Source : Positions {
    GeneratorStatePtr generator;
  };
  Source *find(const GeneratorStatePtr &generator);
  Source &sourceOf(const GeneratorStatePtr &generator);
  std::vector<Source> sources();

  struct Pending {
    uint64_t number;
    uint64_t resets;  // of the device: a reset cancels queued work, and this entry stays
    std::vector<GeneratorState::Value> states;
  };

  const c10::DeviceIndex device_;
  std::mutex mutex_;
  uint64_t prepared_ = 0;
  std::vector<Source> sources_;
  std::vector<GeneratorState::Value> now_;
  std::deque<Pending> pending_;
  std::vector<c10::Storage> kept_;
};

/* The graph for which the stream is being captured; null if there is none. */
std::shared_ptr<CapturedGraph> graphBeingCaptured(orStream_t stream);
bool isCapturing(orStream_t stream);
/* The same for the calling thread's current stream of the device. Does not use the device. */
std::shared_ptr<CapturedGraph> graphOfCurrentStream(c10::DeviceIndex device);
/* Whether the calling thread's current stream is being captured. Does not use a device. */
bool isCurrentStreamCapturing();
/* If the stream is being captured, ends the capture and throws: `operation` makes the host wait for
 * the stream. */
void refuseInCapture(const std::string &operation, orStream_t stream);
/* Called after a reset: the work that was queued on the device is gone. */
void graphsAreReset(c10::DeviceIndex device);

}  // namespace torch_openreg
