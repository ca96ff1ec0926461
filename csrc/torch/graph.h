/*
 * Graphs for PyTorch: at::GraphImplInterface over the core's (openreg_graph.h), which torch.accelerator.Graph and
 * torch.openreg.graph use.
 */
#pragma once

#include <ATen/core/Generator.h>
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

namespace torch_openreg {

/* How many captures there are. Where there is none, nobody looks for one. */
extern std::atomic<int> capturesNow;

/* What a graph's nodes share, and need as long as one of them may run.
 *
 * Random numbers: the nodes draw in the same order at each replay, as the calls did that were captured. So a replay
 * takes from each generator as many draws as the capture counted, which advances it as the calls would have, and hands
 * what the generator had before to its nodes: `pending`, of which the first node takes the oldest. Replays of a graph
 * run one after the other, so `now` belongs to the one that runs. */
class CapturedGraph {
 public:
  struct Draw {
    std::shared_ptr<CapturedGraph> graph;
    size_t source = 0;   // which generator
    uint64_t number = 0;  // how many it had given before in this graph

    /* On the lane, in a replay: the generator's seed and counter for this draw. */
    std::pair<uint64_t, uint64_t> now() const;
  };

  /* At a call that is captured. The generator stays as it is. */
  static Draw draw(const std::shared_ptr<CapturedGraph> &graph, const at::Generator &generator);
  /* The host's memory behind a queued copy. */
  void keep(const c10::Storage &storage);

  /* Before a launch: advances the generators. */
  void prepareReplay();
  /* The launch has failed. */
  void takeBack();
  /* The first node of a replay. */
  void begin();

 private:
  struct State {
    uint64_t seed, counter;
  };
  struct Source {
    at::Generator generator;
    uint64_t drawn;
  };
  struct Pending {
    uint64_t resets;  // of devices: a reset drops what is queued, and leaves this behind
    std::vector<State> states;
  };

  std::mutex mutex_;
  std::vector<Source> sources_;
  std::vector<State> now_;
  std::deque<Pending> pending_;
  std::vector<c10::Storage> kept_;
};

/* Of what is queued on the stream now; null if it is not being captured for one. */
std::shared_ptr<CapturedGraph> graphBeingCaptured(orStream_t stream);
bool isCapturing(orStream_t stream);
/* The calling thread's. No use of a device. */
bool isCurrentStreamCapturing();
/* Throws, and the capture is over, if the calling thread's current stream is being captured: `operation` makes the host
 * wait. */
void refuseInCapture(const std::string &operation);
/* What was queued on a device is gone. */
void graphsAreReset();

}  // namespace torch_openreg
