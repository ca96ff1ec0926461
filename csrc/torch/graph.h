/*
 * Graphs for PyTorch: at::GraphImplInterface over the core's (openreg_graph.h), which
 * torch.accelerator.Graph and torch.openreg.graph use.
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

/* How many captures there are. Where there is none, nobody looks for one. */
extern std::atomic<int> capturesNow;

/* What a graph's nodes share, and need as long as one of them may run.
 *
 * Random numbers: a call that is captured leaves its generator as it is, and counts: its position.
 * A replay takes from each generator as many draws as the capture made, which advances it as the
 * calls would have, and hands what the generator had before to its nodes: `pending`, of which the
 * first node takes the oldest. Replays of a graph run one after the other, so `now` belongs to the
 * one that runs. A state that is read in a capture and set again there, as by a checkpoint, is a
 * position.
 *
 * `mutex_` is a leaf: a generator's may be held. */
class CapturedGraph {
 public:
  explicit CapturedGraph(c10::DeviceIndex device) : device_(device) {}
  ~CapturedGraph();
  CapturedGraph(const CapturedGraph &) = delete;
  CapturedGraph &operator=(const CapturedGraph &) = delete;

  struct Draw {
    std::shared_ptr<CapturedGraph> graph;
    size_t source = 0;      // which generator
    uint64_t position = 0;  // of this graph's

    /* On the worker, in a replay: the generator's seed and counter for this draw. */
    GeneratorState::Value now() const;
  };

  /* At a call that is captured. The generator stays as it is. */
  static Draw draw(const std::shared_ptr<CapturedGraph> &graph, const GeneratorStatePtr &generator);
  /* Of a generator, by what it has at the capture: where it is, and the furthest that it has
   * been. */
  struct Positions {
    uint64_t position = 0, drawn = 0;
  };
  Positions positions(const GeneratorStatePtr &generator);
  void setPosition(const GeneratorStatePtr &generator, uint64_t position);
  /* The host's memory behind a queued copy. */
  void keep(const c10::Storage &storage);

  /* Before a launch: draws from the generators. Returns which replay it will be. */
  uint64_t prepareReplay();
  /* The launch has failed: gives back what that drew, unless the replay has begun all the same. */
  void takeBack(uint64_t replay);
  /* The first node of a replay. */
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
    uint64_t resets;  // of the device: a reset drops what is queued, and leaves this behind
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

/* Of what is queued on the stream now; null if it is not being captured for one. */
std::shared_ptr<CapturedGraph> graphBeingCaptured(orStream_t stream);
bool isCapturing(orStream_t stream);
/* Of the calling thread's current stream of the device. No use of it. */
std::shared_ptr<CapturedGraph> graphOfCurrentStream(c10::DeviceIndex device);
/* The calling thread's. No use of a device. */
bool isCurrentStreamCapturing();
/* Throws, and the capture is over, if the stream is being captured: `operation` makes the host wait
 * for it. */
void refuseInCapture(const std::string &operation, orStream_t stream);
/* What was queued on the device is gone. */
void graphsAreReset(c10::DeviceIndex device);

}  // namespace torch_openreg
