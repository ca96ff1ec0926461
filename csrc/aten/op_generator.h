/*
 * Makes the CPU generator from which one random operator's kernel draws, seeded by the device's
 * generator.
 */
#pragma once

#include <ATen/CPUGeneratorImpl.h>

#include <utility>

#include "../torch/graph.h"

namespace torch_openreg {

inline uint64_t mixed(uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

inline uint64_t mixedSeed(uint64_t seed, uint64_t counter) { return mixed(seed ^ mixed(counter)); }

/* The generator of an operator in a graph. Each replay seeds it again. */
class ReplayedGenerator final : public at::CPUGeneratorImpl {
 public:
  explicit ReplayedGenerator(CapturedGraph::Draw draw) : draw_(std::move(draw)) {}

  /* Called on the worker. */
  static void seedIfReplayed(const at::Generator &generator) {
    auto *replayed = dynamic_cast<ReplayedGenerator *>(generator.unsafeGetGeneratorImpl());
    if (replayed == nullptr) return;
    const auto [seed, counter] = replayed->draw_.now();
    replayed->set_current_seed(mixedSeed(seed, counter));
  }

 private:
  const CapturedGraph::Draw draw_;
};

}  // namespace torch_openreg
