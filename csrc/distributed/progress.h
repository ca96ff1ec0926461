/*
 * How far collectives are, for the hang report.
 */
#pragma once

#include <openreg.h>

#include <chrono>
#include <string>

namespace torch_openreg {

/* Of one collective, from its call until it is over. Its owner's thread changes it, and any thread
 * may read it for a report: under one lock, that of all of them, under which no other is taken. */
class Progress {
 public:
  enum Stage {
    inputs,  // waits for what its stream has to do before, or for the collective before it
    call,    // for a rank to call it
    data     // with Gloo
  };
  Progress(std::string name, orEvent_t event);
  ~Progress() { over(); }
  Progress(const Progress &) = delete;
  Progress &operator=(const Progress &) = delete;

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
