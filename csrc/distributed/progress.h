/*
 * The progress of collectives, for the hang report.
 */
#pragma once

#include <chrono>
#include <string>

#include "../torch/check.h"

namespace torch_openreg {

/* The progress of one collective, from its call until its end. Its owner's thread changes it, and
 * any thread may read it for a report. One lock guards all of them; no other is taken under it. */
class Progress : Uncopyable {
 public:
  enum Stage {
    inputs,  // waits for earlier work of its stream, or for the previous collective
    call,    // waits for a rank to call it
    data     // with Gloo
  };
  Progress(std::string name, orEvent_t event);
  ~Progress() { over(); }

  void at(Stage stage, std::string peer = "");
  void over();

  std::string line() const;

 private:
  const std::string name_;
  const orEvent_t event_;
  const std::chrono::steady_clock::time_point called_ = std::chrono::steady_clock::now();
  Stage stage_ = inputs;
  std::string peer_;
};

}  // namespace torch_openreg
